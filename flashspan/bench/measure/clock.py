"""How long a call takes on a device, which may still be at work when the host has gone on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

LEAST_MS, LEAST_CALLS, REST_S = 200, 20, 1.0
MOST_REPEATS = 1_000_000
"""How many runs a benchmark may be asked for: more would never end."""

K = TypeVar("K")
T = TypeVar("T")


def check_repeats(least: int, **counts: int) -> None:
    """ValueError unless each number of runs, by its option's name, is `least` or more and can come to an end."""
    for name, count in counts.items():
        if not least <= count <= MOST_REPEATS:
            raise ValueError(f"{name} must be {least:,} to {MOST_REPEATS:,}: got {count}")


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], T], device: torch.device, *, together: bool = False) -> tuple[float, T]:
    """Milliseconds from an idle device until it is done, and the result. `together`: all ranks begin at once."""
    synchronise(device)
    if together:
        dist.barrier()
    begin = time.perf_counter()
    result = call()
    synchronise(device)
    return 1e3 * (time.perf_counter() - begin), result


def mark(device: torch.device) -> Any:
    """This moment of the device's work, for `between`."""
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
    """The device of this type that this rank uses."""
    return torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)


def default_device(name: str) -> torch.device:
    """The device of this name; of no name, a GPU where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu"):
        raise ValueError(f"device is cuda or cpu: got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device and none is present; give --device cpu")
    return torch.device(name)


def percentiles(call: Callable[[], object]) -> tuple[float, float, float]:
    """How long a call takes on a GPU, by triton's `do_bench`: the 20th, 50th and 80th percentile in milliseconds, over
    LEAST_MS and LEAST_CALLS at least: what draws a chip's full power begins a fifth faster than it goes on. After a
    rest, or whatever was measured before, which has warmed the chip, would count."""
    from triton.testing import do_bench

    once, _ = timed(call, torch.device("cuda"))
    time.sleep(REST_S)
    low, middle, high = do_bench(call, warmup=50, rep=max(LEAST_MS, LEAST_CALLS * once), quantiles=[0.2, 0.5, 0.8])
    return low, middle, high


def cold_samples(
    calls: Mapping[K, Callable[[], object]],
    rounds: int,
    device: torch.device,
    contexts: Mapping[K, Callable[[], AbstractContextManager[object]]],
) -> dict[K, list[float]]:
    """Milliseconds of each call, in turns, `rounds` times; on a GPU with L2 cleared before each, as `percentiles` does.

    Each call runs in its context, which is entered before the time begins. Calls whose samples are to be compared
    belong in one run: the chip's clock follows its power and heat.
    """
    flush = _cache_flusher(device)

    def sample(name: K) -> tuple[object, object]:
        with contexts[name]():
            flush()
            begin = mark(device)
            calls[name]()
            return begin, mark(device)

    found = in_turns({name: partial(sample, name) for name in calls}, rounds)
    return {name: [1e3 * between(begin, end) for begin, end in marks] for name, marks in found.items()}


def _cache_flusher(device: torch.device) -> Callable[[], None]:
    """A function that clears a GPU's L2 cache, by triton's means; on a CPU it does nothing."""
    if device.type != "cuda":
        return lambda: None
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    return lambda: driver.active.clear_cache(cache)


def cpu_peak(num_ranks: int) -> float:
    """Operations per second that this CPU's cores do at best, as far as ranks use them: one core's best matmul of
    several, timed now, times the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would measure the waiting
    a = torch.randn(512, 512)
    best = float("inf")
    for _ in range(12):
        begin = time.perf_counter()
        a @ a.T  # as a linear layer multiplies: some CPUs take half as long for it as for a @ a
        best = min(best, time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return 2 * 512**3 / best * min(num_ranks * threads, os.cpu_count() or 1)


def in_turns(calls: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """What each call gives, round after round: a machine that grows busy or warm slows all of them down alike."""
    found: dict[K, list[T]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return found
