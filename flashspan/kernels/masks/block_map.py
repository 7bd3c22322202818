"""A block map as a grid of tiles, with the bits of the partial ones; its slices, unions, intersections and lists.

A grid is int32 [B or 1, H or 1, query blocks, key blocks]. A tile in it is HIDDEN, VISIBLE or the number of its bits
(bits.py). `Blocks` (blocks.py) stores lists instead of the grid, because kernels loop over lists.
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
"""The allowed edges of a tile. Each is a multiple or a divisor of the edges of every kernel's tiles."""

ALL_OF_EIGHT = 0x0101010101010101
"""Eight bools that are True, as one int64."""

LONG = 2
"""A line is a row or a column of tiles. Kernels visit lines with more than this many times the mean number of tiles
before the other lines of all maps."""

HIDDEN, VISIBLE = -2, -1
"""The entries of an empty and of a full tile in a grid; that of a partial tile is the index of its bits."""

ReadTiles: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of indices, each [n]: b and h of the map, i and j of the tile. Returns bool [n, block_q, block_k]."""


@dataclass(frozen=True)
class Lists:
    """The tiles to visit, line by line: a line is a block of queries (or, transposed, of keys) of one map.

    num_long: the number of lines of each map that come before the other lines of all maps; see LONG.
    spans   int32 [B or 1, H or 1, lines, 3]: begin, middle, end. Full tiles are begin..middle of `index`, partial ones
            middle..end, each ascending.
    index   int32 [visited]: the block on the other axis.
    tile    int32 [visited]: the number of a partial tile's bits.
    order   int32 [B or 1, H or 1, lines]: the lines, longest first.
    """

    num_long: int
    spans: Tensor
    index: Tensor
    tile: Tensor
    order: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.spans, self.index, self.tile, self.order]

    def entries(self) -> tuple[Tensor, Tensor]:
        """For each entry of `index`: the number of its line among those of all maps, and whether its tile is full."""
        spans = self.spans.view(-1, 3).long()
        line = torch.arange(len(spans), device=spans.device).repeat_interleave(spans[:, 2] - spans[:, 0])
        return line, torch.arange(len(line), device=spans.device) < spans[line, 1]

    def visits(self) -> Tensor:
        """The number of tiles in each line, int32 [B or 1, H or 1, lines]."""
        return self.spans[..., 2] - self.spans[..., 0]


def check_block(block: int | tuple[int, int]) -> tuple[int, int]:
    """Tile edges (queries, keys); ValueError for edges that kernels do not support."""
    pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or any(not isinstance(edge, Integral) or edge not in SIZES for edge in pair):
        raise ValueError(
            f"a tile's edges are {' or '.join(map(str, SIZES))}: got block={block!r}; for squares of another size use "
            f"Blocks.from_coarse(mask, ..., size=...)"
        )
    return int(pair[0]), int(pair[1])


@dataclass(frozen=True)
class BlockMap:
    """A mask as lengths, the edges of a tile (block), the grid, and bits int32 [tiles, block_q, block_k / 32]."""

    num_queries: int
    num_keys: int
    block: tuple[int, int]
    grid: Tensor
    bits: Tensor

    @classmethod
    def from_kinds(
        cls, num_queries: int, num_keys: int, block: tuple[int, int], kinds: Tensor, read: ReadTiles
    ) -> BlockMap:
        """Build a map from the kind of each tile. `read` is called for PARTIAL tiles, which may turn out to be empty or
        full. Values that it returns past the end are ignored."""
        block_q, block_k = block
        q_rows, k_rows = (block_positions(n, b, kinds.device) for n, b in ((num_queries, block_q), (num_keys, block_k)))
        kinds = kinds.clone()
        for dim, ragged in ((2, num_queries % block_q), (3, num_keys % block_k)):
            if ragged:  # a tile that reaches past the end gets bits, so that kernels need no check
                last = kinds.select(dim, -1)
                last[last == FULL] = PARTIAL
        num_k = kinds.shape[3]
        words, places = [], []
        for where in (kinds == PARTIAL).nonzero().split(max(1, packed.CHUNK // 8 // (block_q * block_k))):
            b, h, i, j = where.T
            exists = (q_rows[i] < num_queries)[:, :, None] & (k_rows[j] < num_keys)[:, None, :]
            found, partial_words = classify((read(b, h, i, j) & exists)[:, None])
            kinds[b, h, i, j] = found[:, 0]
            b, h, i, j = where[found[:, 0] == PARTIAL].T
            places.append(((b * kinds.shape[1] + h) * kinds.shape[2] + i) * num_k + j)
            words.append(partial_words)
        return cls.from_words(num_queries, num_keys, block, kinds, words, places)

    @classmethod
    def from_words(
        cls, num_queries: int, num_keys: int, block: tuple[int, int], kinds: Tensor, words: list[Tensor],
        places: list[Tensor],
    ) -> BlockMap:  # fmt: skip
        """Build a map from the kind of each tile and the words of partial tiles at flat indices `places` of it."""
        none = torch.zeros((0, block[0], block[1] // packed.WORD), dtype=torch.int32, device=kinds.device)
        bits, number = packed.share(torch.cat([none, *words]))
        grid = torch.where(kinds == FULL, VISIBLE, HIDDEN).int()
        if places:
            grid.view(-1)[torch.cat(places)] = number
        return cls(num_queries, num_keys, block, grid, bits)

    def kinds(self) -> Tensor:
        """EMPTY, FULL or PARTIAL for each tile, uint8 in the shape of the grid."""
        grid = self.grid
        return torch.where(grid == HIDDEN, EMPTY, torch.where(grid == VISIBLE, FULL, PARTIAL)).to(torch.uint8)

    def read(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The tiles at these indices, as in ReadTiles."""
        number = self.grid[b, h, i, j]
        shown = (number == VISIBLE)[:, None, None].expand(-1, *self.block)
        if not len(self.bits):
            return shown
        return torch.where((number >= 0)[:, None, None], packed.unpack(self.bits[number.clamp(min=0)]), shown)

    def dense(self) -> Tensor:
        """The mask as bool [B or 1, H or 1, T, S]."""
        (num_b, num_h, num_q, num_k), (block_q, block_k) = self.grid.shape, self.block
        visible = self.grid.new_zeros(num_b, num_h, num_q, num_k, block_q, block_k, dtype=torch.bool)
        for where in (self.grid != HIDDEN).nonzero().split(max(1, packed.CHUNK // (block_q * block_k))):
            visible[tuple(where.T)] = self.read(*where.T)
        visible = visible.transpose(3, 4).reshape(num_b, num_h, num_q * block_q, num_k * block_k)
        return visible[:, :, : self.num_queries, : self.num_keys]

    def slice(self, rows: Tensor, keys: Tensor) -> BlockMap:
        """The map of these queries and keys, given by ascending positions."""
        (block_q, block_k), grid = self.block, self.grid
        shown, holed = (
            touched(touched(x, rows, block_q, 2), keys, block_k, 3) for x in (grid != HIDDEN, grid != VISIBLE)
        )
        kinds = torch.where(holed, torch.where(shown, PARTIAL, EMPTY), FULL).to(torch.uint8)
        q_rows, k_rows = (block_positions(len(x), b, grid.device) for x, b in ((rows, block_q), (keys, block_k)))

        def read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # [n, block]
            row, key = rows[q_rows[i].clamp(max=len(rows) - 1)], keys[k_rows[j].clamp(max=len(keys) - 1)]
            number = grid[
                b[:, None, None], h[:, None, None], (row // block_q)[:, :, None], (key // block_k)[:, None, :]
            ]
            seen = number == VISIBLE
            if len(self.bits):
                at = key % block_k
                word = self.bits[number.clamp(min=0), (row % block_q)[:, :, None], (at // packed.WORD)[:, None, :]]
                seen = seen | ((number >= 0) & ((word >> (at % packed.WORD).int()[:, None, :]) & 1).bool())
            return seen

        return BlockMap.from_kinds(len(rows), len(keys), self.block, kinds, read)

    def invert(self) -> BlockMap:
        """The complement of this map."""
        kinds = self.kinds()
        kinds = torch.where(kinds == EMPTY, FULL, torch.where(kinds == FULL, EMPTY, PARTIAL)).to(torch.uint8)

        def read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return ~self.read(b, h, i, j)

        return BlockMap.from_kinds(self.num_queries, self.num_keys, self.block, kinds, read)

    def join(
        self, other: BlockMap, operation: Callable[[Tensor, Tensor], Tensor], decides: int, yields: int
    ) -> BlockMap:
        """Combine both maps by an operation on tiles. A tile that has the kind `decides` in either map has that kind in
        the result. A tile that has the kind `yields` in both maps keeps it."""
        grids = torch.broadcast_tensors(self.grid, other.grid)
        one, two = replace(self, grid=grids[0]), replace(other, grid=grids[1])
        first, second = one.kinds(), two.kinds()
        decided = (first == decides) | (second == decides)
        yielded = (first == yields) & (second == yields)
        kinds = torch.where(decided, decides, torch.where(yielded, yields, PARTIAL)).to(torch.uint8)

        def read(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return operation(one.read(b, h, i, j), two.read(b, h, i, j))

        return BlockMap.from_kinds(self.num_queries, self.num_keys, self.block, kinds, read)


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
    # Within a line, full tiles come first. The sort is stable, so the tiles of each kind stay ascending.
    key = ((b * grid.shape[1] + h) * grid.shape[2] + line) * 2 + (tile >= 0)
    position = key.argsort(stable=True)
    visits = num_full + num_partial
    order = visits.argsort(dim=-1, descending=True, stable=True).int()
    mean = visits.double().mean() if visits.numel() else visits.sum()
    num_long = int((visits > LONG * mean).sum(-1).max()) if visits.numel() else 0
    return Lists(num_long, spans, index[position].int(), tile[position].clamp(min=0).int(), order)


def block_positions(length: int, block: int, device: torch.device) -> Tensor:
    """The positions in each block, int64 [blocks, block]; the last block may reach past the end."""
    return torch.arange(-(-length // block) * block, device=device).view(-1, block)


def touched(grid: Tensor, positions: Tensor, block: int, dim: int) -> Tensor:
    """A bool grid for a slice along `dim`: a block is True if it takes tokens from any block of `grid` that is True."""
    num = -(-len(positions) // block)
    owner = torch.arange(len(positions), device=grid.device) // block
    touches = torch.zeros(num, grid.shape[dim], dtype=torch.float32, device=grid.device)
    touches[owner, positions // block] = 1.0
    return (torch.movedim(grid.float(), dim, -1) @ touches.mT > 0).movedim(-1, dim)
