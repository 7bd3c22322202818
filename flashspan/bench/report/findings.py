"""What the rows say, in plain words: what bounds the run, how it scales, what to change first."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from flashspan.bench.measure import record
from flashspan.bench.measure.record import OUT_OF_MEMORY, Row
from flashspan.bench.report.tables import show
from flashspan.bench.report.workloads import Workload, by_place, is_number, split, workloads
from flashspan.bench.suites.context_rank import ALONE

NOISE = 0.03
"""Of a time: two that differ by no more are not told apart."""
ADVICE = {
    "compute": "products take most of the step, which is what more devices or, where they have such products, bfloat16 "
    "shorten",
    "memory": "operators that only move memory take most of the step: compile the layers, use bfloat16, and give each "
    "rank more tokens at a time",
    "wire": "waiting for the wire takes most of the step: use longer sequences per rank, 16-bit keys and values, fewer "
    "kv heads, or a strategy that sends less",
    "imbalance": "ranks wait for the busiest one: use the zigzag layout, or the helper strategy on contiguous tokens",
}
NOT_FASTER = (
    "Splitting does not pay at this size on this machine: one device is as fast or faster. What would make it pay: "
    "longer sequences, and one process for each idle core or device"
)
ADVICE_NOT_FASTER = {
    **ADVICE,
    "compute": "products take most of the step, which bfloat16 shortens, where a device has such products",
}
"""Where splitting does not pay, more devices are no advice."""


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number_or_unknown(value: object) -> bool:
    return value is None or isinstance(value, int | float)


EXPECTED: dict[str, dict[str, Callable[[object], bool]]] = {
    "context": {
        "tokens": _is_count,
        **dict.fromkeys(("tokens_per_second", "computing_ms", "imbalance", "wire_ms", "wire_to_computing"), is_number),
        **dict.fromkeys(("hidden", "mfu", "product_share", "threads", "repeats"), _is_number_or_unknown),
    },
    "model": dict.fromkeys(("warmup", "steps"), _is_number_or_unknown),
    "warm-up": dict.fromkeys(("warmup", "steps"), _is_number_or_unknown),
    "study": {"tokens": _is_count, "head_dim": _is_count, "repeats": _is_number_or_unknown},
    "collective": dict.fromkeys(("alpha_us", "gb_per_s", "repeats"), _is_number_or_unknown),
}
"""What rows of a bench must have beside the times, by the first word of `Row.what`."""

SPARSE_SHAPE = re.compile(r"(\d+x){3}\d+ (random \d+%|(?!random).+)")
SPARSE_OURS = ("flashspan intervals", "flashspan blocks")
"""Ours on the mask in question: rows of the dense kernel beside them answer another."""


def check(rows: Sequence[Row]) -> None:
    """Refuse rows that another version wrote, which may lack numbers or have other things in their place."""
    for row in rows:
        bench = row.what.split(" ")[0]
        wrong = [
            f"{name} {row.more[name]!r}" if name in row.more else f"no {name}"
            for name, fits in EXPECTED.get(bench, {}).items()
            if not fits(row.more.get(name)) and (row.ok or name in row.more)  # what failed has only its settings
        ]
        if bench == "context" and row.ok and not row.p50_ms > 0:
            wrong.append("no p50_ms")
        if bench == "sparse" and not SPARSE_SHAPE.fullmatch(row.shape):
            wrong.append("no shape like 1x16x8192x128 random 10%")
        if wrong:
            raise ValueError(
                f"the row of {row.impl!r} ({row.shape}, {row.kind}) has {' and '.join(wrong)}: "
                "another version wrote it; move its file away and measure again"
            )


def current(rows: Sequence[Row]) -> list[Row]:
    """The newest row of each measurement; of a shape on a device, only those of the PyTorch that came last: what an
    upgrade left behind is not to be compared with what was measured after it."""
    last = {(row.what, row.shape, row.device): row.torch for row in rows}
    return [row for row in record.newest(rows) if row.torch == last[row.what, row.shape, row.device]]


def alike(one: float, other: float) -> bool:
    """Whether noise alone could be the difference of two times."""
    return max(one, other) <= (1 + NOISE) * min(one, other)


def pays(best: Row, alone: Row | None) -> bool:
    """Whether the fastest of many ranks is faster than one device; True where nothing is known of that one."""
    return alone is None or (best.p50_ms < alone.p50_ms and not alike(best.p50_ms, alone.p50_ms))


def of_layouts(zigzag: Row, contiguous: Row) -> str:
    """What the order of tokens brings to a causal ring."""
    gain = contiguous.p50_ms / zigzag.p50_ms
    if alike(zigzag.p50_ms, contiguous.p50_ms):
        return (
            "In a causal ring, there is no difference between zigzag and contiguous tokens that could be measured "
            f"(less than {NOISE:.0%})."
        )
    word = "faster" if gain > 1 else "slower"
    return f"In a causal ring, zigzag is {max(gain, 1 / gain):.2f} times {word} than contiguous tokens."


def of_choice(best: Row, worst: Row) -> str:
    """What the choice of a strategy brings."""
    if alike(best.p50_ms, worst.p50_ms):
        return f"The choice does not matter: all strategies take as long there, to {NOISE:.0%}."
    return f"The choice matters: {worst.impl} takes {worst.p50_ms / best.p50_ms:.2f} times as long there."


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
            if base.peak_mib > 0 and best.peak_mib > 0:  # nan where it was not measured
                text += f", and holds {best.peak_mib / base.peak_mib:.0%} of its memory per rank"
        found.append(text + ".")
        faster = pays(best, base)
        if not faster:
            found.append(f"{NOT_FASTER}.")
        if shares := split(best):
            advice = (ADVICE if faster else ADVICE_NOT_FASTER)[shares.bound]
            found.append(f"Its step is bound by {shares.bound}: {shares.words()}. First: {advice}.")
        if len(field) > 1:
            found.append(of_choice(best, field[-1]))
        layouts = {row.impl: row for row in field}
        if "ring zigzag" in layouts and "ring contiguous" in layouts:
            found.append(of_layouts(layouts["ring zigzag"], layouts["ring contiguous"]))
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
        if not math.isnan(kept):
            found.append(
                f"{name} scaling from 1 to {most} ranks (zigzag ring): each rank keeps {kept:.0%} of one device's "
                "speed."
            )
    named = filter(None, (re.search(r", (\d+) cores$", row.device) for row in work.whole))
    cores = next((int(match[1]) for match in named), None)
    if cores and any(row.ranks > cores for row in work.whole):
        found.append(
            f"Beyond {cores} ranks, processes share {cores} cores: those numbers show sharing, not the method."
        )
    return found


def of_attention(rows: Sequence[Row]) -> list[str]:
    """Our kernels against the best that is not ours, both passes."""
    both = [row for row in rows if row.what == "attention" and row.kind == "both" and row.ok and row.p50_ms > 0]
    ratios = []
    for shape, device in dict.fromkeys((row.shape, row.device) for row in both):
        times = {row.impl: row.p50_ms for row in both if (row.shape, row.device) == (shape, device)}
        others = [(time, impl) for impl, time in times.items() if not impl.startswith("flashspan")]
        if "flashspan" in times and others:
            time, impl = min(others)
            ratios.append((time / times["flashspan"], f"{shape}, {impl}"))
    if not ratios:
        return []
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    low, high = min(ratios), max(ratios)
    return [
        f"Attention, forward and backward: ours runs at {mean:.2f} times the speed of the fastest other on "
        f"{len(ratios)} shapes (geometric mean), from {low[0]:.2f} ({low[1]}) to {high[0]:.2f} ({high[1]})."
    ]


def against_flex(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """FlexAttention's time over the better of ours, by device, shape and pass: rows of `bench sparse`."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.what == "sparse" and row.ok and row.p50_ms > 0:
            times.setdefault((row.device, row.shape, row.kind), {})[row.impl] = row.p50_ms
    found = {}
    for key, here in times.items():
        ours = [here[impl] for impl in SPARSE_OURS if impl in here]
        if ours and "flex" in here:
            found[key] = here["flex"] / min(ours)
    return found


