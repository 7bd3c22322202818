"""Errors of one rank, raised on every rank of a group: otherwise the others would wait for it until a timeout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist


def raise_together(
    fault: str | None, group: dist.ProcessGroup | None = None, error: type[Exception] = ValueError
) -> None:
    """Raise `error` on every rank of the group, with the faults of all ranks, if any rank has one. A collective."""
    faults: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(faults):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    if ranks_of:
        raise error("; ".join(f"{_name_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()))


def require_same(what: str, parts: Sequence[Any], group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank, with the first difference, unless all ranks pass equal parts. A collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(parts), group=group)
    for rank, theirs in enumerate(everyone):
        for index in range(max(len(everyone[0]), len(theirs))):
            first = everyone[0][index] if index < len(everyone[0]) else "nothing"
            other = theirs[index] if index < len(theirs) else "nothing"
            if first != other:
                raise ValueError(
                    f"{what} must be the same on every rank: item {index} is {first} on rank 0 "
                    f"and {other} on rank {rank}; build the same one on every rank"
                )


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


MEET = 0.25
"""Seconds between two collectives while ranks wait for slow jobs."""


def from_first(job: Callable[[], Any]) -> Any:
    """The result of `job` on the first rank, returned on every rank. A collective, like `from_each`."""
    return from_each(job if dist.get_rank() == 0 else lambda: None)[0]


def from_each(job: Callable[[], Any]) -> list[Any]:
    """The results of each rank's `job`, by rank, returned on every rank. A ValueError or OSError of one rank is raised
    as a ValueError on all.

    A collective. The jobs run on threads, and the ranks repeat a short collective until all jobs have ended: reading a
    disk may take longer than the timeout of a collective.
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
