"""The producer warp of the backward kernel for Hopper: it loads K, V, Q and dO and takes tiles from the
scheduler."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.masking import find_block, find_list, load_words, nth_block
from flashspan.kernels.hopper.scheduler import (
    find_line,
    head_of_keys,
    load_number,
    locate_keys,
    next_tile,
    publish_number,
    reset_counter,
    store_number,
)


@gluon.jit
def published_work(turn, schedule, WARPS: gl.constexpr):
    """Wait until this turn's tile is published. Return its number and the seven numbers that describe it."""
    slot = turn & 3
    mbarrier.wait(schedule.work_full.index(slot), (turn >> 2) & 1)
    work = ()
    for i in gl.static_range(8):
        work += (load_number(schedule.work_s.index(slot * 8 + i), WARPS),)  # type: ignore[assignment]
    return work


@gluon.jit
def _publish_work(turn, tile, work, schedule):
    """Publish a tile. There are four slots, and the other partitions are never more than two turns behind."""
    slot = turn & 3
    for i in gl.static_range(7):
        store_number(schedule.work_s.index(slot * 8 + 1 + i), work[i])
    publish_number(schedule.work_s.index(slot * 8), tile)
    mbarrier.arrive(schedule.work_full.index(slot), count=1)


@gluon.jit
def _line_work(tile, sizes, mask, schedule, config):
    """Return a tile's sequence, key head, first key and line of the block map; and for the first of its query heads,
    the number of blocks of queries to visit and how many of them are partial (these come first)."""
    line, i_bk = find_line(tile, mask, schedule.num_tiles // mask.num_lines, sizes.section, sizes.K, sizes.G)
    begin, end, n, num_partial = find_list(mask, i_bk // sizes.K, i_bk % sizes.K * sizes.G, line)
    return i_bk // sizes.K, i_bk % sizes.K, line * (2 * config.BLOCK_K), line, n, num_partial, 0


@gluon.jit
def _load_keys(turn, tensors, buffers, barriers, sizes, b, i_k, n0, config):
    """Load K and V of a tile, as soon as those of the previous tile are no longer read."""
    h = head_of_keys(i_k, sizes.K, tensors.desc_k, config.SPLIT_HEADS)
    mbarrier.wait(barriers.kv_empty, (turn & 1) ^ 1)
    mbarrier.expect(barriers.kv_full, 2 * config.CONSUMERS * tensors.desc_k.block_type.nbytes)
    for i in gl.static_range(2):
        desc = tensors.desc_k if i == 0 else tensors.desc_v
        for w in gl.static_range(config.CONSUMERS):
            where = [b, h, n0 + w * config.BLOCK_K, 0]
            tma.async_copy_global_to_shared(desc, where, barriers.kv_full, buffers.kv_s[w].index(i))


@gluon.jit
def _load_row_numbers(desc, row, bar, buffer):
    """Load one number per row, from `row` on: in float32, or in three bfloat16 parts (parts.py)."""
    where = [row, 0] if len(desc.block_type.shape) == 2 else [row]
    tma.async_copy_global_to_shared(desc, where, bar, buffer)


@gluon.jit
def _load_queries(tensors, buffers, bar, b, h, m0, row, stage):
    """Load Q, -lse and -delta of a block of queries."""
    _load_row_numbers(tensors.desc_lse, row, bar, buffers.lse_s.index(stage))
    tma.async_copy_global_to_shared(tensors.desc_q, [b, h, m0, 0], bar, buffers.q_s.index(stage))
    _load_row_numbers(tensors.desc_delta, row, bar, buffers.delta_s.index(stage))


@gluon.jit
def _interval_work(tile, sizes, mask, schedule, config):
    """Return a tile's sequence, key head and first key, and the blocks of queries to visit. With SPLIT_TILES, each tile
    number from num_whole on is one of num_parts parts of a tile, with a share of its queries. Otherwise most programs
    would be idle in the last round of equally long tiles."""
    TILE_K: gl.constexpr = config.CONSUMERS * config.BLOCK_K
    if not config.SPLIT_TILES:
        return locate_keys(tile, schedule.num_tiles, sizes, mask, TILE_K, config.BLOCK_Q, config.TABLE, 1)
    num_whole, num_parts = schedule.num_whole, schedule.num_parts
    late = gl.maximum(tile - num_whole, 0)
    uncut = gl.minimum(tile, num_whole) + late // num_parts
    num_uncut = num_whole + (schedule.num_tiles - num_whole) // num_parts
    i_b, i_k, n0, first, first_full, end_full, end = locate_keys(
        uncut, num_uncut, sizes, mask, TILE_K, config.BLOCK_Q, config.TABLE, 1
    )
    size = gl.where(tile < num_whole, end - first, gl.cdiv(end - first, num_parts))
    first += late % num_parts * size
    end = gl.minimum(first + size, end)
    first_full = gl.maximum(first_full, first)
    return i_b, i_k, n0, first, first_full, gl.maximum(gl.minimum(end_full, end), first_full), end


@gluon.jit
def _find_work(tile, sizes, mask, schedule, config):
    """Return the seven numbers that describe a tile."""
    if config.BLOCK_MAP:
        work = _line_work(tile, sizes, mask, schedule, config)
    else:
        work = _interval_work(tile, sizes, mask, schedule, config)
    return work


@gluon.jit
def produce(tensors, buffers, barriers, sizes, mask, schedule, config):
    """Load K and V of each tile, and Q, dO, -lse and -delta of each block of queries. A tile's first block of queries
    is loaded before its K and V, because its buffer is free earlier. For a block map: the blocks of a line's lists, the
    partial ones first, with their bits."""
    STAGES: gl.constexpr = config.STAGES
    SPLIT: gl.constexpr = 128 // config.BLOCK_Q
    BYTES: gl.constexpr = 2 * (tensors.desc_q.block_type.nbytes + tensors.desc_lse.block_type.nbytes)
    turn = 0
    i = 0
    tile = gl.program_id(0)
    work = _find_work(tile, sizes, mask, schedule, config)
    _publish_work(turn, tile, work, schedule)
    while tile < schedule.num_tiles:
        i_b, i_k, n0, a, b, c, d = work
        if config.BLOCK_MAP:
            WORDS: gl.constexpr = 2 * mask.desc_words.block_type.nbytes
            for g in range(sizes.G):
                i_h = i_k * sizes.G + g
                begin, end, n, num_partial = find_list(mask, i_b, i_h, a)
                for j in range(n * SPLIT):
                    block, word = find_block(mask, begin, end, j // SPLIT, num_partial)
                    m0 = block * 128 + j % SPLIT * config.BLOCK_Q
                    partial = j // SPLIT < num_partial
                    stage = i & (STAGES - 1)
                    bar = barriers.full.index(stage)
                    phase = ((i // STAGES) & 1) ^ 1
                    mbarrier.wait(barriers.empty.index(stage + STAGES), phase)
                    mbarrier.expect(bar, BYTES, pred=j // SPLIT >= num_partial)
                    mbarrier.expect(bar, BYTES + WORDS, pred=partial)
                    tma.async_copy_global_to_shared(tensors.desc_do, [i_b, i_h, m0, 0], bar, buffers.do_s.index(stage))
                    mbarrier.wait(barriers.empty.index(stage), phase)
                    load_words(mask, word, bar, stage, partial)
                    row = (i_b * sizes.H + i_h) * sizes.padded_T + m0
                    _load_queries(tensors, buffers, bar, i_b, i_h, m0, row, stage)
                    if g + j == 0:
                        _load_keys(turn, tensors, buffers, barriers, sizes, i_b, i_k, n0, config)
                    i += 1
        else:
            first, first_full, end_full, end = a, b, c, d
            n = end - first
            for j in range(n * sizes.G):
                i_h = i_k * sizes.G + j // n
                m0 = nth_block(j % n, first, first_full, end_full, end) * config.BLOCK_Q
                stage = i & (STAGES - 1)
                bar = barriers.full.index(stage)
                mbarrier.wait(barriers.empty.index(stage), ((i // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                row = (i_b * sizes.H + i_h) * sizes.padded_T + m0
                _load_queries(tensors, buffers, bar, i_b, i_h, m0, row, stage)
                tma.async_copy_global_to_shared(tensors.desc_do, [i_b, i_h, m0, 0], bar, buffers.do_s.index(stage))
                if j == 0:
                    _load_keys(turn, tensors, buffers, barriers, sizes, i_b, i_k, n0, config)
                i += 1
        tile = next_tile(schedule.counter)
        work = _find_work(gl.minimum(tile, schedule.num_tiles - 1), sizes, mask, schedule, config)
        turn += 1
        _publish_work(turn, tile, work, schedule)
    reset_counter(schedule.counter)
