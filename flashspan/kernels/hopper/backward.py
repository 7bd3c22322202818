"""The backward kernel for Hopper.

A tile is a block of keys, 64 for each of the warpgroups that multiply, two or three (WGS): K and V stay in shared
memory, dK and dV in registers, and the queries that see it pass by, for every query head that shares it. One warp loads
Q, dO and the rows' two numbers; one adds finished blocks of dQ into global float32 through the copy engine. Everything
is transposed, keys down and queries across, so that P and dS are already in the registers dV and dK want them in. The
accumulators of S start at -lse and those of dP at -delta, which saves the subtractions. All of a column start at the
same number: to load it takes a turn at shared memory for each register of each warp, so where there is room (heads of
64) it is a product's result, of ones and the number's three bfloat16 parts.

While one warpgroup computes exponentials the others must keep the tensor cores busy: a warp that starts a product waits
until most of it is done. So they may drift apart, by up to a block. All they share is dQ, summed over the keys of all,
of the block before, whose dS the others have had time to write. Of two each makes half of every dQ or, by TURNS, every
second one whole, for which shared memory is read less; there may then be two places for them on their way out (dq.py).
Of three each makes every third, and hands the places of its dS back, of which there are four.

Programs are persistent: a tile's dK and dV leave through the place of dS (dV through one of its own where there is
room), so that the next one's K and V may come while they do, and its first Q and dO before. What the next tile is the
loading warp tells everybody. Where dK and dV are added and tiles are equally long, those left over after the last full
round are cut into parts, by queries (CUT).

Without DQ, for gradients that repeat (two_pass.py), dK and dV are all it makes, and the warpgroups share nothing.

For a block map (LISTS) a tile's block of keys is a line of its transposed lists. A listed block of 128 queries is one
block, or two where a block has 64; its bits come with Q and dO.

A step is in backward_steps.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from flashspan.kernels.hopper.backward_main_loop import step, take_turn
from flashspan.kernels.hopper.backward_producer import feed, feed_lists, hear
from flashspan.kernels.hopper.dq_accumulate import add_dq, add_dq_lists, leave_dq, start_dq
from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.masking import bounds, find_list, nth
from flashspan.kernels.hopper.parts import ones_of
from flashspan.kernels.hopper.shared_memory import clean_pair, send_off


@gluon.jit
def _multiply(WG: gl.constexpr, desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    """A warpgroup and its 64 keys of each tile.

    dQ runs one block behind. The FIRST step of a tile has none to make. Two warpgroups with heads of 64 are faster (by
    6% at 16k) if it makes one all the same, of whatever lies there, which the warp that adds drops; else it is a step
    of its own.
    """
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    num_tiles, whole, parts, counter, states, work_s, work_full = work
    own_s, ds_s = kv[WG], ds[WG]
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    TABLE: gl.constexpr = C[3]
    ADD: gl.constexpr = C[4]
    HIDDEN: gl.constexpr = C[5]
    SL: gl.constexpr = C[6]
    KL: gl.constexpr = C[7]
    LISTS: gl.constexpr = C[9]
    DQ: gl.constexpr = C[10]
    PEEL: gl.constexpr = C[13]
    SPARE: gl.constexpr = C[14]
    BD: gl.constexpr = q_s.shape[4]
    THREE: gl.constexpr = C[17] == 3
    SPLIT: gl.constexpr = 128 // BM
    turn = 0
    i = 0
    tile, i_b, i_k, n0, a, b, c, d = hear(turn, work, 4)
    while tile < num_tiles:
        n0 += WG * BN
        if LISTS:
            desc_words, words_s, maps = tables
            line, n, edges = a, b, c
        else:
            first, last, s_columns = tables
            t_first, f_lo, f_hi, t_end = a, b, c, d
            n = t_end - t_first
            edges = n - (f_hi - f_lo)
            o_n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, SL))
            lower, upper = bounds(o_n, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, TABLE)
            upper = gl.where(o_n < S, upper, 0)  # where there is no key K is 0, and P might overflow
        dk = gl.zeros([BN, BD], gl.float32, layout=KL)
        dv = gl.zeros([BN, BD], gl.float32, layout=KL)
        mbarrier.wait(kv_full, turn & 1)
        if LISTS:  # full blocks hide nothing
            if (edges > 0) | ((G > 1) & (maps[5] != 0)):
                clean_pair(own_s, BN, BD, PEEL)
        elif HIDDEN:
            clean_pair(own_s, BN, BD, PEEL)
        late = -1 if PEEL else turn  # the number of a dQ, less that of the block after it
        if PEEL:
            if LISTS:
                shown = (words_s, 0, edges > 0)
                dk, dv = step(WG, True, True, i, 0, shown, dk, dv, buffers, bars, numbers, C)
            elif HIDDEN:
                shown = (nth(0, t_first, f_lo, f_hi, t_end) * BM, lower, upper)
                dk, dv = step(WG, True, True, i, 0, shown, dk, dv, buffers, bars, numbers, C)
            else:
                dk, dv = step(WG, False, True, i, 0, (), dk, dv, buffers, bars, numbers, C)
        for g in range(G):
            done = gl.where(g == 0, 1, 0) if PEEL else 0
            whole = done
            if LISTS:
                if g > 0:
                    _, _, n, edges = find_list(maps, i_b, i_k * G + g, line)
                for j in range(done, edges * SPLIT):
                    shown = (words_s, j % SPLIT, True)
                    dk, dv = step(
                        WG, True, False, i + j, i + j + late, shown, dk, dv, buffers, bars, numbers, C
                    )  # fmt: skip
                whole = gl.maximum(edges * SPLIT, done) if PEEL else edges * SPLIT
            elif HIDDEN:
                for j in range(done, edges):
                    shown = (nth(j, t_first, f_lo, f_hi, t_end) * BM, lower, upper)
                    dk, dv = step(
                        WG, True, False, i + j, i + j + late, shown, dk, dv, buffers, bars, numbers, C
                    )  # fmt: skip
                whole = gl.maximum(edges, done) if PEEL else edges
            size = n * SPLIT if LISTS else n
            for j in range(whole, size):
                dk, dv = step(WG, False, False, i + j, i + j + late, (), dk, dv, buffers, bars, numbers, C)
            i += size
        # Where they go is heard again: until here these numbers would only have held registers.
        if PEEL:
            tile, i_b, i_k, n0, a, b, c, d = hear(turn, work, 4)
            n0 += WG * BN
        if SPARE:
            send_off(desc_dv, i_b, i_k, n0, dv, spare_s.index(WG), ADD)
        if THREE:
            take_turn(WG, i - 1, buffers, bars, sm_scale, C)
        elif DQ:
            dq = warpgroup_mma_wait(0, deps=(start_dq(WG, False, i - 1, buffers, bars, C),))
        mbarrier.arrive(kv_empty, count=1)
        if DQ:  # nobody reads dS any more: what is left leaves through its place
            mbarrier.wait(kv_empty, turn & 1)
        if not PEEL:
            tile, i_b, i_k, n0, a, b, c, d = hear(turn, work, 4)
            n0 += WG * BN
        if not SPARE:
            send_off(desc_dv, i_b, i_k, n0, dv, ds_s, ADD)
        if DQ and not THREE:  # only now: the dQ before it is still being added
            leave_dq(WG, False, i + late, dq, buffers, bars, sm_scale, C)
        send_off(desc_dk, i_b, i_k, n0, dk * sm_scale, ds_s, ADD, SPARE)
        if not PEEL:  # else that is waited for where dS is written again
            tma.store_wait(0)
            barrier()
        turn += 1
        tile, i_b, i_k, n0, a, b, c, d = hear(turn, work, 4)
    if PEEL:
        tma.store_wait(0)


@gluon.jit
def _first(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    _multiply(0, desc, buffers, bars, numbers, tables, work, C)


@gluon.jit
def _second(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    _multiply(1, desc, buffers, bars, numbers, tables, work, C)


@gluon.jit
def _third(desc, buffers, bars, numbers, tables, work, C: gl.constexpr):
    _multiply(2, desc, buffers, bars, numbers, tables, work, C)


@gluon.jit
def _run(
    desc, numbers, tables, num_tiles, whole, parts, counter, states, STAGES: gl.constexpr, TABLE: gl.constexpr,
    ADD: gl.constexpr, HIDDEN: gl.constexpr, LISTS: gl.constexpr, DQ: gl.constexpr, CLAIM: gl.constexpr,
    CUT: gl.constexpr, TURNS: gl.constexpr, UNIT: gl.constexpr, WGS: gl.constexpr, REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, and who does what."""
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d = desc
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BD: gl.constexpr = desc_q.block_type.shape[3]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])  # S^T, dP^T [BN, BM]
    KL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])  # dK, dV [BN, BD]
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # half of dQ [BM, BD]
    dtype: gl.constexpr = desc_q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, BD], desc_q.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, BD], desc_do.layout)
    low_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, BD], desc_k.layout)
    high_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, BD], desc_k.layout)
    DL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    SLOTS: gl.constexpr = 4 if WGS == 3 else 2
    ds0_s = gl.allocate_shared_memory(dtype, [SLOTS, BN, BM], DL)
    ds1_s = gl.allocate_shared_memory(dtype, [SLOTS, BN, BM], DL)
    kv = (low_s, high_s)
    ds = (ds0_s, ds1_s)
    if WGS == 3:
        kv = (low_s, high_s, gl.allocate_shared_memory(dtype, [2, 1, 1, BN, BD], desc_k.layout))  # type: ignore[assignment]
        ds = (ds0_s, ds1_s, gl.allocate_shared_memory(dtype, [SLOTS, BN, BM], DL))  # type: ignore[assignment]
    PLACES: gl.constexpr = TURNS if TURNS else 1
    SHAPE: gl.constexpr = desc_dq.block_type.shape
    dq_s = gl.allocate_shared_memory(gl.float32, [PLACES] + SHAPE, desc_dq.layout)  # noqa: RUF005
    l_s = gl.allocate_shared_memory(desc_l.dtype, [STAGES] + desc_l.block_type.shape, desc_l.layout)  # noqa: RUF005
    d_s = gl.allocate_shared_memory(desc_d.dtype, [STAGES] + desc_d.block_type.shape, desc_d.layout)  # noqa: RUF005
    PEEL: gl.constexpr = DQ and (BD > 64 or LISTS or WGS == 3)
    # Where there is room, dV has a place of its own to leave through. Where it is added that is slower.
    SPARE: gl.constexpr = PEEL and not LISTS and not ADD and PLACES == 1
    gl.static_assert(WGS == 2 or not SPARE)
    spare_s = ds0_s
    if SPARE:
        spare_s = gl.allocate_shared_memory(dtype, [2, BN, BD], DL)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], ML)
    work_full = gl.allocate_shared_memory(gl.int64, [4, 1], ML)
    work_s = gl.allocate_shared_memory(gl.int32, [32, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    # Of a block map, whose blocks are waited for, dO's places are handed back before Q's: from STAGES on.
    EMPTY: gl.constexpr = 2 * STAGES if LISTS else STAGES
    empty = gl.allocate_shared_memory(gl.int64, [EMPTY, 1], ML)
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], ML)
    ds_empty = ds_full
    if WGS == 3:
        ds_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], ML)
    dq_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], ML)
    dq_empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], ML)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=WGS)
    for i in gl.static_range(PLACES):
        mbarrier.init(dq_full.index(i), count=1 if WGS == 3 else 2)
        mbarrier.init(dq_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(EMPTY):
        mbarrier.init(empty.index(i), count=WGS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ds_full.index(i), count=WGS)
        if WGS == 3:
            mbarrier.init(ds_empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(work_full.index(i), count=1)
    C: gl.constexpr = (
        BM, BN, STAGES, TABLE, ADD, HIDDEN, SL, KL, QL, LISTS, DQ, CLAIM, CUT, PEEL, SPARE, TURNS, UNIT, WGS,
    )  # fmt: skip
    ones_s = l_s  # which is not read as such then
    if WGS == 3:
        ones_s = ones_of(BN)
    job = (
        desc,
        (q_s, do_s, kv, ds, dq_s, l_s, d_s, spare_s, ones_s),
        (kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty),
        numbers,
        tables,
        (num_tiles, whole, parts, counter, states, work_s, work_full),
        C,
    )
    if LISTS:
        gl.warp_specialize(
            [(_first, job), (_second, job), (feed_lists, job), (add_dq_lists, job)],
            [4, 1, 1],
            [REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
    elif WGS == 3:
        gl.warp_specialize(
            [(_first, job), (_second, job), (_third, job), (feed, job), (add_dq, job)],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )
    elif not DQ:
        gl.warp_specialize([(_first, job), (_second, job), (feed, job)], [4, 1], [REGISTERS, FEED_REGISTERS])
    else:
        gl.warp_specialize(
            [(_first, job), (_second, job), (feed, job), (add_dq, job)],
            [4, 1, 1],
            [REGISTERS, FEED_REGISTERS, FEED_REGISTERS],
        )


NUMBERS = ["s_columns", "H", "K", "G", "T", "S", "Tp", "lo", "hi", "section", "num_tiles", "whole", "parts"]


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d, states, first, last, counter,
    s_columns, H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section, num_tiles, whole, parts, STAGES: gl.constexpr,
    TABLE: gl.constexpr, ADD: gl.constexpr, HIDDEN: gl.constexpr, DQ: gl.constexpr, CLAIM: gl.constexpr,
    CUT: gl.constexpr, TURNS: gl.constexpr, UNIT: gl.constexpr, WGS: gl.constexpr, REGISTERS: gl.constexpr,
    FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tp: how far apart the heads' rows lie in lse and delta. Blocks of K, V, dK and dV are those of a warpgroup. If
    they are CUT, tiles before `whole` are whole and all others one of so many parts. TURNS: 0, or how many places there
    are for dQ made whole. UNIT: the scale is 1, and nothing is multiplied by it."""
    _run(
        (desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d),
        (H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section), (first, last, s_columns), num_tiles, whole,
        parts, counter, states, STAGES, TABLE, ADD, HIDDEN, False, DQ, CLAIM, CUT, TURNS, UNIT, WGS, REGISTERS,
        FEED_REGISTERS,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "s_batch",
        "s_head",
        "num_lines",
        "num_long",
        *(x for x in NUMBERS if x not in ("s_columns", "lo", "hi", "whole", "parts")),
    ]
)
def lists_backward_kernel(
    desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d, desc_words, states, spans, index,
    numbers, order, counter, s_batch, s_head, num_lines, num_long, H, K, G, T, S, Tp, scale, sm_scale, section,
    num_tiles, STAGES: gl.constexpr, ADD: gl.constexpr, CLAIM: gl.constexpr, TURNS: gl.constexpr,
    REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The same for the transposed lists and bits of a block map in blocks of 128 x 128."""
    words_s = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 256], desc_words.layout)
    maps = (spans, index, numbers, order, s_batch, s_head, num_lines, num_long)
    _run(
        (desc_q, desc_do, desc_k, desc_v, desc_dq, desc_dk, desc_dv, desc_l, desc_d),
        (H, K, G, T, S, Tp, 0, 0, scale, sm_scale, section), (desc_words, words_s, maps), num_tiles, num_tiles,
        1, counter, states, STAGES, False, ADD, True, True, True, CLAIM, False, TURNS, False, 2, REGISTERS,
        FEED_REGISTERS,
    )  # fmt: skip
