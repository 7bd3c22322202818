"""A GPU simulated in host memory: the functions of torch and of the driver that `CudaPeerMemory` uses, on a CPU.

Streams run their operations immediately. A wait spins, so an order of operations that a GPU could not run hangs here.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.context import peer_memory, symmetric
from flashspan.context.shared_memory import share

LONGEST = 20.0  # seconds of a wait


class Driver:
    """The driver's operations, on words in host memory."""

    def wait(self, stream: Any, address: int, value: int) -> None:
        deadline = time.monotonic() + LONGEST
        while ctypes.c_uint32.from_address(address).value != value:
            assert time.monotonic() < deadline, "a stream waits for ever"
            time.sleep(1e-5)

    def write(self, stream: Any, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def register(self, memory: Tensor) -> int:
        return memory.data_ptr()

    def unregister(self, memory: Tensor) -> None:
        """Nothing was done."""

    def copy(self, stream: Any, to: Tensor, source: Tensor) -> None:
        to.copy_(source)


class Stream:
    """A stream that is always idle."""

    def __init__(self, *device: Any) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)

    def record_event(self) -> object:
        return object()


def rendezvous(arena: Tensor, name: str) -> SimpleNamespace:
    """Every rank's arena, in memory mapped by all ranks."""
    group = dist.distributed_c10d._resolve_process_group(name)
    arenas = share(group, arena.numel())
    arena.set_(arenas[dist.get_rank(group)])  # type: ignore[call-overload]
    return SimpleNamespace(world_size=len(arenas), get_buffer=lambda rank, shape, dtype: arenas[rank])


@contextlib.contextmanager
def fake_gpu() -> Iterator[Stream]:
    """On a rank: copy CPU tensors as if they were on a GPU. Yields the current stream."""
    import torch.distributed._symmetric_memory as real

    compute, made = Stream(), list[peer_memory.CudaPeerMemory]()

    def make(group: Any, *arguments: Any) -> peer_memory.CudaPeerMemory:
        numbers = arguments[:3]
        memory = peer_memory.CudaPeerMemory(group, torch.device("cpu"), *numbers, lambda: 0)
        memory._finalizer.detach()  # it would call the real functions, which are restored by then
        made.append(memory)
        return memory

    with (
        mock.patch.object(peer_memory, "Driver", Driver),
        mock.patch.object(real, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype)),
        mock.patch.object(real, "rendezvous", rendezvous),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=compute),
        mock.patch.object(symmetric, "HostPeerMemory", make),
    ):
        yield compute
    for memory in made:
        memory._watchdog.close()
