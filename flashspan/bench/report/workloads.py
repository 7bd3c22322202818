"""Groups rows of `bench context` by workload, and splits the time of a step into parts."""

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
"""The names of the parts of a step in legends, captions and findings."""


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
    """The parts of the time of a row of `bench context`; None if the share of matmuls was not measured."""
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

    `whole`: rows with the same number of tokens on all ranks together. `grown`: the number of ranks -> a row with the
    same number of tokens per rank.
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
    """What must be equal in rows of `bench context` whose speeds are compared. Tokens and ranks may differ."""

    model: str
    dtype: str
    device: str
    torch: str
    threads: int | None  # of a rank; None if not recorded

    def differs(self, others: Sequence[Setting]) -> list[str]:
        """Text for each field in which `others` differ, except the model."""
        threads = "threads unknown" if self.threads is None else f"threads per rank {self.threads}"
        words = (self.model, self.dtype, self.device, f"torch {self.torch}", threads)
        return [word for place, word in enumerate(words) if place and len({other[place] for other in others}) > 1]


def setting_of(row: Row) -> Setting:
    return Setting(row.shape.rsplit(", ", 1)[0], row.dtype, row.device, row.torch, row.more.get("threads"))


def by_place(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by device and PyTorch. A key is the suffix of a title, which distinguishes these rows from the others."""
    places = dict.fromkeys((row.device, row.torch) for row in rows)
    devices, versions = {device for device, _ in places}, {version for _, version in places}
    found = {}
    for device, version in places:
        told = (f", {device}" if len(devices) > 1 else "") + (f", torch {version}" if len(versions) > 1 else "")
        found[told] = [row for row in rows if (row.device, row.torch) == (device, version)]
    return found


def workloads(rows: Sequence[Row]) -> list[Workload]:
    """The workloads in the rows of a folder: one for each sequence length and setting."""
    done = [row for row in rows if row.what == "context" and row.ok and row.kind == "forward+backward"]
    # "strong" only marks the lengths to use: a row of weak scaling may be a strong one of a shorter sequence.
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
