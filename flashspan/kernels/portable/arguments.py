"""Values of the contract as arguments of a kernel."""

from __future__ import annotations

import math

from torch import Tensor

from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Band, Mask, Rows

LOG2E = math.log2(math.e)


def mask_arguments(
    mask: Mask, num_queries: int, num_keys: int, q: Tensor
) -> tuple[bool, Tensor, Tensor, Tensor, Tensor, int, int, int, int, bool]:
    """(table?, start, end, first, last, their batch strides, lo, hi, convex): a band's tensors are never read."""
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return False, q, q, q, q, 0, 0, lo, hi, True
    mask = mask.to(q.device)
    assert isinstance(mask, Rows), "lists of tiles have kernels of their own"
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
    return (
        dropout.seed,
        q if qpos is None else qpos,
        q if kpos is None else kpos,
        dropout.threshold,
        dropout.gain,
        dropout.first,
        stride,
    )


FAR = 2**31 // 256
"""How far apart the rows of a tile are too far for the kernels' 32-bit offsets inside it."""


def is_near(x: Tensor) -> bool:
    """Whether the kernels reach all rows of a tile."""
    return x.stride(2) < FAR or x.shape[2] == 1


def near(x: Tensor) -> Tensor:
    """x, or a copy that is near."""
    return x if is_near(x) else x.contiguous()
