"""Transports: how messages are sent between the ranks of a group, and the error when one does not arrive.

A message is one flat byte buffer, so every transfer is one contiguous message; empty messages are not sent. All sends
and receives of a step are posted together, which cannot deadlock. Peers are translated to global ranks, so sub-groups
of a mesh work like the world group. Gloo sends from its own threads and NCCL on its own stream: both overlap with the
caller's computation. A message's buffer belongs to the transport until `wait` returns.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.context.bundle import BufferPool
from flashspan.context.slots import Receive, SlotPlan, assign_slots

CPU = torch.device("cpu")
MakeSlots: TypeAlias = Callable[[], SlotPlan]


class ExchangeError(RuntimeError):
    """A transfer did not complete. The message names the rank that waited, its peer, the step and the transfer."""


@dataclass(eq=False)
class Message:
    """One message: `buffer` is uint8 [n]; `key` is equal on both ranks and unique within a pass.

    A slow message has several steps to arrive; it must not delay messages that are posted after it.
    """

    src: int
    dst: int
    key: Any
    buffer: Tensor
    label: str
    slow: bool = False


class Sent(Protocol):
    """The attribute of a message that `in_batches` reads."""

    @property
    def slow(self) -> bool: ...


SentT = TypeVar("SentT", bound=Sent)


def in_batches(messages: Sequence[SentT]) -> tuple[list[SentT], list[SentT]]:
    """The messages of a step as the two batches in which they are posted: the fast ones, then the slow ones."""
    return [p for p in messages if not p.slow], [p for p in messages if p.slow]


class Transport(Protocol):
    """How one rank sends and receives. A pass (forward, backward or one all-to-all) is `begin`, messages, `end`."""

    rank: int
    num_ranks: int

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent so far."""
        ...

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, slots: MakeSlots | None = None) -> None:
        """Begin a pass named `what`: all messages posted until `end` belong to it. `call` is a number that is equal on
        ranks with the same masks and options. `slots` makes the slot plan, for a transport that needs one."""
        ...

    def receive_buffer(self, key: Any) -> Tensor | None:
        """The buffer into which a message of this pass must be received; None if any buffer will do."""
        ...

    def end(self) -> None:
        """End the pass."""
        ...

    def post(self, messages: Sequence[Message]) -> None:
        """Start these sends and receives together; every rank posts them in the same order."""
        ...

    def wait(self, message: Message) -> None:
        """Wait until a posted message has been sent (on the sender) or has arrived (on the receiver)."""
        ...


class GroupTransport:
    """A process group as a transport. `None` is a group of one rank, which sends nothing.

    NCCL sends in the order of the posts: with `slow_group`, a second group of the same ranks, fast messages can
    overtake slow ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        slow_group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
    ) -> None:
        for one in (group, slow_group):
            if one is not None and dist.get_rank(one) < 0:
                raise ValueError(
                    f"context_parallel must be called only on ranks of its group: rank {dist.get_rank()} is not in the "
                    f"group; skip the call on this rank, or give it a group of its own"
                )
        self.group = group
        self.timeout = timeout
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.bytes_sent = 0
        self._global = [0] if group is None else dist.get_process_group_ranks(group)
        if slow_group is not None and dist.get_process_group_ranks(slow_group) != self._global:
            raise ValueError(
                f"a slow group must have the ranks of the group, in the same order: got "
                f"{dist.get_process_group_ranks(slow_group)} for the group {self._global}; make both from one list"
            )
        self._works: dict[Message, dist.Work] = {}
        self._slow = slow_group or group
        self._begun: Counter[str] = Counter()  # number of passes begun, by name
        self._tag = 0  # the tag of the current pass; 0 between passes

    @property
    def device(self) -> torch.device:
        """The device on which this group's collectives need small tensors."""
        if self.group is None or "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, slots: MakeSlots | None = None) -> None:
        if self.num_ranks == 1:
            return
        if self._tag:
            raise ExchangeError(
                f"an earlier call of rank {self.rank} of {self.num_ranks} failed before its end, and its messages "
                f"could be mistaken for those of this one: end the run, or make a new group and a new attention over it"
            )
        self._begun[what] += 1
        self._tag = 1 + zlib.crc32(f"{what} {self._begun[what]} {call}".encode()) // 4

    def end(self) -> None:
        self._tag = 0

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of this group."""
        return self._global[rank]

    @property
    def tag(self) -> int:
        """A number above 0 that is equal on ranks in the same pass of the same call."""
        return self._tag

    def receive_buffer(self, key: Any) -> Tensor | None:
        return None

    def post(self, messages: Sequence[Message]) -> None:
        for batch, group in zip(in_batches(messages), (self.group, self._slow), strict=True):
            self._post([p for p in batch if p.buffer.numel()], group)  # empty on both ranks: not sent

    def _post(self, messages: Sequence[Message], group: dist.ProcessGroup | None) -> None:
        if not messages:
            return
        ops = []
        for message in messages:
            sends = message.src == self.rank
            peer = self._global[message.dst if sends else message.src]
            # Gloo matches tags: a message of another pass, from a rank that skipped a pass or has another mask, is not
            # received here. A message with this tag and another size would end the process.
            ops.append(dist.P2POp(dist.isend if sends else dist.irecv, message.buffer, peer, group, tag=self._tag))
            self.bytes_sent += message.buffer.numel() if sends else 0
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise ExchangeError(self._error_message(messages[0], "could not post", error)) from error
        # NCCL returns one work for the whole batch, gloo one for each message.
        works = works if len(works) == len(messages) else works[:1] * len(messages)
        self._works.update(zip(messages, works, strict=True))

    def wait(self, message: Message) -> None:
        work = self._works.pop(message, None)
        if work is None:
            return
        try:
            if message.buffer.device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()  # orders the streams; the timeout is that of the group's own watchdog
        except RuntimeError as error:
            raise ExchangeError(self._error_message(message, f"waited up to {self.timeout:g} s for", error)) from error

    def agree(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, in rank order. A group's first collective also connects its ranks."""
        if self.group is None or self.num_ranks == 1:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        rows = mine.new_empty(self.num_ranks, len(row))
        try:
            for group in dict.fromkeys((self.group, self._slow)):  # in the same order on every rank
                work = dist.all_gather([*rows], mine, group=group, async_op=True)
                if self.device.type == "cpu":
                    work.wait(timedelta(seconds=self.timeout))
                else:
                    work.wait()
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.num_ranks} waited up to {self.timeout:g} s for all ranks to call "
                f"attention; every rank of the group must make the same calls: {error}"
            ) from error
        return rows.tolist()

    def _error_message(self, message: Message, what: str, error: RuntimeError) -> str:
        peer = message.dst if message.src == self.rank else message.src
        return (
            f"rank {self.rank} of {self.num_ranks} {what} {message.label}: rank {peer} (global rank "
            f"{self._global[peer]}) has died, has stalled or makes other calls: {error}"
        )


