"""The most probable token of each row of logits, and whether the row is finite, in two kernels instead of a dozen.

Programs of the first kernel each read a slice of a row, at the memory's speed. One program for each row then compares
the results of its slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on

SLICE = 4096
"""Number of logits that a program reads."""


@triton.jit
def slice_kernel(logits, best, where, V: tl.constexpr, SLICE: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Write the largest logit of a slice of a row and its index. An infinity or NaN counts as 0, and makes the index
    -1 - index."""
    i = tl.program_id(0)
    row, i_s = (i // NUM_SLICES).to(tl.int64), i % NUM_SLICES
    o_v = i_s * SLICE + tl.arange(0, SLICE)
    b = tl.load(logits + row * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    m_finite = b * 0.0 == 0.0
    b = tl.where(o_v < V, tl.where(m_finite, b, 0.0), float("-inf"))
    top = tl.max(b, 0)
    index = tl.min(tl.where(b == top, o_v, V), 0)  # the first of equal ones
    finite = tl.min(m_finite.to(tl.int32), 0) > 0
    tl.store(best + i, top)
    tl.store(where + i, tl.where(finite, index, -1 - index))


@triton.jit(do_not_specialize=["num_ends"])
def choose_kernel(
    best, where, chosen, ended, not_finite, ends, num_ends,
    V: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the token of each row. `ended`: the row has ended. If it has not, and a logit is not finite, it is marked
    as `not_finite`."""
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    b_best = tl.load(best + row * NUM_SLICES + o, mask=o < NUM_SLICES, other=float("-inf"))
    b_where = tl.load(where + row * NUM_SLICES + o, mask=o < NUM_SLICES, other=V)
    bad = tl.min(b_where, 0) < 0
    b_where = tl.where(b_where < 0, -1 - b_where, b_where)
    token = tl.min(tl.where(b_best == tl.max(b_best, 0), b_where, V), 0)
    has_ended = tl.load(ended + row).to(tl.int32)
    tl.store(not_finite + row, tl.load(not_finite + row) | (bad & (has_ended == 0)).to(tl.uint8))
    for i in range(num_ends):
        has_ended |= (tl.load(ends + i) == token).to(tl.int32)
    tl.store(ended + row, has_ended.to(tl.uint8))
    tl.store(chosen + row, token.to(tl.int64))


def most_probable(logits: Tensor, ended: Tensor, not_finite: Tensor, ends: Tensor) -> Tensor:
    """Return tokens [B] for logits [B, V]. Two bool tensors [B] are updated in place: `not_finite` becomes True for
    rows that have not ended and have a non-finite logit; then `ended` becomes True for rows with a token of `ends`."""
    (B, V), device = logits.shape, logits.device
    chosen = torch.empty(B, dtype=torch.int64, device=device)
    width = min(SLICE, triton.next_power_of_2(V))
    num_slices = triton.cdiv(V, width)
    best, where = (torch.empty(B, num_slices, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    constants = {"V": V, "NUM_SLICES": num_slices}
    flags = ended.view(torch.uint8), not_finite.view(torch.uint8)
    with on(device):
        Launch(slice_kernel, (B * num_slices,), (logits.contiguous(), best, where), {**constants, "SLICE": width})()
        Launch(
            choose_kernel,
            (B,),
            (best, where, chosen, *flags, ends, len(ends)),
            {**constants, "BLOCK": triton.next_power_of_2(num_slices), "num_warps": 1},
        )()
    return chosen
