"""The sections of a report: plots and tables of each benchmark's rows, and the commands that made the rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from flashspan import masks
from flashspan.bench.measure.record import Row
from flashspan.bench.report import notes, plots, random_page
from flashspan.bench.report.commands import (
    attention_command,
    collectives_commands,
    command,
    context_command,
    device_of,
    every,
    model_commands,
    only,
)
from flashspan.bench.report.section import Section, make_picture
from flashspan.bench.report.sparse_section import of_sparse
from flashspan.bench.report.tables import Table, make, model_size, pivot, show
from flashspan.bench.report.workloads import PARTS, Workload, by_place, setting_of, split, workloads
from flashspan.bench.suites import context, model
from flashspan.bench.suites.context_rank import ALONE
from flashspan.bench.suites.data import WIRE, bench_data
from flashspan.bench.suites.data_strategies import STRATEGIES
from flashspan.bench.suites.study import bench_study
from flashspan.context.draw import draw_ownership, draw_timeline
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import LAYOUTS, place
from flashspan.context.visibility import Visibility

MOST_DRAWN = 32
"""The maximum number of ranks whose schedule is readable in a picture."""


def of_environment(rows: Sequence[Row]) -> Section:
    """The section on where the rows were measured."""
    places = dict.fromkeys((row.device, row.torch, row.triton, row.commit) for row in rows)
    counts = [sum((r.device, r.torch, r.triton, r.commit) == place for r in rows) for place in places]
    cells = tuple((*place, str(count)) for place, count in zip(places, counts, strict=True))
    table = Table("where and with what", ("device", "torch", "triton", "commit", "rows"), cells, 4)
    return Section("Environment", tables=[table])


def of_context(rows: Sequence[Row]) -> Section | None:
    """The section that compares one device with every strategy."""
    mine = [row for row in rows if row.what == "context"]
    if not mine:
        return None
    section = Section("Across devices", note=notes.CONTEXT)
    times = {(setting_of(row), row.shape, row.impl, row.ranks, row.kind): row.p50_ms for row in mine if row.ok}
    sweeps = workloads(mine)
    for work in sweeps:
        setting, shape = setting_of(work.whole[0]), work.whole[0].shape
        command_line = context_command([row for row in mine if (setting_of(row), row.shape) == (setting, shape)])
        section.commands.append(command_line)
        of_what = f" {work.name}." if len(sweeps) > 1 else ""
        last = [row for row in work.whole if row.ranks in (1, work.most)]
        names = {f"{row.impl}{f' on {work.most}' if row.impl != ALONE else ''}": row for row in last}
        latency = {
            name: {
                kind: times.get((setting_of(row), row.shape, row.impl, row.ranks, kind), 0.0) for kind in context.KINDS
            }
            for name, row in names.items()
        }
        speed = {name: {"tokens/s": row.more["tokens_per_second"]} for name, row in names.items()}
        held = {name: {"MiB": row.peak_mib} for name, row in names.items()}
        parts = {
            name: {PARTS[part]: time for part, time in vars(shares).items()}
            for name, row in names.items()
            if (shares := split(row))
        }
        drawn = [
            (plots.bars(latency, title="latency", x="milliseconds"), "Median time of a pass."),
            (plots.bars(speed, title="throughput", x="tokens per second"), "Forward and backward."),
            (plots.bars(held, title="peak memory of a rank", x="MiB"), "Forward and backward."),
        ]
        if parts:
            words = f"The parts of forward and backward: {', '.join(PARTS.values())}."
            drawn.append((plots.bars(parts, title="where the time goes", x="milliseconds", stacked=True), words))
        if work.alone is not None and work.most > 1:
            words = "FLOP/s of all ranks together, relative to one device. Weak: the same number of tokens per rank."
            drawn.append((_scaling(work, work.alone), words))
        section.figures += [make_picture(figure, f"{caption}{of_what}", command_line) for figure, caption in drawn]
    settings = list(dict.fromkeys(setting_of(row) for row in mine))
    for setting in settings:
        chosen = [row for row in mine if setting_of(row) == setting]
        name = ", ".join([setting.model, *setting.differs(settings)])
        section.tables.append(context.table(chosen, f": {name}" if len(settings) > 1 else ""))
    if not sweeps:  # no measurement is complete: the first row of a sweep has its whole sequence
        section.commands.append(context_command([row for row in mine if row.shape == mine[0].shape]))
    return section


def _scaling(work: Workload, alone: Row) -> Any:
    """A plot of the speed, relative to one device, over the number of ranks."""
    series: dict[str, list[tuple[float, float]]] = {}
    for impl in dict.fromkeys(row.impl for row in work.whole if row.impl != ALONE):
        points = [(row.ranks, row.tflops / alone.tflops) for row in work.whole if row.impl == impl]
        series[impl] = [(1.0, 1.0), *points]
    if 1 in work.grown:
        small = work.grown[1].tflops
        series["weak: ring zigzag"] = [(ranks, row.tflops / small) for ranks, row in sorted(work.grown.items())]
    ideal = [(1, 1), (work.most, work.most)]
    return plots.lines(series, title="scaling", x="ranks", y="speed relative to one device", ideal=ideal)


def of_model(rows: Sequence[Row]) -> Section | None:
    """The section on training steps of models."""
    mine = [row for row in rows if row.what in ("model", "warm-up")]
    if not mine:
        return None
    section = Section("Models", note=notes.MODEL)
    for where, measured in by_place(mine).items():
        here = sorted(measured, key=_model_order)
        commands = model_commands(here)
        section.commands += commands
        step: dict[str, dict[str, float]] = {f"{row.shape} {row.dtype} {row.impl}": {} for row in here if row.ok}
        for row in here:
            if row.ok and row.kind in ("forward", "backward", "optimizer"):
                step[f"{row.shape} {row.dtype} {row.impl}"][row.kind] = row.p50_ms
        if step and len(step) <= 24:
            figure = plots.bars(step, title="a training step", x="milliseconds", stacked=True)
            words = f"Median time of forward, backward and optimizer{where}."
            section.figures.append(make_picture(figure, words, *commands))
        section.tables.append(model_table(here, where))
    return section


def _model_order(row: Row) -> tuple[object, ...]:
    """A sort key: model, tokens, dtype, implementation, benchmark, warm-up steps, place of the pass in a step."""
    passes = {kind: place for place, kind in enumerate(model.KINDS)}
    impl = ", ".join(row.impl.split(", ")[:2])
    return (
        *model_size(row), row.shape, row.dtype, impl, row.what, row.more.get("warmup") or 0,
        passes.get(row.kind, len(passes)),
    )  # fmt: skip


def model_table(rows: Sequence[Row], where: str) -> Table:
    """A table with a line per configuration: mean and deviation of every pass, and the memory of a training step."""
    timed = [row for row in rows if not row.ok or row.mean_ms + row.std_ms > 0]  # False for nan
    table = model.table(timed)
    steps = [row for row in rows if row.ok and row.kind == "training"]
    peaks = {f"{row.shape} {row.impl} {row.dtype}": row.peak_mib for row in steps}
    cells = tuple((*line, show(peaks.get(" ".join(line[: table.num_names])))) for line in table.cells)
    title = f"mean ± standard deviation, milliseconds, and the peak of training{where}"
    return Table(title, (*table.headings, "peak MiB"), cells, table.num_names)


def of_attention(rows: Sequence[Row]) -> Section | None:
    """The section on kernels on one device."""
    mine = [row for row in rows if row.what == "attention"]
    if not mine:
        return None
    section = Section("Attention on one device", note=notes.SHAPE)
    for where, here in by_place(mine).items():
        section.commands.append(attention_command(here))
        table = pivot(
            f"median milliseconds, both passes{where}",
            [row for row in here if row.kind == "both"],
            line=lambda row: (row.shape,),
            names=("shape",),
            column=lambda row: row.impl,
            cell=lambda row: row.p50_ms,
        )
        section.tables.append(table)
    return section


def of_leaderboard(rows: Sequence[Row]) -> Section | None:
    """The section on the course's leaderboard test."""
    return _listed(
        [row for row in rows if row.what == "leaderboard"], "Leaderboard", "flashspan bench leaderboard", notes.SHAPE
    )


