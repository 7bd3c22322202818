"""The two single warps of the backward kernel for Hopper: one loads, one adds dQ into global float32."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.names import reduce_add
from flashspan.kernels.hopper.walk import find_block, find_line, find_list, key_work, load_words, nth


@gluon.jit
def line_of(numbers, maps):
    """This program's line of a block map."""
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    line, i_bk = find_line(gl.program_id(0), maps, gl.num_programs(0) // maps[6], section, K, G)
    return i_bk // K, i_bk % K, line


@gluon.jit
def _load_keys(desc, buffers, bars, b, h, n0, C: gl.constexpr):
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, low_s, high_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, full, empty, ds_full, dq_full, dq_empty = bars
    BN: gl.constexpr = C[1]
    mbarrier.expect(kv_full, 4 * desc_k.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_k, [b, h, n0, 0], kv_full, low_s.index(0))
    tma.async_copy_global_to_shared(desc_k, [b, h, n0 + BN, 0], kv_full, high_s.index(0))
    tma.async_copy_global_to_shared(desc_v, [b, h, n0, 0], kv_full, low_s.index(1))
    tma.async_copy_global_to_shared(desc_v, [b, h, n0 + BN, 0], kv_full, high_s.index(1))


@gluon.jit
def _load_queries(desc, buffers, bar, b, h, m0, row, stage):
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, low_s, high_s, ds_s, dq_s, l_s, d_s = buffers
    tma.async_copy_global_to_shared(desc_l, [row], bar, l_s.index(stage))
    tma.async_copy_global_to_shared(desc_q, [b, h, m0, 0], bar, q_s.index(stage))
    tma.async_copy_global_to_shared(desc_d, [row], bar, d_s.index(stage))
    tma.async_copy_global_to_shared(desc_do, [b, h, m0, 0], bar, do_s.index(stage))


@gluon.jit
def feed(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The loader warp: K and V once, then Q, dO, -lse and -delta of each tile."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, low_s, high_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, full, empty, ds_full, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    STAGES: gl.constexpr = C[2]
    i_b, i_k, n0, first, f_lo, f_hi, end = key_work(numbers, tables, 2 * C[1], C[0], C[3], 1)
    _load_keys(desc, buffers, bars, i_b, i_k, n0, C)
    n = end - first
    for i in range(n * G):
        i_h = i_k * G + i // n
        m0 = nth(i % n, first, f_lo, f_hi, end) * BM
        row = (i_b * H + i_h) * Tp + m0
        stage = i & (STAGES - 1)
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 2 * (desc_q.block_type.nbytes + desc_l.block_type.nbytes))
        _load_queries(desc, buffers, bar, i_b, i_h, m0, row, stage)


@gluon.jit
def feed_lists(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The loader warp of a block map."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    kv_full, full, empty, ds_full, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    desc_words, words_s, maps = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    SPLIT: gl.constexpr = 128 // BM
    QUERIES: gl.constexpr = 2 * (desc_q.block_type.nbytes + desc_l.block_type.nbytes)
    WORDS: gl.constexpr = 2 * desc_words.block_type.nbytes
    i_b, i_k, line = line_of(numbers, maps)
    _load_keys(desc, buffers, bars, i_b, i_k, line * (2 * BN), C)
    i = 0
    for g in range(G):
        i_h = i_k * G + g
        begin, end, n, edges = find_list(maps, i_b, i_h, line)
        for j in range(n * SPLIT):
            block, word = find_block(maps, begin, end, j // SPLIT, edges)
            m0 = block * 128 + j % SPLIT * BM
            masked = j // SPLIT < edges
            stage = i & (STAGES - 1)
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, QUERIES, pred=j // SPLIT >= edges)
            mbarrier.expect(bar, QUERIES + WORDS, pred=masked)
            load_words(desc_words, word, bar, words_s, stage, masked)
            _load_queries(desc, buffers, bar, i_b, i_h, m0, (i_b * H + i_h) * Tp + m0, stage)
            i += 1


@gluon.jit
def add_dq(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The warp that adds each dQ tile into global float32. The first that arrives is nobody's: see `_multiply`."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, low_s, high_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, full, empty, ds_full, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    i_b, i_k, n0, first, f_lo, f_hi, end = key_work(numbers, tables, 2 * C[1], C[0], C[3], 1)
    n = end - first
    mbarrier.wait(dq_full, 0)
    mbarrier.arrive(dq_empty, count=1)
    for i in range(n * G):
        m0 = nth(i % n, first, f_lo, f_hi, end) * BM
        mbarrier.wait(dq_full, (i + 1) & 1)
        reduce_add(desc_dq, [i_b, i_k * G + i // n, m0, 0], dq_s)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty, count=1)


@gluon.jit
def add_dq_lists(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The same warp of a block map."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, low_s, high_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, full, empty, ds_full, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    desc_words, words_s, maps = tables
    BM: gl.constexpr = C[0]
    SPLIT: gl.constexpr = 128 // BM
    i_b, i_k, line = line_of(numbers, maps)
    mbarrier.wait(dq_full, 0)
    mbarrier.arrive(dq_empty, count=1)
    i = 0
    for g in range(G):
        i_h = i_k * G + g
        begin, end, n, edges = find_list(maps, i_b, i_h, line)
        for j in range(n * SPLIT):
            block, word = find_block(maps, begin, end, j // SPLIT, edges)
            m0 = block * 128 + j % SPLIT * BM
            mbarrier.wait(dq_full, (i + 1) & 1)
            reduce_add(desc_dq, [i_b, i_h, m0, 0], dq_s)
            tma.store_wait(0)
            mbarrier.arrive(dq_empty, count=1)
            i += 1
