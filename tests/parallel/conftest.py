"""Ranks kept alive for a module's tests, started when first asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashspan.launch import Ranks

RUNS = 12  # then ranks are renewed: they keep every group they made, and gloo's threads wake up for each all the time


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(4, fn, *args): fn on each of 4 ranks, and the list of what they returned."""
    pools: dict[int, Ranks] = {}
    runs: Counter[int] = Counter()

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        runs[num_ranks] += 1
        if num_ranks in pools and runs[num_ranks] % RUNS == 0:
            pools[num_ranks].close()
        if num_ranks not in pools or not pools[num_ranks]._processes:
            pools[num_ranks] = Ranks(num_ranks, timeout=20)
        return pools[num_ranks].run(fn, *args, timeout=40)

    yield run
    for pool in pools.values():
        pool.close()
