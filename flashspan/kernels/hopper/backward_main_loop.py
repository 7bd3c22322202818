"""The main loop of the backward kernel for Hopper: a consumer's steps. A step processes a block of queries, and dQ of
the previous block."""

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

from flashspan.kernels.hopper.dq_accumulate import dq_stage, ds_stage, hand_over_dq, start_dq
from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.masking import hide_by_words, hide_outside
from flashspan.kernels.hopper.parts import DEPTH
from flashspan.kernels.hopper.ptx import in_own_registers, opaque
from flashspan.kernels.hopper.shared_memory import matrix


@gluon.jit
def make_every_third_dq(WG: gl.constexpr, count, buffers, barriers, sm_scale, config):
    """With three consumers: compute dQ number `count`, that of block `count`, if it is this consumer's turn."""
    if count % 3 == WG:
        dq = warpgroup_mma_wait(0, deps=(start_dq(WG, True, count, buffers, barriers, config),))
        stage, _ = ds_stage(count, barriers.ds_full.shape[0])
        mbarrier.arrive(barriers.ds_empty.index(stage), count=1)
        hand_over_dq(WG, True, count, dq, buffers, barriers, sm_scale, config)


@gluon.jit
def step(
    WG: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr, i, count, hidden, dk, dv, buffers, barriers, mask,
    sizes, config,
):  # fmt: skip
    """Add block i's part to dV and dK. Unless it is a tile's FIRST block, also compute dQ number `count`, that of block
    i - 1. Returns dk and dv.

    MASKED: `hidden` is (the block's first query, start and end of each key's interval) or, with a block map, (which
    half of the words belongs to this block, whether there are words). Otherwise it is empty.
    """
    full, empty, ds_full = barriers.full, barriers.empty, barriers.ds_full
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_K: gl.constexpr = config.BLOCK_K
    STAGES: gl.constexpr = config.STAGES
    SCORES: gl.constexpr = config.SCORES
    THREE: gl.constexpr = config.CONSUMERS == 3
    BEHIND: gl.constexpr = config.WITH_DQ and not FIRST
    BY_TURNS: gl.constexpr = BEHIND and not MASKED and config.WHOLE_DQ_STAGES > 0
    ROW_BIAS: gl.constexpr = len(buffers.lse_s.shape) == 3  # see parts.py
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, config.GRADIENTS, 2)
    dtype: gl.constexpr = buffers.q_s.dtype
    sm_scale = sizes.sm_scale
    stage = i & (STAGES - 1)
    slot, phase = ds_stage(i, ds_full.shape[0])
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    q = matrix(buffers.q_s, stage)
    do = matrix(buffers.do_s, stage)
    k = matrix(buffers.kv_s[WG], opaque(0))
    v = matrix(buffers.kv_s[WG], opaque(1))
    zero = gl.zeros([BLOCK_K, BLOCK_Q], gl.float32, layout=SCORES)
    # S^T = K Q^T - lse and dP^T = V dO^T - delta.
    if ROW_BIAS:
        if THREE:  # the ones are in shared memory, because no registers are left
            ones = buffers.ones_s
        else:
            ones = gl.full([BLOCK_K, DEPTH], 1.0, gl.bfloat16, layout=gl.DotOperandLayout(0, SCORES, 2))
        s = warpgroup_mma(ones, buffers.lse_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        sa = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(ones, buffers.delta_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        dpa = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(2, deps=(sa,))
    else:
        s, _ = gl.broadcast(buffers.lse_s.index(stage).load(gl.SliceLayout(0, SCORES))[None, :], zero)
        dp, _ = gl.broadcast(buffers.delta_s.index(stage).load(gl.SliceLayout(0, SCORES))[None, :], zero)
        # Copy before the first matmul starts: later, ptxas would wait for that matmul before it writes these registers.
        dp = in_own_registers(dp)
        sa = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
        dpa = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=(sa,))
    if not config.UNIT_SCALE:
        s = s * sizes.scale
    if MASKED:
        if config.BLOCK_MAP:
            half, some = hidden
            if some:
                s = hide_by_words(s, mask.words_s.index(stage * 2 + WG), half)
        else:
            m0, lower, upper = hidden
            if m0 < sizes.T:  # always true, but a branch: see hide_outside
                s = hide_outside(s, lower - m0, upper - m0, True)
    p = gl.exp2(s)
    pd = gl.convert_layout(p.to(dtype), OPERAND, assert_trivial=True)
    # Start dV at once, so that the tensor cores are busy while dS is computed and written.
    dva = warpgroup_mma(pd, do, dv, is_async=True)
    if THREE:  # wait until no consumer reads this stage of dS
        mbarrier.wait(barriers.ds_empty.index(slot), phase ^ 1)
    elif BEHIND:  # wait until dQ of block i - 2 is complete: its dS used this stage
        dq_slot, dq_phase = dq_stage(count - 1, barriers.dq_full.shape[0])
        mbarrier.wait(barriers.dq_full.index(dq_slot), dq_phase)
    else:  # the wait is a branch, or ptxas would move the wait for dP before the exp2's
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    if ROW_BIAS and not THREE:  # the registers of `ones` must not be reused before the matmuls have ended
        dp, p, ones = warpgroup_mma_wait(1, deps=(dpa, p, ones))
    else:
        dp, p = warpgroup_mma_wait(1, deps=(dpa, p))
    ds = (p * dp).to(dtype)
    if config.WITH_DQ:
        if FIRST:  # dK of the previous tile may still be written from this buffer
            tma.store_wait(0)
            barrier()
        buffers.ds_s[WG].index(slot).store(ds)
    dsd = gl.convert_layout(ds, OPERAND, assert_trivial=True)
    dka = warpgroup_mma(dsd, q, dk, is_async=True)
    if config.WITH_DQ:  # only after dK has started, so that the tensor cores are busy while dS is written
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
    # Free the stage of Q and dO, and compute this consumer's share of the previous block's dQ.
    if THREE:
        dv, dk, pd, dsd = warpgroup_mma_wait(0, deps=(dva, dka, pd, dsd))
        mbarrier.arrive(empty.index(stage), count=1)
        if BEHIND:
            make_every_third_dq(WG, count, buffers, barriers, sm_scale, config)
    elif BY_TURNS:
        dv, pd = warpgroup_mma_wait(1, deps=(dva, pd))
        if config.BLOCK_MAP:  # dO has been read: the producer may load the next one
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        if count & 1 == WG:
            dqa = start_dq(WG, True, i - 1, buffers, barriers, config)
            dk, dsd = warpgroup_mma_wait(1, deps=(dka, dsd))
            mbarrier.arrive(empty.index(stage), count=1)
            dq = warpgroup_mma_wait(0, deps=(dqa,))
            hand_over_dq(WG, True, count, dq, buffers, barriers, sm_scale, config)
        else:
            dk, dsd = warpgroup_mma_wait(0, deps=(dka, dsd))
            mbarrier.arrive(empty.index(stage), count=1)
            dq_slot, dq_phase = dq_stage(count, barriers.dq_full.shape[0])
            mbarrier.arrive(barriers.dq_full.index(dq_slot), count=1)
    elif BEHIND:
        dqa = start_dq(WG, False, i - 1, buffers, barriers, config)
        dv, dk, pd, dsd = warpgroup_mma_wait(2, deps=(dva, dka, pd, dsd))
        if config.BLOCK_MAP:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        dq = warpgroup_mma_wait(0, deps=(dqa,))
        hand_over_dq(WG, False, count, dq, buffers, barriers, sm_scale, config)
    else:
        dv, dk, pd, dsd = warpgroup_mma_wait(0, deps=(dva, dka, pd, dsd))
        if config.BLOCK_MAP:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv
