"""Which tile a program computes next.

A program takes a tile, computes it and takes the next one from a counter in global memory, so programs never wait for
one another. Tiles of queries are in the order of their length, longest first, and in sections of heads whose K and V
fit into the L2 cache together: the programs in flight then read the same few heads.

For a block map a tile is a line of the map: 128 queries (in backward, of the transposed map, 128 keys).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.masking import blocks


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
def put(slot, x):
    """Write a number to shared memory."""
    slot.store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])) + x)


@gluon.jit
def tell(slot, tile):
    """Write a tile's number where the other partitions will read it, once they see the barrier that follows."""
    put(slot, tile)
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
def key_work(
    tile, num_tiles, numbers, tables, KEYS: gl.constexpr, QUERIES: gl.constexpr, TABLE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Backward: a tile's batch, key head and first of KEYS keys, and the tiles of QUERIES queries it walks."""
    H, K, G, T, S, Tp, lo, hi, scale, sm_scale, section = numbers
    first, last, s_columns = tables
    num_blocks = gl.cdiv(S, KEYS)
    i_n, i_bk = place(tile, num_blocks, num_tiles // num_blocks, section)
    n0 = i_n * KEYS
    i_b = i_bk // K
    t_first, f_lo, f_hi, t_end = blocks(
        n0, S, T, -hi, -lo, first + i_b * s_columns, last + i_b * s_columns, TABLE, KEYS, QUERIES, WARPS
    )
    # Of a block that reaches past the last key none is full: those keys are seen by nobody.
    return i_b, i_bk % K, n0, t_first, f_lo, gl.where(n0 + KEYS > S, f_lo, f_hi), t_end


@gluon.jit
def find_line(tile, maps, num_streams, section, HEADS, GROUP):
    """Tile number -> (line of the map, stream, which is a batch and one of HEADS): lines longest first.

    The few that are much longer than the mean come before all others, of all streams. GROUP heads of the map belong to
    one of HEADS; they are ordered as the first of them is.
    """
    spans, index, numbers, order, s_batch, s_head, num_lines, num_long = maps
    num_first = num_long * num_streams
    rank, stream = place(gl.maximum(tile - num_first, 0), gl.maximum(num_lines - num_long, 1), num_streams, section)
    rank = gl.where(tile < num_first, tile // num_streams, num_long + rank)
    stream = gl.where(tile < num_first, tile % num_streams, stream)
    i_map = stream // HEADS * s_batch + stream % HEADS * GROUP * s_head
    return gl.load(order + i_map * num_lines + rank), stream
