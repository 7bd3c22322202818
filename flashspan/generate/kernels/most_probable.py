"""The most probable token of each row of logits, and whether the row is finite, in one kernel instead of a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on

LANES, EACH, WARPS = 1024, 16, 32
"""A program reads LANES x EACH logits at a time. A row has one program, which reads 256 KB for 128,256 logits."""


@triton.jit(do_not_specialize=["num_ends"])
def most_probable_kernel(
    logits, chosen, ended, not_finite, ends, num_ends,
    V: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Choose the token of each row. `ended`: the row has ended. An infinity or NaN counts as 0; if the row has not
    ended, it is marked as `not_finite`."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    b_best = tl.full([LANES], float("-inf"), tl.float32)
    b_where = tl.zeros([LANES], tl.int32)
    b_bad = tl.zeros([LANES], tl.int32)
    for v0 in range(0, V, LANES * EACH * AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            o_v = v0 + i * LANES * EACH + o
            b = tl.load(logits + row * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
            m_finite = b * 0.0 == 0.0
            b_bad += tl.sum(tl.where(m_finite, 0, 1), 1)
            b = tl.where(o_v < V, tl.where(m_finite, b, 0.0), float("-inf"))
            b_top, i_top = tl.max(b, 1, return_indices=True)  # the first of equal ones
            b_where = tl.where(b_top > b_best, v0 + i * LANES * EACH + tl.arange(0, LANES) * EACH + i_top, b_where)
            b_best = tl.maximum(b_best, b_top)
    token = tl.min(tl.where(b_best == tl.max(b_best, 0), b_where, V), 0)
    has_ended = tl.load(ended + row).to(tl.int32)
    bad = (tl.sum(b_bad, 0) > 0) & (has_ended == 0)
    tl.store(not_finite + row, tl.load(not_finite + row) | bad.to(tl.uint8))
    for i in range(num_ends):
        has_ended |= (tl.load(ends + i) == token).to(tl.int32)
    tl.store(ended + row, has_ended.to(tl.uint8))
    tl.store(chosen + row, token.to(tl.int64))


def most_probable(logits: Tensor, ended: Tensor, not_finite: Tensor, ends: Tensor) -> Tensor:
    """Return tokens [B] for logits [B, V]. Two bool tensors [B] are updated in place: `not_finite` becomes True for
    rows that have not ended and have a non-finite logit; then `ended` becomes True for rows with a token of `ends`."""
    B, V = logits.shape
    chosen = torch.empty(B, dtype=torch.int64, device=logits.device)
    lanes = min(LANES, triton.next_power_of_2(triton.cdiv(V, EACH)))
    constants = {"V": V, "LANES": lanes, "EACH": EACH, "AT_ONCE": 2, "num_warps": max(1, WARPS * lanes // LANES)}
    tensors = (logits.contiguous(), chosen, ended.view(torch.uint8), not_finite.view(torch.uint8), ends)
    with on(logits.device):
        Launch(most_probable_kernel, (B,), (*tensors, len(ends)), constants)()
    return chosen
