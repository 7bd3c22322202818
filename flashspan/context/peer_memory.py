"""GPU memory that other processes write to, and the flags that signal their writes.

Each rank has an arena for data: torch's symmetric memory allocates it and maps the arenas of the other ranks. The CUDA
driver's stream operations set flags and wait for flags on the device, without a multiprocessor and without the host. A
kernel that spins on a flag also works, but where processes share a GPU it keeps the others from running: a round trip
of two ranks on an H200 takes 5.8 ms with such kernels, and 19 us with the driver's operations.

Flags are in host memory that all ranks map. With flags in GPU memory, a round trip takes 14 us. But then only a stream
could release a wait that has timed out, and CUDA may put that stream behind the waiting one in the same hardware queue
(observed on an H200).

This is the only file that uses torch.distributed._symmetric_memory (read in torch 2.11 and 2.13);
tests/context/test_peer_memory.py has a canary for each name.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.context.cuda_driver import Driver
from flashspan.context.shared_memory import COMPUTE, FAST, LANES, SLOW, PeerProcesses, raise_not_shared, share
from flashspan.context.watchdog import WORD, Wait, Watchdog

SHARE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The environment variable that lets several ranks share a GPU in torch."""


class PeerMemory(Protocol):
    """One rank's arena and its access to the other arenas. Ranks are numbered as in `group`."""

    def begin(self) -> None:
        """Begin a pass, ordered after the compute lane of the previous pass, even if that was another stream."""
        ...

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """A part of this rank's arena, uint8."""
        ...

    def follow(self, lane: str) -> None:
        """Order later operations of this lane after the operations queued on the compute lane so far."""
        ...

    def copy(self, lane: str, rank: int, offset: int, buffer: Tensor) -> None:
        """Copy a buffer into another rank's arena."""
        ...

    def signal(self, lane: str, rank: int, flag: int, tag: int) -> None:
        """Set a flag of another rank, after all earlier operations of the lane are visible to that rank."""
        ...

    def wait(self, lane: str, rank: int, flag: int, tag: int, label: str) -> None:
        """Let the lane wait until `rank` sets this rank's flag to this value; `label` begins the error if it fails."""
        ...

    def mark(self, lane: str) -> Any:
        """A point in a lane, for `join`."""
        ...

    def join(self, mark: Any) -> None:
        """Let the compute lane wait for a mark."""
        ...

    def check(self) -> None:
        """Raise ExchangeError if a wait has failed."""
        ...

    def close(self) -> None:
        """Release the arena; no rank may use it afterwards."""
        ...


def missing() -> str:
    """The reason why torch or the driver has no symmetric memory; empty if both have it."""
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


class CudaPeerMemory:
    """An arena in a GPU's memory. The constructor is a collective over `group`, whose backend needs a CPU barrier.

    `caller` returns the id of the thread that uses results. The error of a failed wait is raised in that thread.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        num_flags: int,
        num_bytes: int,
        timeout: float,
        caller: Callable[[], int],
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.device = device
        problem: Exception | None = None
        try:
            self._driver = Driver()
            torch.cuda.synchronize(device)
            with torch.inference_mode(False):
                self._arena = symmetric.empty(max(1, num_bytes), dtype=torch.uint8, device=device)
        except (RuntimeError, OSError, AttributeError) as error:
            problem = error
        raise_not_shared(group, problem)
        self._words = share(group, 4 * Watchdog.num_words(num_flags))
        self._rank, self._addresses = dist.get_rank(group), list[int]()
        try:
            handle = symmetric.rendezvous(self._arena, group.group_name)
            with torch.inference_mode(False):
                shape = self._arena.shape
                self._peers = [handle.get_buffer(rank, shape, torch.uint8) for rank in range(handle.world_size)]
            for words in self._words:
                self._addresses.append(self._driver.register(words))
            self._streams = {lane: torch.cuda.Stream(device) for lane in (FAST, SLOW)}
        except RuntimeError as error:
            problem = error
        try:
            raise_not_shared(group, problem)
        except BaseException:
            for words, _ in zip(self._words, self._addresses, strict=False):
                self._driver.unregister(words)
            raise
        self._handle = handle
        self._last = torch.cuda.current_stream(device)
        marks = self._addresses[self._rank] + 4 * num_flags
        self._marks = {lane: marks + 4 * i for i, lane in enumerate(LANES)}
        views = [words.view(torch.int32).numpy().view("uint32") for words in self._words]
        processes = PeerProcesses(group)
        self._watchdog = Watchdog(views, self._rank, num_flags, timeout, caller, processes.has_ended)
        # Unregister host memory before it is unmapped: otherwise memory mapped later at this address cannot be
        # registered.
        parts = (self._driver, device, self._watchdog, self._words)
        self._finalizer = weakref.finalize(self, _release_arena, *parts)
        self._finalizer.atexit = False

    def begin(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != self._last:
            current.wait_stream(self._last)
            self._last = current

    def view(self, offset: int, num_bytes: int) -> Tensor:
        return self._arena[offset : offset + num_bytes]

    def stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane == COMPUTE else self._streams[lane]

    def follow(self, lane: str) -> None:
        self._streams[lane].wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, lane: str, rank: int, offset: int, buffer: Tensor) -> None:
        self._driver.copy(self.stream(lane), self._peers[rank][offset : offset + len(buffer)], buffer)

    def signal(self, lane: str, rank: int, flag: int, tag: int) -> None:
        self._driver.write(self.stream(lane), self._addresses[rank] + 4 * flag, tag)

    def wait(self, lane: str, rank: int, flag: int, tag: int, label: str) -> None:
        self.check()
        stream, mark = self.stream(lane), self._marks[lane]
        begun = self._watchdog.add(Wait(lane, rank, flag, tag, label))
        self._driver.write(stream, mark, begun)
        self._driver.wait(stream, self._addresses[self._rank] + 4 * flag, tag)
        self._driver.write(stream, mark, (begun + 1) % WORD)

    def mark(self, lane: str) -> torch.cuda.Event:
        return self._streams[lane].record_event()

    def join(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def check(self) -> None:
        self._watchdog.check()

    def close(self) -> None:
        self._finalizer()


def _release_arena(driver: Driver, device: torch.device, watchdog: Watchdog, words: list[Tensor]) -> None:
    torch.cuda.synchronize(device)
    watchdog.close()
    for one in words:
        driver.unregister(one)


def allow_shared_gpu() -> None:
    """Let several ranks share a GPU, for development and tests: symmetric memory then does not use multicast."""
    os.environ[SHARE_GPU] = "1"
