"""The section of a report on block-sparse attention."""

from __future__ import annotations

from collections.abc import Sequence

from flashspan.bench.measure.record import Row
from flashspan.bench.report import notes, plots
from flashspan.bench.report.commands import sparse_commands
from flashspan.bench.report.findings import SPARSE_OURS, against_flex
from flashspan.bench.report.section import Picture, Section, make_picture
from flashspan.bench.report.tables import Table, show
from flashspan.bench.report.workloads import by_place
from flashspan.bench.suites.sparse import PASSES, by_share, efficiency, pair


def of_sparse(rows: Sequence[Row]) -> Section | None:
    """The section on kernels with sparse masks."""
    mine = [row for row in rows if row.what == "sparse"]
    if not mine:
        return None
    section = Section("Block-sparse attention", note=notes.SPARSE)
    for where, here in by_place(mine).items():
        section.commands += sparse_commands(here)
        section.figures += _time_over_share(here, where)
        section.tables.append(sparse_table(here, where))
        section.tables += efficiency(here, where)
    return section


def sparse_table(rows: Sequence[Row], where: str) -> Table:
    """A table with a line per mask: ours, FlexAttention, and its time divided by our shorter time."""
    times = {(row.shape, row.impl, row.kind): row.p50_ms for row in rows if row.ok}
    ratios = {(shape, kind): ratio for (_, shape, kind), ratio in against_flex(rows).items()}
    impls = [impl for impl in (*SPARSE_OURS, "flex") if any(row.impl == impl for row in rows)]
    cells = []
    for shape in dict.fromkeys(row.shape for row in rows):
        both = [[times.get((shape, impl, kind)) for kind in PASSES] for impl in impls]
        gains = [f"{ratios[shape, kind]:.2f}x" if (shape, kind) in ratios else "" for kind in PASSES]
        cells.append((shape, *(pair(*map(show, one)) for one in both), pair(*gains)))
    flex = "vs flex: FlexAttention's time divided by flashspan's shorter time"
    title = f"median milliseconds, forward / backward{where}; {flex}"
    return Table(title, ("shape", *impls, "vs flex"), tuple(cells))


def _time_over_share(rows: Sequence[Row], where: str) -> list[Picture]:
    """A plot of the sweep, with the lengths that have the dense kernel and two or more other shares."""
    lengths: dict[int, dict[float, Row]] = {}
    for (tokens, share, kind), row in sorted(by_share([row for row in rows if row.ok]).items()):
        if kind == "forward" and row.p50_ms > 0:
            lengths.setdefault(tokens, {})[share] = row
    lengths = {tokens: found for tokens, found in lengths.items() if 1.0 in found and len(found) > 2}
    if not lengths:
        return []
    longest = max(lengths)
    dense = lengths[longest][1.0].p50_ms
    figure = plots.lines(
        {f"{tokens:,} tokens": [(s, row.p50_ms) for s, row in found.items()] for tokens, found in lengths.items()},
        title="time of forward over the share of visited blocks", x="share of visited blocks", y="milliseconds",
        log_x=True, log_y=True, ideal=[(share, share * dense) for share in lengths[longest]],
    )  # fmt: skip
    words = f"Median time{where}. Ideal: the time of the dense kernel at {longest:,} tokens, times the share."
    drawn = [row for found in lengths.values() for row in found.values()]
    return [make_picture(figure, words, *sparse_commands(drawn))]
