"""A number that is added to all scores of a row, as three bfloat16 parts: a small matmul of the parts with ones writes
their sum to the row's accumulators, and the matmul of Q and K adds to them.

With heads of 64, backward adds -lse and -delta in this way. Forward adds -m (its softmax subtracts m), if scores need
no scale (`is_unit`). Larger heads have no room for parts: their -lse and -delta are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashspan.kernels.hopper.row_values import one_per_row
from flashspan.kernels.hopper.tensors import block_dim
from flashspan.kernels.portable.arguments import LOG2E

DEPTH = tl.constexpr(16)
"""Depth of the smallest matmul: three parts, then zeros."""


def is_unit(q: Tensor, scale: float) -> bool:
    """Whether scores q k^T are exponents of 2 without a multiplication: heads of 64, and a scale of ln 2."""
    return block_dim(q.shape[-1]) == 64 and scale * LOG2E == 1.0


def new_rows(q: Tensor) -> Tensor:
    """An uninitialised tensor for a number (or its parts) per query; each head is padded to a multiple of 128 rows."""
    B, H, T, D = q.shape
    rows = B * H * -(-T // 128) * 128
    if block_dim(D) == 64:
        return torch.empty(rows, DEPTH.value, dtype=torch.bfloat16, device=q.device)
    return torch.empty(rows, dtype=torch.float32, device=q.device)


@triton.jit
def store_rows(place, o, x):
    """Write a number for each of these rows, in float32 or in parts."""
    if place.dtype.element_ty == tl.float32:
        tl.store(place + o, x)
    else:
        high = x.to(tl.bfloat16)
        rest = tl.where(x * 0.0 == 0.0, x - high.to(tl.float32), 0.0)  # 0 for inf and NaN
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        c = tl.arange(0, DEPTH)[None, :]
        parts = tl.where(c == 1, middle[:, None], tl.where(c == 2, low[:, None], 0.0))
        tl.store(place + o[:, None] * DEPTH + c, tl.where(c == 0, high[:, None], parts).to(tl.bfloat16))


@gluon.jit
def load_bias(place, o):
    """Read the numbers that `store_rows` has written for these rows."""
    if place.dtype.element_ty == gl.float32:
        x = gl.load(place + o)
    else:
        p = place + o * DEPTH
        x = gl.load(p).to(gl.float32) + gl.load(p + 1).to(gl.float32) + gl.load(p + 2).to(gl.float32)
    return x


@gluon.jit
def ones_operand(ROWS: gl.constexpr):
    """Ones in shared memory, the other operand of the matmul with the parts."""
    SHAPE: gl.constexpr = [ROWS, DEPTH]
    ones_s = gl.allocate_shared_memory(gl.bfloat16, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, gl.bfloat16))
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    ones_s.store(gl.full(SHAPE, 1.0, gl.bfloat16, layout=L))
    fence_async_shared()
    return ones_s


@gluon.jit
def bias_operand(x, L: gl.constexpr):
    """x as the left operand of a matmul with ones, whose result has layout L. x is [rows, 4]; the four numbers of a row
    are equal."""
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    x = one_per_row(x, gl.SliceLayout(1, A))[:, None]
    c = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, A))[None, :]
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    rest = gl.where(c == 1, middle, gl.where(c == 2, x - high - middle, 0.0))
    return gl.where(c == 0, high, rest).to(gl.bfloat16)
