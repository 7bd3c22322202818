"""The pass over blocks of queries: dQ. See two_pass.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashspan.kernels.hopper.masking import blocks, bounds, hide_outside, nth
from flashspan.kernels.hopper.parts import load_rows
from flashspan.kernels.hopper.ptx import here_and_now
from flashspan.kernels.hopper.scheduler import place
from flashspan.kernels.hopper.shared_memory import clean, send_off


@gluon.jit
def _query_work(numbers, tables, C: gl.constexpr, WARPS: gl.constexpr):
    """This program's block of queries, the last blocks first, and the tiles of keys it walks."""
    H, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    start, end, s_rows = tables
    ROWS: gl.constexpr = 2 * C[0]
    num_blocks = gl.cdiv(T, ROWS)
    i_m, i_bh = place(gl.program_id(0), num_blocks, gl.num_programs(0) // num_blocks, section)
    m0 = (num_blocks - 1 - i_m) * ROWS
    i_b = i_bh // H
    first, f_lo, f_hi, last = blocks(
        m0, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, C[2], ROWS, C[1], WARPS
    )
    return i_b, i_bh % H, m0, first, f_lo, f_hi, last


@gluon.jit
def _feed_keys(desc, buffers, bars, numbers, rows, tables, C: gl.constexpr):
    """The loader warp: Q and dO once, in the order they are needed, and K and V of each tile."""
    desc_q, desc_do, desc_k, desc_v, desc_dq = desc
    q_s, do_s, k_s, v_s = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = bars
    H, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    VS: gl.constexpr = v_s.shape[0]
    i_b, i_h, m0, first, f_lo, f_hi, end = _query_work(numbers, tables, C, 1)
    i_k = i_h // G
    mbarrier.expect(q_full, 2 * desc_q.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0, 0], q_full, q_s.index(0))
    tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0 + BM, 0], q_full, q_s.index(1))
    for j in range(end - first):
        n0 = nth(j, first, f_lo, f_hi, end) * BN
        stage = j & 1
        mbarrier.wait(k_empty.index(stage), ((j >> 1) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), desc_k.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_k, [i_b, i_k, n0, 0], k_full.index(stage), k_s.index(stage))
        if j == 0:
            mbarrier.expect(do_full, 2 * desc_do.block_type.nbytes)
            tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], do_full, do_s.index(0))
            tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0 + BM, 0], do_full, do_s.index(1))
        stage = j & (VS - 1)
        mbarrier.wait(v_empty.index(stage), ((j // VS) & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), desc_v.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_v, [i_b, i_k, n0, 0], v_full.index(stage), v_s.index(stage))


@gluon.jit
def _query_step(
    W: gl.constexpr, MASKED: gl.constexpr, j, shown, q, dq, minus_lse, minus_delta, buffers, bars, numbers,
    C: gl.constexpr,
):  # fmt: skip
    """Tile j of keys: its part of dQ. If it is masked, `shown` is its first key and each query's interval. With heads
    of 64 q is in registers: there is room for it, and shared memory is read less."""
    q_s, do_s, k_s, v_s = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = bars
    H, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    HIDDEN: gl.constexpr = C[6]
    SL: gl.constexpr = C[4]
    PL: gl.constexpr = gl.DotOperandLayout(0, C[5], 2)
    BD: gl.constexpr = k_s.shape[4]
    stage = j & 1
    phase = (j >> 1) & 1
    k = k_s.index(stage).reshape((BN, BD))
    if BD > 64:
        q = q_s.index(here_and_now(W)).reshape((BM, BD))
    do = do_s.index(here_and_now(W)).reshape((BM, BD))
    VS: gl.constexpr = v_s.shape[0]
    v_stage = j & (VS - 1) if VS > 1 else here_and_now(0)
    v = v_s.index(v_stage).reshape((BN, BD))
    zero = gl.zeros([BM, BN], gl.float32, layout=SL)
    mbarrier.wait(k_full.index(stage), phase)
    sa = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full, 0)
    mbarrier.wait(v_full.index(v_stage), (j // VS) & 1)
    dpa = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(sa,))
    if MASKED:
        n0, lower, upper = shown
        if HIDDEN:  # a key with inf or NaN in it gives every query such a score
            wrong = gl.max(gl.max(gl.where(s * 0.0 == 0.0, 0, 1), 1), 0)
        if n0 < S:  # which it is: see hide_outside
            s = hide_outside(s, lower - n0, upper - n0, True)
    p = gl.exp2(s * scale + minus_lse[:, None])
    # A branch, or ptxas would move the wait for dP before the exp2's: K has long been here.
    mbarrier.wait(k_full.index(stage), phase)
    dp, p = warpgroup_mma_wait(0, deps=(dpa, p))
    ds = p * (dp + minus_delta[:, None])
    if MASKED:  # V of a hidden key may hold NaN
        ds = gl.where(p == 0.0, 0.0, ds)
    ds = gl.convert_layout(ds.to(k_s.dtype), PL, assert_trivial=True)
    if MASKED and HIDDEN and wrong > 0:
        clean(k, BN, BD)
    dqa = warpgroup_mma(ds, k, dq, is_async=True)
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    dq, ds = warpgroup_mma_wait(0, deps=(dqa, ds))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _queries(W: gl.constexpr, desc, buffers, bars, numbers, rows, tables, C: gl.constexpr):
    """A warpgroup: 64 of the queries."""
    desc_q, desc_do, desc_k, desc_v, desc_dq = desc
    q_s, do_s, k_s, v_s = buffers
    q_full, do_full, k_full, k_empty, v_full, v_empty = bars
    H, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    p_lse, p_delta = rows
    start, end, s_rows = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    BD: gl.constexpr = k_s.shape[4]
    i_b, i_h, m0, k_first, f_lo, f_hi, k_end = _query_work(numbers, tables, C, 4)
    m0 += W * BM
    n = k_end - k_first
    edges = n - (f_hi - f_lo)
    o_m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, C[4]))
    lower, upper = bounds(o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, C[2])
    row = (i_b * H + i_h).to(gl.int64) * Tp + o_m
    minus_lse = load_rows(p_lse, row) * scale
    minus_delta = load_rows(p_delta, row)
    dq = gl.zeros([BM, BD], gl.float32, layout=C[5])
    mbarrier.wait(q_full, 0)
    q = q_s.index(W).reshape((BM, BD))
    if BD == 64:
        q = q.load(gl.DotOperandLayout(0, C[4], 2))
    for j in range(edges):
        seen = (nth(j, k_first, f_lo, f_hi, k_end) * BN, lower, upper)
        dq = _query_step(W, True, j, seen, q, dq, minus_lse, minus_delta, buffers, bars, numbers, C)
    for j in range(edges, n):
        dq = _query_step(W, False, j, (), q, dq, minus_lse, minus_delta, buffers, bars, numbers, C)
    send_off(desc_dq, i_b, i_h, m0, dq * sm_scale, q_s.index(W), C[3])
    tma.store_wait(0)


@gluon.jit
def _first_queries(desc, buffers, bars, numbers, rows, tables, C: gl.constexpr):
    _queries(0, desc, buffers, bars, numbers, rows, tables, C)


@gluon.jit
def _second_queries(desc, buffers, bars, numbers, rows, tables, C: gl.constexpr):
    _queries(1, desc, buffers, bars, numbers, rows, tables, C)


NUMBERS = ["s_rows", "H", "G", "T", "S", "Tp", "lo", "hi", "section"]


@gluon.jit(do_not_specialize=NUMBERS)
def queries_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dq, minus_lse, minus_delta, start, end, s_rows, H, G, T, S, Tp, lo, hi,
    scale, sm_scale, section, TABLE: gl.constexpr, ADD: gl.constexpr, HIDDEN: gl.constexpr,
    REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ. Tp: how far apart the heads' rows lie in lse and delta."""
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BD: gl.constexpr = desc_q.block_type.shape[3]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])  # S, dP [BM, BN]
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])  # dQ [BM, BD]
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, BD], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, BD], desc_do.layout)
    # K of a tile is read first and last; V in between, so that where there is no room for two it need be there once.
    VS: gl.constexpr = 1 if BD == 256 else 2
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, BD], desc_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [VS, 1, 1, BN, BD], desc_v.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], ML)
    v_empty = gl.allocate_shared_memory(gl.int64, [VS, 1], ML)
    mbarrier.init(q_full, count=1)
    mbarrier.init(do_full, count=1)
    for i in gl.static_range(VS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    C: gl.constexpr = (BM, BN, TABLE, ADD, SL, QL, HIDDEN)
    job = (
        (desc_q, desc_do, desc_k, desc_v, desc_dq),
        (q_s, do_s, k_s, v_s),
        (q_full, do_full, k_full, k_empty, v_full, v_empty),
        (H, G, T, S, Tp, lo, hi, scale, sm_scale, section),
        (minus_lse, minus_delta),
        (start, end, s_rows),
        C,
    )
    gl.warp_specialize(
        [(_first_queries, job), (_second_queries, job), (_feed_keys, job)], [4, 1], [REGISTERS, FEED_REGISTERS]
    )