def of_trainer(rows: Sequence[Row]) -> Section | None:
    """The section that compares our trainer and our decoding with another library's."""
    mine = [row for row in rows if row.what == "trainer"]
    return _listed(
        mine, "Training and generating compared with transformers", "flashspan bench training", notes.TRAINER
    )


def _listed(rows: Sequence[Row], title: str, command_line: str, note: str) -> Section | None:
    """A section that lists the rows, with a table for each device and PyTorch."""
    if not rows:
        return None
    columns: dict[str, Callable[[Row], object]] = {
        "shape": lambda row: row.shape,
        "implementation": lambda row: row.impl,
        "pass": lambda row: row.kind,
        "ms": lambda row: row.p50_ms,
        "TFLOP/s": lambda row: row.tflops,
        "error": lambda row: f"{row.error:.1e}" if row.error >= 0 else None,
        "peak MiB": lambda row: row.peak_mib,
    }
    tables = [make(f"median milliseconds{where}", here, columns, 3) for where, here in by_place(rows).items()]
    return Section(title, [command_line], tables=tables, note=f"{note} {notes.LISTED}")


def of_studies(rows: Sequence[Row]) -> Section | None:
    """The section on sweeps over length and head size."""
    mine = [row for row in rows if row.what.startswith("study")]
    if not mine:
        return None
    section = Section("Attention over lengths and head sizes")
    for where, here in by_place(mine).items():
        for what in dict.fromkeys(row.what for row in here):
            chosen = [row for row in here if row.what == what]
            section.tables.append(study_table(chosen, f"{what}{where}"))
            command_line = command(
                f"bench {what}",
                bench_study,
                lengths=every(row.more.get("tokens") for row in chosen),
                head_dims=every(row.more.get("head_dim") for row in chosen),
                repeats=only(row.more.get("repeats") for row in chosen),
                device=device_of(chosen),
            )
            section.commands.append(command_line)
            forward = [row for row in chosen if row.kind == "forward" and row.more.get("head_dim") == 64]
            series = plots.by(forward, lambda r: f"{r.impl} {r.dtype}", lambda r: r.more["tokens"], lambda r: r.p50_ms)
            if series:
                figure = plots.lines(
                    series, title=f"{what}: forward, head size 64", x="tokens", y="milliseconds", log_x=True, log_y=True
                )
                section.figures.append(make_picture(figure, f"Median time{where}.", command_line))
    return section


