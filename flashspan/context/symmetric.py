"""Transfers as copies into the receiver's memory, if the sender can access it: on one GPU, over NVLink, on one host.

Each message uses two flags. When the receiver posts the message, its compute lane sets "ready" on the sender: all
earlier uses of the message's slot have ended. The sender's transfer lane waits for "ready", copies, and sets "arrived"
on the receiver, whose compute lane waits for it. The host does not wait. Flags are set to the number of the pass, so
the flags of another call, or of an earlier pass, do not match.

A flag belongs to a pair of ranks, a direction and a message number. A rank that is one or several passes ahead cannot
overwrite a flag that its peer still waits for: to get ahead, it had to receive the message that follows that wait.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.context import peer_memory
from flashspan.context.peer_memory import CudaPeerMemory, PeerMemory
from flashspan.context.shared_memory import COMPUTE, FAST, SLOW, HostPeerMemory, NotShared
from flashspan.context.slots import SlotPlan
from flashspan.context.transport import CPU, ExchangeError, GroupTransport, MakeSlots, Message

TransportName: TypeAlias = Literal["auto", "symmetric", "group"]
TRANSPORTS = ("auto", "symmetric", "group")
READY, ARRIVED = 0, 1


@dataclass(frozen=True)
class Reach:
    """The ranks whose memory this rank can write to (ascending, itself included), and the reason as text."""

    ranks: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Arena:
    """Memory shared by the ranks within reach, and its size."""

    memory: PeerMemory
    num_bytes: int
    num_messages: int


class SymmetricTransport:
    """A transport that copies to ranks within reach, and uses the process group for the others.

    The first pass, in which all ranks take part, determines the reach. The arena is replaced when a pass needs a larger
    one: that synchronises the device, and happens at most twice per plan, in forward and in backward.
    """

    def __init__(self, group: GroupTransport, transport: TransportName) -> None:
        self.by_group, self.transport = group, transport
        self.rank, self.num_ranks, self.group = group.rank, group.num_ranks, group.group
        self._reaches: dict[torch.device, Reach] = {}
        self._arenas: dict[torch.device, Arena] = {}
        self._control: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._bytes_copied = 0
        self.caller = threading.get_ident()
        """The thread that called attention and receives errors. Each call sets it: backward runs on another."""
        self._passes = self._tag = 0
        self._device, self._slots = CPU, SlotPlan({}, {}, {}, 0, 0)
        self._marks: dict[Message, Any] = {}

    @property
    def bytes_sent(self) -> int:
        return self._bytes_copied + self.by_group.bytes_sent

    def agree(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, in rank order."""
        return self.by_group.agree(row)

    def reach(self, device: torch.device) -> Reach:
        """The ranks within reach for tensors on this device, and the reason. The first call is a collective."""
        if device not in self._reaches:
            self._reaches[device] = find_reach(self.by_group, self.transport, device)
        return self._reaches[device]

    def begin(self, what: str, call: int = 0, *, device: torch.device = CPU, slots: MakeSlots | None = None) -> None:
        self._device, ranks = device, self.reach(device).ranks
        self.by_group.begin(what, call)
        if len(ranks) == 1:
            return
        assert slots is not None
        self._slots = slots()
        try:
            self._grow(device)
        except ValueError:  # raised on all ranks, before any message is sent
            self.by_group.end()
            raise
        # The value of flags: the pass's number, different from the last 4,095 ones, and a hash of its name and call.
        self._passes += 1
        self._tag = 1 + (self._passes % 2**12 << 18 | self.by_group.tag % 2**18)
        if device in self._arenas:
            self._memory.begin()

    def end(self) -> None:
        self.by_group.end()

    def receive_buffer(self, key: Any) -> Tensor | None:
        if not self._within or self._slots.senders[key] not in self._within:
            return None
        place = self._slots.ranges[key]
        return self._memory.view(place.start, len(place))

    def post(self, messages: Sequence[Message]) -> None:
        mine = [p for p in messages if self._copies(p)]
        self.by_group.post([p for p in messages if p.src not in self._within or p.dst not in self._within])
        if not mine:
            return
        memory, tag, lanes = self._memory, self._tag, set()
        memory.check()
        for message in mine:
            if message.dst == self.rank:
                flag = self._flag(READY, self.rank, message)
                memory.signal(COMPUTE, self._index(message.src), flag, tag)
        for message in mine:
            if message.src != self.rank:
                continue
            lane = SLOW if message.slow else FAST
            if lane not in lanes:
                memory.follow(lane)
                lanes.add(lane)
            flag = self._flag(READY, message.dst, message)
            memory.wait(lane, self._index(message.dst), flag, tag, self._wait_label(message))
            memory.copy(lane, self._index(message.dst), self._slots.ranges[message.key].start, message.buffer)
            memory.signal(lane, self._index(message.dst), self._flag(ARRIVED, self.rank, message), tag)
            self._marks[message] = memory.mark(lane)
            self._bytes_copied += message.buffer.numel()

    def wait(self, message: Message) -> None:
        if message in self._marks:
            self._memory.join(self._marks.pop(message))
        elif self._copies(message):
            flag = self._flag(ARRIVED, message.src, message)
            self._memory.wait(COMPUTE, self._index(message.src), flag, self._tag, self._wait_label(message))
        else:
            self.by_group.wait(message)

    @property
    def _within(self) -> tuple[int, ...]:
        ranks = self._reaches[self._device].ranks
        return ranks if len(ranks) > 1 else ()

    @property
    def _memory(self) -> PeerMemory:
        return self._arenas[self._device].memory

    def _copies(self, message: Message) -> bool:
        """Whether a message is copied; empty messages are not sent."""
        return message.src in self._within and message.dst in self._within and message.buffer.numel() > 0

    def _index(self, rank: int) -> int:
        """A rank's index among the ranks within reach."""
        return self._within.index(rank)

    def _flag(self, side: int, writer: int, message: Message) -> int:
        """The number of the flag that `writer` sets for a message, in its peer's memory."""
        num_messages = self._arenas[self._device].num_messages
        pair = side * len(self._within) + self._index(writer)
        return pair * num_messages + self._slots.numbers[message.key]

    def _grow(self, device: torch.device) -> None:
        """Make the arena large enough for the pass that begins."""
        arena, needs = self._arenas.get(device), self._slots
        if arena is not None and needs.num_bytes <= arena.num_bytes and needs.num_messages <= arena.num_messages:
            return
        num_bytes = max(needs.num_bytes, arena.num_bytes if arena else 0)
        num_messages = 1 << (max(needs.num_messages, arena.num_messages if arena else 1) - 1).bit_length()
        if arena is not None:
            arena.memory.close()
            del self._arenas[device], arena
        ranks = self._reaches[device].ranks
        group = self._control_group(ranks)
        timeout = self.by_group.timeout
        try:  # after the barrier, no rank still copies into the old arena
            dist.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.num_ranks} waited {timeout:g} s to share memory with the others: {error}"
            ) from error
        memory: PeerMemory
        num_flags = 2 * len(ranks) * num_messages
        try:
            if device.type == "cuda":
                memory = CudaPeerMemory(group, device, num_flags, num_bytes, timeout, lambda: self.caller)
            else:
                memory = HostPeerMemory(group, num_flags, num_bytes, timeout)
        except NotShared as error:
            self._fall_back(device, str(error))
            return
        self._arenas[device] = Arena(memory, num_bytes, num_messages)

    def _fall_back(self, device: torch.device, problem: str) -> None:
        """Use the group from now on; ValueError if it cannot send these tensors, or if transport is `symmetric`."""
        size = f"{self._slots.num_bytes / 2**20:,.1f} MiB"
        if self.transport == "symmetric":
            raise ValueError(
                f"ranks could not share {size} of memory: {problem}; use transport='group', or a smaller batch or "
                f"sequence"
            )
        refuse_gpu_without_nccl(self.by_group, device)
        first = self._reaches[device].ranks[0]
        self._reaches[device] = Reach((self.rank,), f"group: {size} of memory could not be shared, {problem}")
        if self.rank == first:
            warnings.warn(f"attention uses the process group: memory could not be shared, {problem}", stacklevel=2)

    def _control_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A gloo group of the ranks within reach, for objects that their processes exchange on the CPU."""
        if ranks not in self._control:
            assert self.group is not None
            if len(ranks) == self.num_ranks and dist.get_backend(self.group) == "gloo":
                self._control[ranks] = self.group
            else:
                members = [dist.get_global_rank(self.group, rank) for rank in ranks]
                self._control[ranks] = _gloo_group(tuple(members), self.by_group.timeout)
        return self._control[ranks]

    def _wait_label(self, message: Message) -> str:
        """The beginning of the error message if a wait for this message fails."""
        peer = message.dst if message.src == self.rank else message.src
        return (
            f"rank {self.rank} of {self.num_ranks} waited for {message.label}: rank {peer} "
            f"(global rank {self.by_group.global_rank(peer)})"
        )


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by global ranks; reused: each has threads and sockets


def _gloo_group(members: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
    """A gloo group of these ranks, created once. The first call is a collective of these ranks."""
    known = _groups.get(members)
    if known is None or known not in dist.distributed_c10d._world.pg_map:  # not created yet, or destroyed
        span = timedelta(seconds=timeout)
        known = dist.new_group(list(members), timeout=span, backend="gloo", use_local_synchronization=True)
        _groups[members] = known
    return known


def refuse_gpu_without_nccl(group: GroupTransport, device: torch.device) -> None:
    """ValueError if the group would have to send tensors of a GPU and cannot."""
    if device.type == "cuda" and group.num_ranks > 1 and "cuda:gloo" in dist.get_backend_config(group.group):
        raise ValueError(
            f"a process group with the backend {dist.get_backend(group.group)} cannot send tensors on a GPU: make it "
            f"with nccl, or use transport='auto' on ranks of one host"
        )


def find_reach(group: GroupTransport, transport: TransportName, device: torch.device) -> Reach:
    """The ranks whose memory this rank can write to. A collective; ValueError if `symmetric` is not available."""
    alone = Reach((group.rank,), "")
    if group.num_ranks == 1 or transport == "group":
        refuse_gpu_without_nccl(group, device)
        return Reach(alone.ranks, "group: requested" if transport == "group" else "group: one rank")
    if device.type == "cpu" and transport == "auto":
        return Reach(alone.ranks, f"group: the tensors are on CPUs ({dist.get_backend(group.group)})")
    gpu, fault, peer_fault = 0, "", ""
    try:  # the other ranks would wait for a rank that raises here
        fault = _missing(device)
        gpu = _digest(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else 0
    except RuntimeError as error:
        fault = str(error)
    host = _digest(_host())
    rows = group.agree([host, gpu, int(bool(fault))])
    unreachable = 0
    try:
        unreachable = _first_unreachable([row[1] for row in rows], device)
    except RuntimeError as error:
        peer_fault = str(error)
    peers = group.agree([unreachable, int(bool(peer_fault))])
    blocked = [row[0] for row in peers]
    lacking = [row[2] or peer[1] for row, peer in zip(rows, peers, strict=True)]
    ranks = tuple(rank for rank, row in enumerate(rows) if row[0] == host)
    gpus = [row[1] for row in rows]
    shared = device.type == "cuda" and len({gpus[rank] for rank in ranks}) < len(ranks)
    hosts = len({row[0] for row in rows})
    if any(lacking):
        rank = next(rank for rank, lacks in enumerate(lacking) if lacks)
        problem = fault or peer_fault or f"rank {rank} cannot use symmetric memory; see the error of that rank"
    elif any(blocked):
        rank = next(rank for rank, peer in enumerate(blocked) if peer)
        problem = f"the GPU of rank {rank} has no peer access to that of rank {blocked[rank] - 1}"
    elif hosts > 1 and transport == "symmetric":
        problem = f"the ranks are on {hosts} hosts, and symmetric memory works within one"
    else:
        problem = "" if len(ranks) > 1 else "no other rank is on this host"
    if problem and transport == "symmetric":
        raise ValueError(f"transport='symmetric' is not available: {problem}; use transport='auto'")
    if problem:
        refuse_gpu_without_nccl(group, device)
        if group.rank == 0 and hosts == 1:
            warnings.warn(f"attention uses the process group: {problem}", stacklevel=2)
        return Reach(alone.ranks, f"group: {problem}")
    if shared:
        peer_memory.allow_shared_gpu()
    where = "one GPU" if shared and len(set(gpus)) == 1 else "one host"
    rest = "" if hosts == 1 else f"; between the {hosts} hosts, the group's {dist.get_backend(group.group)} is used"
    return Reach(ranks, f"symmetric: {len(ranks)} ranks on {where} copy into each other's memory{rest}")


def _missing(device: torch.device) -> str:
    """The reason why this process cannot share memory; empty if it can."""
    if device.type == "cuda":
        return peer_memory.missing()
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return ""
    return "sharing CPU memory between processes needs Linux"


def _host() -> str:
    """A text that identifies this host, or this container on the host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _first_unreachable(gpus: Sequence[int], device: torch.device) -> int:
    """1 + the first rank whose GPU is visible here but not accessible as a peer; 0 if there is none."""
    if device.type != "cuda":
        return 0
    mine = device.index if device.index is not None else torch.cuda.current_device()
    seen = {_digest(str(torch.cuda.get_device_properties(i).uuid)): i for i in range(torch.cuda.device_count())}
    for rank, gpu in enumerate(gpus):
        other = seen.get(gpu, mine)
        if other != mine and not torch.cuda.can_device_access_peer(mine, other):
            return rank + 1
    return 0


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
