"""The steps of the forward kernel for Hopper, a block of keys each: at a mask's edge, or in a loop over whole ones."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashspan.kernels.hopper.forward_producer import buffer_of
from flashspan.kernels.hopper.masking import hide, hide_keys
from flashspan.kernels.hopper.parts import parts_of
from flashspan.kernels.hopper.ptx import all_below, rescale
from flashspan.kernels.hopper.softmax import HIGH, exponentials, lower, rise, sums_of


@gluon.jit
def step(
    WG: gl.constexpr, EDGE: gl.constexpr, pair, shown, p, m, l, o, rows, memory, scale, C: gl.constexpr
):  # fmt: skip
    """The scores of a block and the output of the one before, whose P is given. Returns P of this one, m, l, o and the
    sums of P, each thread's.

    At an EDGE, `shown` says whether there is anything to hide and, without lists, each row's interval and the block's
    first key, and m is raised. `rows` are Q, zeros and, elsewhere if UNIT, -m in parts.
    """
    q, zero = rows[0], rows[1]
    k_s, v_s, words_s, ones_s, full, empty = memory
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    EDGES: gl.constexpr = C[3]
    OL: gl.constexpr = C[8]
    LISTS: gl.constexpr = C[10]
    BD: gl.constexpr = k_s.shape[4]
    dtype: gl.constexpr = v_s.dtype
    FINE: gl.constexpr = C[12]
    FOLLOW: gl.constexpr = C[13]
    RAISE: gl.constexpr = EDGE or FOLLOW
    EARLY: gl.constexpr = C[14]
    stage, phase = buffer_of(pair, STAGES)
    after, phase = buffer_of(pair + 1, STAGES)
    pd = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, OL, 2), assert_trivial=True)
    k = k_s.index(stage).reshape((BN, BD)).permute((1, 0))
    LESS: gl.constexpr = C[15] and not EDGE
    if LESS:  # scores less m: see parts.py
        sa = warpgroup_mma(rows[2], ones_s.permute((1, 0)), zero, use_acc=False, is_async=True)
        sa = warpgroup_mma(q, k, sa, is_async=True)
    else:
        sa = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    oa = warpgroup_mma(pd, v_s.index(stage).reshape((BN, BD)), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(sa,))
    if EDGE:
        masked, r_start, r_end, n0 = shown
        if masked:
            if LISTS:
                s = hide(s, words_s.index(stage * 2 + WG), 0)
            else:
                s = hide_keys(s, r_start, r_end, n0, EDGES, BD == 64)
    if EARLY:  # K has been read, and the next may come
        mbarrier.arrive(empty.index(stage + STAGES), count=1)
    if RAISE:
        m, alpha = rise(s, m, scale, FINE, FOLLOW)
        l = l * alpha
    if LESS:
        p = gl.exp2(s)
    else:
        p = exponentials(s, m, scale)
    sums = sums_of(p)
    l = l + sums
    mbarrier.wait(full.index(after), phase)
    # P goes through the wait with O: ptxas must not reuse the registers the product still reads.
    o, p = warpgroup_mma_wait(0, deps=(oa, p))
    mbarrier.arrive(empty.index(stage), count=1)
    if RAISE:
        o = rescale(o, alpha)
    return p, m, l, o, sums


@gluon.jit
def walk_whole(WG: gl.constexpr, pair, begin, end, p, m, l, o, rows, memory, scale, C: gl.constexpr):
    """The steps from begin to end, of whole blocks."""
    SL: gl.constexpr = C[7]
    FINE: gl.constexpr = C[12]
    UNIT: gl.constexpr = C[15]
    if FINE:
        # The inner loop ends early for what hardly ever happens: a branch in it, jumped each time, takes 40 clocks.
        i = begin
        if UNIT:
            minus_m = parts_of(-m, SL)
        while i < end:
            calm = True
            sums = l
            while (i < end) & calm:
                if UNIT:
                    less = (rows[0], rows[1], minus_m)
                    p, m, l, o, sums = step(WG, False, pair + i, (), p, m, l, o, less, memory, scale, C)
                else:
                    p, m, l, o, sums = step(WG, False, pair + i, (), p, m, l, o, rows, memory, scale, C)
                sums, calm = all_below(sums, HIGH)
                i += 1
            if not calm:
                p, m, l, o = lower(p, m, l, o, sums)
                if UNIT:
                    minus_m = parts_of(-m, SL)
    else:
        for i in range(begin, end):
            p, m, l, o, sums = step(WG, False, pair + i, (), p, m, l, o, rows, memory, scale, C)
    return p, m, l, o
