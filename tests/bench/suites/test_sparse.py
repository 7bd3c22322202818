"""The results that `flashspan bench sparse` derives from rows, and the pictures of patterns. Measuring needs a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flashspan import masks
from flashspan.arguments import resolve_mask
from flashspan.bench.measure import record
from flashspan.bench.report import mask_pictures as patterns
from flashspan.bench.suites import sparse


def rows() -> list[record.Row]:
    """A sweep with times in proportion to the visited blocks (a fifth more at 4096 tokens), and one twice as slow."""
    where = {"device": "a device", "torch": "2", "triton": "3", "commit": "c"}
    rest = {"p20_ms": 1.0, "p80_ms": 1.0, "error": 0.0, "peak_mib": 1.0}
    found = []
    for T in (1024, 4096):
        for share in (1.0, 0.5, 0.1):
            pattern = "full" if share == 1 else f"random {share:.0%}"
            for impl, cost in (("flashspan intervals", 1.0), ("flashspan blocks", T / 4096 * 0.2 + 1.0), ("flex", 2.0)):
                if share == 1 or impl != "flashspan intervals":
                    what = {"shape": f"1x16x{T}x128 {pattern}", "impl": impl, "tflops": 60 / cost}
                    for kind in ("forward", "backward"):
                        found.append(record.Row(**where, **rest, **what, kind=kind, p50_ms=cost * share))
    return found


def test_the_page_and_its_plot_come_from_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "sparse.csv"
    record.append(rows(), path)
    sparse.write_page(record.read(path), path)
    page = (tmp_path / "sparse.md").read_text()
    assert "| 1x16x4096x128 random 10% | - | 0.120 / 0.120 | 0.200 / 0.200 | 1.67x / 1.67x |" in page
    assert "at 4,096 tokens" in page
    assert "| blocks visited | 50% | 10% |\n| --- | ---: | ---: |\n| efficiency | 83% / 83% | 83% / 83% |" in page
    assert (tmp_path / "sparse.png").stat().st_size > 5000


def test_how_long_maps_take_to_make_is_recorded_and_shown(tmp_path: Path) -> None:
    made = sparse.build(tmp_path / sparse.MASKS, torch.device("cpu"), tokens=512, dense=256)
    assert [row.impl for row in made] == ["from_rule, first", "from_rule", "from_dense", "from_dense", "reading it"]
    assert all(row.p50_ms > 0 for row in made)
    sparse.write_page(rows(), tmp_path / "sparse.csv")
    page = (tmp_path / "sparse.md").read_text()
    assert "| map | made by | ms | peak MiB |" in page
    assert page.count("| 256x256 causal | from_dense |") == 1


def test_the_sweep_begins_with_the_dense_kernel() -> None:
    """The other rows of its length are compared with it."""
    cases = [make for make in sparse.sweep_cases() if make.args[-2:] == (65536, 128)]  # type: ignore[attr-defined]
    assert [make.func for make in cases] == [sparse.full] + [sparse.random_blocks] * 5  # type: ignore[attr-defined]
    case = sparse.full(256, 128)
    assert case.rule(*(torch.arange(256) for _ in range(4))).all()
    assert case.flops() == 4 * 16 * 128 * 256**2


def test_every_pattern_has_its_picture(tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in patterns.draw(tmp_path)}
    kept = {path.name for path in (Path(__file__).parents[3] / "docs/patterns").glob("*.png")}
    assert kept == set(drawn)
    assert len(set(drawn.values())) == len(drawn)
    page = (Path(__file__).parents[3] / "docs/sparse.md").read_text()
    assert all(f"patterns/{name}" in page for name in drawn)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        sparse.bench_sparse()


def test_the_page_shows_what_its_mask_prints() -> None:
    page = (Path(__file__).parents[3] / "docs/sparse.md").read_text()
    made, shown = re.findall(r"mask = (masks\.longformer\(.*?)\)  #.*\nprint\(mask\)  # (.*)", page)[0]
    assert repr(eval(made.replace("cuda", "cpu") + ")", {"masks": masks})) == shown


def test_windows_are_counted_as_the_page_says() -> None:
    q = torch.empty(1, 1, 9, 1)
    assert resolve_mask(q, q, causal=True, window=4) == masks.window(3, 0)
