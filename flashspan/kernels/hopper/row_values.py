"""Numbers that belong to the rows of an accumulator: one per row, or [rows, 4], one for each of the four threads that
share a row. Only sums and maxima over the four threads exchange numbers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_sums(l, like):
    """The sums of whole rows, in the layout of `like`."""
    return gl.convert_layout(gl.sum(l, 1), like.type.layout, assert_trivial=True)


@gluon.jit
def as_column(x, like):
    """x, one number per row, as a column that broadcasts to `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def across(x, like):
    """x, [rows, 4], with a shape that broadcasts to `like`, [rows, n, 4, 2]."""
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))
    return gl.convert_layout(x, L, assert_trivial=True)[:, None, :, None]


@gluon.jit
def scale_rows(x, a):
    """The accumulator x times a [rows, 4]."""
    y = x.reshape((x.shape[0], x.shape[1] // 8, 4, 2))
    y = y * across(a, y)
    return gl.convert_layout(y.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def one_per_row(x, L: gl.constexpr):
    """x [rows, 4], with four equal numbers per row, as one number per row."""
    return gl.convert_layout(gl.max(x, 1), L, assert_trivial=True)
