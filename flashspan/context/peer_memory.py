"""Memory of a GPU that other processes write to, and the signals by which they say so.

Each rank has one arena: flags, 32 bits each, and behind them room for data. torch's symmetric memory allocates it and
maps every other rank's. The CUDA driver's stream operations set a flag and wait for one on the device, without the host
and without a multiprocessor. A kernel that spins on a flag would do too, but where processes share a GPU it keeps the
others from running: 5.8 ms for a round trip of two ranks on an H200, against 14 us with the driver's operations.

This is the one file that touches torch.distributed._symmetric_memory (read in torch 2.11 and 2.13) and the driver.
tests/context/test_peer_memory.py has a canary for each name.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.context.exchange import ExchangeError

COMPUTE, FAST, SLOW = "compute", "fast", "slow"
"""Lanes: sequences of operations that are carried out in order. The caller's own, and two for transfers."""
SHARE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The environment variable with which torch lets several ranks share a GPU."""
POLL = 0.1
"""Seconds between two looks of the watchdog."""


class PeerMemory(Protocol):
    """One rank's arena and its way to the others'. Ranks are numbers within `group`."""

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """Some of this rank's data, uint8."""
        ...

    def follow(self, lane: str) -> None:
        """What this lane is given from now on begins after what the compute lane has been given so far."""
        ...

    def copy(self, lane: str, rank: int, offset: int, buffer: Tensor) -> None:
        """Copy a buffer into another rank's data."""
        ...

    def signal(self, lane: str, rank: int, flag: int, tag: int) -> None:
        """Set a flag of another rank, visible after all that the lane did before."""
        ...

    def wait(self, lane: str, flag: int, tag: int, label: str) -> None:
        """The lane goes on when this rank's flag has this value; `label` says what is missing if it never does."""
        ...

    def mark(self, lane: str) -> Any:
        """A point in a lane, for `join`."""
        ...

    def join(self, mark: Any) -> None:
        """The compute lane goes on when a mark has been reached."""
        ...

    def check(self) -> None:
        """Raise ExchangeError if a wait has timed out."""
        ...

    def close(self) -> None:
        """Give the arena up, when all ranks are done with it."""
        ...


def missing() -> str:
    """Why symmetric memory cannot be had from this torch and driver; empty if it can."""
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError as error:
        return f"torch {torch.__version__} has no torch.distributed._symmetric_memory ({error})"
    absent = [name for name in ("empty", "rendezvous") if not hasattr(symmetric, name)]
    if absent:
        return f"torch {torch.__version__} has no {', '.join(absent)} in torch.distributed._symmetric_memory"
    try:
        Driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver has no stream memory operations ({error})"
    return ""


class Driver:
    """cuStreamWaitValue32 and cuStreamWriteValue32."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._wait, self._write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        for function in (self._wait, self._write):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
            function.restype = ctypes.c_int

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """The stream goes on when the word at this address equals `value`."""
        self._check(self._wait(stream.cuda_stream, address, value, 1), "cuStreamWaitValue32")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Write a word, after all earlier writes of the stream."""
        self._check(self._write(stream.cuda_stream, address, value, 0), "cuStreamWriteValue32")

    @staticmethod
    def _check(code: int, name: str) -> None:
        if code:
            raise RuntimeError(f"{name} failed: CUDA driver error {code}")


@dataclass(eq=False)
class Wait:
    """A wait that is under way on a stream: its time runs from when `begun` has been reached."""

    address: int
    tag: int
    label: str
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    since: float | None = None


