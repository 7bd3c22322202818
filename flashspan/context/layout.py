"""Which rank owns which tokens: index arithmetic, for any number of tokens on any number of ranks.

A layout assigns the positions 0..T-1 to ranks; `place` returns them as ranges. The positions of a rank ascend, so every
(query rank, key rank) tile of a mask is one mask: one kernel launch per step, without a loop over sub-tiles. Shard
sizes may differ, and shards may be empty: 3 tokens on 4 ranks is an ordinary case.

    contiguous   0 0 0 1 1 1 2 2 2          one run per rank
    zigzag       0 1 2 2 1 0                two runs, one from each end: causal work is even
    striped      0 1 2 0 1 2 0 1 2          every N-th token: causal work is even

`balanced(mask)` is a layout made from a block map: whole blocks of queries, assigned so that the work is even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from flashspan.context.runs import Runs
from flashspan.kernels.masks import Blocks

Ranges: TypeAlias = tuple[range, ...]
"""Ascending positions as disjoint ranges, each non-empty."""


@dataclass(frozen=True)
class Placement:
    """A layout of `num_tokens` tokens: `ranges[rank]` are the positions that rank owns, in the order it holds them."""

    num_tokens: int
    ranges: tuple[Ranges, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranges)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(sum(map(len, part)) for part in self.ranges)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The global positions of a rank's tokens, int64 [T_rank], as RoPE needs them."""
        return torch.from_numpy(self.index(rank)).to(device)

    def index(self, rank: int) -> np.ndarray:
        """`positions` as a NumPy array."""
        return np.concatenate([np.arange(0), *(np.arange(r.start, r.stop, r.step) for r in self.ranges[rank])])

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """A rank's part of a whole tensor, contiguous."""
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"shard splits a dimension of {self.num_tokens} tokens: got {x.shape[dim]} in dim {dim} of "
                f"{tuple(x.shape)}; make the placement for this length"
            )
        parts = [_take(x, dim, part) for part in self.ranges[rank]]
        return torch.cat(parts, dim).contiguous() if parts else x.narrow(dim, 0, 0).contiguous()

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor, from the parts of all ranks in rank order."""
        if tuple(part.shape[dim] for part in parts) != self.sizes:
            raise ValueError(
                f"unshard joins {self.num_ranks} parts of {self.sizes} tokens: "
                f"got {tuple(part.shape[dim] for part in parts)} in dim {dim}"
            )
        shape = list(parts[0].shape)
        shape[dim] = self.num_tokens
        whole = parts[0].new_empty(shape)
        for part, ranges in zip(parts, self.ranges, strict=True):
            done = 0
            for run in ranges:
                _take(whole, dim, run).copy_(part.narrow(dim, done, len(run)))
                done += len(run)
        return whole


Layout: TypeAlias = str | Callable[[int, int], Placement]
"""A name below, or a function of (num_tokens, num_ranks), such as one made from a mask."""


def contiguous(num_tokens: int, num_ranks: int) -> Placement:
    """One run of tokens per rank."""
    bounds = _bounds(num_tokens, num_ranks)
    return _placement(num_tokens, [[run] for run in bounds])


def zigzag(num_tokens: int, num_ranks: int) -> Placement:
    """Rank r owns two of 2N runs, the r-th and the r-th from the end: an early and a late one."""
    bounds = _bounds(num_tokens, 2 * num_ranks)
    return _placement(num_tokens, [[bounds[r], bounds[2 * num_ranks - 1 - r]] for r in range(num_ranks)])


def striped(num_tokens: int, num_ranks: int) -> Placement:
    """Rank r owns every N-th token, from the r-th."""
    return _placement(num_tokens, [[range(r, num_tokens, num_ranks)] for r in range(num_ranks)])


EVEN = 1.05
"""If the busiest rank has at most this many times the mean work, no other assignment is tried."""

UNEVEN = 1.15
"""If the busiest rank has more than this many times the mean work, even work is preferred to even numbers of tokens."""


def balanced(mask: Blocks) -> Callable[[int, int], Placement]:
    """A layout for the block map `mask`: every rank owns whole blocks of queries, with about the same number of tiles.

    Four assignments are tried in this order. The first one within 5 % of even work is used, otherwise the most even
    one:

    1. blocks in order: neighbours stay together, so the fewest bytes are sent;
    2. a run of blocks from each end;
    3. the longest blocks first, each to the least busy rank, the same number of blocks on each rank;
    4. long blocks to the least busy ranks and the others in order, with different numbers of tokens per rank.

    A fifth assigns all blocks, the longest first, with any number of blocks per rank. A rank's memory depends on its
    number of tokens. So the fifth is used only if it is more even than the others by 5 %, or if it is more even and the
    busiest rank of the others has over 1.15 times the mean work. Blocks are not divided: a block with more than a
    rank's share of the work limits how even the ranks can be.
    """
    if not isinstance(mask, Blocks):
        make = "Blocks.from_dense(mask)" if isinstance(mask, Tensor) else "Blocks.of(mask, T, T)"
        raise ValueError(
            f"balanced is made from a block map: got {type(mask).__name__}; use {make}, "
            f'or layout="zigzag" for a causal mask'
        )
    work = mask.rows.visits().sum((0, 1)).cpu().numpy().astype(np.float64)
    size, lengths = mask.block[0], (mask.num_queries, mask.num_keys)

    # `place` caches layouts, so this function must not keep a reference to the mask.
    def balanced_blocks(num_tokens: int, num_ranks: int) -> Placement:
        if lengths != (num_tokens, num_tokens):
            raise ValueError(
                f"this layout was made from a mask of {lengths[0]} queries and {lengths[1]} keys: got a sequence of "
                f"{num_tokens} tokens; make the mask for its length"
            )
        blocks = range(len(work))
        runs = _bounds(len(work), num_ranks)
        halves = _bounds(len(work), 2 * num_ranks)
        assignments: list[Callable[[], list[list[int]]]] = [
            lambda: [list(run) for run in runs],
            lambda: [[*halves[r], *halves[2 * num_ranks - 1 - r]] for r in range(num_ranks)],
            lambda: _assign_longest_first(work, blocks, [len(run) for run in runs]),
            lambda: _fill(work, num_ranks),
        ]
        mean = work.sum() / num_ranks
        best: tuple[float, list[list[int]]] | None = None
        for assign in assignments:
            owned = assign()
            busiest = max(work[part].sum() for part in owned)
            if best is None or busiest < best[0]:
                best = busiest, owned
            if busiest <= EVEN * mean:
                break
        assert best is not None
        if best[0] > EVEN * mean:
            owned = _assign_longest_first(work, blocks, [len(work)] * num_ranks)
            busiest = max(work[part].sum() for part in owned)
            if busiest * EVEN < best[0] or (busiest < best[0] and best[0] > UNEVEN * mean):
                best = busiest, owned
        parts = [[range(b * size, min((b + 1) * size, num_tokens)) for b in sorted(part)] for part in best[1]]
        return _placement(num_tokens, parts)

    # Ranks compare layouts by name: equal masks must give equal names, different masks different ones.
    balanced_blocks.__qualname__ = f"balanced({mask.digest().hex()})"
    return balanced_blocks


def _assign_longest_first(work: np.ndarray, blocks: Sequence[int], room: Sequence[int]) -> list[list[int]]:
    """Assign blocks to ranks, the longest first, each to the rank with the least work that has room for it. Return each
    rank's blocks."""
    owned: list[list[int]] = [[] for _ in room]
    load = np.zeros(len(room))
    for block in sorted(blocks, key=lambda b: -work[b]):
        open_ = [rank for rank in range(len(room)) if len(owned[rank]) < room[rank]]
        rank = min(open_, key=lambda r: load[r])
        owned[rank].append(block)
        load[rank] += work[block]
    return owned


