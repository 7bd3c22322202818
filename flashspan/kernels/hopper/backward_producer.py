"""The warp that feeds the backward kernel for Hopper: K, V, Q and dO by the copy engine, and which tile is next."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashspan.kernels.hopper.masking import find_block, find_list, load_words, nth
from flashspan.kernels.hopper.scheduler import find_line, key_work, leave, next_tile, put, tell, told


@gluon.jit
def hear(turn, work, WARPS: gl.constexpr):
    """The tile of this turn and the seven numbers that say what it is, once the loader has told them."""
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    slot = turn & 3
    mbarrier.wait(work_full.index(slot), (turn >> 2) & 1)
    slot *= 8
    return (
        told(work_s.index(slot), WARPS),
        told(work_s.index(slot + 1), WARPS),
        told(work_s.index(slot + 2), WARPS),
        told(work_s.index(slot + 3), WARPS),
        told(work_s.index(slot + 4), WARPS),
        told(work_s.index(slot + 5), WARPS),
        told(work_s.index(slot + 6), WARPS),
        told(work_s.index(slot + 7), WARPS),
    )


@gluon.jit
def _say(turn, tile, what, work):
    """Tell the others. They are never more than two turns behind, and there are four places."""
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    slot = turn & 3
    for i in gl.static_range(7):
        put(work_s.index(slot * 8 + 1 + i), what[i])
    tell(work_s.index(slot * 8), tile)
    mbarrier.arrive(work_full.index(slot), count=1)


@gluon.jit
def _line_work(tile, num_tiles, numbers, maps, KEYS: gl.constexpr):
    """A tile's batch, key head and first key, its line of a block map, how many blocks of queries the first of its
    heads walks and how many of these, the first, have bits."""
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    line, i_bk = find_line(tile, maps, num_tiles // maps[6], section, K, G)
    begin, end, n, edges = find_list(maps, i_bk // K, i_bk % K * G, line)
    return i_bk // K, i_bk % K, line * KEYS, line, n, edges, 0


@gluon.jit
def _load_keys(turn, desc, buffers, bars, b, h, n0, C: gl.constexpr):
    """K and V of a tile, as soon as those of the one before are no longer read."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    BN: gl.constexpr = C[1]
    WGS: gl.constexpr = C[17]
    mbarrier.wait(kv_empty, (turn & 1) ^ 1)
    mbarrier.expect(kv_full, 2 * WGS * desc_k.block_type.nbytes)
    for w in gl.static_range(WGS):
        tma.async_copy_global_to_shared(desc_k, [b, h, n0 + w * BN, 0], kv_full, kv[w].index(0))
    for w in gl.static_range(WGS):
        tma.async_copy_global_to_shared(desc_v, [b, h, n0 + w * BN, 0], kv_full, kv[w].index(1))


@gluon.jit
def _load_rows(desc, row, bar, buffer):
    """A number of each row from this one on, whole or in parts."""
    if len(desc.block_type.shape) == 2:
        tma.async_copy_global_to_shared(desc, [row, 0], bar, buffer)
    else:
        tma.async_copy_global_to_shared(desc, [row], bar, buffer)


