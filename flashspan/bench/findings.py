"""What the rows say, in plain words: what bounds the run, how it scales, what to change first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flashspan.bench.context import ALONE
from flashspan.bench.record import OUT_OF_MEMORY, Row
from flashspan.bench.tables import show

ADVICE = {
    "compute": "products take most of the step, which is what more devices or a faster dtype (bfloat16) shorten",
    "memory": "operators that only move memory take most of the step: compile the layers, use bfloat16, and give each "
    "rank more tokens at a time",
    "wire": "waiting for the wire takes most of the step: use longer sequences per rank, 16-bit keys and values, fewer "
    "kv heads, or a strategy that sends less",
    "imbalance": "ranks wait for the busiest one: use the zigzag layout, or the helper strategy on contiguous tokens",
}


NEEDED = ("tokens", "tokens_per_second", "computing_ms", "imbalance", "wire_ms", "wire_to_computing")
"""Numbers that a row of `bench context` must have beside the times."""


def check(rows: Sequence[Row]) -> None:
    """Refuse rows of `bench context` that another version wrote, which may lack numbers."""
    for row in rows:
        if row.what == "context" and row.ok:
            lacks = [name for name in NEEDED if not isinstance(row.more.get(name), int | float)]
            if lacks or not row.p50_ms > 0:
                raise ValueError(
                    f"the row of {row.impl!r} ({row.shape}, {row.kind}) has no {' or '.join(lacks or ['p50_ms'])}: "
                    "another version wrote it; move its file away and measure again"
                )


@dataclass(frozen=True)
class Shares:
    """The parts of a step, milliseconds: products, other operators, waiting for the wire, for the busiest rank."""

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
        names = {"compute": "products", "memory": "other operators", "wire": "the wire", "imbalance": "imbalance"}
        return ", ".join(f"{names[name]} {100 * value / total:.0f}%" for name, value in vars(self).items())


def split(row: Row) -> Shares:
    """Where the time of a row of `bench context` went."""
    slowest = min(row.more["computing_ms"], row.p50_ms)
    mean = slowest / max(1.0, row.more["imbalance"])
    share = row.more.get("product_share")
    products = mean * (share if share is not None and not math.isnan(share) else 0.0)
    return Shares(products, mean - products, row.p50_ms - slowest, slowest - mean)


@dataclass(frozen=True)
class Workload:
    """Rows of `bench context` that may be compared: forward and backward of one model and dtype on one device.

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


def workloads(rows: Sequence[Row]) -> list[Workload]:
    """The sweeps that a folder holds: of different models, lengths, dtypes or devices, each apart from the others."""
    done = [row for row in rows if row.what == "context" and row.ok and row.kind == "forward+backward"]
    # The mark only says for which lengths: a row of weak scaling may be a strong one of a shorter sequence.
    keys = dict.fromkeys((r.shape, r.dtype, r.device) for r in done if r.more.get("scaling") == "strong")
    found = []
    for shape, dtype, device in keys:
        kin = [row for row in done if (kind_of(row), row.device) == ((model_of(shape), dtype), device)]
        whole = [row for row in kin if row.shape == shape]
        most = max(row.ranks for row in whole)
        each = whole[0].more["tokens"] // most
        grown = {
            row.ranks: row
            for row in kin
            if row.impl == (ALONE if row.ranks == 1 else "ring zigzag")
            and (row.shape == shape if row.ranks == most else row.more["tokens"] == each * row.ranks)
        }
        told = [value for place, value in ((1, dtype), (2, device)) if len({key[place] for key in keys}) > 1]
        found.append(Workload(", ".join([shape, *told]), whole, grown))
    return found


def model_of(shape: str) -> str:
    """The shape of a row of `bench context` without its tokens."""
    return shape.rsplit(", ", 1)[0]


def kind_of(row: Row) -> tuple[str, str]:
    return model_of(row.shape), row.dtype


def of_context(rows: Sequence[Row]) -> list[str]:
    """Findings of `bench context`."""
    found = []
    for work in workloads(rows):
        most, base = work.most, work.alone
        field = sorted((r for r in work.whole if r.ranks == most and r.impl != ALONE), key=lambda row: row.p50_ms)
        if not field:
            continue
        best = field[0]
        text = f"{work.name}: on {most} ranks {best.impl} is fastest, {show(best.p50_ms)} ms forward and backward"
        if base is not None:
            ratio = base.p50_ms / best.p50_ms
            text += f", {ratio:.2f} times as fast as one device ({100 * ratio / most:.0f}% of ideal)"
            if ratio > 1.2 * most:
                text += f", more than {most} ranks give: smaller parts fit its caches, or one device was disturbed"
            text += f", and holds {best.peak_mib / base.peak_mib:.0%} of its memory per rank"
        found.append(text + ".")
        shares = split(best)
        found.append(f"Its step is bound by {shares.bound}: {shares.words()}. First: {ADVICE[shares.bound]}.")
        if len(field) > 1:
            worst = field[-1]
            found.append(
                f"The choice matters: {worst.impl} takes {worst.p50_ms / best.p50_ms:.2f} times as long there."
            )
        layouts = {row.impl: row for row in field}
        if "ring zigzag" in layouts and "ring contiguous" in layouts:
            gain = layouts["ring contiguous"].p50_ms / layouts["ring zigzag"].p50_ms
            word = "faster" if gain > 1 else "slower"
            found.append(f"In a causal ring, zigzag is {max(gain, 1 / gain):.2f} times {word} than contiguous tokens.")
        hidden = best.more.get("hidden")
        if best.more.get("wire_ms") and hidden is not None and not math.isnan(hidden):
            found.append(
                f"Its communication alone takes {show(float(best.more['wire_ms']))} ms, "
                f"{best.more['wire_to_computing']:.2f} of the computing, and {hidden:.0%} of it is hidden."
            )
        found += scaling(work)
    return found


