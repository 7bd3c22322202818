"""Shared by all tests. Without a GPU, kernels run in Triton's interpreter, chosen before Triton is imported."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Shapes are small and tests run in parallel: a second thread would mostly wait. Child processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# If a shell runs pytest in the background, it and its child processes ignore the Ctrl-C that tests send: restore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from flashspan import launch  # noqa: E402  (after the interpreter was chosen)
from flashspan.kernels.launch.cache import CACHE  # noqa: E402
from tests import faster_interpreter  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    faster_interpreter.install()

# Ranks are forked from a server, so they need not import the modules that it has imported.
launch.PRELOAD += [
    "torch._dynamo",
    "torch.distributed.tensor.experimental",
    "torch.distributed.fsdp",
    "flashspan.train.run",
    "pytest",
]

RUNS = 12  # after this many runs, start new ranks: each group stays, and gloo's threads wake up for it all the time


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests if there is no GPU, and slow tests and campaigns unless `-m` selects them."""
    chosen = config.getoption("markexpr")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason="measures time: run with -m alone, without -n"))
        for name in ("slow", "campaign"):
            if item.get_closest_marker(name) and name not in chosen:
                item.add_marker(pytest.mark.skip(reason=f"{name}: run with -m {name}"))


@pytest.fixture(autouse=True)
def _no_call_before() -> None:
    """Clear the cache of calls: an earlier call must not hide a change that a test makes."""
    CACHE.clear()


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(4, fn, *args): run fn on each of 4 ranks and return the results. Ranks live for a module's tests."""
    pools: dict[int, launch.Ranks] = {}
    runs: Counter[int] = Counter()

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        runs[num_ranks] += 1
        if num_ranks in pools and runs[num_ranks] % RUNS == 0:
            pools[num_ranks].close()
        if num_ranks not in pools or not pools[num_ranks].pids:
            pools[num_ranks] = launch.Ranks(num_ranks, threads=1, timeout=30)
        return pools[num_ranks].run(fn, *args, timeout=timeout)

    yield run
    for pool in pools.values():
        pool.close()
