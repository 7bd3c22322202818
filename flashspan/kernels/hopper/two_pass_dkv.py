"""The pass over blocks of keys: dK and dV. See two_pass.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashspan.kernels.hopper.masking import bounds, nth
from flashspan.kernels.hopper.ptx import here_and_now
from flashspan.kernels.hopper.scheduler import key_work
from flashspan.kernels.hopper.shared_memory import clean, send_off


@gluon.jit
def _feed_queries(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The loader warp: K and V once, in the order they are needed, and (Q, -lse) and (dO, -delta) of each tile."""
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    i_b, i_k, n0, first, f_lo, f_hi, end = key_work(
        gl.program_id(0), gl.num_programs(0), numbers, tables, C[1], C[0], C[2], 1
    )
    mbarrier.expect(k_full, desc_k.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_k, [i_b, i_k, n0, 0], k_full, k_s.index(0))
    n = end - first
    for i in range(n * G):
        i_h = i_k * G + i // n
        m0 = nth(i % n, first, f_lo, f_hi, end) * BM
        row = (i_b * H + i_h) * Tp + m0
        stage = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(q_empty.index(stage), phase ^ 1)
        mbarrier.expect(q_full.index(stage), desc_q.block_type.nbytes + desc_l.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_l, [row], q_full.index(stage), l_s.index(stage))
        tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0, 0], q_full.index(stage), q_s.index(stage))
        if i == 0:
            mbarrier.expect(v_full, desc_v.block_type.nbytes)
            tma.async_copy_global_to_shared(desc_v, [i_b, i_k, n0, 0], v_full, v_s.index(0))
        mbarrier.wait(do_empty.index(stage), phase ^ 1)
        mbarrier.expect(do_full.index(stage), desc_do.block_type.nbytes + desc_d.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_d, [row], do_full.index(stage), d_s.index(stage))
        tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], do_full.index(stage), do_s.index(stage))


@gluon.jit
def _across(a_s, b_s, rows_s, stage, C: gl.constexpr):
    """Start S^T or dP^T of a tile, accumulated onto its rows' numbers."""
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    SL: gl.constexpr = C[4]
    BD: gl.constexpr = a_s.shape[4]
    a = a_s.index(here_and_now(0)).reshape((BN, BD))
    x, _ = gl.broadcast(
        rows_s.index(stage).load(gl.SliceLayout(0, SL))[None, :], gl.zeros([BN, BM], gl.float32, layout=SL)
    )
    return warpgroup_mma(a, b_s.index(stage).reshape((BM, BD)).permute((1, 0)), x, is_async=True)


