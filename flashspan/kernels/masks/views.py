"""Functions of any mask: unpack it, draw it as a bool tensor, count its visible pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashspan.kernels.masks.band import Band
from flashspan.kernels.masks.blocks import Blocks
from flashspan.kernels.masks.mask import Mask
from flashspan.kernels.masks.rows import Rows


def unpack(kind: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """The inverse of `Mask.pack`."""
    kinds: dict[str, type[Mask]] = {"band": Band, "rows": Rows, "blocks": Blocks}
    return kinds[kind].unpack(numbers, tensors)


def dense(mask: Mask, num_queries: int, num_keys: int) -> Tensor:
    """The mask as bool [T, S], [B, T, S] or, for blocks, [B, H, T, S]. For small masks."""
    if isinstance(mask, Blocks):
        return mask.dense()
    assert isinstance(mask, (Band, Rows))
    start, end = mask.intervals(num_queries, num_keys)
    j = torch.arange(num_keys, device=start.device)
    return (start[..., None] <= j) & (j < end[..., None])


def count(mask: Mask, num_queries: int, num_keys: int) -> int:
    """The number of visible (query, key) pairs, computed without drawing the mask."""
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return max(0, _behind(hi, num_queries, num_keys) - _behind(lo - 1, num_queries, num_keys))
    if isinstance(mask, Blocks):
        return mask.count()
    assert isinstance(mask, Rows)
    start, end = mask.intervals(num_queries, num_keys)
    return int((end.long() - start.long()).clamp(min=0).sum())


def _behind(hi: int, num_queries: int, num_keys: int) -> int:
    """The number of pairs with j - i <= hi: query i sees hi + 1 + i keys, clipped to 0..num_keys."""

    def total(last: int) -> int:  # the sum of 1, 2, ..., last keys, clipped
        ramp = min(max(last, 0), num_keys)
        return ramp * (ramp + 1) // 2 + max(last - num_keys, 0) * num_keys

    return total(hi + num_queries) - total(hi)
