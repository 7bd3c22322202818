"""The page of random shapes: its numbers come from the rows, and the recorded page from the recorded rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row
from flashspan.bench.report import plots, random_page
from flashspan.bench.report.page import contents
from flashspan.bench.suites import attention, random_attention
from flashspan.bench.suites.random_shapes import draw

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / random_attention.PATH


def make(shape: str, impl: str, ms: float, kind: str = "forward", **rest: Any) -> Row:
    more = {"seed": 7, "number": 0, "classes": ["self", "GQA"], "backend": "hopper"} | rest.pop("more", {})
    known: dict[str, Any] = {"p20_ms": 0.9 * ms, "p50_ms": ms, "p80_ms": 1.2 * ms, "error": 2e-3, "peak_mib": 1.0}
    place = {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "commit": "abc"}
    named = {"shape": shape, "impl": impl, "kind": kind, "tflops": 1.0, "what": "random"}
    return Row(**(place | named | known | rest), more=more)


def synthetic() -> list[Row]:
    """Forward ratios 0.50, 0.75, ..., 2.75 on ten shapes, half of which also have backward; a window without flex, a
    shape that no other implementation supports, and one on which ours fails."""
    rows = []
    for n in range(10):
        name, classes = f"1x8/8x{n}x{n}x64 full", ["self", "GQA"] if n % 2 else ["decode"]
        for kind in ("forward", "both")[: 1 + n % 2]:
            rows += [
                make(name, "flashspan", 2.0, kind, more={"classes": classes}),
                make(name, "sdpa-flash", 9.0 + n, kind, more={"classes": classes}),
                make(name, "sdpa-cudnn", 1.0 + n / 2, kind, more={"classes": classes}),
            ]
    window = {"classes": ["window"]}
    rows += [make("w window 3", "flashspan", 1.0, more=window), make("w window 3", "sdpa-cudnn-mask", 9.0, more=window)]
    rows += [make("alone full", "flashspan", 1.0)]
    nan = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms", "error", "peak_mib"), float("nan"))
    rows += [make("broken full", "flashspan", 1.0, status="failed: out of | registers", **nan)]
    rows += [make("broken full", "sdpa-flash", 1.0)]
    return rows


def test_ratios_with_the_host_are_of_the_slower_side() -> None:
    """On four shapes, ours takes 2 ms of GPU time and 1, 2, 3 or 4 ms of host time; the other takes 3 ms and 1 ms."""
    rows = [row for row in synthetic() if row.shape == "alone full"]
    for n in range(1, 5):
        rows.append(make(f"s{n} full", "flashspan", 2.0, more={"host_us": 1000.0 * n}))
        rows.append(make(f"s{n} full", "sdpa-flash", 3.0, more={"host_us": 1000.0}))
    rows += [make("unmeasured full", "flashspan", 1.0), make("unmeasured full", "sdpa-flash", 9.0)]
    found = random_page.compare(rows)
    assert {each.ours.shape: each.with_host for each in found if "host_us" in each.ours.more} == {
        "s1 full": 1.5,
        "s2 full": 1.5,
        "s3 full": 1.0,
        "s4 full": 0.75,
    }
    (cells,) = random_page.host_table(found).cells
    assert cells == ("forward", "4", "2500", "1000", "50%", "1.25", "25%", "0.75")


def test_the_ratio_is_the_fastest_of_the_others_over_ours() -> None:
    found = {(each.ours.shape, each.ours.kind): each for each in random_page.compare(synthetic())}
    assert len(found) == 16
    for n in range(10):
        each = found[f"1x8/8x{n}x{n}x64 full", "forward"]
        assert each.ratio == pytest.approx(0.5 + n / 4)
        assert each.theirs.impl == "sdpa-cudnn"
        assert each.spread == pytest.approx(0.3)
        assert each.fair
    assert not found["w window 3", "forward"].fair


def test_the_page_counts_what_the_rows_say() -> None:
    text = random_page.markdown(synthetic())
    ratios = [0.5 + n / 4 for n in range(10)]
    assert f"- forward, 10 shapes: the median ratio is {median(ratios):.2f}; flashspan is faster on 70%" in text
    assert "the ratio is below 0.95 on 20% and 0.50 at the lowest" in text
    assert f"- forward and backward, 5 shapes: the median ratio is {median(ratios[1::2]):.2f}" in text
    assert "flashspan failed on 1 shapes; on 1, no implementation of PyTorch was measured" in text
    assert "- failed: broken full: out of | registers" in text
    assert "- no implementation of PyTorch was measured: alone full" in text
    assert "1 shapes with a window were not measured with FlexAttention" in text
    assert "NVIDIA H200, torch 2.11, Triton 3.6, bf16, commit abc; 13 shapes of seed 7" in text


def test_classes_have_their_own_numbers() -> None:
    table = random_page.class_table(synthetic())
    cells = {line[0]: dict(zip(table.headings[1:], line[1:], strict=True)) for line in table.cells}
    assert list(cells) == ["all", "decode", "self", "GQA", random_page.MASKS_ONLY]
    assert (cells["all"]["forward shapes"], cells["all"]["both shapes"]) == ("10", "5")
    assert cells["decode"] == {
        "forward shapes": "5",
        "forward median": "1.50",
        "forward < 0.95": "20%",
        "forward lowest": "0.50",
        "both shapes": "0",
        "both median": "-",
        "both < 0.95": "-",
        "both lowest": "-",
    }
    assert cells["self"] == cells["GQA"]
    assert cells[random_page.MASKS_ONLY]["forward median"] == "9.00"


def test_the_worst_are_listed_first_and_no_more_than_ten() -> None:
    found = random_page.compare([*synthetic(), *(make(f"s{n}", i, 1.0) for n in range(5) for i in ("flashspan", "x"))])
    cells = random_page.worst_table(found, "forward").cells
    assert len(cells) == 10
    assert cells[0][:4] == ("1x8/8x0x0x64 full", "decode", "hopper", "sdpa-cudnn")
    assert [float(line[6]) for line in cells] == sorted(float(line[6]) for line in cells)


def test_a_window_with_flex_attention_is_a_window() -> None:
    rows = [*synthetic(), make("w window 3", "flex", 2.0, more={"classes": ["window"]})]
    (each,) = [each for each in random_page.compare(rows) if each.ours.shape == "w window 3"]
    assert (each.classes, each.fair, each.ratio) == (("window",), True, 2.0)


def test_a_shape_measured_again_has_its_newest_rows_alone() -> None:
    rows = synthetic()
    again = [make("1x8/8x0x0x64 full", name, 3.0, commit="def") for name in ("flashspan", "sdpa-flash")]
    found = {each.ours.shape: each for each in random_page.compare([*rows, *again]) if each.ours.kind == "forward"}
    assert found["1x8/8x0x0x64 full"].ratio == 1.0  # cuDNN was faster, at another commit
    assert found["1x8/8x1x1x64 full"].ratio == 0.75
    repaired = [make("broken full", "flashspan", 1.0, commit="def")]
    assert not random_page.failures([*rows, *repaired])
    elsewhere = [replace(row, device="another") for row in rows[:3]]
    assert len(random_page.compare([*rows, *elsewhere])) == 1


def test_the_line_of_a_shape_has_its_times() -> None:
    rows = [row for row in synthetic() if row.shape == "1x8/8x3x3x64 full"]
    line = random_page.summary(rows)
    assert line.startswith(
        "1x8/8x3x3x64 full [self, GQA]: forward 1.25 (2.000 ms, sdpa-cudnn 2.500); forward and backw"
    )
    assert random_page.summary(synthetic()[-2:]).endswith("[self, GQA]: flashspan failed: out of | registers")
    assert random_page.summary(synthetic()[-3:-2]).endswith("1.000 ms; no implementation of PyTorch was measured")


def test_a_page_without_comparisons_is_a_page() -> None:
    for rows in (synthetic()[-3:-2], synthetic()[-2:], synthetic()[-2:-1]):
        assert "not measured" in random_page.markdown(rows)
        assert random_page.chart(rows).startswith("<svg")


def test_every_ratio_is_in_the_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "to_svg", lambda figure, label: figures.append(figure) or "")
    extremes = [make(f"e{n}", i, ms) for n in (1, 2) for i, ms in (("flashspan", 1.0), ("x", 10.0 ** (2 * n - 3)))]
    random_page.chart([*synthetic(), *extremes])
    (figure,) = figures
    figure.draw_without_rendering()
    heights = [sum(bar.get_height() for bar in bars) for bars in figure.axes[0].containers]
    assert heights == [12, 5]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "forward and backward"]


def test_the_command_writes_the_page_of_recorded_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attention, "RANDOM", tmp_path / "random.csv")
    monkeypatch.setattr(attention, "PATH", tmp_path / "attention.csv")
    (tmp_path / "attention.csv").write_bytes((ROOT / "docs" / "benchmarks" / "attention.csv").read_bytes())
    assert attention.bench_attention(page=True) == 0
    assert not (tmp_path / "random.md").exists()
    record.append(synthetic(), tmp_path / "random.csv")
    assert attention.bench_attention(page=True) == 0
    rows = record.read(tmp_path / "random.csv")
    assert (tmp_path / "random.md").read_text() == random_page.markdown(rows) == random_page.markdown(synthetic())
    assert (tmp_path / "random.svg").read_text() == random_page.chart(rows)


@pytest.mark.parametrize("cell", ["5", "[]", "{", ""])
def test_a_csv_with_other_settings_is_refused(cell: str, tmp_path: Path) -> None:
    record.append(synthetic()[:1], tmp_path / "random.csv")
    text = (tmp_path / "random.csv").read_text()
    (tmp_path / "random.csv").write_text(re.sub(r'"\{.*\}"', cell, text))
    with pytest.raises(ValueError, match="does not hold rows of this version"):
        record.read(tmp_path / "random.csv")


def test_a_report_takes_the_rows() -> None:
    _, sections = contents(synthetic())
    (section,) = [section for section in sections if section.title == "Random shapes"]
    assert section.tables[0] == random_page.class_table(synthetic())
    assert section.commands == ["flashspan bench attention --random 1 --seed 7"]


recorded = pytest.mark.skipif(not RECORDED.exists(), reason="no rows are recorded")


@recorded
def test_the_recorded_page_is_made_of_the_recorded_rows() -> None:
    rows = record.read(RECORDED)
    assert RECORDED.with_suffix(".md").read_text() == random_page.markdown(rows)
    assert RECORDED.with_suffix(".svg").exists()


@recorded
def test_ours_serves_every_recorded_shape() -> None:
    rows = record.read(RECORDED)
    assert [f"{row.shape}: {row.status}" for row in random_page.failures(rows)] == []
    assert {row.shape for row in rows} == {row.shape for row in rows if row.impl == random_page.OURS}


@recorded
def test_recorded_shapes_are_those_of_their_seed() -> None:
    drawn: dict[int, list[str]] = {}
    for row in record.read(RECORDED):
        seed, number = row.more["seed"], row.more["number"]
        if number >= len(drawn.get(seed, [])):
            drawn[seed] = [str(shape) for shape in draw(2 * number + 50, seed)]
        assert drawn[seed][number] == row.shape
