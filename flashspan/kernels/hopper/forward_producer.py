"""The warp that feeds the forward kernel for Hopper: K, V and Q through the copy engine, and which tile is next."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.masking import blocks, find_block, find_list, load_words
from flashspan.kernels.hopper.ptx import prefetch
from flashspan.kernels.hopper.scheduler import find_line, leave, next_tile, place, put, tell, told


@gluon.jit
def buffer_of(x, STAGES: gl.constexpr):
    """Pair (or tile) number x -> (its buffer, the parity its barrier has when it is full)."""
    LOG: gl.constexpr = STAGES // 2 - STAGES // 8  # of 1, 2, 4 and 8
    return x & (STAGES - 1), (x >> LOG) & 1


@gluon.jit
def _wait(empty, stage, phase, EARLY: gl.constexpr, STAGES: gl.constexpr):
    """Wait until both places of a pair are free."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if EARLY:
        mbarrier.wait(empty.index(stage + STAGES), phase ^ 1)


@gluon.jit
def _load(desc, b, h, row, bar, buffer):
    tma.async_copy_global_to_shared(desc, [b, h, row, 0], bar, buffer)


@gluon.jit
def _say(turn, work_s, a, b, c, d):
    """Tell the others four numbers of this turn's tile, before they are told which it is."""
    slot = (turn & 3) * 4
    put(work_s.index(slot), a)
    put(work_s.index(slot + 1), b)
    put(work_s.index(slot + 2), c)
    put(work_s.index(slot + 3), d)


@gluon.jit
def hear(turn, work_s):
    """What the feeding warp said of this turn's tile."""
    slot = (turn & 3) * 4
    return (
        told(work_s.index(slot), 4),
        told(work_s.index(slot + 1), 4),
        told(work_s.index(slot + 2), 4),
        told(work_s.index(slot + 3), 4),
    )


