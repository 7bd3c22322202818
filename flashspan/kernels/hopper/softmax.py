"""The softmax of the forward kernel for Hopper: what is subtracted from scores, and when that changes.

What a softmax subtracts from its scores need not be their maximum, and to look for that in every block is what takes
longest. But exponentials are rounded to 16 bits before they meet V, and of a bfloat16's eight the largest needs none if
it is 1. So there are three ways, and who launches chooses (FINE and FOLLOW):

- FINE: V comes in float16 (finer.py), exponentials have eleven bits, and the first block's maximum serves for all that
  follow: a score costs a multiply-add (none where `parts.is_unit`), exp2 and an addition. Only if sums of a block come
  near what float16 holds does a warp leave its loop, to make its rows smaller.
- FOLLOW: V as it is; every block's maximum is followed. Where that is too little work for the first to pay.
- Neither, for block maps in bfloat16: as FINE, with V as it is, which reaches as far as float32. A row that later finds
  a score 2^127 times larger, e^88, overflows, which is seen at the end, and is left to the portable kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.row_values import across, each, times

UP = gl.constexpr(6)
"""FINE: the power of 2 that the first maximum becomes. float16 has 30 more below it, the last ten with ever fewer bits,
and nine above it until a row is HIGH."""
LAG = gl.constexpr(8.0)
"""How far, in powers of 2, the maximum of a masked block may exceed m, and UP in FINE, unless every one is followed."""
HIGH = gl.constexpr(2.0**15)
"""FINE: sums of a thread's exponentials in a block that are made smaller: none of them may pass 65504, nor 2^(UP + LAG)
in masked blocks, which are not looked at."""


@gluon.jit
def rise(s, m, scale, FINE: gl.constexpr, FOLLOW: gl.constexpr):
    """m, [rows, 4], which is subtracted from the scores, from now on, and what becomes of sums of exponentials of the
    old one. Unless each maximum is followed they need hardly ever be multiplied."""
    top = each(gl.max(s, 1) * scale, m)
    if FOLLOW:
        top = gl.maximum(top, m)
    else:
        if FINE:
            top = top - UP
        top = gl.where(top > m + LAG, top, m)
    return top, gl.exp2(m - top)


@gluon.jit
def exponentials(s, m, scale):
    """P: 2^(s * scale - m)."""
    x = s.reshape((s.shape[0], s.shape[1] // 8, 4, 2))
    p = gl.exp2(x * scale - across(m, x))
    return gl.convert_layout(p.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def sums_of(p):
    """Sums over the columns a thread has: [rows, 4], for the four threads that share a row."""
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def lower(p, m, l, o, sums):
    """P, m, l and o of rows whose sums are HIGH so much smaller, by a power of 2, that float16 holds their P again."""
    top = each(gl.max(sums, 1), m)
    exponent = (top.to(gl.int32, bitcast=True) >> 23) & 255
    down = gl.where(top >= HIGH, exponent - (127 + UP), 0)
    alpha = ((127 - down) << 23).to(gl.float32, bitcast=True)
    return times(p, alpha), m + down.to(gl.float32), l * alpha, times(o, alpha)