def _fill(work: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Assign blocks longer than a quarter of a rank's share, then the others in order up to each rank's share. Return
    each rank's blocks."""
    share = work.sum() / num_ranks
    long = [b for b in range(len(work)) if work[b] > share / 4]
    owned = _assign_longest_first(work, long, [len(work)] * num_ranks)
    rest = [b for b in range(len(work)) if work[b] <= share / 4]
    room = np.maximum(share - np.array([work[part].sum() for part in owned]), 0)
    # A block goes to the rank whose part of the remaining work contains the block's middle.
    ends = room.cumsum() / max(room.sum(), 1e-30) * work[rest].sum()
    middles = work[rest].cumsum() - work[rest] / 2
    for block, rank in zip(rest, np.searchsorted(ends, middles).clip(max=num_ranks - 1), strict=True):
        owned[rank].append(block)
    return owned


LAYOUTS: dict[str, Callable[[int, int], Placement]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}


@lru_cache(maxsize=64)
def place(layout: Layout, num_tokens: int, num_ranks: int) -> Placement:
    """The placement of `num_tokens` tokens by this layout, cached."""
    if num_tokens < 0 or num_ranks < 1:
        raise ValueError(f"a layout needs 0 or more tokens and 1 or more ranks: got {num_tokens} and {num_ranks}")
    if callable(layout):
        return _checked(layout(num_tokens, num_ranks), num_tokens, num_ranks)
    check_name(layout)
    return LAYOUTS[layout](num_tokens, num_ranks)


def check_name(layout: str) -> None:
    """ValueError unless `layout` is the name of a layout."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(
            f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}, or give a function such as "
            f"flashspan.context.balanced(mask)"
        )


def _checked(answer: object, num_tokens: int, num_ranks: int) -> Placement:
    """The placement from a user's layout function; ValueError unless every token is on exactly one rank."""
    rule = f"a layout assigns {num_tokens} tokens to {num_ranks} ranks"
    if not isinstance(answer, Placement):
        raise ValueError(f"{rule} and must return a Placement: got {type(answer).__name__}; return Placement(...)")
    if (answer.num_tokens, answer.num_ranks) != (num_tokens, num_ranks):
        raise ValueError(
            f"{rule}: got a Placement of {answer.num_tokens} tokens to {answer.num_ranks} ranks; "
            f"make it from the layout's two arguments, num_tokens and num_ranks"
        )
    held = np.zeros(num_tokens, np.int32)
    for rank, ranges in enumerate(answer.ranges):
        last = -1
        for run in ranges:
            if isinstance(run, range) and not len(run):
                continue
            if not isinstance(run, range) or run.step < 1 or not last < run[0] <= run[-1] < num_tokens:
                raise ValueError(
                    f"{rule}, as ranges that ascend within 0 to {num_tokens - 1} on each rank: got {run!r} for "
                    f"rank {rank}; give each rank a tuple of ranges in ascending order"
                )
            held[run.start : run.stop : run.step] += 1
            last = run[-1]
    wrong = np.flatnonzero(held != 1)
    if len(wrong):
        raise ValueError(
            f"{rule}, each token to exactly one: got {held[wrong[0]]} ranks for token {wrong[0]}; "
            f"{len(wrong)} tokens have none or several; divide range({num_tokens}) among the ranks"
        )
    return _placement(num_tokens, answer.ranges)


def deal(placement: Placement, num_parts: int) -> Placement:
    """Split each rank's tokens, in order, over `num_parts` ranks: part j of rank r becomes rank r * num_parts + j."""
    ranges = []
    for part, size in zip(placement.ranges, placement.sizes, strict=True):
        ranges += [cut(part, Runs.of(run)) for run in _bounds(size, num_parts)]
    return _placement(placement.num_tokens, ranges)


def cut(ranges: Ranges, rows: Runs) -> Ranges:
    """The positions of these local rows of a shard."""
    parts, done = [], 0
    for run in ranges:
        mine = rows.within(range(done, done + len(run))).parts
        parts += [run[part.start - done : part.stop - done] for part in mine]
        done += len(run)
    return tuple(parts)


def _bounds(num_tokens: int, num_parts: int) -> list[range]:
    """Split range(num_tokens) into runs whose lengths differ by at most one, the longer ones spread evenly."""
    cuts = [i * num_tokens // num_parts for i in range(num_parts + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def _placement(num_tokens: int, ranges: Sequence[Sequence[range]]) -> Placement:
    """A placement from runs, with empty ones dropped and touching ones joined."""
    joined: list[Ranges] = []
    for runs in ranges:
        parts: list[range] = []
        for run in runs:
            if parts and len(run) and parts[-1].step == run.step == 1 and parts[-1].stop == run.start:
                parts[-1] = range(parts[-1].start, run.stop)
            elif len(run):
                parts.append(run)
        joined.append(tuple(parts))
    return Placement(num_tokens, tuple(joined))


def _take(x: Tensor, dim: int, run: range) -> Tensor:
    """A view of the rows of one run."""
    index: list[slice] = [slice(None)] * x.dim()
    index[dim] = slice(run.start, run[-1] + 1, run.step)
    return x[tuple(index)]
