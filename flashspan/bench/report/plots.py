"""Plots from rows, as SVG text for a page: without scripts, external fonts or a fixed size."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashspan.bench.measure.record import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac", "#eeca3b")


def to_svg(figure: Figure, label: str) -> str:
    """A figure as an <svg> element that takes the width it is given."""
    import html

    import matplotlib

    buffer = io.StringIO()
    # The salt differs between pictures, so that clip paths of two pictures on a page have different ids.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    rest = rest.replace("#000000", "currentColor")  # text and axes in the colour of the page, light or dark
    return f'{head} fill="currentColor" role="img" aria-label="{html.escape(label, quote=True)}">{rest}'


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    ideal: Sequence[tuple[float, float]] | None = None,
) -> Figure:
    """A plot with a line for each name; its points are marked."""
    figure, axes = _axes(title, x, y)
    for number, (name, points) in enumerate(series.items()):
        points = sorted(points)
        colour = COLOURS[number % len(COLOURS)]
        style = ("o-", "s--", "^:")[number // len(COLOURS) % 3]
        axes.plot(*zip(*points, strict=True), style, color=colour, label=_literal(name), markersize=4, linewidth=1.4)
    if ideal:
        axes.plot(*zip(*ideal, strict=True), color="#999999", linestyle="--", linewidth=1, label="ideal")
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({px for points in series.values() for px, _ in points})
        if len(ticks) <= 10:
            axes.set_xticks(ticks, [f"{tick:,.10g}" for tick in ticks], rotation=30 if max(ticks) > 9999 else 0)
            axes.minorticks_off()
    elif all(px == int(px) for points in series.values() for px, _ in points):
        axes.locator_params(axis="x", integer=True)  # no tick at 1.2 ranks
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if len(series) + bool(ideal) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def bars(groups: Mapping[str, Mapping[str, float]], *, title: str, x: str, stacked: bool = False) -> Figure:
    """A plot of horizontal bars: one position for each group, one colour for each name."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    figure, axes = _axes(title, x, "", height=1.4 + 0.28 * len(groups) * (1 if stacked else max(1, len(names) * 0.6)))
    places = range(len(groups))
    left = [0.0] * len(groups)
    width = 0.8 if stacked else 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        values = [groups[group].get(name, 0.0) for group in groups]
        shift = 0.0 if stacked else (number - (len(names) - 1) / 2) * width
        offsets = left if stacked else 0.0
        colour = COLOURS[number % len(COLOURS)]
        axes.barh([p + shift for p in places], values, width, left=offsets, color=colour, label=_literal(name))
        if stacked:
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(list(places), [_literal(group) for group in groups])
    axes.invert_yaxis()
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def histogram(series: Mapping[str, Sequence[float]], edges: Sequence[float], *, title: str, x: str, y: str) -> Figure:
    """A histogram: the number of values of each name in each bin, over a logarithmic axis; a line marks 1."""
    figure, axes = _axes(title, x, y)
    names = [_literal(name) for name in series]
    if series:
        axes.hist(list(series.values()), bins=list(edges), color=COLOURS[: len(series)], label=names)
    axes.axvline(1, color="#999999", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = [2.0**n for n in range(math.ceil(math.log2(edges[0])), math.floor(math.log2(edges[-1])) + 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.locator_params(axis="y", integer=True)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def by(rows: Iterable[Row], name: Any, x: Any, y: Any) -> dict[str, list[tuple[float, float]]]:
    """Rows as series of points. The functions return a row's series, x and y; x and y must be positive, or the row is
    left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.ok and x(row) > 0 and y(row) > 0:  # False for nan
            series.setdefault(str(name(row)), []).append((float(x(row)), float(y(row))))
    return series


def _literal(text: str) -> str:
    """A name that matplotlib shows unchanged. It would take text between dollars as mathematics, and leave names that
    begin with an underscore out of legends."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def _axes(title: str, x: str, y: str, height: float = 3.4) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
