"""Find the blocks of the other axis that a tile visits, and hide the scores that a mask excludes.

A mask of intervals gives two numbers for each index (`intervals_of`, `visible_blocks`). A block map gives a list of
blocks for each line of 128 indices, full blocks first, and the bits of the partial ones; kernels read lists backwards,
so that they visit the partial blocks first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashspan.kernels.hopper.ptx import bit_range, opaque


@gluon.jit
def intervals_of(o_i, num_i, num_j, lo, hi, mask, i_b, TABLE: gl.constexpr):
    """Each index's interval [start, end) on the other axis: computed for a band, read from a table for rows."""
    if TABLE:
        p_start = mask.start + i_b * mask.stride
        p_end = mask.end + i_b * mask.stride
        start = gl.load(p_start + o_i, mask=o_i < num_i, other=0)
        end = gl.load(p_end + o_i, mask=o_i < num_i, other=0)
    else:
        start = gl.minimum(gl.maximum(o_i + lo, 0), num_j)
        end = gl.minimum(gl.maximum(o_i + hi + 1, 0), num_j)
    return start, end


@gluon.jit
def visible_blocks(
    i0, num_i, num_j, lo, hi, mask, i_b, TABLE: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The blocks of the other axis that indices i0 .. i0 + ROWS - 1 visit: (first, first full, end of full, end).

    A block is full when every index sees all of it. There is always at least one block: a tile that sees nothing visits
    one hidden block, and needs no code of its own.
    """
    p_start = mask.start + i_b * mask.stride
    p_end = mask.end + i_b * mask.stride
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


@gluon.jit
def nth_block(j, first, f_lo, f_hi, end):
    """The j-th block to visit of those from `visible_blocks`: those at the edges of the mask first, then full ones."""
    inside = f_lo - first
    edges = inside + end - f_hi
    return gl.where(j >= edges, f_lo + j - edges, gl.where(j < inside, first + j, f_hi + j - inside))


@gluon.jit
def find_list(mask, b, h, line):
    """Return where a line's list begins and ends, how many blocks to visit, and how many of them are partial.

    Lists are read from the end, so the partial blocks are visited first. An empty list counts as one hidden block.
    """
    p_span = mask.spans + ((b * mask.stride_batch + h * mask.stride_head) * mask.num_lines + line) * 3
    begin = gl.load(p_span)
    middle = gl.load(p_span + 1)
    end = gl.load(p_span + 2)
    n = gl.maximum(end - begin, 1)
    return begin, end, n, n - (middle - begin)


@gluon.jit
def find_block(mask, begin, end, i, num_partial):
    """Return the i-th block to visit of a list and, if it is partial, where its words begin. For an empty list that is
    a negative index, at which the copy engine reads 0: all scores are hidden."""
    at = end - 1 - i
    here = at >= begin
    block = gl.load(mask.index + at, mask=here, other=0)
    number = gl.load(mask.numbers + at, mask=here & (i < num_partial), other=-1)
    return block, number * 512


@gluon.jit
def load_words(mask, word, bar, stage, partial):
    """Load a partial block's words: for each of two warpgroups, 64 lines of 128 bits."""
    desc, words_s = mask.desc_words, mask.words_s
    tma.async_copy_global_to_shared(desc, [word], bar, words_s.index(stage * 2), pred=partial)
    tma.async_copy_global_to_shared(desc, [word + 256], bar, words_s.index(stage * 2 + 1), pred=partial)


@gluon.jit
def hide_by_words(s, words_s, half):
    """Scores [64, columns], -inf where a block's words [64, 4] hide them. There are 128 columns, or half of them."""
    ROWS: gl.constexpr = s.shape[0]
    # As after a matmul, a thread has two rows, eight apart; it loads all words of both.
    WL: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    words = words_s._reinterpret(gl.int32, [ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])).load(WL)
    if s.shape[1] == 64:
        low, high = gl.split(gl.permute(gl.reshape(words, [ROWS, 2, 2]), [0, 2, 1]))
        words = gl.where(half == 0, low, high)
    return _show(s, words)


@gluon.jit
def hide_outside(s, start, end, BOTH: gl.constexpr):
    """Scores, -inf outside each row's interval of columns; without BOTH, -inf only from its end on.

    The interval becomes words with a bit per column: that takes half as long as comparing every column with its ends.
    Call it inside a branch, even one that is always taken. Otherwise ptxas computes the words while the scores are
    computed, and the words occupy registers.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    L: gl.constexpr = gl.SliceLayout(2, gl.reshape(s, [s.shape[0], COLUMNS // 32, 32]).type.layout)
    RL: gl.constexpr = gl.SliceLayout(1, L)
    o = gl.arange(0, COLUMNS // 32, layout=gl.SliceLayout(0, L))[None, :] * 32
    size = gl.maximum(gl.convert_layout(end, RL, assert_trivial=True)[:, None] - o, 0)
    if BOTH:
        first = gl.maximum(gl.convert_layout(start, RL, assert_trivial=True)[:, None] - o, 0)
        size = gl.maximum(size - first, 0)
    else:
        first = gl.zeros_like(size)
    return _show(s, bit_range(first, size))


@gluon.jit
def hide_keys(s, start, end, n0, SIDES: gl.constexpr, WORDS: gl.constexpr):
    """Scores of keys from n0 on, -inf where a row does not see the key. Heads of 64 use WORDS, which is faster for
    them; larger heads compare each column."""
    if WORDS:
        s = hide_outside(s, start - n0, end - n0, SIDES == 2)
    else:
        o_n = opaque(0) + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        seen = o_n[None, :] < (end - n0)[:, None]
        if SIDES == 2:
            seen = seen & (o_n[None, :] >= (start - n0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _show(s, words):
    """Scores, -inf where the bit of a column in its row's words is 0."""
    ROWS: gl.constexpr = s.shape[0]
    COLUMNS: gl.constexpr = s.shape[1]
    SL: gl.constexpr = s.type.layout
    scores = gl.reshape(s, [ROWS, COLUMNS // 32, 32])
    L: gl.constexpr = scores.type.layout
    words = gl.convert_layout(words, gl.SliceLayout(2, L), assert_trivial=True)[:, :, None]
    # Bits 1 and 2 of a column's number depend only on the thread: after one shift per word, each bit has a fixed place.
    o = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    seen = ((words >> (o & 6)) & (1 << (o & 25))) != 0
    scores = gl.where(seen, scores, float("-inf"))
    return gl.convert_layout(gl.reshape(scores, [ROWS, COLUMNS]), SL, assert_trivial=True)
