"""The backward of Hopper in two passes: for heads past 128, up to 256, and wherever gradients must repeat.

At a head size of 256 dK and dV of 128 keys do not fit the registers, and with 64 keys a program would send a tile of dQ
to global memory for every tile of queries it reads: 128 KB through the L2 cache for five products of 64 x 64 x 256,
more than it can give. So there are two kernels, and seven products instead of five. Nothing is added from two sides:
gradients repeat bit for bit, at any head size.

`keys_kernel` owns 64 keys, or 128 up to a head size of 128. One warpgroup computes S^T and P and keeps dV; the other
computes dP^T and dS and keeps dK; P goes from the one to the other through shared memory, in float32. Keys run down and
queries across, so that P and dS are already in the registers dV and dK want them in.

`queries_kernel` owns 128 queries, 64 per warpgroup: Q and dO stay in shared memory, dQ in registers, K and V pass by.

In both, one warp loads, and the two warpgroups keep the tensor cores busy by turns: what one computes between its
products happens during the other's.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashspan.kernels.hopper.names import barrier, here_and_now, reduce_add
from flashspan.kernels.hopper.tensors import L2_BYTES, block_dim, describe, multiprocessors
from flashspan.kernels.hopper.walk import blocks, bounds, key_work, nth, place
from flashspan.kernels.masks import Mask
from flashspan.kernels.portable.arguments import LOG2E, Launch, mask_arguments


@gluon.jit
def _clean(x_s, BN: gl.constexpr, BD: gl.constexpr):
    """Set inf and NaN in shared memory to 0: a key that some query does not see must not reach it as 0 * NaN. Those who
    do see it have NaN from their lse or delta. For one warpgroup, 64 columns at a time for want of registers."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LIMIT: gl.constexpr = 0x7C00 if x_s.dtype == gl.float16 else 0x7F80
    for i in gl.static_range(BD // 64):
        part = x_s.slice(64 * i, 64, dim=1)
        x = part.load(L)
        size = x.to(gl.int16, bitcast=True) & 0x7FFF
        if gl.max(gl.max(size, 1), 0) >= LIMIT:
            part.store(gl.where(size >= LIMIT, gl.zeros([BN, 64], x_s.dtype, layout=L), x))
    fence_async_shared()
    barrier()


@gluon.jit
def _send(desc, b, h, row, column, x, room, ADD: gl.constexpr):
    """Write a tile, or add it, by the copy engine."""
    x_s = room._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    x_s.reshape((x.shape[0], x.shape[1])).store(x.to(desc.dtype))
    fence_async_shared()
    barrier()
    if ADD:
        reduce_add(desc, [b, h, row, column], x_s)
    else:
        tma.async_copy_shared_to_global(desc, [b, h, row, column], x_s)
    tma.store_wait(0)


@gluon.jit
def _leave(desc, b, h, row, x, room, ADD: gl.constexpr):
    """Send off a finished gradient through shared memory nobody uses any more; in float32 one half, then the other."""
    HALF: gl.constexpr = desc.block_type.shape[3]
    if x.shape[1] == HALF:
        _send(desc, b, h, row, 0, x, room, ADD)
    else:
        left, right = x.reshape((x.shape[0], 2, HALF)).permute((0, 2, 1)).split()
        _send(desc, b, h, row, 0, left, room, ADD)
        barrier()
        _send(desc, b, h, row, HALF, right, room, ADD)


# Over blocks of keys: dK and dV.


@gluon.jit
def _feed_queries(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The loader warp: K and V once, in the order they are needed, and (Q, -lse) and (dO, -delta) of each tile."""
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    i_b, i_k, n0, first, f_lo, f_hi, end = key_work(numbers, tables, C[1], C[0], C[2], 1)
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
    ds = (p_s.load(SL) * dp).to(k_s.dtype)
    ds = gl.convert_layout(ds, PL, assert_trivial=True)
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
    i_b, i_k, n0, t_first, f_lo, f_hi, t_end = key_work(numbers, tables, C[1], C[0], C[2], 4)
    n = t_end - t_first
    edges = n - (f_hi - f_lo)
    o_n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, C[4]))
    lower, upper = bounds(o_n, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, C[2])
    dv = gl.zeros([BN, BD], gl.float32, layout=C[5])
    mbarrier.wait(k_full, 0)
    if C[6]:
        _clean(k_s.index(0).reshape((BN, BD)), BN, BD)
    for g in range(G):
        for j in range(n):
            m0 = nth(j, t_first, f_lo, f_hi, t_end) * BM
            dv = _value_step(g * n + j, m0, j < edges, dv, lower, upper, buffers, bars, numbers, C)
    # Only this warpgroup reads K, and only the other V.
    _leave(desc_dv, i_b, i_k, n0, dv, k_s.index(0), C[3])


@gluon.jit
def _keys(desc, buffers, bars, numbers, tables, C: gl.constexpr):
    """The warpgroup of dK."""
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, p_s, l_s, d_s = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BN: gl.constexpr = C[1]
    BD: gl.constexpr = k_s.shape[4]
    i_b, i_k, n0, t_first, f_lo, f_hi, t_end = key_work(numbers, tables, C[1], C[0], C[2], 4)
    dk = gl.zeros([BN, BD], gl.float32, layout=C[5])
    mbarrier.wait(v_full, 0)
    if C[6]:
        _clean(v_s.index(0).reshape((BN, BD)), BN, BD)
    for i in range((t_end - t_first) * G):
        dk = _key_step(i, dk, buffers, bars, C)
    _leave(desc_dk, i_b, i_k, n0, dk * sm_scale, v_s.index(0), C[3])


KEYS_NUMBERS = ["s_columns", "H", "K", "G", "T", "S", "Tp", "lo", "hi", "section"]


@gluon.jit(do_not_specialize=KEYS_NUMBERS)
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


# Over blocks of queries: dQ.


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
        mbarrier.wait(v_empty, (j & 1) ^ 1)
        mbarrier.expect(v_full, desc_v.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_v, [i_b, i_k, n0, 0], v_full, v_s.index(0))


@gluon.jit
def _query_step(j, n0, masked, dq, lower, upper, minus_lse, minus_delta, W: gl.constexpr, buffers, bars, numbers,
                C: gl.constexpr):  # fmt: skip
    """Tile j of keys, n0 the first of them: its part of dQ."""
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
    q = q_s.index(here_and_now(W)).reshape((BM, BD))
    do = do_s.index(here_and_now(W)).reshape((BM, BD))
    v = v_s.index(here_and_now(0)).reshape((BN, BD))
    zero = gl.zeros([BM, BN], gl.float32, layout=SL)
    mbarrier.wait(k_full.index(stage), phase)
    sa = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full, 0)
    mbarrier.wait(v_full, j & 1)
    dpa = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(sa,))
    wrong = 0
    if masked:
        if HIDDEN:  # a key with inf or NaN in it gives every query such a score
            wrong = gl.max(gl.max(gl.where(s * 0.0 == 0.0, 0, 1), 1), 0)
        o_n = here_and_now(0) + gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
        seen = (o_n[None, :] >= (lower - n0)[:, None]) & (o_n[None, :] < (upper - n0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    p = gl.exp2(s * scale + minus_lse[:, None])
    # A branch, or ptxas would move the wait for dP before the exp2's: K has long been here.
    mbarrier.wait(k_full.index(stage), phase)
    dp, p = warpgroup_mma_wait(0, deps=(dpa, p))
    ds = p * (dp + minus_delta[:, None])
    if masked:  # V of a hidden key may hold NaN
        ds = gl.where(p == 0.0, 0.0, ds)
    ds = gl.convert_layout(ds.to(k_s.dtype), PL, assert_trivial=True)
    if wrong > 0:
        _clean(k, BN, BD)
    dqa = warpgroup_mma(ds, k, dq, is_async=True)
    mbarrier.arrive(v_empty, count=1)
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
    row = (i_b * H + i_h).to(gl.int64) * Tp
    minus_lse = gl.load(p_lse + row + o_m) * scale
    minus_delta = gl.load(p_delta + row + o_m)
    dq = gl.zeros([BM, BD], gl.float32, layout=C[5])
    mbarrier.wait(q_full, 0)
    for j in range(n):
        n0 = nth(j, k_first, f_lo, f_hi, k_end) * BN
        dq = _query_step(j, n0, j < edges, dq, lower, upper, minus_lse, minus_delta, W, buffers, bars, numbers, C)
    _leave(desc_dq, i_b, i_h, m0, dq * sm_scale, q_s.index(W), C[3])


@gluon.jit
def _first_queries(desc, buffers, bars, numbers, rows, tables, C: gl.constexpr):
    _queries(0, desc, buffers, bars, numbers, rows, tables, C)


@gluon.jit
def _second_queries(desc, buffers, bars, numbers, rows, tables, C: gl.constexpr):
    _queries(1, desc, buffers, bars, numbers, rows, tables, C)


QUERIES_NUMBERS = ["s_rows", "H", "G", "T", "S", "Tp", "lo", "hi", "section"]


@gluon.jit(do_not_specialize=QUERIES_NUMBERS)
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
    # K of a tile is read first and last; V in between, so that the next one arrives in its place in time.
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, BD], desc_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BN, BD], desc_v.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], ML)
    mbarrier.init(q_full, count=1)
    mbarrier.init(do_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
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


def two_pass_launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    minus_lse: Tensor,
    minus_delta: Tensor,
    mask: Mask,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
) -> tuple[Launch, Launch]:
    """What backward launches once the rows are prepared: dk and dv, then dq, which needs no sums and no cast."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    table, start, end, first, last, s_rows, s_columns, lo, hi, _ = mask_arguments(mask, T, S, minus_lse)
    wide, chip = block_dim(D), multiprocessors(q.device)
    # Keys of a block: as many as the registers hold dK or dV of.
    block = 64 if wide == 256 else 128
    by_query = [describe(x, 1, 1, 64, wide) for x in (q, dout)]
    by_key = [describe(x, 1, 1, block, wide) for x in (k, v)]
    to_dq, to_dk, to_dv = (
        describe(x, 1, 1, rows, wide // (x.element_size() // 2)) for x, rows in ((dq, 64), (dk, block), (dv, block))
    )
    rows = minus_lse.numel() // (B * H)
    constants = {
        "TABLE": table, "ADD": accumulate, "HIDDEN": table or lo > 1 - T or hi < S - 1, "REGISTERS": 240,
        "FEED_REGISTERS": 24, "num_warps": 4,
    }  # fmt: skip
    num_blocks = triton.cdiv(S, block)
    # A block of keys that serves a group of heads takes that much longer: more of them must start early.
    section = min(B * K, max(1, chip * (H // K) // num_blocks))
    by_keys = Launch(
        keys_kernel,
        (num_blocks * B * K,),
        (
            *by_query, *by_key, to_dk, to_dv, describe(minus_lse, 64), describe(minus_delta, 64), first, last,
            s_columns, H, K, H // K, T, S, rows, lo, hi, scale * LOG2E, scale, section,
        ),
        constants,
    )  # fmt: skip
    num_blocks = triton.cdiv(T, 128)
    # Key heads in flight together: those whose K and V fit the cache, but enough to occupy the chip.
    section = min(B * K, max(1, L2_BYTES // (4 * S * wide), chip // (num_blocks * (H // K))))
    by_queries = Launch(
        queries_kernel,
        (num_blocks * B * H,),
        (
            *by_query, *by_key, to_dq, minus_lse, minus_delta, start, end, s_rows, H, H // K, T, S, rows, lo, hi,
            scale * LOG2E, scale, section * (H // K),
        ),
        constants,
    )  # fmt: skip
    return by_keys, by_queries