class CudaPeerMemory:
    """An arena in a GPU's memory. Making one is collective over `group`, whose backend must have a CPU barrier."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, num_flags: int, num_bytes: int, timeout: float
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.device, self.timeout = device, timeout
        self._base = -(-4 * num_flags // 256) * 256
        size = self._base + num_bytes
        torch.cuda.synchronize(device)
        arena = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(arena, group.group_name)
        arena[: self._base].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # no flag is set before all are zero
        self._arena, self._handle = arena, handle
        self._rank: int = handle.rank
        self._addresses: list[int] = list(handle.buffer_ptrs)
        self._peers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(handle.world_size)]
        self._driver = Driver()
        self._streams = {lane: torch.cuda.Stream(device) for lane in (FAST, SLOW)}
        self._watchdog = Watchdog(self._driver, device, timeout)

    def view(self, offset: int, num_bytes: int) -> Tensor:
        return self._arena[self._base + offset : self._base + offset + num_bytes]

    def stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane == COMPUTE else self._streams[lane]

    def follow(self, lane: str) -> None:
        self._streams[lane].wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, lane: str, rank: int, offset: int, buffer: Tensor) -> None:
        with torch.cuda.stream(self.stream(lane)):
            self._peers[rank][self._base + offset :][: len(buffer)].copy_(buffer, non_blocking=True)

    def signal(self, lane: str, rank: int, flag: int, tag: int) -> None:
        self._driver.write(self.stream(lane), self._addresses[rank] + 4 * flag, tag)

    def wait(self, lane: str, flag: int, tag: int, label: str) -> None:
        stream, address = self.stream(lane), self._addresses[self._rank] + 4 * flag
        begun = stream.record_event()
        self._driver.wait(stream, address, tag)
        self._watchdog.add(Wait(address, tag, label, begun, stream.record_event()))

    def mark(self, lane: str) -> torch.cuda.Event:
        return self._streams[lane].record_event()

    def join(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def check(self) -> None:
        self._watchdog.check()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._watchdog.close()


class Watchdog:
    """Ends waits that outlast the timeout: a device that waits would hold up the host for ever, without a word.

    When one does, all waits are released, so that the host comes back from whatever it waits for; before that, the
    thread that made the arena is sent an ExchangeError, which it raises before it can use a result. Every later use
    raises too.
    """

    def __init__(self, driver: Driver, device: torch.device, timeout: float) -> None:
        self._driver, self._device, self._timeout = driver, device, timeout
        self._waits: deque[Wait] = deque()
        self._owner = threading.get_ident()
        self._thread: threading.Thread | None = None
        self._problem, self._closed = "", False

    def add(self, wait: Wait) -> None:
        self._waits.append(wait)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flashspan watchdog", daemon=True)
            self._thread.start()

    def check(self) -> None:
        if self._problem:
            raise ExchangeError(self._problem)

    def close(self) -> None:
        self._closed = True

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while not self._problem and not self._closed:
            time.sleep(POLL)
            self._forget_ended()
            for wait in list(self._waits):
                if wait.since is None:
                    wait.since = time.monotonic() if wait.begun.query() else None
                elif time.monotonic() - wait.since > self._timeout and not wait.ended.query():
                    self._give_up(wait.label)
                    break

    def _forget_ended(self) -> None:
        while self._waits and self._waits[0].ended.query():
            self._waits.popleft()

    def _give_up(self, label: str) -> None:
        self._problem = label
        raise_in(self._owner, lambda: ExchangeError(label))
        stream = torch.cuda.Stream(self._device)
        while self._waits:
            for wait in list(self._waits):
                if wait.begun.query() and not wait.ended.query():
                    self._driver.write(stream, wait.address, wait.tag)
            stream.synchronize()
            time.sleep(0.001)
            self._forget_ended()


def raise_in(thread: int, make: Callable[[], Exception]) -> None:
    """Make a thread raise this exception as soon as it runs Python again."""

    class Late(ExchangeError):
        def __init__(self) -> None:  # Python makes the exception, from its class alone
            super().__init__(*make().args)

    Late.__name__ = Late.__qualname__ = ExchangeError.__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Late))


def allow_shared_gpu() -> None:
    """Let several ranks share a GPU, for development and tests: symmetric memory then does without multicast."""
    os.environ[SHARE_GPU] = "1"
