"""What `flashspan bench sparse` makes of its rows, and the pictures of the patterns; measuring needs a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flashspan import masks
from flashspan.arguments import resolve_mask
from flashspan.bench import patterns, record, sparse


def rows() -> list[record.Row]:
    """A sweep that costs what it visits, beside one that costs twice that."""
    where = {"device": "a device", "torch": "2", "triton": "3", "commit": "c"}
    rest = {"p20_ms": 1.0, "p80_ms": 1.0, "tflops": 1.0, "error": 0.0, "peak_mib": 1.0}
    return [
        record.Row(**where, **rest, shape=f"1x16x{T}x128 random {share:.0%}", impl=impl, kind=kind, p50_ms=cost * share)
        for T in (1024, 4096)
        for share in (1.0, 0.5, 0.1)
        for impl, cost in (("flashspan blocks", 1.0), ("flex", 2.0))
        for kind in ("forward", "backward")
    ]


def test_the_page_and_its_plot_come_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "sparse.csv"
    record.append(rows(), path)
    sparse.write_page(record.read(path), path)
    page = (tmp_path / "sparse.md").read_text()
    assert "| 1x16x4096x128 random 10% | 0.100 / 0.100 | 0.200 / 0.200 | 2.00x / 2.00x |" in page
    assert (tmp_path / "sparse.png").stat().st_size > 5000


def test_every_pattern_has_its_picture(tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in patterns.draw(tmp_path)}
    kept = {path.name for path in (Path(__file__).parents[2] / "docs/patterns").glob("*.png")}
    assert kept == set(drawn)
    assert len(set(drawn.values())) == len(drawn)
    page = (Path(__file__).parents[2] / "docs/sparse.md").read_text()
    assert all(f"patterns/{name}" in page for name in drawn)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        sparse.bench_sparse()


def test_the_page_shows_what_its_mask_prints() -> None:
    page = (Path(__file__).parents[2] / "docs/sparse.md").read_text()
    made, shown = re.findall(r"mask = (masks\.longformer\(.*?)\)  #.*\nprint\(mask\)  # (.*)", page)[0]
    assert repr(eval(made.replace("cuda", "cpu") + ")", {"masks": masks})) == shown


def test_windows_are_counted_as_the_page_says() -> None:
    q = torch.empty(1, 1, 9, 1)
    assert resolve_mask(q, q, causal=True, window=4) == masks.window(3, 0)