@gluon.jit
def _value_step(i, m0, masked, dv, lower, upper, buffers, bars, numbers, C: gl.constexpr):
    """Tile i of queries, m0 its first row: P, handed on, and its part of dV."""
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    SL: gl.constexpr = C[4]
    PL: gl.constexpr = gl.DotOperandLayout(0, C[5], 2)
    BD: gl.constexpr = k_s.shape[4]
    stage = i & 1
    phase = (i >> 1) & 1
    mbarrier.wait(q_full.index(stage), phase)
    s = warpgroup_mma_wait(0, deps=(_across(k_s, q_s, l_s, stage, C),))
    mbarrier.arrive(q_empty.index(stage), count=1)
    if masked:
        o_m = here_and_now(0) + gl.arange(0, BM, layout=gl.SliceLayout(0, SL))
        seen = (o_m[None, :] >= (lower - m0)[:, None]) & (o_m[None, :] < (upper - m0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    # Half of the exponentials are computed while the product of the other half is under way.
    left, right = s.reshape((BN, 2, BM // 2)).permute((0, 2, 1)).split()
    left = gl.exp2(left * scale)
    pl = gl.convert_layout(left.to(k_s.dtype), PL, assert_trivial=True)
    mbarrier.wait(do_full.index(stage), phase)
    do = do_s.index(stage).reshape((BM, BD))
    dva = warpgroup_mma(pl, do.slice(0, BM // 2), dv, is_async=True)
    right = gl.exp2(right * scale)
    pr = gl.convert_layout(right.to(k_s.dtype), PL, assert_trivial=True)
    dva = warpgroup_mma(pr, do.slice(BM // 2, BM // 2), dva, is_async=True)
    mbarrier.wait(p_empty, (i & 1) ^ 1)
    p = gl.join(left, right).permute((0, 2, 1)).reshape((BN, BM))
    p_s.store(gl.convert_layout(p, SL, assert_trivial=True))
    mbarrier.arrive(p_full, count=1)
    dv, pl, pr = warpgroup_mma_wait(0, deps=(dva, pl, pr))
    mbarrier.arrive(do_empty.index(stage), count=1)
    return dv


@gluon.jit
def _key_step(i, dk, buffers, bars, C: gl.constexpr):
    """Tile i of queries: dS and its part of dK."""
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    BM: gl.constexpr = C[0]
    SL: gl.constexpr = C[4]
    PL: gl.constexpr = gl.DotOperandLayout(0, C[5], 2)
    BD: gl.constexpr = k_s.shape[4]
    stage = i & 1
    phase = (i >> 1) & 1
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma_wait(0, deps=(_across(v_s, do_s, d_s, stage, C),))
    mbarrier.arrive(do_empty.index(stage), count=1)
    mbarrier.wait(p_full, i & 1)
    p = p_s.load(SL)
    ds = gl.convert_layout((p * dp).to(k_s.dtype), PL, assert_trivial=True)
    mbarrier.wait(q_full.index(stage), phase)
    dka = warpgroup_mma(ds, q_s.index(stage).reshape((BM, BD)), dk, is_async=True)
    mbarrier.arrive(p_empty, count=1)
    dk, ds = warpgroup_mma_wait(0, deps=(dka, ds))
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk


@gluon.jit
def _values(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The warpgroup of dV."""
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    first, last, s_columns = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    BD: gl.constexpr = k_s.shape[4]
    i_b, i_k, n0, t_first, f_lo, f_hi, t_end = key_work(
        gl.program_id(0), gl.num_programs(0), numbers, tables, C[1], C[0], C[2], 4
    )
    n = t_end - t_first
    edges = n - (f_hi - f_lo)
    o_n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, C[4]))
    lower, upper = bounds(o_n, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, C[2])
    dv = gl.zeros([BN, BD], gl.float32, layout=C[5])
    mbarrier.wait(k_full, 0)
    if C[6]:
        clean(k_s.index(0).reshape((BN, BD)), BN, BD)
    for g in range(G):
        for j in range(n):
            m0 = nth(j, t_first, f_lo, f_hi, t_end) * BM
            dv = _value_step(g * n + j, m0, j < edges, dv, lower, upper, buffers, bars, numbers, C)
    # Only this warpgroup reads K, and only the other V.
    send_off(desc_dv, i_b, i_k, n0, dv, k_s.index(0), C[3])
    tma.store_wait(0)


@gluon.jit
def _keys(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The warpgroup of dK."""
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BN: gl.constexpr = C[1]
    BD: gl.constexpr = k_s.shape[4]
    i_b, i_k, n0, t_first, f_lo, f_hi, t_end = key_work(
        gl.program_id(0), gl.num_programs(0), numbers, tables, C[1], C[0], C[2], 4
    )
    dk = gl.zeros([BN, BD], gl.float32, layout=C[5])
    mbarrier.wait(v_full, 0)
    if C[6]:
        clean(v_s.index(0).reshape((BN, BD)), BN, BD)
    n = t_end - t_first
    for g in range(G):
        for j in range(n):
            dk = _key_step(g * n + j, dk, buffers, bars, C)
    send_off(desc_dk, i_b, i_k, n0, dk * sm_scale, v_s.index(0), C[3])
    tma.store_wait(0)


NUMBERS = ["s_columns", "H", "K", "G", "T", "S", "Tp", "lo", "hi", "section"]


@gluon.jit(do_not_specialize=NUMBERS)
def keys_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d, first, last, s_columns, H, K, G, T, S, Tp, lo,
    hi, scale, sm_scale, section, TABLE: gl.constexpr, ADD: gl.constexpr, HIDDEN: gl.constexpr,
    REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV. Tp: how far apart the heads' rows lie in lse and delta."""
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BD: gl.constexpr = desc_q.block_type.shape[3]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])  # S^T, dP^T [BN, BM]
    KL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])  # dK, dV [BN, BD]
    # A thread of the second warpgroup reads what its peer in the first wrote: pairs of columns, eight rows at a time.
    XL: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, BD], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, BD], desc_do.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BN, BD], desc_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BN, BD], desc_v.layout)
    p_s = gl.allocate_shared_memory(gl.float32, [BN, BM], XL)
    l_s = gl.allocate_shared_memory(gl.float32, [2, BM], desc_l.layout)
    d_s = gl.allocate_shared_memory(gl.float32, [2, BM], desc_d.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    p_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    p_empty = gl.allocate_shared_memory(gl.int64, [1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    C: gl.constexpr = (BM, BN, TABLE, ADD, SL, KL, HIDDEN)
    job = (
        (desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d),
        (q_s, do_s, k_s, v_s, p_s, l_s, d_s),
        (k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty),
        (H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section),
        (first, last, s_columns),
        C,
    )
    gl.warp_specialize([(_values, job), (_keys, job), (_feed_queries, job)], [4, 1], [REGISTERS, FEED_REGISTERS])
