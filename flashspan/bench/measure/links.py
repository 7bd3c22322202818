"""Measure the transports of an attention: the bandwidth of each link, the time of an empty step, and the part of the
transfers that attention hides.

Messages are posted and awaited through the attention's own transports, so copies between GPUs, NCCL and gloo are
measured as they are used.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.bench.measure.clock import between, in_turns, mark, synchronise, timed
from flashspan.bench.measure.switch import Switch
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.schedule import Schedule, Shape, reverse
from flashspan.context.slots import Receive, SlotPlan, assign_slots
from flashspan.context.strategy import ContextAttention
from flashspan.context.symmetric import SymmetricTransport
from flashspan.context.transport import Message
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL, Mask

MESSAGE_BYTES = {"cuda": 32 * 2**20, "cpu": 2**20}
"""The bytes of a message by device type: about a shard of keys and values."""
MESSAGES = 4
"""The number of messages on a link in one measurement, posted together."""
REPEATS, LINKS_S = 5, 15.0
"""The number of measurements per link, of which the fastest counts, and the time limit for all links in seconds."""
EMPTY, EMPTY_STEPS = 256, 20
"""The bytes of a nearly empty message, and the number of steps with one that are timed in a row."""
EVERY_PAIR = 16
"""Up to this number of ranks, every ordered pair is measured; above it, only the pairs that the strategy uses."""
NUM_HEADS, ROUNDS, SPARE = 8, 5, 1.25
"""For the overlap: the number of heads; the number of measurements; and in each step the time of attention divided by
that of the transfer, more than 1 so that attention can hide the whole transfer."""
SHORTEST, LONGEST = 32, 16384
"""Tokens per shard when the overlap is measured."""

T = TypeVar("T")
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Link:
    """One direction between two ranks (global numbers), measured while every rank of the transport sent and received.

    `level` is 0 for the attention's outer transport, 1 for its inner one. `shift` is the distance between the ranks.
    """

    src: int
    dst: int
    level: int
    shift: int
    bandwidth: float  # bytes per second
    intact: bool = True  # received bytes equal sent bytes


@dataclass(frozen=True)
class Overlap:
    """Seconds of one forward pass: attention without transfers, by rank; transfers without attention; and both.

    With this shape and number of tokens, attention takes a little longer than the transfers.
    """

    attention: tuple[float, ...]
    transfers: float
    both: float
    tokens: int
    shape: Shape

    @property
    def hidden(self) -> float:
        """The share of the transfers (or of attention, if that is shorter) that took no extra time; 1 is all."""
        alone = max(self.attention)
        return (alone + self.transfers - self.both) / min(alone, self.transfers)


class Passage(NamedTuple):
    """Times of a rank's messages: when they were posted, when all were received, and when all were also sent; and
    whether the received bytes were correct."""

    posted: Any
    arrived: Any
    left: Any
    intact: bool = True


@dataclass(frozen=True)
class End:
    """The measurements of one end of a link: `sent` by the sender, `received` and `intact` by the receiver."""

    src: int
    dst: int
    level: int
    shift: int
    sent: float = math.inf
    received: float = math.inf
    intact: bool = True


class Traffic:
    """Messages between the ranks of a transport, sent repeatedly from the same buffers."""

    def __init__(self, transport: SymmetricTransport, device: torch.device, num_bytes: int, num_messages: int) -> None:
        self.transport, self.device, self.num_bytes, self.num_messages = transport, device, num_bytes, num_messages
        self.outgoing = self._content(transport.rank)
        self.spare = [torch.empty_like(self.outgoing) for _ in range(num_messages)]
        self._slots: dict[tuple[Pair, ...], SlotPlan] = {}

    def send(self, pairs: Sequence[Pair], *, compare: bool = False) -> Passage:
        """Send from src to dst for each of these pairs; a rank may be in at most two pairs. With `compare`, compare
        received with sent bytes.

        Every rank of the transport makes this call.
        """
        transport, numbers = self.transport, range(self.num_messages)
        transport.begin("preflight", device=self.device, slots=lambda: self._land(tuple(pairs)))
        arriving: list[Message] = []
        leaving: list[Message] = []
        messages: list[Message] = []
        for src, dst in pairs:
            if transport.rank not in (src, dst):
                continue
            for i in numbers:
                key, buffer = ("link", src, dst, i), self.outgoing
                if dst == transport.rank:
                    room = transport.receive_buffer(key)
                    buffer = self.spare[i] if room is None else room
                label = f"message {i} from rank {src} to rank {dst} (preflight)"
                messages.append(Message(src, dst, key, buffer, label))
                (arriving if dst == transport.rank else leaving).append(messages[-1])
        for message in arriving if compare else []:
            message.buffer.zero_()
        posted = mark(self.device)
        transport.post(messages)
        for message in arriving:
            transport.wait(message)
        arrived = mark(self.device)
        for message in leaving:
            transport.wait(message)
        left = mark(self.device)
        intact = all(torch.equal(p.buffer, self._content(p.src)) for p in arriving) if compare else True
        transport.end()
        return Passage(posted, arrived, left, intact)

    def _content(self, rank: int) -> Tensor:
        """The bytes that a rank sends: never 0, and different for 250 consecutive ranks."""
        numbers = torch.arange(rank, rank + self.num_bytes, dtype=torch.int32, device=self.device)
        return (1 + numbers % 251).to(torch.uint8)

    def _land(self, pairs: tuple[Pair, ...]) -> SlotPlan:
        if pairs not in self._slots:
            keys = [("link", *pair, i) for pair in pairs for i in range(self.num_messages)]
            self._slots[pairs] = assign_slots(Receive(key, key[1], key[2], self.num_bytes, 0, 1) for key in keys)
        return self._slots[pairs]


def schedule_of(attend: ContextAttention, num_tokens: int, mask: Mask) -> Schedule:
    """The schedule of an attention's outer transport."""
    settings = attend.settings
    options = {"sizes": settings.sizes} if settings.schedule == "double_ring" else {}
    return GENERATORS[settings.schedule](
        Visibility(place(settings.layout, num_tokens, attend.outer.num_ranks), mask), **options
    )


