"""A step of the backward kernel for Hopper: a block of queries and a warpgroup's keys, and dQ of the block before."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashspan.kernels.hopper.dq_accumulate import dq_place, ds_place, leave_dq, start_dq
from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.masking import hide, hide_outside
from flashspan.kernels.hopper.parts import DEPTH
from flashspan.kernels.hopper.ptx import held, here_and_now


@gluon.jit
def take_turn(WG: gl.constexpr, count, buffers, bars, sm_scale, C: gl.constexpr):
    """Of three warpgroups: make the dQ of this number, which is its block's, if it is this one's turn."""
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    if count % 3 == WG:
        dq = warpgroup_mma_wait(0, deps=(start_dq(WG, True, count, buffers, bars, C),))
        slot, _ = ds_place(count, ds_full.shape[0])
        mbarrier.arrive(ds_empty.index(slot), count=1)
        leave_dq(WG, True, count, dq, buffers, bars, sm_scale, C)


@gluon.jit
def step(
    WG: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr, i, count, shown, dk, dv, buffers, bars, numbers,
    C: gl.constexpr,
):  # fmt: skip
    """Block i of queries: dV and dK of it and, unless it is a tile's FIRST, the dQ of number `count`, of the block
    before. If it is masked, `shown` says what is seen: the block's first row and each key's interval, or a map's words,
    which half of them it is and whether they are there."""
    q_s, do_s, kv, all_ds, dq_s, l_s, d_s, spare_s, ones_s = buffers
    own_s, ds_s = kv[WG], all_ds[WG]
    kv_full, kv_empty, full, empty, ds_full, ds_empty, dq_full, dq_empty = bars
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    BM: gl.constexpr = C[0]
    BN: gl.constexpr = C[1]
    STAGES: gl.constexpr = C[2]
    SL: gl.constexpr = C[6]
    KL: gl.constexpr = C[7]
    LISTS: gl.constexpr = C[9]
    DQ: gl.constexpr = C[10]
    BEHIND: gl.constexpr = DQ and not FIRST
    TURNS: gl.constexpr = BEHIND and not MASKED and C[15] > 0
    UNIT: gl.constexpr = C[16]
    THREE: gl.constexpr = C[17] == 3
    PLACES: gl.constexpr = dq_full.shape[0]
    BD: gl.constexpr = q_s.shape[4]
    BY_PRODUCT: gl.constexpr = len(l_s.shape) == 3  # see parts.py
    PL: gl.constexpr = gl.DotOperandLayout(0, KL, 2)
    dtype: gl.constexpr = q_s.dtype
    stage = i & (STAGES - 1)
    slot, phase = ds_place(i, ds_full.shape[0])
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    q = q_s.index(stage).reshape((BM, BD))
    do = do_s.index(stage).reshape((BM, BD))
    k = own_s.index(here_and_now(0)).reshape((BN, BD))
    v = own_s.index(here_and_now(1)).reshape((BN, BD))
    zero = gl.zeros([BN, BM], gl.float32, layout=SL)
    if BY_PRODUCT:
        if THREE:  # who have no registers for it
            ones = ones_s
        else:
            ones = gl.full([BN, DEPTH], 1.0, gl.bfloat16, layout=gl.DotOperandLayout(0, SL, 2))
        s = warpgroup_mma(ones, l_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        sa = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(ones, d_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        dpa = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(2, deps=(sa,))
    else:
        s, _ = gl.broadcast(l_s.index(stage).load(gl.SliceLayout(0, SL))[None, :], zero)
        dp, _ = gl.broadcast(d_s.index(stage).load(gl.SliceLayout(0, SL))[None, :], zero)
        # Before the first product starts: ptxas would wait for that one before it touched the registers of another.
        dp = held(dp)
        sa = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
        dpa = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=(sa,))
    if not UNIT:
        s = s * scale
    if MASKED:
        if LISTS:
            words_s, half, some = shown
            if some:
                s = hide(s, words_s.index(stage * 2 + WG), half)
        else:
            m0, lower, upper = shown
            if m0 < T:  # which it is: see hide_outside
                s = hide_outside(s, lower - m0, upper - m0, True)
    p = gl.exp2(s)
    pd = gl.convert_layout(p.to(dtype), PL, assert_trivial=True)
    # dV at once: the tensor cores have it to do while dS is made and written.
    dva = warpgroup_mma(pd, do, dv, is_async=True)
    if THREE:  # nobody reads what was there
        mbarrier.wait(ds_empty.index(slot), phase ^ 1)
    elif BEHIND:  # both have written dQ of block i - 2, so neither reads its dS any more
        dq_slot, dq_phase = dq_place(count - 1, PLACES)
        mbarrier.wait(dq_full.index(dq_slot), dq_phase)
    else:  # a branch, or ptxas would move the wait for dP before the exp2's
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    if BY_PRODUCT and not THREE:  # whose registers must not be reused before
        dp, p, ones = warpgroup_mma_wait(1, deps=(dpa, p, ones))
    else:
        dp, p = warpgroup_mma_wait(1, deps=(dpa, p))
    ds = (p * dp).to(dtype)
    if DQ:
        if FIRST:  # dK of the tile before may still be leaving through this place
            tma.store_wait(0)
            barrier()
        ds_s.index(slot).store(ds)
    dsd = gl.convert_layout(ds, PL, assert_trivial=True)
    dka = warpgroup_mma(dsd, q, dk, is_async=True)
    if DQ:  # only now: the tensor cores have dK to do while dS is on its way
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
    if THREE:
        dv, dk, pd, dsd = warpgroup_mma_wait(0, deps=(dva, dka, pd, dsd))
        mbarrier.arrive(empty.index(stage), count=1)
        if BEHIND:
            take_turn(WG, count, buffers, bars, sm_scale, C)
    elif TURNS:
        dv, pd = warpgroup_mma_wait(1, deps=(dva, pd))
        if LISTS:  # dO has been read, and the next may come
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        if count & 1 == WG:
            dqa = start_dq(WG, True, i - 1, buffers, bars, C)
            dk, dsd = warpgroup_mma_wait(1, deps=(dka, dsd))
            mbarrier.arrive(empty.index(stage), count=1)
            dq = warpgroup_mma_wait(0, deps=(dqa,))
            leave_dq(WG, True, count, dq, buffers, bars, sm_scale, C)
        else:
            dk, dsd = warpgroup_mma_wait(0, deps=(dka, dsd))
            mbarrier.arrive(empty.index(stage), count=1)
            dq_slot, dq_phase = dq_place(count, PLACES)
            mbarrier.arrive(dq_full.index(dq_slot), count=1)
    elif BEHIND:
        dqa = start_dq(WG, False, i - 1, buffers, bars, C)
        dv, dk, pd, dsd = warpgroup_mma_wait(2, deps=(dva, dka, pd, dsd))
        if LISTS:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        dq = warpgroup_mma_wait(0, deps=(dqa,))
        leave_dq(WG, False, count, dq, buffers, bars, sm_scale, C)
    else:
        dv, dk, pd, dsd = warpgroup_mma_wait(0, deps=(dva, dka, pd, dsd))
        if LISTS:
            mbarrier.arrive(empty.index(stage + STAGES), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv
