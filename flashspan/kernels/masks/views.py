"""A mask of any kind drawn out, counted, or put together again from what an operator's schema carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashspan.kernels.masks.band import Band
from flashspan.kernels.masks.blocks import Blocks
from flashspan.kernels.masks.mask import Mask
from flashspan.kernels.masks.rows import Rows


def unpack(kind: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """The mask that `pack` took apart."""
    if kind == "band":
        return Band.unpack(numbers)
    return Rows.unpack(numbers, tensors) if kind == "rows" else Blocks.unpack(numbers, tensors)


def dense(mask: Mask, num_queries: int, num_keys: int) -> Tensor:
    """The mask drawn out: bool [T, S], [B, T, S] or, of blocks, [B, H, T, S]. For tests, pictures and small tiles."""
    if isinstance(mask, Blocks):
        return mask.dense()
    assert isinstance(mask, (Band, Rows))
    start, end = mask.intervals(num_queries, num_keys)
    j = torch.arange(num_keys, device=start.device)
    return (start[..., None] <= j) & (j < end[..., None])


def count(mask: Mask, num_queries: int, num_keys: int) -> int:
    """How many (query, key) pairs are visible: the work of a tile, without drawing it."""
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return max(0, _behind(hi, num_queries, num_keys) - _behind(lo - 1, num_queries, num_keys))
    if isinstance(mask, Blocks):
        return mask.count()
    assert isinstance(mask, Rows)
    start, end = mask.intervals(num_queries, num_keys)
    return int((end.long() - start.long()).clamp(min=0).sum())


def _behind(hi: int, num_queries: int, num_keys: int) -> int:
    """How many pairs have j - i <= hi: query i sees hi + 1 + i keys, none if that is negative, all if it is more."""

    def total(last: int) -> int:  # over all queries that would see up to so many
        ramp = min(max(last, 0), num_keys)
        return ramp * (ramp + 1) // 2 + max(last - num_keys, 0) * num_keys

    return total(hi + num_queries) - total(hi)