@gluon.jit
def _load_queries(desc, buffers, bar, b, h, m0, row, stage):
    """Q, -lse and -delta of a block of queries."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    _load_rows(desc_l, row, bar, l_s.index(stage))
    tma.async_copy_global_to_shared(desc_q, [b, h, m0, 0], bar, q_s.index(stage))
    _load_rows(desc_d, row, bar, d_s.index(stage))


@gluon.jit
def _tile_work(tile, numbers, tables, work, C: gl.constexpr):
    """What a tile is. If they are CUT, from number `whole` on each is one of so many parts, a share of its queries: of
    equally long tiles those of the last round then keep all programs busy."""
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    CUT: gl.constexpr = C[12]
    if not CUT:
        return key_work(tile, num_tiles, numbers, tables, C[17] * C[1], C[0], C[3], 1)
    late = gl.maximum(tile - whole, 0)
    i_b, i_k, n0, first, f_lo, f_hi, end = key_work(
        gl.minimum(tile, whole) + late // parts, whole + (num_tiles - whole) // parts, numbers, tables, C[17] * C[1],
        C[0], C[3], 1,
    )  # fmt: skip
    size = gl.where(tile < whole, end - first, gl.cdiv(end - first, parts))
    first += late % parts * size
    end = gl.minimum(first + size, end)
    f_lo = gl.maximum(f_lo, first)
    return i_b, i_k, n0, first, f_lo, gl.maximum(gl.minimum(f_hi, end), f_lo), end


@gluon.jit
def feed(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    """The loader warp: of each tile K and V, and Q, dO, -lse and -delta of each block of queries. The first of these
    need not wait for K and V, whose place is still read when theirs is free."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    BM: gl.constexpr = C[0]
    STAGES: gl.constexpr = C[2]
    turn = 0
    i = 0
    tile = gl.program_id(0)
    what = _tile_work(tile, numbers, tables, work, C)
    _say(turn, tile, what, work)
    while tile < num_tiles:
        i_b, i_k, n0, first, f_lo, f_hi, end = what
        n = end - first
        for j in range(n * G):
            i_h = i_k * G + j // n
            m0 = nth(j % n, first, f_lo, f_hi, end) * BM
            stage = i & (STAGES - 1)
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * (desc_q.block_type.nbytes + desc_l.block_type.nbytes))
            _load_queries(desc, buffers, bar, i_b, i_h, m0, (i_b * H + i_h) * Tp + m0, stage)
            tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], bar, buffers[1].index(stage))
            if j == 0:
                _load_keys(turn, desc, buffers, bars, i_b, i_k, n0, C)
            i += 1
        tile = next_tile(counter)
        what = _tile_work(gl.minimum(tile, num_tiles - 1), numbers, tables, work, C)
        turn += 1
        _say(turn, tile, what, work)
    leave(counter)


@gluon.jit
def feed_lists(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    """The loader warp of a block map."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    desc_words, words_s, maps = tables
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    SPLIT: gl.constexpr = 128 // BM
    QUERIES: gl.constexpr = 2 * (desc_q.block_type.nbytes + desc_l.block_type.nbytes)
    WORDS: gl.constexpr = 2 * desc_words.block_type.nbytes
    turn = 0
    i = 0
    tile = gl.program_id(0)
    what = _line_work(tile, num_tiles, numbers, maps, 2 * BN)
    _say(turn, tile, what, work)
    while tile < num_tiles:
        i_b, i_k, n0, line, n_first, edges_first, _ = what
        for g in range(G):
            i_h = i_k * G + g
            begin, end, n, edges = find_list(maps, i_b, i_h, line)
            for j in range(n * SPLIT):
                block, word = find_block(maps, begin, end, j // SPLIT, edges)
                m0 = block * 128 + j % SPLIT * BM
                masked = j // SPLIT < edges
                stage = i & (STAGES - 1)
                bar = full.index(stage)
                phase = ((i // STAGES) & 1) ^ 1
                mbarrier.wait(empty.index(stage + STAGES), phase)
                mbarrier.expect(bar, QUERIES, pred=j // SPLIT >= edges)
                mbarrier.expect(bar, QUERIES + WORDS, pred=masked)
                tma.async_copy_global_to_shared(desc_do, [i_b, i_h, m0, 0], bar, buffers[1].index(stage))
                mbarrier.wait(empty.index(stage), phase)
                load_words(desc_words, word, bar, words_s, stage, masked)
                _load_queries(desc, buffers, bar, i_b, i_h, m0, (i_b * H + i_h) * Tp + m0, stage)
                if g + j == 0:
                    _load_keys(turn, desc, buffers, bars, i_b, i_k, n0, C)
                i += 1
        tile = next_tile(counter)
        what = _line_work(gl.minimum(tile, num_tiles - 1), num_tiles, numbers, maps, 2 * BN)
        turn += 1
        _say(turn, tile, what, work)
    leave(counter)
