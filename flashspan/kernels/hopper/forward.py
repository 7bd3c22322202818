"""The forward kernel for Hopper.

A producer warp loads Q, K and V through the copy engine; two or three consumer warpgroups of 64 queries each multiply.
A consumer starts two matmuls together, the scores of block i and the output of block i - 1. It computes the softmax of
block i while the second matmul still runs. K of block i and V of block i - 1 are loaded as a pair under one barrier.
The wait for the next pair, in the middle of a step, is also a branch: without one, ptxas would move the softmax behind
the matmuls. Programs are persistent: while a tile's output is written, the next tile's Q and first K are loaded.

The constants are in config.py (ForwardConfig), the main loop's steps in forward_main_loop.py; softmax.py explains what
is subtracted from the scores and why V may be float16.

The copy engine writes an output from Q's buffer, a float32 output in two halves. If there is room (OUTPUT_BUFFER), the
first half has a separate buffer. Then the copy engine also loads a carry (CARRY_LAST): its first half into that buffer,
its second half into Q's buffer as soon as Q has been read. Both are merged at the tile's end. Otherwise threads load
the carry before a tile's first scores, and it is merged after their softmax. The main loop is the same with and without
a carry.

Only the producer reads tables of intervals and the lists of a block map. For a table it publishes the range of blocks;
for a block map, the number of a line's blocks and how many are partial. It loads the bits of partial blocks with K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from flashspan.kernels.hopper.carry import LOWEST, load_carry, merge_into_first_block, merge_into_result
from flashspan.kernels.hopper.config import (
    BlockMask,
    ForwardBarriers,
    ForwardBuffers,
    ForwardConfig,
    ForwardOutputs,
    ForwardSizes,
    ForwardTensors,
    IntervalMask,
)
from flashspan.kernels.hopper.float16_values import FLOAT16_UNIT
from flashspan.kernels.hopper.forward_main_loop import step, visit_edge_blocks, visit_full_blocks
from flashspan.kernels.hopper.forward_producer import produce, produce_listed, published_work
from flashspan.kernels.hopper.masking import hide_by_words, hide_keys, intervals_of, visible_blocks
from flashspan.kernels.hopper.parts import ones_operand
from flashspan.kernels.hopper.ptx import declare_vote, wait_for_writes
from flashspan.kernels.hopper.repair import (
    MARK_ROWS,
    NOTE_ROWS,
    NOTED_TURNS,
    mark_rows,
    note_rows,
    recompute_noted_rows,
)
from flashspan.kernels.hopper.row_values import as_column, one_per_row, row_sums
from flashspan.kernels.hopper.scheduler import load_number, own_sizes, stage_and_phase, tile_position
from flashspan.kernels.hopper.shared_memory import load_copied, split_columns, store_output, store_tile
from flashspan.kernels.hopper.slices import (
    load_operands,
    multiply_slices,
    slices_of,
    start_output,
    start_scores,
    store_slices,
    transposed_slices_of,
    wait_for_output,
)
from flashspan.kernels.hopper.softmax import exponentials, partial_sums, raise_maximum

NUMBERS = [
    *("s_ob", "s_oh", "s_ot", "s_rows", "s_batch", "s_head", "num_lines", "num_long", "H", "G", "T", "S", "lo", "hi"),
    *("num_heads", "section", "num_tiles"),
]


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    desc_q, desc_k, desc_v, desc_out, desc_words, q, k, v, out, lse, invalid, start, end, spans, index, numbers, order,
    counter, s_ob, s_oh, s_ot, s_rows, s_batch, s_head, num_lines, num_long, H, G, T, S, lo, hi, scale, num_heads,
    section, num_tiles, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    HIDDEN_SIDES: gl.constexpr, TABLE: gl.constexpr, BLOCK_MAP: gl.constexpr, CARRY: gl.constexpr,
    REPAIR: gl.constexpr, UNIT_SCALE: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse of every query, for a mask of intervals or, with BLOCK_MAP, for a block map in blocks of 128 x 128:
    two consumers compute a line of it. Arguments of the other kind of mask are None. Strides of out are in units of 8
    elements.

    This function derives the constants, allocates buffers and barriers, and starts the partitions. `warp_specialize`
    takes their functions, then the warps and registers of all but the first, which runs on the launch's own warps.
    """
    if BLOCK_MAP:
        words_s = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 256], desc_words.layout)
        mask = BlockMask(desc_words, words_s, spans, index, numbers, order, s_batch, s_head, num_lines, num_long)
        num_blocks = num_lines
    else:
        num_blocks = gl.cdiv(T, desc_q.block_type.shape[2] * CONSUMERS)
        mask = IntervalMask(start, end, s_rows)  # type: ignore[assignment]
    tensors = ForwardTensors(desc_q, desc_k, desc_v, desc_out, q, k, v)
    sizes = ForwardSizes(H, G, T, S, lo, hi, scale, num_heads, num_blocks, section, num_tiles, counter)
    outputs = ForwardOutputs(out, lse, invalid, s_ob, s_oh, s_ot)
    BLOCK_Q: gl.constexpr = desc_q.block_type.shape[2]
    BLOCK_K: gl.constexpr = desc_k.block_type.shape[2]
    SLICE_D: gl.constexpr = desc_q.block_type.shape[3]
    SLICES: gl.constexpr = (HEAD_DIM + SLICE_D - 1) // SLICE_D
    BLOCK_D: gl.constexpr = SLICES * SLICE_D
    OUTPUT_BUFFER: gl.constexpr = desc_out.dtype == gl.float32 and BLOCK_D <= 128 and not BLOCK_MAP
    FLOAT16_VALUES: gl.constexpr = desc_v.dtype != desc_k.dtype
    config = ForwardConfig(
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        BLOCK_D=BLOCK_D,
        SLICES=SLICES,
        SLICE_D=SLICE_D,
        HEAD_DIM=HEAD_DIM,
        CONSUMERS=CONSUMERS,
        STAGES=STAGES,
        Q_STAGES=Q_STAGES,
        HIDDEN_SIDES=HIDDEN_SIDES,
        TABLE=TABLE,
        BLOCK_MAP=BLOCK_MAP,
        CARRY=CARRY,
        CARRY_LAST=CARRY and OUTPUT_BUFFER,
        OUTPUT_BUFFER=OUTPUT_BUFFER,
        FLOAT16_VALUES=FLOAT16_VALUES,
        TRACK_MAXIMUM=not FLOAT16_VALUES and (desc_v.dtype == gl.float16 or not BLOCK_MAP),
        FREE_K_FIRST=BLOCK_MAP or (STAGES == 2 and (SLICES == 3 or FLOAT16_VALUES)),
        Q_IN_REGISTERS=BLOCK_D == 64 or (SLICES == 3 and FLOAT16_VALUES),
        REPAIR=REPAIR,
        TURNS=NOTED_TURNS if REPAIR == NOTE_ROWS else 4,
        UNIT_SCALE=UNIT_SCALE,
        SCORES=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]),
        OUTPUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE_D, 16]),
    )
    gl.static_assert(CONSUMERS == 2 or not CARRY)
    Q_SLICES: gl.constexpr = Q_STAGES * CONSUMERS * SLICES
    q_s = gl.allocate_shared_memory(desc_q.dtype, [Q_SLICES, 1, 1, BLOCK_Q, SLICE_D], desc_q.layout)
    k_s = gl.allocate_shared_memory(desc_q.dtype, [STAGES * SLICES, 1, 1, BLOCK_K, SLICE_D], desc_k.layout)
    v_s = gl.allocate_shared_memory(desc_v.dtype, [STAGES * SLICES, 1, 1, BLOCK_K, SLICE_D], desc_v.layout)
    output_s = q_s  # a placeholder: not used without OUTPUT_BUFFER
    if OUTPUT_BUFFER:
        output_s = gl.allocate_shared_memory(desc_q.dtype, [CONSUMERS, 1, 1, BLOCK_Q, BLOCK_D], desc_q.layout)
    barriers = _allocate_barriers(config)
    if FLOAT16_VALUES:
        declare_vote()
    ones_s = q_s  # a placeholder: not used without UNIT_SCALE
    if UNIT_SCALE:
        ones_s = ones_operand(BLOCK_K)
    job = (tensors, ForwardBuffers(q_s, k_s, v_s, output_s, ones_s), barriers, sizes, outputs, mask, config)
    if BLOCK_MAP:
        gl.warp_specialize(
            [(_consume, (0,) + job), (_consume, (1,) + job), (produce_listed, job)],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [(_consume, (0,) + job), (_consume, (1,) + job), (_consume, (2,) + job), (produce, job)],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_consume, (0,) + job), (_consume, (1,) + job), (produce, job)], [4, 1], [REGISTERS, PRODUCER_REGISTERS]
        )
    if REPAIR == NOTE_ROWS:
        recompute_noted_rows(tensors, barriers, sizes, outputs, mask, config)


