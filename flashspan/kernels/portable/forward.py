"""The forward kernel for any GPU that Triton supports, and its launcher.

One program per block of queries of one head. It keeps the running maximum m, the sum l and the unnormalised output of
its rows on chip (FlashAttention-2, Algorithm 1), all in float32, and starts them from the carry if there is one. A
second kernel, with few programs, computes only the blocks that another kernel has flagged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.masks import Blocks, Mask
from flashspan.kernels.portable import decode
from flashspan.kernels.portable.arguments import (
    LOG2E,
    common_constants,
    dropout_arguments,
    empty_outputs,
    strides,
    with_near_rows,
)
from flashspan.kernels.portable.common import block_interval, edge_tile, load_tile, query_block
from flashspan.kernels.portable.loops import key_loop
from flashspan.kernels.portable.sparse import sparse_forward_kernel, sparse_repair_kernel
from flashspan.kernels.portable.steps import flagged_end, forward_begin, forward_end, forward_step, repair, row_words
from flashspan.kernels.portable.tiles import Tile, tile

FREE = ["T", "S", "lo", "hi", "stream", "batch_stride", "threshold"]
"""Arguments whose values do not specialise a kernel: no value gets a compiled kernel of its own."""


@triton.jit
def forward_block(
    i_b, i_h, m0, q, k, v, out, lse, start, end, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, ES: tl.constexpr,
):  # fmt: skip
    """Compute output and lse of queries m0 to m0 + BM of one head."""
    i_k = i_h // (H // K)
    q += i_b * s_qb + i_h * s_qh
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    out += i_b * s_ob + i_h * s_oh
    lse += (i_b * H + i_h) * T

    o_r = tl.arange(0, BM)
    o_m = m0 + o_r
    b_start, b_end, edge, num_before, full, full_end, num_after = block_interval(
        o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE, True, BN, BE
    )
    # [BM, BD]
    b_q = load_tile(q, m0, o_r, s_qt, T, D, BD, True) if BC == BD else 0.0
    b_acc, b_m, b_l = forward_begin(out, lse, m0, o_r, s_ot, T, D, BD, CARRY)
    b_row, column_word = row_words(seed, stream + i_b * batch_stride + i_h, o_m, qpos, T, DROPOUT, POSITIONS)

    for n0 in range(full, full_end, BN):
        b_acc, b_m, b_l = forward_step(
            b_acc, b_m, b_l, b_q, q, m0, o_r, s_qt, T, k, v, n0, tl.arange(0, BN), s_ks, s_vs, S, scale, b_start,
            b_end, b_row, column_word, kpos, threshold, gain, D, BD, BC, False, False, DROPOUT, POSITIONS, NEGATIVE,
            PRECISION,
        )  # fmt: skip
    for i_tile in tl.range(0, num_before + num_after, num_stages=ES):
        n0 = edge_tile(i_tile, edge, num_before, full_end, BE)
        b_acc, b_m, b_l = forward_step(
            b_acc, b_m, b_l, b_q, q, m0, o_r, s_qt, T, k, v, n0, tl.arange(0, BE), s_ks, s_vs, S, scale, b_start,
            b_end, b_row, column_word, kpos, threshold, gain, D, BD, BC, True, False, DROPOUT, POSITIONS, NEGATIVE,
            PRECISION,
        )  # fmt: skip

    forward_end(out, lse, m0, o_r, s_ot, T, b_acc, b_m, b_l, D, BD)


@triton.jit(do_not_specialize=FREE)
def forward_kernel(
    q, k, v, out, lse, start, end, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, ES: tl.constexpr,
):  # fmt: skip
    i_b, i_h, m0 = query_block(tl.program_id(0), H, T, BM)
    forward_block(
        i_b, i_h, m0, q, k, v, out, lse, start, end, seed, qpos, kpos,
        s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
        s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
        D, BD, BC, BM, BN, BE, TABLE, CARRY, DROPOUT, POSITIONS, NEGATIVE, PRECISION, ES,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*FREE, "num_flags"])
def repair_kernel(
    flags, num_flags, q, k, v, out, lse, start, end, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, ES: tl.constexpr, STRETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the blocks of queries whose flags are not 0: see steps.repair."""
    end_flag = flagged_end(flags, num_flags, STRETCH, EARLY)
    # Keep loop invariants in the loop: it hardly ever runs, and there are no registers for them.
    for i in tl.range(tl.program_id(0), end_flag, tl.num_programs(0), disable_licm=True):
        if tl.load(flags + i) != 0:
            i_b, i_h, m0 = query_block(i, H, T, BM, LAST_FIRST=False)
            forward_block(
                i_b, i_h, m0, q, k, v, out, lse, start, end, seed, qpos, kpos,
                s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
                s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
                D, BD, BC, BM, BN, BE, TABLE, CARRY, DROPOUT, POSITIONS, NEGATIVE, PRECISION, ES,
            )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    carry: Carry | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Carry:
    """See contract.py. The carry is updated in place."""
    if decode.takes(q, k, problem.mask, problem.dropout):
        done = decode.forward(q, k, v, problem, carry=carry, out_dtype=out_dtype)
        if done is not None:
            return done
    q, k, v = with_near_rows(q), with_near_rows(k), with_near_rows(v)
    if carry is None:
        out, lse = empty_outputs(q, out_dtype)
    else:
        assert carry.out.dtype == torch.float32, "a carry is float32"
        out = with_near_rows(carry.out if carry.out.stride(-1) == 1 else carry.out.contiguous())
        lse = carry.lse.float().contiguous()
    if q.numel() == 0:
        return Carry(out, lse)
    with on(q.device):
        forward_launch(q, k, v, out, lse, problem.mask, problem.scale, carry is not None, problem.dropout)()
    return Carry(out, lse)


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    carry: bool,
    dropout: Dropout | None,
    only: Tensor | None = None,
    size: Tile | None = None,
) -> Launch:
    """The launch of forward.

    only: int32 [B, H, ceil(T / 64)]; compute only the blocks of 64 rows for which it is not 0. size: the tile sizes, by
    default those for many queries.
    """
    (B, H, T, D), (K, S), blocks = q.shape, k.shape[1:3], isinstance(mask, Blocks)
    loop = key_loop(mask, q, k, size or tile("out", q, bits=blocks))
    seed, qpos, kpos, *drop = dropout_arguments(dropout, q)
    tensors = (q, k, v, out, lse, *loop.tables, seed, qpos, kpos)
    numbers = (*strides(q, k, v, out), *loop.numbers, H, K, T, S, scale * LOG2E, *drop)
    constants = {"CARRY": carry, "NEGATIVE": scale < 0, **loop.constants, **common_constants(q, dropout)}
    constants |= loop.size.constants(D)
    if not blocks:
        constants["ES"] = loop.size.edge_stages
    kernel = sparse_forward_kernel if blocks else forward_kernel
    launch = Launch(kernel, (loop.num_blocks * B * H,), (*tensors, *numbers), constants)
    if only is None:
        return launch
    return repair(launch, sparse_repair_kernel if blocks else repair_kernel, only)
