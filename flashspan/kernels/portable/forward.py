"""The forward kernel for any GPU that Triton supports, and its launcher.

One program per block of queries of one head. It keeps the running maximum m, the sum l and the unnormalised output of
its rows on chip (FlashAttention-2, Algorithm 1), all in float32, and starts them from the carry if there is one. A
second kernel, with few programs, computes only the blocks that another kernel has flagged. Both serve intervals of
keys and lists of blocks: see loops.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

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
from flashspan.kernels.portable.common import (
    block_bits,
    block_interval,
    edge_tile,
    first_block,
    full_tile,
    load_span,
    load_tile,
    next_line,
    partial_tile,
    query_block,
    store_tile,
)
from flashspan.kernels.portable.loops import key_loop
from flashspan.kernels.portable.steps import dropout_words, finished, flagged_end, forward_step
from flashspan.kernels.portable.tiles import Tile, early_launch, starts_early, tile

FREE = ["T", "S", "lo", "hi", "s_mb", "s_mh", "num_lines", "num_long", "stream", "batch_stride", "threshold"]
"""Arguments whose values do not specialise a kernel: no value gets a compiled kernel of its own."""

STRETCH = 32
"""Flags that a program of `repair_kernel` reads at a time."""


@triton.jit
def forward_block(
    i_b, i_h, m0, line, line_row, q, k, v, out, lse, start, end, spans, index, tiles, bits, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, LINE: tl.constexpr, OTHER: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr,
    POSITIONS: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, ES: tl.constexpr,
):  # fmt: skip
    """Compute output and lse of queries m0 to m0 + BM of one head. With LINE, they are rows of a line of a block map,
    from line_row on."""
    i_k = i_h // (H // K)
    q += i_b * s_qb + i_h * s_qh
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    out += i_b * s_ob + i_h * s_oh
    lse += (i_b * H + i_h) * T

    o_r = tl.arange(0, BM)
    o_m = m0 + o_r
    if LINE:
        begin, middle, stop = load_span(spans, line)
        o_word = (line_row + o_r) * (OTHER // 32)
    else:
        b_start, b_end, edge, num_before, full, full_end, num_after = block_interval(
            o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE, True, BN, BE
        )
    # [BM, BD]
    b_q = load_tile(q, m0, o_r, s_qt, T, D, BD, True) if BC == BD else 0.0
    if CARRY:
        b_acc = load_tile(out, m0, o_r, s_ot, T, D, BD, True)
        b_lse = tl.load(lse + m0 + o_r, mask=m0 + o_r < T, other=float("-inf"))
        b_m = b_lse * 1.4426950408889634
        b_l = tl.where(b_lse == float("-inf"), 0.0, 1.0)
    else:
        b_acc = tl.zeros([BM, BD], tl.float32)
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_l = tl.zeros([BM], tl.float32)
    b_row, column_word = dropout_words(seed, stream + i_b * batch_stride + i_h, o_m, qpos, T, False, DROPOUT, POSITIONS)

    if LINE:
        first, past = 0, (middle - begin) * (OTHER // BN)
        block = first_block(index, begin, middle)
    else:
        first, past = full, full_end
    for i in range(first, past, 1 if LINE else BN):
        if LINE:
            n0, block = full_tile(i, block, index + begin, past, OTHER, BN)
        else:
            n0 = i
        b_acc, b_m, b_l = forward_step(
            b_acc, b_m, b_l, b_q, q, m0, o_r, s_qt, T, k, v, n0, tl.arange(0, BN), s_ks, s_vs, S, scale, 0, 0, b_row,
            column_word, kpos, threshold, gain, D, BD, BC, False, LINE > 0, DROPOUT, POSITIONS, NEGATIVE, PRECISION,
        )  # fmt: skip
    num_edges = (stop - middle) * (OTHER // BE) if LINE else num_before + num_after
    for i in tl.range(0, num_edges, num_stages=ES):
        if LINE:
            n0, b_end, place = partial_tile(i, middle, index, OTHER, BE)
            b_start = block_bits(bits, tiles, place, LINE, OTHER) + o_word
        else:
            n0 = edge_tile(i, edge, num_before, full_end, BE)
        b_acc, b_m, b_l = forward_step(
            b_acc, b_m, b_l, b_q, q, m0, o_r, s_qt, T, k, v, n0, tl.arange(0, BE), s_ks, s_vs, S, scale, b_start,
            b_end, b_row, column_word, kpos, threshold, gain, D, BD, BC, True, LINE > 0, DROPOUT, POSITIONS, NEGATIVE,
            PRECISION,
        )  # fmt: skip

    b_out, b_lse = finished(b_acc, b_m, b_l)
    store_tile(out, m0, o_r, s_ot, T, b_out, D, BD, False)
    tl.store(lse + m0 + o_r, b_lse, mask=m0 + o_r < T)


@triton.jit(do_not_specialize=FREE)
def forward_kernel(
    q, k, v, out, lse, start, end, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_rows, lo, hi, s_mb, s_mh, num_lines, num_long, B, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, LINE: tl.constexpr, OTHER: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr,
    POSITIONS: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, ES: tl.constexpr,
):  # fmt: skip
    line, line_row = 0, 0
    if LINE:
        i_b, i_h, i_line, i_part, line0 = next_line(
            tl.program_id(0), order, num_lines, num_long, B * H, s_mb, s_mh, H, 1, LINE // BM
        )
        m0, line, line_row = i_line * LINE + i_part * BM, line0 + i_line, i_part * BM
    else:
        i_b, i_h, m0 = query_block(tl.program_id(0), H, T, BM)
    forward_block(
        i_b, i_h, m0, line, line_row, q, k, v, out, lse, start, end, spans, index, tiles, bits, seed, qpos, kpos,
        s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
        s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
        D, BD, BC, BM, BN, BE, TABLE, LINE, OTHER, CARRY, DROPOUT, POSITIONS, NEGATIVE, PRECISION, ES,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*FREE, "num_flags"])
def repair_kernel(
    flags, num_flags, q, k, v, out, lse, start, end, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_rows, lo, hi, s_mb, s_mh, num_lines, num_long, B, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, LINE: tl.constexpr, OTHER: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr,
    POSITIONS: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, ES: tl.constexpr, STRETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the blocks of queries whose flags are not 0."""
    if EARLY:
        gdc_wait()
    end_flag = flagged_end(flags, num_flags, STRETCH)
    # Keep loop invariants in the loop: it hardly ever runs, and there are no registers for them.
    for i in tl.range(tl.program_id(0), end_flag, tl.num_programs(0), disable_licm=True):
        if tl.load(flags + i) != 0:
            i_b, i_h, m0 = query_block(i, H, T, BM, LAST_FIRST=False)
            line, line_row = 0, 0
            if LINE:
                line, line_row = (i_b * s_mb + i_h * s_mh) * num_lines + m0 // LINE, m0 % LINE
            forward_block(
                i_b, i_h, m0, line, line_row,
                q, k, v, out, lse, start, end, spans, index, tiles, bits, seed, qpos, kpos,
                s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
                s_rows, lo, hi, H, K, T, S, scale, threshold, gain, stream, batch_stride,
                D, BD, BC, BM, BN, BE, TABLE, LINE, OTHER, CARRY, DROPOUT, POSITIONS, NEGATIVE, PRECISION, ES,
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
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    loop = key_loop(mask, q, k, size or tile("out", q, bits=isinstance(mask, Blocks)))
    seed, qpos, kpos, *drop = dropout_arguments(dropout, q)
    tensors = (q, k, v, out, lse, *loop.tables, seed, qpos, kpos)
    numbers = (*strides(q, k, v, out), *loop.numbers, H, K, T, S, scale * LOG2E, *drop)
    constants = {"CARRY": carry, "NEGATIVE": scale < 0, **loop.constants, **common_constants(q, dropout)}
    constants |= {"ES": loop.size.edge_stages, **loop.size.constants(D)}
    if only is None:
        return Launch(forward_kernel, (loop.num_blocks * B * H,), (*tensors, *numbers), constants)
    # Flags are nearly always all 0, and to start a program for each block would take longer than the work. So a program
    # reads many flags at a time, and there are at most as many programs as a GPU runs at once: a prime number, so that
    # flags that repeat from head to head (as with padding) are spread over all of them. They start before the kernel
    # that writes the flags has ended, and then wait for its end.
    early = starts_early(q.device)
    constants |= {"BM": 64, "STRETCH": STRETCH, "EARLY": early, "num_warps": 4, **early_launch(early)}
    num_programs = min(triton.cdiv(only.numel(), STRETCH), 131)
    return Launch(repair_kernel, (num_programs,), (only, only.numel(), *tensors, *numbers), constants)
