"""The wire: how parcels travel between the ranks of a group, and what is said when one does not arrive.

A parcel is one flat byte buffer, so a transfer is one message whatever it holds, always contiguous; an empty one does
not travel. All parcels of a step are posted together, sends and receives, which cannot deadlock; peers are translated
to global ranks, so sub-groups of a mesh work like the world. Gloo moves the bytes from its own threads and NCCL on its
own stream; both keep going while the caller computes. A parcel's buffer belongs to the wire until `wait` returns.
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

from flashspan.context.bundle import Shelf
from flashspan.context.landing import Arrival, Landings, land

CPU = torch.device("cpu")
Landing: TypeAlias = Callable[[], Landings]


class ExchangeError(RuntimeError):
    """A transfer did not complete: names the rank that waited, its peer, the step and what was on its way."""


@dataclass(eq=False)
class Parcel:
    """One message: `buffer` is uint8 [n]; `key` is the same on both sides and unlike any other parcel's of a walk.

    A slow one has several steps to travel; it must not hold up those that are posted after it.
    """

    src: int
    dst: int
    key: Any
    buffer: Tensor
    label: str
    slow: bool = False


class Sent(Protocol):
    """What `in_batches` asks of a parcel."""

    @property
    def slow(self) -> bool: ...


SentT = TypeVar("SentT", bound=Sent)


def in_batches(parcels: Sequence[SentT]) -> tuple[list[SentT], list[SentT]]:
    """What a step posts, as the two batches that it is posted in: first the fast ones, then the slow ones."""
    return [p for p in parcels if not p.slow], [p for p in parcels if p.slow]


class Wire(Protocol):
    """What a walk asks of the outside world."""

    rank: int
    num_ranks: int

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far."""
        ...

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, landings: Landing | None = None) -> None:
        """A walk of this name begins, and what is posted until its end belongs to it. `call` is a number that ranks
        share if their masks and options are the same; `landings` says where parcels may land, if a wire asks."""
        ...

    def room(self, key: Any) -> Tensor | None:
        """Where a parcel of this walk must land, until the walk is done with it; None where any buffer will do."""
        ...

    def end(self) -> None:
        """It has come to its end."""
        ...

    def post(self, parcels: Sequence[Parcel]) -> None:
        """Start these parcels together; every rank posts its ends in the same order."""
        ...

    def wait(self, parcel: Parcel) -> None:
        """Return when a posted parcel has been sent, or has arrived."""
        ...


class GroupWire:
    """A process group as a wire. `None` is a group of one: it has nobody to send to.

    NCCL sends in the order it is asked to: `slow_group`, another of the same ranks, lets slow parcels be overtaken.
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
                    f"attention over a group is made by the ranks of the group: rank {dist.get_rank()} is none of "
                    f"them; make it on those alone, or give this rank a group of its own"
                )
        self.group = group
        self.timeout = timeout
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.bytes_sent = 0
        self._global = [0] if group is None else dist.get_process_group_ranks(group)
        if slow_group is not None and dist.get_process_group_ranks(slow_group) != self._global:
            raise ValueError(
                f"a slow group has the ranks of the group, in its order: got "
                f"{dist.get_process_group_ranks(slow_group)} beside {self._global}; make both from one list of ranks"
            )
        self._works: dict[Parcel, dist.Work] = {}
        self._slow = slow_group or group
        self._begun: Counter[str] = Counter()  # walks by name
        self._tag = 0  # of the walk that is under way; 0 between them

    @property
    def device(self) -> torch.device:
        """Where small tensors for collectives of this group live."""
        if self.group is None or "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, landings: Landing | None = None) -> None:
        if self.num_ranks == 1:
            return
        if self._tag:
            raise ExchangeError(
                f"an earlier call of rank {self.rank} of {self.num_ranks} ended in the middle, and what it left under "
                f"way would be taken for this one's: end the run, or make a new group and a new attention over it"
            )
        self._begun[what] += 1
        self._tag = 1 + zlib.crc32(f"{what} {self._begun[what]} {call}".encode()) // 4

    def end(self) -> None:
        self._tag = 0

    def global_rank(self, rank: int) -> int:
        """A rank of this group among all processes."""
        return self._global[rank]

    @property
    def tag(self) -> int:
        """A number above 0 that ranks share if they are in the same walk of the same call."""
        return self._tag

    def room(self, key: Any) -> Tensor | None:
        return None

    def post(self, parcels: Sequence[Parcel]) -> None:
        for batch, group in zip(in_batches(parcels), (self.group, self._slow), strict=True):
            self._post([p for p in batch if p.buffer.numel()], group)  # empty ones do not travel: both ends know

    def _post(self, parcels: Sequence[Parcel], group: dist.ProcessGroup | None) -> None:
        if not parcels:
            return
        ops = []
        for parcel in parcels:
            sends = parcel.src == self.rank
            peer = self._global[parcel.dst if sends else parcel.src]
            # Gloo gives a walk only what has its tag: nothing of a rank that left a pass out, or that has another
            # mask, is mistaken for it. What came with the right tag and another size would end the process.
            ops.append(dist.P2POp(dist.isend if sends else dist.irecv, parcel.buffer, peer, group, tag=self._tag))
            self.bytes_sent += parcel.buffer.numel() if sends else 0
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise ExchangeError(self._complain(parcels[0], "could not post", error)) from error
        # NCCL answers for the whole batch at once, gloo for each parcel.
        works = works if len(works) == len(parcels) else works[:1] * len(parcels)
        self._works.update(zip(parcels, works, strict=True))

    def wait(self, parcel: Parcel) -> None:
        work = self._works.pop(parcel, None)
        if work is None:
            return
        try:
            if parcel.buffer.device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()  # orders the streams; the group's own watchdog keeps the time
        except RuntimeError as error:
            raise ExchangeError(self._complain(parcel, f"waited up to {self.timeout:g} s for", error)) from error

    def agree(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, in rank order. As a group's first collective it also connects its ranks."""
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

    def _complain(self, parcel: Parcel, what: str, error: RuntimeError) -> str:
        peer = parcel.dst if parcel.src == self.rank else parcel.src
        return (
            f"rank {self.rank} of {self.num_ranks} {what} {parcel.label}: rank {peer} (global rank "
            f"{self._global[peer]}) has died, stalled or makes other calls: {error}"
        )