def study_table(rows: Sequence[Row], title: str) -> Table:
    """A table with a line per shape and dtype, and a column per implementation and pass."""
    return pivot(
        f"{title}: median milliseconds",
        rows,
        line=lambda row: (row.shape, row.dtype),
        names=("shape", "dtype"),
        column=lambda row: f"{row.impl} {row.kind}",
        cell=lambda row: row.p50_ms,
    )


def of_collectives(rows: Sequence[Row]) -> Section | None:
    """The section on communication."""
    mine = [row for row in rows if row.what == "collective"]
    if not mine:
        return None
    section = Section("Communication", note=notes.COLLECTIVES)
    columns: dict[str, Callable[[Row], object]] = {
        "primitive": lambda row: row.impl,
        "ranks": lambda row: row.ranks,
        "bytes": lambda row: f"{row.bytes:,.0f}" if row.bytes > 0 else "",
        "ms": lambda row: row.p50_ms if row.ok else row.status,
        "GB/s": lambda row: row.more.get("gb_per_s_measured"),
        "fit: µs": lambda row: row.more.get("alpha_us"),
        "fit: GB/s": lambda row: row.more.get("gb_per_s"),
    }
    for where, here in by_place(mine).items():
        commands = collectives_commands(here)
        section.commands += commands
        series = plots.by(here, lambda r: f"{r.impl}, {r.ranks} ranks", lambda r: r.bytes, lambda r: r.p50_ms)
        if series:
            figure = plots.lines(series, title="collectives", x="bytes", y="milliseconds", log_x=True, log_y=True)
            section.figures.append(make_picture(figure, f"Median time{where}.", *commands))
        section.tables.append(make(f"collectives{where}", here, columns))
    return section


