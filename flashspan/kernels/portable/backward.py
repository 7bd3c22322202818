"""The backward kernels for any GPU that Triton supports, and their launcher.

Each pass recomputes the probabilities it needs from lse (FlashAttention-2, Algorithm 2): a program per block of keys
sums dk and dv over the queries that see it, a program per block of queries sums dq over the keys it sees. No two
programs write one tile, so there are no atomics, and gradients are bitwise reproducible. If dk and dv together do not
fit into registers (heads of 256), each has its own pass: five matmuls without spills are faster than four with them.

The same kernels serve block maps: see loops.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.contract import Grads, Problem
from flashspan.kernels.launch.compiling import launch_together
from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.masks import Blocks
from flashspan.kernels.portable.arguments import LOG2E, common_constants, dropout_arguments, strides, with_near_rows
from flashspan.kernels.portable.common import (
    block_bits,
    block_interval,
    edge_tile,
    first_block,
    full_tile,
    interval,
    key_block,
    load_span,
    load_tile,
    next_line,
    partial_tile,
    query_block,
    store_tile,
    unknown_zero,
)
from flashspan.kernels.portable.gradient_parts import add_gradients_launch, count_parts, empty_parts
from flashspan.kernels.portable.loops import key_loop, query_loop
from flashspan.kernels.portable.steps import dropout_words, keys_step, load_lse, queries_step
from flashspan.kernels.portable.tiles import Tile, key_passes, multiprocessors, tile


@triton.jit
def next_tile(i_tile, i_g, num_tiles, GROUP: tl.constexpr):
    """The next tile of this query head; after its last one, the first tile of the next head."""
    i_tile += 1
    if GROUP > 1:
        i_g += (i_tile == num_tiles).to(tl.int32)
        i_tile = tl.where(i_tile == num_tiles, 0, i_tile)
    return i_tile, i_g


FREE = ["T", "S", "lo", "hi", "s_mb", "s_mh", "num_lines", "num_long", "stream", "batch_stride", "threshold"]


@triton.jit(do_not_specialize=FREE)
def keys_kernel(
    dout, q, k, v, lse, delta, dk, dv, start, end, first, last, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs,
    s_rows, s_columns, lo, hi, s_mb, s_mh, num_lines, num_long, B, H, K, T, S, scale, sm_scale, threshold, gain, stream,
    batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, TABLE: tl.constexpr, CONVEX: tl.constexpr, LINE: tl.constexpr,
    OTHER: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, ES: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv or both for one block of keys, summed over all query heads that share it.

    K is the number of heads of dk and dv; PARTS consecutive heads share one head of k and v (gradient_parts.py).

    If dk and dv are both 128 columns wide, no register is free, so the epilogue recomputes the values that it needs.
    """
    if LINE:
        i_b, i_k, i_line, i_part, _ = next_line(
            tl.program_id(0), order, num_lines, num_long, B * K, s_mb, s_mh, K, GROUP, LINE // BN
        )
        n0 = i_line * LINE + i_part * BN
    else:
        i_b, i_k, n0 = key_block(tl.program_id(0), K, S, BN)
    k += i_b * s_kb + (i_k // PARTS).to(tl.int64) * s_kh
    v += i_b * s_vb + (i_k // PARTS).to(tl.int64) * s_vh

    o_n = tl.arange(0, BN)
    o_k = n0 + o_n
    if LINE:
        p_start, p_end = spans, spans  # not read
    else:
        p_start, p_end = start + i_b * s_rows, end + i_b * s_rows
        p_first, p_last = first + i_b * s_columns, last + i_b * s_columns
        # The transpose of lo <= j - i <= hi is -hi <= i - j <= -lo.
        _, _, edge, num_before, full, full_end, num_after = block_interval(
            o_k, S, T, -hi, -lo, p_first, p_last, TABLE, CONVEX, BM, BE
        )
    # [BN, BD]
    b_k = load_tile(k, n0, o_n, s_ks, S, D, BD, True, LINE > 0) if BC == BD else 0.0
    b_v = load_tile(v, n0, o_n, s_vs, S, D, BD, True, LINE > 0) if DK and BC == BD else 0.0
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)

    stream += i_b * batch_stride
    given = (b_k, b_v, k, v, n0, o_n, s_ks, s_vs, S, s_qt, s_dt, T, scale, p_start, p_end, qpos, threshold, gain)
    if LINE:
        for i_g in range(GROUP):
            i_h = (i_k.to(tl.int32) * GROUP + i_g).to(tl.int64)
            p_q = q + i_b * s_qb + i_h * s_qh
            p_do = dout + i_b * s_db + i_h * s_dh
            p_lse = lse + (i_b * H + i_h) * T
            p_delta = delta + (i_b * H + i_h) * T
            begin, middle, stop = load_span(spans, (i_b * s_mb + i_h * s_mh) * num_lines + i_line)
            b_column, row_word = dropout_words(seed, stream + i_h, o_k, kpos, S, True, DROPOUT, POSITIONS)
            num_full = (middle - begin) * (OTHER // BM)
            block = first_block(index, begin, middle)
            for i in range(num_full):
                m0, block = full_tile(i, block, index + begin, num_full, OTHER, BM)
                b_dk, b_dv = keys_step(
                    b_dk, b_dv, p_q, p_do, p_lse, p_delta, m0, tl.arange(0, BM), 0, 0, b_column, row_word, *given,
                    False, D, BD, BC, DK, DV, CONVEX, True, DROPOUT, POSITIONS, PRECISION,
                )  # fmt: skip
            for i in tl.range(0, (stop - middle) * (OTHER // BE), num_stages=ES):
                m0, column, place = partial_tile(i, middle, index, OTHER, BE)
                o_word = (i_part * BN + o_n + unknown_zero(m0)) * (OTHER // 32)
                p_words = block_bits(bits, tiles, place, LINE, OTHER) + o_word
                b_dk, b_dv = keys_step(
                    b_dk, b_dv, p_q, p_do, p_lse, p_delta, m0, tl.arange(0, BE), p_words, column, b_column, row_word,
                    *given, True, D, BD, BC, DK, DV, CONVEX, True, DROPOUT, POSITIONS, PRECISION,
                )  # fmt: skip
    else:  # one loop over the tiles of all heads
        i_g, i_tile = 0, 0
        num_full = (full_end - full) // BM
        for _ in range(GROUP * num_full):
            m0 = full + i_tile * BM
            i_h = (i_k * GROUP + i_g).to(tl.int64)
            row = (i_b * H + i_h) * T
            b_column, row_word = dropout_words(seed, stream + i_h, o_k, kpos, S, True, DROPOUT, POSITIONS)
            b_dk, b_dv = keys_step(
                b_dk, b_dv, q + i_b * s_qb + i_h * s_qh, dout + i_b * s_db + i_h * s_dh, lse + row, delta + row, m0,
                tl.arange(0, BM), 0, 0, b_column, row_word, *given, False, D, BD, BC, DK, DV, CONVEX, False, DROPOUT,
                POSITIONS, PRECISION,
            )  # fmt: skip
            i_tile, i_g = next_tile(i_tile, i_g, num_full, GROUP)
        i_g, i_tile = 0, 0
        for _ in tl.range(0, GROUP * (num_before + num_after), num_stages=ES):
            m0 = edge_tile(i_tile, edge, num_before, full_end, BE)
            i_h = (i_k * GROUP + i_g).to(tl.int64)
            row = (i_b * H + i_h) * T
            b_first, b_last = interval(o_k + unknown_zero(m0), S, T, -hi, -lo, p_first, p_last, TABLE)
            b_column, row_word = dropout_words(seed, stream + i_h, o_k, kpos, S, True, DROPOUT, POSITIONS)
            b_dk, b_dv = keys_step(
                b_dk, b_dv, q + i_b * s_qb + i_h * s_qh, dout + i_b * s_db + i_h * s_dh, lse + row, delta + row, m0,
                tl.arange(0, BE), b_first, b_last, b_column, row_word, *given, True, D, BD, BC, DK, DV, CONVEX, False,
                DROPOUT, POSITIONS, PRECISION,
            )  # fmt: skip
            i_tile, i_g = next_tile(i_tile, i_g, num_before + num_after, GROUP)

    if LINE:
        i_b, i_k, i_line, i_part, _ = next_line(
            tl.program_id(0) + unknown_zero(n0), order, num_lines, num_long, B * K, s_mb, s_mh, K, GROUP, LINE // BN
        )
        n0 = i_line * LINE + i_part * BN
    else:
        i_b, i_k, n0 = key_block(tl.program_id(0) + unknown_zero(full_end), K, S, BN)
    if DK:
        store_tile(dk + i_b * s_dkb + i_k.to(tl.int64) * s_dkh, n0, o_n, s_dks, S, b_dk * sm_scale, D, BD, ADD)
    if DV:
        store_tile(dv + i_b * s_dvb + i_k.to(tl.int64) * s_dvh, n0, o_n, s_dvs, S, b_dv, D, BD, ADD)


@triton.jit(do_not_specialize=FREE)
def queries_kernel(
    dout, q, k, v, lse, delta, dq, start, end, spans, index, tiles, order, bits, seed, qpos, kpos,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_dqb, s_dqh, s_dqt,
    s_rows, lo, hi, s_mb, s_mh, num_lines, num_long, B, H, K, T, S, scale, sm_scale, threshold, gain, stream,
    batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    EC: tl.constexpr, TABLE: tl.constexpr, LINE: tl.constexpr, OTHER: tl.constexpr, ADD: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries. EC: BC in edge tiles."""
    if LINE:
        i_b, i_h, i_line, i_part, line0 = next_line(
            tl.program_id(0), order, num_lines, num_long, B * H, s_mb, s_mh, H, 1, LINE // BM
        )
        m0 = i_line * LINE + i_part * BM
    else:
        i_b, i_h, m0 = query_block(tl.program_id(0), H, T, BM)
    i_k = i_h // (H // K)
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    row = (i_b * H + i_h) * T

    o_r = tl.arange(0, BM)
    o_m = m0 + o_r
    if LINE:
        begin, middle, stop = load_span(spans, line0 + i_line)
        o_word = (i_part * BM + o_r) * (OTHER // 32)
    else:
        b_start, b_end, edge, num_before, full, full_end, num_after = block_interval(
            o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE, True, BN, BE
        )
    # [BM, BD]
    p_q, p_do = q + i_b * s_qb + i_h * s_qh, dout + i_b * s_db + i_h * s_dh
    b_q = load_tile(p_q, m0, o_r, s_qt, T, D, BD, True) if BC == BD else 0.0
    b_do = load_tile(p_do, m0, o_r, s_dt, T, D, BD, True) if BC == BD else 0.0
    b_lse = load_lse(lse + row, o_m, T, True)
    b_delta = tl.load(delta + row + o_m, mask=o_m < T, other=0.0)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_row, column_word = dropout_words(seed, stream + i_b * batch_stride + i_h, o_m, qpos, T, False, DROPOUT, POSITIONS)

    rows = (b_q, b_do, b_lse, b_delta, p_q, p_do, m0, o_r, s_qt, s_dt, T)
    keys = (k, v, s_ks, s_vs, S, scale, b_row, column_word, kpos, threshold, gain)
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
        b_dq = queries_step(
            b_dq, n0, tl.arange(0, BN), 0, 0, *rows, *keys, D, BD, BC, False, LINE > 0, DROPOUT, POSITIONS, PRECISION
        )
    num_edges = (stop - middle) * (OTHER // BE) if LINE else num_before + num_after
    for i in tl.range(0, num_edges, num_stages=1):
        if LINE:
            n0, b_end, place = partial_tile(i, middle, index, OTHER, BE)
            b_start = block_bits(bits, tiles, place, LINE, OTHER) + o_word
        else:
            n0 = edge_tile(i, edge, num_before, full_end, BE)
        b_dq = queries_step(
            b_dq,
            n0,
            tl.arange(0, BE),
            b_start,
            b_end,
            *rows,
            *keys,
            D,
            BD,
            EC,
            True,
            LINE > 0,
            DROPOUT,
            POSITIONS,
            PRECISION,
        )
    if not LINE:
        i_b, i_h, m0 = query_block(tl.program_id(0) + unknown_zero(full_end), H, T, BM)
    store_tile(dq + i_b * s_dqb + i_h * s_dqh, m0, o_r, s_dqt, T, b_dq * sm_scale, D, BD, ADD)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    problem: Problem,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
) -> None:
    """See contract.py."""
    inputs = (*(with_near_rows(x) for x in (dout, q, k, v)), lse.contiguous(), delta.contiguous())
    grads = (with_near_rows(dq), with_near_rows(dk), with_near_rows(dv))
    with on(q.device):
        launch_together([*backward_launches(inputs, problem, grads, accumulate).values()])
    for result, grad in zip((dq, dk, dv), grads, strict=True):
        if grad is not result:
            result.copy_(grad)


def backward_launches(
    inputs: tuple[Tensor, ...], problem: Problem, grads: Grads, accumulate: bool
) -> dict[str, Launch]:
    """The launches of backward for dout, q, k, v, lse and delta, each under the names of the gradients it computes."""
    (_, q, k, *_), (dq, dk, dv), (mask, scale, dropout, _) = inputs, grads, problem
    (B, H, T, D), (K, S), blocks = q.shape, k.shape[1:3], isinstance(mask, Blocks)
    seed, qpos, kpos, *drop = dropout_arguments(dropout, q)
    rest = (T, S, scale * LOG2E, scale, *drop)
    constants = {"ADD": accumulate, **common_constants(q, dropout)}
    launches = {}
    passes = key_passes(q, bits=blocks, dropout=dropout is not None) if k.numel() else {}
    parts = 1 if blocks else _count_parts(q, k, passes)
    to_dk, to_dv = (empty_parts(k, parts) if parts > 1 else x for x in (dk, dv))
    for names, size in passes.items():
        loop = query_loop(mask, q, k, size)
        tensors = (*inputs, to_dk, to_dv, *loop.tables, seed, qpos, kpos)
        arguments = (*tensors, *strides(*inputs[:4], to_dk, to_dv), *loop.numbers, H, K * parts, *rest)
        key_constants = {"DK": "dk" in names, "DV": "dv" in names, "GROUP": H // (K * parts), "ES": size.edge_stages}
        key_constants |= constants | loop.constants | loop.size.constants(D)
        key_constants |= {"ADD": accumulate and parts == 1, "PARTS": parts}
        launches[names] = Launch(keys_kernel, (loop.num_blocks * B * K * parts,), arguments, key_constants)
    if parts > 1:
        launches["sum of parts"] = add_gradients_launch((dq, to_dk, to_dv), grads, accumulate)
    if q.numel():
        loop = key_loop(mask, q, k, tile("dq", q, bits=blocks))
        tensors = (*inputs, dq, *loop.tables, seed, qpos, kpos)
        arguments = (*tensors, *strides(*inputs[:4], dq), *loop.numbers, H, K, *rest)
        constants |= loop.constants | loop.size.constants(D)
        constants["EC"] = min(loop.size.edge_slice, constants["BC"])
        launches["dq"] = Launch(queries_kernel, (loop.num_blocks * B * H,), arguments, constants)
    return launches


def _count_parts(q: Tensor, k: Tensor, passes: dict[str, Tile]) -> int:
    """The number of parts of a key head's query heads that gives enough tiles of keys."""
    (B, H, T, _), (K, S) = q.shape, k.shape[1:3]
    if not passes or H == K:
        return 1
    size = next(iter(passes.values()))
    num_tiles, num_blocks = triton.cdiv(S, size.block_k) * B * K, triton.cdiv(T, size.block_q)
    return count_parts(H // K, num_tiles, num_blocks, multiprocessors(q.device))
