"""`flashspan plan draw`: the timeline of a schedule and the ownership of the mask, as pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashspan.arguments import resolve_mask
from flashspan.context.draw import draw_ownership, draw_timeline
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.survey import Survey
from flashspan.context.verify import verify
from flashspan.folders import make_folder
from flashspan.plan.draw import written_to

MOST_RANKS = 256
"""Lanes of a picture: its boxes are as many as ranks times steps, and these take half a minute."""


def draw(
    ranks: int,
    strategy: str,
    layout: str,
    *,
    sizes: Sequence[int] | None = None,
    tokens: int = 2048,
    causal: bool = True,
    window: int | None = None,
    folder: str = ".",
) -> int:
    """Write both pictures, and say how balanced the schedule is; it is verified on the way."""
    if ranks < 1 or tokens < 1:
        raise ValueError(f"a schedule needs at least 1 rank and 1 token: got {ranks} ranks and {tokens} tokens")
    if ranks > MOST_RANKS:
        raise ValueError(f"a picture shows at most {MOST_RANKS} ranks: got {ranks}; draw fewer")
    if strategy == "double_ring" and sizes is None:
        raise ValueError("double_ring needs --sizes NODES RANKS_PER_NODE")
    rows = torch.empty(1, 1, tokens, 1, device="meta")
    survey = Survey(place(layout, tokens, ranks), resolve_mask(rows, rows, causal=causal, window=window))
    options = {"sizes": tuple(sizes)} if strategy == "double_ring" and sizes else {}
    schedule = GENERATORS[strategy](survey, **options)
    verify(schedule, survey)
    out = make_folder(folder, "--folder")
    stem = f"{strategy}-{layout}-{ranks}"
    work = schedule.work()
    timeline, ownership = out / f"{stem}-timeline.svg", out / f"{stem}-mask.svg"
    with written_to(out, "--folder"):
        draw_timeline(schedule, timeline)
        draw_ownership(schedule, survey, ownership)
    print(f"{strategy} on {ranks} ranks, {layout}: {schedule.num_steps} steps, {len(schedule.transfers)} transfers")
    print(f"busiest rank: {max(work) * ranks / max(1, sum(work)):.3f}x the mean")
    print(f"wrote {timeline} and {ownership}")
    return 0
