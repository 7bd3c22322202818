"""The backward kernel for Hopper.

A tile is a block of keys, 64 for each of two or three consumer warpgroups. K and V stay in shared memory, dK and dV in
registers. Consumers loop over the blocks of queries that see the keys, for every query head that shares them. A
producer warp loads Q, dO, -lse and -delta. Another warp, the dQ warp, adds finished blocks of dQ to float32 sums in
global memory through the copy engine (dq_accumulate.py). Scores are transposed, keys down and queries across: P and dS
are then already in the registers from which the matmuls of dV and dK read them.

The accumulators of S start at -lse and those of dP at -delta, which saves the subtractions. All elements of a column
start at the same number. Loading it costs a read of shared memory for each register. So if there is room (heads of 64),
a matmul writes it: ones times the number's three bfloat16 parts (parts.py).

While one consumer computes exponentials the others must keep the tensor cores busy, because a warp that starts a matmul
waits until most of it is done. So consumers may drift apart by up to a block. They share only dQ, which sums over the
keys of all consumers. dQ is computed one block late: by then the other consumers have had time to write their dS. With
two consumers, each computes half of every dQ or, in turn, every second dQ as a whole, which reads less shared memory
(WHOLE_DQ_STAGES). With three, each computes every third dQ and then frees its stage of dS; there are four stages.

Programs are persistent. The copy engine writes a tile's dK and dV from the buffer of dS (dV from a separate buffer if
there is room). So K and V of the next tile can be loaded meanwhile; its first Q and dO are loaded even earlier. The
producer publishes the description of the next tile.

With few tiles, or in the last round of equally long tiles, multiprocessors would be idle. So a key head may be split
into several that share K and V, each for a part of the query heads (SPLIT_HEADS, portable/gradient_parts.py), or, if
each query head has its own keys and sees all of them, for a part of the queries (SPLIT_TILES). If gradients are
accumulated, only the tiles after the last full round are split, by queries (SPLIT_TILES), and their parts are added in
place.

Without WITH_DQ, for bitwise reproducible gradients (two_pass.py), only dK and dV are computed, and consumers share
nothing at all.

For a block map, a tile is a line of the map's transposed lists. A listed block of 128 queries is one step, or two if a
step has 64 queries; its bits are loaded with Q and dO.

The constants are in config.py (BackwardConfig), and the code of a step in backward_main_loop.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from flashspan.kernels.hopper.backward_main_loop import make_every_third_dq, step
from flashspan.kernels.hopper.backward_producer import produce, published_work
from flashspan.kernels.hopper.config import (
    BackwardBarriers,
    BackwardBuffers,
    BackwardConfig,
    BackwardSchedule,
    BackwardSizes,
    BackwardTensors,
    BlockMask,
    IntervalMask,
)
from flashspan.kernels.hopper.dq_accumulate import add_dq, hand_over_dq, start_dq
from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.masking import find_list, intervals_of, nth_block
from flashspan.kernels.hopper.parts import ones_operand
from flashspan.kernels.hopper.shared_memory import clear_nonfinite_pair, new_barrier, new_barriers, store_output

NUMBERS = [
    *("s_columns", "s_batch", "s_head", "num_lines", "num_long", "H", "K", "G", "T", "S", "padded_T", "lo", "hi"),
    *("section", "num_tiles", "num_whole", "num_parts"),
]


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_lse, desc_delta, desc_words, dq_states,
    first, last, spans, index, numbers, order, counter, s_columns, s_batch, s_head, num_lines, num_long,
    H, K, G, T, S, padded_T, lo, hi, scale, sm_scale, section, num_tiles, num_whole, num_parts,
    STAGES: gl.constexpr, TABLE: gl.constexpr, BLOCK_MAP: gl.constexpr, ACCUMULATE: gl.constexpr,
    HAS_EDGES: gl.constexpr, WITH_DQ: gl.constexpr, FIRST_STORES: gl.constexpr, SPLIT_TILES: gl.constexpr,
    SPLIT_HEADS: gl.constexpr, WHOLE_DQ_STAGES: gl.constexpr, UNIT_SCALE: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK, dV and dQ, for a mask of intervals or, with BLOCK_MAP, for the transposed lists and bits of a block map in
    blocks of 128 x 128. Arguments of the other kind of mask are None. Blocks of K, V, dK and dV have the size of a
    consumer's part.

    This function derives the constants, allocates buffers and barriers, and starts the partitions.
    """
    if BLOCK_MAP:
        words_s = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 256], desc_words.layout)
        mask = BlockMask(desc_words, words_s, spans, index, numbers, order, s_batch, s_head, num_lines, num_long)
    else:
        mask = IntervalMask(first, last, s_columns)  # type: ignore[assignment]
    BLOCK_Q: gl.constexpr = desc_q.block_type.shape[2]
    BLOCK_D: gl.constexpr = desc_q.block_type.shape[3]
    BLOCK_K: gl.constexpr = desc_k.block_type.shape[2]
    FIRST_STEP_APART: gl.constexpr = WITH_DQ and (BLOCK_D > 64 or BLOCK_MAP or CONSUMERS == 3)
    DQ_STAGES: gl.constexpr = WHOLE_DQ_STAGES if WHOLE_DQ_STAGES else 1
    config = BackwardConfig(
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        BLOCK_D=BLOCK_D,
        CONSUMERS=CONSUMERS,
        STAGES=STAGES,
        TABLE=TABLE,
        BLOCK_MAP=BLOCK_MAP,
        HAS_EDGES=HAS_EDGES,
        WITH_DQ=WITH_DQ,
        ACCUMULATE=ACCUMULATE,
        FIRST_STORES=FIRST_STORES,
        SPLIT_TILES=SPLIT_TILES,
        SPLIT_HEADS=SPLIT_HEADS,
        FIRST_STEP_APART=FIRST_STEP_APART,
        # If dV is accumulated, a separate buffer is slower.
        DV_BUFFER=FIRST_STEP_APART and not BLOCK_MAP and not ACCUMULATE and DQ_STAGES == 1,
        WHOLE_DQ_STAGES=WHOLE_DQ_STAGES,
        UNIT_SCALE=UNIT_SCALE,
        SCORES=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16]),
        GRADIENTS=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16]),
        HALF_DQ=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]),
    )
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, BLOCK_D], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, BLOCK_D], desc_do.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    DS_STAGES: gl.constexpr = 4 if CONSUMERS == 3 else 2
    kv_s = ()
    for _ in gl.static_range(CONSUMERS):
        kv_s += (gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_K, BLOCK_D], desc_k.layout),)  # type: ignore[assignment]
    ds_s = ()
    for _ in gl.static_range(CONSUMERS):
        ds_s += (gl.allocate_shared_memory(dtype, [DS_STAGES, BLOCK_K, BLOCK_Q], DS),)  # type: ignore[assignment]
    dq_s = gl.allocate_shared_memory(gl.float32, [DQ_STAGES] + desc_dq.block_type.shape, desc_dq.layout)
    lse_s = gl.allocate_shared_memory(desc_lse.dtype, [STAGES] + desc_lse.block_type.shape, desc_lse.layout)
    delta_s = gl.allocate_shared_memory(desc_delta.dtype, [STAGES] + desc_delta.block_type.shape, desc_delta.layout)
    gl.static_assert(CONSUMERS == 2 or not config.DV_BUFFER)
    dv_s = ds_s[0]  # type: ignore[misc]  # a placeholder: not used without DV_BUFFER
    if config.DV_BUFFER:
        dv_s = gl.allocate_shared_memory(dtype, [2, BLOCK_K, BLOCK_D], DS)
    ds_full = new_barriers(DS_STAGES, CONSUMERS)
    ds_empty = ds_full  # a placeholder: used with three consumers only
    if CONSUMERS == 3:
        ds_empty = new_barriers(DS_STAGES, 1)
    barriers = BackwardBarriers(
        kv_full=new_barrier(1),
        kv_empty=new_barrier(CONSUMERS),
        full=new_barriers(STAGES, 1),
        # With a block map, consumers often wait for the next block, so dO's stages are freed before Q's.
        empty=new_barriers(2 * STAGES if BLOCK_MAP else STAGES, CONSUMERS),
        ds_full=ds_full,
        ds_empty=ds_empty,
        dq_full=new_barriers(DQ_STAGES, 1 if CONSUMERS == 3 else 2),
        dq_empty=new_barriers(DQ_STAGES, 1),
    )
    work_full = new_barriers(4, 1)
    work_s = gl.allocate_shared_memory(gl.int32, [32, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    ones_s = lse_s  # a placeholder: used with three consumers only
    if CONSUMERS == 3:
        ones_s = ones_operand(BLOCK_K)
    job = (
        BackwardTensors(desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_lse, desc_delta),
        BackwardBuffers(q_s, do_s, kv_s, ds_s, dq_s, lse_s, delta_s, dv_s, ones_s),
        barriers,
        BackwardSizes(H, K, G, T, S, padded_T, lo, hi, scale, sm_scale, section),
        mask,
        BackwardSchedule(num_tiles, num_whole, num_parts, counter, dq_states, work_s, work_full),
        config,
    )
    if CONSUMERS == 3:
        gl.warp_specialize(
            [(_consume, (0,) + job), (_consume, (1,) + job), (_consume, (2,) + job), (produce, job), (add_dq, job)],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif not WITH_DQ:
        gl.warp_specialize(
            [(_consume, (0,) + job), (_consume, (1,) + job), (produce, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
        )
    else:
        gl.warp_specialize(
            [(_consume, (0,) + job), (_consume, (1,) + job), (produce, job), (add_dq, job)],
            [4, 1, 1],
            [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _consume(WG: gl.constexpr, tensors, buffers, barriers, sizes, mask, schedule, config):
    """A consumer warpgroup and its 64 keys of each tile.

    dQ is computed one block late, so a tile's first step has no dQ to compute. With FIRST_STEP_APART that step is
    separate code before the loop. Without it (two consumers, heads of 64), the step is in the loop, which is 6% faster
    at 16k. It then computes a dQ from old data, which the dQ warp drops.
    """
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_K: gl.constexpr = config.BLOCK_K
    APART: gl.constexpr = config.FIRST_STEP_APART
    THREE: gl.constexpr = config.CONSUMERS == 3
    ADD: gl.constexpr = config.ACCUMULATE and not config.SPLIT_HEADS  # dK and dV
    SPLIT: gl.constexpr = 128 // BLOCK_Q
    G, S, sm_scale = sizes.G, sizes.S, sizes.sm_scale
    given = (buffers, barriers, mask, sizes, config)
    turn = 0
    i = 0
    tile, i_b, i_k, n0, a, b, c, d = published_work(turn, schedule, 4)
    while tile < schedule.num_tiles:
        # Prologue: the tile's description, K and V.
        n0 += WG * BLOCK_K
        if config.BLOCK_MAP:
            line, n, num_edges = a, b, c
        else:
            first, first_full, end_full, end = a, b, c, d
            n = end - first
            num_edges = n - (end_full - first_full)
            o_n = n0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, config.SCORES))
            lower, upper = intervals_of(o_n, S, sizes.T, -sizes.hi, -sizes.lo, mask, i_b, config.TABLE)
            upper = gl.where(o_n < S, upper, 0)  # hide rows past the last key: K is 0 there, and P could overflow
        dk = gl.zeros([BLOCK_K, config.BLOCK_D], gl.float32, layout=config.GRADIENTS)
        dv = gl.zeros([BLOCK_K, config.BLOCK_D], gl.float32, layout=config.GRADIENTS)
        mbarrier.wait(barriers.kv_full, turn & 1)
        if config.BLOCK_MAP:  # full blocks hide nothing
            if (num_edges > 0) | ((G > 1) & (mask.stride_head != 0)):
                clear_nonfinite_pair(buffers.kv_s[WG], APART)
        elif config.HAS_EDGES:
            clear_nonfinite_pair(buffers.kv_s[WG], APART)
        # Main loop: for each query head that shares the keys, blocks with hidden scores, then the others.
        lead = -1 if APART else turn  # the step of block i computes dQ number i + lead, that of block i - 1
        if APART:
            if config.BLOCK_MAP:
                dk, dv = step(WG, True, True, i, 0, (0, num_edges > 0), dk, dv, *given)
            elif config.HAS_EDGES:
                hidden = (nth_block(0, first, first_full, end_full, end) * BLOCK_Q, lower, upper)
                dk, dv = step(WG, True, True, i, 0, hidden, dk, dv, *given)
            else:
                dk, dv = step(WG, False, True, i, 0, (), dk, dv, *given)
        for g in range(G):
            done = gl.where(g == 0, 1, 0) if APART else 0
            full_from = done
            if config.BLOCK_MAP:
                if g > 0:
                    _, _, n, num_edges = find_list(mask, i_b, i_k * G + g, line)
                for j in range(done, num_edges * SPLIT):
                    words = (j % SPLIT, True)
                    dk, dv = step(WG, True, False, i + j, i + j + lead, words, dk, dv, *given)
                full_from = gl.maximum(num_edges * SPLIT, done) if APART else num_edges * SPLIT
            elif config.HAS_EDGES:
                for j in range(done, num_edges):
                    hidden = (nth_block(j, first, first_full, end_full, end) * BLOCK_Q, lower, upper)
                    dk, dv = step(WG, True, False, i + j, i + j + lead, hidden, dk, dv, *given)
                full_from = gl.maximum(num_edges, done) if APART else num_edges
            size = n * SPLIT if config.BLOCK_MAP else n
            for j in range(full_from, size):
                dk, dv = step(WG, False, False, i + j, i + j + lead, (), dk, dv, *given)
            i += size
        # Epilogue: the last dQ, then dV and dK. The tile's position is read again, because otherwise it would occupy
        # registers during the loop.
        if APART:
            i_b, i_k, n0 = _destination(WG, turn, schedule, config)
        if config.DV_BUFFER:
            store_output(tensors.desc_dv, i_b, i_k, n0, dv, buffers.dv_s.index(WG), ADD)
        if THREE:
            make_every_third_dq(WG, i - 1, buffers, barriers, sm_scale, config)
        elif config.WITH_DQ:
            dq = warpgroup_mma_wait(0, deps=(start_dq(WG, False, i - 1, buffers, barriers, config),))
        mbarrier.arrive(barriers.kv_empty, count=1)
        if config.WITH_DQ:  # after this no consumer reads dS, so its buffer is used to write dV and dK
            mbarrier.wait(barriers.kv_empty, turn & 1)
        if not APART:
            i_b, i_k, n0 = _destination(WG, turn, schedule, config)
        if not config.DV_BUFFER:
            store_output(tensors.desc_dv, i_b, i_k, n0, dv, buffers.ds_s[WG], ADD)
        if config.WITH_DQ and not THREE:  # only now, because the previous dQ is still being added
            hand_over_dq(WG, False, i + lead, dq, buffers, barriers, sm_scale, config)
        store_output(tensors.desc_dk, i_b, i_k, n0, dk * sm_scale, buffers.ds_s[WG], ADD, config.DV_BUFFER)
        if not APART:  # with APART, the next tile's first step waits for this before it writes dS
            tma.store_wait(0)
            barrier()
        turn += 1
        tile, i_b, i_k, n0, a, b, c, d = published_work(turn, schedule, 4)
    if APART:
        tma.store_wait(0)


@gluon.jit
def _destination(WG: gl.constexpr, turn, schedule, config):
    """Return where a consumer writes dK and dV of this turn's tile: sequence, key head, first key."""
    tile, i_b, i_k, n0, a, b, c, d = published_work(turn, schedule, 4)
    if config.SPLIT_TILES and not config.ACCUMULATE:
        i_k = i_k * schedule.num_parts + tile % schedule.num_parts
    return i_b, i_k, n0 + WG * config.BLOCK_K
