"""Counter-based dropout: a hash of each (query, key) pair's position decides, so the result does not depend on how the
work is split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with full avalanche, on int64 tensors of 32-bit values; portable/common.py has the same."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Dropout:
    """Drop each (query, key) pair with probability p, decided by a hash of the seed and the pair's global position.

    The same seed drops the same pairs however the work is split. A part of the sequence needs the global positions of
    its tokens (int32; None means 0, 1, 2, ...). A part of the heads needs `first` and `batch_stride`: head h of batch b
    is stream first + b * batch_stride + h.
    """

    p: float
    seed: Tensor  # int64, one element, on q's device
    q_positions: Tensor | None = None  # [T]
    k_positions: Tensor | None = None  # [S]
    first: int = 0
    batch_stride: int | None = None  # None: the number of heads in q

    def keep(self, num_batch: int, num_heads: int, q: range, k: range) -> Tensor:
        """Whether dropout keeps each pair of these local rows and columns, bool [B, H, len(q), len(k)]."""
        i, j = self._positions(q, self.q_positions), self._positions(k, self.k_positions)
        low, high = self.seed & MASK32, (self.seed >> 32) & MASK32
        batch, head = (torch.arange(num, device=self.seed.device) for num in (num_batch, num_heads))
        stride = num_heads if self.batch_stride is None else self.batch_stride
        stream = self.first + batch[:, None] * stride + head  # [B, H]
        row = mix((mix(low ^ mix(stream))[..., None] + i.long()) & MASK32)
        column = mix((mix(high) + j.long()) & MASK32)
        return mix(row[..., None] ^ column) >= self.threshold

    def _positions(self, local: range, table: Tensor | None) -> Tensor:
        if table is None:
            return torch.arange(local.start, local.stop, device=self.seed.device)
        return table[local.start : local.stop]

    @property
    def threshold(self) -> int:
        """A pair is dropped if its 32-bit hash is below this number."""
        return min(int(self.p * 2.0**32), 2**32 - 1)

    @property
    def gain(self) -> float:
        """The factor of a probability that is kept."""
        return 1.0 / (1.0 - self.p)
