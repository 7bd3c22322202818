"""The backward kernels for any GPU that Triton serves, and their launcher.

Each pass recomputes the probabilities it needs from lse (FlashAttention-2, Algorithm 2): a program per block of keys
sums dk and dv over the queries that see it, one per block of queries sums dq over the keys it sees. Nobody adds into
another's tile, so there are no atomics and gradients repeat bit for bit. Where dk and dv together do not fit into the
registers, each has a pass of its own: from heads of 256 on, five products without spills are faster than four with.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.blocks import Blocks
from flashspan.kernels.contract import Dropout
from flashspan.kernels.masks import Mask
from flashspan.kernels.portable.arguments import LOG2E, Launch, dropout_arguments, mask_arguments, near, on, precision
from flashspan.kernels.portable.common import (
    block_interval,
    dropout_stream,
    dropout_word,
    edge_tile,
    load_tile,
    store_tile,
)
from flashspan.kernels.portable.sparse import sparse_backward_launches
from flashspan.kernels.portable.steps import keys_step, load_lse, queries_step
from flashspan.kernels.portable.tiles import key_passes, tile


@triton.jit(do_not_specialize=["T", "S", "lo", "hi", "stream", "batch_stride", "threshold"])
def keys_kernel(
    dout, q, k, v, lse, delta, dk, dv, start, end, first, last, seed, qpos, kpos,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs,
    s_rows, s_columns, H, K, T, S, lo, hi, scale, sm_scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, TABLE: tl.constexpr, CONVEX: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv or both of one block of keys, summed over the query heads that share it."""
    num_n = tl.cdiv(S, BN)
    i_n = tl.program_id(0) % num_n  # the first keys are seen by the most queries under a causal mask: they go first
    i_bk = tl.program_id(0) // num_n
    i_b, i_k = (i_bk // K).to(tl.int64), (i_bk % K).to(tl.int64)
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    p_start, p_end = start + i_b * s_rows, end + i_b * s_rows

    n0 = i_n * BN
    o_n = tl.arange(0, BN)
    o_k = n0 + o_n
    # The transpose of lo <= j - i <= hi is -hi <= i - j <= -lo.
    b_first, b_last, near, inside, full, full_end, outside = block_interval(
        o_k, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, TABLE, CONVEX, BM, BE
    )
    # [BN, BD]
    b_k = load_tile(k, n0, o_n, s_ks, S, D, BD, True) if BC == BD else 0.0
    b_v = load_tile(v, n0, o_n, s_vs, S, D, BD, True) if DK and BC == BD else 0.0
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    b_column = tl.zeros([BN], tl.uint32)
    row_word = tl.zeros([], tl.uint32)

    for i_g in range(GROUP):
        i_h = i_k * GROUP + i_g
        p_q = q + i_b * s_qb + i_h * s_qh
        p_do = dout + i_b * s_db + i_h * s_dh
        p_lse = lse + (i_b * H + i_h) * T
        p_delta = delta + (i_b * H + i_h) * T
        if DROPOUT:
            row_word, column_word = dropout_stream(seed, stream + i_b * batch_stride + i_h)
            b_column = dropout_word(column_word, o_k, kpos, S, POSITIONS)
        for m0 in range(full, full_end, BM):
            b_dk, b_dv = keys_step(
                b_dk, b_dv, b_k, b_v, k, v, n0, o_n, s_ks, s_vs, S, p_q, p_do, p_lse, p_delta, m0, tl.arange(0, BM),
                s_qt, s_dt, T, scale, b_first, b_last, p_start, p_end, b_column, row_word, qpos, threshold, gain, D, BD,
                BC, DK, DV, False, CONVEX, False, DROPOUT, POSITIONS, PRECISION,
            )  # fmt: skip
        for i_tile in tl.range(0, inside + outside, num_stages=1):
            m0 = edge_tile(i_tile, near, inside, full_end, BE)
            b_dk, b_dv = keys_step(
                b_dk, b_dv, b_k, b_v, k, v, n0, o_n, s_ks, s_vs, S, p_q, p_do, p_lse, p_delta, m0, tl.arange(0, BE),
                s_qt, s_dt, T, scale, b_first, b_last, p_start, p_end, b_column, row_word, qpos, threshold, gain, D, BD,
                BC, DK, DV, True, CONVEX, False, DROPOUT, POSITIONS, PRECISION,
            )  # fmt: skip

    if DK:
        store_tile(dk + i_b * s_dkb + i_k * s_dkh, n0, o_n, s_dks, S, b_dk * sm_scale, D, BD, ADD)
    if DV:
        store_tile(dv + i_b * s_dvb + i_k * s_dvh, n0, o_n, s_dvs, S, b_dv, D, BD, ADD)


@triton.jit(do_not_specialize=["T", "S", "lo", "hi", "stream", "batch_stride", "threshold"])
def queries_kernel(
    dout, q, k, v, lse, delta, dq, start, end, seed, qpos, kpos,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_dqb, s_dqh, s_dqt,
    s_rows, H, K, T, S, lo, hi, scale, sm_scale, threshold, gain, stream, batch_stride,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    TABLE: tl.constexpr, ADD: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries."""
    num_m = tl.cdiv(T, BM)
    i_m = num_m - 1 - tl.program_id(0) % num_m
    i_bh = tl.program_id(0) // num_m
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    i_k = i_h // (H // K)
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    row = i_bh.to(tl.int64) * T

    m0 = i_m * BM
    o_r = tl.arange(0, BM)
    o_m = m0 + o_r
    b_start, b_end, near, inside, full, full_end, outside = block_interval(
        o_m, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE, True, BN, BE
    )
    # [BM, BD]
    p_q, p_do = q + i_b * s_qb + i_h * s_qh, dout + i_b * s_db + i_h * s_dh
    b_q = load_tile(p_q, m0, o_r, s_qt, T, D, BD, True) if BC == BD else 0.0
    b_do = load_tile(p_do, m0, o_r, s_dt, T, D, BD, True) if BC == BD else 0.0
    b_lse = load_lse(lse + row, o_m, T, True)
    b_delta = tl.load(delta + row + o_m, mask=o_m < T, other=0.0)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_row = tl.zeros([BM], tl.uint32)
    column_word = tl.zeros([], tl.uint32)
    if DROPOUT:
        row_word, column_word = dropout_stream(seed, stream + i_b * batch_stride + i_h)
        b_row = dropout_word(row_word, o_m, qpos, T, POSITIONS)

    for n0 in range(full, full_end, BN):
        b_dq = queries_step(
            b_dq, b_q, b_do, b_lse, b_delta, p_q, p_do, m0, o_r, s_qt, s_dt, T, k, v, n0, tl.arange(0, BN), s_ks, s_vs,
            S, scale, b_start, b_end, b_row, column_word, kpos, threshold, gain, D, BD, BC, False, False, DROPOUT,
            POSITIONS, PRECISION,
        )  # fmt: skip
    for i_tile in tl.range(0, inside + outside, num_stages=1):
        n0 = edge_tile(i_tile, near, inside, full_end, BE)
        b_dq = queries_step(
            b_dq, b_q, b_do, b_lse, b_delta, p_q, p_do, m0, o_r, s_qt, s_dt, T, k, v, n0, tl.arange(0, BE), s_ks, s_vs,
            S, scale, b_start, b_end, b_row, column_word, kpos, threshold, gain, D, BD, BC, True, False, DROPOUT,
            POSITIONS, PRECISION,
        )  # fmt: skip
    store_tile(dq + i_b * s_dqb + i_h * s_dqh, m0, o_r, s_dqt, T, b_dq * sm_scale, D, BD, ADD)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    mask: Mask,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    dropout: Dropout | None = None,
) -> None:
    """See contract.py."""
    dout, q, k, v = near(dout), near(q), near(k), near(v)
    lse, delta = lse.contiguous(), delta.contiguous()
    with on(q.device):
        for launch in backward_launches(
            dout, q, k, v, lse, delta, mask, scale, dq, dk, dv, accumulate, dropout
        ).values():
            launch()


def backward_launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Mask,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    dropout: Dropout | None,
) -> dict[str, Launch]:
    """What backward launches, as data: by the gradients each pass makes."""
    if isinstance(mask, Blocks):
        return sparse_backward_launches(dout, q, k, v, lse, delta, mask, scale, dq, dk, dv, accumulate, dropout)
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    table, start, end, first, last, s_rows, s_columns, lo, hi, convex = mask_arguments(mask, T, S, q)
    seed, qpos, kpos, *drop = dropout_arguments(dropout, q)
    inputs = (*dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    numbers = (H, K, T, S, lo, hi, scale * LOG2E, scale, *drop)
    constants = {
        "TABLE": table, "ADD": accumulate, "DROPOUT": dropout is not None,
        "POSITIONS": dropout is not None and dropout.q_positions is not None, "PRECISION": precision(q),
    }  # fmt: skip
    launches = {}
    for made, size in key_passes(q).items() if k.numel() else ():
        launches[made] = Launch(
            keys_kernel,
            (triton.cdiv(S, size.block_k) * B * K,),
            (
                dout, q, k, v, lse, delta, dk, dv, start, end, first, last, seed, qpos, kpos,
                *inputs, *dk.stride()[:3], *dv.stride()[:3], s_rows, s_columns, *numbers,
            ),
            {
                **constants, "DK": "dk" in made, "DV": "dv" in made, "CONVEX": convex, "GROUP": H // K,
                **size.constants(D),
            },
        )  # fmt: skip
    if q.numel():
        size = tile("dq", q)
        launches["dq"] = Launch(
            queries_kernel,
            (triton.cdiv(T, size.block_q) * B * H,),
            (
                dout, q, k, v, lse, delta, dq, start, end, seed, qpos, kpos,
                *inputs, *dq.stride()[:3], s_rows, *numbers,
            ),
            {**constants, **size.constants(D)},
        )  # fmt: skip
    return launches
