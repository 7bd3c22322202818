"""The main loop of the forward kernel for Hopper: a consumer's steps, a block of keys each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashspan.kernels.hopper.masking import hide_by_words, hide_keys
from flashspan.kernels.hopper.parts import bias_operand
from flashspan.kernels.hopper.ptx import all_below
from flashspan.kernels.hopper.scheduler import stage_and_phase
from flashspan.kernels.hopper.slices import (
    rescale_slices,
    slices_of,
    start_output,
    start_scores,
    transposed_slices_of,
    wait_for_output,
)
from flashspan.kernels.hopper.softmax import SUM_LIMIT, exponentials, lower_maximum, partial_sums, raise_maximum


@gluon.jit
def step(
    WG: gl.constexpr, EDGE: gl.constexpr, pair, hidden, p, m, l, o, minus_m, q, zero, buffers, barriers, mask, scale,
    config,
):  # fmt: skip
    """Compute the scores of a block, and add the previous block's output, from its P. Returns P of this block, m, l, o
    and each thread's sums of P.

    EDGE: m may be raised. `hidden` is (whether any score is hidden, start and end of each row's interval, the block's
    first key); a block map uses only the first element. Otherwise `hidden` is empty and, with UNIT_SCALE, minus_m is -m
    as the operand of a matmul (parts.py).
    """
    SLICES: gl.constexpr = config.SLICES
    STAGES: gl.constexpr = config.STAGES
    RAISE: gl.constexpr = EDGE or config.TRACK_MAXIMUM
    SUBTRACTED: gl.constexpr = config.UNIT_SCALE and not EDGE
    full, empty = barriers.full, barriers.empty
    stage, phase = stage_and_phase(pair, STAGES)
    after, phase = stage_and_phase(pair + 1, STAGES)
    pd = gl.convert_layout(p.to(buffers.v_s.dtype), gl.DotOperandLayout(0, config.OUTPUT, 2), assert_trivial=True)
    k = transposed_slices_of(buffers.k_s, stage, config)
    sa = zero
    if SUBTRACTED:  # the accumulator starts at -m: see parts.py
        sa = warpgroup_mma(minus_m, buffers.ones_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    sa = start_scores(q, k, sa, ADD=SUBTRACTED)
    oa = start_output(pd, slices_of(buffers.v_s, stage, config), o)
    s = warpgroup_mma_wait(SLICES, deps=(sa,))  # the matmuls of the output may still run
    if EDGE:
        some, r_start, r_end, n0 = hidden
        if some:
            if config.BLOCK_MAP:
                s = hide_by_words(s, mask.words_s.index(stage * 2 + WG), 0)
            else:
                s = hide_keys(s, r_start, r_end, n0, config.HIDDEN_SIDES, config.BLOCK_D == 64)
    if config.FREE_K_FIRST:  # K has been read: the producer may load the next one
        mbarrier.arrive(empty.index(stage + STAGES), count=1)
    if RAISE:
        m, alpha = raise_maximum(s, m, scale, config.FLOAT16_VALUES, config.TRACK_MAXIMUM)
        l = l * alpha
    if SUBTRACTED:
        p = gl.exp2(s)
    else:
        p = exponentials(s, m, scale)
    sums = partial_sums(p)
    l = l + sums
    mbarrier.wait(full.index(after), phase)
    done = wait_for_output(oa, (p,))
    o, p = done[:SLICES], done[SLICES]
    mbarrier.arrive(empty.index(stage), count=1)
    if RAISE:
        o = rescale_slices(o, alpha)
    return p, m, l, o, sums


@gluon.jit
def visit_full_blocks(WG: gl.constexpr, pair, begin, end, p, m, l, o, q, zero, buffers, barriers, mask, scale, config):
    """Run the steps from begin to end, of blocks without a hidden key. Returns p, m, l, o."""
    given = (q, zero, buffers, barriers, mask, scale, config)
    if config.FLOAT16_VALUES:
        # The inner loop ends early if a row must be scaled down, which is rare. A branch inside the loop would take 40
        # clocks in every step, even if it is never taken.
        i = begin
        minus_m = ()
        if config.UNIT_SCALE:
            minus_m = bias_operand(-m, config.SCORES)
        while i < end:
            small = True
            sums = l
            while (i < end) & small:
                p, m, l, o, sums = step(WG, False, pair + i, (), p, m, l, o, minus_m, *given)
                sums, small = all_below(sums, SUM_LIMIT)
                i += 1
            if not small:
                p, m, l, o = lower_maximum(p, m, l, o, sums)
                if config.UNIT_SCALE:
                    minus_m = bias_operand(-m, config.SCORES)
    else:
        for i in range(begin, end):
            p, m, l, o, sums = step(WG, False, pair + i, (), p, m, l, o, (), *given)
    return p, m, l, o


@gluon.jit
def visit_edge_blocks(
    WG: gl.constexpr, pair, begin, end, blocks, r_start, r_end, o, m, p, l, q, zero, buffers, barriers, mask, scale,
    config,
):  # fmt: skip
    """Run the steps from begin to end, of blocks with hidden keys. `blocks`, from `visible_blocks`, are visited from
    last to first. Returns p, m, l, o."""
    _, first_full, end_full, end_block = blocks
    given = (q, zero, buffers, barriers, mask, scale, config)
    for i in range(begin, end):
        at = end_block - 1 - i
        # At the near edge the first element is always True, but a branch is needed before hiding: see hide_outside.
        hidden = ((at >= end_full) | (at < first_full), r_start, r_end, at * config.BLOCK_K)
        p, m, l, o, sums = step(WG, True, pair + i, hidden, p, m, l, o, (), *given)
    return p, m, l, o
