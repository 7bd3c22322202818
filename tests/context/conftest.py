"""Eight ranks for a module's tests, started at their first use. Smaller groups are sub-groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashspan.launch import Ranks


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(fn, *args): run fn on each of 8 ranks, and return their results."""
    pools: list[Ranks] = []

    def run(fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        if not pools or not pools[-1].pids:
            pools.append(Ranks(8, threads=1, timeout=45))
        return pools[-1].run(fn, *args, timeout=timeout)

    yield run
    for pool in pools:
        pool.close()
