"""V in float16, for the forward kernel for Hopper. P, which V is multiplied by, then has eleven bits instead of eight.

A float16 has all bits of a bfloat16, but not its range. So V is multiplied by a power of 2. If the largest number of a
row of V is then still too large, or so small that bits are lost, the row becomes NaN. Queries that see such a row are
marked bad, like queries that see a NaN in the caller's V, and the portable kernel recomputes them from the original V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.hopper.tensors import block_dim, forward_dim
from flashspan.kernels.hopper.tiles import FLOAT16_BLOCKS, FLOAT16_FROM
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import Band, Mask, Rows, count
from flashspan.kernels.portable.common import load_tile
from flashspan.kernels.portable.tiles import multiprocessors

FLOAT16_UNIT = tl.constexpr(2.0**-4)
"""V = FLOAT16_UNIT * its float16, for rows of V whose largest number is 0 or in LEAST .. MOST. This is exact, except
that numbers below 2^-21 have an error of up to 2^-29."""
LEAST = tl.constexpr(2.0**-18)
MOST = tl.constexpr(2.0**12 - 8)


def is_faster(q: Tensor, k: Tensor, mask: Mask, carry: bool = False) -> bool:
    """Whether forward is faster with V in float16 than with TRACK_MAXIMUM (softmax.py). If so, it is also more
    accurate. False for block maps, which use neither."""
    wide = forward_dim(q.shape[-1])
    least = FLOAT16_FROM.get(wide)
    if q.dtype != torch.bfloat16 or least is None or not isinstance(mask, (Band, Rows)):
        return False
    if carry and wide > 128:  # merge_into_first_block does not know FLOAT16_UNIT
        return False
    (B, H, T, _), (_, K, S, _) = q.shape, k.shape
    if least > H // K * T:  # even if all queries see the key
        return False
    if isinstance(mask, Band):
        seen = count(mask, T, S) // S
    else:  # if the reach is unknown, assume a sixteenth of the queries
        seen = mask.reach * T // S if mask.reach else T // 16
    blocks = max(B * H * S * seen / multiprocessors(q.device), 128 * seen) / 128**2  # of all tiles, and of one
    return H // K * seen >= least and blocks >= FLOAT16_BLOCKS[wide]


@triton.jit(do_not_specialize=["s_b", "s_h", "s_t", "H", "S"])
def float16_kernel(v, fine, s_b, s_h, s_t, H, S, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """Convert a block of rows of v of one head. Strides of v are in units of 8 elements."""
    blocks = tl.cdiv(S, BN)
    i_bh = tl.program_id(0) // blocks
    n0 = tl.program_id(0) % blocks * BN
    o_n, o_d = tl.arange(0, BN), tl.arange(0, BD)
    p_v = v + (i_bh // H).to(tl.int64) * s_b * 8 + (i_bh % H).to(tl.int64) * s_h * 8
    x = load_tile(p_v, n0, o_n, s_t * 8, S, D, BD, True).to(tl.float32)
    size = tl.max(tl.abs(x), 1)
    held = (size == 0) | ((size >= LEAST) & (size <= MOST))
    y = tl.where(held[:, None], x / FLOAT16_UNIT, float("nan")).to(tl.float16)
    p_fine = fine + (i_bh.to(tl.int64) * S + n0) * D + (o_n[:, None] * D + o_d[None, :])
    tl.store(p_fine, y, mask=(n0 + o_n < S)[:, None] & (o_d < D)[None, :])


def empty_float16(v: Tensor) -> Tensor:
    """An empty float16 tensor for v. Dimensions that are expanded in v (stride 0) are also expanded in the result."""
    return torch.empty(_distinct(v), dtype=torch.float16, device=v.device).expand(v.shape)


def _distinct(v: Tensor) -> list[int]:
    """The shape of v, with size 1 in each expanded dimension."""
    return [size if step else 1 for size, step in zip(v.shape, v.stride(), strict=True)]


def float16_launch(v: Tensor, fine: Tensor) -> Launch:
    """The launch that converts v into `fine`, which comes from `empty_float16`."""
    B, H, S, D = _distinct(v)
    arguments = (v, fine, *(step // 8 for step in v.stride()[:3]), H, S)
    constants = {"D": D, "BD": block_dim(D), "BN": 32}
    return Launch(float16_kernel, (triton.cdiv(S, 32) * B * H,), arguments, constants)
