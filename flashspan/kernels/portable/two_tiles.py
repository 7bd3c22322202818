"""Heads of 129 to 192 as two tiles of columns, for decode.py: 128 columns and 64 in place of 256.

They need a quarter less shared memory and fewer registers. So two programs run on a multiprocessor in place of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashspan.kernels.portable.common import edge_tile, finite, load_tile, tile_ranges, visible
from flashspan.kernels.portable.steps import softmax_step


@triton.jit
def load_columns(p, row, o_row, stride, num_rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
                 CHECK: tl.constexpr):  # fmt: skip
    """Columns FIRST to FIRST + WIDTH of rows row + o_row of a [*, D] matrix, 0 past D and past num_rows."""
    return load_tile(p + FIRST, row, o_row, stride, num_rows, D - FIRST, WIDTH, CHECK)


@triton.jit
def two_tile_step(
    b_acc, b_more, b_m, b_l, n0, b_q, b_x, k, v, o_n, s_ks, s_vs, S, scale, b_start, b_end, D: tl.constexpr,
    BD: tl.constexpr, BX: tl.constexpr, MASKED: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """steps.forward_step for 16-bit heads of BD + BX columns, computed as two tiles: b_q and b_acc have the first BD
    columns, b_x and b_more the others."""
    # [BM, BN]
    b_s = tl.dot(b_q, tl.trans(load_tile(k, n0, o_n, s_ks, S, BD, BD, MASKED)))
    b_s = tl.dot(b_x, tl.trans(load_columns(k, n0, o_n, s_ks, S, BD, BX, D, MASKED)), b_s)
    m_s = visible(n0 + o_n, b_start, b_end, False) if MASKED else b_s  # not read without MASKED
    b_p, b_alpha, b_m, b_l = softmax_step(b_s, m_s, b_m, b_l, scale, MASKED, NEGATIVE)
    # [BN, BD], [BN, BX]
    b_v = load_tile(v, n0, o_n, s_vs, S, BD, BD, MASKED)
    b_vx = load_columns(v, n0, o_n, s_vs, S, BD, BX, D, MASKED)
    b_acc, b_more = b_acc * b_alpha[:, None], b_more * b_alpha[:, None]
    if MASKED:  # as in forward_step
        b_taint = tl.sum(b_v.to(tl.float32) * 0.0, 1) + tl.sum(b_vx.to(tl.float32) * 0.0, 1)
        b_taint = tl.sum(tl.where(m_s, b_taint[None, :], 0.0), 1)
        b_acc, b_more = b_acc + b_taint[:, None], b_more + b_taint[:, None]
        b_v, b_vx = finite(b_v).to(b_v.dtype), finite(b_vx).to(b_vx.dtype)
    b_p = b_p.to(b_v.dtype)
    return tl.dot(b_p, b_v, b_acc), tl.dot(b_p, b_vx, b_more), b_m, b_l


@triton.jit
def two_tile_loop(
    b_acc, b_m, b_l, b_q, p_q, m_row, k, v, s_ks, s_vs, S, scale, b_start, b_end,
    D: tl.constexpr, BD: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Attention of rows of queries over all their keys. p_q: the first element of each row. Return the output of both
    tiles, not yet divided by the sum, and the softmax's maximum and sum."""
    o_x, o_n = BD + tl.arange(0, BX), tl.arange(0, BN)
    # [BM, BX]
    b_x = tl.load(p_q + o_x[None, :], mask=m_row[:, None] & (o_x < D)[None, :], other=0.0)
    b_more = tl.zeros(b_x.shape, tl.float32)
    edge, num_before, full, full_end, num_after = tile_ranges(b_start, b_end, m_row, S, True, BN, BN)
    given = (b_q, b_x, k, v, o_n, s_ks, s_vs, S, scale, b_start, b_end)
    for n0 in range(full, full_end, BN):
        b_acc, b_more, b_m, b_l = two_tile_step(b_acc, b_more, b_m, b_l, n0, *given, D, BD, BX, False, NEGATIVE)
    for i_tile in tl.range(0, num_before + num_after, num_stages=1):
        n0 = edge_tile(i_tile, edge, num_before, full_end, BN)
        b_acc, b_more, b_m, b_l = two_tile_step(b_acc, b_more, b_m, b_l, n0, *given, D, BD, BX, True, NEGATIVE)
    return b_acc, b_more, b_m, b_l


@triton.jit
def store_columns(p_rows, b, m_row, D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Write b to columns FIRST to FIRST + WIDTH of rows, up to column D."""
    o_d = FIRST + tl.arange(0, WIDTH)
    tl.store(p_rows + o_d[None, :], b.to(p_rows.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])
