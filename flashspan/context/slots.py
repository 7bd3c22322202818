"""Receive slots: for each transfer, the byte range of the receiver's memory to copy it to, fixed before a pass begins.

A copy into another rank's memory needs an address that the sender knows. Both ends derive it from the schedule, so no
address is sent. Two transfers share a slot if the last use of the first ends before the second is posted: a ring needs
memory for at most three messages, however many ranks it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from flashspan.context.schedule import Item, Schedule, Transfer

ALIGNMENT = 256
"""Every slot begins at a multiple of this number of bytes, so that any dtype and any vector load is aligned."""


class Receive(NamedTuple):
    """A message to rank `dst`, posted in step `start`. Messages posted in step `free` or later may use its slot."""

    key: Hashable
    src: int
    dst: int
    num_bytes: int
    start: int
    free: int


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """For each message's key: its byte range in the receiver's memory, its sender, and its number among the messages
    from this sender to this receiver. `num_bytes` is the maximum over ranks, `num_messages` the maximum over pairs."""

    ranges: dict[Hashable, range]
    senders: dict[Hashable, int]
    numbers: dict[Hashable, int]
    num_bytes: int
    num_messages: int


def assign_slots(receives: Iterable[Receive]) -> SlotPlan:
    """Assign slots by first fit, in the order in which messages are posted. The result is the same on every rank."""
    ranges: dict[Hashable, range] = {}
    senders: dict[Hashable, int] = {}
    numbers: dict[Hashable, int] = {}
    pairs: Counter[tuple[int, int]] = Counter()
    taken: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by rank: (begin, end, free), ascending
    num_bytes = 0
    for receive in sorted(receives, key=lambda one: one.start):  # stable: keeps the schedule's order within a step
        senders[receive.key] = receive.src
        numbers[receive.key] = pairs[receive.src, receive.dst]
        pairs[receive.src, receive.dst] += 1
        live = [slot for slot in taken[receive.dst] if slot[2] > receive.start]
        begin, size = 0, -(-receive.num_bytes // ALIGNMENT) * ALIGNMENT
        for other, end, _ in live:
            if begin + size <= other:
                break
            begin = max(begin, end)
        ranges[receive.key] = range(begin, begin + receive.num_bytes)
        taken[receive.dst] = sorted([*live, (begin, begin + size, max(receive.free, receive.start + 1))])
        num_bytes = max(num_bytes, begin + size)
    return SlotPlan(ranges, senders, numbers, num_bytes, max(pairs.values(), default=0))


def receives(schedule: Schedule, num_bytes: Callable[[Transfer], int]) -> list[Receive]:
    """All messages that ranks receive in a pass of a schedule, each with the step in which its slot becomes free."""
    last: dict[tuple[int, Item], int] = defaultdict(int)  # (rank, item) -> the first step after its last use
    for tile in schedule.tiles:
        for kind, owner in (("kv", tile.k), ("dkv", tile.k), ("q", tile.q), ("rows", tile.q), ("dq", tile.q)):
            key = (tile.rank, (kind, owner, tile.chunk))
            last[key] = max(last[key], tile.step + 1)
    for t in schedule.transfers:
        for rank in (t.src, t.dst):  # a copy that is forwarded stays until it is sent; a sum, until its last term
            last[rank, t.item] = max(last[rank, t.item], t.end)
    found = []
    for t in schedule.transfers:
        # A helper's carry is merged as soon as it arrives.
        free = t.end if t.kind == "carry" else last[t.dst, t.item]
        found.append(Receive(t, t.src, t.dst, num_bytes(t), t.start, free))
    return found
