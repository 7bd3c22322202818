"""The steps of a kernel for one tile: add it to the online softmax of forward, or to a gradient.

The kernels over intervals or lists of blocks (forward.py, backward.py) and for few queries (decode.py) share them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashspan.kernels.portable.common import (
    dropout_word,
    finite,
    load_tile,
    mix,
    sliced_matmul,
    visible,
)


@triton.jit
def finished(b_acc, b_m, b_l):
    """Return output and lse of rows, from their running output, maximum and sum."""
    b_empty = b_l == 0.0
    b_out = b_acc / tl.where(b_empty, 1.0, b_l)[:, None]
    b_lse = tl.where(b_empty, float("-inf"), b_m * 0.6931471805599453 + tl.log(tl.where(b_empty, 1.0, b_l)))
    return b_out, b_lse


@triton.jit
def dropout_words(
    p_seed, stream, o, p_positions, num, COLUMNS: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr
):
    """Dropout's hash of each row o of a stream, and the word that the hashes of its columns start from. COLUMNS: the
    hash of each column, and the word of its rows."""
    b_word = tl.zeros([o.shape[0]], tl.uint32)
    other_word = tl.zeros([], tl.uint32)
    if DROPOUT:
        seed = tl.load(p_seed)
        low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        row_word, column_word = mix(low ^ mix(stream.to(tl.uint32))), mix(high)
        b_word = dropout_word(column_word if COLUMNS else row_word, o, p_positions, num, POSITIONS)
        other_word = row_word if COLUMNS else column_word
    return b_word, other_word


@triton.jit
def softmax_step(b_s, m_s, b_m, b_l, scale, MASKED: tl.constexpr, NEGATIVE: tl.constexpr):
    """The online softmax of a tile of scores: return P, the factor of earlier sums, and the new maximum and sum of each
    row. MASKED: only the scores m_s count."""
    if MASKED:
        b_s = tl.where(m_s, b_s * scale, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        # A row that has seen no key keeps m = -inf. Subtract 0 instead, so that its P is exp2(-inf) = 0.
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_m - b_shift)
    else:
        # One fused multiply-add per score: the maximum is scaled, not the scores.
        b_top = tl.min(b_s, 1) if NEGATIVE else tl.max(b_s, 1)
        b_new = tl.maximum(b_m, b_top * scale)
        b_p = tl.exp2(b_s * scale - b_new[:, None])
        b_alpha = tl.exp2(b_m - b_new)
    return b_p, b_alpha, b_new, b_l * b_alpha + tl.sum(b_p, 1)


@triton.jit
def forward_step(
    b_acc, b_m, b_l, b_q, p_q, m0, o_m, s_qt, T, p_k, p_v, n0, o_n, s_ks, s_vs, S, scale, b_start, b_end, b_row,
    column_word, p_kpos, threshold, gain, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr,
    BITS: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
    ALIKE: tl.constexpr = False,
):  # fmt: skip
    """Add one tile of keys to the online softmax. Scores are exponents of 2: `scale` includes log2(e).

    MASKED: rows see only some keys, those that `visible` returns for b_start, b_end and BITS. ALIKE: all rows see the
    same keys of the tile, which end at S.
    """
    o_k = n0 + o_n  # [BN]
    # [BM, BN]
    if BC < BD:
        b_s = sliced_matmul(p_q, m0, o_m, s_qt, T, p_k, n0, o_n, s_ks, S, D, BC, PRECISION)
    else:
        b_k = load_tile(p_k, n0, o_n, s_ks, S, D, BD, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    m_s = visible(o_k, b_start, b_end, BITS) if MASKED else b_s  # not read without MASKED
    b_p, b_alpha, b_m, b_l = softmax_step(b_s, m_s, b_m, b_l, scale, MASKED, NEGATIVE)
    if DROPOUT:
        b_word = mix(b_row[:, None] ^ dropout_word(column_word, o_k, p_kpos, S, POSITIONS)[None, :])
        b_p = tl.where(b_word >= threshold, b_p * gain, 0.0)
    # [BN, BD]
    b_v = load_tile(p_v, n0, o_n, s_vs, S, D, BD, MASKED)
    b_acc = b_acc * b_alpha[:, None]
    if MASKED and not ALIKE:
        # NaN in a row of V must reach only the queries that see it. In the matmul, 0 * NaN would reach all queries.
        b_taint = tl.sum(b_v.to(tl.float32) * 0.0, 1)
        b_acc += tl.sum(tl.where(m_s, b_taint[None, :], 0.0), 1)[:, None]
        b_v = finite(b_v).to(b_v.dtype)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_m, b_l


@triton.jit
def flagged_end(p_flags, num_flags, STRETCH: tl.constexpr):
    """The end of this program's flags: 1 + the last one that is not 0, or 0. Its flags are num_programs apart."""
    end = 0
    for i0 in range(tl.program_id(0), num_flags, STRETCH * tl.num_programs(0)):
        o = i0 + tl.arange(0, STRETCH) * tl.num_programs(0)
        b_flag = tl.load(p_flags + o, mask=o < num_flags, other=0)
        end = tl.maximum(end, tl.max(tl.where(b_flag != 0, o + 1, 0), 0))
    return end


