"""Device functions that the forward and backward kernels share: intervals of keys, tiles of memory, dropout's hash.

A mask reaches a kernel as one interval of keys per query (and, transposed, one interval of queries per key): computed
for a band, read from a table for rows. A block of queries then loops over its keys twice. The first loop visits the
full tiles, which all of its rows see, without a mask. The second loop visits the edge tiles on both sides, which are
masked and narrower: a mask needs registers, and a narrow tile covers fewer hidden pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unknown_zero(index):
    """Return 0. No index is negative, but the compiler cannot prove it.

    The compiler does not move an expression that adds this 0. Otherwise it would compute loop invariants before the
    loop, and keep values from the start of a kernel for its end. Both would occupy registers during the loop.
    """
    return index >> 31


@triton.jit
def interval(o_i, num_i, num_j, lo, hi, p_start, p_end, TABLE: tl.constexpr):
    """The interval [start, end) of the other axis that each index of o_i sees; indices past num_i see nothing."""
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
    """For the block of indices o_i: the interval [start, end) of each on the other axis, and the `tile_ranges`."""
    b_start, b_end = interval(o_i, num_i, num_j, lo, hi, p_start, p_end, TABLE)
    edge, num_before, full, full_end, num_after = tile_ranges(b_start, b_end, o_i < num_i, num_j, CONVEX, BLOCK, EDGE)
    return b_start, b_end, edge, num_before, full, full_end, num_after


@triton.jit
def tile_ranges(b_start, b_end, m_i, num_j, CONVEX: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """The full tiles and the edge tiles that cover some intervals; only the intervals where m_i is true count.

    Returns edge, where the first edge tile begins; num_before, the number of edge tiles before the full ones; full and
    full_end, the range of whole BLOCKs that lie in every interval; num_after, the number of edge tiles after it.
    Without CONVEX, an index may not see all of its interval, so every tile is an edge tile.
    """
    edge = (tl.min(b_start, 0) // EDGE) * EDGE
    end = tl.maximum(tl.max(b_end, 0), edge)
    full = tl.cdiv(tl.max(tl.where(m_i, b_start, 0), 0), EDGE) * EDGE
    full_end = tl.min(tl.where(m_i, b_end, num_j), 0)
    full_end = full + tl.maximum(full_end - full, 0) // BLOCK * BLOCK
    if full >= full_end or not CONVEX:  # there are edge tiles only
        full = edge + tl.cdiv(end - edge, EDGE) * EDGE
        full_end = full
    num_before = (full - edge) // EDGE
    num_after = tl.cdiv(tl.maximum(end - full_end, 0), EDGE)
    return edge, num_before, full, full_end, num_after


@triton.jit
def key_block(i, K, S, BN: tl.constexpr):
    """Batch, key head and first key of program i. The first keys come first: with a causal mask, most queries see
    them."""
    num_n = tl.cdiv(S, BN)
    i_bk = i // num_n
    return (i_bk // K).to(tl.int64), i_bk % K, i % num_n * BN


@triton.jit
def query_block(i, H, T, BM: tl.constexpr, LAST_FIRST: tl.constexpr = True):
    """Batch, head and first query of program i. LAST_FIRST: the last queries come first, because with a causal mask,
    they see the most keys."""
    num_m = tl.cdiv(T, BM)
    i_bh = i // num_m
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    return i_b, i_h, (num_m - 1 - i % num_m if LAST_FIRST else i % num_m) * BM


@triton.jit
def edge_tile(i_tile, edge, num_before, full_end, EDGE: tl.constexpr):
    """Where edge tile number i_tile begins. The tiles before the full ones come first, then those after them."""
    return tl.where(i_tile < num_before, edge + i_tile * EDGE, full_end + (i_tile - num_before) * EDGE)


@triton.jit
def visible(o, b_start, b_end, BITS: tl.constexpr):
    """bool [rows, len(o)]: whether each row sees columns o, those from its b_start to its b_end.

    BITS: instead, b_start are pointers to the packed bits of each row, and b_end is the tile's first column in them.
    Each word is loaded once, not once for each of its columns.
    """
    if BITS:
        tl.static_assert(o.shape[0] <= 64)
        o_bit = tl.arange(0, o.shape[0])
        p_word = b_start + b_end // 32
        if o.shape[0] <= 32:
            b_word = tl.load(p_word)[:, None]
        else:
            b_word = tl.where((o_bit < 32)[None, :], tl.load(p_word)[:, None], tl.load(p_word + 1)[:, None])
        m_s = ((b_word >> ((b_end + o_bit) % 32)[None, :]) & 1) != 0
    else:
        m_s = (o[None, :] >= b_start[:, None]) & (o[None, :] < b_end[:, None])
    return m_s


@triton.jit
def next_line(i, p_order, num_lines, num_long, num_streams, s_batch, s_head, HEADS, GROUP, SPLIT: tl.constexpr):
    """Batch, head, line and part of the line for program i, and the number of its map's first line.

    The long lines of all batches and heads (streams) come first, so that none starts late; the rest is ordered by
    stream.
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
    """The first entry of a list of blocks, 0 if it is empty; `full_tile` loads the following ones."""
    return tl.load(p_index + begin, mask=begin < end, other=0)


