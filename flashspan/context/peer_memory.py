"""Memory of a GPU that other processes write to, and the flags by which they say so.

Each rank has an arena for data: torch's symmetric memory allocates it and maps every other rank's. The CUDA driver's
stream operations set a flag and wait for one on the device, without a multiprocessor and without the host. A kernel
that spins on a flag would do too, but where processes share a GPU it keeps the others from running: a round trip of two
ranks on an H200 takes 5.8 ms that way, and 19 us with the driver's operations.

Flags lie in host memory that all ranks have mapped. In the GPU's own memory a round trip would take 14 us; but then
only a stream could release a wait that has timed out, and CUDA may put that stream behind the one that waits, in the
same hardware queue (seen on an H200).

This is the one file that touches torch.distributed._symmetric_memory (read in torch 2.11 and 2.13) and the driver.
tests/context/test_peer_memory.py has a canary for each name.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.context.exchange import ExchangeError
from flashspan.context.shared_memory import COMPUTE, FAST, LANES, SLOW, raise_together, share

SHARE_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The environment variable with which torch lets several ranks share a GPU."""
POLL = 0.1
"""Seconds between two looks of the watchdog."""
WORD = 2**32


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
    """The driver's stream operations, and host memory as the device sees it."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        address, stream, word = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
        self._wait = _function(library, "cuStreamWaitValue32_v2", stream, address, word, ctypes.c_uint)
        self._write = _function(library, "cuStreamWriteValue32_v2", stream, address, word, ctypes.c_uint)
        self._register = _function(library, "cuMemHostRegister_v2", address, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = _function(library, "cuMemHostUnregister", address)
        self._device_address = _function(
            library, "cuMemHostGetDevicePointer_v2", ctypes.POINTER(ctypes.c_uint64), address, ctypes.c_uint
        )
        many, size, place = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(CopyAttributes)
        arguments = (many, many, many, size, place, many, size, stream)
        name = "cuMemcpyBatchAsync_v2"
        self._copy = _function(library, name, *arguments) if hasattr(library, name) else None

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """The stream goes on when the word at this address equals `value`."""
        equal = 1
        _check(self._wait(stream.cuda_stream, address, value, equal), "cuStreamWaitValue32")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Write a word, after all earlier writes of the stream."""
        _check(self._write(stream.cuda_stream, address, value, 0), "cuStreamWriteValue32")

    def register(self, memory: Tensor) -> int:
        """Let devices reach host memory; its address for them."""
        for_all_contexts, mapped, found = 1, 2, ctypes.c_uint64()
        _check(self._register(memory.data_ptr(), memory.nbytes, for_all_contexts | mapped), "cuMemHostRegister")
        _check(self._device_address(ctypes.byref(found), memory.data_ptr(), 0), "cuMemHostGetDevicePointer")
        return found.value

    def unregister(self, memory: Tensor) -> None:
        _check(self._unregister(memory.data_ptr()), "cuMemHostUnregister")

    def copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
        """Copy bytes by a copy engine. A plain copy inside a GPU is a kernel, which waits for a multiprocessor."""
        if self._copy is None:  # CUDA 12
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            return
        attributes = CopyAttributes(order=1, flags=1)  # in the stream's order; overlap with what computes
        places = [(ctypes.c_uint64 * 1)(x.data_ptr()) for x in (to, source)]
        sizes, first = (ctypes.c_size_t * 1)(source.nbytes), (ctypes.c_size_t * 1)(0)
        code = self._copy(*places, sizes, 1, ctypes.byref(attributes), first, 1, stream.cuda_stream)
        _check(code, "cuMemcpyBatchAsync")


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: the two locations are hints, of type and number, which device memory does without."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _check(code: int, name: str) -> None:
    if code:
        raise RuntimeError(f"{name} failed: CUDA driver error {code}")


