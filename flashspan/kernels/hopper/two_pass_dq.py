"""The pass over blocks of queries: dQ. See two_pass.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flashspan.kernels.hopper.config import (
    BackwardSizes,
    IntervalMask,
    PassConfig,
    QueryPassBarriers,
    QueryPassBuffers,
    QueryPassTensors,
)
from flashspan.kernels.hopper.masking import hide_outside, intervals_of, nth_block, visible_blocks
from flashspan.kernels.hopper.parts import load_bias
from flashspan.kernels.hopper.ptx import opaque
from flashspan.kernels.hopper.scheduler import tile_position
from flashspan.kernels.hopper.shared_memory import clear_nonfinite, matrix, new_barrier, new_barriers, store_output

NUMBERS = ["s_rows", "H", "G", "T", "S", "padded_T", "lo", "hi", "section", "num_parts"]


@gluon.jit(do_not_specialize=NUMBERS)
def queries_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dq, minus_lse, minus_delta, start, end, s_rows, H, G, T, S, padded_T, lo, hi,
    scale, sm_scale, section, num_parts, TABLE: gl.constexpr, ACCUMULATE: gl.constexpr, HAS_EDGES: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dQ of a block of queries; with num_parts > 1, of a part of its keys (desc_dq has H * num_parts heads)."""
    BLOCK_Q: gl.constexpr = desc_q.block_type.shape[2]
    BLOCK_D: gl.constexpr = desc_q.block_type.shape[3]
    BLOCK_K: gl.constexpr = desc_k.block_type.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])  # S, dP [BLOCK_Q, BLOCK_K]
    GRADIENTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])  # dQ [BLOCK_Q, BLOCK_D]
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_Q, BLOCK_D], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_Q, BLOCK_D], desc_do.layout)
    # A step reads K at its start and at its end, and V only in between. So if there is little room, V gets one stage.
    V_STAGES: gl.constexpr = 1 if BLOCK_D == 256 else 2
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_K, BLOCK_D], desc_k.layout)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_K, BLOCK_D], desc_v.layout)
    config = PassConfig(BLOCK_Q, BLOCK_K, BLOCK_D, TABLE, ACCUMULATE, HAS_EDGES, False, SCORES, GRADIENTS)
    job = (
        QueryPassTensors(desc_q, desc_do, desc_k, desc_v, desc_dq, minus_lse, minus_delta),
        QueryPassBuffers(q_s, do_s, k_s, v_s),
        QueryPassBarriers(
            q_full=new_barrier(1),
            do_full=new_barrier(1),
            k_full=new_barriers(2, 1),
            k_empty=new_barriers(2, 2),
            v_full=new_barriers(V_STAGES, 1),
            v_empty=new_barriers(V_STAGES, 2),
        ),
        BackwardSizes(H, 0, G, T, S, padded_T, lo, hi, scale, sm_scale, section),
        IntervalMask(start, end, s_rows),
        num_parts,
        config,
    )
    gl.warp_specialize(
        [(_consume, (0,) + job), (_consume, (1,) + job), (_produce, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
    )


@gluon.jit
def _find_work(sizes, mask, num_parts, config, WARPS: gl.constexpr):
    """Return this program's block of queries (the last blocks come first), its part, and the blocks of keys that it
    visits, which may be none if there are several parts."""
    ROWS: gl.constexpr = 2 * config.BLOCK_Q
    num_blocks = gl.cdiv(sizes.T, ROWS)
    i_part = gl.program_id(0) % num_parts
    num_heads = gl.num_programs(0) // num_parts // num_blocks
    i_m, i_bh = tile_position(gl.program_id(0) // num_parts, num_blocks, num_heads, sizes.section)
    m0 = (num_blocks - 1 - i_m) * ROWS
    i_b = i_bh // sizes.H
    first, first_full, end_full, last = visible_blocks(
        m0, sizes.T, sizes.S, sizes.lo, sizes.hi, mask, i_b, config.TABLE, ROWS, config.BLOCK_K, WARPS
    )
    share = gl.cdiv(last - first, num_parts)
    first = gl.minimum(first + i_part * share, last)
    last = gl.minimum(first + share, last)
    first_full = gl.minimum(gl.maximum(first_full, first), last)
    end_full = gl.maximum(gl.minimum(end_full, last), first_full)
    return i_b, i_bh % sizes.H, m0, i_part, first, first_full, end_full, last


@gluon.jit
def _produce(tensors, buffers, barriers, sizes, mask, num_parts, config):
    """The producer warp: loads Q and dO once, each when it is needed, and K and V of each tile."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    desc_do, desc_k, desc_q, desc_v = tensors.desc_do, tensors.desc_k, tensors.desc_q, tensors.desc_v
    do_full, k_full, q_full, v_full = barriers.do_full, barriers.k_full, barriers.q_full, barriers.v_full
    do_s, q_s, v_s = buffers.do_s, buffers.q_s, buffers.v_s
    V_STAGES: gl.constexpr = v_s.shape[0]
    i_b, i_h, m0, _, first, first_full, end_full, end = _find_work(sizes, mask, num_parts, config, 1)
    i_k = i_h // sizes.G
    mbarrier.expect(q_full, 2 * desc_q.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0, 0], q_full, q_s.index(0))
    tma.async_copy_global_to_shared(desc_q, [i_b, i_h, m0 + BLOCK_Q, 0], q_full, q_s.index(1))
    for j in range(end - first):
        n0 = nth_block(j, first, first_full, end_full, end) * config.BLOCK_K
        stage = j & 1
        mbarrier.wait(barriers.k_empty.index(stage), ((j >> 1) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), desc_k.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_k, [i_b, i_k, n0, 0], k_full.index(stage), buffers.k_s.index(stage))
        if j == 0:
            mbarrier.expect(do_full, 2 * desc_do.block_type.nbytes)
            tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], do_full, do_s.index(0))
            tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0 + BLOCK_Q, 0], do_full, do_s.index(1))
        stage = j & (V_STAGES - 1)
        mbarrier.wait(barriers.v_empty.index(stage), ((j // V_STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), desc_v.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_v, [i_b, i_k, n0, 0], v_full.index(stage), v_s.index(stage))


@gluon.jit
def _step(
    WG: gl.constexpr, MASKED: gl.constexpr, j, hidden, dq, q, minus_lse, minus_delta, buffers, barriers, sizes, config
):
    """Tile j of keys: its part of dQ. MASKED: `hidden` is (the tile's first key, start and end of each query's
    interval). With heads of 64, q is in registers, for which there is room, so that shared memory is read less."""
    PL: gl.constexpr = gl.DotOperandLayout(0, config.GRADIENTS, 2)
    stage = j & 1
    phase = (j >> 1) & 1
    k = matrix(buffers.k_s, stage)
    if config.BLOCK_D > 64:
        q = matrix(buffers.q_s, opaque(WG))
    do = matrix(buffers.do_s, opaque(WG))
    V_STAGES: gl.constexpr = buffers.v_s.shape[0]
    v_stage = j & (V_STAGES - 1) if V_STAGES > 1 else opaque(0)
    v = matrix(buffers.v_s, v_stage)
    zero = gl.zeros([config.BLOCK_Q, config.BLOCK_K], gl.float32, layout=config.SCORES)
    mbarrier.wait(barriers.k_full.index(stage), phase)
    sa = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(barriers.do_full, 0)
    mbarrier.wait(barriers.v_full.index(v_stage), (j // V_STAGES) & 1)
    dpa = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(sa,))
    if MASKED:
        n0, lower, upper = hidden
        if config.HAS_EDGES:  # a key with inf or NaN gives every query a non-finite score
            wrong = gl.max(gl.max(gl.where(s * 0.0 == 0.0, 0, 1), 1), 0)
        if n0 < sizes.S:  # always true, but a branch: see hide_outside
            s = hide_outside(s, lower - n0, upper - n0, True)
    p = gl.exp2(s * sizes.scale + minus_lse[:, None])
    # K has already arrived, but this wait is a branch: without it, ptxas would move the wait for dP before the exp2's.
    mbarrier.wait(barriers.k_full.index(stage), phase)
    dp, p = warpgroup_mma_wait(0, deps=(dpa, p))
    ds = p * (dp + minus_delta[:, None])
    if MASKED:  # V of a hidden key may hold NaN
        ds = gl.where(p == 0.0, 0.0, ds)
    ds = gl.convert_layout(ds.to(k.dtype), PL, assert_trivial=True)
    if MASKED and config.HAS_EDGES and wrong > 0:
        clear_nonfinite(k)
    dqa = warpgroup_mma(ds, k, dq, is_async=True)
    mbarrier.arrive(barriers.v_empty.index(v_stage), count=1)
    dq, ds = warpgroup_mma_wait(0, deps=(dqa, ds))
    mbarrier.arrive(barriers.k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _consume(WG: gl.constexpr, tensors, buffers, barriers, sizes, mask, num_parts, config):
    """A consumer: 64 of the queries."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    i_b, i_h, m0, i_part, first, first_full, end_full, end = _find_work(sizes, mask, num_parts, config, 4)
    m0 += WG * BLOCK_Q
    n = end - first
    num_edges = n - (end_full - first_full)
    o_m = m0 + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, config.SCORES))
    lower, upper = intervals_of(o_m, sizes.T, sizes.S, sizes.lo, sizes.hi, mask, i_b, config.TABLE)
    row = (i_b * sizes.H + i_h).to(gl.int64) * sizes.padded_T + o_m
    minus_lse = load_bias(tensors.minus_lse, row) * sizes.scale
    minus_delta = load_bias(tensors.minus_delta, row)
    dq = gl.zeros([BLOCK_Q, config.BLOCK_D], gl.float32, layout=config.GRADIENTS)
    mbarrier.wait(barriers.q_full, 0)
    q = matrix(buffers.q_s, WG)
    if config.BLOCK_D == 64:
        q = q.load(gl.DotOperandLayout(0, config.SCORES, 2))
    given = (q, minus_lse, minus_delta, buffers, barriers, sizes, config)
    for j in range(num_edges):
        hidden = (nth_block(j, first, first_full, end_full, end) * config.BLOCK_K, lower, upper)
        dq = _step(WG, True, j, hidden, dq, *given)
    for j in range(num_edges, n):
        dq = _step(WG, False, j, (), dq, *given)
    i_h = i_h * num_parts + i_part
    store_output(tensors.desc_dq, i_b, i_h, m0, dq * sizes.sm_scale, buffers.q_s.index(WG), config.ACCUMULATE)
    tma.store_wait(0)