@gluon.jit
def _fetch_carry(tile, outputs, numbers, C: gl.constexpr):
    """Bring the 128 rows of a tile's carry into the L2 cache, before they are asked for."""
    out, lse, bad, s_ob, s_oh, s_ot = outputs
    H, G, T, S, lo, hi, scale, num_heads, num_blocks, section, num_tiles, counter = numbers
    ROWS: gl.constexpr = 2 * C[0]
    i_block, i_bh = place(gl.minimum(tile, num_tiles - 1), num_blocks, num_heads, section)
    row = (num_blocks - 1 - i_block) * ROWS + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    p_out = out + (i_bh // H).to(gl.int64) * s_ob * 8 + (i_bh % H).to(gl.int64) * s_oh * 8
    p_row = p_out + gl.minimum(row, T - 1).to(gl.int64) * (s_ot * 8)
    for i in range((C[6] + 31) // 32):
        prefetch(p_row + i * 32)


@gluon.jit
def _load_half(desc_out, b, h, m0, HALF: gl.constexpr, bar, rooms, first):
    """Half of a carry's columns, of 128 rows, into two rooms from the first on."""
    ROWS: gl.constexpr = desc_out.block_type.shape[2]
    WIDE: gl.constexpr = desc_out.block_type.shape[3]
    mbarrier.expect(bar, 2 * desc_out.block_type.nbytes)
    for w in gl.static_range(2):
        room = rooms.index(first + w)._reinterpret(desc_out.dtype, desc_out.block_type.shape, desc_out.layout)
        tma.async_copy_global_to_shared(desc_out, [b, h, m0 + w * ROWS, HALF * WIDE], bar, room)


@gluon.jit
def feed(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    """The producer warp: Q of each tile, then the pairs (K_i, V_i-1), walking keys from the last block to the first."""
    desc_q, desc_k, desc_v, desc_out = desc
    q_s, k_s, v_s, spare_s, ones_s = buffers
    q_full, q_empty, full, empty, tile_s, work_s, q_read, past_full = bars
    H, G, T, S, lo, hi, scale, num_heads, num_blocks, section, num_tiles, counter = numbers
    start, end, s_rows = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    TABLE: gl.constexpr = C[4]
    AHEAD: gl.constexpr = C[5] and C[3] == 0  # tiles of one length want their carries at one time
    LATE: gl.constexpr = C[5] and C[11]  # at their end, not their beginning
    QS: gl.constexpr = C[9]
    EARLY: gl.constexpr = C[14]
    WGS: gl.constexpr = C[16]
    pair = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        i_block, i_bh = place(tile, num_blocks, num_heads, section)
        m0 = (num_blocks - 1 - i_block) * (WGS * BM)
        i_b = i_bh // H
        i_h = i_bh % H
        i_k = i_h // G
        first, f_lo, f_hi, last = blocks(
            m0, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE, WGS * BM, BN, 1
        )
        n = last - first
        # The first K needs no Q: it is on its way while the tile before is finished.
        stage, phase = buffer_of(pair, STAGES)
        _wait(empty, stage, phase, EARLY, STAGES)
        mbarrier.expect(full.index(stage), desc_k.block_type.nbytes)
        _load(desc_k, i_b, i_k, (last - 1) * BN, full.index(stage), k_s.index(stage))
        room, phase = buffer_of(turn, QS)
        mbarrier.wait(q_empty.index(room), phase ^ 1)
        if TABLE:
            _say(turn, work_s, first, f_lo, f_hi, last)
        tell(tile_s.index(turn & 3), tile)
        mbarrier.expect(q_full.index(room), WGS * desc_q.block_type.nbytes)
        for w in gl.static_range(WGS):
            _load(desc_q, i_b, i_h, m0 + w * BM, q_full.index(room), q_s.index(room * WGS + w))
        after = tile
        for i in range(1, n):
            if AHEAD and i == gl.maximum(n - 8, 1):
                after = next_tile(counter)
                _fetch_carry(tile if LATE else after, outputs, numbers, C)
            stage, phase = buffer_of(pair + i, STAGES)
            row = (last - 1 - i) * BN
            mbarrier.wait(empty.index(stage + (STAGES if EARLY else 0)), phase ^ 1)
            mbarrier.expect(full.index(stage), 2 * desc_k.block_type.nbytes)
            _load(desc_k, i_b, i_k, row, full.index(stage), k_s.index(stage))
            if EARLY:
                mbarrier.wait(empty.index(stage), phase ^ 1)
            _load(desc_v, i_b, i_k, row + BN, full.index(stage), v_s.index(stage))
        stage, phase = buffer_of(pair + n, STAGES)
        _wait(empty, stage, phase, EARLY, STAGES)
        mbarrier.expect(full.index(stage), desc_v.block_type.nbytes)
        _load(desc_v, i_b, i_k, first * BN, full.index(stage), v_s.index(stage))
        if not AHEAD or n == 1:
            after = next_tile(counter)
        if LATE:  # into the place the tile before has left through and, once Q has been read, into Q's
            before, phase = buffer_of(turn + QS - 1, QS)
            mbarrier.wait(q_empty.index(before), phase ^ 1)
            _load_half(desc_out, i_b, i_h, m0, 0, past_full.index(0), spare_s, 0)
            mbarrier.wait(q_read, turn & 1)
            _load_half(desc_out, i_b, i_h, m0, 1, past_full.index(1), q_s, room * 2)
        tile = after
        pair += n + 1
        turn += 1
    room, phase = buffer_of(turn, QS)
    mbarrier.wait(q_empty.index(room), phase ^ 1)
    tell(tile_s.index(turn & 3), tile)
    mbarrier.arrive(q_full.index(room), count=1)
    leave(counter)


@gluon.jit
def feed_lists(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    """The producer warp of a block map: as `feed`, of the blocks its lists name."""
    desc_q, desc_k, desc_v, desc_out = desc
    q_s, k_s, v_s, spare_s, ones_s = buffers
    q_full, q_empty, full, empty, tile_s, work_s, q_read, past_full = bars
    H, G, T, S, lo, hi, scale, num_heads, num_blocks, section, num_tiles, counter = numbers
    desc_words, words_s, maps = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    QS: gl.constexpr = C[9]
    EARLY: gl.constexpr = C[14]
    PAIR: gl.constexpr = 2 * desc_k.block_type.nbytes
    WORDS: gl.constexpr = 2 * desc_words.block_type.nbytes
    pair = 0
    turn = 0
    tile = gl.program_id(0)
    line, i_bh = find_line(tile, maps, num_heads, section, H, 1)
    begin, end, n, edges = find_list(maps, i_bh // H, i_bh % H, line)
    while tile < num_tiles:
        i_b = i_bh // H
        i_h = i_bh % H
        i_k = i_h // G
        block, word = find_block(maps, begin, end, 0, edges)
        row = block * BN
        stage, phase = buffer_of(pair, STAGES)
        bar = full.index(stage)
        _wait(empty, stage, phase, EARLY, STAGES)
        mbarrier.expect(bar, PAIR // 2, pred=edges == 0)
        mbarrier.expect(bar, PAIR // 2 + WORDS, pred=edges > 0)
        _load(desc_k, i_b, i_k, row, bar, k_s.index(stage))
        load_words(desc_words, word, bar, words_s, stage, edges > 0)
        room, phase = buffer_of(turn, QS)
        mbarrier.wait(q_empty.index(room), phase ^ 1)
        _say(turn, work_s, line, i_bh, n, edges)
        tell(tile_s.index(turn & 3), tile)
        mbarrier.expect(q_full.index(room), 2 * desc_q.block_type.nbytes)
        for w in gl.static_range(2):
            _load(desc_q, i_b, i_h, (line * 2 + w) * BM, q_full.index(room), q_s.index(room * 2 + w))
        for i in range(1, n):
            before = row
            block, word = find_block(maps, begin, end, i, edges)
            row = block * BN
            stage, phase = buffer_of(pair + i, STAGES)
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage + STAGES), phase ^ 1)
            mbarrier.expect(bar, PAIR, pred=i >= edges)
            mbarrier.expect(bar, PAIR + WORDS, pred=i < edges)
            _load(desc_k, i_b, i_k, row, bar, k_s.index(stage))
            load_words(desc_words, word, bar, words_s, stage, i < edges)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            _load(desc_v, i_b, i_k, before, bar, v_s.index(stage))
        # The next tile is looked up here, not at the end: the others still have two blocks to do meanwhile.
        stage, phase = buffer_of(pair + n, STAGES)
        pair += n + 1
        turn += 1
        tile = next_tile(counter)
        line, i_bh = find_line(gl.minimum(tile, num_tiles - 1), maps, num_heads, section, H, 1)
        begin, end, n, edges = find_list(maps, i_bh // H, i_bh % H, line)
        _wait(empty, stage, phase, EARLY, STAGES)
        mbarrier.expect(full.index(stage), PAIR // 2)
        _load(desc_v, i_b, i_k, row, full.index(stage), v_s.index(stage))
    room, phase = buffer_of(turn, QS)
    mbarrier.wait(q_empty.index(room), phase ^ 1)
    tell(tile_s.index(turn & 3), tile)
    mbarrier.arrive(q_full.index(room), count=1)
    leave(counter)