def of_data(rows: Sequence[Row]) -> Section | None:
    """The section on data, optimizer and tensor parallelism."""
    mine = [row for row in rows if row.what == "data"]
    if not mine:
        return None
    names = ("hidden", "parameters_mib", "gradients_mib", "optimizer_mib", "activations_mib")
    columns: dict[str, Callable[[Row], object]] = {
        "strategy": lambda row: row.impl,
        "layers x width, sequences": lambda row: row.shape,
        "ranks": lambda row: row.ranks,
        "ms": lambda row: row.p50_ms if row.ok else row.status,
        "communication ms": lambda row: row.more.get("communication_ms"),
    }
    for name in names:
        columns[name.replace("_", " ")] = lambda row, name=name: row.more.get(name)  # type: ignore[misc]
    section = Section("Data, optimizer and tensor parallelism", note=WIRE)
    for where, here in by_place(mine).items():
        command_line = command(
            "bench data",
            bench_data,
            ranks=every(row.ranks for row in here),
            **(_data_sizes(only(row.shape for row in here)) or {}),
            only=tuple(name for name in STRATEGIES if any(row.impl == name for row in here)) or None,
        )
        section.commands.append(command_line)
        section.tables.append(make(f"a step{where}", here, columns))
    return section


def _data_sizes(shape: str | None) -> dict[str, int] | None:
    """The options of `bench data` in the shape of a row; None if the shape has another form."""
    form = r"(\d+)x(\d+)(?:, (\d+)/(\d+) heads, window (\d+),)? (\d+)x(\d+) per rank"
    read = re.fullmatch(form, shape or "")
    names = ("layers", "width", "heads", "kv_heads", "window", "batch", "tokens")
    return read and {name: int(value) for name, value in zip(names, read.groups(), strict=True) if value is not None}


def of_schedules(rows: Sequence[Row]) -> Section | None:
    """The section on the best schedule: a timeline, and the rank that computes each part of the mask."""
    known = {f"{strategy} {layout}": (strategy, layout) for strategy in GENERATORS for layout in LAYOUTS}
    ranked = [
        row
        for row in rows
        if row.what == "context" and row.kind == context.KINDS[1] and row.ok and row.impl in known
        if not row.impl.startswith("double_ring") and 2 <= row.ranks <= MOST_DRAWN
    ]
    if not ranked:
        return None
    most = max(row.ranks for row in ranked)
    best = min((row for row in ranked if row.ranks == most), key=lambda row: row.p50_ms / row.more["tokens"])
    strategy, layout = known[best.impl]
    tokens = min(512, best.more["tokens"])
    visibility = Visibility(place(layout, tokens, most), masks.causal())
    schedule = GENERATORS[strategy](visibility)
    command_line = f"flashspan plan draw --strategy {strategy} --layout {layout} --ranks {most} --tokens {tokens}"
    figures = [
        make_picture(draw_timeline(schedule), f"{best.impl}: computing, waiting and sending.", command_line),
        make_picture(
            draw_ownership(schedule, visibility),
            f"{best.impl}: the rank that computes each pair of the causal mask.",
            command_line,
        ),
    ]
    return Section("The schedule", [command_line], figures, note=notes.SCHEDULE)


SECTIONS: tuple[Callable[[Sequence[Row]], Section | None], ...] = (
    of_environment,
    of_context,
    of_schedules,
    of_attention,
    random_page.section,
    of_leaderboard,
    of_trainer,
    of_sparse,
    of_model,
    of_studies,
    of_collectives,
    of_data,
)
