"""The visible pairs of a mask under a placement: their number and bounding box for every (query rank, key rank) tile.

Generators use it to omit tiles and rows that are not needed; the verifier uses it to prove that they do. It needs no
device and no processes, and little time even for 256 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from flashspan.context.layout import Placement, cut
from flashspan.context.runs import Runs
from flashspan.kernels.masks import Blocks, Mask
from flashspan.kernels.masks.bits import unpack
from flashspan.kernels.masks.block_map import VISIBLE


@dataclass(frozen=True)
class Box:
    """The visible part of a tile: `pairs` pairs, within these local rows of the queries and of the keys.

    Query rows go from the first to the last row that sees a key. Key rows are the rows that a query sees, so they may
    have gaps. In a block map, gaps are whole blocks of keys, so that the other rows keep their place in their block.
    """

    pairs: int
    q_rows: range
    k_rows: Runs


NOTHING = Box(0, range(0), Runs())


class View(NamedTuple):
    """The visible pairs of some queries with the keys of some ranks, and the rows that are in any pair."""

    pairs: np.ndarray
    rows: np.ndarray  # bool [ranks, query rows]
    keys: np.ndarray  # bool [ranks, the longest shard's rows, or more]


@dataclass(frozen=True, eq=False)
class Visibility:
    """Visible pairs and bounding boxes of all tiles of `mask` under `placement`.

    If the mask differs between sequences or heads, a box is that of their union, and pairs are summed.
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
        """The visible part of tile (q, k), or of the part of it with these local query rows."""
        if not self.pairs[q, k]:
            return NOTHING
        if q_rows is None:
            q_rows, frame = range(self.placement.sizes[q]), self._table[q, k]
        else:
            frame = _frame(*self._look(q, range(k, k + 1), q_rows))[0]
        pairs, top, bottom, left, right, num_keys = frame.tolist()
        if not pairs:
            return NOTHING
        k_rows = Runs.of(range(left, right))
        if len(k_rows) > num_keys:
            k_rows = Runs.where(self._look(q, range(k, k + 1), q_rows).keys[0])
        return Box(pairs, range(top + q_rows.start, bottom + q_rows.start), k_rows)

    @cached_property
    def _table(self) -> np.ndarray:
        """The frames of all tiles (see `_frame`), int64 [N, N, 6]."""
        num = self.num_ranks
        frames = [_frame(*self._look(q, range(num), range(self.placement.sizes[q]))) for q in range(num)]
        return np.stack(frames).reshape(num, num, 6)

    def _look(self, q: int, ranks: range, q_rows: range) -> View:
        """The visible pairs of these query rows of rank q with the keys of `ranks`."""
        if isinstance(self.mask, Blocks):
            return self._look_at_tiles(self.mask, q, ranks, q_rows)
        index = self.placement.index(q)[q_rows.start : q_rows.stop]
        low, high = (self._below(bound[:, index], ranks) for bound in self._intervals)  # [B, rows, ranks]
        seen = np.maximum(high - low, 0)
        # A key is visible where more intervals have begun than ended; an empty interval ends where it begins.
        width = max(self.placement.sizes) + 1
        low += np.arange(len(ranks)) * width
        begun, ended = (np.bincount(x.ravel(), minlength=len(ranks) * width) for x in (low, low + seen))
        keys = (begun - ended).cumsum().reshape(len(ranks), width) > 0
        return View(seen.sum((0, 1), dtype=np.int64), (seen > 0).any(0).T, keys)

    def _look_at_tiles(self, mask: Blocks, q: int, ranks: range, q_rows: range) -> View:
        whole, index = len(q_rows) == self.placement.sizes[q], self.placement.index(q)
        rows = np.zeros((len(ranks), len(q_rows)), bool)
        keys = np.zeros((len(ranks), max(self.placement.sizes)), bool)
        pairs = np.zeros(len(ranks), np.int64)
        for i, k in enumerate(ranks):
            positions = self.placement.index(k)
            if whole:
                by_query, by_key = self._counts[0][index, k], self._counts[1][positions, q]
            else:
                part = mask.part(cut(self.placement.ranges[q], Runs.of(q_rows)), self.placement.ranges[k])
                counts = _seen(part, *(np.ones((size, 1)) for size in (len(q_rows), len(positions))))
                by_query, by_key = (count[:, 0] for count in counts)
            pairs[i], rows[i] = by_query.sum(), by_query > 0
            keys[i, : len(positions)] = _whole_blocks(by_key > 0, positions // mask.block[1])
        return View(pairs, rows, keys)

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        """For a block map: each query's visible keys, and each key's queries, counted by owning rank, [T, N]."""
        assert isinstance(self.mask, Blocks)
        owner = np.zeros((self.placement.num_tokens, self.num_ranks), np.float32)
        for rank in range(self.num_ranks):
            owner[self.placement.index(rank), rank] = 1
        return _seen(self.mask, owner, owner)

    @cached_property
    def _intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """The interval of keys that each query sees, in global positions, [B or 1, T]."""
        num = self.placement.num_tokens
        assert not isinstance(self.mask, Blocks)
        start, end = self.mask.intervals(num, num)
        return np.atleast_2d(start.cpu().numpy()), np.atleast_2d(end.cpu().numpy())

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, step and length of each rank's runs, [N, P]. Ranks with fewer runs are filled with empty ones."""
        width = max(1, *(len(part) for part in self.placement.ranges))
        table = np.zeros((3, self.num_ranks, width), np.int32)
        table[1] = 1
        for rank, part in enumerate(self.placement.ranges):
            for i, run in enumerate(part):
                table[:, rank, i] = run.start, run.step, len(run)
        return table[0], table[1], table[2]

    def _below(self, x: np.ndarray, ranks: range) -> np.ndarray:
        """The number of each key rank's tokens below these global positions, [*x.shape, ranks]."""
        start, step, length = (table[ranks.start : ranks.stop] for table in self._runs)
        count = (x[..., None, None] - start + step - 1) // step
        return np.clip(count, 0, length).sum(-1)


def _seen(mask: Blocks, q_owner: np.ndarray, k_owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count each query's visible keys by the rank that owns them, int64 [T, N], and each key's queries, [S, N].

    q_owner [T, N] and k_owner [S, N] are 1 where a rank owns a token. Full tiles are counted block by block, partial
    ones by their bits. The counts of several maps are summed.
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
    """owner [T, N] as float64 [blocks, block, N], 0 past the end."""
    padded = np.pad(owner.astype(np.float64), ((0, -len(owner) % block), (0, 0)))
    return torch.from_numpy(padded).view(-1, block, owner.shape[1])


def _whole_blocks(seen: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Which rows of a shard to keep: those from the first to the last visible one, except blocks without a visible row.

    Hidden rows of a block with visible rows are kept: without them, later rows would change their place in the block.
    """
    (found,) = seen.nonzero()
    kept = np.isin(blocks, blocks[found])
    if len(found):
        kept[: found[0]] = kept[found[-1] + 1 :] = False
    return kept


def _frame(pairs: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """For each tile: pairs, start and end of query rows, start and end of key rows, key rows; int64 [ranks, 6]."""
    if not rows.shape[1] or not keys.shape[1]:
        return np.zeros((len(pairs), 6), np.int64)
    ends = [(x.argmax(1), x.shape[1] - x[:, ::-1].argmax(1)) for x in (rows, keys)]
    table = np.stack([pairs, *ends[0], *ends[1], keys.sum(1)], -1).astype(np.int64)
    table[pairs == 0] = 0
    return table
