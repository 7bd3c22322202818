"""Which tile a program computes, and which blocks of the other axis that tile must walk.

Tiles of queries are dealt longest first, and in sections of heads whose K and V fit into the L2 cache together: the
programs in flight then read the same few heads. A program that is done with a tile takes the next from a counter, so
nobody waits for anybody.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.names import barrier


@gluon.jit
def next_tile(counter):
    """Take the next tile nobody has taken. The first of each program is its own number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def leave(counter):
    """The last program to leave sets the counters back, for the next launch that is given them."""
    if gl.atomic_add(counter + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def tell(slot, tile):
    """Write a tile's number where the other partitions will read it, once they see the barrier that follows."""
    slot.store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])) + tile)
    barrier()


@gluon.jit
def told(slot, WARPS: gl.constexpr):
    """Read it."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def place(tile, num_blocks, num_heads, section):
    """Tile number -> (which block of its head, which head): blocks count from the front of the longest-first order."""
    first = tile // (section * num_blocks) * section
    heads = gl.minimum(section, num_heads - first)
    rest = tile - first * num_blocks
    return rest // heads, first + rest % heads


@gluon.jit
def bounds(o_i, num_i, num_j, lo, hi, p_start, p_end, TABLE: gl.constexpr):
    """Each index's interval [start, end) on the other axis: by arithmetic for a band, from a table for rows."""
    if TABLE:
        start = gl.load(p_start + o_i, mask=o_i < num_i, other=0)
        end = gl.load(p_end + o_i, mask=o_i < num_i, other=0)
    else:
        start = gl.minimum(gl.maximum(o_i + lo, 0), num_j)
        end = gl.minimum(gl.maximum(o_i + hi + 1, 0), num_j)
    return start, end


@gluon.jit
def blocks(
    i0, num_i, num_j, lo, hi, p_start, p_end, TABLE: gl.constexpr, ROWS: gl.constexpr,
    BLOCK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Blocks of the other axis that indices i0 .. i0 + ROWS - 1 walk: (first, first full, end of full, end).

    A block is full when every index sees all of it. There is always at least one block to walk, so that nobody has to
    treat a tile that sees nothing apart: its one block is masked out.
    """
    i1 = gl.minimum(i0 + ROWS, num_i) - 1
    if TABLE:
        WIDE: gl.constexpr = 256
        o_i = i0 + gl.arange(0, WIDE, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        here = o_i <= i1
        start = gl.load(p_start + o_i, mask=here, other=0)
        end = gl.load(p_end + o_i, mask=here, other=0)
        some = here & (start < end)
        near = gl.min(gl.where(some, start, num_j), 0)
        far = gl.max(gl.where(some, end, 0), 0)
        full = gl.max(gl.where(here, start, 0), 0)
        full_end = gl.min(gl.where(here, end, num_j), 0)
    else:
        near = gl.minimum(gl.maximum(i0 + lo, 0), num_j)
        far = gl.minimum(gl.maximum(i1 + hi + 1, 0), num_j)
        full = gl.minimum(gl.maximum(i1 + lo, 0), num_j)
        full_end = gl.minimum(gl.maximum(i0 + hi + 1, 0), num_j)
    first = gl.minimum(near, num_j - 1) // BLOCK
    end_block = gl.maximum(gl.cdiv(far, BLOCK), first + 1)
    f_lo = gl.minimum(gl.maximum(gl.cdiv(full, BLOCK), first), end_block)
    f_hi = gl.maximum(gl.minimum(full_end // BLOCK, end_block), f_lo)
    return first, f_lo, f_hi, end_block
