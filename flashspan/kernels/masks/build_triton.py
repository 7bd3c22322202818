"""A block map from a bool tensor on a GPU: its lists and bits, in three launches that read the tensor once.

`classify`: a program per tile finds whether it is empty, full or partial. For a partial tile it stores the bits, by
query and by key, and puts a hash of them into a table, at the slot of the hash's leading bits or the next free one.
Keys in the table are therefore sorted, except within runs of occupied slots. `measure` numbers the distinct hashes by
counting slots, compares tiles with equal hashes bit by bit, and finds the length and place of each line. Then the host
waits, once, for the sizes of the tensors to allocate. `write`: a program per line writes its list, and a program per
distinct tile writes its bits.

The map equals that of block_map.py and bits.py bit for bit. masks/runs.py first determines whether a map is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.masks import bits as packed
from flashspan.kernels.masks.block_map import HIDDEN, LONG, VISIBLE, Lists

EMPTY_TILE, FULL_TILE, LONG_LINE = tl.constexpr(HIDDEN), tl.constexpr(VISIBLE), tl.constexpr(LONG)

STEP = 128
"""Tiles of a line that a program reads at a time."""

SPAN = 1024
"""Counters, or slots of the table, that a program reads at a time."""

COMPARED = 8
"""Tiles of a program. Each is compared with the first tile that has the same hash."""

SLOTS_PER_TILE = 4
"""Slots in the table for each tile, so that the slot of a hash is seldom occupied."""

odd_numbers = functools.cache(packed.odd_numbers)

FREE = [
    *("H", "T", "num_q", "num_k", "num_maps", "num_tiles", "num_slots", "num_spans", "shift", "half"),
    *("counts", "filled", "found"),  # parts of one tensor, aligned to 16 bytes or not
]
"""Arguments whose values do not specialise a kernel: no value gets a compiled kernel of its own."""


@triton.jit
def query_order(BM: tl.constexpr):
    """The queries of a tile in loading order. Eight consecutive queries are BM / 8 places apart, so that one thread
    holds all eight and packs their bits in registers."""
    o = tl.arange(0, BM)
    return (o % (BM // 8)) * 8 + o // (BM // 8)


@triton.jit
def load_quads(p_row, o_n, m_row, s_s, S, QUADS: tl.constexpr, EVEN: tl.constexpr):
    """Load keys 4 o_n .. 4 o_n + 3 of rows as uint32 [rows, len(o_n)], a byte for each bool; False past the ends.

    QUADS: the tensor is passed as such words. EVEN: no tile reaches past an end.
    """
    if QUADS:
        if EVEN:
            b_quads = tl.load(p_row[:, None] + o_n[None, :])
        else:
            b_quads = tl.load(p_row[:, None] + o_n[None, :], mask=m_row[:, None] & (o_n < S // 4)[None, :], other=0)
        b_quads = b_quads.to(tl.uint32, bitcast=True)
    else:
        b_quads = tl.zeros([p_row.shape[0], o_n.shape[0]], tl.uint32)
        for i in tl.static_range(4):
            o_key = o_n * 4 + i
            p_key = p_row[:, None] + o_key.to(tl.int64)[None, :] * s_s
            b_key = tl.load(p_key, mask=m_row[:, None] & (o_key < S)[None, :], other=0)
            b_quads |= b_key.to(tl.uint32) << (8 * i)
    return b_quads


@triton.jit
def pack_quads(b_quads):
    """The words of bits.py, int32 [rows, quads / 8]."""
    # The multiplication moves the bit of byte i to bit 24 + i; no two terms overlap, so there is no carry.
    b_four = (b_quads * 0x01020408) >> 24
    b_four = tl.reshape(b_four, [b_quads.shape[0], b_quads.shape[1] // 8, 8])
    return tl.sum(b_four << (4 * tl.arange(0, 8)).to(tl.uint32)[None, None, :], 2).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=FREE)
def classify_kernel(
    visible, odd, words, grid, owner, table, counts, filled, s_b, s_h, s_t, s_s, H, T, S, num_q, num_k, num_maps,
    shift, half, QUADS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Find a tile's kind, count it in its two lines and, if it is partial, write its bits and its slot in the table."""
    i_tile = tl.program_id(0)
    i_row, i_map = i_tile // num_k, i_tile // (num_q * num_k)
    i_b, i_h = (i_map // H).to(tl.int64), (i_map % H).to(tl.int64)
    o_order = query_order(BM)
    o_m = (i_row % num_q) * BM + o_order
    o_n = (i_tile % num_k) * (BN // 4) + tl.arange(0, BN // 4)
    p_row = visible + i_b * s_b + i_h * s_h + o_m.to(tl.int64) * s_t
    b_quads = load_quads(p_row, o_n, o_m < T, s_s, S, QUADS, EVEN)
    b_words = pack_quads(b_quads)  # [BM, BN / 32]

    # One sum holds two counts: the words with a visible pair, and, 16 bits higher, the words with a hidden pair.
    kinds = tl.sum((b_words != 0).to(tl.int32) + ((b_words != -1).to(tl.int32) << 16))
    shows, hides = (kinds & 65535) != 0, (kinds >> 16) != 0
    if shows:
        one = tl.where(hides, 1 << 32, 1).to(tl.int64)
        tl.atomic_add(counts + i_row, one, sem="relaxed")
        tl.atomic_add(counts + num_maps * num_q + i_map * num_k + i_tile % num_k, one, sem="relaxed")
    if shows & hides:
        o_word = tl.arange(0, BN // 32)
        p_words = words + i_tile.to(tl.int64) * (BM * BN // 16)
        tl.store(p_words + tl.arange(0, BM)[:, None] * (BN // 32) + o_word[None, :], b_words)
        b_octets = tl.reshape(b_quads, [8, BM // 8, BN // 4]) << tl.arange(0, 8).to(tl.uint32)[:, None, None]
        # [BM / 8, BN / 4]: a byte is eight queries of a key, a word those of four keys.
        b_octets = tl.sum(b_octets, 0).to(tl.int32, bitcast=True)
        p_octets = p_words + BM * BN // 32 + tl.arange(0, BM // 8)[:, None] * (BN // 4)
        tl.store(p_octets + tl.arange(0, BN // 4)[None, :], b_octets)

        b_odd = tl.load(odd + o_order[:, None] * (BN // 32) + o_word[None, :])
        key = tl.sum(b_words.to(tl.int64) * b_odd)
        free = key * 0  # the value of a free slot
        key = tl.where(key == 0, 1, key)
        slot = (key >> shift).to(tl.int32) + half  # half of the keys are negative
        holder = tl.atomic_cas(table + slot, free, key, sem="relaxed")
        while (holder != 0) & (holder != key):
            slot += 1
            holder = tl.atomic_cas(table + slot, free, key, sem="relaxed")
        if holder == 0:
            tl.store(owner + slot, i_tile)
            tl.atomic_add(filled + slot // SPAN, free + 1, sem="relaxed")
        tl.store(grid + i_tile, slot)
    else:
        tl.store(grid + i_tile, tl.where(shows, FULL_TILE, EMPTY_TILE))


@triton.jit
def visits(count):
    """The number of tiles from two counts in one int64: full tiles and, 32 bits higher, partial tiles."""
    return ((count & 0xFFFFFFFF) + (count >> 32)).to(tl.int32)


@triton.jit
def measure_line(i_all, counts, spans, order, num_long, visited, num_lines, num_all, SPAN: tl.constexpr):
    """Write the span in the lists of line i_all, of the num_all lines of all maps, and its place in the order by
    length."""
    i_map, i_line = i_all // num_lines, i_all % num_lines
    count = tl.load(counts + i_all)
    o = tl.arange(0, SPAN)
    b_before, b_all = tl.zeros([SPAN], tl.int64), tl.zeros([SPAN], tl.int64)
    for first in range(0, num_all, SPAN):
        b_count = tl.load(counts + first + o, mask=first + o < num_all, other=0)
        b_before += tl.where(first + o < i_all, b_count, 0)
        b_all += b_count
    begin, length, everything = visits(tl.sum(b_before)), visits(count), tl.sum(b_all)
    tl.store(spans + i_all * 3, begin)
    tl.store(spans + i_all * 3 + 1, begin + (count & 0xFFFFFFFF).to(tl.int32))
    tl.store(spans + i_all * 3 + 2, begin + length)

    b_longer = tl.zeros([SPAN], tl.int32)
    for first in range(0, num_lines, SPAN):
        o_line = first + o
        b_length = visits(tl.load(counts + i_map * num_lines + o_line, mask=o_line < num_lines, other=0))
        b_longer += (b_length > length) | ((b_length == length) & (o_line < i_line))
    place = tl.sum(b_longer)
    tl.store(order + i_map * num_lines + place, i_line)
    if length.to(tl.int64) * num_all > visits(everything).to(tl.int64) * LONG_LINE:
        tl.atomic_max(num_long, (place + 1).to(tl.int64), sem="relaxed")
    if i_all == 0:
        tl.store(visited, everything)


@triton.jit
def number_span(i_span, table, owner, filled, number, tile_of, num_bits, num_slots, num_spans, SPAN: tl.constexpr):
    """For SPAN slots of the table: the number of each key, in ascending order, and the tile with the number's bits."""
    o = tl.arange(0, SPAN)
    b_before = tl.zeros([SPAN], tl.int64)
    for first in range(0, i_span, SPAN):
        b_before += tl.load(filled + first + o, mask=first + o < i_span, other=0)
    before = tl.sum(b_before).to(tl.int32)
    o_slot = i_span * SPAN + o
    b_key = tl.load(table + o_slot, mask=o_slot < num_slots, other=0)
    b_taken = b_key != 0
    b_number = before + tl.cumsum(b_taken.to(tl.int32), 0) - 1

    # Only keys without a free slot between them can be out of order. Compare each key with its neighbours, up to the
    # next free slot.
    m_left, m_right, distance = b_taken, b_taken, 1
    while tl.max((m_left | m_right).to(tl.int32), 0) != 0:
        b_left = tl.load(table + o_slot - distance, mask=m_left & (o_slot >= distance), other=0)
        b_right = tl.load(table + o_slot + distance, mask=m_right & (o_slot + distance < num_slots), other=0)
        m_left, m_right = b_left != 0, b_right != 0
        b_number += (m_right & (b_right < b_key)).to(tl.int32) - (m_left & (b_left > b_key)).to(tl.int32)
        distance += 1
    tl.store(number + o_slot, b_number, mask=b_taken)
    tl.store(tile_of + b_number, tl.load(owner + o_slot, mask=b_taken, other=0), mask=b_taken)
    if i_span == num_spans - 1:
        tl.store(num_bits, (before + tl.sum(b_taken.to(tl.int32))).to(tl.int64))


@triton.jit
def compare_twins(i, words, grid, owner, differs, num_tiles, WORDS: tl.constexpr, COMPARED: tl.constexpr):
    """Compare some tiles, bit by bit, with the tiles whose bits they share."""
    o_tile = i * COMPARED + tl.arange(0, COMPARED)
    b_slot = tl.load(grid + o_tile, mask=o_tile < num_tiles, other=EMPTY_TILE)
    b_owner = tl.load(owner + b_slot, mask=b_slot >= 0, other=0)
    m_twin = ((b_slot >= 0) & (b_owner != o_tile))[:, None]
    p_words = words + tl.arange(0, WORDS)[None, :]
    b_one = tl.load(p_words + o_tile.to(tl.int64)[:, None] * (2 * WORDS), mask=m_twin, other=0)
    b_other = tl.load(p_words + b_owner.to(tl.int64)[:, None] * (2 * WORDS), mask=m_twin, other=0)
    if tl.sum((b_one != b_other).to(tl.int32)) != 0:
        tl.store(differs, tl.full([], 1, tl.int64))


@triton.jit(do_not_specialize=FREE)
def measure_kernel(
    words, grid, owner, number, tile_of, row_spans, row_order, column_spans, column_order, table, counts, filled, found,
    num_q, num_k, num_maps, num_tiles, num_slots, num_spans,
    WORDS: tl.constexpr, SPAN: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Compute numbers, spans and orders. found: counts of tiles and numbers, whether twins differ, long lines."""
    i = tl.program_id(0)
    num_rows, num_columns = num_maps * num_q, num_maps * num_k
    if i < num_spans:
        number_span(i, table, owner, filled, number, tile_of, found + 1, num_slots, num_spans, SPAN)
    elif i < num_spans + num_rows:
        measure_line(i - num_spans, counts, row_spans, row_order, found + 3, found, num_q, num_rows, SPAN)
    elif i < num_spans + num_rows + num_columns:
        i_column = i - num_spans - num_rows
        measure_line(
            i_column, counts + num_rows, column_spans, column_order, found + 4, found, num_k, num_columns, SPAN
        )
    else:
        compare_twins(i - num_spans - num_rows - num_columns, words, grid, owner, found + 2, num_tiles, WORDS, COMPARED)


@triton.jit
def list_line(i_all, p_line, s_other, number, spans, index, tile, num_other, STEP: tl.constexpr):
    """Write the list of one line of a grid: its full tiles, then its partial ones."""
    at_full, at_partial = tl.load(spans + i_all * 3), tl.load(spans + i_all * 3 + 1)
    for first in range(0, num_other, STEP):
        o_other = first + tl.arange(0, STEP)
        b_slot = tl.load(p_line + o_other * s_other, mask=o_other < num_other, other=EMPTY_TILE)
        b_full, b_partial = (b_slot == FULL_TILE).to(tl.int32), (b_slot >= 0).to(tl.int32)
        b_to = tl.where(b_slot >= 0, at_partial + tl.cumsum(b_partial, 0), at_full + tl.cumsum(b_full, 0)) - 1
        tl.store(index + b_to, o_other, mask=b_slot != EMPTY_TILE)
        tl.store(tile + b_to, tl.load(number + b_slot, mask=b_slot >= 0, other=0), mask=b_slot != EMPTY_TILE)
        at_full += tl.sum(b_full)
        at_partial += tl.sum(b_partial)


@triton.jit
def write_bits(i_bits, words, octets, tile_of, bits, bits_t, BM: tl.constexpr, BN: tl.constexpr):
    """Write the bits of one number, by query and by key, from the tile that has them."""
    at = tl.load(tile_of + i_bits).to(tl.int64) * (BM * BN // 16)
    to = i_bits.to(tl.int64) * (BM * BN // 32)
    o_m, o_n, o_word, o_word_t = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BN // 32), tl.arange(0, BM // 32)
    o_from = (o_m % 8) * (BM // 8) + o_m // 8  # this query's place in `query_order`
    b_words = tl.load(words + at + o_from[:, None] * (BN // 32) + o_word[None, :])
    tl.store(bits + to + o_m[:, None] * (BN // 32) + o_word[None, :], b_words)
    p_octets = octets + (at + BM * BN // 32) * 4 + o_word_t[None, :] * (4 * BN) + o_n[:, None]
    b_words_t = tl.zeros([BN, BM // 32], tl.int32)
    for i in tl.static_range(4):
        b_words_t |= tl.load(p_octets + i * BN).to(tl.int32) << (8 * i)
    tl.store(bits_t + to + o_n[:, None] * (BM // 32) + o_word_t[None, :], b_words_t)


@triton.jit(do_not_specialize=FREE)
def write_kernel(
    words, octets, grid, number, tile_of, row_spans, row_index, row_tile, column_spans, column_index, column_tile, bits,
    bits_t, num_q, num_k, num_maps, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the lists of rows and of columns, and the bits."""
    i = tl.program_id(0)
    num_rows, num_columns = num_maps * num_q, num_maps * num_k
    if i < num_rows:
        list_line(i, grid + i * num_k, 1, number, row_spans, row_index, row_tile, num_k, STEP)
    elif i < num_rows + num_columns:
        i_column = i - num_rows
        p_line = grid + (i_column // num_k) * num_q * num_k + i_column % num_k
        list_line(i_column, p_line, num_k, number, column_spans, column_index, column_tile, num_q, STEP)
    else:
        write_bits(i - num_rows - num_columns, words, octets, tile_of, bits, bits_t, BM, BN)


def build_dense(visible: Tensor, block: tuple[int, int]) -> tuple[Lists, Lists, Tensor, Tensor] | None:
    """Rows, columns, bits and transposed bits (blocks.py) of bool [B, H, T, S], no size 0, any strides.

    None if different tiles have equal hashes. The temporary memory is a quarter of the tensor's.
    """
    with on(visible.device):
        building = Building(visible, block)
        building.classify_launch()()
        building.measure_launch()()
        visited, num_bits, differs, long_rows, long_columns = building.found.tolist()
        if differs:
            return None
        outputs = building.allocate((visited & 0xFFFFFFFF) + (visited >> 32), num_bits)
        building.write_launch(outputs)()
    row_index, row_tile, column_index, column_tile, bits, bits_t = outputs
    rows = Lists(long_rows, building.row_spans, row_index, row_tile, building.row_order)
    columns = Lists(long_columns, building.column_spans, column_index, column_tile, building.column_order)
    return rows, columns, bits, bits_t


class Building:
    """The temporary tensors of the three launches.

    words   int32 [tiles, 2, words of a tile]: the bits of a partial tile, by query and by key.
    grid    int32 [tiles]: EMPTY_TILE, FULL_TILE, or the slot of a partial tile's key in the table.
    table   int64 [slots]: keys (hashes), 0 in a free slot.
    filled  int64 [spans]: the number of occupied slots in each SPAN of them.
    owner   int32 [slots]: the first tile with a key.
    number  int32 [slots]: the number of its bits.
    tile_of int32 [tiles]: the tile that has the bits of a number.
    counts  int64 [rows + columns]: the tiles of each line (see `visits`).
    """

    def __init__(self, visible: Tensor, block: tuple[int, int]) -> None:
        num_b, num_h, num_queries, num_keys = visible.shape
        self.visible, self.block, (block_q, block_k) = visible, block, block
        self.num_q, self.num_k, self.num_maps = -(-num_queries // block_q), -(-num_keys // block_k), num_b * num_h
        self.num_lines = self.num_maps * (self.num_q + self.num_k)
        self.num_tiles = self.num_maps * self.num_q * self.num_k
        leading_bits = (SLOTS_PER_TILE * self.num_tiles - 1).bit_length()
        self.shift, self.half = 64 - leading_bits, 2 ** (leading_bits - 1)
        self.num_slots = 2**leading_bits + self.num_tiles  # room for all tiles after the slot of the last leading bits
        self.num_spans = -(-self.num_slots // SPAN)

        sizes = [self.num_slots, self.num_lines, self.num_spans, 5]
        zeros = visible.new_zeros(sum(sizes), dtype=torch.int64)
        self.table, self.counts, self.filled, self.found = zeros.split(sizes)
        self.grid = visible.new_empty(self.num_tiles, dtype=torch.int32)
        self.owner = self.grid.new_empty(self.num_slots)
        self.words = self.grid.new_empty(self.num_tiles, 2, block_q * block_k // packed.WORD)

    def classify_launch(self) -> Launch:
        num_h, num_queries, num_keys = self.visible.shape[1:]
        (block_q, block_k), (words, quads) = self.block, as_quads(self.visible)
        even = num_queries % block_q == 0 and num_keys % block_k == 0
        odd = odd_numbers(block_q * block_k // packed.WORD, self.visible.device)
        tensors = (words, odd, self.words, self.grid, self.owner, self.table, self.counts, self.filled)
        sizes = (num_h, num_queries, num_keys, self.num_q, self.num_k, self.num_maps, self.shift, self.half)
        constants = {"QUADS": quads, "EVEN": even, "BM": block_q, "BN": block_k, "SPAN": SPAN}
        # With this number of warps, one thread holds eight consecutive queries of `query_order`.
        constants["num_warps"] = block_q * block_k // 4096
        return Launch(classify_kernel, (self.num_tiles,), (*tensors, *words.stride(), *sizes), constants)

    def measure_launch(self) -> Launch:
        # Allocated here, while the first launch runs: these sizes are known before the host waits.
        (num_b, num_h), empty = self.visible.shape[:2], self.grid.new_empty
        self.number, self.tile_of = empty(self.num_slots), empty(self.num_tiles)
        self.octets = self.words.view(torch.uint8)
        self.row_spans, self.row_order = empty(num_b, num_h, self.num_q, 3), empty(num_b, num_h, self.num_q)
        self.column_spans, self.column_order = empty(num_b, num_h, self.num_k, 3), empty(num_b, num_h, self.num_k)
        lines = (self.row_spans, self.row_order, self.column_spans, self.column_order)
        tensors = (self.words, self.grid, self.owner, self.number, self.tile_of, *lines)
        zeros = (self.table, self.counts, self.filled, self.found)
        sizes = (self.num_q, self.num_k, self.num_maps, self.num_tiles, self.num_slots, self.num_spans)
        constants = {"WORDS": self.words.shape[2], "SPAN": SPAN, "COMPARED": COMPARED}
        num_programs = self.num_spans + self.num_lines + -(-self.num_tiles // COMPARED)
        return Launch(measure_kernel, (num_programs,), (*tensors, *zeros, *sizes), constants)

    def allocate(self, num_visited: int, num_bits: int) -> list[Tensor]:
        """Allocate the tensors whose sizes are in `found`: indices and tiles of rows and columns, bits and bits_t."""
        (block_q, block_k), empty = self.block, self.grid.new_empty
        bits, bits_t = (num_bits, block_q, block_k // packed.WORD), (num_bits, block_k, block_q // packed.WORD)
        return [*[empty(num_visited) for _ in range(4)], empty(bits), empty(bits_t)]

    def write_launch(self, outputs: Sequence[Tensor]) -> Launch:
        row_index, row_tile, column_index, column_tile, bits, bits_t = outputs
        rows, columns = (self.row_spans, row_index, row_tile), (self.column_spans, column_index, column_tile)
        inputs = (self.words, self.octets, self.grid, self.number, self.tile_of)
        tensors, sizes = (*inputs, *rows, *columns, bits, bits_t), (self.num_q, self.num_k, self.num_maps)
        constants = {"BM": self.block[0], "BN": self.block[1], "STEP": STEP}
        return Launch(write_kernel, (self.num_lines + len(bits),), (*tensors, *sizes), constants)


def as_quads(visible: Tensor) -> tuple[Tensor, bool]:
    """(bool tensor viewed as int32, four keys in a word, True), or (as uint8, False) if its layout forbids that."""
    fits = all(stride % 4 == 0 for stride in visible.stride()[:-1]) and visible.data_ptr() % 4 == 0
    quads = visible.stride(-1) == 1 and visible.shape[-1] % 4 == 0 and fits
    return visible.view(torch.int32 if quads else torch.uint8), quads
