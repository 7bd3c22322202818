"""The bits of partial tiles: bool [n, rows, columns] packed into int32 words of 32 columns.

Bit c of word w of a row is column 32 * w + c, so a kernel tests a row's columns by shifting one register.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32
CHUNK = 2**25
"""Elements of a mask that are processed at a time, which bounds the temporary memory."""


def pack(visible: Tensor) -> Tensor:
    """bool [n, rows, columns] as int32 [n, rows, columns / 32]."""
    num, rows, columns = visible.shape
    octets = visible.view(torch.uint8).reshape(num, rows, columns // 8, 8)
    shift = torch.arange(8, dtype=torch.uint8, device=visible.device)
    # Bits of one byte do not carry into each other: their sum is their union.
    return (octets << shift).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """The inverse of `pack`: bool [n, rows, columns]."""
    shift = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shift) & 1).flatten(-2).bool()


def transpose(words: Tensor) -> Tensor:
    """The bits of the same tiles with rows and columns exchanged."""
    _, rows, width = words.shape
    step = max(1, CHUNK // (rows * width * WORD))
    return torch.cat([pack(unpack(part).mT.contiguous()) for part in words.split(step)])


def odd_numbers(num: int, device: torch.device) -> Tensor:
    """The weights of a tile's words in its hash, int64 [num], the same in every process."""
    random = torch.Generator("cpu").manual_seed(0x5EED)
    return torch.randint(-(2**62), 2**62, (num,), generator=random, device="cpu").to(device) | 1


def share(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tiles, in an order that depends on their contents, and each tile's number in it, int32 [n].

    Equal tiles are found by a 64-bit hash; tiles with equal hashes are then compared bit by bit.
    """
    num = len(words)
    if num < 2:
        return words, torch.arange(num, dtype=torch.int32, device=words.device)
    flat = words.reshape(num, -1)
    odd = odd_numbers(flat.shape[1], words.device)
    step = max(1, CHUNK // flat.shape[1])
    hashes = torch.cat([(part.long() * odd).sum(-1) for part in flat.split(step)])
    _, number, counts = torch.unique(hashes, return_inverse=True, return_counts=True)
    first = torch.zeros_like(counts)
    # Take any of the tiles with equal hashes, because they are compared below.
    first[number.flip(0)] = torch.arange(num - 1, -1, -1, device=words.device)
    chosen = words[first]
    parts = zip(flat.split(step), number.split(step), strict=True)
    if not all(torch.equal(part, chosen[of].flatten(1)) for part, of in parts):  # one hash for different tiles
        return words, torch.arange(num, dtype=torch.int32, device=words.device)
    return chosen, number.int()
