"""The pass over blocks of keys: dK and dV. See two_pass.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flashspan.kernels.hopper.config import (
    BackwardSizes,
    BackwardTensors,
    IntervalMask,
    KeyPassBarriers,
    KeyPassBuffers,
    PassConfig,
)
from flashspan.kernels.hopper.masking import intervals_of, nth_block
from flashspan.kernels.hopper.ptx import opaque
from flashspan.kernels.hopper.scheduler import head_of_keys, locate_keys
from flashspan.kernels.hopper.shared_memory import clear_nonfinite, matrix, new_barrier, new_barriers, store_output

NUMBERS = ["s_columns", "H", "K", "G", "T", "S", "padded_T", "lo", "hi", "section"]


@gluon.jit(do_not_specialize=NUMBERS)
def keys_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dk, desc_dv, desc_lse, desc_delta, first, last, s_columns, H, K, G, T, S,
    padded_T, lo, hi, scale, sm_scale, section, TABLE: gl.constexpr, ACCUMULATE: gl.constexpr, HAS_EDGES: gl.constexpr,
    SPLIT_HEADS: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a block of keys."""
    BLOCK_Q: gl.constexpr = desc_q.block_type.shape[2]
    BLOCK_D: gl.constexpr = desc_q.block_type.shape[3]
    BLOCK_K: gl.constexpr = desc_k.block_type.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])  # S^T, dP^T [BLOCK_K, BLOCK_Q]
    GRADIENTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])  # dK, dV [BLOCK_K, BLOCK_D]
    # A thread of the second consumer reads what the same thread of the first wrote: pairs of columns, 8 rows at a time.
    EXCHANGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_Q, BLOCK_D], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_Q, BLOCK_D], desc_do.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_K, BLOCK_D], desc_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_K, BLOCK_D], desc_v.layout)
    p_s = gl.allocate_shared_memory(gl.float32, [BLOCK_K, BLOCK_Q], EXCHANGE)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], desc_lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], desc_delta.layout)
    config = PassConfig(BLOCK_Q, BLOCK_K, BLOCK_D, TABLE, ACCUMULATE, HAS_EDGES, SPLIT_HEADS, SCORES, GRADIENTS)
    job = (
        BackwardTensors(desc_q, desc_do, desc_k, desc_v, None, desc_dk, desc_dv, desc_lse, desc_delta),
        KeyPassBuffers(q_s, do_s, k_s, v_s, p_s, lse_s, delta_s),
        KeyPassBarriers(
            k_full=new_barrier(1),
            v_full=new_barrier(1),
            q_full=new_barriers(2, 1),
            q_empty=new_barriers(2, 2),
            do_full=new_barriers(2, 1),
            do_empty=new_barriers(2, 2),
            p_full=new_barrier(1),
            p_empty=new_barrier(1),
        ),
        BackwardSizes(H, K, G, T, S, padded_T, lo, hi, scale, sm_scale, section),
        IntervalMask(first, last, s_columns),
        config,
    )
    gl.warp_specialize(
        [(_consume_dv, job), (_consume_dk, job), (_produce, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
    )


@gluon.jit
def _find_work(sizes, mask, config, WARPS: gl.constexpr):
    """Return this program's sequence, key head and first key, and the blocks of queries that it visits."""
    return locate_keys(
        gl.program_id(0), gl.num_programs(0), sizes, mask, config.BLOCK_K, config.BLOCK_Q, config.TABLE, WARPS
    )


@gluon.jit
def _produce(tensors, buffers, barriers, sizes, mask, config):
    """The producer warp: loads K and V once, each when it is needed, and (Q, -lse) and (dO, -delta) of each tile."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    desc_q, desc_do, desc_k, desc_v = tensors.desc_q, tensors.desc_do, tensors.desc_k, tensors.desc_v
    desc_lse, desc_delta = tensors.desc_lse, tensors.desc_delta
    do_full, k_full, q_full, v_full = barriers.do_full, barriers.k_full, barriers.q_full, barriers.v_full
    i_b, i_k, n0, first, first_full, end_full, end = _find_work(sizes, mask, config, 1)
    i_shared = head_of_keys(i_k, sizes.K, desc_k, config.SPLIT_HEADS)
    mbarrier.expect(k_full, desc_k.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_k, [i_b, i_shared, n0, 0], k_full, buffers.k_s.index(0))
    n = end - first
    for i in range(n * sizes.G):
        i_h = i_k * sizes.G + i // n
        m0 = nth_block(i % n, first, first_full, end_full, end) * BLOCK_Q
        row = (i_b * sizes.H + i_h) * sizes.padded_T + m0
        stage = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
        mbarrier.expect(q_full.index(stage), desc_q.block_type.nbytes + desc_lse.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_lse, [row], q_full.index(stage), buffers.lse_s.index(stage))
        tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0, 0], q_full.index(stage), buffers.q_s.index(stage))
        if i == 0:
            mbarrier.expect(v_full, desc_v.block_type.nbytes)
            tma.async_copy_global_to_shared(desc_v, [i_b, i_shared, n0, 0], v_full, buffers.v_s.index(0))
        mbarrier.wait(barriers.do_empty.index(stage), phase ^ 1)
        mbarrier.expect(do_full.index(stage), desc_do.block_type.nbytes + desc_delta.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_delta, [row], do_full.index(stage), buffers.delta_s.index(stage))
        tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], do_full.index(stage), buffers.do_s.index(stage))


@gluon.jit
def _start_scores(a_s, b_s, bias_s, stage, config):
    """Start S^T or dP^T of a tile; the accumulator starts at each query's number, -lse or -delta."""
    a = matrix(a_s, opaque(0))
    x, _ = gl.broadcast(
        bias_s.index(stage).load(gl.SliceLayout(0, config.SCORES))[None, :],
        gl.zeros([config.BLOCK_K, config.BLOCK_Q], gl.float32, layout=config.SCORES),
    )
    return warpgroup_mma(a, matrix(b_s, stage).permute((1, 0)), x, is_async=True)


@gluon.jit
def _value_step(i, m0, masked, dv, lower, upper, buffers, barriers, sizes, config):
    """Tile i of queries, with first row m0: hand P to the other consumer, and return dV plus the tile's part."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_K: gl.constexpr = config.BLOCK_K
    k_s = buffers.k_s
    PL: gl.constexpr = gl.DotOperandLayout(0, config.GRADIENTS, 2)
    stage = i & 1
    phase = (i >> 1) & 1
    mbarrier.wait(barriers.q_full.index(stage), phase)
    s = warpgroup_mma_wait(0, deps=(_start_scores(k_s, buffers.q_s, buffers.lse_s, stage, config),))
    mbarrier.arrive(barriers.q_empty.index(stage), count=1)
    if masked:
        o_m = opaque(0) + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, config.SCORES))
        seen = (o_m[None, :] >= (lower - m0)[:, None]) & (o_m[None, :] < (upper - m0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    # Half of the exponentials are computed while the matmul of the other half is under way.
    left, right = s.reshape((BLOCK_K, 2, BLOCK_Q // 2)).permute((0, 2, 1)).split()
    left = gl.exp2(left * sizes.scale)
    pl = gl.convert_layout(left.to(k_s.dtype), PL, assert_trivial=True)
    mbarrier.wait(barriers.do_full.index(stage), phase)
    do = matrix(buffers.do_s, stage)
    dva = warpgroup_mma(pl, do.slice(0, BLOCK_Q // 2), dv, is_async=True)
    right = gl.exp2(right * sizes.scale)
    pr = gl.convert_layout(right.to(k_s.dtype), PL, assert_trivial=True)
    dva = warpgroup_mma(pr, do.slice(BLOCK_Q // 2, BLOCK_Q // 2), dva, is_async=True)
    mbarrier.wait(barriers.p_empty, (i & 1) ^ 1)
    p = gl.join(left, right).permute((0, 2, 1)).reshape((BLOCK_K, BLOCK_Q))
    buffers.p_s.store(gl.convert_layout(p, config.SCORES, assert_trivial=True))
    mbarrier.arrive(barriers.p_full, count=1)
    dv, pl, pr = warpgroup_mma_wait(0, deps=(dva, pl, pr))
    mbarrier.arrive(barriers.do_empty.index(stage), count=1)
    return dv


@gluon.jit
def _key_step(i, dk, buffers, barriers, config):
    """Tile i of queries: compute dS, and return dK plus the tile's part."""
    PL: gl.constexpr = gl.DotOperandLayout(0, config.GRADIENTS, 2)
    stage = i & 1
    phase = (i >> 1) & 1
    mbarrier.wait(barriers.do_full.index(stage), phase)
    dp = warpgroup_mma_wait(0, deps=(_start_scores(buffers.v_s, buffers.do_s, buffers.delta_s, stage, config),))
    mbarrier.arrive(barriers.do_empty.index(stage), count=1)
    mbarrier.wait(barriers.p_full, i & 1)
    p = buffers.p_s.load(config.SCORES)
    ds = gl.convert_layout((p * dp).to(buffers.k_s.dtype), PL, assert_trivial=True)
    mbarrier.wait(barriers.q_full.index(stage), phase)
    dka = warpgroup_mma(ds, matrix(buffers.q_s, stage), dk, is_async=True)
    mbarrier.arrive(barriers.p_empty, count=1)
    dk, ds = warpgroup_mma_wait(0, deps=(dka, ds))
    mbarrier.arrive(barriers.q_empty.index(stage), count=1)
    return dk


@gluon.jit
def _consume_dv(tensors, buffers, barriers, sizes, mask, config):
    """The consumer that owns dV."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_K: gl.constexpr = config.BLOCK_K
    i_b, i_k, n0, first, first_full, end_full, end = _find_work(sizes, mask, config, 4)
    n = end - first
    num_edges = n - (end_full - first_full)
    o_n = n0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, config.SCORES))
    lower, upper = intervals_of(o_n, sizes.S, sizes.T, -sizes.hi, -sizes.lo, mask, i_b, config.TABLE)
    dv = gl.zeros([BLOCK_K, config.BLOCK_D], gl.float32, layout=config.GRADIENTS)
    mbarrier.wait(barriers.k_full, 0)
    if config.HAS_EDGES:
        clear_nonfinite(matrix(buffers.k_s, 0))
    for g in range(sizes.G):
        for j in range(n):
            m0 = nth_block(j, first, first_full, end_full, end) * BLOCK_Q
            dv = _value_step(g * n + j, m0, j < num_edges, dv, lower, upper, buffers, barriers, sizes, config)
    # dV is written from K's buffer: only this consumer reads K, and only the other one reads V.
    store_output(tensors.desc_dv, i_b, i_k, n0, dv, buffers.k_s.index(0), config.ACCUMULATE)
    tma.store_wait(0)


@gluon.jit
def _consume_dk(tensors, buffers, barriers, sizes, mask, config):
    """The consumer that owns dK."""
    i_b, i_k, n0, first, first_full, end_full, end = _find_work(sizes, mask, config, 4)
    dk = gl.zeros([config.BLOCK_K, config.BLOCK_D], gl.float32, layout=config.GRADIENTS)
    mbarrier.wait(barriers.v_full, 0)
    if config.HAS_EDGES:
        clear_nonfinite(matrix(buffers.v_s, 0))
    n = end - first
    for g in range(sizes.G):
        for j in range(n):
            dk = _key_step(g * n + j, dk, buffers, barriers, config)
    store_output(tensors.desc_dk, i_b, i_k, n0, dk * sizes.sm_scale, buffers.v_s.index(0), config.ACCUMULATE)
    tma.store_wait(0)