class LocalWires:
    """Wires between ranks that live in one process and are walked in turn, for tests and for timing kernels alone."""

    def __init__(self, num_ranks: int) -> None:
        self.posted: dict[Any, Tensor] = {}
        self.wires = [LocalWire(self, rank, num_ranks) for rank in range(num_ranks)]


class LocalWire:
    """One rank's end. A parcel is copied when either side waits for it, so a buffer changed too early shows."""

    def __init__(self, shared: LocalWires, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.bytes_sent = 0
        self._posted = shared.posted

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, landings: Landing | None = None) -> None:
        pass

    def room(self, key: Any) -> Tensor | None:
        return None

    def end(self) -> None:
        pass

    def post(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            if parcel.src == self.rank:
                assert parcel.key not in self._posted, f"{parcel.label} was posted twice"
                self._posted[parcel.key] = parcel.buffer
                self.bytes_sent += parcel.buffer.numel()

    def wait(self, parcel: Parcel) -> None:
        if parcel.dst == self.rank:
            parcel.buffer.copy_(self._posted.pop(parcel.key))
        elif parcel.key in self._posted:  # from here on the sender may use its buffer again
            self._posted[parcel.key] = parcel.buffer.clone()


def all_pairs(rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """(src, dst) of what a rank sends and receives in an all-to-all, in the order in which it posts them."""
    peers = [peer for peer in range(num_ranks) if peer != rank]
    return [pair for peer in peers for pair in ((rank, peer), (peer, rank))]


def all_to_all(
    wire: Wire,
    outgoing: Sequence[Tensor],
    num_bytes: Callable[[int, int], int],
    shelf: Shelf,
    label: str,
    call: int = 0,
) -> list[Tensor]:
    """Send `outgoing[r]` (bytes) to each rank r, and return what each sent here, which may be overwritten by the next
    walk. `num_bytes(src, dst)` is the size of each message, the same on every rank."""

    def landings() -> Landings:
        pairs = [pair for rank in range(wire.num_ranks) for pair in all_pairs(rank, wire.num_ranks) if pair[1] == rank]
        return land(Arrival((label, *pair), *pair, num_bytes(*pair), 0, 1) for pair in pairs)

    def room(src: int) -> Tensor:
        if src == wire.rank:
            return shelf.take(0)
        place = wire.room((label, src, wire.rank))
        return shelf.take(num_bytes(src, wire.rank)) if place is None else place

    wire.begin(label, call, device=shelf.device, landings=landings)
    incoming = [room(src) for src in range(wire.num_ranks)]
    parcels = []
    for src, dst in all_pairs(wire.rank, wire.num_ranks):
        buffer = outgoing[dst] if src == wire.rank else incoming[src]
        parcels.append(Parcel(src, dst, (label, src, dst), buffer, f"{label} from rank {src} to rank {dst}"))
    wire.post(parcels)
    for parcel in parcels:
        wire.wait(parcel)
    wire.end()
    return incoming
