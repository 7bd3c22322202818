"""Where the ranks of a run wait for one another: for a disk, and for one that never comes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist

from flashspan.context.exchange import ExchangeError
from flashspan.launch import SilentRank

PATIENCE = 4.0
"""Seconds that a rank which failed waits for the others to fail too."""
MEET = 0.25
"""Seconds between two meetings of ranks that wait for a disk."""


def from_first(job: Callable[[], Any]) -> Any:
    """What `job` returns on the first rank, on every rank. A collective, as `from_each`."""
    return from_each(job if dist.get_rank() == 0 else lambda: None)[0]


def from_each(job: Callable[[], Any]) -> list[Any]:
    """What each rank's `job` returns, by rank, on every rank; one's ValueError or OSError is a ValueError on all.

    A collective. The jobs run on threads, and the ranks meet until all have ended: a disk may take longer than an
    exchange may.
    """
    mine: tuple[Any, str | None] | None = None
    ended: list[Any] = [None] * dist.get_world_size()
    with ThreadPoolExecutor(1, "flashspan-job") as lane:
        running = lane.submit(job)
        while None in ended:
            if mine is None and wait([running], MEET).done:
                try:
                    mine = (running.result(), None)
                except (ValueError, OSError) as error:
                    mine = (None, str(error))
            dist.all_gather_object(ended, mine)
    for _, fault in ended:
        if fault is not None:
            raise ValueError(fault)
    return [result for result, _ in ended]


@contextlib.contextmanager
def name_the_silent(when: str) -> Iterator[None]:
    """Where an exchange fails or times out, say which ranks did not fail with this one: those it was waiting for.

    Every rank that fails leaves a note in the group's store; who has left none after a while is stalled or dead.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if not _is_of_exchange(error):
            raise
        store = dist.distributed_c10d._get_default_store()
        notes = {rank: f"flashspan/failed/{rank}" for rank in range(dist.get_world_size())}
        store.set(notes[dist.get_rank()], when)
        deadline = time.monotonic() + PATIENCE
        silent = list(notes)
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            silent = [rank for rank in silent if not store.check([notes[rank]])]
        if not silent:
            raise
        who = ", ".join(map(str, silent))
        sign = str(error).partition("\n")[0]
        raise SilentRank(f"rank {who} did not answer in {when} and is stalled or dead; first sign: {sign}") from error


def _is_of_exchange(error: Exception) -> bool:
    """Whether others had a part in this failure. gloo's are plain RuntimeErrors, known by their words."""
    known = isinstance(error, (dist.DistError, ExchangeError, TimeoutError))
    return known or any(word in str(error) for word in ("gloo", "Timed out", "Connection", "NCCL"))
