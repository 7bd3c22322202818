"""The report: one page without other files, which works in a browser."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row
from flashspan.bench.report import findings, plots
from flashspan.bench.report import page as report_module
from flashspan.bench.report.page import report
from flashspan.bench.report.workloads import PARTS
from flashspan.cli import main
from tests.bench.report.made_up import page, rows, sparse_rows, trained


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
    """A page of rows in which every text contains a script."""
    bad = [replace(row, device=f"{NASTY}, 2 cores", commit=NASTY) for row in rows()]
    bad.append(replace(bad[-1], status=f"failed: {NASTY}", impl=NASTY))
    bad.append(replace(bad[0], impl=f"_ $x_{{ {NASTY} $", ranks=2))  # matplotlib parses $...$ as mathematics
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


def test_an_axis_of_ranks_has_whole_ones() -> None:
    axes = plots.lines({"ring": [(1, 1.0), (2, 1.6)]}, title="scaling", x="ranks", y="speed").axes[0]
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_everything_is_escaped(text: str) -> None:
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 3


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.append(rows(), tmp_path / "context.jsonl")
    assert main(["report", str(tmp_path)]) == 0
    assert "is fastest" in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["report", str(tmp_path / "context.jsonl")]) == 2
    assert f"is not a folder: give the folder that holds it, {tmp_path}" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "context.jsonl" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_files_of_other_programs_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, newer = tmp_path / "loss.jsonl", tmp_path / "newer.jsonl"
    other.write_text('{"step": 1, "loss": 2.5}\n')
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "only rows of this version of `flashspan bench` are read" in said
    assert f"these files hold others: {other} (line 1); measure first" in said
    assert "p50_ms" not in said  # no list of all fields
    assert said.count("\n") == 1
    record.append(rows(), tmp_path / "context.jsonl")
    line = (tmp_path / "context.jsonl").read_text().splitlines()[0]
    newer.write_text(f'{line}\n{{"colour": 1, {line[1:]}\n')
    (tmp_path / "attention.csv").write_text("name,age\n")
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "is fastest" in said
    left_out = (
        f"these files hold others: {other} (line 1); {newer} (line 2); {tmp_path / 'attention.csv'}. Move them away"
    )
    assert left_out in said
    assert html.escape(left_out) in (tmp_path / "report.html").read_text()
    assert f"from {len(rows())} rows" in said


def test_a_sweep_that_was_cut_short_and_rows_that_lack_numbers(tmp_path: Path) -> None:
    forward = [row for row in rows() if row.kind == "forward"]
    assert "<svg" not in page(forward)  # killed between the two rows of a pair
    assert "<svg" in page([*forward, rows()[-1]])
    with pytest.raises(ValueError, match="has no imbalance: another version wrote it"):
        page([replace(row, more={k: v for k, v in row.more.items() if k != "imbalance"}) for row in rows()])


def test_a_report_picks_its_rows_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    picked: list[int] = []

    def current(found: Sequence[Row]) -> list[Row]:
        picked.append(len(found))
        return real(found)

    real = findings.current
    for module in (findings, report_module):
        monkeypatch.setattr(module, "current", current)
    record.append(rows(), tmp_path / "context.jsonl")
    assert report(tmp_path, figures=tmp_path / "figures") == 0
    assert picked == [len(rows())]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 0), ("tokens", "x"), ("hidden", "x"), ("mfu", []), ("product_share", {}), ("threads", [])],
)
def test_a_row_with_something_else_in_place_of_a_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"has {name} {value!r}: another version wrote it")):
        page([replace(row, more={**row.more, name: value}) for row in rows()])


def test_the_file_that_cannot_be_written_is_the_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.append(rows(), tmp_path / "context.jsonl")
    figures = tmp_path / "context.jsonl" / "figures"  # a file at the place of a folder
    assert main(["report", str(tmp_path), "--figures", str(figures)]) == 2
    said = capsys.readouterr().err
    assert f"{figures / 'latency.svg'} cannot be written" in said
    assert "give another --figures" in said


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: Playwright's, or the one that FLASHSPAN_CHROMIUM names."""
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
    record.append([*rows(), *sparse_rows(), trained(128, 7.25)], tmp_path / "context.jsonl")
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


def test_contents_lead_to_every_section() -> None:
    text = page([*rows(), *sparse_rows(), trained(128, 7.25)])
    links = re.findall(r'<a href="#([^"]+)">', text.split("</nav>")[0])
    assert links == re.findall(r'<section id="([^"]+)">', text)
    assert len(links) == len(set(links)) >= 4


@pytest.fixture(scope="module")
def plain() -> str:
    """The page of two strategies and one device."""
    return page(rows())


def test_the_page_has_a_dark_mode_and_its_figures_take_its_colours(plain: str, tmp_path: Path) -> None:
    assert "prefers-color-scheme: dark" in plain
    figures = re.findall("<svg.*?</svg>", plain, flags=re.DOTALL)
    assert figures
    for figure in figures:
        assert "#000000" not in figure
        assert "currentColor" in figure
        assert not re.search(r'<g id="patch_1">\s*<path[^>]*fill: #ffffff', figure)  # the background
    record.append(rows(), tmp_path / "context.jsonl")
    assert report(tmp_path, figures=tmp_path) == 0
    assert all("background: #fff" in file.read_text() for file in tmp_path.glob("*.svg"))


def test_the_cells_of_a_wide_table_name_their_columns(plain: str) -> None:
    section = plain.split('id="across-devices"')[1].split("</section>")[0]
    [(head, body)] = re.findall(
        '<table class="wide">.*?<thead>(.*?)</thead><tbody>(.*?)</tbody>', section, flags=re.DOTALL
    )
    headings = re.findall("<th[^>]*>(.*?)</th>", head)
    for line in re.findall("<tr>(.*?)</tr>", body):
        assert re.findall('data-heading="(.*?)"', line) == headings[1:]


def test_a_legend_and_its_caption_use_the_same_words(plain: str) -> None:
    section = plain.split('id="across-devices"')[1]
    for words in PARTS.values():
        assert section.count(words) >= 2
