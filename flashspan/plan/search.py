"""Every parallelism config that fits, ranked by time; the longest context that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .devices import Cluster
from .memory import Ledger, ParallelConfig, Run, ledger
from .step import StepTime, step_time

# Ways to split the sequence: contiguous shards only with strategies that balance their work.
SPLITS = (("ring", "zigzag"), ("gather", "zigzag"), ("helper", "contiguous"), ("ulysses", "contiguous"))
USUAL_CONTEXT = (64, 256)
"""Two limits on the number of context ranks; the second is tried if nothing fits with the first. The time to simulate
a schedule grows with the square of its ranks: a plan with 256 takes 20 seconds. Even the shortest sequence that
`longest` tries can be split over 256 ranks, so `longest` tries the same configs for every length."""


@dataclass(frozen=True)
class Answer:
    """A parallelism config that fits: its memory and its time."""

    parallel: ParallelConfig
    memory: Ledger
    time: StepTime

    def tokens_per_second(self, run: Run) -> float:
        return run.batch * run.tokens / self.time.total

    def mfu(self, run: Run, cluster: Cluster) -> float:
        """Model FLOPS over the peak of the devices."""
        work = run.model.flops_per_token(run.tokens) * run.batch * run.tokens
        return work / self.time.total / (cluster.device.peak(run.itemsize) * cluster.num_devices)


def parallel_configs(run: Run, cluster: Cluster, most_context: int = USUAL_CONTEXT[-1]) -> Iterator[ParallelConfig]:
    """All parallelism configs that the model, batch and tokens allow on exactly these devices."""
    num, model = cluster.num_devices, run.model
    for tensor in divisors(num):
        if model.num_kv_heads % tensor or tensor > cluster.per_node:
            continue
        for context in divisors(num // tensor):
            if context > min(most_context, max(1, run.tokens // 2)):
                continue
            rest = num // tensor // context
            if run.batch % rest:
                continue
            for shard in divisors(rest):
                yield from _variants(run, cluster, ParallelConfig(rest // shard, shard, context, tensor))


def _variants(run: Run, cluster: Cluster, base: ParallelConfig) -> Iterator[ParallelConfig]:
    splits = SPLITS if base.context > 1 else (("ring", "zigzag"),)
    inner = cluster.per_node // base.tensor
    if inner > 1 and base.context > inner and base.context % inner == 0:
        splits = (*splits, ("double_ring", "zigzag"))
    for strategy, layout in splits:
        if strategy == "ulysses" and run.model.num_heads % (base.tensor * base.context):
            continue
        for recompute in ("none", "attention", "full"):
            for sharded in (False, True):
                if sharded and (base.shard > 1 or base.data * base.context == 1):
                    continue
                yield replace(
                    base,
                    strategy=strategy,
                    layout=layout,
                    recompute=recompute,
                    sharded_optimizer=sharded,
                )


def fits(run: Run, parallel: ParallelConfig, cluster: Cluster) -> bool:
    """Whether the run fits into a device's memory."""
    return ledger(run, parallel).peak <= cluster.device.memory - cluster.device.reserve


def rank(run: Run, cluster: Cluster, *, most: int | None = None) -> list[Answer]:
    """All parallelism configs that fit, sorted by time, then by memory."""
    found: list[Answer] = []
    for most_context in USUAL_CONTEXT:
        if not found:
            fitting = [m for m in parallel_configs(run, cluster, most_context) if fits(run, m, cluster)]
            found = [Answer(m, ledger(run, m), step_time(run, m, cluster)) for m in fitting]
    found.sort(key=lambda answer: (answer.time.total, answer.memory.peak))
    return found[:most]


def longest(run: Run, cluster: Cluster) -> tuple[int, ParallelConfig | None]:
    """The most tokens per sample, a multiple of 1024, with a parallelism config that fits, and that config."""
    unit = 1024

    def one_that_fits(units: int) -> ParallelConfig | None:
        longer = replace(run, tokens=units * unit)
        return next((m for m in parallel_configs(longer, cluster) if fits(longer, m, cluster)), None)

    low, high = 0, 1
    while high < 2**24 and one_that_fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one_that_fits(middle) else (low, middle)
    return low * unit, one_that_fits(low) if low else None


def grown(run: Run, cluster: Cluster, num_devices: int) -> Run:
    """The run on another number of devices, with the batch in proportion."""
    return replace(run, batch=max(1, run.batch * num_devices // cluster.num_devices))


def scaling(run: Run, cluster: Cluster) -> list[tuple[int, Answer | None]]:
    """The best parallelism config on 1, 2, 4, ... 1024 devices, with the batch in proportion (weak scaling)."""
    points: list[tuple[int, Answer | None]] = []
    for num in (2**power for power in range(11)):
        answers = rank(grown(run, cluster, num), cluster.resized(num), most=1)
        points.append((num, answers[0] if answers else None))
    return points


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
