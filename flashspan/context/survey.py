"""What a mask asks of a placement: for every (query rank, key rank), how many pairs are visible and where they lie.

Generators read it to leave out what nobody needs; the verifier reads it to prove that they did. No device, no process:
256 ranks take a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from flashspan.context.layout import Placement, cut
from flashspan.kernels.bits import unpack
from flashspan.kernels.blocks import Blocks
from flashspan.kernels.masks import Mask
from flashspan.kernels.tiling import VISIBLE


@dataclass(frozen=True)
class Box:
    """The visible part of a tile: `pairs` pairs, all within these local rows of the queries and of the keys."""

    pairs: int
    q_rows: range
    k_rows: range


NOTHING = Box(0, range(0), range(0))


@dataclass(frozen=True, eq=False)
class Survey:
    """Pairs and bounding boxes of all tiles of `mask` under `placement`.

    A mask that differs along the batch or the heads is surveyed as the union of its maps; pairs count them all.
    """

    placement: Placement
    mask: Mask

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @cached_property
    def pairs(self) -> np.ndarray:
        """Visible pairs of each tile, int64 [N, N], query rank by key rank."""
        return self._table[..., 0]

    def box(self, q: int, k: int, q_rows: range | None = None) -> Box:
        """The visible part of tile (q, k), or of these local query rows of it."""
        if q_rows is None:
            pairs, top, bottom, left, right = self._table[q, k].tolist()
            return Box(pairs, range(top, bottom), range(left, right)) if pairs else NOTHING
        if not self.pairs[q, k]:
            return NOTHING
        if isinstance(self.mask, Blocks):
            mine, theirs = (self.placement.ranges[rank] for rank in (q, k))
            sizes = (len(q_rows), self.placement.sizes[k])
            seen = _seen(self.mask.part(cut(mine, q_rows), theirs), *(np.ones((size, 1)) for size in sizes))
            pairs, top, bottom, left, right = _frame(*(x[:, 0] for x in seen))
        else:
            pairs, top, bottom, left, right = self._measure(q, slice(k, k + 1), q_rows)[0].tolist()
        shift = q_rows.start
        return Box(pairs, range(top + shift, bottom + shift), range(left, right)) if pairs else NOTHING

    @cached_property
    def _table(self) -> np.ndarray:
        """pairs, first and last query row, first and last key row of each tile, int64 [N, N, 5]."""
        num = self.num_ranks
        if isinstance(self.mask, Blocks):
            owner = np.zeros((self.placement.num_tokens, num), np.float32)
            index = [self.placement.index(rank) for rank in range(num)]
            for rank, positions in enumerate(index):
                owner[positions, rank] = 1
            by_query, by_key = _seen(self.mask, owner, owner)
            table = [_frame(by_query[i, k], by_key[j, q]) for q, i in enumerate(index) for k, j in enumerate(index)]
            return np.array(table, np.int64).reshape(num, num, 5)
        rows = [self._measure(q, slice(None), range(self.placement.sizes[q])) for q in range(num)]
        return np.stack(rows).reshape(num, num, 5)

    @cached_property
    def _intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys each query sees in global positions, [B or 1, T]."""
        num = self.placement.num_tokens
        assert not isinstance(self.mask, Blocks)
        start, end = self.mask.intervals(num, num)
        return np.atleast_2d(start.cpu().numpy()), np.atleast_2d(end.cpu().numpy())

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, step and length of each rank's runs, [N, P]; ranks with fewer are filled with empty runs."""
        width = max(1, *(len(part) for part in self.placement.ranges))
        table = np.zeros((3, self.num_ranks, width), np.int32)
        table[1] = 1
        for rank, part in enumerate(self.placement.ranges):
            for i, run in enumerate(part):
                table[:, rank, i] = run.start, run.step, len(run)
        return table[0], table[1], table[2]

    def _measure(self, q: int, k: slice, q_rows: range) -> np.ndarray:
        """The table's rows for some queries of one rank against some key ranks."""
        index = self.placement.index(q)[q_rows.start : q_rows.stop]
        low, high = (self._below(bound[:, index], k) for bound in self._intervals)  # [B, rows, ranks]
        seen = np.maximum(high - low, 0)
        pairs = seen.sum((0, 1), dtype=np.int64)
        visible = seen > 0
        if not len(index):
            return np.zeros((len(pairs), 5), np.int64)
        rows = visible.any(0)
        top, bottom = rows.argmax(0), len(index) - rows[::-1].argmax(0)
        left = np.where(visible, low, np.iinfo(np.int32).max).min((0, 1))
        right = np.where(visible, high, 0).max((0, 1))
        table = np.stack([pairs, top, bottom, left, right], -1).astype(np.int64)
        table[pairs == 0] = 0
        return table

    def _below(self, x: np.ndarray, k: slice) -> np.ndarray:
        """How many of each key rank's tokens lie below these global positions, [*x.shape, ranks]."""
        start, step, length = (table[k] for table in self._runs)
        count = (x[..., None, None] - start + step - 1) // step
        return np.clip(count, 0, length).sum(-1)


def _seen(mask: Blocks, q_owner: np.ndarray, k_owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each query, how many visible keys each rank owns, int64 [T, N]; for each key, how many queries, [S, N].

    q_owner [T, N] and k_owner [S, N] are 1 where a rank owns a token. Full tiles are counted block by block, partial
    ones by their bits; maps are added up.
    """
    mask = mask.to("cpu")
    grid = mask.grid().flatten(0, 1)
    queries, keys = (_by_block(owner, block) for owner, block in zip((q_owner, k_owner), mask.block, strict=True))
    full = (grid == VISIBLE).sum(0).double()
    by_query = (full @ keys.sum(1))[:, None].repeat(1, mask.block[0], 1)
    by_key = (full.T @ queries.sum(1))[:, None].repeat(1, mask.block[1], 1)
    for part in (grid >= 0).nonzero().split(256):
        _, i, j = part.T
        visible = unpack(mask.bits[grid[tuple(part.T)]]).double()
        by_query.index_add_(0, i, visible @ keys[j])
        by_key.index_add_(0, j, visible.mT @ queries[i])
    return by_query.flatten(0, 1)[: len(q_owner)].long().numpy(), by_key.flatten(0, 1)[: len(k_owner)].long().numpy()


def _by_block(owner: np.ndarray, block: int) -> torch.Tensor:
    """[T, N] as float64 [blocks, block, N], 0 past the end."""
    padded = np.pad(owner.astype(np.float64), ((0, -len(owner) % block), (0, 0)))
    return torch.from_numpy(padded).view(-1, block, owner.shape[1])


def _frame(by_query: np.ndarray, by_key: np.ndarray) -> tuple[int, int, int, int, int]:
    """Pairs, first and last query row, first and last key row, of a tile whose rows see (are seen by) this many."""
    rows, columns = by_query.nonzero()[0], by_key.nonzero()[0]
    if not len(rows):
        return 0, 0, 0, 0, 0
    return int(by_query.sum()), int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
