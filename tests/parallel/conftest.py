"""Ranks kept alive for the whole session, started when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import pytest

from flashspan.launch import Ranks


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(4, fn, *args): fn on each of 4 ranks, and the list of what they returned."""
    # Ranks are forked from a server: what it has imported, no rank imports again.
    modules = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "pytest", "flashspan.launch"]
    forkserver.set_forkserver_preload(modules)
    forkserver.ensure_running()
    pools: dict[int, Ranks] = {}

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if num_ranks not in pools or not pools[num_ranks]._processes:
            pools[num_ranks] = Ranks(num_ranks, timeout=20)
        return pools[num_ranks].run(fn, *args, timeout=40)

    yield run
    for pool in pools.values():
        pool.close()