class CudaPeerMemory:
    """An arena in a GPU's memory. Making one is collective over `group`, whose backend must have a CPU barrier.

    `caller` is the thread that learns of a wait that has timed out: the one that uses results.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        num_flags: int,
        num_bytes: int,
        timeout: float,
        caller: int,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.device, self._driver = device, Driver()
        torch.cuda.synchronize(device)
        problem: Exception | None = None
        try:
            self._arena = symmetric.empty(max(1, num_bytes), dtype=torch.uint8, device=device)
        except RuntimeError as error:
            problem = error
        raise_together(group, problem)
        try:
            self._handle = symmetric.rendezvous(self._arena, group.group_name)
        except RuntimeError as error:
            problem = error
        raise_together(group, problem)
        self._rank: int = self._handle.rank
        ranks = range(self._handle.world_size)
        self._peers = [self._handle.get_buffer(rank, self._arena.shape, torch.uint8) for rank in ranks]
        self._words = share(group, 4 * (num_flags + len(LANES)))  # flags, and behind them the watchdog's marks
        self._addresses = [self._driver.register(words) for words in self._words]
        self._streams = {lane: torch.cuda.Stream(device) for lane in (FAST, SLOW)}
        words = self._words[self._rank].view(torch.int32).numpy().view("uint32")
        self._marks = {lane: self._addresses[self._rank] + 4 * (num_flags + i) for i, lane in enumerate(LANES)}
        self._watchdog = Watchdog(words[:num_flags], words[num_flags:], timeout, caller)
        # Host memory that is unmapped while it is registered spoils its address for whatever is mapped there next.
        parts = (self._driver, device, self._watchdog, self._words)
        self._finalizer = weakref.finalize(self, _give_up_arena, *parts)
        self._finalizer.atexit = False

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

    def wait(self, lane: str, flag: int, tag: int, label: str) -> None:
        self.check()
        stream, mark = self.stream(lane), self._marks[lane]
        begun = self._watchdog.add(Wait(lane, flag, tag, label))
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


def _give_up_arena(driver: Driver, device: torch.device, watchdog: Watchdog, words: list[Tensor]) -> None:
    torch.cuda.synchronize(device)
    watchdog.close()
    for one in words:
        driver.unregister(one)


class Wait(NamedTuple):
    """A lane that waits for a flag to have a value; `label` is the error if it never does."""

    lane: str
    flag: int
    tag: int
    label: str


class Watchdog:
    """Ends waits that outlast the timeout: a device that waits would hold up the host for ever, without a word.

    Each lane writes a number when a wait begins, and the next when it ends; so a wait's time does not run while the
    device is busy with what comes before. When one takes too long, the caller's thread is sent an
    ExchangeError, which it raises before it can use a result, and waits are released, so that the host comes back from
    whatever it waits for. Every later use raises too. The watchdog calls no CUDA function: one could wait for what it
    is to release.
    """

    def __init__(self, flags: Any, marks: Any, timeout: float, caller: int) -> None:
        self._flags, self._marks, self._timeout = flags, dict(zip(LANES, range(len(LANES)), strict=True)), timeout
        self._reached = marks  # by lane: even while it waits, odd while it does not
        self._reached[:] = 1
        self._next = dict.fromkeys(LANES, 2)
        self._waits: dict[str, deque[tuple[int, Wait]]] = {lane: deque() for lane in LANES}
        self._caller = caller
        self._thread: threading.Thread | None = None
        self._problem, self._closed = "", False

    def add(self, wait: Wait) -> int:
        """The number that the wait's lane is to write when it begins; it writes the next one when it ends."""
        begun = self._next[wait.lane]
        self._next[wait.lane] = (begun + 2) % WORD
        self._waits[wait.lane].append((begun, wait))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flashspan watchdog", daemon=True)
            self._thread.start()
        return begun

    def check(self) -> None:
        if self._problem:
            raise ExchangeError(self._problem)

    def close(self) -> None:
        self._closed = True

    def _run(self) -> None:
        since: dict[str, tuple[int, float]] = {}
        while not self._closed:
            time.sleep(POLL)
            for lane in LANES:
                wait = self._current(lane)
                reached = int(self._reached[self._marks[lane]])
                if since.get(lane, (-1, 0.0))[0] != reached:
                    since[lane] = reached, time.monotonic()
                if wait is None:
                    continue
                late = time.monotonic() - since[lane][1] > self._timeout
                if late and not self._problem:
                    self._problem = wait.label
                    raise_in(self._caller, lambda text=wait.label: ExchangeError(text))  # type: ignore[misc]
                if self._problem:
                    self._flags[wait.flag] = wait.tag

    def _current(self, lane: str) -> Wait | None:
        """What a lane waits for now, forgetting what it waited for before."""
        reached, waits = int(self._reached[self._marks[lane]]), self._waits[lane]
        while waits and waits[0][0] != reached and (reached - waits[0][0]) % WORD < WORD // 2:
            waits.popleft()
        return waits[0][1] if waits and waits[0][0] == reached else None


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
