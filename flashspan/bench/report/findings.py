"""Findings from rows, as sentences: what bounds the run, how it scales, what to change first."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from flashspan.bench.measure import record
from flashspan.bench.measure.record import OUT_OF_MEMORY, Row
from flashspan.bench.report.tables import show
from flashspan.bench.report.workloads import PARTS, Workload, by_place, is_number, split, workloads
from flashspan.bench.suites.context_rank import ALONE

NOISE = 0.03
"""Medians that differ by at most this share count as equal: percentiles of few repetitions may not overlap."""
NOT_FASTER = (
    "Splitting does not pay at this size on this machine: one device is as fast or faster. Longer sequences, or one "
    "process for each idle core or device, would make it pay"
)


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
"""Numbers that the rows of a benchmark must have in `more`, by the first word of `Row.what`."""

SPARSE_SHAPE = re.compile(r"(\d+x){3}\d+ (random \d+%|(?!random).+)")
SPARSE_OURS = ("flashspan intervals", "flashspan blocks")
"""Our implementations that use the sparse mask itself; rows of our dense kernel, next to these, have another mask."""


def check(rows: Sequence[Row]) -> None:
    """ValueError for rows that another version wrote: they lack numbers, or have invalid values in their place."""
    for row in rows:
        bench = row.what.split(" ")[0]
        wrong = [
            f"{name} {row.more[name]!r}" if name in row.more else f"no {name}"
            for name, fits in EXPECTED.get(bench, {}).items()
            if not fits(row.more.get(name)) and (row.ok or name in row.more)  # failed rows have only settings
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
    """The newest row of each measurement. For each shape and device, only rows of the PyTorch measured last are kept:
    rows from before an upgrade are not compared with later ones."""
    last = {(row.what, row.shape, row.device): row.torch for row in rows}
    return [row for row in record.newest(rows) if row.torch == last[row.what, row.shape, row.device]]


def compare(one: Row, other: Row) -> int:
    """1 if the first row is faster, -1 if it is slower, 0 if repeated measurements do not separate them: the 20th to
    80th percentiles of their times overlap, or the medians differ by no more than `NOISE`."""
    if max(one.p50_ms, other.p50_ms) <= (1 + NOISE) * min(one.p50_ms, other.p50_ms):
        return 0
    fast, slow = sorted((one, other), key=lambda row: row.p50_ms)
    high = fast.p80_ms if is_number(fast.p80_ms) else fast.p50_ms
    low = slow.p20_ms if is_number(slow.p20_ms) else slow.p50_ms
    return 0 if high >= low else 1 if fast is one else -1


def counts(outcomes: Sequence[int]) -> str:
    """A count of outcomes of `compare`, as text: faster on 3, slower on 1, no measurable difference on 2."""
    words = {1: "faster", -1: "slower", 0: "no measurable difference"}
    return ", ".join(f"{word} on {outcomes.count(which)}" for which, word in words.items() if which in outcomes)


def advice(best: Row, bound: str, *, pays: bool, measured: Collection[str]) -> str:
    """A sentence on how to shorten the largest part of a step. It names nothing that the run already uses, and no
    strategy in `measured`, since these are not faster than the best."""
    half = best.dtype in ("bfloat16", "float16")
    faster = [] if half else ["bfloat16 (if the device has bfloat16 matmuls)"]
    keys = [] if half else ["16-bit keys and values"]
    others = {"ring zigzag": "the zigzag layout", "helper contiguous": "the helper strategy on contiguous tokens"}
    means = {
        "compute": ["more devices"] * pays + faster,
        "memory": ["compiled layers", *faster, "more tokens per rank"],
        "wire": ["longer sequences per rank", *keys, "fewer kv heads"],
        "imbalance": [words for impl, words in others.items() if impl not in measured],
    }[bound]
    return f" What shortens this part: {', or '.join(means)}." if means else ""


def of_layouts(zigzag: Row, contiguous: Row) -> str:
    """A sentence that compares zigzag with contiguous tokens in a causal ring."""
    which = compare(zigzag, contiguous)
    if which == 0:
        return "In a causal ring there is no measurable difference between zigzag and contiguous tokens."
    gain = contiguous.p50_ms / zigzag.p50_ms
    word = "faster" if which > 0 else "slower"
    return f"In a causal ring, zigzag is {max(gain, 1 / gain):.2f} times {word} than contiguous tokens."


def of_choice(best: Row, worst: Row) -> str:
    """A sentence that compares the best strategy with the worst."""
    if compare(best, worst) == 0:
        return "The choice does not matter: there is no measurable difference between the strategies."
    return f"The choice matters: {worst.impl} takes {worst.p50_ms / best.p50_ms:.2f} times as long as {best.impl}."


def of_context(rows: Sequence[Row]) -> list[str]:
    """Findings of `bench context`."""
    found = []
    for work in workloads(rows):
        most, base = work.most, work.alone
        field = sorted((r for r in work.whole if r.ranks == most and r.impl != ALONE), key=lambda row: row.p50_ms)
        if not field:
            continue
        best = field[0]
        tied = [row.impl for row in field[1:] if compare(best, row) == 0]
        lead = "is fastest" if not tied else "has the shortest median"
        text = f"{work.name}: on {most} ranks {best.impl} {lead}, {show(best.p50_ms)} ms forward and backward"
        if base is not None:
            text += _beside(best, base, most)
        found.append(f"{text}.")
        if tied:
            found.append(f"Not measurably slower than {best.impl}: {', '.join(tied)}.")
        faster = base is None or compare(best, base) > 0
        if not faster:
            found.append(f"{NOT_FASTER}.")
        layouts = {row.impl: row for row in field}
        zigzag, contiguous = layouts.get("ring zigzag"), layouts.get("ring contiguous")
        if shares := split(best):
            means = advice(best, shares.bound, pays=faster, measured=layouts)
            found.append(
                f"The largest part of the step of {best.impl} is {PARTS[shares.bound]}: {shares.words()}.{means}"
            )
        if len(field) > 1:
            found.append(of_choice(best, field[-1]))
        if zigzag and contiguous:
            found.append(of_layouts(zigzag, contiguous))
        hidden = best.more.get("hidden")
        if best.more.get("wire_ms") and hidden is not None and not math.isnan(hidden):
            found.append(
                f"The communication of {best.impl} alone takes {show(float(best.more['wire_ms']))} ms, "
                f"{best.more['wire_to_computing']:.2f} of the computing, and {hidden:.0%} of it is hidden."
            )
        found += scaling(work)
    return found


def _beside(best: Row, base: Row, most: int) -> str:
    """Text that compares the fastest strategy with one device."""
    ratio = base.p50_ms / best.p50_ms
    if compare(best, base) == 0:
        text = ", with no measurable difference from one device"
    else:
        text = f", {ratio:.2f} times as fast as one device ({100 * ratio / most:.0f}% of ideal)"
    if ratio > 1.2 * most:
        text += ", which is more than the number of ranks: smaller parts fit the caches, or one device was slowed down"
    if base.peak_mib > 0 and best.peak_mib > 0:  # nan where it was not measured
        text += f"; the peak memory of a rank is {best.peak_mib / base.peak_mib:.0%} of that of one device"
    return text


def scaling(work: Workload) -> list[str]:
    """Sentences on the speed per rank: with the same tokens in all (strong), with the same tokens per rank (weak)."""
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
            f"Beyond {cores} ranks, processes share {cores} cores: their speed shows the effect of sharing, not of the "
            "strategy."
        )
    return found


def of_attention(rows: Sequence[Row]) -> list[str]:
    """A sentence that compares our kernels with the fastest other ones, both passes together."""
    both = [row for row in rows if row.what == "attention" and row.kind == "both" and row.ok and row.p50_ms > 0]
    ratios, outcomes = [], []
    for shape, device in dict.fromkeys((row.shape, row.device) for row in both):
        here = {row.impl: row for row in both if (row.shape, row.device) == (shape, device)}
        others = [row for impl, row in here.items() if not impl.startswith("flashspan")]
        if "flashspan" in here and others:
            other = min(others, key=lambda row: (row.p50_ms, row.impl))
            ratios.append((other.p50_ms / here["flashspan"].p50_ms, f"{shape}, {other.impl}"))
            outcomes.append(compare(here["flashspan"], other))
    if not ratios:
        return []
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    low, high = min(ratios), max(ratios)
    return [
        f"Attention, forward and backward: flashspan runs at {mean:.2f} times the speed of the fastest other on "
        f"{_shapes(len(ratios))} (geometric mean), from {low[0]:.2f} ({low[1]}) to {high[0]:.2f} ({high[1]}); it is "
        f"{counts(outcomes)}."
    ]


def _shapes(number: int) -> str:
    return f"{number} shape{'s' * (number != 1)}"


def _pairs_with_flex(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[Row, Row]]:
    """The rows of our faster implementation and of FlexAttention in `bench sparse`, by device, shape and pass."""
    times: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if row.what == "sparse" and row.ok and row.p50_ms > 0:
            times.setdefault((row.device, row.shape, row.kind), {})[row.impl] = row
    found = {}
    for key, here in times.items():
        ours = [here[impl] for impl in SPARSE_OURS if impl in here]
        if ours and "flex" in here:
            found[key] = min(ours, key=lambda row: row.p50_ms), here["flex"]
    return found


def against_flex(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """FlexAttention's time divided by our shorter time in `bench sparse`, by device, shape and pass."""
    return {key: flex.p50_ms / ours.p50_ms for key, (ours, flex) in _pairs_with_flex(rows).items()}


