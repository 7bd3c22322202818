"""Samples addressed by number: the tokens of a step depend only on the seed and the step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashspan.model import IGNORE

from .tokens import TokenFile


@dataclass(frozen=True)
class Samples:
    """Samples 0, 1, 2, ..., each a run of `sequence` + 1 tokens. Each pass over the file has another order."""

    file: TokenFile
    sequence: int
    seed: int
    documents: bool = False

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise ValueError(
                f"a sample takes {self.sequence + 1} tokens: {self.file.path} has {len(self.file.tokens)}; "
                "lower data.sequence or prepare more text"
            )
        if self.documents and self.file.end < 0:
            raise ValueError(
                f"{self.file.path} has no end token, which data.documents needs: set data.documents to false"
            )

    @property
    def num_windows(self) -> int:
        return (len(self.file.tokens) - 1) // self.sequence

    def window(self, number: int) -> int:
        """The position in the file where sample `number` begins."""
        epoch, index = divmod(number, self.num_windows)
        return permute(index, self.num_windows, f"{self.seed}/{epoch}") * self.sequence

    def read(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """tokens and targets, int64 [B, T]: targets are the next tokens, shifted here, before any split."""
        rows = [np.asarray(self.file.tokens[at : at + self.sequence + 1]) for at in map(self.window, numbers)]
        stacked = np.stack(rows)
        self.file.check_tokens(stacked)
        whole = torch.from_numpy(stacked.astype(np.int64))
        tokens, targets = whole[:, :-1], whole[:, 1:].clone()
        if self.documents:
            targets[tokens == self.file.end] = IGNORE
        return tokens, targets

    def first_keys(self, tokens: Tensor) -> Tensor:
        """The first position of each token's document, int64 [B, T]."""
        places = torch.arange(1, self.sequence + 1)
        begins = torch.where(tokens == self.file.end, places, 0).cummax(1).values
        return torch.cat((torch.zeros_like(begins[:, :1]), begins[:, :-1]), 1)


def permute(index: int, size: int, key: str) -> int:
    """The element at `index` of a pseudo-random permutation of range(size), without a table: a Feistel network over a
    power of 4, applied until the result is below `size`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = (left << half) | right
        if index < size:
            return index
