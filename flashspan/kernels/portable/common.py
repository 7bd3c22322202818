"""What the forward and backward kernels share: intervals of a block, tiles of memory, dropout's hash.

A mask reaches a kernel as one interval of keys per query (and, transposed, one interval of queries per key): for a band
by arithmetic, for rows from a table. A block of queries then walks its keys in two loops: the tiles all of its rows
see, with no masking at all, and the edges on both sides, masked, in narrower tiles: a mask takes registers, and a
narrow tile wastes less of the border it covers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unknown_zero(index):
    """0, for no index is negative; but the compiler cannot know that.

    What is computed with it stays where it is written. Otherwise all that does not change in a loop would be computed
    before it and kept in registers all the while, and so would what the loop's end needs, if the beginning had it too.
    """
    return index >> 31


@triton.jit
def interval(o_i, num_i, num_j, lo, hi, p_start, p_end, TABLE: tl.constexpr):
    """What each of the indices o_i sees of the other axis, [start, end); indices past num_i see nothing."""
    if TABLE:
        b_start = tl.load(p_start + o_i, mask=o_i < num_i, other=0)
        b_end = tl.load(p_end + o_i, mask=o_i < num_i, other=0)
    else:
        b_start = tl.minimum(tl.maximum(o_i + lo, 0), num_j)
        b_end = tl.minimum(tl.maximum(o_i + hi + 1, 0), num_j)
    return tl.where(o_i < num_i, b_start, num_j), tl.where(o_i < num_i, b_end, 0)


@triton.jit
def block_interval(
    o_i, num_i, num_j, lo, hi, p_start, p_end, TABLE: tl.constexpr, CONVEX: tl.constexpr, BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """For the block of indices o_i: each one's interval [start, end) on the other axis, and the tiles to walk.

    Returns start, end [len(o_i)]; near, where the first edge tile begins; inside, how many edge tiles lie before the
    full ones; full and full_end, the stretch of whole BLOCKs that every index sees; outside, the number of edge tiles
    behind it. Indices past num_i see nothing and hinder nobody. Without CONVEX intervals are only hulls: none is full.
    """
    b_start, b_end = interval(o_i, num_i, num_j, lo, hi, p_start, p_end, TABLE)
    near, inside, full, full_end, outside = tiles_to_walk(b_start, b_end, o_i < num_i, num_j, CONVEX, BLOCK, EDGE)
    return b_start, b_end, near, inside, full, full_end, outside


@triton.jit
def tiles_to_walk(b_start, b_end, m_i, num_j, CONVEX: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """near, inside, full, full_end and outside of `block_interval`, of intervals that count where m_i is true."""
    near = (tl.min(b_start, 0) // EDGE) * EDGE
    far = tl.maximum(tl.max(b_end, 0), near)
    full = tl.cdiv(tl.max(tl.where(m_i, b_start, 0), 0), EDGE) * EDGE
    full_end = tl.min(tl.where(m_i, b_end, num_j), 0)
    full_end = full + tl.maximum(full_end - full, 0) // BLOCK * BLOCK
    if full >= full_end or not CONVEX:  # everything is edge
        full = near + tl.cdiv(far - near, EDGE) * EDGE
        full_end = full
    inside = (full - near) // EDGE
    outside = tl.cdiv(tl.maximum(far - full_end, 0), EDGE)
    return near, inside, full, full_end, outside


@triton.jit
def key_block(i, K, S, BN: tl.constexpr):
    """Program i's batch, key head and first key. The first keys go first: a causal mask shows them to most queries."""
    num_n = tl.cdiv(S, BN)
    i_bk = i // num_n
    return (i_bk // K).to(tl.int64), i_bk % K, i % num_n * BN


@triton.jit
def query_block(i, H, T, BM: tl.constexpr):
    """Program i's batch, head and first query. The last queries go first: a causal mask shows them most keys."""
    num_m = tl.cdiv(T, BM)
    i_bh = i // num_m
    return (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), (num_m - 1 - i % num_m) * BM


@triton.jit
def edge_tile(i_tile, near, inside, full_end, EDGE: tl.constexpr):
    """Where edge tile number i_tile begins: the ones before the full tiles first, then those behind."""
    return tl.where(i_tile < inside, near + i_tile * EDGE, full_end + (i_tile - inside) * EDGE)


@triton.jit
def bit_tile(p_rows, column, WIDTH: tl.constexpr):
    """bool [rows, WIDTH] from packed bits: p_rows points at each row's words, the tile begins at this column of them.

    A row's word is loaded once, not once for each of its columns.
    """
    tl.static_assert(WIDTH <= 64)
    o = tl.arange(0, WIDTH)
    p_word = p_rows + column // 32
    if WIDTH <= 32:
        b_word = tl.load(p_word)[:, None]
    else:
        b_word = tl.where((o < 32)[None, :], tl.load(p_word)[:, None], tl.load(p_word + 1)[:, None])
    return ((b_word >> ((column + o) % 32)[None, :]) & 1) != 0


@triton.jit
def next_line(i, p_order, num_lines, num_long, num_streams, s_batch, s_head, HEADS, GROUP, SPLIT: tl.constexpr):
    """Which stream (a batch and a head), line and part of it program i does, and its map's first line.

    The longest lines of every stream come first, so that none of them starts late; then stream by stream.
    """
    i_part = i % SPLIT
    i = i // SPLIT
    num_first = num_long * num_streams
    num_rest = tl.maximum(num_lines - num_long, 1)
    i_stream = tl.where(i < num_first, i % num_streams, (i - num_first) // num_rest)
    i_rank = tl.where(i < num_first, i // num_streams, num_long + (i - num_first) % num_rest)
    i_b, i_h = (i_stream // HEADS).to(tl.int64), (i_stream % HEADS).to(tl.int64)
    first_line = (i_b * s_batch + i_h * GROUP * s_head) * num_lines
    i_line = tl.load(p_order + first_line + i_rank)
    return i_b, i_h, i_line, i_part, first_line


@triton.jit
def first_block(p_index, begin, end):
    """The first entry of a list, 0 if it is empty. Each turn of a loop over the list loads the next turn's entry.

    A tile's address then depends on no load of its own turn, and Triton pipelines the tiles as deep as a dense loop's.
    """
    return tl.load(p_index + begin, mask=begin < end, other=0)


@triton.jit
def load_tile(
    p, row, o_row, stride, num_rows, D: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr, ANEW: tl.constexpr = False
):
    """Rows row + o_row of a [*, D] matrix as [len(o_row), BD], 0 past D and, with CHECK, past num_rows.

    With ANEW the offsets inside the tile are worked out each time, where they would take registers that a loop has not.
    """
    o_d = tl.arange(0, BD)
    # Where the tile begins takes 64 bits, a long sequence passes 2^31 elements; offsets inside it fit in 32.
    o_near = o_row + unknown_zero(row) if ANEW else o_row
    p_tile = p + tl.cast(row, tl.int64) * stride + (o_near[:, None] * stride + o_d[None, :])
    if CHECK:
        if D == BD:
            b = tl.load(p_tile, mask=(row + o_row < num_rows)[:, None], other=0.0)
        else:
            b = tl.load(p_tile, mask=(row + o_row < num_rows)[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        if D == BD:
            b = tl.load(p_tile)
        else:
            b = tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)
    return b


@triton.jit
def sliced_product(
    p_a, row_a, o_a, s_a, num_a, p_b, row_b, o_b, s_b, num_b, D: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr
):
    """a b^T of rows of two [*, D] matrices, BC columns at a time: for heads too large to hold while multiplying."""
    b_s = tl.zeros([o_a.shape[0], o_b.shape[0]], tl.float32)
    for d0 in tl.range(0, D, BC, num_stages=1):
        o_d = d0 + tl.arange(0, BC)
        p_at = p_a + tl.cast(row_a, tl.int64) * s_a + (o_a[:, None] * s_a + o_d[None, :])
        p_bt = p_b + tl.cast(row_b, tl.int64) * s_b + (o_b[:, None] * s_b + o_d[None, :])
        b_a = tl.load(p_at, mask=(row_a + o_a < num_a)[:, None] & (o_d < D)[None, :], other=0.0)
        b_b = tl.load(p_bt, mask=(row_b + o_b < num_b)[:, None] & (o_d < D)[None, :], other=0.0)
        b_s = tl.dot(b_a, tl.trans(b_b), b_s, input_precision=PRECISION)
    return b_s


@triton.jit
def store_tile(p, row, o_row, stride, num_rows, b, D: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr):
    """Write (or add) b [len(o_row), BD] to rows row + o_row of a [*, D] matrix, within num_rows and D."""
    if ADD:
        b += load_tile(p, row, o_row, stride, num_rows, D, BD, True, True)
    if row < num_rows:  # behind a branch, so that no address is held while the tile above is on its way
        o_d = tl.arange(0, BD)
        p_tile = p + tl.cast(row, tl.int64) * stride + (o_row[:, None] * stride + o_d[None, :])
        m_tile = (row + o_row < num_rows)[:, None] & (o_d < D)[None, :]
        tl.store(p_tile, b.to(p.dtype.element_ty), mask=m_tile)


@triton.jit
def finite(b):
    """b with 0 for inf and NaN: a key that is masked out must not reach a product, not even as 0 * NaN."""
    return tl.where(b.to(tl.float32) * 0.0 == 0.0, b, 0.0)


@triton.jit
def mix(x):
    """dropout.mix on uint32: a 32-bit integer hash with full avalanche."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_stream(p_seed, stream):
    """The two words a (batch, head) begins with: one for its rows, one for its columns."""
    seed = tl.load(p_seed)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mix(low ^ mix(stream.to(tl.uint32))), mix(high)


@triton.jit
def dropout_word(word, o, p_positions, num, POSITIONS: tl.constexpr):
    """The hash of each row or column: of its global position, local index o unless a table says otherwise."""
    if POSITIONS:
        o = tl.load(p_positions + o, mask=o < num, other=0)
    return mix(word + o.to(tl.uint32))