def pairs_of(attend: ContextAttention, num_tokens: int) -> list[set[Pair]]:
    """The ordered pairs of ranks to measure on the outer and on the inner transport: those that the strategy uses, or
    all pairs if there are few ranks."""
    found: list[set[Pair]] = [set(), set()]
    if attend.outer.num_ranks > 1:
        forward = schedule_of(attend, num_tokens, CAUSAL)
        found[0] = {(t.src, t.dst) for schedule in (forward, reverse(forward)) for t in schedule.transfers}
    for pairs, transport in zip(found, (attend.outer, attend.inner), strict=True):
        if transport is attend.inner or attend.num_ranks <= EVERY_PAIR:  # ulysses: all-to-all
            ranks = range(transport.num_ranks)
            pairs |= {(src, dst) for src in ranks for dst in ranks if src != dst}
    return found


def rounds_of(pairs: Iterable[Pair], num_ranks: int) -> dict[int, list[Pair]]:
    """Pairs by the distance of their ranks: within one distance, each rank sends to one rank and receives from one."""
    rounds: dict[int, list[Pair]] = defaultdict(list)
    for src, dst in sorted(pairs):
        rounds[(dst - src) % num_ranks].append((src, dst))
    return dict(sorted(rounds.items()))


def measure_links(
    attend: ContextAttention,
    pairs: Sequence[Collection[Pair]],
    device: torch.device,
    suspects: Callable[[Sequence[Link]], Collection[Link]],
    *,
    num_bytes: int | None = None,
    again: int = 2,
) -> list[Link]:
    """Measure the links of these pairs; returns all links on every rank. Links in `suspects` are measured again up to
    `again` times, with all others of the same distance: other load may have slowed a link for a moment."""
    size = num_bytes or MESSAGE_BYTES[device.type]
    transports = (attend.outer, attend.inner)
    rounds = [rounds_of(some, transport.num_ranks) for some, transport in zip(pairs, transports, strict=True)]
    traffic = {
        which: Traffic(transport, device, size, MESSAGES)
        for which, transport in enumerate(transports)
        if transport.num_ranks > 1
    }
    budget = LINKS_S / max(1, sum(map(len, rounds)))
    best: dict[Pair, Link] = {}
    todo = {(which, shift) for which, some in enumerate(rounds) for shift in some}
    for _ in range(1 + again):
        ends = [
            end
            for which, shift in sorted(todo)
            for end in see_ends(traffic[which], which, shift, rounds[which][shift], budget)
        ]
        for link in join_ends([end for some in from_all(ends) for end in some], MESSAGES * size, device.type):
            old = best.get((link.src, link.dst), link)
            best[link.src, link.dst] = replace(
                link, bandwidth=max(link.bandwidth, old.bandwidth), intact=link.intact and old.intact
            )
        todo = {(link.level, link.shift) for link in suspects(list(best.values()))}
        if not todo:
            break
    return [best[pair] for pair in sorted(best)]


def see_ends(traffic: Traffic, which: int, shift: int, pairs: Sequence[Pair], budget: float) -> list[End]:
    """This rank's measurements of these pairs, which send at the same time: the fastest of several rounds. A first
    round is not timed; its received bytes are compared with the sent ones."""
    transport, began = traffic.transport, time.perf_counter()
    intact = traffic.send(pairs, compare=True).intact
    received = sent = math.inf
    for number in range(REPEATS):
        spent = int(1e6 * (time.perf_counter() - began))
        slowest = max(row[0] for row in transport.agree([spent]))  # also a barrier
        if number and slowest > 1e6 * budget:
            break
        passage = traffic.send(pairs)
        received = min(received, between(passage.posted, passage.arrived))
        sent = min(sent, between(passage.posted, passage.left))
    ends = []
    for src, dst in pairs:
        link = transport.by_group.global_rank(src), transport.by_group.global_rank(dst), which, shift
        if src == transport.rank:
            ends.append(End(*link, sent=sent))
        if dst == transport.rank:
            ends.append(End(*link, received=received, intact=intact))
    return ends


