"""Pictures show all tiles and transfers of a schedule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.quiver import Quiver

from flashspan.context import generators
from flashspan.context.draw import draw_ownership, draw_timeline
from flashspan.context.layout import place
from flashspan.context.schedule import reverse
from flashspan.context.visibility import Visibility
from flashspan.kernels.masks import CAUSAL
from flashspan.masks.patterns import random_blocks


@pytest.mark.parametrize("name", ["ring", "helper"])
def test_pictures_are_drawn(name: str, tmp_path: Path) -> None:
    visibility = Visibility(place("contiguous", 64, 4), CAUSAL)
    schedule = generators.GENERATORS[name](visibility)
    for kind, direction in (("svg", schedule), ("png", reverse(schedule))):
        path = tmp_path / f"timeline.{kind}"
        figure = draw_timeline(direction, path)
        assert path.stat().st_size > 1000
        (axes,) = figure.axes
        assert len(axes.texts) == len(schedule.tiles)  # labels
        assert sum(x.N for x in axes.collections if isinstance(x, Quiver)) == len(direction.transfers)  # arrows
    figure = draw_ownership(schedule, visibility, tmp_path / "tiles.svg")
    image = figure.axes[0].images[0].get_array()
    assert image.count() == visibility.pairs.sum()
    for rank in range(4):
        assert (image == rank).sum() == schedule.work()[rank]


def test_many_ranks_are_drawn_soon(tmp_path: Path) -> None:
    schedule = generators.ring(Visibility(place("zigzag", 640, 64), CAUSAL))
    path = tmp_path / "timeline.svg"
    (axes,) = draw_timeline(schedule, path).axes
    assert not axes.texts
    assert 1000 < path.stat().st_size < 2**21


def test_a_block_map_is_drawn_like_any_mask() -> None:
    visibility = Visibility(place("zigzag", 300, 4), random_blocks(300, 0.3, size=16))
    schedule = generators.gather(visibility)
    image = draw_ownership(schedule, visibility).axes[0].images[0].get_array()
    assert [(image == rank).sum() for rank in range(4)] == schedule.work()


def test_a_mask_too_large_to_draw_is_refused() -> None:
    visibility = Visibility(place("contiguous", 5000, 2), CAUSAL)
    with pytest.raises(ValueError, match=r"5000 .* 4096"):
        draw_ownership(generators.ring(visibility), visibility)


def test_matplotlib_is_not_imported_until_it_draws() -> None:
    code = "import sys, flashspan.context.draw; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