@triton.jit
def load_lse(p_lse, o_m, T, CHECK: tl.constexpr):
    """lse in base 2, and +inf for a row that has seen no key: its probabilities are exp2(-inf) = 0."""
    b_lse = tl.load(p_lse + o_m, mask=o_m < T, other=float("-inf")) if CHECK else tl.load(p_lse + o_m)
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * 1.4426950408889634)


@triton.jit
def keys_step(
    b_dk, b_dv, p_q, p_do, p_lse, p_delta, m0, o_m, b_first, b_last, b_column, row_word,
    b_k, b_v, p_k, p_v, n0, o_n, s_ks, s_vs, S, s_qt, s_dt, T, scale, p_start, p_end, p_qpos, threshold, gain,
    MASKED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CONVEX: tl.constexpr, BITS: tl.constexpr, DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv. Scores are transposed, [keys, queries].

    MASKED: only some queries see a key, those that `visible` returns for b_first, b_last and BITS. Without CONVEX, some
    of these queries do not see the key: p_start and p_end, the queries' intervals of keys, decide.
    """
    o_q = m0 + o_m  # [BM]
    o_k = n0 + o_n  # [BN]
    RECOMPUTE: tl.constexpr = DK and DV and BD == 128  # dk and dv fill the registers
    # Rows past the end see no keys. They load the last row's lse and delta.
    o_valid = tl.minimum(o_q, T - 1) if MASKED else o_q
    b_lse = load_lse(p_lse, o_valid, T, False)
    # [BN, BM]
    if BC < BD:
        b_s = sliced_matmul(p_k, n0, o_n, s_ks, S, p_q, m0, o_m, s_qt, T, D, BC, PRECISION)
    else:
        b_q = load_tile(p_q, m0, o_m, s_qt, T, D, BD, MASKED, RECOMPUTE)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_p = tl.exp2(b_s * scale - b_lse[None, :])
    if MASKED:
        m_s = visible(o_q, b_first, b_last, BITS)
        if not CONVEX and not BITS:
            b_start = tl.load(p_start + o_q, mask=o_q < T, other=0)
            b_end = tl.load(p_end + o_q, mask=o_q < T, other=0)
            m_s = m_s & (o_k[:, None] >= b_start[None, :]) & (o_k[:, None] < b_end[None, :])
        b_p = tl.where(m_s, b_p, 0.0)
    # [BM, BD]
    if DV or BC == BD:
        b_do = load_tile(p_do, m0, o_m, s_dt, T, D, BD, MASKED, RECOMPUTE)
    if DROPOUT:
        b_word = mix(dropout_word(row_word, o_q, p_qpos, T, POSITIONS)[None, :] ^ b_column[:, None])
        b_gain = tl.where(b_word >= threshold, gain, 0.0)
    if DV:
        b_kept = b_p * b_gain if DROPOUT else b_p
        b_dv = tl.dot(b_kept.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    if DK:
        # [BN, BM]
        if BC < BD:
            b_dp = sliced_matmul(p_v, n0, o_n, s_vs, S, p_do, m0, o_m, s_dt, T, D, BC, PRECISION)
            b_q = load_tile(p_q, m0, o_m, s_qt, T, D, BD, MASKED, RECOMPUTE)
        else:
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        if DROPOUT:
            b_dp = b_dp * b_gain
        b_delta = tl.load(p_delta + o_valid)
        b_ds = b_p * (b_dp - b_delta[None, :])
        if MASKED:
            b_ds = tl.where(m_s, b_ds, 0.0)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
def queries_step(
    b_dq, n0, o_n, b_start, b_end,
    b_q, b_do, b_lse, b_delta, p_q, p_do, m0, o_m, s_qt, s_dt, T, p_k, p_v, s_ks, s_vs, S, scale, b_row, column_word,
    p_kpos, threshold, gain,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq. MASKED and BITS as in `forward_step`."""
    o_k = n0 + o_n  # [BN]
    # [BM, BN]
    if BC < BD:
        b_s = sliced_matmul(p_q, m0, o_m, s_qt, T, p_k, n0, o_n, s_ks, S, D, BC, PRECISION)
        b_p = tl.exp2(b_s * scale - b_lse[:, None])
        b_dp = sliced_matmul(p_do, m0, o_m, s_dt, T, p_v, n0, o_n, s_vs, S, D, BC, PRECISION)
        b_k = load_tile(p_k, n0, o_n, s_ks, S, D, BD, MASKED)
    else:
        b_k = load_tile(p_k, n0, o_n, s_ks, S, D, BD, MASKED)
        b_v = load_tile(p_v, n0, o_n, s_vs, S, D, BD, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale - b_lse[:, None])
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    if DROPOUT:
        b_word = mix(b_row[:, None] ^ dropout_word(column_word, o_k, p_kpos, S, POSITIONS)[None, :])
        b_dp = tl.where(b_word >= threshold, b_dp * gain, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if MASKED:
        m_s = visible(o_k, b_start, b_end, BITS)
        b_ds = tl.where(m_s, b_ds, 0.0)
        b_k = finite(b_k).to(b_k.dtype)
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
