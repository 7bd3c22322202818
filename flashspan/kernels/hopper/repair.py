"""Rows of the forward kernel for Hopper that are not finite, which are computed again.

A hidden key has probability 0, but 0 * NaN is NaN: a NaN or an infinity in V also reaches queries that do not see it.
Rows may also overflow (softmax.py). Nearly always there are no such rows. There are three ways (REPAIR):

- KEEP_ROWS: they stay as they are. If no key is hidden, a row with NaN sees that NaN.
- NOTE_ROWS: consumers note them in shared memory, and at its end the program computes them again, row by row. That is
  slow, but a launch would take 2 to 3 us. For short calls with a band (see `marks_rows`).
- MARK_ROWS: they are marked in global memory, and a launch of the portable kernel computes the marked rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.masking import intervals_of
from flashspan.kernels.hopper.scheduler import load_number, own_sizes, tile_position

KEEP_ROWS = gl.constexpr(0)
NOTE_ROWS = gl.constexpr(1)
MARK_ROWS = gl.constexpr(2)

NOTED_TURNS = gl.constexpr(512)
"""With NOTE_ROWS, a program keeps the numbers of all its tiles, and at their end one that is no tile's."""
MOST_TILES = NOTED_TURNS.value - 1
"""The most tiles of a launch with NOTE_ROWS."""
MOST_KEYS = 2**19
"""The most keys, added over all tiles, of a launch with NOTE_ROWS. By estimate, not measured: such a launch takes up to
40 us, or 16 ms if V is all NaN."""
KEYS = gl.constexpr(32)
"""Keys that are computed together at a program's end."""


@gluon.jit
def _invalid_rows(m0, l, o, sizes, config):
    """1 for each of 64 rows whose sums are not finite, else 0. Rows from T on are not written."""
    RO: gl.constexpr = gl.SliceLayout(1, config.OUTPUT)
    total = gl.sum(o[0], 1)
    for i in gl.static_range(1, config.SLICES):
        total += gl.sum(o[i], 1)
    finite = (total + gl.convert_layout(l, RO, assert_trivial=True)) * 0.0 == 0.0
    return gl.where(finite | (m0 + gl.arange(0, config.BLOCK_Q, layout=RO) >= sizes.T), 0, 1)


