"""Who owns which tokens: index arithmetic, for any number of tokens on any number of ranks.

A layout deals the positions 0..T-1 out to ranks; `place` says it in ranges. Every rank's positions ascend, which is
what makes the tile of any (query rank, key rank) pair of a mask one mask again: one kernel launch per step, never a
loop over sub-tiles. Shards differ in size where they must, and may be empty: 3 tokens on 4 ranks is an ordinary case.

    contiguous   0 0 0 1 1 1 2 2 2          one run per rank
    zigzag       0 1 2 2 1 0                a run from each end: causal work is even
    striped      0 1 2 0 1 2 0 1 2          every N-th token: causal work is even

`balanced(mask)` is a layout made from a block map: whole blocks of queries, dealt so that the work is even.
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
from flashspan.kernels.blocks import Blocks

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
        """How many tokens each rank owns."""
        return tuple(sum(map(len, part)) for part in self.ranges)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The global positions of a rank's tokens, int64 [T_rank]. They travel with the tokens (RoPE wants them)."""
        return torch.from_numpy(self.index(rank)).to(device)

    def index(self, rank: int) -> np.ndarray:
        """`positions` as numpy."""
        return np.concatenate([np.arange(0), *(np.arange(r.start, r.stop, r.step) for r in self.ranges[rank])])

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The rank's part of a whole tensor, contiguous."""
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"shard splits a dimension of {self.num_tokens} tokens: got {x.shape[dim]} in dim {dim} of "
                f"{tuple(x.shape)}; make the placement for this length"
            )
        parts = [_take(x, dim, part) for part in self.ranges[rank]]
        return torch.cat(parts, dim).contiguous() if parts else x.narrow(dim, 0, 0).contiguous()

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from every rank's part, in rank order."""
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
    """Of 2N runs, rank r owns the r-th and the r-th from the end: an early and a late one."""
    bounds = _bounds(num_tokens, 2 * num_ranks)
    return _placement(num_tokens, [[bounds[r], bounds[2 * num_ranks - 1 - r]] for r in range(num_ranks)])


def striped(num_tokens: int, num_ranks: int) -> Placement:
    """Rank r owns every N-th token, from the r-th."""
    return _placement(num_tokens, [[range(r, num_tokens, num_ranks)] for r in range(num_ranks)])


EVEN = 1.05
"""Busiest rank over the mean that is good enough to look no further."""

UNEVEN = 1.15
"""Busiest rank over the mean above which work matters more than how many tokens a rank has to keep."""


def balanced(mask: Blocks) -> Callable[[int, int], Placement]:
    """A layout for the block map `mask`: every rank owns whole blocks, which visit about as many tiles as another's.

    Of four ways, the first that is even within 5 %, else the most even: in order (neighbours stay together, so the
    least is sent); a run from each end; long blocks dealt out, as many blocks to each rank; long blocks dealt out, and
    the others in order as far as each rank has room, which leaves ranks with unequal numbers of tokens.

    A fifth deals all blocks out, the longest first, however many a rank gets of them. What a rank keeps in memory
    follows from its tokens, so it is taken only where it is more even than the others by 5 %, or where it is more even
    and they all leave the busiest rank above 1.15 times the mean. No way divides a block, so one that is more than a
    rank's share of the work by itself sets how even the ranks can be.
    """
    if not isinstance(mask, Blocks):
        make = "Blocks.from_dense(mask)" if isinstance(mask, Tensor) else "Blocks.of(mask, T, T)"
        raise ValueError(
            f"balanced is made from a block map: got {type(mask).__name__}; use {make}, "
            f'or layout="zigzag" for a causal mask'
        )
    work = mask.rows.visits().sum((0, 1)).cpu().numpy().astype(np.float64)
    size, lengths = mask.block[0], (mask.num_queries, mask.num_keys)

    # Layouts are kept by whoever places tokens: it must not hold on to the mask.
    def balanced_blocks(num_tokens: int, num_ranks: int) -> Placement:
        if lengths != (num_tokens, num_tokens):
            raise ValueError(
                f"this layout was made from a mask of {lengths[0]} queries and {lengths[1]} keys: got a sequence of "
                f"{num_tokens} tokens; make the mask for its length"
            )
        blocks = range(len(work))
        runs = _bounds(len(work), num_ranks)
        halves = _bounds(len(work), 2 * num_ranks)
        ways: list[Callable[[], list[list[int]]]] = [
            lambda: [list(run) for run in runs],
            lambda: [[*halves[r], *halves[2 * num_ranks - 1 - r]] for r in range(num_ranks)],
            lambda: _deal_out(work, blocks, [len(run) for run in runs]),
            lambda: _fill(work, num_ranks),
        ]
        mean = work.sum() / num_ranks
        best: tuple[float, list[list[int]]] | None = None
        for way in ways:
            owned = way()
            busiest = max(work[part].sum() for part in owned)
            if best is None or busiest < best[0]:
                best = busiest, owned
            if busiest <= EVEN * mean:
                break
        assert best is not None
        if best[0] > EVEN * mean:
            owned = _deal_out(work, blocks, [len(work)] * num_ranks)
            busiest = max(work[part].sum() for part in owned)
            if busiest * EVEN < best[0] or (busiest < best[0] and best[0] > UNEVEN * mean):
                best = busiest, owned
        parts = [[range(b * size, min((b + 1) * size, num_tokens)) for b in sorted(part)] for part in best[1]]
        return _placement(num_tokens, parts)

    # Ranks compare layouts by name: the same mask must give the same one, another mask another.
    balanced_blocks.__qualname__ = f"balanced({mask.digest().hex()})"
    return balanced_blocks


