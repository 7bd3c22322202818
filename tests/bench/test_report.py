"""The report: one page that stands alone, says what the rows say, and works in a browser."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashspan.bench import record
from flashspan.bench.context import ALONE, Workload, make_row
from flashspan.bench.findings import find, split
from flashspan.bench.record import Row
from flashspan.bench.report import page, report
from flashspan.cli import main

WHERE = {"device": "x86_64, 2 cores", "torch": "2", "triton": "3", "commit": "abc"}


def rows(**changes: float) -> list[Row]:
    """One device and two strategies on two ranks, made up."""
    work = Workload(64, 2, 4, 2, 256, "float32")
    more = {
        "scaling": "strong", "tokens": 256, "tokens_per_second": 1000.0, "mfu": 0.3, "product_share": 0.6,
        "computing_ms": 48.0, "wire_ms": 10.0, "wire_to_computing": 0.2, "hidden": 0.8, "imbalance": 1.05, **changes,
    }  # fmt: skip
    found = []
    for kind in ("forward", "forward+backward"):
        alone = {**more, "computing_ms": 100.0, "wire_ms": 0.0, "hidden": math.nan, "imbalance": 1.0}
        found.append(make_row(WHERE, work, (ALONE, ""), kind, 1, samples_ms=[100.0], peak_mib=80.0, more=alone))
        for case, time in ((("ring", "zigzag"), 55.0), (("ring", "contiguous"), 75.0)):
            found.append(make_row(WHERE, work, case, kind, 2, samples_ms=[time], peak_mib=50.0, more=more))
    return found


class Reader(HTMLParser):
    """Tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


NASTY = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def text() -> str:
    """A page of rows whose every word wants to be a script."""
    bad = [replace(row, device=f"{NASTY}, 2 cores", commit=NASTY) for row in rows()]
    bad.append(replace(bad[-1], status=f"failed: {NASTY}", impl=NASTY))
    bad.append(replace(bad[0], impl=f"_ $x_{{ {NASTY} $", ranks=2))  # matplotlib reads mathematics between dollars
    return page(bad)


def test_the_page_needs_nothing_from_elsewhere(text: str) -> None:
    reader = Reader(text)
    names = [tag for tag, _ in reader.tags]
    assert names.count("svg") >= 5
    assert not {"script", "link", "iframe", "img", "object"} & set(names)
    for _, attributes in reader.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:image/png;"))
            assert not name.startswith("on")
    assert "url(http" not in text
    assert "@import" not in text
    ids = [attributes["id"] for tag, attributes in reader.tags if tag == "clippath"]
    assert len(ids) == len(set(ids))


def test_findings_are_computed_from_the_rows() -> None:
    text = " ".join(find(rows()))
    assert "ring zigzag is fastest" in text
    assert "1.82 times as fast as one device" in text
    assert "bound by compute" in text
    assert "zigzag is 1.36 times faster" in text
    assert "80% of it is hidden" in text
    slow = " ".join(find([replace(row, p50_ms=1000 * row.p50_ms) for row in rows()]))
    assert "is fastest, 55,000 ms" in slow


def other_sweeps() -> list[Row]:
    """The same model in bfloat16 and a wider one, a thousand times as fast, each with a row of weak scaling."""
    found = []
    for row in rows():
        small = replace(row, shape=row.shape.replace("256 tokens", "128 tokens"), more={**row.more, "tokens": 128})
        small.more["scaling"] = "weak"
        for it in (row, small) if row.impl == ALONE else (row,):
            fast = replace(it, p50_ms=it.p50_ms / 1000, tflops=1000 * it.tflops)
            found += [replace(fast, dtype="bfloat16"), replace(fast, shape=fast.shape.replace("2x64", "2x128"))]
    return found


