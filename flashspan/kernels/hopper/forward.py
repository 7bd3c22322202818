"""The forward kernel for Hopper.

One warp feeds K and V tiles through the copy engine; two or three warpgroups (WGS) of 64 queries each multiply. Each
starts the scores of tile i and the output of tile i - 1 together and computes the softmax between them, so the
tensor cores always have one of the two to do. K of tile i and V of tile i - 1 travel as a pair under one barrier: the
wait for the next pair, in the middle of an iteration, is also the branch that keeps ptxas from moving the softmax
behind the products. Programs are persistent: while a tile's output is written, the next one's Q and first K are on
their way.

A step is in forward_steps.py; what the softmax subtracts, and that V may come in float16, is told in softmax.py.

Outputs leave through Q's place, float32 ones in halves: where there is room (SPARE), the first through a place of its
own. A carry comes the way the output leaves: its first half by the copy engine into that place, meanwhile, its second
into Q's as soon as Q has been read, and both join at the end. Where there is no room it is asked for, by loads, before
a tile's first scores, and joins after their softmax. The loop is the same with and without one.

Only the feeding warp reads tables of intervals (TABLE) and the lists of a block map (LISTS). It tells the others which
blocks there are, or how many and how many of them have bits, and loads those bits beside K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashspan.kernels.hopper.carry import LEAST, blend, join, load_carry
from flashspan.kernels.hopper.finer import COARSER
from flashspan.kernels.hopper.forward_main_loop import step, walk_whole
from flashspan.kernels.hopper.forward_producer import buffer_of, feed, feed_lists, hear
from flashspan.kernels.hopper.masking import blocks, bounds, hide, hide_keys
from flashspan.kernels.hopper.parts import ones_of
from flashspan.kernels.hopper.ptx import watch
from flashspan.kernels.hopper.row_values import each, rows_of, total
from flashspan.kernels.hopper.scheduler import place, told
from flashspan.kernels.hopper.shared_memory import arrived, halves, send, send_off
from flashspan.kernels.hopper.softmax import exponentials, rise, sums_of


@gluon.jit
def _multiply(WG: gl.constexpr, desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    """A consumer warpgroup: 64 queries of each tile."""
    desc_q, desc_k, desc_v, desc_out = desc
    q_s, k_s, v_s, spare_s, ones_s = buffers
    q_full, q_empty, full, empty, tile_s, work_s, q_read, past_full = bars
    H, G, T, S, lo, hi, scale, num_heads, num_blocks, section, num_tiles, counter = numbers
    out, lse, bad, s_ob, s_oh, s_ot = outputs
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    EDGES: gl.constexpr = C[3]
    TABLE: gl.constexpr = C[4]
    CARRY: gl.constexpr = C[5]
    D: gl.constexpr = C[6]
    SL: gl.constexpr = C[7]
    OL: gl.constexpr = C[8]
    BD: gl.constexpr = desc_q.block_type.shape[3]
    dtype: gl.constexpr = desc_v.dtype
    RL: gl.constexpr = gl.SliceLayout(1, SL)
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    QS: gl.constexpr = C[9]
    LISTS: gl.constexpr = C[10]
    SPARE: gl.constexpr = C[11]
    LATE: gl.constexpr = CARRY and SPARE
    FINE: gl.constexpr = C[12]
    EARLY: gl.constexpr = C[14]
    WGS: gl.constexpr = C[16]
    if LISTS:
        desc_words, words_s, maps = tables
        memory = (k_s, v_s, words_s, ones_s, full, empty)
    else:
        start, end, s_rows = tables
        memory = (k_s, v_s, None, ones_s, full, empty)
    pair = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    tile = told(tile_s.index(0), 4)
    while tile < num_tiles:
        if LISTS:
            line, i_bh, n, edges = hear(turn, work_s)
            m0 = line * (WGS * BM) + WG * BM
        else:
            i_block, i_bh = place(tile, num_blocks, num_heads, section)
            m0 = (num_blocks - 1 - i_block) * (WGS * BM)
            i_b = i_bh // H
            p_start = start + i_b * s_rows
            p_end = end + i_b * s_rows
            if TABLE:  # which only the feeding warp looks through
                first, f_lo, f_hi, last = hear(turn, work_s)
            else:
                first, f_lo, f_hi, last = blocks(m0, T, S, lo, hi, p_start, p_end, TABLE, WGS * BM, BN, 4)
            n = last - first
            m0 += WG * BM
        if CARRY and not LATE:
            o, past = load_carry(outputs, i_bh, H, m0, T, D, BD, RL, OL)
        else:
            o = gl.zeros([BM, BD], gl.float32, layout=OL)
        zero = gl.zeros([BM, BN], gl.float32, layout=SL)
        m = sums_of(zero) + LEAST
        if not LISTS:
            o_m = m0 + gl.arange(0, BM, layout=RL)
            r_start, r_end = bounds(o_m, T, S, lo, hi, p_start, p_end, TABLE)

        room, _ = buffer_of(turn, QS)
        q = q_s.index(room * WGS + WG).reshape((BM, BD))
        if BD == 64:  # there are registers for it, and shared memory is read less
            q = q.load(gl.DotOperandLayout(0, SL, 2))
        # Block 0: there is no output to overlap with yet.
        stage, phase = buffer_of(pair, STAGES)
        mbarrier.wait(full.index(stage), phase)
        s = warpgroup_mma(q, k_s.index(stage).reshape((BN, BD)).permute((1, 0)), zero, use_acc=False, is_async=True)
        if QS == 2:  # the output before has left through the other Q's place by now
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(1 - room), count=1, pred=turn > 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        if LISTS:
            if edges > 0:
                s = hide(s, words_s.index(stage * 2 + WG), 0)
            mbarrier.arrive(empty.index(stage), count=1)
            if EARLY:
                mbarrier.arrive(empty.index(stage + STAGES), count=1)
        else:
            mbarrier.arrive(empty.index(stage), count=1)
            if EARLY:
                mbarrier.arrive(empty.index(stage + STAGES), count=1)
            if (last > f_hi) | (last <= f_lo):
                s = hide_keys(s, r_start, r_end, (last - 1) * BN, EDGES, BD == 64)
        m, alpha = rise(s, m, scale, FINE, C[13])
        p = exponentials(s, m, scale)
        l = sums_of(p)

        stage, phase = buffer_of(pair + 1, STAGES)
        mbarrier.wait(full.index(stage), phase)
        if CARRY and not LATE:
            p, m, l, o = join(p, m, l, o, past)
        rows = (q, zero)
        if LISTS:
            for i in range(1, gl.minimum(edges + 1, n)):
                p, m, l, o, sums = step(WG, True, pair + i, (i < edges, 0, 0, 0), p, m, l, o, rows, memory, scale, C)
            begin = gl.maximum(edges + 1, 1)
            p, m, l, o = walk_whole(WG, pair, begin, n, p, m, l, o, rows, memory, scale, C)
        elif EDGES > 0:
            # Blocks that some rows do not see all of and, unless all saw something of block 0, the first that they do.
            near = last - f_hi + 1
            if not TABLE:
                top = (num_blocks - 1 - i_block) * (WGS * BM)
                seen = (top + hi >= (last - 1) * BN) & (top + WGS * BM - 1 + lo < gl.minimum(last * BN, S))
                near -= seen.to(gl.int32)
            near = gl.maximum(near, 1)
            for i in range(1, gl.minimum(near, n)):
                at = last - 1 - i
                shown = ((at >= f_hi) | (at < f_lo), r_start, r_end, at * BN)
                p, m, l, o, sums = step(WG, True, pair + i, shown, p, m, l, o, rows, memory, scale, C)
            p, m, l, o = walk_whole(WG, pair, near, last - f_lo, p, m, l, o, rows, memory, scale, C)
            if EDGES == 2:
                for i in range(gl.maximum(near, last - f_lo), n):
                    at = last - 1 - i  # always at an edge, but it must be behind a branch: see hide_outside
                    shown = ((at >= f_hi) | (at < f_lo), r_start, r_end, at * BN)
                    p, m, l, o, sums = step(WG, True, pair + i, shown, p, m, l, o, rows, memory, scale, C)
        else:
            p, m, l, o = walk_whole(WG, pair, 1, n, p, m, l, o, rows, memory, scale, C)

        if LATE:
            mbarrier.arrive(q_read, count=1)
        stage, phase = buffer_of(pair + n, STAGES)
        pd = gl.convert_layout(p.to(dtype), PL, assert_trivial=True)
        o = warpgroup_mma(pd, v_s.index(stage).reshape((BN, BD)), o, is_async=True)
        if EARLY:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(empty.index(stage), count=1)
        pair += n + 1

        # Where it goes is worked out again: until here these numbers would only have held registers.
        if LISTS:
            line, i_bh, n, edges = hear(turn, work_s)
            m0 = line * (WGS * BM) + WG * BM
        else:
            i_block, i_bh = place(told(tile_s.index(turn & 3), 4), num_blocks, num_heads, section)
            m0 = (num_blocks - 1 - i_block) * (WGS * BM) + WG * BM
        i_b = i_bh // H
        i_h = i_bh % H
        # A hidden key has probability 0, but 0 * NaN is NaN: rows with one are left to the portable kernel, which knows
        # who may see it; and so are those whose sums overflowed. Nearly always there are none.
        m = rows_of(m, RL)
        l = total(l, m)
        finite = (gl.sum(o, 1) + gl.convert_layout(l, RO, assert_trivial=True)) * 0.0 == 0.0
        wrong = gl.where(finite | (m0 + gl.arange(0, BM, layout=RO) >= T), 0, 1)
        p_bad = bad + i_bh.to(gl.int64) * gl.cdiv(T, BM) + m0 // BM
        if CARRY:  # which the portable kernel will want as it was: past the end nothing is written
            wrong = gl.max(wrong, 0)
            gl.store(p_bad, wrong, mask=m0 < T)
            m0 = gl.where(wrong == 0, m0, T)
        else:  # a byte of the mark for each warp, so that they need not meet
            wrong = gl.max(wrong.reshape((4, BM // 4)), 1)
            p_byte = p_bad.to(gl.pointer_type(gl.int8), bitcast=True) + gl.arange(0, 4, layout=wrong.type.layout)
            gl.store(p_byte, wrong.to(gl.int8), mask=m0 < T)
        o_m = m0 + gl.arange(0, BM, layout=RL)
        p_lse = lse + i_bh.to(gl.int64) * T
        if LATE:
            past = gl.load(p_lse + o_m, mask=o_m < T, other=float("-inf"))
            both, now, past = blend(m, l, past)
            if FINE:
                now = now * COARSER
            gl.store(p_lse + o_m, both * 0.6931471805599453, mask=o_m < T)
            left, right = halves(o * each(now, o))
            past = each(past, left)
            mbarrier.wait(past_full.index(0), turn & 1)
            left = left + past * arrived(desc_out, spare_s.index(WG), left)
            send(desc_out, i_b, i_h, m0, 0, left, spare_s.index(WG), False, True)
            mbarrier.wait(past_full.index(1), turn & 1)
            right = right + past * arrived(desc_out, q_s.index(room * WGS + WG), right)
            send(desc_out, i_b, i_h, m0, BD // 2, right, q_s.index(room * WGS + WG), False, True)
        else:
            nothing = l == 0.0
            l = gl.where(nothing, 1.0, l)
            gl.store(p_lse + o_m, gl.where(nothing, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453), mask=o_m < T)
            o = o * each((COARSER if FINE else 1.0) / l, o)
            # Q of this tile has been read for the last time: the output leaves through its place.
            if SPARE:
                send_off(desc_out, i_b, i_h, m0, o, q_s.index(room * WGS + WG), False, False, spare_s.index(WG))
            else:
                send_off(desc_out, i_b, i_h, m0, o, q_s.index(room * WGS + WG), False)
        if QS == 1:  # else that is waited for when the next tile's scores have started
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(room), count=1)
        turn += 1
        room, phase = buffer_of(turn, QS)
        mbarrier.wait(q_full.index(room), phase)
        tile = told(tile_s.index(turn & 3), 4)
    tma.store_wait(0)


@gluon.jit
def _first(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    _multiply(0, desc, buffers, bars, numbers, outputs, tables, C)


@gluon.jit
def _second(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    _multiply(1, desc, buffers, bars, numbers, outputs, tables, C)


@gluon.jit
def _third(desc, buffers, bars, numbers, outputs, tables, C: gl.constexpr):
    _multiply(2, desc, buffers, bars, numbers, outputs, tables, C)


@gluon.jit
def _run(
    desc, numbers, outputs, tables, D: gl.constexpr, STAGES: gl.constexpr, QS: gl.constexpr,
    EDGES: gl.constexpr, TABLE: gl.constexpr, CARRY: gl.constexpr, LISTS: gl.constexpr, UNIT: gl.constexpr,
    WGS: gl.constexpr, REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, and who does what."""
    desc_q, desc_k, desc_v, desc_out = desc
    BM: gl.constexpr = desc_q.block_type.shape[2]
    BD: gl.constexpr = desc_q.block_type.shape[3]
    BN: gl.constexpr = desc_k.block_type.shape[2]
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(desc_q.dtype, [QS * WGS, 1, 1, BM, BD], desc_q.layout)
    k_s = gl.allocate_shared_memory(desc_q.dtype, [STAGES, 1, 1, BN, BD], desc_k.layout)
    v_s = gl.allocate_shared_memory(desc_v.dtype, [STAGES, 1, 1, BN, BD], desc_v.layout)
    # Outputs in float32 leave in halves: where there is room, the second need not wait for the first.
    SPARE: gl.constexpr = desc_out.dtype == gl.float32 and BD <= 128 and not LISTS
    spare_s = q_s
    if SPARE:
        spare_s = gl.allocate_shared_memory(desc_q.dtype, [WGS, 1, 1, BM, BD], desc_q.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], ML)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], ML)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    FINE: gl.constexpr = desc_v.dtype != desc_k.dtype
    # Whether K's places are handed back before V's, where blocks are waited for: from STAGES on.
    EARLY: gl.constexpr = LISTS or (FINE and BD == 128)
    PLACES: gl.constexpr = 2 * STAGES if EARLY else STAGES
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], ML)
    tile_s = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    work_s = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    q_read = gl.allocate_shared_memory(gl.int64, [1], ML)
    past_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    mbarrier.init(q_read, count=2)
    for i in gl.static_range(2):
        mbarrier.init(past_full.index(i), count=1)
    gl.static_assert(WGS == 2 or not CARRY)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=WGS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(empty.index(i), count=WGS)
    if FINE:
        watch()
    ones_s = q_s  # which is not read then
    if UNIT:
        ones_s = ones_of(BN)
    FOLLOW: gl.constexpr = not FINE and (desc_v.dtype == gl.float16 or not LISTS)
    C: gl.constexpr = (BM, BN, STAGES, EDGES, TABLE, CARRY, D, SL, OL, QS, LISTS, SPARE, FINE, FOLLOW, EARLY, UNIT, WGS)
    bars = (q_full, q_empty, full, empty, tile_s, work_s, q_read, past_full)
    job = (desc, (q_s, k_s, v_s, spare_s, ones_s), bars, numbers, outputs, tables, C)
    if LISTS:
        gl.warp_specialize([(_first, job), (_second, job), (feed_lists, job)], [4, 1], [REGISTERS, FEED_REGISTERS])
    elif WGS == 3:
        gl.warp_specialize(
            [(_first, job), (_second, job), (_third, job), (feed, job)],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FEED_REGISTERS],
        )
    else:
        gl.warp_specialize([(_first, job), (_second, job), (feed, job)], [4, 1], [REGISTERS, FEED_REGISTERS])


