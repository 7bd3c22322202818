"""The producer warp of the forward kernel for Hopper: it loads Q, K and V and takes tiles from the scheduler."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.masking import find_block, find_list, load_words, visible_blocks
from flashspan.kernels.hopper.ptx import prefetch
from flashspan.kernels.hopper.scheduler import (
    find_line,
    load_number,
    next_tile,
    own_sizes,
    publish_number,
    reset_counter,
    stage_and_phase,
    store_number,
    tile_position,
)
from flashspan.kernels.hopper.slices import load_slices


@gluon.jit
def _publish_work(turn, barriers, a, b, c, d):
    """Write four numbers that describe this turn's tile. Consumers read them, and the tile's number, after q_full."""
    slot = (turn & 3) * 4
    store_number(barriers.work_s.index(slot), a)
    store_number(barriers.work_s.index(slot + 1), b)
    store_number(barriers.work_s.index(slot + 2), c)
    store_number(barriers.work_s.index(slot + 3), d)


@gluon.jit
def published_work(turn, barriers):
    """Return the four numbers of `_publish_work` to a consumer."""
    slot = (turn & 3) * 4
    return (
        load_number(barriers.work_s.index(slot), 4),
        load_number(barriers.work_s.index(slot + 1), 4),
        load_number(barriers.work_s.index(slot + 2), 4),
        load_number(barriers.work_s.index(slot + 3), 4),
    )


@gluon.jit
def _wait_for_stage(stage, phase, barriers, config):
    """Wait until K's and V's buffers of a stage are free."""
    mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
    if config.FREE_K_FIRST:
        mbarrier.wait(barriers.empty.index(stage + config.STAGES), phase ^ 1)


@gluon.jit
def _prefetch_carry(tile, outputs, sizes, config):
    """Bring the rows of a tile's carry into the L2 cache."""
    ROWS: gl.constexpr = 2 * config.BLOCK_Q
    i_block, i_bh = tile_position(
        gl.minimum(tile, sizes.num_tiles - 1), sizes.num_blocks, sizes.num_heads, sizes.section
    )
    row = (sizes.num_blocks - 1 - i_block) * ROWS + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    p_out = outputs.out + (i_bh // sizes.H).to(gl.int64) * outputs.stride_b * 8
    p_out += (i_bh % sizes.H).to(gl.int64) * outputs.stride_h * 8
    p_row = p_out + gl.minimum(row, sizes.T - 1).to(gl.int64) * (outputs.stride_t * 8)
    for i in range((config.HEAD_DIM + 31) // 32):
        prefetch(p_row + i * 32)


@gluon.jit
def _load_carry_half(desc_out, b, h, m0, HALF: gl.constexpr, bar, buffers_s, first):
    """Load one half of a carry's columns, for the rows of two consumers, into buffers `first` and `first` + 1."""
    ROWS: gl.constexpr = desc_out.block_type.shape[2]
    WIDE: gl.constexpr = desc_out.block_type.shape[3]
    mbarrier.expect(bar, 2 * desc_out.block_type.nbytes)
    for w in gl.static_range(2):
        buffer = buffers_s.index(first + w)._reinterpret(desc_out.dtype, desc_out.block_type.shape, desc_out.layout)
        tma.async_copy_global_to_shared(desc_out, [b, h, m0 + w * ROWS, HALF * WIDE], bar, buffer)


@gluon.jit
def _publish_tile(turn, stage, tile, tensors, barriers, config):
    """Publish a tile's number and announce its Q."""
    publish_number(barriers.tile_s.index(turn & (config.TURNS - 1)), tile)
    mbarrier.expect(barriers.q_full.index(stage), config.CONSUMERS * config.SLICES * tensors.desc_q.block_type.nbytes)


@gluon.jit
def _end(turn, tile, barriers, sizes, config):
    """Publish that no tile is left: a number past the last."""
    stage, phase = stage_and_phase(turn, config.Q_STAGES)
    mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
    publish_number(barriers.tile_s.index(turn & (config.TURNS - 1)), tile)
    mbarrier.arrive(barriers.q_full.index(stage), count=1)
    reset_counter(sizes.counter)


@gluon.jit
def produce(tensors, buffers, barriers, sizes, outputs, mask, config):
    """Load Q of each tile, then the pairs (K_i, V_i-1), from the last block of keys to the first."""
    desc_q, desc_k, desc_v, desc_out = tensors.desc_q, tensors.desc_k, tensors.desc_v, tensors.desc_out
    q_s, k_s, v_s = buffers.q_s, buffers.k_s, buffers.v_s
    q_full, full, empty = barriers.q_full, barriers.full, barriers.empty
    BLOCK_K: gl.constexpr = config.BLOCK_K
    STAGES: gl.constexpr = config.STAGES
    ROWS: gl.constexpr = config.CONSUMERS * config.BLOCK_Q
    SLICES: gl.constexpr = config.SLICES
    NBYTES: gl.constexpr = SLICES * desc_k.block_type.nbytes  # of a block of K or V
    # Tiles of equal length end at the same time and then all load their carries: prefetch carries into the L2 cache.
    PREFETCH: gl.constexpr = config.CARRY and config.HIDDEN_SIDES == 0
    sizes = own_sizes(sizes, config)
    pair = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < sizes.num_tiles:
        i_block, i_bh = tile_position(tile, sizes.num_blocks, sizes.num_heads, sizes.section)
        m0 = (sizes.num_blocks - 1 - i_block) * ROWS
        i_b = i_bh // sizes.H
        i_h = i_bh % sizes.H
        i_k = i_h // sizes.G
        first, first_full, end_full, end = visible_blocks(
            m0, sizes.T, sizes.S, sizes.lo, sizes.hi, mask, i_b,
            config.TABLE, ROWS, BLOCK_K, 1,
        )  # fmt: skip
        n = end - first
        # The first K does not wait for Q's buffer: it is loaded while consumers finish the previous tile.
        stage, phase = stage_and_phase(pair, STAGES)
        _wait_for_stage(stage, phase, barriers, config)
        mbarrier.expect(full.index(stage), NBYTES)
        load_slices(desc_k, i_b, i_k, (end - 1) * BLOCK_K, full.index(stage), k_s, stage, SLICES)
        q_stage, phase = stage_and_phase(turn, config.Q_STAGES)
        mbarrier.wait(barriers.q_empty.index(q_stage), phase ^ 1)
        if config.TABLE:
            _publish_work(turn, barriers, first, first_full, end_full, end)
        _publish_tile(turn, q_stage, tile, tensors, barriers, config)
        for w in gl.static_range(config.CONSUMERS):
            row = m0 + w * config.BLOCK_Q
            load_slices(desc_q, i_b, i_h, row, q_full.index(q_stage), q_s, q_stage * config.CONSUMERS + w, SLICES)
        after = tile
        for i in range(1, n):
            if PREFETCH and i == gl.maximum(n - 8, 1):
                after = next_tile(sizes.counter)
                _prefetch_carry(tile if config.CARRY_LAST else after, outputs, sizes, config)
            stage, phase = stage_and_phase(pair + i, STAGES)
            row = (end - 1 - i) * BLOCK_K
            mbarrier.wait(empty.index(stage + (STAGES if config.FREE_K_FIRST else 0)), phase ^ 1)
            mbarrier.expect(full.index(stage), 2 * NBYTES)
            load_slices(desc_k, i_b, i_k, row, full.index(stage), k_s, stage, SLICES)
            if config.FREE_K_FIRST:
                mbarrier.wait(empty.index(stage), phase ^ 1)
            load_slices(desc_v, i_b, i_k, row + BLOCK_K, full.index(stage), v_s, stage, SLICES)
        stage, phase = stage_and_phase(pair + n, STAGES)
        _wait_for_stage(stage, phase, barriers, config)
        mbarrier.expect(full.index(stage), NBYTES)
        load_slices(desc_v, i_b, i_k, first * BLOCK_K, full.index(stage), v_s, stage, SLICES)
        if not PREFETCH or n == 1:
            after = next_tile(sizes.counter)
        # The carry's first half is loaded into the output's buffer, after the previous tile has been written from it;
        # its second half into Q's buffer, after Q has been read.
        if config.CARRY_LAST:
            before, phase = stage_and_phase(turn + config.Q_STAGES - 1, config.Q_STAGES)
            mbarrier.wait(barriers.q_empty.index(before), phase ^ 1)
            _load_carry_half(desc_out, i_b, i_h, m0, 0, barriers.carry_full.index(0), buffers.output_s, 0)
            mbarrier.wait(barriers.q_read, turn & 1)
            _load_carry_half(desc_out, i_b, i_h, m0, 1, barriers.carry_full.index(1), buffers.q_s, q_stage * 2)
        tile = after
        pair += n + 1
        turn += 1
    _end(turn, tile, barriers, sizes, config)


@gluon.jit
def produce_listed(tensors, buffers, barriers, sizes, outputs, mask, config):
    """`produce` for a block map: loads the blocks of a line's list, the partial ones first, with their bits."""
    desc_q, desc_k, desc_v = tensors.desc_q, tensors.desc_k, tensors.desc_v
    q_s, k_s, v_s = buffers.q_s, buffers.k_s, buffers.v_s
    q_full, empty = barriers.q_full, barriers.empty
    BLOCK_K: gl.constexpr = config.BLOCK_K
    STAGES: gl.constexpr = config.STAGES
    PAIR: gl.constexpr = 2 * desc_k.block_type.nbytes
    WORDS: gl.constexpr = 2 * mask.desc_words.block_type.nbytes
    sizes = own_sizes(sizes, config)
    pair = 0
    turn = 0
    tile = gl.program_id(0)
    line, i_bh = find_line(tile, mask, sizes.num_heads, sizes.section, sizes.H, 1)
    begin, end, n, num_partial = find_list(mask, i_bh // sizes.H, i_bh % sizes.H, line)
    while tile < sizes.num_tiles:
        i_b = i_bh // sizes.H
        i_h = i_bh % sizes.H
        i_k = i_h // sizes.G
        block, word = find_block(mask, begin, end, 0, num_partial)
        row = block * BLOCK_K
        stage, phase = stage_and_phase(pair, STAGES)
        bar = barriers.full.index(stage)
        _wait_for_stage(stage, phase, barriers, config)
        mbarrier.expect(bar, PAIR // 2, pred=num_partial == 0)
        mbarrier.expect(bar, PAIR // 2 + WORDS, pred=num_partial > 0)
        load_slices(desc_k, i_b, i_k, row, bar, k_s, stage, 1)
        load_words(mask, word, bar, stage, num_partial > 0)
        q_stage, phase = stage_and_phase(turn, config.Q_STAGES)
        mbarrier.wait(barriers.q_empty.index(q_stage), phase ^ 1)
        _publish_work(turn, barriers, line, i_bh, n, num_partial)
        _publish_tile(turn, q_stage, tile, tensors, barriers, config)
        for w in gl.static_range(2):
            m0 = (line * 2 + w) * config.BLOCK_Q
            load_slices(desc_q, i_b, i_h, m0, q_full.index(q_stage), q_s, q_stage * 2 + w, 1)
        for i in range(1, n):
            before = row
            block, word = find_block(mask, begin, end, i, num_partial)
            row = block * BLOCK_K
            stage, phase = stage_and_phase(pair + i, STAGES)
            bar = barriers.full.index(stage)
            mbarrier.wait(empty.index(stage + STAGES), phase ^ 1)
            mbarrier.expect(bar, PAIR, pred=i >= num_partial)
            mbarrier.expect(bar, PAIR + WORDS, pred=i < num_partial)
            load_slices(desc_k, i_b, i_k, row, bar, k_s, stage, 1)
            load_words(mask, word, bar, stage, i < num_partial)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            load_slices(desc_v, i_b, i_k, before, bar, v_s, stage, 1)
        # Find the next tile here, not at the end, because consumers still compute two blocks in the meantime.
        stage, phase = stage_and_phase(pair + n, STAGES)
        pair += n + 1
        turn += 1
        tile = next_tile(sizes.counter)
        line, i_bh = find_line(gl.minimum(tile, sizes.num_tiles - 1), mask, sizes.num_heads, sizes.section, sizes.H, 1)
        begin, end, n, num_partial = find_list(mask, i_bh // sizes.H, i_bh % sizes.H, line)
        _wait_for_stage(stage, phase, barriers, config)
        mbarrier.expect(barriers.full.index(stage), PAIR // 2)
        load_slices(desc_v, i_b, i_k, row, barriers.full.index(stage), v_s, stage, 1)
    _end(turn, tile, barriers, sizes, config)