def scaling(work: Workload) -> list[str]:
    """How speed per rank changes with ranks: the whole the same (strong), and the part of each rank the same (weak)."""
    found = []
    strong = {row.ranks: row for row in work.whole if row.impl in (ALONE, "ring zigzag")}
    for name, line in (("Strong", strong), ("Weak", work.grown)):
        if 1 not in line or len(line) < 2:
            continue
        most = max(line)
        kept = line[most].tflops / most / line[1].tflops
        found.append(
            f"{name} scaling from 1 to {most} ranks (zigzag ring): each rank keeps {kept:.0%} of one device's speed."
        )
    named = filter(None, (re.search(r", (\d+) cores$", row.device) for row in work.whole))
    cores = next((int(match[1]) for match in named), None)
    if cores and any(row.ranks > cores for row in work.whole):
        found.append(
            f"Beyond {cores} ranks, processes share {cores} cores: those numbers show sharing, not the method."
        )
    return found


def of_attention(rows: Sequence[Row]) -> list[str]:
    """Our kernels against the best of the others, both passes."""
    both = [row for row in rows if row.what == "attention" and row.kind == "both" and row.ok]
    ratios = []
    for shape in dict.fromkeys(row.shape for row in both):
        times = {row.impl: row.p50_ms for row in both if row.shape == shape}
        others = [time for impl, time in times.items() if impl != "flashspan"]
        if "flashspan" in times and others:
            ratios.append((min(others) / times["flashspan"], shape))
    if not ratios:
        return []
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    low, high = min(ratios), max(ratios)
    return [
        f"Attention, forward and backward: ours runs at {mean:.2f} times the speed of the fastest other on "
        f"{len(ratios)} shapes (geometric mean), from {low[0]:.2f} ({low[1]}) to {high[0]:.2f} ({high[1]})."
    ]


def of_model(rows: Sequence[Row]) -> list[str]:
    """What autocast and the compiler bring to a training step."""
    step = [row for row in rows if row.what == "model" and row.kind == "training" and row.ok]
    found = []
    for label, one, two in (
        ("bfloat16 autocast", lambda r: r.dtype == "float32", lambda r: r.dtype == "bfloat16"),
        ("torch.compile", lambda r: r.impl.endswith("eager"), lambda r: r.impl.endswith("compiled")),
    ):
        ratios = []
        for a in filter(one, step):
            twins = [b for b in filter(two, step) if b.shape == a.shape and _twin(a, b, label)]
            ratios += [a.p50_ms / b.p50_ms for b in twins[:1]]
        if ratios:
            spread = f" to {max(ratios):.2f}, on {len(ratios)} configurations" if len(ratios) > 1 else ""
            found.append(f"{label}: a training step's speed is times {min(ratios):.2f}{spread}.")
    return found


def _twin(a: Row, b: Row, label: str) -> bool:
    if label == "torch.compile":
        return a.dtype == b.dtype and a.impl.split(",")[0] == b.impl.split(",")[0]
    return a.impl == b.impl


def of_memory(rows: Sequence[Row]) -> list[str]:
    """What did not fit."""
    lost = dict.fromkeys(f"{row.what} {row.shape} {row.impl}" for row in rows if row.status == OUT_OF_MEMORY)
    if not lost:
        return []
    shown = "; ".join(list(lost)[:4]) + (f"; and {len(lost) - 4} more" if len(lost) > 4 else "")
    return [f"{len(lost)} configurations ran out of memory: {shown}."]


def of_collectives(rows: Sequence[Row]) -> list[str]:
    """The wire, as the planner knows it."""
    fits = {}
    for row in rows:
        if row.what == "collective" and "alpha_us" in row.more:
            fits[row.impl, row.ranks] = row.more
    return [
        f"{name} on {ranks} ranks: {show(float(fit['alpha_us']))} µs and {show(float(fit['gb_per_s']))} GB/s fit the "
        "measured times."
        for (name, ranks), fit in fits.items()
        if name in ("send-receive", "all-reduce")
    ]


def of_noise(rows: Sequence[Row]) -> list[str]:
    """Whether the machine was quiet enough to believe the rest."""
    timed = [row for row in rows if row.ok and row.p50_ms > 0]
    loud = [row for row in timed if (row.p80_ms - row.p20_ms) / row.p50_ms > 0.5]
    if not timed or len(loud) < 0.2 * len(timed):
        return []
    return [
        f"Take the times with care: in {len(loud)} of {len(timed)} measurements the middle 60% spread by more than "
        "half of the median, so something else was using the machine. Measure again with --again when it is quiet."
    ]


def find(rows: Sequence[Row]) -> list[str]:
    """All findings, the most telling first."""
    found = (
        of_noise(rows) + of_context(rows) + of_attention(rows) + of_model(rows) + of_collectives(rows) + of_memory(rows)
    )
    failed = [row for row in rows if row.status.startswith("failed")]
    if failed:
        found.append(f"{len(failed)} measurements failed, the first ({failed[0].impl}): {failed[0].status[8:]}.")
    return found or ["There are rows, but none that a finding is made of."]