def of_sparse(rows: Sequence[Row]) -> list[str]:
    """A sentence that compares our kernels with FlexAttention for sparse masks."""
    pairs, passes = _pairs_with_flex(rows), []
    for kind in ("forward", "backward"):
        here = {shape: pair for (_, shape, which), pair in pairs.items() if which == kind}
        ratios = sorted((flex.p50_ms / ours.p50_ms, shape) for shape, (ours, flex) in here.items())
        if ratios:
            ends = [ratios[0], ratios[-1]] if len(ratios) > 1 else ratios
            passes.append(
                f"{kind} {' to '.join(f'{ratio:.2f} ({shape})' for ratio, shape in ends)} times as fast "
                f"({counts([compare(*pair) for pair in here.values()])})"
            )
    if not passes:
        return []
    number = len({(device, shape) for device, shape, _ in pairs})
    masks = f"{number} mask{'s' * (number != 1)}"
    return [f"Block-sparse attention, flashspan compared with FlexAttention on {masks}: {', '.join(passes)}."]


def of_trainer(rows: Sequence[Row]) -> list[str]:
    """Sentences that compare our trainer and decoding with those of other libraries, by pass."""
    mine = [row for row in rows if row.what == "trainer" and row.ok and row.p50_ms > 0]
    found = {(row.device, row.shape, row.kind, row.impl): row for row in mine}
    said: dict[str, list[str]] = {}
    for (device, shape, kind, impl), theirs in found.items():
        ours = found.get((device, shape, kind, "flashspan"))
        if ours is None or impl.startswith("flashspan"):
            continue
        ratio = f"{theirs.p50_ms / ours.p50_ms:.2f} times as fast"
        text = ratio if compare(ours, theirs) else "no measurable difference"
        said.setdefault(impl, []).append(f"{kind} of {shape} {text}")
    return [
        f"Training and generating, flashspan compared with {impl}: {', '.join(each)}." for impl, each in said.items()
    ]


