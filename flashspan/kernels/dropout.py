"""Dropout that does not depend on how the work is split: a counter-based hash decides each (query, key) pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with full avalanche, on int64 tensors holding 32-bit values (the kernels have a twin)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Dropout:
    """Drop each (query, key) pair with probability p, decided by a hash of the seed and the pair's global place.

    The same seed drops the same pairs however the work is split: a caller that holds a part of the sequence gives its
    tokens' global positions (int32; None means 0, 1, 2, ...), one that holds a part of the heads says where they begin:
    head h of batch b is stream `first + b * batch_stride + h`.
    """

    p: float
    seed: Tensor  # int64, one element, on q's device
    q_positions: Tensor | None = None  # [T]
    k_positions: Tensor | None = None  # [S]
    first: int = 0
    batch_stride: int | None = None  # None: the number of heads in q

    def streams(self, num_batch: int, num_heads: int) -> Tensor:
        """The stream number of each (batch, head), int64 [B, H]."""
        device = self.seed.device
        stride = num_heads if self.batch_stride is None else self.batch_stride
        batch = torch.arange(num_batch, device=device) * stride
        return self.first + batch[:, None] + torch.arange(num_heads, device=device)

    def keep(self, num_batch: int, num_heads: int, q: range, k: range) -> Tensor:
        """Which pairs of these local rows and columns survive, bool [B, H, len(q), len(k)]."""
        device = self.seed.device
        i = (
            torch.arange(q.start, q.stop, device=device)
            if self.q_positions is None
            else self.q_positions[q.start : q.stop]
        )
        j = (
            torch.arange(k.start, k.stop, device=device)
            if self.k_positions is None
            else self.k_positions[k.start : k.stop]
        )
        low, high = self.seed & MASK32, (self.seed >> 32) & MASK32
        stream = mix(low ^ mix(self.streams(num_batch, num_heads)))
        row = mix((stream[..., None] + i.long()) & MASK32)
        column = mix((mix(high) + j.long()) & MASK32)
        return mix(row[..., None] ^ column) >= self.threshold

    @property
    def threshold(self) -> int:
        """A pair is dropped when its 32-bit hash falls below this."""
        return min(int(self.p * 2.0**32), 2**32 - 1)

    @property
    def gain(self) -> float:
        """What a surviving probability is multiplied by."""
        return 1.0 / (1.0 - self.p)
