"""Rules of a call across ranks that a call on one device does not have."""

from __future__ import annotations

from torch import Tensor

from flashspan.context.layout import Layout, Placement


def check_same_tokens(q: Tensor, k: Tensor) -> None:
    """ValueError if there are more queries than keys, or fewer."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"across ranks, queries and keys are the same tokens: got {q.shape[2]} and {k.shape[2]}; "
            f"for cross attention use flashspan.attention on one device"
        )


def check_shards(layout: Layout, placement: Placement, sizes: tuple[int, ...]) -> None:
    """ValueError if ranks have other numbers of tokens than the layout gives them."""
    if sizes != placement.sizes:
        raise ValueError(
            f"layout {layout!r} splits {sum(placement.sizes)} tokens into shards of {placement.sizes}: "
            f"got shards of {sizes} tokens; split them with attend.shard or attend.positions"
        )
