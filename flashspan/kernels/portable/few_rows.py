"""Backward of few queries over many keys, for heads above 128: the mirror of decode.py.

A program has a part of the keys, and all query heads that share them: its rows are pairs (query, head of the group). So
it reads each key once, and computes and writes dk and dv of a tile of keys at once: no other program has queries for
them. dq is summed over the tiles in registers, and over the parts by `add_gradients_kernel` (gradient_parts.py), in a
fixed order. Gradients are bitwise reproducible.

few_tiles.py chooses and launches this kernel, and chooses the number of parts. Heads up to 128 use others, which were
faster: for them, Triton 3.6 does not compile this kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashspan.kernels.portable.common import edge_tile, finite, interval, load_tile, store_tile


@triton.jit
def keys_of_rows_step(
    b_dq, n0, b_q, b_do, b_lse, b_delta, k, v, dk, dv, o_n, s_ks, s_vs, s_dks, s_dvs, S, scale, sm_scale, b_start,
    b_end, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a tile of keys, and add the tile to dq. Scores are transposed, [keys, rows]."""
    # [BN, BD]
    b_k = load_tile(k, n0, o_n, s_ks, S, D, BD, MASKED)
    b_v = load_tile(v, n0, o_n, s_vs, S, D, BD, MASKED)
    # [BN, BM]
    b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q)) * scale - b_lse[None, :])
    if MASKED:
        o_k = n0 + o_n
        m_s = (o_k[:, None] >= b_start[None, :]) & (o_k[:, None] < b_end[None, :])
        b_p = tl.where(m_s, b_p, 0.0)
    b_ds = b_p * (tl.dot(b_v, tl.trans(b_do)) - b_delta[None, :])
    if MASKED:
        b_ds = tl.where(m_s, b_ds, 0.0)
    store_tile(dv, n0, o_n, s_dvs, S, tl.dot(b_p.to(b_do.dtype), b_do), D, BD, False)
    b_ds = b_ds.to(b_q.dtype)
    store_tile(dk, n0, o_n, s_dks, S, tl.dot(b_ds, b_q) * sm_scale, D, BD, False)
    if MASKED:
        b_k = finite(b_k).to(b_k.dtype)
    return tl.dot(tl.trans(b_ds), b_k, b_dq)


@triton.jit(do_not_specialize=["H", "K", "T", "S", "lo", "hi", "num_parts"])
def few_rows_kernel(
    dout, q, k, v, out, lse, dq, dk, dv, start, end,
    s_db, s_dh, s_dt, s_qb, s_qh, s_qt, s_kb, s_kh, s_ks, s_vb, s_vh, s_vs, s_ob, s_oh, s_ot,
    s_dqb, s_dqh, s_dqt, s_dkb, s_dkh, s_dks, s_dvb, s_dvh, s_dvs,
    s_rows, lo, hi, H, K, T, S, scale, sm_scale, num_parts,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a part of the keys of a key head, and the part of dq that is due to them: dq is
    [B, H * num_parts, T, D]."""
    i_part, i = tl.program_id(0) % num_parts, tl.program_id(0) // num_parts
    i_b, i_k = (i // K).to(tl.int64), (i % K).to(tl.int64)
    group = H // K
    o_r, o_n, o_d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    o_t, o_h = o_r // group, i_k * group + o_r % group
    m_row = o_t < T
    m_tile = m_row[:, None] & (o_d < D)[None, :]
    o_row = o_t.to(tl.int64)
    # [BM, BD]
    b_q = tl.load(q + (i_b * s_qb + o_h * s_qh + o_row * s_qt)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
    b_do = tl.load(dout + (i_b * s_db + o_h * s_dh + o_row * s_dt)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
    b_out = tl.load(out + (i_b * s_ob + o_h * s_oh + o_row * s_ot)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
    b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
    b_lse = tl.load(lse + (i_b * H + o_h) * T + o_t, mask=m_row, other=float("-inf"))
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * 1.4426950408889634)
    b_start, b_end = interval(o_t, T, S, lo, hi, start + i_b * s_rows, end + i_b * s_rows, TABLE)
    k += i_b * s_kb + i_k * s_kh
    v += i_b * s_vb + i_k * s_vh
    dk += i_b * s_dkb + i_k * s_dkh
    dv += i_b * s_dvb + i_k * s_dvh

    share = tl.cdiv(tl.cdiv(S, num_parts), BN) * BN
    first = i_part * share
    last = tl.minimum(first + share, S)
    full = tl.cdiv(tl.max(tl.where(m_row, b_start, 0), 0), BN) * BN
    full_end = tl.minimum(tl.min(tl.where(m_row, b_end, S), 0), last) // BN * BN
    full = tl.maximum(full, first)
    if full >= full_end:  # there are edge tiles only
        full = first + tl.cdiv(tl.maximum(last - first, 0), BN) * BN
        full_end = full
    num_before, num_after = (full - first) // BN, tl.cdiv(tl.maximum(last - full_end, 0), BN)
    b_dq = tl.zeros([BM, BD], tl.float32)
    given = (b_q, b_do, b_lse, b_delta, k, v, dk, dv, o_n, s_ks, s_vs, s_dks, s_dvs, S, scale, sm_scale, b_start, b_end)
    for n0 in range(full, full_end, BN):
        b_dq = keys_of_rows_step(b_dq, n0, *given, D, BD, False)
    for i_tile in range(num_before + num_after):
        n0 = edge_tile(i_tile, first, num_before, full_end, BN)
        b_dq = keys_of_rows_step(b_dq, n0, *given, D, BD, True)
    p_dq = dq + (i_b * s_dqb + (o_h * num_parts + i_part) * s_dqh + o_row * s_dqt)[:, None] + o_d[None, :]
    tl.store(p_dq, (b_dq * sm_scale).to(dq.dtype.element_ty), mask=m_tile)
