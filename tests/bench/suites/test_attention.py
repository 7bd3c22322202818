"""Rows of `bench attention` are written and read back, and are the only source of the page that shows them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashspan.bench.measure import record
from flashspan.bench.report import plots, speed
from flashspan.bench.suites import attention, host, leaderboard, rounding

ROOT = Path(__file__).parents[3]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    row = record.Row("a, gpu", "2.13", "3.7", "abc", "1x2", "ours", "forward", 1.0, 2.0, 3.0, 4.0, 1e-3, 5.0)
    record.append([row], tmp_path / "attention.csv")
    record.append([replace(row, kind="both")], tmp_path / "attention.csv")
    assert record.read(tmp_path / "attention.csv") == [row, replace(row, kind="both")]


def test_rows_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "attention.csv").write_text("device,speed\nx,1\n")
    with pytest.raises(ValueError, match="does not hold rows of this version"):
        record.read(tmp_path / "attention.csv")
    (tmp_path / "attention.csv").rename(tmp_path / "mine.csv")
    with pytest.raises(ValueError, match=r"its benchmark's name \(attention, leaderboard, random, sparse"):
        record.read(tmp_path / "mine.csv")


def test_the_page_is_made_of_the_rows() -> None:
    rows = record.read(ROOT / attention.PATH)
    assert (ROOT / attention.PATH).with_suffix(".md").read_text() == attention.markdown(rows)


def test_every_benchmarked_shape_is_recorded() -> None:
    recorded = {row.shape for row in record.read(ROOT / attention.PATH) if row.impl == "flashspan"}
    assert {str(shape) for shape in attention.SHAPES} <= recorded


def test_the_picture_shows_every_implementation() -> None:
    rows = record.read(ROOT / attention.PATH)
    picture = attention.chart(rows)
    assert all(f">{row.impl}<" in picture for row in rows)
    assert (ROOT / attention.PATH).with_suffix(".svg").exists()


def test_the_readme_picture_is_made_of_the_rows() -> None:
    rows = record.read(ROOT / attention.PATH)
    assert (ROOT / attention.PATH).with_name("speed.svg").read_text() == speed.picture(rows)
    times = {(row.shape, row.impl): row.tflops for row in rows if row.kind == "both"}
    for shape, title in speed.SHAPES.items():
        drawn = {bar.label: bar.tflops for bar in speed.cases(rows)[title]}
        assert drawn == {label: times[shape, name] for name, (label, _) in speed.IMPLEMENTATIONS.items()}


def test_the_title_of_the_picture_lies_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "to_svg", lambda figure, label: figures.append(figure) or "")
    attention.chart(record.read(ROOT / attention.PATH))
    (figure,) = figures
    figure.draw_without_rendering()
    title, whole = figure.axes[0].title.get_window_extent(), figure.bbox
    assert "NVIDIA" in figure.axes[0].get_title()
    assert whole.x0 <= title.x0 < title.x1 <= whole.x1


def test_shapes_are_read_as_they_are_written() -> None:
    for shape in attention.SHAPES:
        words = f"{shape.B},{shape.H},{shape.K},{shape.T},{shape.D},{shape.pattern}"
        assert attention.Shape.parse(words) == shape


@pytest.mark.parametrize("words", ["", "1,2,3", "1,2,2,64,64,window", "1,2,2,64,64,causal 3", "1,2,2,x,64,full"])
def test_other_shapes_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="a shape is batch,heads"):
        attention.bench_attention(shapes=(words,))


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only takes names of implementations, flashspan, .*: got flash"):
        attention.bench_attention(quick=True, only=("flash",))


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        attention.bench_attention()
    with pytest.raises(ValueError, match="needs a CUDA device"):
        leaderboard.bench_leaderboard()


def test_ours_is_the_fastest_of_the_recorded_rows_as_the_readme_says() -> None:
    newest = {(row.shape, row.impl): row for row in record.read(ROOT / attention.PATH) if row.kind == "both"}
    others = [(shape, impl) for shape, impl in newest if impl in ("sdpa-flash", "sdpa-cudnn", "flex")]
    assert len(others) >= 27
    slower = {key: newest[key].p50_ms / newest[key[0], "flashspan"].p50_ms for key in others}
    assert min(slower.values()) > 1, slower


def test_the_cost_of_a_call_is_printed_for_each_way_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.bench_host(calls=2, device="cpu") == 0
    shape, *lines = capsys.readouterr().out.splitlines()
    assert shape == "1x2/2x128x128"
    assert len(lines) == 12
    assert all(float(line.split()[-2]) > 0 for line in lines)


def test_errors_are_printed_or_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounding, "NAMES", ("sdpa-cudnn", "sdpa-flash", "flashspan"))
    assert rounding.bench_rounding(tokens=65, device="cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::5]] == ["1x2/2x65x64", "1x2/2x65x128"]
    assert all("backend" in line for line in lines[1::5])  # cuDNN's rows, which a CPU does not have
    found = [[float(word) for word in line.split()[-4:]] for line in [*lines[2:5], *lines[7:]]]
    assert len(found) == 6
    assert all(0.5 < error < 5 for errors in found for error in errors)
