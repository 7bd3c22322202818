"""Ranks of torchrun find each other, even if its store has keys of the ranks before a restart."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from flashspan.launch import SilentRank
from flashspan.train import torchrun


def meet_all(store: dist.Store, num_ranks: int, late: int) -> list[bytes]:
    """The value of the last rank that each of these ranks reads. Rank `late` comes after the others."""
    found: dict[int, bytes] = {}

    def come(rank: int) -> None:
        fresh = torchrun.meet(store, rank, num_ranks, 10.0)
        if rank == num_ranks - 1:
            fresh.set("address", f"of {late}")
        found[rank] = fresh.get("address")

    others = [threading.Thread(target=come, args=(rank,)) for rank in range(num_ranks) if rank != late]
    for thread in others:
        thread.start()
    if len(others) > 1:
        others[0].join(0.1)
    come(late)
    for thread in others:
        thread.join(10.0)
    return [found[rank] for rank in range(num_ranks)]


def test_restarted_ranks_never_read_keys_of_earlier_processes() -> None:
    store = dist.HashStore()
    for late in (0, 1, 2, 0):
        assert meet_all(store, 3, late) == [f"of {late}".encode()] * 3
    assert meet_all(store, 1, 0) == [b"of 0"]


@pytest.mark.parametrize(("rank", "absent"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_start_is_reported(rank: int, absent: int) -> None:
    store = dist.HashStore()
    meet_all(store, 2, 1)
    with pytest.raises(SilentRank, match=f"rank {absent} did not start within 0.1 s"):
        torchrun.meet(store, rank, 2, 0.1)
