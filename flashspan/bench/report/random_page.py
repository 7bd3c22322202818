"""The page of attention on random shapes: the ratio of the time of PyTorch's fastest to the time of ours, by class.

flashspan bench attention --page
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row
from flashspan.bench.report import plots
from flashspan.bench.report.section import Section
from flashspan.bench.report.tables import Table
from flashspan.bench.suites.random_shapes import CLASS_NOTE

OURS = "flashspan"
KINDS = {"forward": "forward", "both": "forward and backward"}
BEHIND = 0.95
"""The ratio below which ours counts as slower."""
NUM_WORST = 10
MASKS_ONLY = "window, explicit masks only"
"""The class of a window that was not measured with FlexAttention, the only other that skips hidden keys."""
HOST_NOTE = (
    "The other ratios of this page are of GPU times: the host has queued a call before the GPU begins it. In a loop "
    "the host may not be ahead. A call then takes the longer of its host time and its GPU time. The table has the "
    "medians of the host times. Its ratios compare the longer of host time and GPU time. It includes the shapes whose "
    "rows have a host time."
)
FASTEST_NOTE = "The number of shapes on which each was the fastest, windows included."
EDGES = tuple(2.0 ** (n / 8) for n in range(-8, 25))
"""Edges of the histogram's bins: 1/2 to 8; ratios beyond these are in the first and the last bin."""


@dataclass(frozen=True)
class Comparison:
    """One pass on one shape: ours and the fastest of the others."""

    ours: Row
    theirs: Row
    classes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Their time divided by ours: above 1, ours is faster."""
        return self.theirs.p50_ms / self.ours.p50_ms

    @property
    def spread(self) -> float:
        """The larger of the two distances from the 20th to the 80th percentile, relative to the median."""
        return max((row.p80_ms - row.p20_ms) / row.p50_ms for row in (self.ours, self.theirs))

    @property
    def with_host(self) -> float:
        """The ratio if each call takes as long as the slower of GPU and host."""
        theirs, ours = (max(row.p50_ms, 1e-3 * host_us(row)) for row in (self.theirs, self.ours))
        return theirs / ours

    @property
    def fair(self) -> bool:
        """Whether one of the others can skip the keys that the mask hides, if it hides any."""
        return MASKS_ONLY not in self.classes


def host_us(row: Row) -> float:
    """Microseconds until the host had queued the call; 0 in rows that were not measured with it."""
    return float(row.more.get("host_us", 0))


def latest(rows: Sequence[Row]) -> list[Row]:
    """The rows with the newest row's device and PyTorch; for each shape, only those of its newest commit."""
    place = (rows[-1].device, rows[-1].torch) if rows else ()
    here = [row for row in rows if (row.device, row.torch) == place]
    commits = {row.shape: row.commit for row in here}
    return record.newest(row for row in here if row.commit == commits[row.shape])


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """A comparison for every pass on every shape that ours and one of the others support."""
    by: dict[tuple[str, str], list[Row]] = {}
    for row in latest(rows):
        if row.ok:
            by.setdefault((row.shape, row.kind), []).append(row)
    found = []
    for measured in by.values():
        ours = [row for row in measured if row.impl == OURS]
        theirs = [row for row in measured if row.impl != OURS]
        if ours and theirs:
            classes = tuple(ours[0].more["classes"])
            if "window" in classes and not any(row.impl == "flex" for row in theirs):
                classes = tuple(MASKS_ONLY if name == "window" else name for name in classes)
            found.append(Comparison(ours[0], min(theirs, key=lambda row: row.p50_ms), classes))
    return found


def failures(rows: Sequence[Row]) -> list[Row]:
    """One row of each shape on which ours failed."""
    return list({row.shape: row for row in latest(rows) if row.impl == OURS and not row.ok}.values())


def unserved(rows: Sequence[Row]) -> list[str]:
    """The shapes that ours supports and no other does."""
    newest = latest(rows)
    others = {row.shape for row in newest if row.impl != OURS and row.ok}
    return list(dict.fromkeys(row.shape for row in newest if row.impl == OURS and row.ok and row.shape not in others))


def share_behind(ratios: Sequence[float]) -> float:
    return sum(ratio < BEHIND for ratio in ratios) / len(ratios)