@triton.jit
def full_tile(i, block, p_blocks, num_tiles, OTHER: tl.constexpr, WIDTH: tl.constexpr):
    """Where tile i of the full blocks begins, given the block it lies in, and the block of tile i + 1.

    The block is loaded one iteration ahead: the address of a tile then depends on no load of its own iteration, and
    Triton pipelines the tiles as deep as those of a dense loop.
    """
    start = block * OTHER + i % (OTHER // WIDTH) * WIDTH
    return start, tl.load(p_blocks + tl.minimum(i + 1, num_tiles - 1) // (OTHER // WIDTH))


@triton.jit
def partial_tile(i, middle, index, OTHER: tl.constexpr, WIDTH: tl.constexpr):
    """Where tile i of a line's partial blocks begins, its column in the block, and the block's place in the lists."""
    place, column = middle + i // (OTHER // WIDTH), i % (OTHER // WIDTH) * WIDTH
    return tl.load(index + place) * OTHER + column, column, place


@triton.jit
def block_bits(bits, tiles, place, LINE: tl.constexpr, OTHER: tl.constexpr):
    """A pointer to the bits of the partial block at a place in the lists."""
    return bits + tl.load(tiles + place).to(tl.int64) * (LINE * OTHER // 32)


@triton.jit
def load_span(spans, line):
    """Begin, middle and end of a line's list: full blocks are begin..middle, partial ones middle..end."""
    p_span = spans + line * 3
    return tl.load(p_span), tl.load(p_span + 1), tl.load(p_span + 2)


@triton.jit
def load_tile(
    p, row, o_row, stride, num_rows, D: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr,
    RECOMPUTE: tl.constexpr = False,
):  # fmt: skip
    """Rows row + o_row of a [*, D] matrix as [len(o_row), BD], 0 past D and, with CHECK, past num_rows.

    With RECOMPUTE, the offsets inside the tile are computed in each iteration, and occupy no registers in between.
    """
    o_d = tl.arange(0, BD)
    # The start of the tile needs 64 bits: a long sequence exceeds 2^31 elements. Offsets inside the tile fit in 32.
    o_inside = o_row + unknown_zero(row) if RECOMPUTE else o_row
    p_tile = p + tl.cast(row, tl.int64) * stride + (o_inside[:, None] * stride + o_d[None, :])
    if CHECK and D == BD:
        b = tl.load(p_tile, mask=(row + o_row < num_rows)[:, None], other=0.0)
    elif CHECK:
        b = tl.load(p_tile, mask=(row + o_row < num_rows)[:, None] & (o_d < D)[None, :], other=0.0)
    elif D == BD:
        b = tl.load(p_tile)
    else:
        b = tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)
    return b


@triton.jit
def sliced_matmul(
    p_a, row_a, o_a, s_a, num_a, p_b, row_b, o_b, s_b, num_b, D: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr
):
    """a b^T for rows of two [*, D] matrices, BC columns at a time, for heads too large for registers."""
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
    if row < num_rows:  # a branch, so that no address occupies a register while the load above is in flight
        o_d = tl.arange(0, BD)
        p_tile = p + tl.cast(row, tl.int64) * stride + (o_row[:, None] * stride + o_d[None, :])
        m_tile = (row + o_row < num_rows)[:, None] & (o_d < D)[None, :]
        tl.store(p_tile, b.to(p.dtype.element_ty), mask=m_tile)


@triton.jit
def finite(b):
    """b with 0 for inf and NaN, so that a key that is masked out does not affect a matmul, not even as 0 * NaN."""
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
def dropout_word(word, o, p_positions, num, POSITIONS: tl.constexpr):
    """The hash of the global position of each row or column: of o itself, or of a table's entry with POSITIONS."""
    if POSITIONS:
        o = tl.load(p_positions + o, mask=o < num, other=0)
    return mix(word + o.to(tl.uint32))


@triton.jit
def prefetch_rows(p, o, stride, D: tl.constexpr):
    """Bring rows o of a tensor into the L2 cache. p points to its first row."""
    LINE: tl.constexpr = 1024 // p.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(D, LINE))
    o_line = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    p_lines = (p + o.to(tl.int64)[:, None] * stride + o_line[None, :]).to(tl.int64)
    prefetch(p_lines)


@triton.jit
def prefetch(p_lines):
    """Bring the 128-byte lines at these addresses, int64, into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_lines], dtype=tl.int32, is_pure=False, pack=1
    )
