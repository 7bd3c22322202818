"""Ranks that copy detect a dead rank at once, not at the timeout."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flashspan.context import context_parallel
from flashspan.context import watchdog as watchdogs
from flashspan.context.shared_memory import COMPUTE, LANES, PeerProcesses
from flashspan.context.transport import ExchangeError
from flashspan.context.watchdog import Wait, Watchdog
from flashspan.launch import PRELOAD, die_with, start_fork_server, use_loopback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by pidfd")
TIMEOUT = 60.0


def lose_a_peer(rank: int, folder: str, parent: int, pipe: Connection) -> None:
    """In a process: the second rank is killed after a call. The first sends the error of its next call and the time."""
    die_with(parent)
    use_loopback()
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "rendezvous"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    attend = context_parallel(dist.group.WORLD, transport="symmetric", timeout=TIMEOUT, num_tokens=32)
    q = torch.ones(1, 1, 16, 8)
    attend(q, q, q)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun, message = time.monotonic(), ""
    try:
        attend(q, q, q)
    except ExchangeError as error:
        message = str(error)
    pipe.send((message, time.monotonic() - begun))
    os._exit(0)


@pytest.mark.slow  # its parts are tested below and in test_symmetric.py
def test_a_rank_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    start_fork_server(PRELOAD)
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    arguments = (str(tmp_path), os.getpid(), there)
    processes = [context.Process(target=lose_a_peer, args=(rank, *arguments), daemon=True) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        assert here.poll(TIMEOUT), "no error before the timeout"
        message, seconds = here.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert message.endswith("rank 1 (global rank 1) has died")
    assert seconds < TIMEOUT / 4


def test_the_watchdog_reports_a_dead_peer_but_not_one_that_has_set_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdogs, "POLL", 0.01)
    words = [np.zeros(Watchdog.num_words(4), dtype=np.uint32) for _ in range(2)]
    flags, marks = words[0][:4], words[0][4:-1]
    found: list[str] = []

    def work() -> None:
        caller = threading.get_ident()
        watchdog = Watchdog(words, 0, 4, TIMEOUT, lambda: caller, lambda rank: rank == 1)
        flags[1] = 77  # set before the peer ended
        mark = LANES.index(COMPUTE)
        marks[mark] = watchdog.add(Wait(COMPUTE, 1, 1, 77, "the first wait: rank 1"))
        time.sleep(0.1)
        watchdog.check()
        marks[mark] = watchdog.add(Wait(COMPUTE, 1, 2, 78, "the second wait: rank 1"))
        with contextlib.suppress(ExchangeError):
            for _ in range(500):
                time.sleep(0.01)
        try:
            watchdog.check()
        except ExchangeError as error:
            found.append(str(error))
        deadline = time.monotonic() + 10
        while not flags[2] and time.monotonic() < deadline:
            time.sleep(0.01)
        watchdog.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20.0)
    assert found == ["the second wait: rank 1 has died"]
    assert flags.tolist() == [0, 77, 78, 0], "the wait is released"


def test_an_ended_process_is_seen_before_its_parent_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(
            dist, "all_gather_object", lambda pids, mine, group: pids.__setitem__(slice(None), [mine, child.pid])
        )
        processes = PeerProcesses(None)  # type: ignore[arg-type]
        assert not processes.has_ended(0)
        assert not processes.has_ended(1)
        child.kill()
        deadline = time.monotonic() + 10
        while not processes.has_ended(1):
            assert time.monotonic() < deadline
        assert not processes.has_ended(0)