def join_ends(ends: Iterable[End], num_bytes: int, device_type: str) -> list[Link]:
    """Links, from the measurements of both ends.

    NCCL reports when all sends and receives of a rank are complete, so a slow link makes both of its ends slow in both
    directions. Only that link has two slow ends, so the time of a link is the smaller of the two. On CPUs each message
    is complete by itself, and only the receiver's time counts: the sender's socket accepts bytes before they are sent.
    """
    found: dict[Pair, list[End]] = defaultdict(list)
    for end in ends:
        found[end.src, end.dst].append(end)
    links = []
    for (src, dst), some in found.items():
        seconds = min(end.received for end in some)
        if device_type == "cuda":
            seconds = min([seconds, *(end.sent for end in some)])
        intact = all(end.intact for end in some)
        links.append(Link(src, dst, some[0].level, some[0].shift, num_bytes / seconds, intact))
    return links


def measure_empty_step(attend: ContextAttention, device: torch.device) -> float:
    """Seconds of a ring step with nearly empty messages, on the slowest rank."""
    seconds = 0.0
    for transport in (attend.outer, attend.inner):
        if transport.num_ranks == 1:
            continue
        pairs = [(rank, (rank + 1) % transport.num_ranks) for rank in range(transport.num_ranks)]
        traffic = Traffic(transport, device, EMPTY, 1)
        traffic.send(pairs)
        times = []
        for _ in range(REPEATS):
            transport.agree([0])
            begin = time.perf_counter()
            for _ in range(EMPTY_STEPS):
                traffic.send(pairs)
            synchronise(device)
            times.append((time.perf_counter() - begin) / EMPTY_STEPS)
        seconds = max(seconds, min(times))
    return max(from_all(seconds))


def measure_overlap(
    attend: ContextAttention, device: torch.device, dtype: torch.dtype, head_dim: int, *, rounds: int = ROUNDS
) -> Overlap:
    """Time forward passes of this strategy with a full mask: attention alone, transfers alone, and both."""
    shard = 1024 if device.type == "cuda" else 64
    attention, transfers, _ = _time_passes(attend, device, dtype, head_dim, shard, rounds=1)
    # Attention's time grows with the square of the tokens, that of transfers linearly: the ratio grows with the tokens.
    steps = attend.num_ranks / (attend.num_ranks - 1)
    wanted = shard * SPARE * steps * transfers / max(attention)
    shard = SHORTEST * round(min(LONGEST, max(SHORTEST, wanted)) / SHORTEST)
    attention, transfers, both = _time_passes(attend, device, dtype, head_dim, shard, rounds)
    shape = Shape(_batch(device, dtype, head_dim, shard), NUM_HEADS, NUM_HEADS, head_dim, dtype.itemsize)
    return Overlap(attention, transfers, both, shard * attend.num_ranks, shape)


def _batch(device: torch.device, dtype: torch.dtype, head_dim: int, shard: int) -> int:
    """The batch for which a shard's keys and values have the size of a message."""
    return max(1, MESSAGE_BYTES[device.type] // (2 * NUM_HEADS * head_dim * shard * dtype.itemsize))


def _time_passes(
    attend: ContextAttention, device: torch.device, dtype: torch.dtype, head_dim: int, shard: int, rounds: int
) -> tuple[tuple[float, ...], float, float]:
    """Seconds of attention on each rank, of transfers, and of both: the best of several rounds on each rank."""
    settings = replace(attend.settings, num_tokens=shard * attend.num_ranks)
    q = torch.randn((_batch(device, dtype, head_dim, shard), NUM_HEADS, shard, head_dim), device=device).to(dtype)
    way = ContextAttention(attend.outer, attend.inner, settings)
    way.local = attend.local
    switch = Switch(way)

    def call() -> None:
        way(q, q, q)

    ways: dict[str, Callable[[], None]] = {
        "attention": partial(switch.without, "sends", call),
        "transfers": partial(switch.without, "computes", call),
        "both": call,
    }

    def time_one(run: Callable[[], None]) -> Callable[[], float]:
        return lambda: 1e-3 * timed(run, device, together=True)[0]

    calls: Mapping[str, Callable[[], float]] = {name: time_one(run) for name, run in ways.items()}
    with torch.no_grad():
        in_turns(calls, 1)  # makes plans and compiles kernels
        found = {name: from_all(min(times)) for name, times in in_turns(calls, rounds).items()}
    return found["attention"], max(found["transfers"]), max(found["both"])


def from_all(value: T) -> tuple[T, ...]:
    """The values of all ranks, in rank order. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return tuple(values)
