"""The backward kernel for Hopper.

A program owns a block of keys: K and V stay in shared memory, dK and dV in registers, and the queries that see the
block pass by, for every query head that shares it. Eight warps multiply; one warp loads Q, dO and the rows' two
numbers; one adds finished dQ tiles into global float32 through the copy engine. Everything is transposed, keys down and
queries across, so that P and dS are already in the registers dV and dK want them in. The accumulators of S and dP start
at -lse and -delta, which saves both subtractions.

With ROTATE, S of the next tile is under way while dQ of this one is written.
"""

from __future__ import annotations

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
from flashspan.kernels.hopper.walk import blocks, bounds, place


@gluon.jit
def _query_tile(j, first, f_lo, f_hi, end):
    """The j-th tile of queries a block of keys meets: those at the edges of the mask first, then the full ones."""
    inside = f_lo - first
    edges = inside + end - f_hi
    return gl.where(j >= edges, f_lo + j - edges, gl.where(j < inside, first + j, f_hi + j - inside))


@gluon.jit
def _work(numbers, tables, C: gl.constexpr, WARPS: gl.constexpr):
    """This program's block of keys and the tiles of queries it walks."""
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    first, last, s_columns = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    TABLE: gl.constexpr = C[3]
    num_blocks = gl.cdiv(S, BN)
    i_n, i_bk = place(gl.program_id(0), num_blocks, gl.num_programs(0) // num_blocks, section)
    i_b = i_bk // K
    i_k = i_bk % K
    t_first, f_lo, f_hi, t_end = blocks(
        i_n * BN, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, TABLE, BN, BM, WARPS
    )
    return i_b, i_k, i_n * BN, t_first, f_lo, f_hi, t_end


@gluon.jit
def _feed(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    """The loader warp: K and V once, then (Q, -lse) and (dO, -delta) of each tile; one tile of Q more than there are,
    whose S nobody reads."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    QS: gl.constexpr = C[2]
    i_b, i_k, n0, first, f_lo, f_hi, end = _work(numbers, tables, C, 1)
    mbarrier.expect(kv_full, 2 * desc_k.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_k, [i_b, i_k, n0, 0], kv_full, k_s.index(0))
    tma.async_copy_global_to_shared(desc_v, [i_b, i_k, n0, 0], kv_full, v_s.index(0))
    n = end - first
    total = n * G
    for i in range(total + C[9]):
        i_h = i_k * G + gl.minimum(i // n, G - 1)
        m0 = _query_tile(i % n, first, f_lo, f_hi, end) * BM
        row = (i_b * H + i_h) * Tp + m0
        stage = i & (QS - 1)
        mbarrier.wait(q_empty.index(stage), ((i // QS) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), desc_q.block_type.nbytes + desc_l.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_l, [row], q_full.index(stage), l_s.index(stage))
        tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0, 0], q_full.index(stage), q_s.index(stage))
        if i < total:
            stage = i & 1
            mbarrier.wait(do_empty.index(stage), ((i >> 1) & 1) ^ 1)
            mbarrier.expect(do_full.index(stage), desc_do.block_type.nbytes + desc_d.block_type.nbytes)
            tma.async_copy_global_to_shared(desc_d, [row], do_full.index(stage), d_s.index(stage))
            tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], do_full.index(stage), do_s.index(stage))


@gluon.jit
def _add_dq(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    """The warp that adds each dQ tile into global float32."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    i_b, i_k, n0, first, f_lo, f_hi, end = _work(numbers, tables, C, 1)
    n = end - first
    for i in range(n * G):
        m0 = _query_tile(i % n, first, f_lo, f_hi, end) * BM
        mbarrier.wait(dq_full, i & 1)
        reduce_add(desc_dq, [i_b, i_k * G + i // n, m0, 0], dq_s)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty, count=1)


@gluon.jit
def _scores(i, buffers, bars, C: gl.constexpr):
    """Start S^T of tile i, accumulated onto -lse."""
    q_s, do_s, k_s, v_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    QS: gl.constexpr = C[2]
    SL: gl.constexpr = C[6]
    BD: gl.constexpr = k_s.shape[4]
    k = k_s.index(here_and_now(0)).reshape((BN, BD))
    stage = i & (QS - 1)
    mbarrier.wait(q_full.index(stage), (i // QS) & 1)
    minus_lse = l_s.index(stage).load(gl.SliceLayout(0, SL))
    s, _ = gl.broadcast(minus_lse[None, :], gl.zeros([BN, BM], gl.float32, layout=SL))
    return warpgroup_mma(k, q_s.index(stage).reshape((BM, BD)).permute((1, 0)), s, is_async=True)


@gluon.jit
def _step(i, m0, masked, s, dk, dv, lower, upper, buffers, bars, numbers, C: gl.constexpr):
    """Tile i of queries, m0 its first row. With ROTATE its S is here already, and at the end S of tile i + 1 is."""
    q_s, do_s, k_s, v_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    QS: gl.constexpr = C[2]
    ADD: gl.constexpr = C[4]
    SL: gl.constexpr = C[6]
    KL: gl.constexpr = C[7]
    QL: gl.constexpr = C[8]
    ROTATE: gl.constexpr = C[9]
    BD: gl.constexpr = k_s.shape[4]
    PL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    dtype: gl.constexpr = k_s.dtype
    here = i & (QS - 1)
    two = i & 1
    if not ROTATE:
        sa = _scores(i, buffers, bars, C)
    mbarrier.wait(do_full.index(two), (i >> 1) & 1)
    do = do_s.index(two).reshape((BM, BD))
    minus_delta = d_s.index(two).load(gl.SliceLayout(0, SL))
    dp, _ = gl.broadcast(minus_delta[None, :], gl.zeros([BN, BM], gl.float32, layout=SL))
    dpa = warpgroup_mma(v_s.index(here_and_now(0)).reshape((BN, BD)), do.permute((1, 0)), dp, is_async=True)
    if not ROTATE:
        s = warpgroup_mma_wait(1, deps=(sa,))
    if masked:
        o_m = here_and_now(0) + gl.arange(0, BM, layout=gl.SliceLayout(0, SL))
        seen = (o_m[None, :] >= (lower - m0)[:, None]) & (o_m[None, :] < (upper - m0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    p = gl.exp2(s * scale)
    pd = gl.convert_layout(p.to(dtype), PL, assert_trivial=True)
    dp = warpgroup_mma_wait(0, deps=(dpa,))
    ds = (p * dp).to(dtype)
    ds_t = ds_s.index(here_and_now(0))
    ds_t.store(ds)
    dva = warpgroup_mma(pd, do, dv, is_async=True)
    fence_async_shared()
    barrier()
    zero = gl.zeros([BM, BD], gl.float32, layout=QL)
    dqa = warpgroup_mma(
        ds_t.permute((1, 0)), k_s.index(here_and_now(0)).reshape((BN, BD)), zero, use_acc=False, is_async=True
    )
    dv = warpgroup_mma_wait(1, deps=(dva,))
    mbarrier.arrive(do_empty.index(two), count=1)
    if ROTATE:
        sa = _scores(i + 1, buffers, bars, C)
    dka = warpgroup_mma(
        gl.convert_layout(ds, PL, assert_trivial=True), q_s.index(here).reshape((BM, BD)), dk, is_async=True
    )
    if ROTATE:
        dq = warpgroup_mma_wait(2, deps=(dqa,))
    else:
        dq = warpgroup_mma_wait(1, deps=(dqa,))
    if ADD:
        dq = dq * sm_scale
    mbarrier.wait(dq_empty, (i & 1) ^ 1)
    dq_s.reshape((BM, BD)).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full, count=1)
    if ROTATE:
        dk, s = warpgroup_mma_wait(0, deps=(dka, sa))
    else:
        dk = warpgroup_mma_wait(0, deps=(dka,))
    mbarrier.arrive(q_empty.index(here), count=1)
    return s, dk, dv


@gluon.jit
def _leave(p, x, here, ADD: gl.constexpr):
    """Write a finished gradient, or add it: nobody else writes there, an atomic only saves the registers of a load."""
    if ADD:
        gl.atomic_add(p, x, mask=here, sem="relaxed")
    else:
        gl.store(p, x.to(p.dtype.element_ty), mask=here)


@gluon.jit
def _clean(x_s, BN: gl.constexpr, BD: gl.constexpr):
    """Set inf and NaN in shared memory to 0: a key that some query does not see must not reach it as 0 * NaN. Those who
    do see it have NaN from their lse or delta."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [8, 1], [1, 0])
    x = x_s.load(L)
    size = x.to(gl.int16, bitcast=True) & 0x7FFF
    LIMIT: gl.constexpr = 0x7C00 if x_s.dtype == gl.float16 else 0x7F80
    if gl.max(gl.max(size, 1), 0) >= LIMIT:
        x_s.store(gl.where(size >= LIMIT, gl.zeros([BN, BD], x_s.dtype, layout=L), x))
        fence_async_shared()
    barrier()


@gluon.jit
def _multiply(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    """The eight warps that compute."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_l, desc_d = desc
    q_s, do_s, k_s, v_s, ds_s, dq_s, l_s, d_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    p_dk, p_dv, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs = outputs
    first, last, s_columns = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    TABLE: gl.constexpr = C[3]
    ADD: gl.constexpr = C[4]
    D: gl.constexpr = C[5]
    SL: gl.constexpr = C[6]
    KL: gl.constexpr = C[7]
    ROTATE: gl.constexpr = C[9]
    HIDDEN: gl.constexpr = C[10]
    BD: gl.constexpr = desc_k.block_type.shape[3]
    i_b, i_k, n0, t_first, f_lo, f_hi, t_end = _work(numbers, tables, C, 8)
    n = t_end - t_first
    edges = n - (f_hi - f_lo)
    o_n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, SL))
    lower, upper = bounds(o_n, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, TABLE)
    dk = gl.zeros([BN, BD], gl.float32, layout=KL)
    dv = gl.zeros([BN, BD], gl.float32, layout=KL)
    mbarrier.wait(kv_full, 0)
    if HIDDEN:
        _clean(k_s.index(0).reshape((BN, BD)), BN, BD)
        _clean(v_s.index(0).reshape((BN, BD)), BN, BD)
    if ROTATE:
        s = warpgroup_mma_wait(0, deps=(_scores(0, buffers, bars, C),))
    else:
        s = gl.zeros([BN, BM], gl.float32, layout=SL)
    for g in range(G):
        for j in range(n):
            m0 = _query_tile(j, t_first, f_lo, f_hi, t_end) * BM
            s, dk, dv = _step(g * n + j, m0, j < edges, s, dk, dv, lower, upper, buffers, bars, numbers, C)

    o_r = gl.arange(0, BN, layout=gl.SliceLayout(1, KL))
    o_d = here_and_now(0) + gl.arange(0, BD, layout=gl.SliceLayout(0, KL))
    here = (n0 + o_r < S)[:, None] & (o_d < D)[None, :]
    p_tile = p_dv + i_b.to(gl.int64) * (s_vb * 8) + i_k.to(gl.int64) * (s_vh * 8) + n0.to(gl.int64) * (s_vs * 8)
    p_tile = p_tile + (o_r[:, None] * (s_vs * 8) + o_d[None, :])
    _leave(p_tile, dv, here, ADD)
    p_tile = p_dk + i_b.to(gl.int64) * (s_kb * 8) + i_k.to(gl.int64) * (s_kh * 8) + n0.to(gl.int64) * (s_ks * 8)
    p_tile = p_tile + (o_r[:, None] * (s_ks * 8) + o_d[None, :])
    _leave(p_tile, dk * sm_scale, here, ADD)


NUMBERS = [
    "s_kb", "s_kh", "s_ks", "s_vb", "s_vh", "s_vs", "s_columns", "H", "K", "G", "T", "S", "Tp", "lo", "hi",
    "section",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_l, desc_d, dk, dv, first, last, s_kb, s_kh, s_ks, s_vb,
    s_vh, s_vs, s_columns, H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section, D: gl.constexpr,
    STAGES: gl.constexpr, TABLE: gl.constexpr, ADD: gl.constexpr, ROTATE: gl.constexpr, HIDDEN: gl.constexpr,
    FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Strides of dk and dv come in units of 8 elements. Tp: how far apart the heads' rows lie in lse and delta."""
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BD: gl.constexpr = desc_q.block_type.shape[3]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])  # S^T, dP^T [BN, BM]
    KL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BD, 16])  # dK, dV [BN, BD]
    # dQ [BM, BD]: the warpgroups share it by rows, or by columns where there are rows for one only.
    DOWN: gl.constexpr = BM // 64
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * DOWN, 2 // DOWN], [16, BD * DOWN // 2, 16])
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, BD], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, BD], desc_do.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BN, BD], desc_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BN, BD], desc_v.layout)
    ds_s = gl.allocate_shared_memory(dtype, [1, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, [1, 1, BM, BD], desc_dq.layout)
    l_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], desc_l.layout)
    d_s = gl.allocate_shared_memory(gl.float32, [2, BM], desc_l.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    dq_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], ML)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=1)
    C: gl.constexpr = (BM, BN, STAGES, TABLE, ADD, D, SL, KL, QL, ROTATE, HIDDEN)
    job = (
        (desc_q, desc_do, desc_k, desc_v, desc_dq, desc_l, desc_d),
        (q_s, do_s, k_s, v_s, ds_s, dq_s, l_s, d_s),
        (kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty),
        (H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section),
        (dk, dv, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs),
        (first, last, s_columns),
        C,
    )
    gl.warp_specialize([(_multiply, job), (_feed, job), (_add_dq, job)], [1, 1], [FEED_REGISTERS, FEED_REGISTERS])
