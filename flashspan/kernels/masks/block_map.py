"""A block map as a grid of tiles and the bits of the partial ones; its slices, joins and lists of lines.

A grid is int32 [B or 1, H or 1, query blocks, key blocks], in which a tile is HIDDEN, VISIBLE or the number of its bits
(bits.py). `Blocks` (blocks.py) keeps lists in its place, which is what the kernels walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor

from flashspan.kernels.masks import bits as packed
from flashspan.kernels.masks.mask import EMPTY, FULL, PARTIAL

SIZES = (64, 128)
"""Edges a tile may have: what every kernel's own tiles divide, or are divided by."""

ALL_OF_EIGHT = 0x0101010101010101
"""Eight bools that are True, read as one number: the largest that eight bools can be."""

LONG = 2
"""A line this many times as long as the mean is visited before all others, of all heads."""

HIDDEN, VISIBLE = -2, -1
"""An empty and a full tile in a grid, in which a partial one is the number of its bits."""

Look: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The contents of some tiles: numbers (b, h, i, j) of maps and blocks, each [n], to bool [n, block_q, block_k]."""


@dataclass(frozen=True)
class Lists:
    """The tiles to visit, line by line: a line is a block of queries (or, transposed, of keys) of one map.

    num_long  how many of each map's longest lines are best begun before any of the others.
    spans   int32 [B or 1, H or 1, lines, 3]: begin, middle, end. Full tiles are begin..middle of `index`, partial ones
            middle..end, each ascending.
    index   int32 [visited]: the block on the other axis.
    tile    int32 [visited]: the number of a partial tile's bits.
    order   int32 [B or 1, H or 1, lines]: lines, longest first.
    """

    num_long: int
    spans: Tensor
    index: Tensor
    tile: Tensor
    order: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.spans, self.index, self.tile, self.order]

    def visits(self) -> Tensor:
        """How many tiles each line visits, int32 [B or 1, H or 1, lines]."""
        return self.spans[..., 2] - self.spans[..., 0]


def check_block(block: int | tuple[int, int]) -> tuple[int, int]:
    """Tile edges (queries, keys); refuse those no kernel takes."""
    pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or any(not isinstance(edge, Integral) or edge not in SIZES for edge in pair):
        raise ValueError(
            f"a tile's edges are {' or '.join(map(str, SIZES))}, which is what the kernels take: got block={block!r}; "
            f"a mask in squares of another size is made by Blocks.from_coarse(mask, ..., size=...)"
        )
    return int(pair[0]), int(pair[1])


@dataclass(frozen=True)
class BlockMap:
    """Lengths, the edges of a tile, the grid, and bits int32 [tiles, block_q, block_k / 32]."""

    num_queries: int
    num_keys: int
    block: tuple[int, int]
    grid: Tensor
    bits: Tensor

    @classmethod
    def examined(cls, num_queries: int, num_keys: int, block: tuple[int, int], kinds: Tensor, look: Look) -> BlockMap:
        """From kinds of tiles: those called PARTIAL, and full ones past an end, are looked at."""
        block_q, block_k = block
        kinds = kinds.clone()
        for dim, ragged in ((2, num_queries % block_q), (3, num_keys % block_k)):
            if ragged:  # a tile that reaches past the end has bits, so that kernels need not ask
                last = kinds.select(dim, -1)
                last[last == FULL] = PARTIAL
        num_k = kinds.shape[3]
        words, places = [], []
        for where in (kinds == PARTIAL).nonzero().split(max(1, packed.CHUNK // 8 // (block_q * block_k))):
            found, kept = classify(look(*where.T)[:, None])
            kinds[tuple(where.T)] = found[:, 0]
            b, h, i, j = where[found[:, 0] == PARTIAL].T
            places.append(((b * kinds.shape[1] + h) * kinds.shape[2] + i) * num_k + j)
            words.append(kept)
        return cls.numbered(num_queries, num_keys, block, kinds, words, places)

    @classmethod
    def numbered(
        cls, num_queries: int, num_keys: int, block: tuple[int, int], kinds: Tensor, words: list[Tensor],
        places: list[Tensor],
    ) -> BlockMap:  # fmt: skip
        """From kinds of tiles and the words of the partial ones, whose flat places in `kinds` are `places`."""
        none = torch.zeros((0, block[0], block[1] // packed.WORD), dtype=torch.int32, device=kinds.device)
        bits, number = packed.share(torch.cat([none, *words]))
        grid = torch.where(kinds == FULL, VISIBLE, HIDDEN).int()
        if places:
            grid.view(-1)[torch.cat(places)] = number
        return cls(num_queries, num_keys, block, grid, bits)

    def kinds(self) -> Tensor:
        """EMPTY, FULL or PARTIAL for each tile, uint8, shaped as the grid."""
        grid = self.grid
        return torch.where(grid == HIDDEN, EMPTY, torch.where(grid == VISIBLE, FULL, PARTIAL)).to(torch.uint8)

    def look(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Some tiles as bool [n, block_q, block_k]."""
        number = self.grid[b, h, i, j]
        shown = (number == VISIBLE)[:, None, None].expand(-1, *self.block)
        if not len(self.bits):
            return shown
        return torch.where((number >= 0)[:, None, None], packed.unpack(self.bits[number.clamp(min=0)]), shown)

    def dense(self) -> Tensor:
        """Drawn out: bool [B or 1, H or 1, T, S]."""
        (num_b, num_h, num_q, num_k), (block_q, block_k) = self.grid.shape, self.block
        drawn = self.grid.new_zeros(num_b, num_h, num_q, num_k, block_q, block_k, dtype=torch.bool)
        for where in (self.grid != HIDDEN).nonzero().split(max(1, packed.CHUNK // (block_q * block_k))):
            drawn[tuple(where.T)] = self.look(*where.T)
        drawn = drawn.transpose(3, 4).reshape(num_b, num_h, num_q * block_q, num_k * block_k)
        return drawn[:, :, : self.num_queries, : self.num_keys]

    def slice(self, rows: Tensor, keys: Tensor) -> BlockMap:
        """The map of these queries and keys, ascending positions."""
        (block_q, block_k), grid = self.block, self.grid
        shown, holed = (
            touched(touched(x, rows, block_q, 2), keys, block_k, 3) for x in (grid != HIDDEN, grid != VISIBLE)
        )
        kinds = torch.where(holed, torch.where(shown, PARTIAL, EMPTY), FULL).to(torch.uint8)
        q_rows, k_rows = (block_positions(len(x), b, grid.device) for x, b in ((rows, block_q), (keys, block_k)))

        def look(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row, key = q_rows[i], k_rows[j]  # [n, block]
            exists = (row < len(rows))[:, :, None] & (key < len(keys))[:, None, :]
            row, key = rows[row.clamp(max=len(rows) - 1)], keys[key.clamp(max=len(keys) - 1)]
            number = grid[
                b[:, None, None], h[:, None, None], (row // block_q)[:, :, None], (key // block_k)[:, None, :]
            ]
            seen = number == VISIBLE
            if len(self.bits):
                at = key % block_k
                word = self.bits[number.clamp(min=0), (row % block_q)[:, :, None], (at // packed.WORD)[:, None, :]]
                seen = seen | ((number >= 0) & ((word >> (at % packed.WORD).int()[:, None, :]) & 1).bool())
            return seen & exists

        return BlockMap.examined(len(rows), len(keys), self.block, kinds, look)

    def invert(self) -> BlockMap:
        """The map of what this one hides."""
        kinds = self.kinds()
        kinds = torch.where(kinds == EMPTY, FULL, torch.where(kinds == FULL, EMPTY, PARTIAL)).to(torch.uint8)
        q_rows, k_rows = (
            block_positions(n, b, kinds.device)
            for n, b in zip((self.num_queries, self.num_keys), self.block, strict=True)
        )

        def look(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            exists = (q_rows[i] < self.num_queries)[:, :, None] & (k_rows[j] < self.num_keys)[:, None, :]
            return exists & ~self.look(b, h, i, j)

        return BlockMap.examined(self.num_queries, self.num_keys, self.block, kinds, look)

    def join(
        self, other: BlockMap, operation: Callable[[Tensor, Tensor], Tensor], decides: int, yields: int
    ) -> BlockMap:
        """Both, tile by tile: a tile that is `decides` in either is so, one that `yields` leaves it to the other."""
        one, two = (
            replace(x, grid=grid)
            for x, grid in zip((self, other), torch.broadcast_tensors(self.grid, other.grid), strict=True)
        )
        first, second = one.kinds(), two.kinds()
        decided = (first == decides) | (second == decides)
        open_ = (first == yields) & (second == yields)
        kinds = torch.where(decided, decides, torch.where(open_, yields, PARTIAL)).to(torch.uint8)

        def look(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return operation(one.look(b, h, i, j), two.look(b, h, i, j))

        return BlockMap.examined(self.num_queries, self.num_keys, self.block, kinds, look)


def classify(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The kind of each tile of bool [n, m, block_q, block_k], uint8 [n, m], and the words of the partial ones."""
    low, high = seen.view(torch.int64).aminmax(dim=-1)  # eight pairs at a time
    low, high = low.amin(-1), high.amax(-1)
    kinds = torch.where(low == ALL_OF_EIGHT, FULL, torch.where(high == 0, EMPTY, PARTIAL)).to(torch.uint8)
    return kinds, packed.pack(seen[kinds == PARTIAL])


def list_lines(grid: Tensor) -> Lists:
    """The lists of a grid's lines."""
    full, partial = grid == VISIBLE, grid >= 0
    num_full, num_partial = full.sum(-1), partial.sum(-1)
    end = (num_full + num_partial).flatten().cumsum(0).view_as(num_full)
    spans = torch.stack([end - num_full - num_partial, end - num_partial, end], -1).int()
    b, h, line, index = (full | partial).nonzero().T
    tile = grid[b, h, line, index]
    # Within a line the full tiles come first; the sort is stable, so each kind stays ascending.
    key = ((b * grid.shape[1] + h) * grid.shape[2] + line) * 2 + (tile >= 0)
    position = key.argsort(stable=True)
    visits = num_full + num_partial
    order = visits.argsort(dim=-1, descending=True, stable=True).int()
    mean = visits.double().mean() if visits.numel() else visits.sum()
    num_long = int((visits > LONG * mean).sum(-1).max()) if visits.numel() else 0
    return Lists(num_long, spans, index[position].int(), tile[position].clamp(min=0).int(), order)


def block_positions(length: int, block: int, device: torch.device) -> Tensor:
    """The positions of each block, int64 [blocks, block]; the last may reach past the end."""
    return torch.arange(-(-length // block) * block, device=device).view(-1, block)


def touched(grid: Tensor, positions: Tensor, block: int, dim: int) -> Tensor:
    """For each block of a slice's positions, whether any source block it takes from is True: that axis anew."""
    num = -(-len(positions) // block)
    owner = torch.arange(len(positions), device=grid.device) // block
    touches = torch.zeros(num, grid.shape[dim], dtype=torch.float32, device=grid.device)
    touches[owner, positions // block] = 1.0
    return (torch.movedim(grid.float(), dim, -1) @ touches.mT > 0).movedim(-1, dim)
