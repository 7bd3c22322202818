"""Where transfers land: a place in its receiver's memory for each, fixed before a walk begins.

A copy into another rank's memory needs an address that its sender knows. Both ends derive it from the schedule, so no
address travels. Two transfers share a place if the first has been used for the last time before the second is posted;
a ring therefore needs room for three parcels at most, however many ranks it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from flashspan.context.schedule import Item, Schedule, Transfer

ALIGNMENT = 256
"""Bytes: a place begins at a multiple, so that any dtype and any vector load fits."""


class Arrival(NamedTuple):
    """A parcel that rank `dst` receives: posted in step `start`, its place is free again for posts of step `free`."""

    key: Hashable
    src: int
    dst: int
    num_bytes: int
    start: int
    free: int


@dataclass(frozen=True, eq=False)
class Landings:
    """For each parcel's key: its place in the receiver's memory, in bytes, its sender, and its number among those that
    this sender sends this receiver. `num_bytes` and `num_parcels` are the most that any rank, any pair needs."""

    places: dict[Hashable, range]
    senders: dict[Hashable, int]
    numbers: dict[Hashable, int]
    num_bytes: int
    num_parcels: int


def land(arrivals: Iterable[Arrival]) -> Landings:
    """Places by first fit, in the order in which parcels are posted: the same on every rank."""
    places: dict[Hashable, range] = {}
    senders: dict[Hashable, int] = {}
    numbers: dict[Hashable, int] = {}
    pairs: Counter[tuple[int, int]] = Counter()
    taken: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # of each rank: (begin, end, free), ascending
    num_bytes = 0
    for arrival in sorted(arrivals, key=lambda one: one.start):  # stable: in the schedule's order within a step
        senders[arrival.key] = arrival.src
        numbers[arrival.key] = pairs[arrival.src, arrival.dst]
        pairs[arrival.src, arrival.dst] += 1
        live = [place for place in taken[arrival.dst] if place[2] > arrival.start]
        begin, size = 0, -(-arrival.num_bytes // ALIGNMENT) * ALIGNMENT
        for other, end, _ in live:
            if begin + size <= other:
                break
            begin = max(begin, end)
        places[arrival.key] = range(begin, begin + arrival.num_bytes)
        taken[arrival.dst] = sorted([*live, (begin, begin + size, max(arrival.free, arrival.start + 1))])
        num_bytes = max(num_bytes, begin + size)
    return Landings(places, senders, numbers, num_bytes, max(pairs.values(), default=0))


def arrivals(schedule: Schedule, num_bytes: Callable[[Transfer], int]) -> list[Arrival]:
    """What every rank receives in a walk of a schedule, and until when it keeps each in its place."""
    last: dict[tuple[int, Item], int] = defaultdict(int)  # (rank, item) -> the step from which nothing uses it
    for tile in schedule.tiles:
        for kind, owner in (("kv", tile.k), ("dkv", tile.k), ("q", tile.q), ("rows", tile.q), ("dq", tile.q)):
            key = (tile.rank, (kind, owner, tile.chunk))
            last[key] = max(last[key], tile.step + 1)
    for t in schedule.transfers:
        for rank in (t.src, t.dst):  # what is sent on stays until it has left; what is added to, until the last term
            last[rank, t.item] = max(last[rank, t.item], t.end)
    found = []
    for t in schedule.transfers:
        # A helper's carry is merged as soon as it is there.
        free = t.end if t.kind == "carry" else last[t.dst, t.item]
        found.append(Arrival(t, t.src, t.dst, num_bytes(t), t.start, free))
    return found