def of_sparse(rows: Sequence[Row]) -> list[str]:
    """Our kernels against FlexAttention under sparse masks."""
    ratios = against_flex(rows)
    passes = []
    for kind in ("forward", "backward"):
        here = sorted((ratio, shape) for (_, shape, which), ratio in ratios.items() if which == kind)
        if here:
            ends = [here[0], here[-1]] if len(here) > 1 else here
            passes.append(f"{kind} {' to '.join(f'{ratio:.2f} ({shape})' for ratio, shape in ends)} times as fast")
    if not passes:
        return []
    number = len({(device, shape) for device, shape, _ in ratios})
    return [f"Block-sparse attention, ours against FlexAttention on {number} masks: {', '.join(passes)}."]


def of_trainer(rows: Sequence[Row]) -> list[str]:
    """Our trainer and our decoding against another library's, by pass."""
    mine = [row for row in rows if row.what == "trainer" and row.ok and row.p50_ms > 0]
    times = {(row.device, row.shape, row.kind, row.impl): row.p50_ms for row in mine}
    ratios: dict[str, list[str]] = {}
    for (device, shape, kind, impl), theirs in times.items():
        ours = times.get((device, shape, kind, "flashspan"))
        if ours and not impl.startswith("flashspan"):
            ratios.setdefault(impl, []).append(f"{theirs / ours:.2f} in {kind} of {shape}")
    return [f"Training and generating, times as fast as {impl}: {', '.join(each)}." for impl, each in ratios.items()]


