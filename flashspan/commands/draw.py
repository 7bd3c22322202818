"""`flashspan plan draw`: the timeline of a schedule and the ownership of the mask, as pictures."""

from __future__ import annotations

from typing import Literal

import torch

from flashspan.arguments import resolve_mask
from flashspan.bench.measure.strategies import Layout
from flashspan.context.draw import draw_ownership, draw_timeline
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.schedule import reverse
from flashspan.context.verify import verify
from flashspan.context.visibility import Visibility
from flashspan.files import make_folder
from flashspan.plan.draw import written_to
from flashspan.stdout import counted

MOST_RANKS = 256
"""The most lanes of a picture. It has a box for each rank and step, and drawing 256 lanes takes half a minute."""


def draw(
    *,
    ranks: int = 8,
    strategy: Literal["ring", "double_ring", "gather", "helper"] = "ring",
    layout: Layout = "zigzag",
    sizes: tuple[int, int] | None = None,
    tokens: int = 2048,
    causal: bool = True,
    window: int | None = None,
    folder: str = ".",
) -> int:
    """Draw a schedule before it runs, as two pictures.

    Writes two SVG files: a timeline (computation, transfers and waiting of every rank), and the mask with the rank that
    computes each part of it.

    Example: flashspan plan draw --ranks 8 --strategy helper --layout contiguous

    Args:
        ranks: Number of ranks that share the sequence.
        strategy: Strategy of context parallelism.
        layout: Assignment of tokens to ranks.
        sizes: Number of nodes and of ranks per node, for double_ring.
        tokens: Number of tokens in the whole sequence, at most 4096 for the picture of the mask.
        causal: Causal mask.
        window: Number of tokens that a query sees, its own included.
        folder: Folder for the pictures.
    """
    if ranks < 1 or tokens < 1:
        raise ValueError(f"a schedule needs at least 1 rank and 1 token: got {ranks} ranks and {tokens} tokens")
    if ranks > MOST_RANKS:
        raise ValueError(f"a picture shows at most {MOST_RANKS} ranks: got {ranks}; draw fewer")
    if (strategy == "double_ring") != (sizes is not None):
        raise ValueError(
            f"double_ring needs --sizes NODES RANKS_PER_NODE: got none; for {ranks} ranks, for example --sizes 2 "
            f"{max(1, ranks // 2)}"
            if sizes is None
            else f"--sizes belongs to the strategy double_ring: got {strategy}; leave --sizes out"
        )
    rows = torch.empty(1, 1, tokens, 1, device="meta")
    visibility = Visibility(place(layout, tokens, ranks), resolve_mask(rows, rows, causal=causal, window=window))
    options = {"sizes": sizes} if sizes else {}
    schedule = GENERATORS[strategy](visibility, **options)
    verify(schedule, visibility)
    verify(reverse(schedule), visibility)
    out = make_folder(folder, "--folder")
    stem = f"{strategy}-{layout}-{ranks}"
    timeline, ownership = out / f"{stem}-timeline.svg", out / f"{stem}-mask.svg"
    with written_to(out, "--folder"):
        draw_ownership(schedule, visibility, ownership)  # first: it refuses long sequences
        draw_timeline(schedule, timeline)
    print(
        f"{strategy} on {counted(ranks, 'rank')}, {layout}: {counted(schedule.num_steps, 'step')}, "
        f"{counted(len(schedule.transfers), 'transfer')}"
    )
    print(f"busiest rank: {schedule.balance:.3f}x the mean")
    print(f"wrote {timeline} and {ownership}")
    return 0