def summary(rows: Sequence[Row]) -> str:
    """A line of text about one shape, which is printed after its measurement."""
    row = rows[0]
    line = f"{row.shape} [{', '.join(row.more['classes'])}]:"
    if bad := [row for row in rows if not row.ok]:
        return f"{line} {bad[0].impl} {bad[0].status}"
    if not (found := compare(rows)):
        return f"{line} {row.p50_ms:.3f} ms; no implementation of PyTorch was measured"
    return f"{line} " + "; ".join(
        f"{KINDS[each.ours.kind]} {each.ratio:.2f} ({each.ours.p50_ms:.3f} ms, {each.theirs.impl} "
        f"{each.theirs.p50_ms:.3f})"
        for each in found
    )


def class_table(rows: Sequence[Row]) -> Table:
    """A table with a line for all shapes, then a line per class, most frequent first; classes overlap."""
    found = compare(rows)
    counts = Counter(name for each in found if each.ours.kind == "forward" for name in each.classes)
    cells = []
    for name in ("all", *(name for name, _ in counts.most_common())):
        mine = [each for each in found if name in each.classes or (name == "all" and each.fair)]
        cells.append((name, *_numbers(mine, "forward"), *_numbers(mine, "both")))
    headings = ("class", *(f"{kind} {what}" for kind in KINDS for what in ("shapes", "median", "< 0.95", "lowest")))
    return Table("time of PyTorch's fastest / flashspan's, by class", headings, tuple(cells))


def _numbers(found: Sequence[Comparison], kind: str) -> tuple[str, ...]:
    ratios = [each.ratio for each in found if each.ours.kind == kind]
    if not ratios:
        return ("0", "-", "-", "-")
    return (str(len(ratios)), f"{median(ratios):.2f}", f"{share_behind(ratios):.0%}", f"{min(ratios):.2f}")


def worst_table(found: Sequence[Comparison], kind: str) -> Table:
    """A table of the lowest ratios of a pass."""
    headings = ("shape", "class", "backend", "fastest other", "flashspan ms", "other ms", "ratio", "spread")
    chosen = sorted((each for each in found if each.ours.kind == kind), key=lambda each: each.ratio)[:NUM_WORST]
    cells = tuple(
        (
            each.ours.shape,
            ", ".join(each.classes),
            str(each.ours.more.get("backend", "")),
            each.theirs.impl,
            f"{each.ours.p50_ms:.4g}",
            f"{each.theirs.p50_ms:.4g}",
            f"{each.ratio:.2f}",
            f"{each.spread:.0%}",
        )
        for each in chosen
    )
    return Table(f"lowest ratios, {KINDS[kind]}", headings, cells, 4)


def fastest_table(found: Sequence[Comparison]) -> Table:
    """A table of how often each implementation is the fastest of the others."""
    counts = Counter((each.theirs.impl, each.ours.kind) for each in found)
    names = sorted({name for name, _ in counts}, key=lambda name: (-sum(counts[name, kind] for kind in KINDS), name))
    cells = tuple((name, *(str(counts[name, kind]) for kind in KINDS)) for name in names)
    return Table("fastest of the others", ("implementation", *KINDS.values()), cells)


def host_table(found: Sequence[Comparison]) -> Table:
    """A table of the host's time of a call, and of the ratios if calls take as long as the slower of GPU and host."""
    cells = []
    for kind, name in KINDS.items():
        mine = [each for each in found if each.fair and each.ours.kind == kind and host_us(each.ours)]
        if not mine:
            continue
        ratios = [each.with_host for each in mine]
        hosts = (median(map(host_us, rows)) for rows in zip(*((each.ours, each.theirs) for each in mine), strict=True))
        longer = sum(1e3 * each.ours.p50_ms < host_us(each.ours) for each in mine) / len(mine)
        shares = (f"{longer:.0%}", f"{median(ratios):.2f}", f"{share_behind(ratios):.0%}", f"{min(ratios):.2f}")
        cells.append((name, str(len(mine)), *(f"{host:.0f}" for host in hosts), *shares))
    headings = (
        "pass",
        "shapes",
        "flashspan us",
        "other us",
        "flashspan's host slower than GPU",
        "median",
        "< 0.95",
        "lowest",
    )
    return Table("the host's time, and ratios with it", headings, tuple(cells))


def headline(found: Sequence[Comparison], kind: str) -> str:
    fair = [each for each in found if each.fair and each.ours.kind == kind]
    if not fair:
        return f"- {KINDS[kind]}: not measured."
    ratios = [each.ratio for each in fair]
    faster = sum(ratio > 1 for ratio in ratios) / len(ratios)
    return (
        f"- {KINDS[kind]}, {len(ratios)} shapes: the median ratio is {median(ratios):.2f}; flashspan is faster on "
        f"{faster:.0%}; the ratio is below {BEHIND} on {share_behind(ratios):.0%} and {min(ratios):.2f} at the lowest. "
        f"The median spread of a time (20th to 80th percentile) is {median(each.spread for each in fair):.1%}."
    )