@gluon.jit
def _invalid_warps(m0, l, o, sizes, config):
    """1 for each of four warps if a row of it is not finite, else 0. Warps need not wait for each other."""
    return gl.max(_invalid_rows(m0, l, o, sizes, config).reshape((4, config.BLOCK_Q // 4)), 1)


@gluon.jit
def mark_rows(i_bh, m0, l, o, sizes, outputs, config):
    """Mark 64 rows if one of them is not finite. Return the first row to write: m0, or T (write no row) if a carry must
    stay unchanged."""
    T = sizes.T
    p_mark = outputs.invalid + i_bh.to(gl.int64) * gl.cdiv(T, config.BLOCK_Q) + m0 // config.BLOCK_Q
    if config.CARRY:  # rows from T on are not written
        wrong = gl.max(_invalid_rows(m0, l, o, sizes, config), 0)
        gl.store(p_mark, wrong, mask=m0 < T)
        m0 = gl.where(wrong == 0, m0, T)
    else:  # each warp writes a byte of the mark
        wrong = _invalid_warps(m0, l, o, sizes, config)
        p_byte = p_mark.to(gl.pointer_type(gl.int8), bitcast=True) + gl.arange(0, 4, layout=wrong.type.layout)
        gl.store(p_byte, wrong.to(gl.int8), mask=m0 < T)
    return m0


@gluon.jit
def note_rows(WG: gl.constexpr, turn, m0, l, o, barriers, sizes, config):
    """Note which warps have a row in this turn's tile that is not finite."""
    wrong = _invalid_warps(m0, l, o, sizes, config)
    barriers.notes_s.index(turn * config.CONSUMERS + WG).store(wrong.to(gl.int8))


@gluon.jit
def recompute_noted_rows(tensors, barriers, sizes, outputs, mask, config):
    """Called at a program's end, by four warps: compute each 64 rows again that have a note."""
    sizes = own_sizes(sizes, config)
    turn = 0
    tile = load_number(barriers.tile_s.index(0), 4)
    while tile < sizes.num_tiles:
        for w in range(config.CONSUMERS):
            notes = barriers.notes_s.index(turn * config.CONSUMERS + w).load(gl.BlockedLayout([4], [32], [4], [0]))
            if gl.max(notes.to(gl.int32), 0) != 0:
                i_block, i_bh = tile_position(tile, sizes.num_blocks, sizes.num_heads, sizes.section)
                m0 = ((sizes.num_blocks - 1 - i_block) * config.CONSUMERS + w) * config.BLOCK_Q
                _recompute_rows(i_bh, m0, tensors, sizes, outputs, mask, config)
        turn += 1
        tile = load_number(barriers.tile_s.index(turn), 4)


@gluon.jit
def _stride(desc, dim: gl.constexpr):
    """A stride of a tensor, of which the compiler knows that 8 divides it."""
    return desc.strides[dim] // 8 * 8


@gluon.jit
def _recompute_rows(i_bh, m0, tensors, sizes, outputs, mask, config):
    """Write the output of 64 rows again, row by row, from their lse. No row reads a key that it does not see."""
    D: gl.constexpr = config.HEAD_DIM
    COLUMNS: gl.constexpr = 64 if D <= 64 else 128 if D <= 128 else 256
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    desc_q, desc_k, desc_v, T = tensors.desc_q, tensors.desc_k, tensors.desc_v, sizes.T
    i_b, i_h = (i_bh // sizes.H).to(gl.int64), (i_bh % sizes.H).to(gl.int64)
    i_k = i_h // sizes.G
    o_d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    o_n = gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    p_q = tensors.q + i_b * _stride(desc_q, 0) + i_h * _stride(desc_q, 1) + o_d
    p_k = tensors.k + i_b * _stride(desc_k, 0) + i_k * _stride(desc_k, 1) + o_d[None, :]
    p_v = tensors.v + i_b * _stride(desc_v, 0) + i_k * _stride(desc_v, 1) + o_d[None, :]
    p_out = outputs.out + i_b * outputs.stride_b * 8 + i_h * outputs.stride_h * 8 + o_d
    for row in range(m0, gl.minimum(m0 + config.BLOCK_Q, T)):
        start, end = intervals_of(row, T, sizes.S, sizes.lo, sizes.hi, mask, i_bh // sizes.H, config.TABLE)
        q = gl.load(p_q + row * _stride(desc_q, 2), mask=o_d < D, other=0.0).to(gl.float32)
        lse = gl.load(outputs.lse + i_bh.to(gl.int64) * T + row) * 1.4426950408889634
        lse = gl.where(lse == float("-inf"), float("inf"), lse)  # no visible score is above -inf: the output is 0
        o = gl.zeros([KEYS, COLUMNS], gl.float32, layout=L)
        for n0 in range(start, end, KEYS):
            seen = n0 + o_n < end
            here = seen[:, None] & (o_d < D)[None, :]
            k = gl.load(p_k + ((n0 + o_n) * _stride(desc_k, 2))[:, None], mask=here, other=0.0).to(gl.float32)
            v = gl.load(p_v + ((n0 + o_n) * _stride(desc_v, 2))[:, None], mask=here, other=0.0).to(gl.float32)
            p = gl.where(seen, gl.exp2(gl.sum(q[None, :] * k, 1) * sizes.scale - lse), 0.0)
            o += p[:, None] * v
        row_out = gl.sum(o, 0).to(outputs.out.dtype.element_ty)
        gl.store(p_out + row.to(gl.int64) * (outputs.stride_t * 8), row_out, mask=o_d < D)
