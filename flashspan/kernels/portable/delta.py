"""rowsum(dout * out) for backward, in one kernel without a temporary tensor of q's size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.launch.replay import replay
from flashspan.kernels.masks.mask import Packed
from flashspan.kernels.portable.arguments import fits_offsets, strides, with_near_rows
from flashspan.kernels.portable.common import load_tile, query_block
from flashspan.kernels.portable.tiles import block_dim


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    dout, out, delta, s_db, s_dh, s_dt, s_ob, s_oh, s_ot, H, T, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    i_b, i_h, m0 = query_block(tl.program_id(0), H, T, BM, LAST_FIRST=False)
    o_r = tl.arange(0, BM)
    # [BM, BD]
    b_do = load_tile(dout + i_b * s_db + i_h * s_dh, m0, o_r, s_dt, T, D, BD, True).to(tl.float32)
    b_o = load_tile(out + i_b * s_ob + i_h * s_oh, m0, o_r, s_ot, T, D, BD, True).to(tl.float32)
    tl.store(delta + (i_b * H + i_h) * T + m0 + o_r, tl.sum(b_do * b_o, 1), mask=m0 + o_r < T)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out), float32 [B, H, T]."""
    delta = out.new_empty(out.shape[:3], dtype=torch.float32)
    if out.numel():
        with on(out.device):
            served = replay(_launches, (dout, out), Packed(), (delta,))
        return delta if served else row_delta(with_near_rows(dout), with_near_rows(out))
    return delta


def _launches(tensors: Sequence[Tensor]) -> list[Launch] | None:
    """The launch; None where a row stride exceeds 32-bit offsets."""
    dout, out, delta = tensors
    if not (fits_offsets(dout) and fits_offsets(out)):
        return None
    B, H, T, D = out.shape
    arguments = (dout, out, delta, *strides(dout, out), H, T)
    constants = {"D": D, "BD": block_dim(D), "BM": 32}
    return [Launch(delta_kernel, (triton.cdiv(T, 32) * B * H,), arguments, constants)]
