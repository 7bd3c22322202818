"""dQ in the backward kernel for Hopper: the warpgroups make it of the dS of all and hand it over by shared memory, and
a warp of its own adds it into global float32."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from flashspan.kernels.hopper.backward_producer import hear
from flashspan.kernels.hopper.gluon_compat import barrier, reduce_add
from flashspan.kernels.hopper.masking import find_block, find_list, nth
from flashspan.kernels.hopper.ptx import all_written, fence_copies, here_and_now
from flashspan.kernels.hopper.shared_memory import swap, swapped


@gluon.jit
def dq_place(count, PLACES: gl.constexpr):
    """Which place the dQ of this number has on its way out, and the phase of that place's barriers."""
    if PLACES == 2:
        return count & 1, (count >> 1) & 1
    return 0, count & 1


@gluon.jit
def ds_place(i, SLOTS: gl.constexpr):
    """The same of a block's dS, of 2 or 4 places."""
    return i & (SLOTS - 1), (i >> (SLOTS // 2)) & 1


@gluon.jit
def start_dq(WG: gl.constexpr, WHOLE: gl.constexpr, i, buffers, bars, C: gl.constexpr):
    """Start dQ of block i, from the dS of all: all of it, or this warpgroup's half, 64 of its rows, or of its columns
    where it has rows for one only."""
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    QL: gl.constexpr = C[8]
    BD: gl.constexpr = q_s.shape[4]
    slot, phase = ds_place(i, ds_full.shape[0])
    mbarrier.wait(ds_full.index(slot), phase)
    if WHOLE:
        dq = gl.zeros([BM, BD], gl.float32, layout=C[7])
    else:
        dq = gl.zeros([64, 64], gl.float32, layout=QL)
    for w in gl.static_range(C[17]):
        k = kv[w].index(here_and_now(0)).reshape((BN, BD))
        part = ds[w].index(slot)
        if not WHOLE:
            if BM == 64:
                k = k.slice(WG * (BD // 2), BD // 2, dim=1)
            else:
                part = part.slice(WG * 64, 64, dim=1)
        dq = warpgroup_mma(part.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def leave_dq(WG: gl.constexpr, WHOLE: gl.constexpr, count, dq, buffers, bars, sm_scale, C: gl.constexpr):
    """Hand a dQ, the one of this number, or this half of it, to the warp that adds it."""
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    BM: gl.constexpr = C[0]
    ADD: gl.constexpr = C[4]
    BD: gl.constexpr = q_s.shape[4]
    PLACES: gl.constexpr = dq_full.shape[0]
    if ADD:
        dq = swap(dq * sm_scale, 64, dq.shape[1])
    slot, phase = dq_place(count - PLACES, PLACES)
    mbarrier.wait(dq_empty.index(slot), phase)
    if ADD:  # rows of the caller's
        tile = swapped(dq_s.index(slot), BM, BD)
        if WHOLE:
            tile.store(dq)
        elif BM == 64:
            tile.slice(WG * (BD // 2), BD // 2, dim=1).store(dq)
        else:
            tile.slice(WG * 64, 64, dim=0).store(dq)
    else:  # 16 bytes of each thread after those of the thread before
        L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        GROUPS: gl.constexpr = dq.shape[1] // 8
        tile = dq_s.index(slot)._reinterpret(gl.float32, [BM * BD // (GROUPS * 512), GROUPS, 128, 4], L)
        tile = tile.index(here_and_now(0 if WHOLE else WG))
        tile.store(dq.reshape((4, 2, 8, GROUPS, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((GROUPS, 128, 4)))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(slot), count=1)


@gluon.jit
def _claim(p_state):
    """Ask whether somebody has been at sums of dQ that nobody has cleared: 2, or 0 to the first, who stores instead of
    adding and then says so (`_settle`). Meanwhile their state is 1, and whoever comes waits."""
    state = gl.atomic_cas(p_state, 0, 1, sem="acquire")
    while state == 1:
        state = gl.atomic_cas(p_state, 0, 1, sem="acquire")
    fence_copies()
    return state


@gluon.jit
def _settle(p_state, state):
    """Let others add to what was stored."""
    if state == 0:
        all_written()
        fence_copies()
        barrier()
        gl.atomic_xchg(p_state, 2, sem="release")


@gluon.jit
def _add(desc_dq, b, h, m0, row, state, count, buffers, bars, C: gl.constexpr):
    """Add the dQ that arrives as this number, of queries from m0 on, which is `row` among those of all heads; store it
    if the state is 0."""
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    ADD: gl.constexpr = C[4]
    if ADD:
        where = [b, h, m0, 0]
    else:
        where = [row // (dq_s.shape[2] // q_s.shape[4]), 0]
    slot, phase = dq_place(count, dq_full.shape[0])
    mbarrier.wait(dq_full.index(slot), phase)
    if state == 0:
        tma.async_copy_shared_to_global(desc_dq, where, dq_s.index(slot))
    else:
        reduce_add(desc_dq, where, dq_s.index(slot))
    tma.store_wait(0)
    mbarrier.arrive(dq_empty.index(slot), count=1)


@gluon.jit
def _drop(count, dq_full, dq_empty):
    """The first dQ of a tile is nobody's: see `_multiply`."""
    slot, phase = dq_place(count, dq_full.shape[0])
    mbarrier.wait(dq_full.index(slot), phase)
    mbarrier.arrive(dq_empty.index(slot), count=1)


@gluon.jit
def add_dq(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    """The warp that adds each dQ into global float32."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    BM: gl.constexpr = C[0]
    CLAIM: gl.constexpr = C[11]
    DROPPED: gl.constexpr = 0 if C[13] else 1  # of each tile
    turn = 0
    count = 0
    tile, i_b, i_k, n0, first, f_lo, f_hi, end = hear(turn, work, 1)
    while tile < num_tiles:
        n = end - first
        if DROPPED:
            _drop(count, dq_full, dq_empty)
        for j in range(n * G):
            i_h = i_k * G + j // n
            m0 = nth(j % n, first, f_lo, f_hi, end) * BM
            row = (i_b * H + i_h) * Tp + m0
            if CLAIM:
                state = _claim(states + row // BM)
                _add(desc_dq, i_b, i_h, m0, row, state, count + DROPPED + j, buffers, bars, C)
                _settle(states + row // BM, state)
            else:
                _add(desc_dq, i_b, i_h, m0, row, 2, count + DROPPED + j, buffers, bars, C)
        count += n * G + DROPPED
        turn += 1
        tile, i_b, i_k, n0, first, f_lo, f_hi, end = hear(turn, work, 1)


@gluon.jit
def add_dq_lists(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    """The same warp of a block map."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    desc_words, words_s, maps = tables
    BM: gl.constexpr = C[0]
    CLAIM: gl.constexpr = C[11]
    turn = 0
    count = 0
    tile, i_b, i_k, n0, line, n_first, edges_first, _ = hear(turn, work, 1)
    while tile < num_tiles:
        for g in range(G):
            i_h = i_k * G + g
            begin, end, n, edges = find_list(maps, i_b, i_h, line)
            for j in range(n):
                block, word = find_block(maps, begin, end, j, edges)
                row = (i_b * H + i_h) * Tp + block * 128
                p_state = states + row // 128
                state = 2
                if CLAIM:  # all of the block at once: between its parts nobody else is waited for
                    state = _claim(p_state)
                for part in gl.static_range(128 // BM):
                    m0 = block * 128 + part * BM
                    _add(desc_dq, i_b, i_h, m0, row + part * BM, state, count, buffers, bars, C)
                    count += 1
                if CLAIM:
                    _settle(p_state, state)
        turn += 1
        tile, i_b, i_k, n0, line, n_first, edges_first, _ = hear(turn, work, 1)
