"""Masks, dropout and strides as arguments of a kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Band, Mask, Rows
from flashspan.kernels.portable.tiles import precision

LOG2E = math.log2(math.e)


def mask_arguments(
    mask: Mask, num_queries: int, num_keys: int, q: Tensor
) -> tuple[bool, Tensor, Tensor, Tensor, Tensor, int, int, int, int, bool]:
    """(table, start, end, first, last, batch stride of start, of first, lo, hi, convex).

    `table` is False for a band: kernels use lo and hi, and never read the tensors.
    """
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return False, q, q, q, q, 0, 0, lo, hi, True
    mask = mask.to(q.device)
    assert isinstance(mask, Rows), "block maps have kernels of their own"
    batched = mask.start.dim() == 2 and mask.start.shape[0] > 1
    strides = (num_queries, num_keys) if batched else (0, 0)
    return True, mask.start, mask.end, mask.first, mask.last, *strides, 0, 0, mask.convex


def dropout_arguments(dropout: Dropout | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor, int, float, int, int]:
    """(seed, query positions, key positions, threshold, gain, first stream, batch stride)."""
    if dropout is None:
        return q, q, q, 0, 1.0, 0, 0
    qpos, kpos = dropout.q_positions, dropout.k_positions
    assert (qpos is None) == (kpos is None), "dropout takes both position tables or neither"
    stride = q.shape[1] if dropout.batch_stride is None else dropout.batch_stride
    qpos, kpos = q if qpos is None else qpos, q if kpos is None else kpos
    return dropout.seed, qpos, kpos, dropout.threshold, dropout.gain, dropout.first, stride


def common_constants(q: Tensor, dropout: Dropout | None) -> dict[str, Any]:
    """The compile-time arguments that all passes share."""
    positions = dropout is not None and dropout.q_positions is not None
    return {"DROPOUT": dropout is not None, "POSITIONS": positions, "PRECISION": precision(q.device)}


def strides(*tensors: Tensor) -> list[int]:
    """The strides of batch, head and row of each tensor."""
    return [step for x in tensors for step in x.stride()[:3]]


def empty_outputs(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse; out is stored as [B, T, H, D], so that merging heads is a view."""
    B, H, T, D = q.shape
    out = q.new_empty_strided((B, H, T, D), (T * H * D, D, H * D, 1), dtype=dtype)
    return out, q.new_empty((B, H, T), dtype=torch.float32)


MAX_ROW_STRIDE = 2**31 // 256
"""Row strides of this size or more exceed the kernels' 32-bit offsets inside a tile."""


def fits_offsets(x: Tensor) -> bool:
    """Whether 32-bit offsets reach all rows of a tile."""
    return x.stride(2) < MAX_ROW_STRIDE or x.shape[2] == 1


def with_near_rows(x: Tensor) -> Tensor:
    """x, or a contiguous copy if 32-bit offsets do not reach all rows of a tile."""
    return x if fits_offsets(x) else x.contiguous()
