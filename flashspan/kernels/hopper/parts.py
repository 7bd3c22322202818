"""A number of each query as backward reads it, -lse or -delta: in float32 or, with heads of 64, as its three bfloat16
parts, which lie in a row with zeros behind them so that a product with ones adds them up, in every row of a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.tensors import block_dim

DEPTH = tl.constexpr(16)
"""Of the least product there is."""


def new_rows(q: Tensor) -> Tensor:
    """Room for a number of each query, those of a head padded to whole blocks of 128."""
    B, H, T, D = q.shape
    rows = B * H * -(-T // 128) * 128
    if block_dim(D) == 64:
        return torch.empty(rows, DEPTH.value, dtype=torch.bfloat16, device=q.device)
    return torch.empty(rows, dtype=torch.float32, device=q.device)


@triton.jit
def store_rows(place, o, x):
    """Write a number of each of these rows."""
    if place.dtype.element_ty == tl.float32:
        tl.store(place + o, x)
    else:
        high = x.to(tl.bfloat16)
        rest = tl.where(x * 0.0 == 0.0, x - high.to(tl.float32), 0.0)  # of inf and NaN there is none
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        c = tl.arange(0, DEPTH)[None, :]
        parts = tl.where(c == 1, middle[:, None], tl.where(c == 2, low[:, None], 0.0))
        tl.store(place + o[:, None] * DEPTH + c, tl.where(c == 0, high[:, None], parts).to(tl.bfloat16))


@gluon.jit
def load_rows(place, o):
    """The numbers of these rows."""
    if place.dtype.element_ty == gl.float32:
        x = gl.load(place + o)
    else:
        p = place + o * DEPTH
        x = gl.load(p).to(gl.float32) + gl.load(p + 1).to(gl.float32) + gl.load(p + 2).to(gl.float32)
    return x
