"""One rank's trouble, raised on every rank: the alternative is that the others wait for it until a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def raise_together(fault: str | None, group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank of the group, naming each rank's fault, if any rank has one. A collective."""
    faults: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(faults):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    if ranks_of:
        raise ValueError("; ".join(f"{_name_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()))


def require_same(what: str, parts: Sequence[Any], group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank, naming the first difference, unless all brought equal parts. A collective."""
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
