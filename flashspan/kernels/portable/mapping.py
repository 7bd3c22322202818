"""A block map from a bool tensor on a GPU: its lists and bits, for about two readings of the tensor.

Each tile is read once for what it is: empty, full, or partial with a hash of its bits. The hashes sorted, each partial
tile is read once more: the first of its kind writes its bits, both ways, and the others are compared with the one
before them. Then a program for each line lists it. The host waits twice: for the sizes, and for the comparison.

The map is the one that tiling.py and bits.py make, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels import bits as packed
from flashspan.kernels.portable.arguments import Launch, on
from flashspan.kernels.tiling import HIDDEN, LONG, VISIBLE, Lists

NO_BITS = tl.constexpr(2**63 - 1)
"""The hash of tiles without bits: they come last."""

EMPTY_TILE, FULL_TILE = tl.constexpr(HIDDEN), tl.constexpr(VISIBLE)

STEP = 128
"""How many lines, or tiles of a line, a program looks at together when it lists one."""

odd_numbers = functools.cache(packed.odd_numbers)

FREE = [
    *("H", "T", "S", "num_q", "num_k", "num_lines", "num_other", "num_all", "long_times_all", "s_line", "s_other"),
    *("row_counts", "column_counts", "counts", "num_long", "found"),  # parts of one tensor, on 16 bytes or not
]
"""Arguments by whose value no kernel is compiled anew."""


@triton.jit
def load_quads(
    visible, i_tile, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k,
    QUADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile as uint32 [BM, BN / 4]: the bools of four neighbouring keys, a byte each; past the ends, False.

    QUADS: the tensor is given as such words. EVEN: no tile reaches past an end.
    """
    i_map = i_tile // (num_q * num_k)
    i_b, i_h = (i_map // H).to(tl.int64), (i_map % H).to(tl.int64)
    o_m = (i_tile // num_k % num_q) * BM + tl.arange(0, BM)
    o_n = (i_tile % num_k) * (BN // 4) + tl.arange(0, BN // 4)
    p_row = visible + i_b * s_b + i_h * s_h + o_m.to(tl.int64)[:, None] * s_t
    if QUADS:
        if EVEN:
            b_quads = tl.load(p_row + o_n[None, :])
        else:
            b_quads = tl.load(p_row + o_n[None, :], mask=(o_m < T)[:, None] & (o_n * 4 < S)[None, :], other=0)
        b_quads = b_quads.to(tl.uint32, bitcast=True)
    else:
        b_quads = tl.zeros([BM, BN // 4], tl.uint32)
        for i in tl.static_range(4):
            o_key = o_n * 4 + i
            p_key = p_row + o_key.to(tl.int64)[None, :] * s_s
            b_key = tl.load(p_key, mask=(o_m < T)[:, None] & (o_key < S)[None, :], other=0)
            b_quads |= b_key.to(tl.uint32) << (8 * i)
    return b_quads


@triton.jit
def pack_rows(b_quads, BM: tl.constexpr, BN: tl.constexpr):
    """The words of bits.py, int32 [BM, BN / 32]."""
    # The product moves byte i's bit to 24 + i, and no two of its terms meet: nothing carries.
    b_four = (b_quads * 0x01020408) >> 24
    b_four = tl.reshape(b_four, [BM, BN // 32, 8]) << (4 * tl.arange(0, 8)).to(tl.uint32)[None, None, :]
    return tl.sum(b_four, 2).to(tl.int32, bitcast=True)


@triton.jit
def pack_columns(b_quads, BM: tl.constexpr, BN: tl.constexpr):
    """The words of the transposed tile, itself transposed: int32 [BM / 32, BN]."""
    b_rows = tl.reshape(b_quads, [BM // 8, 8, BN // 4]) << tl.arange(0, 8).to(tl.uint32)[None, :, None]
    b_octets = tl.sum(b_rows, 1)  # [BM / 8, BN / 4], eight queries of each of four keys
    o_byte = (8 * tl.arange(0, 4)).to(tl.uint32)
    b_octets = (b_octets[:, :, None] >> o_byte[None, None, :]) & 255
    b_octets = tl.reshape(b_octets, [BM // 32, 4, BN]) << o_byte[None, :, None]
    return tl.sum(b_octets, 1).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=FREE)
def classify_kernel(
    visible, odd, grid, hashes, row_counts, column_counts, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k,
    QUADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile: what it is, its hash, and one more full or partial tile in its two lines."""
    i_tile = tl.program_id(0)
    b_quads = load_quads(visible, i_tile, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k, QUADS, EVEN, BM, BN)
    b_words = pack_rows(b_quads, BM, BN)
    b_flat = tl.reshape(b_words, [BM * BN // 32])
    i_map = i_tile // (num_q * num_k)
    p_row = row_counts + (i_tile // num_k) * 2
    p_column = column_counts + (i_map * num_k + i_tile % num_k) * 2
    low, high = tl.min(b_flat, 0), tl.max(b_flat, 0)
    if (low == -1) & (high == -1):
        tl.store(grid + i_tile, FULL_TILE)
        tl.store(hashes + i_tile, NO_BITS)
        tl.atomic_add(p_row, 1)
        tl.atomic_add(p_column, 1)
    elif (low == 0) & (high == 0):
        tl.store(grid + i_tile, EMPTY_TILE)
        tl.store(hashes + i_tile, NO_BITS)
    else:
        b_odd = tl.load(odd + tl.arange(0, BM * BN // 32))
        tl.store(hashes + i_tile, tl.minimum(tl.sum(b_flat.to(tl.int64) * b_odd, 0), NO_BITS - 1))
        tl.atomic_add(p_row + 1, 1)
        tl.atomic_add(p_column + 1, 1)


@triton.jit(do_not_specialize=FREE)
def bits_kernel(
    visible, order, number, grid, bits, bits_t, found, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k,
    QUADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A partial tile, by the order of hashes: its bits, or that they are those of the one before."""
    i = tl.program_id(0)
    i_tile = tl.load(order + i).to(tl.int32)
    i_bits = tl.load(number + i)
    tl.store(grid + i_tile, i_bits)
    b_quads = load_quads(visible, i_tile, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k, QUADS, EVEN, BM, BN)
    before = tl.maximum(i - 1, 0)
    if (i > 0) & (tl.load(number + before) == i_bits):
        i_other = tl.load(order + before).to(tl.int32)
        b_other = load_quads(visible, i_other, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k, QUADS, EVEN, BM, BN)
        b_differs = tl.reshape((b_quads != b_other).to(tl.int32), [BM * BN // 4])
        if tl.max(b_differs, 0) != 0:
            tl.store(found, 1)
    else:
        p_bits = i_bits.to(tl.int64) * (BM * BN // 32)
        o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
        o_word, o_word_t = tl.arange(0, BN // 32), tl.arange(0, BM // 32)
        b_words = pack_rows(b_quads, BM, BN)
        tl.store(bits + p_bits + o_m[:, None] * (BN // 32) + o_word[None, :], b_words)
        b_words_t = tl.trans(pack_columns(b_quads, BM, BN))  # [BN, BM / 32]
        tl.store(bits_t + p_bits + o_n[:, None] * (BM // 32) + o_word_t[None, :], b_words_t)


@triton.jit(do_not_specialize=FREE)
def lists_kernel(
    grid, counts, spans, index, tile, order, num_long, num_lines, num_other, num_all, long_times_all, s_line, s_other,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A line, of num_all in all maps: its tiles, where they lie among all lines', and its place by length."""
    i_all = tl.program_id(0)
    i_map, i_line = i_all // num_lines, i_all % num_lines
    num_full = tl.load(counts + i_all * 2)
    length = num_full + tl.load(counts + i_all * 2 + 1)
    o = tl.arange(0, BLOCK)

    b_before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, i_all, BLOCK):
        o_all = first + o
        b_before += tl.load(counts + o_all * 2, mask=o_all < i_all, other=0)
        b_before += tl.load(counts + o_all * 2 + 1, mask=o_all < i_all, other=0)
    begin = tl.sum(b_before, 0)
    tl.store(spans + i_all * 3, begin)
    tl.store(spans + i_all * 3 + 1, begin + num_full)
    tl.store(spans + i_all * 3 + 2, begin + length)

    b_longer = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_lines, BLOCK):
        o_line = first + o
        p_line = counts + (i_map * num_lines + o_line) * 2
        b_length = tl.load(p_line, mask=o_line < num_lines, other=-1)
        b_length += tl.load(p_line + 1, mask=o_line < num_lines, other=0)
        b_longer += ((b_length > length) | ((b_length == length) & (o_line < i_line))).to(tl.int32)
    place = tl.sum(b_longer, 0)
    tl.store(order + i_map * num_lines + place, i_line)
    if length.to(tl.int64) * num_all > long_times_all:
        tl.atomic_max(num_long, place + 1)

    p_tile = grid + i_map * num_lines * num_other + i_line * s_line
    at_full, at_partial = begin, begin + num_full
    for first in range(0, num_other, BLOCK):
        o_other = first + o
        b_tile = tl.load(p_tile + o_other * s_other, mask=o_other < num_other, other=EMPTY_TILE)
        b_full, b_partial = (b_tile == FULL_TILE).to(tl.int32), (b_tile >= 0).to(tl.int32)
        b_to = tl.where(b_tile >= 0, at_partial + tl.cumsum(b_partial, 0), at_full + tl.cumsum(b_full, 0)) - 1
        tl.store(index + b_to, o_other, mask=b_tile != EMPTY_TILE)
        tl.store(tile + b_to, tl.maximum(b_tile, 0), mask=b_tile != EMPTY_TILE)
        at_full += tl.sum(b_full, 0)
        at_partial += tl.sum(b_partial, 0)


def map_dense(visible: Tensor, block: tuple[int, int]) -> tuple[Lists, Lists, Tensor, Tensor] | None:
    """Rows, columns, bits and transposed bits (blocks.py) of bool [B, H, T, S], none of them 0 long, of any strides.

    None where two tiles have one hash.
    """
    num_b, num_h, num_queries, num_keys = visible.shape
    block_q, block_k = block
    num_q, num_k = -(-num_queries // block_q), -(-num_keys // block_k)
    num_maps = num_b * num_h
    counts = visible.new_zeros(num_maps * (num_q + num_k) * 2 + 3, dtype=torch.int32)
    row_counts, column_counts, found = counts.split([num_maps * num_q * 2, num_maps * num_k * 2, 3])
    grid = visible.new_empty(num_b, num_h, num_q, num_k, dtype=torch.int32)
    hashes = visible.new_empty(grid.numel(), dtype=torch.int64)
    odd = odd_numbers(block_q * block_k // packed.WORD, visible.device)
    with on(visible.device):
        classify_launch(visible, block, odd, grid, hashes, row_counts, column_counts)()
        hashes, order = hashes.sort(stable=True)
        number = torch.zeros_like(order, dtype=torch.int32)
        torch.cumsum(hashes[1:] != hashes[:-1], 0, dtype=torch.int32, out=number[1:])
        sizes = torch.cat([row_counts.view(-1, 2).sum(0), number[-1:]])
        num_full, num_partial, last = sizes.tolist()
        # Tiles that are not partial are the last kind of all, where there are any.
        num_bits = last + (num_partial == len(order))
        bits = grid.new_empty(num_bits, block_q, block_k // packed.WORD)
        bits_t = grid.new_empty(num_bits, block_k, block_q // packed.WORD)
        if num_partial:
            bits_launch(visible, block, num_partial, order, number, grid, bits, bits_t, found)()
        lines = []
        for line_counts, walk, num_long in (
            (row_counts, grid, found[1:]),
            (column_counts, grid.transpose(2, 3), found[2:]),
        ):
            made = (
                grid.new_empty(*walk.shape[:3], 3),
                grid.new_empty(num_full + num_partial),
                grid.new_empty(num_full + num_partial),
                grid.new_empty(walk.shape[:3]),
            )
            lists_launch(walk, line_counts, made, num_long)()
            lines.append(made)
    differs, long_rows, long_columns = found.tolist()
    return None if differs else (Lists(long_rows, *lines[0]), Lists(long_columns, *lines[1]), bits, bits_t)


def classify_launch(
    visible: Tensor, block: tuple[int, int], odd: Tensor, grid: Tensor, hashes: Tensor, row_counts: Tensor,
    column_counts: Tensor,
) -> Launch:  # fmt: skip
    """The first reading."""
    words, numbers, constants = _tiles(visible, block)
    tensors = (words, odd, grid, hashes, row_counts, column_counts)
    return Launch(classify_kernel, (grid.numel(),), (*tensors, *numbers), constants)


def bits_launch(
    visible: Tensor, block: tuple[int, int], num_partial: int, order: Tensor, number: Tensor, grid: Tensor,
    bits: Tensor, bits_t: Tensor, found: Tensor,
) -> Launch:  # fmt: skip
    """The second, of partial tiles."""
    words, numbers, constants = _tiles(visible, block)
    tensors = (words, order, number, grid, bits, bits_t, found)
    return Launch(bits_kernel, (num_partial,), (*tensors, *numbers), constants)


def lists_launch(walk: Tensor, counts: Tensor, made: Sequence[Tensor], num_long: Tensor) -> Launch:
    """Of a grid of which each line is to be walked, to spans, index, tile and order."""
    num_b, num_h, num_lines, num_other = walk.shape
    num_all = num_b * num_h * num_lines
    numbers = (num_lines, num_other, num_all, LONG * len(made[1]), walk.stride(2), walk.stride(3))
    return Launch(lists_kernel, (num_all,), (walk, counts, *made, num_long, *numbers), {"BLOCK": STEP})


def _tiles(visible: Tensor, block: tuple[int, int]) -> tuple[Tensor, tuple[int, ...], dict[str, int]]:
    """The tensor as the kernels read it, its numbers, and their constants."""
    (_, num_h, num_queries, num_keys), (block_q, block_k) = visible.shape, block
    rows_fit = all(stride % 4 == 0 for stride in visible.stride()[:3])
    quads = visible.stride(3) == 1 and num_keys % 4 == 0 and rows_fit and visible.data_ptr() % 4 == 0
    words = visible.view(torch.int32 if quads else torch.uint8)
    num_q, num_k = -(-num_queries // block_q), -(-num_keys // block_k)
    even = num_queries % block_q == 0 and num_keys % block_k == 0
    constants = {"QUADS": quads, "EVEN": even, "BM": block_q, "BN": block_k}
    return words, (*words.stride(), num_h, num_queries, num_keys, num_q, num_k), constants
