"""The carry in the forward kernel for Hopper (see forward.py). Either threads load it before a tile's first block, and
it is merged after that block; or the copy engine loads it, and it is merged at the tile's end."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.ptx import opaque
from flashspan.kernels.hopper.row_values import as_column, row_sums, scale_rows
from flashspan.kernels.hopper.slices import scale_slices

LOWEST = gl.constexpr(-(2.0**126))
"""The number subtracted from the scores of a row that has seen no key; -inf minus -inf would be NaN."""


@gluon.jit
def load_carry(outputs, i_bh, m0, sizes, config):
    """Load the carry's 64 rows from m0 on. Returns the slices of out, and lse."""
    T, s_ot = sizes.T, outputs.stride_t
    o = ()
    for i in gl.static_range(config.SLICES):
        o_r = opaque(0) + gl.arange(0, 64, layout=gl.SliceLayout(1, config.OUTPUT))
        # Times 8, so that the compiler still knows that 8 neighbours are contiguous.
        o_d = opaque(0) * 8 + gl.arange(0, config.SLICE_D, layout=gl.SliceLayout(0, config.OUTPUT))
        here = (m0 + o_r < T)[:, None]
        if (i + 1) * config.SLICE_D > config.HEAD_DIM:
            here = here & (o_d < config.HEAD_DIM - i * config.SLICE_D)[None, :]
        i_b = (i_bh // sizes.H).to(gl.int64)
        i_h = (i_bh % sizes.H).to(gl.int64)
        p_out = outputs.out + i_b * outputs.stride_b * 8 + i_h * outputs.stride_h * 8 + m0.to(gl.int64) * (s_ot * 8)
        p_tile = p_out + (o_r * (s_ot * 8))[:, None] + (o_d + i * config.SLICE_D)[None, :]
        o += (gl.load(p_tile, mask=here, other=0.0),)
    o_m = m0 + gl.arange(0, 64, layout=gl.SliceLayout(1, config.SCORES))
    return o, gl.load(outputs.lse + i_bh.to(gl.int64) * T + o_m, mask=o_m < T, other=float("-inf"))


@gluon.jit
def merge_into_first_block(p, m, l, o, past):
    """Merge the carry's out and lse into the softmax of a tile's first block. Returns p, m, l, o.

    The softmax does not start from the carry, because it would have to wait for lse, which arrives with the last rows
    of out, no matter in which order they are loaded.
    """
    # l * 0 makes this depend on the softmax: otherwise ptxas would wait for lse in the middle of the softmax.
    past = as_column(past * 1.4426950408889634 + row_sums(l, past) * 0.0, l)
    top = gl.maximum(m, past)
    now = gl.exp2(m - top)
    past = gl.exp2(past - top)
    first = gl.arange(0, 4, layout=gl.SliceLayout(0, l.type.layout)) == 0
    l = l * now + gl.where(first[None, :], past, 0.0)
    return scale_rows(p, now), top, l, scale_slices(o, past)


@gluon.jit
def merge_into_result(m, l, past):
    """Merge a row's sums with its carry's lse. Returns the lse of both in base 2, and the factors of the row's output
    and of the carry's."""
    mine = m + gl.log2(l)  # not l * exp2(m), which could overflow: a sum may be 2^127
    past = past * 1.4426950408889634
    top = gl.maximum(gl.maximum(mine, past), LOWEST)
    mine = gl.exp2(mine - top)
    past = gl.exp2(past - top)
    both = mine + past
    nothing = both == 0.0
    both = gl.where(nothing, 1.0, both)
    return gl.where(nothing, float("-inf"), top + gl.log2(both)), mine / both / gl.where(l == 0.0, 1.0, l), past / both
