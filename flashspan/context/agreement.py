"""What ranks compare before a call to attention: masks and settings as numbers, and error messages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from flashspan.kernels.masks import Blocks, Rows

COMPARED = (
    "strategy, layout or options",
    "kind of device",
    "batch",
    "query heads",
    "kv heads",
    "head size",
    "dtype",
    "causal, window, mask, scale, dropout or seed",
)
TEXT = 64  # numbers that carry an error message, 7 bytes each


def digest(value: object) -> int:
    """A hash of settings or a mask, equal on all ranks for equal values. It is at least 2**40."""
    data = repr(value).encode()
    if isinstance(value, Rows):
        data += value.start.cpu().numpy().tobytes() + value.end.cpu().numpy().tobytes()
    if isinstance(value, Blocks):
        data += value.digest()
    return 2**40 + int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def encode(text: str) -> list[int]:
    data = text.encode()[: 7 * TEXT].ljust(7 * TEXT, b"\0")
    return [int.from_bytes(data[i : i + 7], "big") for i in range(0, len(data), 7)]


def decode(numbers: Sequence[int]) -> str:
    return b"".join(number.to_bytes(7, "big") for number in numbers).rstrip(b"\0").decode(errors="replace")
