"""Rows of bench context sorted by workload, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashspan.bench.measure.record import Row
from flashspan.bench.suites.context_rank import ALONE

PARTS = {
    "compute": "matmuls",
    "memory": "other operators",
    "wire": "waiting for communication",
    "imbalance": "waiting for the busiest rank",
}
"""What the parts of a step are called, in legends, captions and findings."""


@dataclass(frozen=True)
class Shares:
    """The parts of a step in milliseconds, by the names in `PARTS`."""

    compute: float
    memory: float
    wire: float
    imbalance: float

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(vars(self), key=vars(self).__getitem__)

    def words(self) -> str:
        total = sum(vars(self).values())
        return ", ".join(f"{PARTS[name]} {100 * value / total:.0f}%" for name, value in vars(self).items())


def split(row: Row) -> Shares | None:
    """Where the time of a row of `bench context` went; None if its matmuls were not timed apart."""
    share = row.more.get("product_share")
    if not is_number(share):
        return None
    slowest = min(row.more["computing_ms"], row.p50_ms)
    mean = slowest / max(1.0, row.more["imbalance"])
    products = mean * share
    return Shares(products, mean - products, row.p50_ms - slowest, slowest - mean)


@dataclass(frozen=True)
class Workload:
    """Rows of `bench context` that may be compared: forward and backward in one setting.

    `whole`: the same tokens on any number of ranks. `grown`: the same tokens per rank, by the number of ranks.
    """

    name: str
    whole: list[Row]
    grown: dict[int, Row]

    @property
    def alone(self) -> Row | None:
        return next((row for row in self.whole if row.impl == ALONE), None)

    @property
    def most(self) -> int:
        return max(row.ranks for row in self.whole)


class Setting(NamedTuple):
    """What rows of `bench context` share if their speeds may be compared. Tokens and ranks may differ."""

    model: str
    dtype: str
    device: str
    torch: str
    threads: int | None  # of a rank; None where it was not recorded

    def differs(self, others: Sequence[Setting]) -> list[str]:
        """In words, what beside the model tells it from others."""
        threads = "threads unknown" if self.threads is None else f"threads per rank {self.threads}"
        words = (self.model, self.dtype, self.device, f"torch {self.torch}", threads)
        return [word for place, word in enumerate(words) if place and len({other[place] for other in others}) > 1]


def setting_of(row: Row) -> Setting:
    return Setting(row.shape.rsplit(", ", 1)[0], row.dtype, row.device, row.torch, row.more.get("threads"))


def by_place(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each device and PyTorch apart, as in `Setting`; by what a title adds to tell one from the others."""
    places = dict.fromkeys((row.device, row.torch) for row in rows)
    devices, versions = {device for device, _ in places}, {version for _, version in places}
    found = {}
    for device, version in places:
        told = (f", {device}" if len(devices) > 1 else "") + (f", torch {version}" if len(versions) > 1 else "")
        found[told] = [row for row in rows if (row.device, row.torch) == (device, version)]
    return found


def workloads(rows: Sequence[Row]) -> list[Workload]:
    """The sweeps that a folder holds: of different lengths or settings, each apart from the others."""
    done = [row for row in rows if row.what == "context" and row.ok and row.kind == "forward+backward"]
    # The mark only says for which lengths: a row of weak scaling may be a strong one of a shorter sequence.
    keys = dict.fromkeys((r.shape, setting_of(r)) for r in done if r.more.get("scaling") == "strong")
    settings = [setting for _, setting in keys]
    found = []
    for shape, setting in keys:
        kin = [row for row in done if setting_of(row) == setting]
        whole = [row for row in kin if row.shape == shape]
        most = max(row.ranks for row in whole)
        each = whole[0].more["tokens"] // most
        grown = {
            row.ranks: row
            for row in kin
            if row.impl == (ALONE if row.ranks == 1 else "ring zigzag")
            and (row.shape == shape if row.ranks == most else row.more["tokens"] == each * row.ranks)
        }
        found.append(Workload(", ".join([shape, *setting.differs(settings)]), whole, grown))
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
