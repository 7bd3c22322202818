"""Prove that NCCL can run a schedule: every receive matches the right send, and no deadlock is possible.

    check_order(schedule)                   # raises ScheduleError, or returns
    check_order(schedule, num_ulysses=8)    # hybrid: this schedule on the columns of a mesh with 8 columns

NCCL has no tags. On one communicator, the n-th receive of a rank from a peer takes the peer's n-th send to that rank.
The messages that a rank posts together on a communicator are one batch. Batches of a communicator run one after another
on each rank. A batch begins when the previous one has ended. It ends when, for each of its messages, the peer has begun
the batch that contains the other end. Two statements are proved about the programs of all ranks:

1. On each communicator, both ends of every pair post the same messages in the same order.
2. The wait graph (of the batches on all communicators, and the ranks' steps that post them) has no cycle. Then no order
   in which batches complete can block a rank.

`programs` lists the batches that `GroupTransport` posts; both call the same functions to make them. (The transport
omits empty messages at both ends, which changes no order and adds no wait.) Without a group for slow transfers, a rank
runs all its batches in the order in which it posts them. That case also covers a GPU that runs the kernels of two
communicators one at a time, in that order. Collectives need no proof here: every rank of the group calls them in the
same order, between passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flashspan.context.schedule import Schedule, ScheduleError
from flashspan.context.transport import all_pairs, in_batches


class Endpoints(Protocol):
    """A message by its two ends, which are ranks in the communicator. Error messages contain its `str`."""

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
    """The messages that a rank posts together on a communicator; `rank` is its rank in the communicator."""

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
    """The program of every rank of the schedule or, with ulysses, of every rank of the mesh, row by row.

    Each column of the mesh runs the schedule; each row exchanges tokens for heads before it, and back after it.
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
    """An all-to-all: post all messages, then wait for all."""
    messages = [AllToAllMessage(src, dst, name) for src, dst in all_pairs(rank, num_ranks)]
    if messages:
        batches = [Batch(row, rank, part) for part in in_batches(messages) if part]
        yield from (Stage((), batches), Stage(messages, ()))


def prove(programs: Sequence[Sequence[Stage]]) -> None:
    """Raise ScheduleError unless the programs of all ranks match in order and cannot deadlock."""
    posts = list(_posts(programs))
    _check_waits(programs, posts)
    _check_cycles(programs, posts, _matched(posts))


class _Post(NamedTuple):
    """A batch, and the numbers of the program and the stage that post it."""

    program: int
    stage: int
    batch: Batch

    def __str__(self) -> str:
        return f"rank {self.program}'s batch of step {self.stage} on {self.batch.communicator}"


def _posts(programs: Sequence[Sequence[Stage]]) -> Iterator[_Post]:
    """All batches; those of a rank are in the order in which it posts them."""
    for number, program in enumerate(programs):
        for position, stage in enumerate(program):
            for batch in stage.batches:
                yield _Post(number, position, batch)


def _check_waits(programs: Sequence[Sequence[Stage]], posts: Sequence[_Post]) -> None:
    """Check that each rank posts only its own messages, each once, and waits for each once."""
    pending: list[dict[int, Endpoints]] = [{} for _ in programs]
    for post in posts:
        for message in post.batch.messages:
            if post.batch.rank not in (message.src, message.dst) or message.src == message.dst:
                raise ScheduleError(f"{post} has {message}, which this rank neither sends nor receives")
            if id(message) in pending[post.program]:
                raise ScheduleError(f"{post} has {message} a second time")
            pending[post.program][id(message)] = message
    for number, program in enumerate(programs):
        for position, stage in enumerate(program):
            for message in stage.waits:
                if pending[number].pop(id(message), None) is None:
                    raise ScheduleError(f"rank {number} waits in step {position} for {message}, which it does not post")
        for message in pending[number].values():
            raise ScheduleError(f"rank {number} posts {message} and never waits for it")


def _matched(posts: Sequence[_Post]) -> list[tuple[int, int]]:
    """The pairs of batches (by number) that contain the two ends of a message. Ends are matched in order, as NCCL
    does."""
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
    """The first mismatch between two ranks, as text."""
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
    """Check for cycles among these events: a batch begins (even), it ends (odd), a rank reaches a stage."""
    first = []  # by program: the event of its stage 0
    num_events = 2 * len(posts)
    for program in programs:
        first.append(num_events)
        num_events += len(program)
    causes: list[list[int]] = [[] for _ in range(num_events)]

    holder: list[dict[int, int]] = [{} for _ in programs]  # by program: the batch of each message
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
    for event in ready:  # the loop appends to it
        for effect in effects[event]:
            missing[effect] -= 1
            if not missing[effect]:
                ready.append(effect)
    if len(ready) == num_events:
        return

    # Each remaining event has a remaining cause: follow causes until an event repeats.
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
    raise ScheduleError(f"ranks wait for each other in a cycle: {', which waits for '.join(cycle)}")