def _deal_out(work: np.ndarray, blocks: Sequence[int], room: Sequence[int]) -> list[list[int]]:
    """Blocks to ranks, the longest first, each to the rank with the least work that has room for one more."""
    owned: list[list[int]] = [[] for _ in room]
    load = np.zeros(len(room))
    for block in sorted(blocks, key=lambda b: -work[b]):
        open_ = [rank for rank in range(len(room)) if len(owned[rank]) < room[rank]]
        rank = min(open_, key=lambda r: load[r])
        owned[rank].append(block)
        load[rank] += work[block]
    return owned


def _fill(work: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Blocks longer than a quarter of a rank's share dealt out, then the others in order up to each rank's share."""
    share = work.sum() / num_ranks
    long = [b for b in range(len(work)) if work[b] > share / 4]
    owned = _deal_out(work, long, [len(work)] * num_ranks)
    rest = [b for b in range(len(work)) if work[b] <= share / 4]
    room = np.maximum(share - np.array([work[part].sum() for part in owned]), 0)
    # A block goes to the rank in whose stretch of the remaining work its middle lies.
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
    """Who owns which of these tokens."""
    if num_tokens < 0 or num_ranks < 1:
        raise ValueError(f"a layout deals 0 or more tokens to 1 or more ranks: got {num_tokens} on {num_ranks}")
    if callable(layout):
        return _checked(layout(num_tokens, num_ranks), num_tokens, num_ranks)
    check_name(layout)
    return LAYOUTS[layout](num_tokens, num_ranks)


def check_name(layout: str) -> None:
    """Refuse what is no layout's name."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(
            f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}, or give a function such as "
            f"flashspan.context.balanced(mask)"
        )


def _checked(answer: object, num_tokens: int, num_ranks: int) -> Placement:
    """What a layout of the user's own answered: refused if a rank would compute with tokens that are not its own."""
    asked = f"a layout deals {num_tokens} tokens to {num_ranks} ranks"
    if not isinstance(answer, Placement):
        raise ValueError(f"{asked} and returns a Placement: got {type(answer).__name__}; return Placement(...)")
    if (answer.num_tokens, answer.num_ranks) != (num_tokens, num_ranks):
        raise ValueError(
            f"{asked}: got a Placement of {answer.num_tokens} tokens to {answer.num_ranks} ranks; "
            f"make it from the two numbers that the layout is called with"
        )
    held = np.zeros(num_tokens, np.int32)
    for rank, ranges in enumerate(answer.ranges):
        last = -1
        for run in ranges:
            if isinstance(run, range) and not len(run):
                continue
            if not isinstance(run, range) or run.step < 1 or not last < run[0] <= run[-1] < num_tokens:
                raise ValueError(
                    f"{asked}, each rank's as ranges that ascend within 0 to {num_tokens - 1}: got {run!r} for "
                    f"rank {rank}; give each rank a tuple of ranges, and sort what a rank holds"
                )
            held[run.start : run.stop : run.step] += 1
            last = run[-1]
    wrong = np.flatnonzero(held != 1)
    if len(wrong):
        raise ValueError(
            f"{asked}, each token to one of them: got {held[wrong[0]]} ranks that hold token {wrong[0]}, and "
            f"{len(wrong)} tokens that are not held once; let the ranks' ranges divide range({num_tokens})"
        )
    return _placement(num_tokens, answer.ranges)


def deal(placement: Placement, num_parts: int) -> Placement:
    """Each rank's tokens split, in order, over `num_parts` ranks: rank (r, j) is r * num_parts + j."""
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
    """Runs whose lengths differ by at most one, the longer ones spread evenly."""
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