@gluon.jit
def _allocate_barriers(config):
    """Allocate and initialise the barriers, and allocate the numbers that are published under them."""
    Q_STAGES: gl.constexpr = config.Q_STAGES
    STAGES: gl.constexpr = config.STAGES
    FREE: gl.constexpr = 2 * STAGES if config.FREE_K_FIRST else STAGES
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    barriers = ForwardBarriers(
        q_full=gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER),
        q_empty=gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [FREE, 1], BARRIER),
        tile_s=gl.allocate_shared_memory(gl.int32, [config.TURNS, 1], WORD),
        work_s=gl.allocate_shared_memory(gl.int32, [16, 1], WORD),
        notes_s=gl.allocate_shared_memory(gl.int8, [config.TURNS * config.CONSUMERS, 4], WORD),
        q_read=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        carry_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    mbarrier.init(barriers.q_read, count=2)
    for i in gl.static_range(2):
        mbarrier.init(barriers.carry_full.index(i), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(barriers.q_full.index(i), count=1)
        mbarrier.init(barriers.q_empty.index(i), count=config.CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.full.index(i), count=1)
    for i in gl.static_range(FREE):
        mbarrier.init(barriers.empty.index(i), count=config.CONSUMERS)
    return barriers


@gluon.jit
def _consume(WG: gl.constexpr, tensors, buffers, barriers, sizes, outputs, mask, config):
    """A consumer warpgroup: 64 queries of each tile."""
    BLOCK_Q: gl.constexpr = config.BLOCK_Q
    BLOCK_K: gl.constexpr = config.BLOCK_K
    BLOCK_D: gl.constexpr = config.BLOCK_D
    SLICES: gl.constexpr = config.SLICES
    STAGES: gl.constexpr = config.STAGES
    TILE_Q: gl.constexpr = config.CONSUMERS * BLOCK_Q
    ROWS: gl.constexpr = gl.SliceLayout(1, config.SCORES)  # layout of a number for each row
    sizes = own_sizes(sizes, config)
    T, S, H = sizes.T, sizes.S, sizes.H
    full, empty, scale = barriers.full, barriers.empty, sizes.scale
    pair = 0
    turn = 0
    mbarrier.wait(barriers.q_full.index(0), 0)
    tile = load_number(barriers.tile_s.index(0), 4)
    while tile < sizes.num_tiles:
        # Prologue: the tile's description, and its first block, whose scores overlap with no output yet.
        if config.BLOCK_MAP:
            line, i_bh, n, num_partial = published_work(turn, barriers)
            m0 = line * TILE_Q + WG * BLOCK_Q
        else:
            i_block, i_bh = tile_position(tile, sizes.num_blocks, sizes.num_heads, sizes.section)
            m0 = (sizes.num_blocks - 1 - i_block) * TILE_Q
            i_b = i_bh // H
            if config.TABLE:  # only the producer reads the table
                blocks = published_work(turn, barriers)
            else:
                blocks = visible_blocks(m0, T, S, sizes.lo, sizes.hi, mask, i_b, config.TABLE, TILE_Q, BLOCK_K, 4)
            first, first_full, end_full, end = blocks
            n = end - first
            m0 += WG * BLOCK_Q
        if config.CARRY and not config.CARRY_LAST:
            o, past = load_carry(outputs, i_bh, m0, sizes, config)
        else:
            o = (gl.zeros([BLOCK_Q, config.SLICE_D], gl.float32, layout=config.OUTPUT),) * SLICES
        zero = gl.zeros([BLOCK_Q, BLOCK_K], gl.float32, layout=config.SCORES)
        m = partial_sums(zero) + LOWEST
        if not config.BLOCK_MAP:
            o_m = m0 + gl.arange(0, BLOCK_Q, layout=ROWS)
            r_start, r_end = intervals_of(o_m, T, S, sizes.lo, sizes.hi, mask, i_b, config.TABLE)

        q_stage, _ = stage_and_phase(turn, config.Q_STAGES)
        q = slices_of(buffers.q_s, q_stage * config.CONSUMERS + WG, config)
        if config.Q_IN_REGISTERS:
            q = load_operands(q, config)
        stage, phase = stage_and_phase(pair, STAGES)
        mbarrier.wait(full.index(stage), phase)
        s = start_scores(q, transposed_slices_of(buffers.k_s, stage, config), zero)
        if config.Q_STAGES == 2:  # by now the previous tile has been written from the other Q buffer
            tma.store_wait(0)
            mbarrier.arrive(barriers.q_empty.index(1 - q_stage), count=1, pred=turn > 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        if config.BLOCK_MAP and num_partial > 0:  # the first block is partial: its bits are in the same stage
            s = hide_by_words(s, mask.words_s.index(stage * 2 + WG), 0)
        mbarrier.arrive(empty.index(stage), count=1)
        if config.FREE_K_FIRST:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        if not config.BLOCK_MAP and ((end > end_full) | (end <= first_full)):
            s = hide_keys(s, r_start, r_end, (end - 1) * BLOCK_K, config.HIDDEN_SIDES, BLOCK_D == 64)
        m, alpha = raise_maximum(s, m, scale, config.FLOAT16_VALUES, config.TRACK_MAXIMUM)
        p = exponentials(s, m, scale)
        l = partial_sums(p)
        stage, phase = stage_and_phase(pair + 1, STAGES)
        mbarrier.wait(full.index(stage), phase)
        if config.CARRY and not config.CARRY_LAST:
            p, m, l, o = merge_into_first_block(p, m, l, o, past)

        # Main loop: the scores of block i with the output of block i - 1.
        given = (q, zero, buffers, barriers, mask, scale, config)
        if config.BLOCK_MAP:
            for i in range(1, gl.minimum(num_partial + 1, n)):
                p, m, l, o, sums = step(WG, True, pair + i, (i < num_partial, 0, 0, 0), p, m, l, o, (), *given)
            begin = gl.maximum(num_partial + 1, 1)
            p, m, l, o = visit_full_blocks(WG, pair, begin, n, p, m, l, o, *given)
        elif config.HIDDEN_SIDES > 0:
            # Steps up to `near` are edge steps: those of the blocks at the near edge, and one more, for the first full
            # block, in which a row that has seen no key yet gets its maximum. That step is not needed if all rows saw a
            # key in block 0.
            near = end - end_full + 1
            if not config.TABLE:
                top = (sizes.num_blocks - 1 - i_block) * TILE_Q
                seen = (top + sizes.hi >= (end - 1) * BLOCK_K) & (
                    top + TILE_Q - 1 + sizes.lo < gl.minimum(end * BLOCK_K, S)
                )
                near -= seen.to(gl.int32)
            near = gl.maximum(near, 1)
            edges = (blocks, r_start, r_end)
            p, m, l, o = visit_edge_blocks(WG, pair, 1, gl.minimum(near, n), *edges, o, m, p, l, *given)
            p, m, l, o = visit_full_blocks(WG, pair, near, end - first_full, p, m, l, o, *given)
            if config.HIDDEN_SIDES == 2:
                far = gl.maximum(near, end - first_full)
                p, m, l, o = visit_edge_blocks(WG, pair, far, n, *edges, o, m, p, l, *given)
        else:
            p, m, l, o = visit_full_blocks(WG, pair, 1, n, p, m, l, o, *given)

        # Epilogue: the output of the last block, then out and lse.
        if config.CARRY_LAST:
            mbarrier.arrive(barriers.q_read, count=1)
        stage, phase = stage_and_phase(pair + n, STAGES)
        pd = gl.convert_layout(p.to(buffers.v_s.dtype), gl.DotOperandLayout(0, config.OUTPUT, 2), assert_trivial=True)
        o = start_output(pd, slices_of(buffers.v_s, stage, config), o)
        if config.FREE_K_FIRST:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        o = wait_for_output(o, (pd,) if SLICES > 1 else ())[:SLICES]
        mbarrier.arrive(empty.index(stage), count=1)
        pair += n + 1
        # Compute the tile's position again, because otherwise it would occupy registers during the loop.
        if config.BLOCK_MAP:
            line, i_bh, n, num_partial = published_work(turn, barriers)
            m0 = line * TILE_Q + WG * BLOCK_Q
        else:
            tile = load_number(barriers.tile_s.index(turn & (config.TURNS - 1)), 4)
            i_block, i_bh = tile_position(tile, sizes.num_blocks, sizes.num_heads, sizes.section)
            m0 = (sizes.num_blocks - 1 - i_block) * TILE_Q + WG * BLOCK_Q
        _store(WG, turn, q_stage, i_bh, m0, m, l, o, tensors, buffers, barriers, sizes, outputs, config)
        if config.Q_STAGES == 1:  # with two stages, the next tile waits for this after it has started its first scores
            tma.store_wait(0)
            mbarrier.arrive(barriers.q_empty.index(q_stage), count=1)
        turn += 1
        q_stage, phase = stage_and_phase(turn, config.Q_STAGES)
        mbarrier.wait(barriers.q_full.index(q_stage), phase)
        tile = load_number(barriers.tile_s.index(turn & (config.TURNS - 1)), 4)
    if config.REPAIR == NOTE_ROWS:  # rows may be written again
        wait_for_writes()
    else:
        tma.store_wait(0)


@gluon.jit
def _store(WG: gl.constexpr, turn, q_stage, i_bh, m0, m, l, o, tensors, buffers, barriers, sizes, outputs, config):
    """Write out and lse of a tile's rows from m0 on. The copy engine writes out from Q's buffer, after Q has been
    read."""
    ROWS: gl.constexpr = gl.SliceLayout(1, config.SCORES)
    T, desc_out = sizes.T, tensors.desc_out
    i_b = i_bh // sizes.H
    i_h = i_bh % sizes.H
    m = one_per_row(m, ROWS)
    l = row_sums(l, m)
    if config.REPAIR == MARK_ROWS:
        m0 = mark_rows(i_bh, m0, l, o, sizes, outputs, config)
    elif config.REPAIR == NOTE_ROWS:
        note_rows(WG, turn, m0, l, o, barriers, sizes, config)
    o_m = m0 + gl.arange(0, config.BLOCK_Q, layout=ROWS)
    p_lse = outputs.lse + i_bh.to(gl.int64) * T
    q_s = buffers.q_s.index(q_stage * config.CONSUMERS + WG)
    if config.CARRY_LAST:
        past = gl.load(p_lse + o_m, mask=o_m < T, other=float("-inf"))
        lse, now, past = merge_into_result(m, l, past)
        if config.FLOAT16_VALUES:
            now = now * FLOAT16_UNIT
        gl.store(p_lse + o_m, lse * 0.6931471805599453, mask=o_m < T)
        left, right = split_columns(o[0] * as_column(now, o[0]))
        past = as_column(past, left)
        mbarrier.wait(barriers.carry_full.index(0), turn & 1)
        output_s = buffers.output_s.index(WG)
        left = left + past * load_copied(desc_out, output_s, left)
        store_tile(desc_out, i_b, i_h, m0, 0, left, output_s, False, True)
        mbarrier.wait(barriers.carry_full.index(1), turn & 1)
        right = right + past * load_copied(desc_out, q_s, right)
        store_tile(desc_out, i_b, i_h, m0, config.BLOCK_D // 2, right, q_s, False, True)
    else:
        nothing = l == 0.0
        l = gl.where(nothing, 1.0, l)
        gl.store(p_lse + o_m, gl.where(nothing, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453), mask=o_m < T)
        o = multiply_slices(o, as_column((FLOAT16_UNIT if config.FLOAT16_VALUES else 1.0) / l, o[0]))
        if config.OUTPUT_BUFFER:
            store_output(desc_out, i_b, i_h, m0, o[0], q_s, False, False, buffers.output_s.index(WG))
        else:
            store_slices(desc_out, i_b, i_h, m0, o, buffers.q_s, q_stage * config.CONSUMERS + WG)