def test_a_second_sweep_does_not_change_what_is_said_of_the_first(tmp_path: Path) -> None:
    both = find([*rows(), *other_sweeps()])
    firsts = [text.split(" on 2 ranks")[0] for text in both if "is fastest" in text]
    assert firsts == [
        f"2x{w}, 4/2 heads, 256 tokens, {d}:" for w, d in ((64, "float32"), (64, "bfloat16"), (128, "float32"))
    ]
    assert (
        "zigzag is fastest, 55.00 ms forward and backward, 1.82 times as fast as one device (91% of ideal)" in both[0]
    )
    assert both.count("Weak scaling from 1 to 2 ranks (zigzag ring): each rank keeps 91% of one device's speed.") == 2
    figures = tmp_path / "figures"
    record.append([*rows(), *other_sweeps()], tmp_path / "context.jsonl")
    assert main(["report", str(tmp_path), "--figures", str(figures)]) == 0
    drawn = {file.name for file in figures.iterdir()}
    assert {"latency.svg", "latency-2.svg", "latency-3.svg", "ring.svg", "ring-forward.svg"} <= drawn
    text = (tmp_path / "report.html").read_text()
    assert text.count("one device against every strategy: ") == 3


def test_a_row_of_weak_scaling_is_the_one_device_of_a_shorter_sequence() -> None:
    weak = [replace(row, more={**row.more, "scaling": "weak"}) if row.impl == ALONE else row for row in rows()]
    assert find(weak) == find(rows())


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"computing_ms": 10.0}, "wire"),
        ({"imbalance": 4.0}, "imbalance"),
        ({"product_share": 0.1}, "memory"),
        ({"product_share": 0.9}, "compute"),
    ],
)
def test_what_bounds_a_run_is_its_largest_part(changes: dict[str, float], bound: str) -> None:
    best = next(row for row in rows(**changes) if row.impl == "ring zigzag" and row.kind == "forward+backward")
    shares = split(best)
    assert shares.bound == bound
    assert sum(vars(shares).values()) == pytest.approx(best.p50_ms)
    assert f"bound by {bound}" in " ".join(find(rows(**changes)))


def test_everything_is_escaped(text: str) -> None:
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 3


def test_a_busy_machine_is_said_to_be_one() -> None:
    loud = [replace(row, p20_ms=0.1 * row.p50_ms, p80_ms=3 * row.p50_ms) for row in rows()]
    assert "Take the times with care" in find(loud)[0]
    assert "Take the times" not in find(rows())[0]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.append(rows(), tmp_path / "context.jsonl")
    assert main(["report", str(tmp_path)]) == 0
    assert "is fastest" in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["report", str(tmp_path / "context.jsonl")]) == 2
    assert f"is no folder: give the one that holds it, {tmp_path}" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "context.jsonl" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_sweep_that_was_cut_short_and_rows_that_lack_numbers(tmp_path: Path) -> None:
    forward = [row for row in rows() if row.kind == "forward"]
    assert "<svg" not in page(forward)  # killed between the two rows of a pair
    assert "<svg" in page([*forward, rows()[-1]])
    with pytest.raises(ValueError, match="has no imbalance: another version wrote it"):
        page([replace(row, more={k: v for k, v in row.more.items() if k != "imbalance"}) for row in rows()])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: Playwright's own, or the one FLASHSPAN_CHROMIUM names."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        path = os.environ.get("FLASHSPAN_CHROMIUM")
        flags = ["--no-sandbox", "--no-zygote", "--single-process", "--in-process-gpu", "--use-gl=angle"]
        flags += ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
        try:
            opened = playwright.chromium.launch(executable_path=path, args=flags if path else [])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [390, 1100])
def test_a_browser_shows_it_whole(browser: Any, width: int, tmp_path: Path) -> None:
    record.append(rows(), tmp_path / "context.jsonl")
    assert report(tmp_path) == 0
    opened = browser.new_page(viewport={"width": width, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto((tmp_path / "report.html").as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    widths = opened.evaluate("[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width)")
    assert widths
    assert all(0.5 * min(width, 380) < w <= width for w in widths)
    assert "is fastest" in opened.inner_text(".findings")
    assert not said
    assert len(asked) == 1
    assert re.fullmatch(r"flashspan: measured", opened.title())
