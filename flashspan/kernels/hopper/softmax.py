"""The softmax of the forward kernel for Hopper: which number is subtracted from scores, and when it changes.

A softmax may subtract any number that keeps its exponentials in range. This need not be the maximum, which is the
slowest part to compute. But P is rounded to 16 bits before its matmul with V: in bfloat16, P = 1 is exact, and other
numbers have eight bits. So there are three methods; the launcher chooses one by two constants:

- FLOAT16_VALUES: V is converted to float16 (float16_values.py), P has eleven bits, and the first block's maximum is
  used for all later blocks. A score costs a multiply-add (none if `parts.is_unit`), an exp2 and an addition. If the
  sums of a block come near the largest float16, the warp leaves its loop and scales its rows down.
- TRACK_MAXIMUM: V is not converted, and m follows the maximum of every block. It is used if there is too little work to
  pay for the conversion.
- Neither, for block maps in bfloat16: V is not converted, and the first block's maximum is used for all later blocks.
  bfloat16 has the range of float32. If a later P is 2^127 (e^88) or more, the row overflows. This is detected at the
  end, and the portable kernel recomputes the row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.row_values import across, as_column, scale_rows
from flashspan.kernels.hopper.slices import scale_slices

FIRST_EXPONENT = gl.constexpr(6)
"""With FLOAT16_VALUES, the exponential of the first maximum is 2 to this power. Below it, float16 has 30 more powers of
2, the last ten with fewer and fewer bits; above it, there are nine before sums reach SUM_LIMIT."""
SLACK = gl.constexpr(8.0)
"""m is raised when the maximum of an edge block is higher by more than this many powers of 2 (with FLOAT16_VALUES, by
FIRST_EXPONENT more). Not used with TRACK_MAXIMUM."""
SUM_LIMIT = gl.constexpr(2.0**15)
"""With FLOAT16_VALUES, rows are scaled down if a thread's sum of P in a block reaches this, because no P may exceed
65504. Sums of edge blocks are not tested: there SLACK keeps P at 2^(FIRST_EXPONENT + SLACK) or below."""


@gluon.jit
def raise_maximum(s, m, scale, FLOAT16_VALUES: gl.constexpr, TRACK_MAXIMUM: gl.constexpr):
    """Return the new m [rows, 4], to subtract from scores from now on, and the factor for sums that used the old m.
    Without TRACK_MAXIMUM the factor is nearly always 1."""
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
    """Each thread's sums over its own columns: [rows, 4], as four threads share a row."""
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def lower_maximum(p, m, l, o, sums):
    """Return P, m, l and o after rows whose sums have reached SUM_LIMIT are divided by a power of 2 to fit float16."""
    top = as_column(gl.max(sums, 1), m)
    exponent = (top.to(gl.int32, bitcast=True) >> 23) & 255
    down = gl.where(top >= SUM_LIMIT, exponent - (127 + FIRST_EXPONENT), 0)
    alpha = ((127 - down) << 23).to(gl.float32, bitcast=True)
    return scale_rows(p, alpha), m + down.to(gl.float32), l * alpha, scale_slices(o, alpha)