class LocalTransports:
    """Transports between the ranks of one process, for tests and for timing kernels without communication."""

    def __init__(self, num_ranks: int) -> None:
        self.posted: dict[Any, Tensor] = {}
        self.transports = [LocalTransport(self, rank, num_ranks) for rank in range(num_ranks)]


class LocalTransport:
    """One rank's transport. A message is copied when either rank waits for it, so a schedule that changes a buffer too
    early gives wrong results."""

    def __init__(self, shared: LocalTransports, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.bytes_sent = 0
        self._posted = shared.posted

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, slots: MakeSlots | None = None) -> None:
        pass

    def receive_buffer(self, key: Any) -> Tensor | None:
        return None

    def end(self) -> None:
        pass

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.src == self.rank:
                assert message.key not in self._posted, f"{message.label} was posted twice"
                self._posted[message.key] = message.buffer
                self.bytes_sent += message.buffer.numel()

    def wait(self, message: Message) -> None:
        if message.dst == self.rank:
            message.buffer.copy_(self._posted.pop(message.key))
        elif message.key in self._posted:  # copy it, because the sender may reuse its buffer after this
            self._posted[message.key] = message.buffer.clone()


def all_pairs(rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """(src, dst) of each message that a rank posts in an all-to-all, in the order of posting."""
    peers = [peer for peer in range(num_ranks) if peer != rank]
    return [pair for peer in peers for pair in ((rank, peer), (peer, rank))]


def all_to_all(
    transport: Transport,
    outgoing: Sequence[Tensor],
    num_bytes: Callable[[int, int], int],
    pool: BufferPool,
    label: str,
    call: int = 0,
) -> list[Tensor]:
    """Send `outgoing[r]` (bytes) to each rank r, and return the bytes received from each rank. The next pass may
    overwrite them. `num_bytes(src, dst)` returns the size of a message and must be the same function on every rank."""

    def slots() -> SlotPlan:
        pairs = [
            pair
            for rank in range(transport.num_ranks)
            for pair in all_pairs(rank, transport.num_ranks)
            if pair[1] == rank
        ]
        return assign_slots(Receive((label, *pair), *pair, num_bytes(*pair), 0, 1) for pair in pairs)

    def receive_buffer(src: int) -> Tensor:
        if src == transport.rank:
            return pool.take(0)
        buffer = transport.receive_buffer((label, src, transport.rank))
        return pool.take(num_bytes(src, transport.rank)) if buffer is None else buffer

    transport.begin(label, call, device=pool.device, slots=slots)
    incoming = [receive_buffer(src) for src in range(transport.num_ranks)]
    messages = []
    for src, dst in all_pairs(transport.rank, transport.num_ranks):
        buffer = outgoing[dst] if src == transport.rank else incoming[src]
        messages.append(Message(src, dst, (label, src, dst), buffer, f"{label} from rank {src} to rank {dst}"))
    transport.post(messages)
    for message in messages:
        transport.wait(message)
    transport.end()
    return incoming
