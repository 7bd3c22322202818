"""Join the ranks that torchrun started or restarted."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from flashspan.launch import SilentRank

FIRST = "flashspan/first"
"""The store's key for the name of the first rank's process."""


def join(backend: str, timeout: float) -> None:
    """Make the process group that the environment variables describe."""
    span = timedelta(seconds=timeout)
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=span))
    fresh = meet(store, rank, num_ranks, timeout)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=num_ranks, timeout=span)


def meet(store: dist.Store, rank: int, num_ranks: int, timeout: float) -> dist.Store:
    """A part of the store that no earlier process has written to. A collective; SilentRank if a rank does not arrive.

    torchrun keeps its store when it restarts ranks. New ranks would then read the addresses of the earlier processes
    (pytorch issue 167288). Its count of restarts cannot distinguish the processes, because it differs between machines.
    So every process has a random name, and a reply to that name shows that the first rank is alive.
    """
    me, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set(FIRST, me)
        for other in range(1, num_ranks):
            while not store.check([f"{me}/{other}"]):
                _wait(other, deadline, timeout)
            store.set(store.get(f"{me}/{other}").decode(), "")
        return dist.PrefixStore(me, store)
    first = ""
    while not store.check([me]):
        if store.check([FIRST]) and (now := store.get(FIRST).decode()) != first:
            first = now
            store.set(f"{first}/{rank}", me)
        _wait(0, deadline, timeout)
    return dist.PrefixStore(first, store)


def _wait(rank: int, deadline: float, timeout: float) -> None:
    if time.monotonic() > deadline:
        raise SilentRank(f"rank {rank} did not start within {timeout:g} s: stalled or dead")
    time.sleep(0.02)
