"""Choose the tile that a program computes next.

A program takes a tile, computes it and takes the next one from a counter in global memory, so programs never wait for
one another. Tiles of queries are ordered by length, longest first, in sections of heads whose K and V fit into the L2
cache together, so that the programs in flight read the same few heads.

For a block map, a tile is a line of the map, 128 queries; in backward, a line of the transposed map, 128 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashspan.kernels.hopper.config import ForwardSizes
from flashspan.kernels.hopper.gluon_compat import barrier
from flashspan.kernels.hopper.masking import visible_blocks
from flashspan.kernels.hopper.ptx import opaque


@gluon.jit
def own_sizes(sizes, config):
    """The sizes, for one partition. What several partitions compute from the same number, the compiler would otherwise
    compute before they start; ptxas would then keep it in local memory."""
    T, lo, hi, num_blocks = opaque(sizes.T), sizes.lo, sizes.hi, sizes.num_blocks
    if not config.BLOCK_MAP:
        lo, hi = opaque(lo), opaque(hi)
        num_blocks = gl.cdiv(T, config.CONSUMERS * config.BLOCK_Q)
    return ForwardSizes(
        sizes.H, sizes.G, T, opaque(sizes.S), lo, hi, sizes.scale, sizes.num_heads, num_blocks, sizes.section,
        sizes.num_tiles, sizes.counter,
    )  # fmt: skip


@gluon.jit
def next_tile(counter):
    """Take the next tile that no program has taken. A program's first tile is its program number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def reset_counter(counter):
    """Called at a program's end: the last program sets both counters to 0 for the next launch."""
    if gl.atomic_add(counter + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def store_number(slot, x):
    """Write a number to shared memory."""
    slot.store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])) + x)


@gluon.jit
def publish_number(slot, x):
    """Write a number for other partitions. They may read it after the next barrier at which this partition arrives."""
    store_number(slot, x)
    barrier()


@gluon.jit
def load_number(slot, WARPS: gl.constexpr):
    """Read a number from shared memory, in a partition of this many warps."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def stage_and_phase(x, STAGES: gl.constexpr):
    """The number of a load into a ring of buffers -> (its stage, the phase of the stage's barriers)."""
    if STAGES == 3:
        stage = x % 3
        phase = (x // 3) & 1
    else:
        LOG: gl.constexpr = STAGES // 2 - STAGES // 8  # of 1, 2, 4 and 8
        stage = x & (STAGES - 1)
        phase = (x >> LOG) & 1
    return stage, phase


@gluon.jit
def tile_position(tile, num_blocks, num_heads, section):
    """Tile number -> (block of its head, head). Blocks are numbered by length, the longest first."""
    first = tile // (section * num_blocks) * section
    heads = gl.minimum(section, num_heads - first)
    rest = tile - first * num_blocks
    return rest // heads, first + rest % heads


@gluon.jit
def locate_keys(
    tile, num_tiles, sizes, mask, KEYS: gl.constexpr, QUERIES: gl.constexpr, TABLE: gl.constexpr, WARPS: gl.constexpr
):
    """In backward: a tile's sequence, key head, first of KEYS keys, and the blocks of QUERIES queries to visit."""
    K, S = sizes.K, sizes.S
    num_blocks = gl.cdiv(S, KEYS)
    i_n, i_bk = tile_position(tile, num_blocks, num_tiles // num_blocks, sizes.section)
    n0 = i_n * KEYS
    i_b = i_bk // K
    first, first_full, end_full, end = visible_blocks(
        n0, S, sizes.T, -sizes.hi, -sizes.lo, mask, i_b, TABLE, KEYS, QUERIES, WARPS
    )
    # If the tile reaches past the last key, no block is full, because the rows past that key are hidden.
    return i_b, i_bk % K, n0, first, first_full, gl.where(n0 + KEYS > S, first_full, end_full), end


@gluon.jit
def head_of_keys(i_k, K, desc_k, SPLIT_HEADS: gl.constexpr):
    """The head of K and V for one of K key heads: with SPLIT_HEADS several share it (portable/gradient_parts.py)."""
    if SPLIT_HEADS:
        i_k = i_k // (K // desc_k.shape[1])
    return i_k


@gluon.jit
def find_line(tile, mask, num_streams, section, HEADS, GROUP):
    """Tile number -> (line of the block map, stream: a sequence and one of HEADS), longest lines first.

    The few lines that are much longer than the mean come first, over all streams. In backward a stream is a key head,
    with GROUP heads of the map; the order of the first of them is used.
    """
    num_lines, num_long = mask.num_lines, mask.num_long
    num_first = num_long * num_streams
    rank, stream = tile_position(
        gl.maximum(tile - num_first, 0), gl.maximum(num_lines - num_long, 1), num_streams, section
    )
    rank = gl.where(tile < num_first, tile // num_streams, num_long + rank)
    stream = gl.where(tile < num_first, tile % num_streams, stream)
    i_map = stream // HEADS * mask.stride_batch + stream % HEADS * GROUP * mask.stride_head
    return gl.load(mask.order + i_map * num_lines + rank), stream
