"""dQ in the backward kernel for Hopper. Consumers compute it from the dS of all consumers, and hand it over through
shared memory. A separate warp, the dQ warp, adds it to float32 sums in global memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from flashspan.kernels.hopper.backward_producer import published_work
from flashspan.kernels.hopper.gluon_compat import barrier, reduce_add
from flashspan.kernels.hopper.masking import find_block, find_list, nth_block
from flashspan.kernels.hopper.ptx import fence_global, opaque, wait_for_writes
from flashspan.kernels.hopper.shared_memory import matrix, swizzle, swizzled


@gluon.jit
def dq_stage(count, STAGES: gl.constexpr):
    """The number of a dQ -> (its stage in dq_s, the phase of the stage's barriers)."""
    if STAGES == 2:
        return count & 1, (count >> 1) & 1
    return 0, count & 1


@gluon.jit
def ds_stage(i, STAGES: gl.constexpr):
    """The number of a block -> (the stage of its dS, one of 2 or 4, the phase of the stage's barriers)."""
    return i & (STAGES - 1), (i >> (STAGES // 2)) & 1


@gluon.jit
def start_dq(WG: gl.constexpr, WHOLE: gl.constexpr, i, buffers, barriers, config):
    """Start the matmuls of dQ of block i, from the dS of all consumers. WHOLE: all of dQ. Otherwise this consumer's
    half: 64 rows or, if a block has only 64 rows, half of the columns."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_D: gl.constexpr = config.BLOCK_D
    stage, phase = ds_stage(i, barriers.ds_full.shape[0])
    mbarrier.wait(barriers.ds_full.index(stage), phase)
    if WHOLE:
        dq = gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, layout=config.GRADIENTS)
    else:
        dq = gl.zeros([64, 64], gl.float32, layout=config.HALF_DQ)
    for w in gl.static_range(config.CONSUMERS):
        k = matrix(buffers.kv_s[w], opaque(0))
        ds = buffers.ds_s[w].index(stage)
        if not WHOLE:
            if BLOCK_Q == 64:
                k = k.slice(WG * (BLOCK_D // 2), BLOCK_D // 2, dim=1)
            else:
                ds = ds.slice(WG * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def hand_over_dq(WG: gl.constexpr, WHOLE: gl.constexpr, count, dq, buffers, barriers, sm_scale, config):
    """Hand dQ number `count`, or this consumer's half of it, to the dQ warp."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_D: gl.constexpr = config.BLOCK_D
    dq_s, dq_full = buffers.dq_s, barriers.dq_full
    STAGES: gl.constexpr = dq_full.shape[0]
    if config.ACCUMULATE:
        dq = swizzle(dq * sm_scale, 64, dq.shape[1])
    stage, phase = dq_stage(count - STAGES, STAGES)
    mbarrier.wait(barriers.dq_empty.index(stage), phase)
    if config.ACCUMULATE:  # as rows, to be added to the caller's dq
        tile = swizzled(dq_s.index(stage), BLOCK_Q, BLOCK_D)
        if WHOLE:
            tile.store(dq)
        elif BLOCK_Q == 64:
            tile.slice(WG * (BLOCK_D // 2), BLOCK_D // 2, dim=1).store(dq)
        else:
            tile.slice(WG * 64, 64, dim=0).store(dq)
    else:  # in register order: 16 bytes per thread, thread after thread
        L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        GROUPS: gl.constexpr = dq.shape[1] // 8
        tile = dq_s.index(stage)._reinterpret(gl.float32, [BLOCK_Q * BLOCK_D // (GROUPS * 512), GROUPS, 128, 4], L)
        tile = tile.index(opaque(0 if WHOLE else WG))
        tile.store(dq.reshape((4, 2, 8, GROUPS, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((GROUPS, 128, 4)))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(stage), count=1)


@gluon.jit
def _claim(p_state):
    """Return the state of a block of sums that was not cleared: 0 for the first program, which stores and then calls
    `_release`; 2 for the others, which add. While the first program stores, the state is 1, and the others wait."""
    state = gl.atomic_cas(p_state, 0, 1, sem="acquire")
    while state == 1:
        state = gl.atomic_cas(p_state, 0, 1, sem="acquire")
    fence_global()
    return state


@gluon.jit
def _release(p_state, state):
    """After the first program has stored, let the others add."""
    if state == 0:
        wait_for_writes()
        fence_global()
        barrier()
        gl.atomic_xchg(p_state, 2, sem="release")


@gluon.jit
def _add(desc_dq, b, h, m0, row, state, count, buffers, barriers, config):
    """Add dQ number `count`, of the queries from m0 on, or store it if the state is 0. `row` is the index of query m0
    in the rows of all heads."""
    dq_s, dq_full = buffers.dq_s, barriers.dq_full
    where = [b, h, m0, 0] if config.ACCUMULATE else [row // (dq_s.shape[2] // config.BLOCK_D), 0]
    stage, phase = dq_stage(count, dq_full.shape[0])
    mbarrier.wait(dq_full.index(stage), phase)
    if state == 0:
        tma.async_copy_shared_to_global(desc_dq, where, dq_s.index(stage))
    else:
        reduce_add(desc_dq, where, dq_s.index(stage))
    tma.store_wait(0)
    mbarrier.arrive(barriers.dq_empty.index(stage), count=1)


@gluon.jit
def add_dq(tensors, buffers, barriers, sizes, mask, schedule, config):
    """The dQ warp: add each dQ into global float32."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    DROPPED: gl.constexpr = 0 if config.FIRST_STEP_APART else 1  # number of dropped dQs per tile
    turn = 0
    count = 0
    tile, i_b, i_k, n0, a, b, c, d = published_work(turn, schedule, 1)
    while tile < schedule.num_tiles:
        if config.BLOCK_MAP:
            for g in range(sizes.G):
                i_h = i_k * sizes.G + g
                begin, end, n, num_partial = find_list(mask, i_b, i_h, a)
                for j in range(n):
                    block, word = find_block(mask, begin, end, j, num_partial)
                    row = (i_b * sizes.H + i_h) * sizes.padded_T + block * 128
                    p_state = schedule.dq_states + row // 128
                    state = 2
                    if config.FIRST_STORES:  # one claim for both parts: no wait for another block between them
                        state = _claim(p_state)
                    for part in gl.static_range(128 // BLOCK_Q):
                        m0 = block * 128 + part * BLOCK_Q
                        at = row + part * BLOCK_Q
                        _add(tensors.desc_dq, i_b, i_h, m0, at, state, count, buffers, barriers, config)
                        count += 1
                    if config.FIRST_STORES:
                        _release(p_state, state)
        else:
            first, first_full, end_full, end = a, b, c, d
            n = end - first
            if DROPPED:  # a tile's first dQ, which belongs to no block: see `_consume` in backward.py
                stage, phase = dq_stage(count, barriers.dq_full.shape[0])
                mbarrier.wait(barriers.dq_full.index(stage), phase)
                mbarrier.arrive(barriers.dq_empty.index(stage), count=1)
            for j in range(n * sizes.G):
                i_h = i_k * sizes.G + j // n
                m0 = nth_block(j % n, first, first_full, end_full, end) * BLOCK_Q
                row = (i_b * sizes.H + i_h) * sizes.padded_T + m0
                if config.FIRST_STORES:
                    p_state = schedule.dq_states + row // BLOCK_Q
                    state = _claim(p_state)
                    _add(tensors.desc_dq, i_b, i_h, m0, row, state, count + DROPPED + j, buffers, barriers, config)
                    _release(p_state, state)
                else:
                    _add(tensors.desc_dq, i_b, i_h, m0, row, 2, count + DROPPED + j, buffers, barriers, config)
            count += n * sizes.G + DROPPED
        turn += 1
        tile, i_b, i_k, n0, a, b, c, d = published_work(turn, schedule, 1)
