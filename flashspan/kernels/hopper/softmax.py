"""The softmax of the forward kernel for Hopper: what is subtracted from scores, and when it changes.

A softmax need not subtract the maximum of its scores, and finding the maximum of every block takes longest. But P is
rounded to 16 bits before its matmul with V: in bfloat16 a P of 1 is exact and others have eight bits. So there are
three ways; the launcher chooses by two constants:

- FLOAT16_VALUES: V comes in float16 (finer.py), P has eleven bits, and the first block's maximum serves for all blocks
  that follow. A score costs a multiply-add (none where `parts.is_unit`), exp2 and an addition. Only if sums of a block
  come near the largest float16 does a warp leave its loop, to make its rows smaller.
- TRACK_MAXIMUM: V as it is; the maximum of every block is followed. Used where there is too little work for the first
  way to pay.
- Neither, for block maps in bfloat16: the first way with V as it is, whose range is that of float32. A row that later
  finds a score 2^127 (e^88) times larger overflows; that is seen at the end, and the portable kernel computes the row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.row_values import across, as_column, scale_rows

FIRST_EXPONENT = gl.constexpr(6)
"""With FLOAT16_VALUES, the power of 2 that the first maximum becomes. float16 has 30 more below it, the last ten with
ever fewer bits, and nine above it until sums reach SUM_LIMIT."""
SLACK = gl.constexpr(8.0)
"""How far, in powers of 2, the maximum of a masked block may exceed m (with FLOAT16_VALUES: 2^FIRST_EXPONENT above it)
before m is raised. Not used with TRACK_MAXIMUM."""
SUM_LIMIT = gl.constexpr(2.0**15)
"""With FLOAT16_VALUES, rows are made smaller when a thread's sum of P in a block reaches this: no P may pass 65504, nor
2^(FIRST_EXPONENT + SLACK) in masked blocks, whose sums are not tested."""


@gluon.jit
def raise_maximum(s, m, scale, FLOAT16_VALUES: gl.constexpr, TRACK_MAXIMUM: gl.constexpr):
    """m, [rows, 4], which is subtracted from scores from now on, and the factor of sums made with the old m. Unless
    every maximum is tracked it is nearly always 1."""
    top = as_column(gl.max(s, 1) * scale, m)
    if TRACK_MAXIMUM:
        top = gl.maximum(top, m)
    else:
        if FLOAT16_VALUES:
            top = top - FIRST_EXPONENT
        top = gl.where(top > m + SLACK, top, m)
    return top, gl.exp2(m - top)


@gluon.jit
def exponentials(s, m, scale):
    """P: 2^(s * scale - m)."""
    x = s.reshape((s.shape[0], s.shape[1] // 8, 4, 2))
    p = gl.exp2(x * scale - across(m, x))
    return gl.convert_layout(p.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def partial_sums(p):
    """Sums over the columns a thread has: [rows, 4], for the four threads that share a row."""
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def lower_maximum(p, m, l, o, sums):
    """P, m, l and o, where rows with sums from SUM_LIMIT on are divided by a power of 2: float16 holds P again."""
    top = as_column(gl.max(sums, 1), m)
    exponent = (top.to(gl.int32, bitcast=True) >> 23) & 255
    down = gl.where(top >= SUM_LIMIT, exponent - (127 + FIRST_EXPONENT), 0)
    alpha = ((127 - down) << 23).to(gl.float32, bitcast=True)
    return scale_rows(p, alpha), m + down.to(gl.float32), l * alpha, scale_rows(o, alpha)
