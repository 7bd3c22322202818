"""Host memory that other processes write to: the protocol of peer_memory without a GPU.

Lanes are threads here, so the protocol of flags runs on any Linux machine, with real races.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.agreement import raise_together
from flashspan.context.transport import ExchangeError

LANES = COMPUTE, FAST, SLOW = "compute", "fast", "slow"
"""Lanes run operations in order, like streams: the caller's own, and two for transfers."""

SPIN, NAP, LOOK = 200, 1e-4, 0.05
"""A wait reads its flag SPIN times without a pause, then once every NAP seconds, and every LOOK seconds checks whether
the peer's process has ended."""


class NotShared(RuntimeError):
    """Memory could not be shared on this rank or another. It is raised on all ranks together."""


def raise_not_shared(group: dist.ProcessGroup, problem: Exception | None) -> None:
    """Raise NotShared on every rank of a group if any rank has a problem. A collective."""
    fault = None if problem is None else str(problem).splitlines()[0][:200]
    try:
        raise_together(fault, group, NotShared)
    except NotShared as error:
        raise error from problem


def share(group: dist.ProcessGroup, num_bytes: int) -> list[Tensor]:
    """Host memory of every rank of a group, zero at first and mapped by all of them. A collective.

    Each rank's memory is an anonymous file that the other ranks open through /proc, so nothing remains when the ranks
    are killed.
    """
    file, path, shared = -1, "", list[Tensor]()
    problem: Exception | None = None
    try:
        file = os.memfd_create("flashspan")
        os.ftruncate(file, num_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
    except OSError as error:
        problem = error
    raise_not_shared(group, problem)
    paths: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(paths, path, group=group)
    try:
        shared = [torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
    except RuntimeError as error:  # the rank is in another container or belongs to another user
        problem = error
    try:
        raise_not_shared(group, problem)  # a collective: no file is closed before all ranks have opened it
    finally:
        os.close(file)
    return shared


class PeerProcesses:
    """The processes of a group's ranks, to detect at once that one has ended. The constructor is a collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        pids = [0] * dist.get_world_size(group)
        dist.all_gather_object(pids, os.getpid(), group=group)
        self._files: list[int] = []
        try:
            for pid in pids:
                self._files.append(os.pidfd_open(pid))
        except (AttributeError, OSError):  # not Linux, or an old kernel: waits end only at their timeout
            _close_files(self._files)
            self._files = []
        weakref.finalize(self, _close_files, self._files)

    def has_ended(self, rank: int) -> bool:
        if not self._files:
            return False
        ended = select.poll()
        ended.register(self._files[rank], select.POLLIN)
        return bool(ended.poll(0))


def _close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def died(label: str) -> str:
    """The error of a wait whose peer's process has ended; `label` ends with the peer's name."""
    return f"{label} has died"


def timed_out(label: str, timeout: float) -> str:
    """The error of a wait that exceeds the timeout."""
    return f"{label} did not respond within {timeout:g} s: it has died, has stalled or made another call"


class HostPeerMemory:
    """An arena in memory that processes of this host share. The constructor is a collective over `group`."""

    def __init__(self, group: dist.ProcessGroup, num_flags: int, num_bytes: int, timeout: float) -> None:
        self.timeout = timeout
        self._processes = PeerProcesses(group)
        with torch.inference_mode(False):  # the lanes' threads write to it outside of inference mode
            self._flags = [words.view(torch.int32).numpy() for words in share(group, 4 * num_flags)]
            self._data = share(group, max(1, num_bytes))
        self._rank = dist.get_rank(group)
        self._lanes = {lane: Lane() for lane in (FAST, SLOW)}
        self._finalizer = weakref.finalize(self, _close_lanes, list(self._lanes.values()))
        self._problem = ""

    def begin(self) -> None:
        """Nothing to do: on a CPU, passes run in the order of the calls."""

    def view(self, offset: int, num_bytes: int) -> Tensor:
        return self._data[self._rank][offset : offset + num_bytes]

    def follow(self, lane: str) -> None:
        """Nothing to do: a computation on a CPU has ended when its call returns."""

    def copy(self, lane: str, rank: int, offset: int, buffer: Tensor) -> None:
        self._do(lane, lambda: self._data[rank][offset : offset + len(buffer)].copy_(buffer))

    def signal(self, lane: str, rank: int, flag: int, tag: int) -> None:
        def write() -> None:
            self._flags[rank][flag] = tag

        self._do(lane, write)

    def wait(self, lane: str, rank: int, flag: int, tag: int, label: str) -> None:
        def poll() -> None:
            flags = self._flags[self._rank]
            for _ in range(SPIN):
                if flags[flag] == tag:
                    return
            begun = look = time.monotonic()
            while flags[flag] != tag:
                now, problem = time.monotonic(), ""
                if now > begun + self.timeout:
                    problem = timed_out(label, self.timeout)
                elif now > look + LOOK:
                    look = now
                    # Read the flag after the process state: the process may have set the flag just before its end.
                    if self._processes.has_ended(rank) and flags[flag] != tag:
                        problem = died(label)
                if problem:
                    self._problem = self._problem or problem
                    raise ExchangeError(problem)
                time.sleep(NAP)

        self._do(lane, poll)

    def mark(self, lane: str) -> threading.Event:
        mark = threading.Event()
        self._lanes[lane].add(mark)
        return mark

    def join(self, mark: threading.Event) -> None:
        if not mark.wait(2 * self.timeout):  # the lane itself times out after one timeout
            self._problem = self._problem or f"an earlier transfer did not end within {2 * self.timeout:g} s"
        self.check()

    def check(self) -> None:
        for lane in self._lanes.values():
            self._problem = self._problem or lane.problem
        if self._problem:
            raise ExchangeError(self._problem)

    def close(self) -> None:
        self._finalizer()

    def _do(self, lane: str, operation: Callable[[], object]) -> None:
        if lane == COMPUTE:
            operation()
        else:
            self._lanes[lane].add(operation)


def _close_lanes(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.close()


class Lane:
    """A thread that runs operations in order and sets marks between them. After a failure it only sets marks."""

    def __init__(self) -> None:
        self._operations: queue.SimpleQueue[Callable[[], object] | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.problem = ""

    def add(self, operation: Callable[[], object] | threading.Event) -> None:
        self._operations.put(operation)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flashspan lane", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._operations.put(None)

    def _run(self) -> None:
        while (operation := self._operations.get()) is not None:
            if isinstance(operation, threading.Event):
                operation.set()
            elif not self.problem:
                try:
                    operation()
                except ExchangeError as error:
                    self.problem = str(error)
                except Exception as error:  # `check` raises it in the caller's thread
                    self.problem = f"a transfer failed: {error}"
            del operation  # release its tensors before the next wait