def of_model(rows: Sequence[Row]) -> list[str]:
    """Sentences on the speed-up of a training step by autocast and by torch.compile."""
    step = [row for row in rows if row.what == "model" and row.kind == "training" and row.ok and row.p50_ms > 0]
    found = []
    for label, one, two in (
        ("bfloat16 autocast", lambda r: r.dtype == "float32", lambda r: r.dtype == "bfloat16"),
        ("torch.compile", lambda r: r.impl.endswith("eager"), lambda r: r.impl.endswith("compiled")),
    ):
        pairs = []
        for a in filter(one, step):
            twins = [b for b in filter(two, step) if _twin(a, b, label)]
            pairs += [(b, a) for b in twins[:1]]
        outcomes, ratios = [compare(b, a) for b, a in pairs], [a.p50_ms / b.p50_ms for b, a in pairs]
        if not ratios:
            continue
        if not any(outcomes):
            found.append(f"{label}: no measurable difference in a training step.")
        elif len(ratios) == 1:
            found.append(f"{label}: a training step is {ratios[0]:.2f} times as fast.")
        else:
            found.append(
                f"{label}: a training step is {min(ratios):.2f} to {max(ratios):.2f} times as fast, on {len(ratios)} "
                f"configurations ({counts(outcomes)})."
            )
    return found


