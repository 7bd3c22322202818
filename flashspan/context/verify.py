"""Prove that a schedule computes attention, by running it with sets in place of tensors, without processes.

    verify(schedule, visibility)               # raises ScheduleError, or returns
    verify(reverse(schedule), visibility)      # the backward pass

It proves that every visible pair is computed exactly once, and no tile without visible pairs; that a rank holds the
tensors that it computes with or sends; that every carry and every gradient reaches its owner exactly once and complete;
and that all rows that are sent are used. `order` proves that NCCL can run it: both ends of each pair of ranks post the
same messages in the same order, and no order of completion deadlocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from flashspan.context.order import check_order
from flashspan.context.runs import Runs, union
from flashspan.context.schedule import Item, Schedule, ScheduleError, Tile, Transfer
from flashspan.context.visibility import Visibility


def verify(schedule: Schedule, visibility: Visibility) -> None:
    """Raise ScheduleError unless this schedule computes attention under the mask, without waste or deadlock."""
    check_coverage(schedule, visibility)
    check_flow(schedule)
    check_economy(schedule)
    check_order(schedule)


def check_coverage(schedule: Schedule, visibility: Visibility) -> None:
    """Check that each visible pair is in exactly one tile, for each chunk of heads."""
    tiles: dict[tuple[int, int, int], list[Tile]] = defaultdict(list)
    for tile in schedule.tiles:
        tiles[tile.chunk, tile.q, tile.k].append(tile)
    for (_, q, k), parts in tiles.items():
        parts.sort(key=lambda tile: tile.q_rows.start)
        for a, b in pairwise(parts):
            if a.q_rows.stop > b.q_rows.start:
                raise ScheduleError(f"{a} and {b} compute the same rows")
        whole = len(parts) == 1
        for tile in parts:
            box = visibility.box(q, k) if whole else visibility.box(q, k, tile.q_rows)
            if not box.pairs:
                raise ScheduleError(f"{tile} has no visible pair; leave it out")
            exact = (box.pairs, box.q_rows, box.k_rows) == (tile.pairs, tile.q_rows, tile.k_rows)
            if not exact:
                raise ScheduleError(f"{tile} must have exactly its visible pairs: they are {box}")
        total = sum(tile.pairs for tile in parts)
        if total != visibility.pairs[q, k]:
            raise ScheduleError(f"tile ({q}, {k}) has {visibility.pairs[q, k]} pairs, {total} computed")
    visible = int((visibility.pairs > 0).sum())
    for chunk in range(schedule.num_chunks):
        done = sum(1 for key in tiles if key[0] == chunk)
        if done != visible:
            raise ScheduleError(f"chunk {chunk} omits visible tiles")


@dataclass
class Sum:
    """A partial carry or gradient: the numbers of the tiles added to it, and their rows."""

    tiles: set[int]
    rows: Runs

    def add(self, other: Sum) -> Sum:
        # Add to the larger set, so that a gradient summed along a ring is not copied at every hop.
        large, small = (self, other) if len(self.tiles) >= len(other.tiles) else (other, self)
        if not large.tiles.isdisjoint(small.tiles):
            raise ScheduleError(f"tiles {large.tiles & small.tiles} are counted twice")
        large.tiles |= small.tiles
        large.rows = union([large.rows, small.rows])
        return large


def check_flow(schedule: Schedule) -> None:
    """Check, step by step, that ranks hold what they use, and that sums reach their owners once and complete."""
    query, result = ("rows", "dq") if schedule.is_backward else ("q", "carry")
    held: list[dict[Item, Runs]] = [{} for _ in range(schedule.num_ranks)]
    sums: list[dict[Item, Sum]] = [{} for _ in range(schedule.num_ranks)]
    moving: dict[int, Sum] = {}  # sums in flight, by transfer
    starts: dict[int, list[Transfer]] = defaultdict(list)
    ends: dict[int, list[Transfer]] = defaultdict(list)
    tiles: dict[int, list[tuple[int, Tile]]] = defaultdict(list)
    for t in schedule.transfers:
        if not 0 <= t.start < t.end or t.src == t.dst or not t.rows:
            raise ScheduleError(
                f"{t} must start in step 0 or later, end after its start, send rows, and join two ranks: "
                f"got steps {t.start} to {t.end}, rows {t.rows}"
            )
        starts[t.start].append(t)
        ends[t.end].append(t)
    for number, tile in enumerate(schedule.tiles):
        tiles[tile.step].append((number, tile))

    def has(rank: int, item: Item, rows: Runs) -> bool:
        return rank == item[1] or held[rank].get(item, Runs()).covers(rows)

    def add(rank: int, item: Item, part: Sum) -> None:
        sums[rank][item] = sums[rank][item].add(part) if item in sums[rank] else part

    for step in range(schedule.num_steps):
        for t in ends[step]:
            if t.kind in (result, "dkv"):
                add(t.dst, t.item, moving.pop(id(t)))
            elif t.item in held[t.dst]:
                raise ScheduleError(f"{t} sends rows of which rank {t.dst} already has a copy")
            else:
                held[t.dst][t.item] = t.rows
        for t in starts[step]:
            if t.kind in (result, "dkv"):
                if t.src == t.owner or t.item not in sums[t.src]:
                    raise ScheduleError(f"{t} in step {step} has no sum to send")
                moving[id(t)] = sums[t.src].pop(t.item)
                if moving[id(t)].rows != t.rows:
                    raise ScheduleError(f"{t} sends rows {t.rows}, not {moving[id(t)].rows}")
            elif not has(t.src, t.item, t.rows):
                raise ScheduleError(f"{t} in step {step} sends what rank {t.src} does not hold")
        for number, tile in tiles[step]:
            if not has(tile.rank, (query, tile.q, tile.chunk), Runs.of(tile.q_rows)):
                raise ScheduleError(f"{tile} lacks its queries")
            if not has(tile.rank, ("kv", tile.k, tile.chunk), tile.k_rows):
                raise ScheduleError(f"{tile} lacks its keys")
            add(tile.rank, (result, tile.q, tile.chunk), Sum({number}, Runs.of(tile.q_rows)))
            if schedule.is_backward:
                add(tile.rank, ("dkv", tile.k, tile.chunk), Sum({number}, tile.k_rows))
    for rank, mine in enumerate(sums):
        for kind, owner, _ in mine:
            if rank != owner:
                raise ScheduleError(f"{kind} of rank {owner} is still on rank {rank} at the end")
    gathered = sum(len(part.tiles) for mine in sums for part in mine.values())
    if gathered != len(schedule.tiles) * (2 if schedule.is_backward else 1):
        raise ScheduleError(f"{len(schedule.tiles)} tiles were computed, {gathered} results reached their owners")


def check_economy(schedule: Schedule) -> None:
    """Check that a copy has exactly the rows that its rank computes with or forwards."""
    used: dict[tuple[int, Item], list[Runs]] = defaultdict(list)
    for tile in schedule.tiles:
        used[tile.rank, ("kv", tile.k, tile.chunk)].append(tile.k_rows)
        for kind in ("q", "rows"):
            used[tile.rank, (kind, tile.q, tile.chunk)].append(Runs.of(tile.q_rows))
    for t in schedule.transfers:
        used[t.src, t.item].append(t.rows)
    for t in schedule.transfers:
        if t.kind in ("kv", "q", "rows"):
            needed = union(used[t.dst, t.item])
            if needed != t.rows:
                raise ScheduleError(f"{t} sends rows {t.rows}, of which {needed} are used")
