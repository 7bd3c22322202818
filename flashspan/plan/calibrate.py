"""Fit a device's fractions to measurements, so that the planner's times are near the measured ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .devices import Cluster, Device, Link
from .memory import ParallelConfig, Run
from .step import step_time

ROUNDS = 8
FITTED = ("product_share", "forward_share", "backward_share", "traffic_share", "launch")
INERTIA = 0.05
"""The cost of changing a number by a factor, relative to the cost of missing a measurement by the same factor. Without
it, a number on which the measurements hardly depend, such as attention's share for short sequences, would move to its
bound."""


@dataclass(frozen=True)
class Measurement:
    """The seconds of a phase ("forward", "backward", "optimizer" or "total") of a run on one device."""

    run: Run
    phase: str
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(
                f"a measured time must be positive: got {self.seconds} s for {self.phase}; repeat the measurement"
            )


def calibrate(cluster: Cluster, measured: Sequence[Measurement]) -> Cluster:
    """The cluster with fractions of its device that minimise squared relative errors, and stay near the given ones.

    Pass the smallest of several samples: disturbances of a host make times longer, never shorter. The search changes
    one number at a time, in shrinking steps, because times are monotonic in each number.
    """
    if not measured:
        raise ValueError("calibration needs measured rows of `flashspan bench model` on one device: got none")
    device, step = cluster.device, 2.0
    best = _error(cluster, device, measured)
    for _ in range(ROUNDS):
        for name in FITTED:
            for factor in (step, 1 / step, math.sqrt(step), 1 / math.sqrt(step)):
                value = getattr(device, name) * factor
                if name != "launch":
                    value = min(1.0, value)
                tried = replace(device, **{name: value})
                error = _error(cluster, tried, measured)
                if error < best:
                    device, best = tried, error
        step = math.sqrt(step) if step > 1.05 else step
    return replace(cluster, device=device)


def predict(cluster: Cluster, run: Run, phase: str) -> float:
    """The planner's seconds for a phase on one device."""
    return float(getattr(step_time(run, ParallelConfig(), cluster.resized(1)), phase))


def _error(cluster: Cluster, device: Device, measured: Sequence[Measurement]) -> float:
    """The sum of the squared logarithms of planned over measured times and of changed over given device numbers."""
    tried = replace(cluster, device=device)
    moved = sum(math.log(getattr(device, name) / getattr(cluster.device, name)) ** 2 for name in FITTED)
    return INERTIA * moved + sum(math.log(predict(tried, m.run, m.phase) / m.seconds) ** 2 for m in measured)


def fit_link(name: str, sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link whose times have the least squared relative errors to the measured ones."""
    if len(sizes) < 2 or len(sizes) != len(seconds):
        raise ValueError(f"a fit needs two or more sizes and a time for each: got {len(sizes)} and {len(seconds)}")
    # Minimise sum((a + b x - t)^2 / t^2): a 2 x 2 system.
    w = [1 / t**2 for t in seconds]
    sw, sx, st = (
        sum(w),
        sum(a * x for a, x in zip(w, sizes, strict=True)),
        sum(a * t for a, t in zip(w, seconds, strict=True)),
    )
    sxx = sum(a * x * x for a, x in zip(w, sizes, strict=True))
    sxt = sum(a * x * t for a, x, t in zip(w, sizes, seconds, strict=True))
    slope = (sw * sxt - sx * st) / max(sw * sxx - sx * sx, 1e-300)
    slope = slope if slope > 0 else min(t / x for x, t in zip(sizes, seconds, strict=True) if x)
    return Link(name, max(0.0, (st - slope * sx) / sw), 1 / slope)