def _twin(a: Row, b: Row, label: str) -> bool:
    if (a.shape, a.device) != (b.shape, b.device):
        return False
    if label == "torch.compile":
        return a.dtype == b.dtype and a.impl.split(",")[0] == b.impl.split(",")[0]
    return a.impl == b.impl


def of_memory(rows: Sequence[Row]) -> list[str]:
    """A sentence on the configurations that ran out of memory."""
    lost = dict.fromkeys(f"{row.what} {row.shape} {row.impl}" for row in rows if row.status == OUT_OF_MEMORY)
    if not lost:
        return []
    shown = "; ".join(list(lost)[:4]) + (f"; and {len(lost) - 4} more" if len(lost) > 4 else "")
    return [f"{len(lost)} configurations ran out of memory: {shown}."]


def of_collectives(rows: Sequence[Row]) -> list[str]:
    """Sentences with the fitted latency and bandwidth of communication, which the planner uses."""
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
    """A warning if many times varied so much that other load on the machine must have affected them."""
    timed = [row for row in rows if row.ok and row.p50_ms > 0]
    loud = [row for row in timed if (row.p80_ms - row.p20_ms) / row.p50_ms > 0.5]
    if not timed or len(loud) < 0.2 * len(timed):
        return []
    return [
        f"Take the times with care: in {len(loud)} of {len(timed)} measurements the middle 60% spread by more than "
        "half of the median, so something else was using the machine. Measure again with --again when it is quiet."
    ]


def of_earlier(rows: Sequence[Row], kept: Sequence[Row]) -> list[str]:
    """Sentences on rows that are left out because an older PyTorch measured them."""
    numbers = Counter((row.what, row.torch) for row in record.newest(rows))
    numbers -= Counter((row.what, row.torch) for row in kept)
    return [
        f"Left out: {number} rows ({what}) of torch {torch}. The same shapes were measured later with another "
        "version, and findings compare rows of one version only."
        for (what, torch), number in numbers.items()
    ]


def find(rows: Sequence[Row], kept: Sequence[Row] | None = None) -> list[str]:
    """All findings, the most important first. `kept` is current(rows), if the caller already has it."""
    kept = current(rows) if kept is None else kept
    parts = (of_noise, of_context, of_attention, of_sparse, of_trainer, of_model, of_collectives, of_memory)
    found = [text for part in parts for text in part(kept)] + of_earlier(rows, kept)
    failed = [row for row in kept if row.status.startswith("failed")]
    if failed:
        found.append(f"{len(failed)} measurements failed, the first ({failed[0].impl}): {failed[0].status[8:]}.")
    return found or ["No findings: none of the rows is from a benchmark that has findings."]
