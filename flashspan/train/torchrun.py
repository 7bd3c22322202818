"""Joining the ranks that torchrun started, also after it has restarted them."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from flashspan.launch import SilentRank

FIRST = "flashspan/first"
"""Where the first rank says who it is."""


def join(backend: str, timeout: float) -> None:
    """Make the process group of the ranks in the environment."""
    span = timedelta(seconds=timeout)
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=span))
    fresh = meet(store, rank, num_ranks, timeout)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=num_ranks, timeout=span)


def meet(store: dist.Store, rank: int, num_ranks: int, timeout: float) -> dist.Store:
    """The part of a store that no earlier process has written to. A collective; SilentRank where a rank does not come.

    torchrun keeps its store when it restarts ranks, and they would find the addresses of those before (pytorch issue
    167288). Its count of restarts does not tell them apart: it differs between machines. So every process has a name of
    its own, and knows that the first rank lives by an answer to that name.
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
        raise SilentRank(f"rank {rank} did not start within {timeout:g} s and is stalled or dead")
    time.sleep(0.02)
