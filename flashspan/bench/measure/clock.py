"""The time of a call on a device, which may run behind the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

LEAST_MS, LEAST_CALLS, REST_S = 200, 20, 1.0
AHEAD_MS, CYCLES_PER_MS = 1.0, 1_900_000
"""Milliseconds that a GPU waits before a sample, and cycles of a GPU in a millisecond (about those of an H200)."""
MOST_REPEATS = 1_000_000
"""The maximum number of runs of a benchmark: more would take too long."""

K = TypeVar("K")
T = TypeVar("T")


def check_repeats(least: int, **counts: int) -> None:
    """ValueError unless each number of runs, by option name, is from `least` to MOST_REPEATS."""
    for name, count in counts.items():
        if not least <= count <= MOST_REPEATS:
            raise ValueError(f"{name} must be {least:,} to {MOST_REPEATS:,}: got {count}")


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], T], device: torch.device, *, together: bool = False) -> tuple[float, T]:
    """Milliseconds of a call, from an idle device until it is idle again, and the result. `together`: all ranks begin
    at the same time."""
    synchronise(device)
    if together:
        dist.barrier()
    begin = time.perf_counter()
    result = call()
    synchronise(device)
    return 1e3 * (time.perf_counter() - begin), result


def mark(device: torch.device) -> Any:
    """A mark in the device's queue, for `between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Seconds from one mark to another; waits until a GPU has reached both."""
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def here(device_type: str) -> torch.device:
    """This rank's device of this type."""
    return torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)


def default_device(name: str) -> torch.device:
    """The device of this name; with an empty name, a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu: got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device: found none; use --device cpu")
    return torch.device(name)


def percentiles(call: Callable[[], object]) -> tuple[float, float, float]:
    """The time of a call on a GPU, by triton's `do_bench`: the 20th, 50th and 80th percentile in milliseconds.

    The call runs for at least LEAST_MS and LEAST_CALLS, because a kernel that draws full power is a fifth faster at
    first. A pause before it lets the GPU cool down after earlier measurements."""
    from triton.testing import do_bench

    once, _ = timed(call, torch.device("cuda"))
    time.sleep(REST_S)
    low, middle, high = do_bench(call, warmup=50, rep=max(LEAST_MS, LEAST_CALLS * once), quantiles=[0.2, 0.5, 0.8])
    return low, middle, high


class Samples(NamedTuple):
    """Milliseconds of a call: on the device, and on the host until everything is queued."""

    device: list[float]
    host: list[float]


def cold_samples(
    calls: Mapping[K, Callable[[], object]],
    rounds: int,
    device: torch.device,
    contexts: Mapping[K, Callable[[], AbstractContextManager[object]]],
) -> dict[K, Samples]:
    """The times of each call, which take turns `rounds` times; a GPU's L2 is cleared before each, as in `percentiles`.

    A GPU waits AHEAD_MS before each call, so that the host has queued the whole call when its first kernel begins, and
    the two times do not mix. Each call runs in its context, which is entered before the time begins. Compare only calls
    that were measured in one run, because the chip's clock depends on its power and heat.
    """
    flush = _cache_flusher(device)

    def sample(name: K) -> tuple[object, object, float]:
        with contexts[name]():
            flush()
            begin, started = mark(device), time.perf_counter()
            calls[name]()
            host = time.perf_counter() - started
            return begin, mark(device), 1e3 * host

    found = in_turns({name: partial(sample, name) for name in calls}, rounds)
    return {
        name: Samples([1e3 * between(begin, end) for begin, end, _ in samples], [host for *_, host in samples])
        for name, samples in found.items()
    }


def _cache_flusher(device: torch.device) -> Callable[[], None]:
    """A function that lets a GPU wait AHEAD_MS and clears its L2 cache, with triton's driver; for a CPU, a no-op."""
    if device.type != "cuda":
        return lambda: None
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()

    def flush() -> None:
        torch.cuda._sleep(int(AHEAD_MS * CYCLES_PER_MS))
        driver.active.clear_cache(cache)

    return flush


def cpu_peak(num_ranks: int) -> float:
    """The peak FLOP/s of the cores that ranks use: the best of several matmuls on one core, timed now, times the number
    of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, several threads would wait for each other
    a = torch.randn(512, 512)
    best = float("inf")
    for _ in range(12):
        begin = time.perf_counter()
        a @ a.T  # transposed as in a linear layer: on some CPUs twice as fast as a @ a
        best = min(best, time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return 2 * 512**3 / best * min(num_ranks * threads, os.cpu_count() or 1)


def in_turns(calls: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """The results of each call. The calls take turns, so that load or heat of the machine affects all equally."""
    found: dict[K, list[T]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return found