def drawn(rows: Sequence[Row]) -> str:
    """Text on how many shapes of which seeds the rows have."""
    texts = []
    for seed in sorted({row.more["seed"] for row in rows}):
        mine = [row for row in rows if row.more["seed"] == seed]
        number, first = len({row.shape for row in mine}), max(row.more["number"] for row in mine) + 1
        texts.append(f"{number} {f'of the first {first} ' if first > number else ''}shapes of seed {seed}")
    return ", ".join(texts)


def markdown(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    newest, found = latest(rows), compare(rows)
    last = newest[-1]
    without = "" if any(row.impl == "flex" for row in newest) else ", without FlexAttention"
    commits = ", ".join(sorted({row.commit for row in newest}))
    left_out = sum(not each.fair and each.ours.kind == "forward" for each in found)
    failed, alone = failures(rows), unserved(rows)
    lines = [
        "# Attention on random shapes, measured",
        "",
        f"{last.device}, torch {last.torch}, Triton {last.triton}, bf16, commit {commits}; {drawn(newest)}{without}. "
        f"`flashspan bench attention --random N --seed S` measured the rows; `flashspan bench attention "
        "--page` wrote this page. [How shapes are drawn and what they are compared with]"
        "(../measuring.md#random-shapes).",
        "",
        "The ratio is the time of PyTorch's fastest implementation divided by flashspan's: above 1, flashspan is "
        "faster. Shapes are batch x heads/key heads x queries x keys x head size; causal aligns the last query with "
        "the last key.",
        "",
        *(headline(found, kind) for kind in KINDS),
        f"- flashspan failed on {len(failed)} shapes; on {len(alone)}, no implementation of PyTorch was measured.",
        f"- {left_out} shapes with a window were not measured with FlexAttention, the only other implementation that "
        f"skips hidden keys. They are the class '{MASKS_ONLY}', and the numbers above do not include them.",
        "",
        "![Histogram of the ratios](random.svg)",
        "",
    ]
    lines += [f"- failed: {row.shape}: {row.status.removeprefix('failed: ')}" for row in failed]
    lines += [f"- no implementation of PyTorch was measured: {shape}" for shape in alone]
    lines += [""] if failed or alone else []
    fair = [each for each in found if each.fair]
    worst = (worst_table(fair, kind) for kind in KINDS)
    tables = [(class_table(rows), CLASS_NOTE), (host_table(found), HOST_NOTE), *((table, "") for table in worst)]
    for table, note in [*tables, (fastest_table(found), FASTEST_NOTE)]:
        lines += [f"## {table.title[:1].upper()}{table.title[1:]}", "", *([note, ""] if note else []), table.markdown()]
    return "\n".join(lines)


def chart(rows: Sequence[Row]) -> str:
    """The histogram of the ratios, as SVG."""
    fair = [each for each in compare(rows) if each.fair]
    series = {name: [each.ratio for each in fair if each.ours.kind == kind] for kind, name in KINDS.items()}
    label = "attention on random shapes"
    inside = {name: [_inside(ratio) for ratio in ratios] for name, ratios in series.items() if ratios}
    x = "time of PyTorch's fastest / flashspan's\n(the outermost bars include all ratios beyond them)"
    figure = plots.histogram(inside, EDGES, title=f"{label}\nbf16, {rows[-1].device}", x=x, y="shapes")
    return plots.to_svg(figure, label)


def _inside(ratio: float) -> float:
    """The ratio, or the nearest that the histogram shows."""
    return min(max(ratio, EDGES[0]), math.nextafter(EDGES[-1], 0))


def section(rows: Sequence[Row]) -> Section | None:
    """The section of a report: the classes, and the commands that measured them."""
    mine = [row for row in rows if row.what == "random"]
    if not mine:
        return None
    most: dict[int, int] = {}
    for row in latest(mine):
        most[row.more["seed"]] = max(most.get(row.more["seed"], 0), row.more["number"] + 1)
    commands = [f"flashspan bench attention --random {number} --seed {seed}" for seed, number in most.items()]
    return Section("Random shapes", commands=commands, tables=[class_table(mine)])
