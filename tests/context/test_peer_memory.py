"""Canaries: the names of torch and of the CUDA driver that `peer_memory` uses exist and accept its arguments."""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from flashspan.context import peer_memory
from flashspan.context import watchdog as watchdogs
from flashspan.context.cuda_driver import Driver
from flashspan.context.shared_memory import COMPUTE, FAST, LANES
from flashspan.context.transport import ExchangeError
from flashspan.context.watchdog import Wait, Watchdog
from flashspan.launch import Ranks


def test_symmetric_memory_has_empty_and_rendezvous() -> None:
    assert {"size", "dtype", "device"} <= set(inspect.signature(symmetric.empty).parameters)
    assert list(inspect.signature(symmetric.rendezvous).parameters) == ["tensor", "group"]


@pytest.mark.parametrize("name", ["rank", "world_size", "buffer_ptrs", "get_buffer"])
def test_a_rendezvous_has_the_attributes_that_are_read(name: str) -> None:
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, name)


def test_process_groups_have_names_and_are_listed() -> None:
    assert hasattr(dist.ProcessGroup, "group_name")
    assert isinstance(dist.distributed_c10d._world.pg_map, dict)


@pytest.mark.gpu
def test_the_driver_waits_and_writes() -> None:
    driver, word = Driver(), torch.zeros(4, dtype=torch.int32, device="cuda")
    waits, writes = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    driver.wait(waits, word.data_ptr() + 4, 7)
    time.sleep(0.05)
    assert not waits.query()
    driver.write(writes, word.data_ptr() + 4, 7)
    waits.synchronize()
    assert word.tolist() == [0, 7, 0, 0]


def make_arena() -> list[int]:
    """On a rank: an arena, a copy to each rank, and the received data."""
    device = torch.device("cuda", 0)
    peer_memory.allow_shared_gpu()
    assert dist.group.WORLD is not None
    caller = threading.get_ident()
    memory = peer_memory.CudaPeerMemory(dist.group.WORLD, device, 8, 4096, 30.0, lambda: caller)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent = torch.full((256,), rank + 1, dtype=torch.uint8, device=device)
    for peer in range(num_ranks):
        memory.follow(FAST)
        memory.copy(FAST, peer, 256 * rank, sent)
        memory.signal(FAST, peer, rank, 99)
    for peer in range(num_ranks):
        memory.wait(COMPUTE, peer, peer, 99, "a test")
    memory.check()
    return [int(memory.view(256 * peer, 256).float().mean()) for peer in range(num_ranks)]


@pytest.mark.gpu
def test_an_arena_takes_copies_from_all() -> None:
    with Ranks(4, threads=1, timeout=60, share_gpu=True) as ranks:
        assert ranks.run(make_arena) == [[1, 2, 3, 4]] * 4


def test_an_error_raised_in_another_thread_reaches_it() -> None:
    assert hasattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc"), sys.implementation
    found: list[str] = []
    begun = threading.Event()

    def work() -> None:
        try:
            begun.set()
            while True:
                time.sleep(0.01)
        except ExchangeError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    watchdogs.raise_in(thread.ident, lambda: ExchangeError("rank 3 has stalled"))
    thread.join(10.0)
    assert found == ["rank 3 has stalled"]


def test_a_wait_that_exceeds_the_timeout_is_released_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog reads numbers that lanes write. Here the test writes them."""
    monkeypatch.setattr(watchdogs, "POLL", 0.01)
    words = [np.zeros(Watchdog.num_words(4), dtype=np.uint32) for _ in range(3)]
    flags, marks = words[1][:4], words[1][4:-1]
    found: list[str] = []

    def work() -> None:
        caller = threading.get_ident()
        watchdog = Watchdog(words, 1, 4, 0.3, lambda: caller, lambda rank: False)
        first = watchdog.add(Wait(COMPUTE, 0, 1, 77, "rank 0"))
        second = watchdog.add(Wait(COMPUTE, 2, 2, 78, "rank 2"))
        marks[LANES.index(COMPUTE)] = first
        time.sleep(0.2)
        marks[LANES.index(COMPUTE)] = first + 1
        time.sleep(0.2)  # the lane has other work: the time of the wait has not begun
        marks[LANES.index(COMPUTE)] = second
        try:
            time.sleep(0.2)
            assert not flags.any()
            while True:
                time.sleep(0.01)
        except ExchangeError as error:
            found.append(str(error))
        time.sleep(0.05)
        with pytest.raises(ExchangeError, match="rank 2 did not respond"):
            watchdog.check()
        watchdog.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20.0)
    assert found == ["rank 2 did not respond within 0.3 s: it has died, has stalled or made another call"]
    assert flags.tolist() == [0, 0, 78, 0]
    assert [int(one[-1]) for one in words] == [2, 2, 2]  # the other ranks know which rank timed out


def test_without_a_driver_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert "driver" in peer_memory.missing()
