"""Token files.

A token file is 1024 bytes of JSON header, padded with spaces, and then the tokens, little-endian uint16 or uint32. It
is mapped into memory, never read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from flashspan.files import parse_json, require_file

from .tokenizer import NAMED, Tokenizer

FORMAT = "flashspan tokens 1"
HEADER_BYTES = 1024
NUM_RUNS, RUN = 256, 1024  # a fingerprint reads this many runs of this many tokens


@dataclass(frozen=True)
class TokenFile:
    """Tokens and where they come from: a mapped file, or the text in the package."""

    path: Path
    tokens: np.ndarray
    vocab_size: int
    tokenizer: str
    end: int

    def may_be_of(self, tokenizer: str, vocab_size: int | None) -> bool:
        """Whether a tokenizer with this name (empty if unknown) and size (None if unknown) may have made these tokens.

        A name is a path, and the same file may have several paths, so only names of tokenizers in the package count."""
        names = {self.tokenizer, tokenizer}
        differs = "" not in names and len(names) == 2 and bool(names & set(NAMED))
        return not differs and vocab_size in (None, self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that identifies these tokens, the same in memory and in a file. A small file is read whole; of a large
        one, only evenly spaced runs from the first to the last, so a terabyte costs a few hundred pages."""
        digest = hashlib.blake2b(f"{len(self.tokens)} {self.vocab_size} {self.end}".encode(), digest_size=16)
        for run in self._runs():
            digest.update(run.astype("<u4").tobytes())
        return digest.hexdigest()

    def check(self) -> None:
        """ValueError if a token that `fingerprint` reads is not in the vocabulary."""
        for run in self._runs():
            self.check_tokens(run)

    def check_tokens(self, tokens: np.ndarray) -> None:
        """ValueError if one of these tokens is not in the vocabulary."""
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(
                f"{self.path} is damaged: its header has a vocabulary of {self.vocab_size}, and the file holds "
                f"number {largest}; make it again"
            )

    def _runs(self) -> Iterator[np.ndarray]:
        last = max(0, len(self.tokens) - RUN)
        for start in np.unique(np.linspace(0, last, NUM_RUNS).astype(np.int64)):
            yield self.tokens[start : start + RUN]


@contextmanager
def write_tokens(path: str | Path, tokenizer: Tokenizer) -> Iterator[TokenWriter]:
    """Yield a writer for a token file. The file appears whole when the block ends, or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.writing")
    writer = TokenWriter(half, tokenizer)
    try:
        yield writer
        writer.close()
        half.replace(path)
    finally:
        writer.stream.close()
        half.unlink(missing_ok=True)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The dtype in which a tokenizer's tokens are stored."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def make_header(tokenizer: Tokenizer, num_tokens: int) -> bytes:
    """The header of a token file; ValueError if the tokenizer's name does not fit."""
    header = {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer).name,
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "end": tokenizer.end,
    }
    line = json.dumps(header).encode() + b"\n"
    if len(line) > HEADER_BYTES:
        raise ValueError(
            f"the header of a token file has at most {HEADER_BYTES} bytes: got {len(line)} with the tokenizer's "
            f"name {tokenizer.name}; copy that file to a shorter path and use the copy"
        )
    return line


class TokenWriter:
    """Adds tokens to a file, and at the end writes their number to its header."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_tokens = tokenizer, 0
        self.dtype = token_dtype(tokenizer)
        self.stream = path.open("wb")
        self.stream.write(b" " * HEADER_BYTES)

    def add(self, tokens: Iterable[int] | np.ndarray) -> None:
        data = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=self.dtype)
        self.stream.write(data.tobytes())
        self.num_tokens += len(data)

    def close(self) -> None:
        self.stream.seek(0)
        self.stream.write(make_header(self.tokenizer, self.num_tokens))


def open_tokens(path: str | Path) -> TokenFile:
    """Map a token file, after comparing its header with its length."""
    path = Path(path)
    path = path / "train.bin" if path.is_dir() else path
    require_file(path, "make it with `flashspan prepare`, or name another")
    with path.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    try:
        header = parse_json(head.split(b"\n", 1)[0], strict=True)
        if header["format"] != FORMAT or header["dtype"] not in ("uint16", "uint32"):
            raise KeyError("format")
        num_tokens, vocab_size, end = (header[key] for key in ("num_tokens", "vocab_size", "end"))
        if not all(type(number) is int for number in (num_tokens, vocab_size, end)):
            raise TypeError("a count is not a whole number")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a token file: no {FORMAT!r} header; make it with `flashspan prepare`"
        ) from error
    if num_tokens < 0 or vocab_size < 1 or not -1 <= end < vocab_size:
        raise ValueError(
            f"{path} is damaged: its header has {num_tokens} tokens, a vocabulary of {vocab_size} and the end token "
            f"{end}; make it again"
        )
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    expected, size = HEADER_BYTES + num_tokens * dtype.itemsize, path.stat().st_size
    if size != expected:
        raise ValueError(
            f"{path} is truncated or damaged: it has {size} bytes, its header gives {expected}; make it again"
        )
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(num_tokens,))
    return TokenFile(path, tokens, vocab_size, str(header.get("tokenizer", "")), end)
