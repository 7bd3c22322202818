"""Proof that NCCL can run what a schedule posts: every receive gets the right message, and no rank waits forever.

    check_order(schedule)                   # raises ScheduleError, or returns
    check_order(schedule, num_ulysses=8)    # hybrid: this schedule on the columns of a mesh with 8 columns

NCCL has no tags. On one communicator, the n-th receive of a rank from a peer takes the peer's n-th send to that rank.
What a rank posts together on a communicator is one batch. Batches of a communicator run on each rank one after another:
a batch begins when the one before has ended, and ends when every peer has begun the batch with the other end of each
of its messages. So there are two things to prove, for the programs of all ranks together:

1. On each communicator, both ends of every pair post the same messages in the same order.
2. The graph of what waits for what (batches on all communicators, and the ranks' steps that post them) has no cycle.
   Then no order in which batches complete can block a rank.

`programs` lists the batches that `GroupTransport` posts, and both take the batches from the same functions. (The
transport omits empty messages at both ends: that changes no order and adds no wait.) Without a group for slow transfers
a rank runs all its batches in the order in which it posts them. That case also covers a GPU that runs the kernels of
two communicators one at a time, in that order. Collectives need no proof here: every rank of the group calls them in
the same order, between passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flashspan.context.schedule import Schedule, ScheduleError
from flashspan.context.transport import all_pairs, in_batches


class Endpoints(Protocol):
    """One send and one receive. Ranks are those of the communicator; `str` names it in errors."""

    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...


class AllToAllMessage(NamedTuple):
    """A message of an all-to-all."""

    src: int
    dst: int
    name: str
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.name} from rank {self.src} to rank {self.dst}"


@dataclass(frozen=True, eq=False)
class Batch:
    """What a rank posts together on a communicator, in which it has this rank."""

    communicator: str
    rank: int
    messages: Sequence[Endpoints]


class Stage(NamedTuple):
    """A part of one rank's program: wait for these messages, then post these batches."""

    waits: Sequence[Endpoints]
    batches: Sequence[Batch]


def check_order(schedule: Schedule, num_ulysses: int = 1) -> None:
    """Raise ScheduleError unless NCCL can run this schedule, both with and without a group for slow transfers."""
    prove(programs(schedule, num_ulysses))
    if any(t.slow for t in schedule.transfers):
        prove(programs(schedule, num_ulysses, slow_group=True))


def programs(schedule: Schedule, num_ulysses: int = 1, *, slow_group: bool = False) -> list[list[Stage]]:
    """The program of every rank: a rank of the schedule, or with ulysses a rank of a mesh, row by row.

    Each column of the mesh runs the schedule; each row trades tokens for heads before it, and heads for tokens after.
    """
    ranks = [(row, column) for row in range(schedule.num_ranks) for column in range(num_ulysses)]
    return [
        [
            *_all_to_all(f"row {row}", column, num_ulysses, "heads"),
            *_steps(schedule, row, f" of column {column}" if num_ulysses > 1 else "", slow_group),
            *_all_to_all(f"row {row}", column, num_ulysses, "tokens"),
        ]
        for row, column in ranks
    ]


def _steps(schedule: Schedule, rank: int, where: str, slow_group: bool) -> Iterator[Stage]:
    communicators = ("group" + where, ("slow group" if slow_group else "group") + where)
    for number, step in enumerate(schedule.program(rank)):
        for t in step.posts:
            if t.start != number:
                raise ScheduleError(f"rank {rank} posts {t} in step {number}: it starts in step {t.start}")
        for t in step.waits:
            if t.end != number:
                raise ScheduleError(f"rank {rank} waits for {t} in step {number}: it ends in step {t.end}")
        parts = zip(communicators, in_batches(step.posts), strict=True)
        yield Stage(step.waits, [Batch(communicator, rank, part) for communicator, part in parts if part])


def _all_to_all(row: str, rank: int, num_ranks: int, name: str) -> Iterator[Stage]:
    """An all-to-all: post everything, then wait for everything."""
    messages = [AllToAllMessage(src, dst, name) for src, dst in all_pairs(rank, num_ranks)]
    if messages:
        batches = [Batch(row, rank, part) for part in in_batches(messages) if part]
        yield from (Stage((), batches), Stage(messages, ()))


def prove(programs: Sequence[Sequence[Stage]]) -> None:
    """Raise ScheduleError unless these programs of all ranks match in order and cannot deadlock."""
    posts = list(_posts(programs))
    _check_waits(programs, posts)
    _check_cycles(programs, posts, _matched(posts))


class _Post(NamedTuple):
    """A batch, and who posts it: by number of the program and of its stage."""

    program: int
    stage: int
    batch: Batch

    def __str__(self) -> str:
        return f"rank {self.program}'s batch of step {self.stage} on {self.batch.communicator}"


def _posts(programs: Sequence[Sequence[Stage]]) -> Iterator[_Post]:
    """All batches, each rank's in the order in which it posts them."""
    for number, program in enumerate(programs):
        for position, stage in enumerate(program):
            for batch in stage.batches:
                yield _Post(number, position, batch)


