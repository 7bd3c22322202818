"""Pictures of a schedule: a timeline of tiles and transfers, and the mask coloured by the rank that computes it.

    draw_timeline(schedule, "ring.svg")
    draw_ownership(schedule, visibility, "ring-tiles.svg")

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashspan.context.schedule import Schedule
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import dense

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "kv": "#4c78a8",
    "q": "#b279a2",
    "rows": "#b279a2",
    "carry": "#f58518",
    "dq": "#f58518",
    "dkv": "#e45756",
}
SENT = {
    "kv": "keys and values",
    "q": "queries",
    "rows": "queries, dout, lse and delta",
    "carry": "a partial result (carry)",
    "dq": "gradients of queries",
    "dkv": "gradients of keys and values",
}
"""What a transfer of each kind sends, for the legend."""
WORK, IDLE, INK = "#54a24b", "#8888884d", "#111111"
WIDTH, HEIGHT = 0.7, 0.56
"""The width of a full box, relative to its column, and the height of all boxes, relative to their lanes."""
LABELLED = 16


def draw_timeline(schedule: Schedule, path: str | Path | None = None) -> Figure:
    """One lane per rank, one column per step; a box is a tile (queries·keys; darker: more pairs), an arrow a transfer.

    The width of a box is its work relative to the busiest rank of the step; the grey rest of the column is waiting
    time. An arrow begins where its transfer is posted and ends where it is needed. Arrows are drawn behind the boxes,
    so labels stay readable, and the part of an arrow behind a box overlaps with computation. With more than `LABELLED`
    ranks, lanes are narrow, boxes have no labels, and the picture is rasterized.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    num_ranks, num_steps = schedule.num_ranks, schedule.num_steps
    labelled = num_ranks <= LABELLED
    wide, high = (1.1, 0.55) if labelled else (0.25, 0.2)
    figure = Figure(figsize=(max(5.4, 1.0 + wide * num_steps), 2.0 + high * num_ranks), layout="constrained")
    axes = figure.subplots()
    boxes, waits = [], []
    work = np.zeros((num_ranks, num_steps))
    for tile in schedule.tiles:
        work[tile.rank, tile.step] += tile.pairs
    busiest = np.maximum(work.max(0), 1)
    for rank in range(num_ranks):
        for step in range(num_steps):
            waits.append(Rectangle((step, rank - HEIGHT / 2), WIDTH, HEIGHT, facecolor=IDLE, edgecolor="none"))
            left = float(step)
            for tile in schedule.program(rank)[step].tiles:
                width = WIDTH * tile.pairs / float(busiest[step])
                share = 0.45 + 0.55 * tile.pairs / float(busiest.max())
                shade = [1 - share * (1 - part) for part in to_rgb(WORK)]  # opaque, to cover the arrows behind it
                boxes.append(
                    Rectangle((left, rank - HEIGHT / 2), width, HEIGHT, facecolor=shade, edgecolor="white", lw=0.6)
                )
                if labelled:
                    text = f"{tile.q}·{tile.k}"
                    axes.text(left + width / 2, rank, text, ha="center", va="center", fontsize=7, color=INK)
                left += width
    for patches, order in ((waits, 0), (boxes, 2)):  # arrows have order 1, between them
        if patches:
            axes.add_collection(PatchCollection(patches, match_original=True, zorder=order, rasterized=not labelled))
    kinds = dict.fromkeys(transfer.kind for transfer in schedule.transfers)
    for kind in kinds:  # one call per kind: drawn one by one, the arrows of 64 ranks take a minute
        found = [(x.start, x.src, x.end, x.dst) for x in schedule.transfers if x.kind == kind]
        x, y, x1, y1 = np.array(found, dtype=float).T
        how = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.011, "units": "inches", "headwidth": 7}
        axes.quiver(x, y, x1 - x, y1 - y, color=COLOURS[kind], alpha=0.85, zorder=1, rasterized=not labelled, **how)
    last = num_ranks - 1
    ranks = f"; {last}·0: queries of rank {last}, keys of rank 0" if labelled else ""
    legend: list[Any] = [
        Patch(color=WORK, label=f"computing (darker: more pairs{ranks})"),
        Patch(color=IDLE, label="waiting"),
    ]
    legend += [Line2D([], [], color=COLOURS[kind], label=f"sending {SENT[kind]}") for kind in kinds]
    figure.legend(handles=legend, loc="outside lower left", ncols=1, frameon=False, fontsize=8)
    axes.set(
        xlim=(-0.1, max(1, num_steps) - 0.2),
        ylim=(num_ranks - 0.5, -0.5),
        xlabel="step",
        ylabel="rank",
        yticks=range(0, num_ranks, 1 if labelled else 8),
        xticks=[step + WIDTH / 2 for step in range(0, num_steps, 1 if labelled else 8)],
        xticklabels=range(0, num_steps, 1 if labelled else 8),
        title=f"{schedule.name}, {'backward' if schedule.is_backward else 'forward'}",
    )
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    return _save(figure, path)


def draw_ownership(schedule: Schedule, visibility: Visibility, path: str | Path | None = None) -> Figure:
    """The mask, query position by key position; the colour of a visible pair is the rank that computes it."""
    import matplotlib
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    placement, num = visibility.placement, visibility.placement.num_tokens
    if num > 4096:
        raise ValueError(f"a picture of the mask has num_tokens squared points: got {num} tokens; draw 4096 or fewer")
    visible = dense(visibility.mask, num, num).reshape(-1, num, num).any(0).cpu().numpy()
    owner = np.full((num, num), -1)
    for tile in schedule.tiles:
        rows = placement.index(tile.q)[tile.q_rows.start : tile.q_rows.stop]
        columns = placement.index(tile.k)[tile.k_rows.start : tile.k_rows.stop]
        owner[np.ix_(rows, columns)] = tile.rank
    owner[~visible] = -1
    base = matplotlib.colormaps["tab20" if schedule.num_ranks > 10 else "tab10"]
    colours = [base(rank % base.N) for rank in range(schedule.num_ranks)]
    figure = Figure(figsize=(6.2, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(
        np.ma.masked_less(owner, 0),
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=schedule.num_ranks - 0.5,
        interpolation="nearest",
    )
    axes.set(xlabel="key position", ylabel="query position", title=f"{schedule.name}: the rank that computes each pair")
    patches = [Patch(color=colours[rank], label=f"rank {rank}") for rank in range(min(schedule.num_ranks, 20))]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _save(figure, path)


def _save(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path)
    return figure
