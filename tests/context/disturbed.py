"""A test mode for transfers: random delays in random lanes of random ranks, and NaN in every buffer after its use."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashspan.context import bundle, symmetric
from flashspan.context.peer_memory import CudaPeerMemory
from flashspan.context.shared_memory import COMPUTE, HostPeerMemory

LONGEST = 0.003  # seconds of one delay
CYCLES = 1.8e9  # of a GPU per second, about


class Disturbed:
    """Peer memory with a random delay before about every fourth operation, and NaN in slots until they are written."""

    def __init__(self, memory: Any, draw: random.Random) -> None:
        self.memory, self.draw = memory, draw
        self.delays = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.memory, name)
        if name not in ("copy", "signal", "wait", "mark", "follow"):
            return operation

        def disturbed(lane: str, *args: Any) -> Any:
            self.delay(lane)
            return operation(lane, *args)

        return disturbed

    def delay(self, lane: str) -> None:
        if self.draw.random() > 0.25:
            return
        seconds = self.draw.random() ** 4 * LONGEST
        self.delays += 1
        if self.draw.random() < 0.3:
            time.sleep(seconds)
        elif isinstance(self.memory, CudaPeerMemory):
            with torch.cuda.stream(self.memory.stream(lane)):
                torch.cuda._sleep(int(seconds * CYCLES))
        elif lane != COMPUTE:
            self.memory._do(lane, lambda: time.sleep(seconds))

    def view(self, offset: int, num_bytes: int) -> Tensor:
        return self.memory.view(offset, num_bytes).fill_(0xFF)  # NaN in every dtype


@contextlib.contextmanager
def disturbances(seed: int) -> Iterator[list[Disturbed]]:
    """On a rank: disturb all arenas made in this context, and fill pooled buffers with NaN. Yields those arenas."""
    draw = random.Random(seed)
    put = bundle.BufferPool.put
    made: list[Disturbed] = []

    def poisoned(pool: bundle.BufferPool, buffer: Tensor) -> None:
        put(pool, buffer.fill_(0xFF))

    def wrapped(kind: type) -> Any:
        def make(*args: Any) -> Disturbed:
            made.append(Disturbed(kind(*args), draw))
            return made[-1]

        return make

    with (
        mock.patch.object(symmetric, "HostPeerMemory", wrapped(HostPeerMemory)),
        mock.patch.object(symmetric, "CudaPeerMemory", wrapped(CudaPeerMemory)),
        mock.patch.object(bundle.BufferPool, "put", poisoned),
    ):
        yield made