def _check_waits(programs: Sequence[Sequence[Stage]], posts: Sequence[_Post]) -> None:
    """A rank posts its own messages, each once, and waits for each of them once."""
    pending: list[dict[int, Endpoints]] = [{} for _ in programs]
    for post in posts:
        for message in post.batch.messages:
            if post.batch.rank not in (message.src, message.dst) or message.src == message.dst:
                raise ScheduleError(f"{post} holds {message}, of which it is no end")
            if id(message) in pending[post.program]:
                raise ScheduleError(f"{post} holds {message} a second time")
            pending[post.program][id(message)] = message
    for number, program in enumerate(programs):
        for position, stage in enumerate(program):
            for message in stage.waits:
                if pending[number].pop(id(message), None) is None:
                    raise ScheduleError(f"rank {number} waits in step {position} for {message}, which it does not post")
        for message in pending[number].values():
            raise ScheduleError(f"rank {number} posts {message} and never waits for it")


def _matched(posts: Sequence[_Post]) -> list[tuple[int, int]]:
    """The pairs of batches, by number, that have the two ends of a message: matched in order, as NCCL does."""
    sends: dict[tuple[str, int, int], list[tuple[int, Endpoints]]] = defaultdict(list)
    receives: dict[tuple[str, int, int], list[tuple[int, Endpoints]]] = defaultdict(list)
    for number, (_, _, batch) in enumerate(posts):
        for message in batch.messages:
            ends = sends if message.src == batch.rank else receives
            ends[batch.communicator, message.src, message.dst].append((number, message))
    pairs: list[tuple[int, int]] = []
    for key in {**sends, **receives}:
        sent, received = [m for _, m in sends[key]], [m for _, m in receives[key]]
        if sent != received:
            raise ScheduleError(_mismatch(*key, sent, received))
        pairs += zip((number for number, _ in sends[key]), (number for number, _ in receives[key]), strict=True)
    return pairs


def _mismatch(communicator: str, src: int, dst: int, sent: list[Endpoints], received: list[Endpoints]) -> str:
    """The first fault between two ranks, in words."""
    for message in sent:
        if message not in received:
            return f"on {communicator}, rank {src} sends {message}, which rank {dst} does not receive"
    for message in received:
        if message not in sent:
            return f"on {communicator}, rank {dst} receives {message}, which rank {src} does not send"
    count = next(i for i, (one, other) in enumerate(zip(sent, received, strict=False)) if one != other)
    return (
        f"on {communicator}, message {count} from rank {src} to rank {dst}: rank {src} sends {sent[count]}, "
        f"rank {dst} receives {received[count]}"
    )


def _check_cycles(
    programs: Sequence[Sequence[Stage]], posts: Sequence[_Post], pairs: Sequence[tuple[int, int]]
) -> None:
    """No cycle among these events: a batch begins (2 per batch: even), it ends (odd), a rank reaches a stage."""
    first = []  # the event of each program's stage 0
    num_events = 2 * len(posts)
    for program in programs:
        first.append(num_events)
        num_events += len(program)
    causes: list[list[int]] = [[] for _ in range(num_events)]

    holder: list[dict[int, int]] = [{} for _ in programs]  # the batch of each message, by program
    before: dict[tuple[str, int], int] = {}  # a rank's latest batch on a communicator
    for number, post in enumerate(posts):
        begins, ends = 2 * number, 2 * number + 1
        causes[begins].append(first[post.program] + post.stage)
        causes[ends].append(begins)
        queue = post.batch.communicator, post.batch.rank
        if queue in before:
            causes[begins].append(2 * before[queue] + 1)
        before[queue] = number
        holder[post.program].update((id(message), number) for message in post.batch.messages)
    for one, other in set(pairs):
        causes[2 * one + 1].append(2 * other)
        causes[2 * other + 1].append(2 * one)
    for start, program, held in zip(first, programs, holder, strict=True):
        for event, stage in enumerate(program, start):
            if event > start:
                causes[event].append(event - 1)
            causes[event] += {2 * held[id(message)] + 1 for message in stage.waits}

    effects: list[list[int]] = [[] for _ in range(num_events)]
    missing = [len(events) for events in causes]
    for event, events in enumerate(causes):
        for cause in events:
            effects[cause].append(event)
    ready = [event for event in range(num_events) if not missing[event]]
    for event in ready:  # grows as it goes
        for effect in effects[event]:
            missing[effect] -= 1
            if not missing[effect]:
                ready.append(effect)
    if len(ready) == num_events:
        return

    # Each event that is left has a cause that is left: follow causes until one comes again.
    path = [next(event for event in range(num_events) if missing[event])]
    while path[-1] not in path[:-1]:
        path.append(next(cause for cause in causes[path[-1]] if missing[cause]))
    names = []
    for event in path[path.index(path[-1]) :]:
        if event < 2 * len(posts):
            names.append(str(posts[event // 2]))
        else:
            rank = max(number for number, start in enumerate(first) if start <= event)
            names.append(f"rank {rank}'s step {event - first[rank]}")
    cycle = [name for name, last in zip(names, [None, *names], strict=False) if name != last]
    raise ScheduleError(f"ranks wait for each other in a circle: {', which waits for '.join(cycle)}")
