"""The kernels for lists of blocks (`Blocks`); forward.py and backward.py launch them.

A program computes one line, a block of queries. It loops over the full blocks of its list without a mask, then over the
partial ones, whose bits are the mask, in narrower tiles. The passes over keys use the transposed lists and bits. The
longest lines come first. If a line has more rows than a kernel's tile, several programs share it. No two programs write
one tile, so gradients are bitwise reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashspan.kernels.masks import Blocks
from flashspan.kernels.masks.block_map import Lists
from flashspan.kernels.portable.common import (
    block_bits,
    first_block,
    full_tile,
    load_span,
    load_tile,
    next_line,
    partial_tile,
    query_block,
    store_tile,
    unknown_zero,
)
from flashspan.kernels.portable.steps import (
    column_words,
    flagged_end,
    forward_begin,
    forward_end,
    forward_step,
    keys_step,
    load_lse,
    queries_step,
    row_words,
)

FREE = ["T", "S", "num_lines", "num_long", "s_mb", "s_mh", "stream", "batch_stride", "threshold"]
"""Arguments whose values do not specialise a kernel: no value gets a compiled kernel of its own."""


@triton.jit
def sparse_forward_block(
    i_b, i_h, i_line, i_part, line0, q, k, v, out, lse, spans, index, tiles, bits, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    LINE: tl.constexpr, OTHER: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output and lse of the queries of one part of a line."""
    m0 = i_line * LINE + i_part * BM
    i_k = i_h // (H // K)
    q += i_b * s_qb + i_h * s_qh
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    out += i_b * s_ob + i_h * s_oh
    lse += (i_b * H + i_h) * T
    begin, middle, end = load_span(spans, line0 + i_line)

    o_r = tl.arange(0, BM)
    o_m = m0 + o_r
    o_word = (i_part * BM + o_r) * (OTHER // 32)
    # [BM, BD]
    b_q = load_tile(q, m0, o_r, s_qt, T, D, BD, True) if BC == BD else 0.0
    b_acc, b_m, b_l = forward_begin(out, lse, m0, o_r, s_ot, T, D, BD, CARRY)
    b_row, column_word = row_words(seed, stream + i_b * batch_stride + i_h, o_m, qpos, T, DROPOUT, POSITIONS)

    num_full = (middle - begin) * (OTHER // BN)
    block = first_block(index, begin, middle)
    for i in range(num_full):
        n0, block = full_tile(i, block, index + begin, num_full, OTHER, BN)
        b_acc, b_m, b_l = forward_step(
            b_acc, b_m, b_l, b_q, q, m0, o_r, s_qt, T, k, v, n0, tl.arange(0, BN), s_ks, s_vs, S, scale, 0, 0, b_row,
            column_word, kpos, threshold, gain, D, BD, BC, False, True, DROPOUT, POSITIONS, NEGATIVE, PRECISION,
        )  # fmt: skip
    for i in tl.range(0, (end - middle) * (OTHER // BE), num_stages=1):
        n0, column, place = partial_tile(i, middle, index, OTHER, BE)
        p_words = block_bits(bits, tiles, place, LINE, OTHER) + o_word
        b_acc, b_m, b_l = forward_step(
            b_acc, b_m, b_l, b_q, q, m0, o_r, s_qt, T, k, v, n0, tl.arange(0, BE), s_ks, s_vs, S, scale,
            p_words, column, b_row, column_word, kpos, threshold, gain, D, BD, BC, True, True, DROPOUT,
            POSITIONS, NEGATIVE, PRECISION,
        )  # fmt: skip

    forward_end(out, lse, m0, o_r, s_ot, T, b_acc, b_m, b_l, D, BD)


@triton.jit(do_not_specialize=FREE)
def sparse_forward_kernel(
    q, k, v, out, lse, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot, s_mb, s_mh, num_lines, num_long,
    B, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    LINE: tl.constexpr, OTHER: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_line, i_part, line0 = next_line(
        tl.program_id(0), order, num_lines, num_long, B * H, s_mb, s_mh, H, 1, LINE // BM
    )
    sparse_forward_block(
        i_b, i_h, i_line, i_part, line0, q, k, v, out, lse, spans, index, tiles, bits, seed, qpos, kpos,
        s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
        H, K, T, S, scale, threshold, gain, stream, batch_stride,
        D, BD, BC, BM, BN, BE, LINE, OTHER, CARRY, DROPOUT, POSITIONS, NEGATIVE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*FREE, "num_flags"])
def sparse_repair_kernel(
    flags, num_flags, q, k, v, out, lse, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot, s_mb, s_mh, num_lines, num_long,
    B, H, K, T, S, scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    LINE: tl.constexpr, OTHER: tl.constexpr, CARRY: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, STRETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the blocks of queries whose flags are not 0: see steps.repair."""
    end_flag = flagged_end(flags, num_flags, STRETCH, EARLY)
    # Keep loop invariants in the loop: it hardly ever runs, and there are no registers for them.
    for i in tl.range(tl.program_id(0), end_flag, tl.num_programs(0), disable_licm=True):
        if tl.load(flags + i) != 0:
            i_b, i_h, m0 = query_block(i, H, T, BM, LAST_FIRST=False)
            line0 = (i_b * s_mb + i_h * s_mh) * num_lines
            sparse_forward_block(
                i_b, i_h, m0 // LINE, m0 % LINE // BM, line0,
                q, k, v, out, lse, spans, index, tiles, bits, seed, qpos, kpos,
                s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
                H, K, T, S, scale, threshold, gain, stream, batch_stride,
                D, BD, BC, BM, BN, BE, LINE, OTHER, CARRY, DROPOUT, POSITIONS, NEGATIVE, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=FREE)
def sparse_keys_kernel(
    dout, q, k, v, lse, delta, dk, dv, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs,
    s_mb, s_mh, num_lines, num_long, B, H, K, T, S, scale, sm_scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    LINE: tl.constexpr, OTHER: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, ES: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv or both for one block of keys, summed over the query heads that share it."""
    i_b, i_k, i_line, i_part, _ = next_line(
        tl.program_id(0), order, num_lines, num_long, B * K, s_mb, s_mh, K, GROUP, LINE // BN
    )
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh

    n0 = i_line * LINE + i_part * BN
    o_n = tl.arange(0, BN)
    o_k = n0 + o_n
    # [BN, BD]
    b_k = load_tile(k, n0, o_n, s_ks, S, D, BD, True, RECOMPUTE=True) if BC == BD else 0.0
    b_v = load_tile(v, n0, o_n, s_vs, S, D, BD, True, RECOMPUTE=True) if DK and BC == BD else 0.0
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)

    for i_g in range(GROUP):
        i_h = (i_k.to(tl.int32) * GROUP + i_g).to(tl.int64)
        p_q = q + i_b * s_qb + i_h * s_qh
        p_do = dout + i_b * s_db + i_h * s_dh
        p_lse = lse + (i_b * H + i_h) * T
        p_delta = delta + (i_b * H + i_h) * T
        begin, middle, end = load_span(spans, (i_b * s_mb + i_h * s_mh) * num_lines + i_line)
        b_column, row_word = column_words(seed, stream + i_b * batch_stride + i_h, o_k, kpos, S, DROPOUT, POSITIONS)
        num_full = (middle - begin) * (OTHER // BM)
        block = first_block(index, begin, middle)
        for i in range(num_full):
            m0, block = full_tile(i, block, index + begin, num_full, OTHER, BM)
            b_dk, b_dv = keys_step(
                b_dk, b_dv, b_k, b_v, k, v, n0, o_n, s_ks, s_vs, S, p_q, p_do, p_lse, p_delta, m0, tl.arange(0, BM),
                s_qt, s_dt, T, scale, 0, 0, spans, spans, b_column, row_word, qpos, threshold, gain, D, BD, BC, DK, DV,
                False, True, True, DROPOUT, POSITIONS, PRECISION,
            )  # fmt: skip
        for i in tl.range(0, (end - middle) * (OTHER // BE), num_stages=ES):
            m0, column, place = partial_tile(i, middle, index, OTHER, BE)
            o_word = (i_part * BN + o_n + unknown_zero(m0)) * (OTHER // 32)
            p_words = block_bits(bits, tiles, place, LINE, OTHER) + o_word
            b_dk, b_dv = keys_step(
                b_dk, b_dv, b_k, b_v, k, v, n0, o_n, s_ks, s_vs, S, p_q, p_do, p_lse, p_delta, m0, tl.arange(0, BE),
                s_qt, s_dt, T, scale, p_words, column, spans, spans, b_column, row_word, qpos, threshold, gain, D, BD,
                BC, DK, DV, True, True, True, DROPOUT, POSITIONS, PRECISION,
            )  # fmt: skip

    i_b, i_k, i_line, i_part, _ = next_line(
        tl.program_id(0) + unknown_zero(n0), order, num_lines, num_long, B * K, s_mb, s_mh, K, GROUP, LINE // BN
    )
    n0 = i_line * LINE + i_part * BN
    if DK:
        store_tile(dk + i_b * s_dkb + i_k * s_dkh, n0, o_n, s_dks, S, b_dk * sm_scale, D, BD, ADD)
    if DV:
        store_tile(dv + i_b * s_dvb + i_k * s_dvh, n0, o_n, s_dvs, S, b_dv, D, BD, ADD)


@triton.jit(do_not_specialize=FREE)
def sparse_queries_kernel(
    dout, q, k, v, lse, delta, dq, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_dqb, s_dqh, s_dqt,
    s_mb, s_mh, num_lines, num_long, B, H, K, T, S, scale, sm_scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    EC: tl.constexpr, LINE: tl.constexpr, OTHER: tl.constexpr, ADD: tl.constexpr, DROPOUT: tl.constexpr,
    POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries."""
    i_b, i_h, i_line, i_part, line0 = next_line(
        tl.program_id(0), order, num_lines, num_long, B * H, s_mb, s_mh, H, 1, LINE // BM
    )
    i_k = i_h // (H // K)
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    row = (i_b * H + i_h) * T
    begin, middle, end = load_span(spans, line0 + i_line)

    m0 = i_line * LINE + i_part * BM
    o_r = tl.arange(0, BM)
    o_m = m0 + o_r
    o_word = (i_part * BM + o_r) * (OTHER // 32)
    # [BM, BD]
    p_q, p_do = q + i_b * s_qb + i_h * s_qh, dout + i_b * s_db + i_h * s_dh
    b_q = load_tile(p_q, m0, o_r, s_qt, T, D, BD, True) if BC == BD else 0.0
    b_do = load_tile(p_do, m0, o_r, s_dt, T, D, BD, True) if BC == BD else 0.0
    b_lse = load_lse(lse + row, o_m, T, True)
    b_delta = tl.load(delta + row + o_m, mask=o_m < T, other=0.0)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_row, column_word = row_words(seed, stream + i_b * batch_stride + i_h, o_m, qpos, T, DROPOUT, POSITIONS)

    num_full = (middle - begin) * (OTHER // BN)
    block = first_block(index, begin, middle)
    for i in range(num_full):
        n0, block = full_tile(i, block, index + begin, num_full, OTHER, BN)
        b_dq = queries_step(
            b_dq, b_q, b_do, b_lse, b_delta, p_q, p_do, m0, o_r, s_qt, s_dt, T, k, v, n0, tl.arange(0, BN), s_ks, s_vs,
            S, scale, 0, 0, b_row, column_word, kpos, threshold, gain, D, BD, BC, False, True, DROPOUT, POSITIONS,
            PRECISION,
        )  # fmt: skip
    for i in tl.range(0, (end - middle) * (OTHER // BE), num_stages=1):
        n0, column, place = partial_tile(i, middle, index, OTHER, BE)
        p_words = block_bits(bits, tiles, place, LINE, OTHER) + o_word
        b_dq = queries_step(
            b_dq, b_q, b_do, b_lse, b_delta, p_q, p_do, m0, o_r, s_qt, s_dt, T, k, v, n0, tl.arange(0, BE), s_ks, s_vs,
            S, scale, p_words, column, b_row, column_word, kpos, threshold, gain, D, BD, EC, True, True,
            DROPOUT, POSITIONS, PRECISION,
        )  # fmt: skip
    store_tile(dq + i_b * s_dqb + i_h * s_dqh, m0, o_r, s_dqt, T, b_dq * sm_scale, D, BD, ADD)


def maps(mask: Blocks, lists: Lists) -> tuple[int, int, int, int]:
    """Return (stride in maps of the batch, of the heads, number of lines, number of long lines)."""
    batch, head = mask.num_heads if mask.num_batch > 1 else 0, 1 if mask.num_heads > 1 else 0
    return batch, head, lists.spans.shape[2], lists.num_long