def of_model(rows: Sequence[Row]) -> list[str]:
    """What autocast and the compiler bring to a training step."""
    step = [row for row in rows if row.what == "model" and row.kind == "training" and row.ok and row.p50_ms > 0]
    found = []
    for label, one, two in (
        ("bfloat16 autocast", lambda r: r.dtype == "float32", lambda r: r.dtype == "bfloat16"),
        ("torch.compile", lambda r: r.impl.endswith("eager"), lambda r: r.impl.endswith("compiled")),
    ):
        ratios = []
        for a in filter(one, step):
            twins = [b for b in filter(two, step) if _twin(a, b, label)]
            ratios += [a.p50_ms / b.p50_ms for b in twins[:1]]
        if ratios:
            several = len(ratios) > 1
            most, where = (f" to {max(ratios):.2f}", f", on {len(ratios)} configurations") if several else ("", "")
            found.append(f"{label}: a training step is {min(ratios):.2f}{most} times as fast{where}.")
    return found


def _twin(a: Row, b: Row, label: str) -> bool:
    if (a.shape, a.device) != (b.shape, b.device):
        return False
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
    found = []
    for where, here in by_place([row for row in rows if row.what == "collective"]).items():
        fits = {}
        for row in here:
            if is_number(row.more.get("alpha_us")) and is_number(row.more.get("gb_per_s")):
                fits[row.impl, row.ranks] = row.more
        found += [
            f"{name} on {ranks} ranks{where}: {show(float(fit['alpha_us']))} µs and {show(float(fit['gb_per_s']))} "
            "GB/s fit the measured times."
            for (name, ranks), fit in fits.items()
            if name in ("send-receive", "all-reduce")
        ]
    return found


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


def of_earlier(rows: Sequence[Row], kept: Sequence[Row]) -> list[str]:
    """What is not spoken of, since an older PyTorch measured it."""
    numbers = Counter((row.what, row.torch) for row in record.newest(rows))
    numbers -= Counter((row.what, row.torch) for row in kept)
    return [
        f"Left out: {number} rows ({what}) of torch {torch}. The same shapes were measured later with another, and "
        "speeds are compared within one version."
        for (what, torch), number in numbers.items()
    ]


def find(rows: Sequence[Row], kept: Sequence[Row] | None = None) -> list[str]:
    """All findings, the most telling first. `kept` is current(rows), from who has it."""
    kept = current(rows) if kept is None else kept
    parts = (of_noise, of_context, of_attention, of_sparse, of_trainer, of_model, of_collectives, of_memory)
    found = [text for part in parts for text in part(kept)] + of_earlier(rows, kept)
    failed = [row for row in kept if row.status.startswith("failed")]
    if failed:
        found.append(f"{len(failed)} measurements failed, the first ({failed[0].impl}): {failed[0].status[8:]}.")
    return found or ["There are rows, but none that a finding is made of."]