NUMBERS = ["s_ob", "s_oh", "s_ot", "s_rows", "H", "G", "T", "S", "lo", "hi", "num_heads", "section", "num_tiles"]


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    desc_q, desc_k, desc_v, desc_out, out, lse, bad, start, end, counter, s_ob, s_oh, s_ot, s_rows, H, G, T, S, lo, hi,
    scale, num_heads, section, num_tiles, D: gl.constexpr, STAGES: gl.constexpr, QS: gl.constexpr,
    EDGES: gl.constexpr, TABLE: gl.constexpr, CARRY: gl.constexpr, UNIT: gl.constexpr,
    WGS: gl.constexpr, REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Strides of out come in units of 8 elements: the compiler then knows they are divisible, whatever the length.
    UNIT: scores are exponents of 2 as they are, and what is subtracted from them is part of their product."""
    num_blocks = gl.cdiv(T, desc_q.block_type.shape[2] * WGS)
    _run(
        (desc_q, desc_k, desc_v, desc_out),
        (H, G, T, S, lo, hi, scale, num_heads, num_blocks, section, num_tiles, counter),
        (out, lse, bad, s_ob, s_oh, s_ot), (start, end, s_rows),
        D, STAGES, QS, EDGES, TABLE, CARRY, False, UNIT, WGS, REGISTERS, FEED_REGISTERS,
    )  # fmt: skip


LIST_NUMBERS = ["s_batch", "s_head", "num_lines", "num_long", *(x for x in NUMBERS if x not in ("s_rows", "lo", "hi"))]


@gluon.jit(do_not_specialize=LIST_NUMBERS)
def lists_forward_kernel(
    desc_q, desc_k, desc_v, desc_out, desc_words, out, lse, bad, spans, index, numbers, order, counter, s_ob, s_oh,
    s_ot, s_batch, s_head, num_lines, num_long, H, G, T, S, scale, num_heads, section, num_tiles, D: gl.constexpr,
    STAGES: gl.constexpr, CARRY: gl.constexpr, REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The same for a block map in blocks of 128 x 128: two warpgroups do a line of it."""
    words_s = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 256], desc_words.layout)
    maps = (spans, index, numbers, order, s_batch, s_head, num_lines, num_long)
    _run(
        (desc_q, desc_k, desc_v, desc_out),
        (H, G, T, S, 0, 0, scale, num_heads, num_lines, section, num_tiles, counter),
        (out, lse, bad, s_ob, s_oh, s_ot), (desc_words, words_s, maps),
        D, STAGES, 2, 2, False, CARRY, True, False, 2, REGISTERS, FEED_REGISTERS,
    )  # fmt: skip
