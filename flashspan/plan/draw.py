"""Pictures of a plan: the simulated timeline of its attention, and its scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .devices import Cluster
from .memory import ParallelConfig, Run
from .search import Answer, grown
from .step import attention_time

MOST_LANES = 16


@contextmanager
def written_to(folder: Path, option: str) -> Iterator[None]:
    """A context in which pictures are written: an OSError becomes a ValueError that names the option to change."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"pictures cannot be written to {folder}: {why}; choose another with {option}") from error


def draw_simulation(run: Run, parallel: ParallelConfig, cluster: Cluster, path: Path) -> None:
    """Draw one layer's attention, forward then backward: a lane for each of the first 16 ranks, with a box for each
    step in which the rank computes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    forward, backward = attention_time(run, parallel, cluster)
    lanes = min(parallel.context, MOST_LANES)
    figure = Figure(figsize=(9, 1.2 + 0.3 * lanes), layout="constrained")
    axes = figure.subplots()
    colours = {"forward": "#54a24b", "backward": "#4c78a8"}
    for simulation, offset, colour in zip((forward, backward), (0.0, forward.seconds), colours.values(), strict=True):
        for rank, _, begin, end in simulation.spans:
            if rank < lanes:
                axes.barh(rank, 1e3 * (end - begin), 0.7, left=1e3 * (begin + offset), color=colour, edgecolor="white",
                          linewidth=0.4)  # fmt: skip
    waits = Patch(facecolor="none", edgecolor="#999999", label="waiting (empty)")
    patches = [*(Patch(color=colour, label=f"computing {name}") for name, colour in colours.items()), waits]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    axes.axvline(1e3 * forward.seconds, color="#999999", linewidth=0.8, linestyle="--")
    waiting = max(forward.waiting) + max(backward.waiting)
    total = forward.seconds + backward.seconds
    axes.set(
        xlabel="milliseconds",
        ylabel="rank",
        yticks=range(lanes),
        title=f"attention of one layer, {parallel.strategy} {parallel.layout} on {parallel.context} ranks: the busiest "
        f"waits {waiting / total:.0%} of the time",
    )
    axes.title.set_fontsize(10)
    axes.invert_yaxis()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def draw_scaling(points: Sequence[tuple[int, Answer | None]], run: Run, cluster: Cluster, path: Path) -> None:
    """Draw tokens per second of all devices by number of devices, with the ideal line from the first point."""
    from matplotlib.figure import Figure

    found = [(num, answer) for num, answer in points if answer is not None]
    speeds = [(num, answer.tokens_per_second(grown(run, cluster, num))) for num, answer in found]
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    if speeds:
        first = speeds[0]
        axes.plot(*zip(*speeds, strict=True), "o-", color="#4c78a8", label="best parallelism config")
        ideal = [(num, first[1] * num / first[0]) for num, _ in speeds]
        axes.plot(*zip(*ideal, strict=True), "--", color="#999999", label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(frameon=False)
    axes.set(
        xlabel="devices",
        ylabel="tokens per second",
        title=f"{run.tokens:,} tokens per sample, batch in proportion to devices",
    )
    axes.title.set_fontsize(10)
    figure.savefig(path)
