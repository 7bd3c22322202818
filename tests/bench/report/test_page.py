"""The report: one page that stands alone, says what the rows say, and works in a browser."""

from __future__ import annotations

import html
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashspan import masks
from flashspan.bench.measure import record, sweep
from flashspan.bench.measure.record import Row
from flashspan.bench.report import findings, plots
from flashspan.bench.report import page as report_module
from flashspan.bench.report.findings import find
from flashspan.bench.report.page import contents, report
from flashspan.bench.report.workloads import split
from flashspan.bench.suites import attention, data, leaderboard, model, sparse
from flashspan.bench.suites.context import make_row
from flashspan.bench.suites.context_rank import ALONE, Workload
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


def page(found: Sequence[Row]) -> str:
    """What `flashspan report` writes of rows."""
    return report_module.page(*contents(found))


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


def timed_as(**times: float) -> list[Row]:
    """The same rows with other times: of `alone`, `zigzag` and `contiguous`."""
    found = []
    for row in rows():
        word = "alone" if row.impl == ALONE else row.impl.split(" ")[1]
        found.append(replace(row, p50_ms=times.get(word, row.p50_ms)))
    return found


@pytest.mark.parametrize("alone", [40.7, 55.0, 56.0])
def test_where_one_device_is_as_fast_more_of_them_are_no_advice(alone: float) -> None:
    """As slow as in a first run on a small machine, just as fast, and faster by no more than noise."""
    text = " ".join(find(timed_as(alone=alone)))
    assert "bound by compute" in text
    assert "Splitting does not pay at this size on this machine" in text
    assert "longer sequences, and one process for each idle core or device" in text
    assert "more devices" not in text


@pytest.mark.parametrize("changes", [{}, {"alone": 58.0}])
def test_where_splitting_is_faster_nothing_speaks_against_it(changes: dict[str, float]) -> None:
    text = " ".join(find(timed_as(**changes)))
    assert "does not pay" not in text
    assert "more devices or, where they have such products, bfloat16" in text


@pytest.mark.parametrize("contiguous", [53.5, 55.0, 56.5])
def test_times_that_noise_could_have_made_are_not_told_apart(contiguous: float) -> None:
    text = " ".join(find(timed_as(contiguous=contiguous)))
    assert "no difference between zigzag and contiguous tokens that could be measured (less than 3%)" in text
    assert "The choice does not matter: all strategies take as long there, to 3%." in text


@pytest.mark.parametrize(("contiguous", "said"), [(57.0, "1.04 times faster"), (53.0, "1.04 times slower")])
def test_times_beyond_noise_are_told_apart(contiguous: float, said: str) -> None:
    text = " ".join(find(timed_as(contiguous=contiguous)))
    assert f"zigzag is {said} than contiguous tokens" in text
    assert "The choice matters: ring " in text


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


def test_an_axis_of_ranks_has_whole_ones() -> None:
    axes = plots.lines({"ring": [(1, 1.0), (2, 1.6)]}, title="scaling", x="ranks", y="speed").axes[0]
    assert all(tick == int(tick) for tick in axes.get_xticks())


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
    assert shares is not None
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


def commands(text: str) -> list[str]:
    """The different commands that a page shows."""
    return list(dict.fromkeys(html.unescape(found) for found in re.findall("<code>(.*?)</code>", text)))


@pytest.mark.parametrize(
    "made",
    [
        "context --quick",
        "context --quick --dtype bfloat16 --heads 4",
        "context --quick --ranks 1 3 --tokens 512 --repeats 5",
        "context --ranks 1 2 --width 256 --layers 2 --tokens 1024",  # the model of --quick, but every strategy
        "context --ranks 2 3 --tokens 96 --width 64 --layers 1 --heads 4 --kv-heads 4 --repeats 7",
        "study eager --lengths 16 32 --head-dims 8 --repeats 2 --device cpu",
        "study flash --lengths 16 --device cpu",
        "collectives --ranks 2 3 --sizes 1024 4096 --repeats 1",
        "model --presets tiny small --tokens 8 16 --batch 2 --compiled --steps 3 --device cpu",
        "model --presets tiny --dtypes float32 --attentions plain --warmups 0 2 --device cpu",
    ],
)
def test_the_command_beside_rows_measures_the_same_rows(
    made: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted: list[Row] = []

    def note(jobs: list[sweep.Job], *_: Any, **__: Any) -> sweep.Outcome:
        wanted.extend(row for job in jobs for row in job.expected)
        return sweep.Outcome([], 0, 0)

    def asked_for(line: str) -> list[tuple[object, ...]]:
        wanted.clear()
        assert main([*shlex.split(line), "--folder", str(tmp_path)]) == 0
        return sorted((*row.key, row.more.get("repeats"), row.more.get("steps")) for row in wanted)

    monkeypatch.setattr(sweep, "run", note)
    first = asked_for(f"bench {made}")
    [shown] = commands(page([replace(row, status=record.OUT_OF_MEMORY) for row in wanted]))
    assert asked_for(shown.removeprefix("flashspan ")) == first


@pytest.mark.parametrize(
    "shapes",
    [
        ("2,4,2,512,64,causal", "1,16,16,16384,128,window 1024", "1,8,8,4096,128,documents 16"),
        tuple(",".join(map(str, vars(shape).values())) for shape in attention.SHAPES[:2]),
    ],
)
def test_the_command_of_attention_names_the_shapes_of_its_rows(
    shapes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(*, shapes: tuple[str, ...] = (), **_: Any) -> int:
        asked.extend(shapes)
        return 0

    monkeypatch.setattr(attention, "bench_attention", note)
    measured = [replace(rows()[0], what="attention", shape=str(attention.Shape.parse(words))) for words in shapes]
    [shown] = commands(page(measured))
    assert main(shlex.split(shown)[1:]) == 0
    assert asked == list(shapes)


def test_the_command_of_attention_on_its_own_shapes_names_none() -> None:
    own = [replace(rows()[0], what="attention", shape=str(shape)) for shape in attention.SHAPES]
    assert commands(page(own)) == ["flashspan bench attention"]


def studied(tokens: int, time: float, **place: Any) -> Row:
    """A row of `bench study flash`."""
    more = {"tokens": tokens, "head_dim": 64, "repeats": None}
    return replace(
        rows()[0], what="study flash", shape=f"1x{tokens}x64 causal", impl="flashspan", dtype="bfloat16", p50_ms=time,
        more=more, **place,
    )  # fmt: skip


def exchanged(size: int, time: float, bandwidth: float, **place: Any) -> Row:
    """A row of `bench collectives`."""
    return replace(
        rows()[0], what="collective", shape=f"{size} bytes", impl="all-reduce", ranks=2, bytes=float(size), p50_ms=time,
        more={"alpha_us": 3.0, "gb_per_s": bandwidth, "repeats": 20}, **place,
    )  # fmt: skip


def drawn_and_listed(text: str, title: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Of a section: the captions of figures, their commands, and its tables by their titles."""
    [section] = re.findall(f"<section><h2>{title}</h2>(.*?)</section>", text, flags=re.DOTALL)
    captions = re.findall("<figcaption>(.*?)(?: <code>(.*?)</code>)?</figcaption>", section)
    tables = re.findall("<caption>(.*?)</caption>(.*?)</table>", section, flags=re.DOTALL)
    return [caption for caption, _ in captions], [made_by for _, made_by in captions], dict(tables)


GPU = {"device": "H200"}
TIME = r"\d\.250"
STEPS = "mean ± standard deviation, milliseconds, and the peak of training"


def test_studies_of_two_machines_are_drawn_and_listed_apart() -> None:
    both = [studied(128, 7.25), studied(256, 8.25), studied(256, 1.25, **GPU), studied(512, 2.25, **GPU)]
    captions, made_by, tables = drawn_and_listed(page(both), "Attention over lengths and head sizes")
    cpu = WHERE["device"]
    assert captions == [f"Median time, {cpu}.", "Median time, H200."]
    assert made_by == [
        "flashspan bench study flash --lengths 128 256 --head-dims 64 --device cpu",
        "flashspan bench study flash --lengths 256 512 --head-dims 64",
    ]
    slow, fast = (tables[f"study flash, {name}: median milliseconds"] for name in (cpu, "H200"))
    assert re.findall(TIME, slow) == ["7.250", "8.250"]
    assert re.findall(TIME, fast) == ["1.250", "2.250"]


def test_collectives_of_two_machines_are_drawn_listed_and_spoken_of_apart() -> None:
    both = [exchanged(1024, 7.25, 1.0), exchanged(4096, 8.25, 1.0)]
    both += [exchanged(4096, 1.25, 9.0, **GPU), exchanged(8192, 2.25, 9.0, **GPU)]
    captions, made_by, tables = drawn_and_listed(page(both), "The wire")
    cpu = WHERE["device"]
    assert captions == [f"Median time, {cpu}.", "Median time, H200."]
    assert made_by == [f"flashspan bench collectives --sizes {sizes}" for sizes in ("1024 4096", "4096 8192")]
    assert re.findall(TIME, tables[f"collectives, {cpu}"]) == ["7.250", "8.250"]
    assert re.findall(TIME, tables["collectives, H200"]) == ["1.250", "2.250"]
    fit = "all-reduce on 2 ranks, {}: 3.000 µs and {} GB/s fit the measured times."
    assert find(both) == [fit.format(cpu, "1.000"), fit.format("H200", "9.000")]


def test_lengths_and_sizes_that_only_an_older_pytorch_measured_stand_apart() -> None:
    # Of what both measured, the older is left out; the rest of it is not joined to the newer line.
    lengths = [studied(128, 7.25), studied(256, 8.25), studied(256, 1.25, torch="3")]
    captions, _, tables = drawn_and_listed(page(lengths), "Attention over lengths and head sizes")
    assert captions == ["Median time, torch 2.", "Median time, torch 3."]
    assert [re.findall(TIME, table) for table in tables.values()] == [["7.250"], ["1.250"]]
    sizes = [exchanged(1024, 7.25, 1.0), exchanged(4096, 8.25, 1.0), exchanged(4096, 1.25, 9.0, torch="3")]
    captions, _, tables = drawn_and_listed(page(sizes), "The wire")
    assert captions == ["Median time, torch 2.", "Median time, torch 3."]
    assert [re.findall(TIME, table) for table in tables.values()] == [["7.250"], ["1.250"]]


def attended(tokens: int, time: float, **place: Any) -> Row:
    """A row of `bench attention`."""
    shape = f"1x8/8x{tokens}x64 causal"
    return replace(rows()[0], what="attention", shape=shape, impl="flashspan", kind="both", p50_ms=time, **place)


def trained(tokens: int, time: float, **place: Any) -> Row:
    """A row of `bench model`."""
    return replace(
        rows()[0], what="model", shape=f"tiny 4x{tokens}", impl="flashspan, eager", kind="forward", mean_ms=time,
        p50_ms=0.5, more={"warmup": 5, "steps": 10}, **place,
    )  # fmt: skip


def stepped(batch: int, time: float, **place: Any) -> Row:
    """A row of `bench data`."""
    shape = f"2x64 {batch}x128 per rank"
    return replace(rows()[0], what="data", shape=shape, impl="torch DDP", ranks=2, p50_ms=time, more={}, **place)


def test_attention_of_two_machines_is_listed_apart() -> None:
    both = [attended(128, 7.25), attended(256, 8.25), attended(256, 1.25, **GPU), attended(512, 2.25, **GPU)]
    text = page(both)
    _, _, tables = drawn_and_listed(text, "Attention on one device")
    slow, fast = (tables[f"median milliseconds, both passes, {name}"] for name in (WHERE["device"], "H200"))
    assert re.findall(TIME, slow) == ["7.250", "8.250"]
    assert re.findall(TIME, fast) == ["1.250", "2.250"]
    shapes = "flashspan bench attention --shapes 1,8,8,{},64,causal 1,8,8,{},64,causal"
    assert commands(text) == [shapes.format(128, 256), shapes.format(256, 512)]


def test_models_of_two_machines_are_drawn_and_listed_apart() -> None:
    both = [trained(128, 7.25), trained(256, 8.25), trained(256, 1.25, **GPU), trained(512, 2.25, **GPU)]
    captions, made_by, tables = drawn_and_listed(page(both), "Models")
    cpu = WHERE["device"]
    words = "Median time of forward, backward and optimizer, {}."
    assert captions == [words.format(cpu), words.format("H200")]
    common = "flashspan bench model --presets tiny --tokens {} --dtypes float32"
    assert made_by == [f"{common.format('128 256')} --device cpu", common.format("256 512")]
    slow, fast = (tables[f"{STEPS}, {name}"] for name in (cpu, "H200"))
    assert re.findall(r"\d\.25 ± 0", slow) == ["7.25 ± 0", "8.25 ± 0"]
    assert re.findall(r"\d\.25 ± 0", fast) == ["1.25 ± 0", "2.25 ± 0"]


def test_data_parallelism_of_two_machines_is_listed_apart() -> None:
    text = page([stepped(2, 7.25), stepped(2, 1.25, **GPU), stepped(4, 2.25, **GPU)])
    _, _, tables = drawn_and_listed(text, "Data, optimizer and tensor parallelism")
    assert re.findall(TIME, tables[f"a step, {WHERE['device']}"]) == ["7.250"]
    assert re.findall(TIME, tables["a step, H200"]) == ["1.250", "2.250"]
    common = "flashspan bench data --ranks 2 {}--only 'torch DDP'"
    sizes = "--layers 2 --width 64 --batch 2 "
    assert commands(text) == [common.format(sizes), common.format("")]  # the GPU's were two commands


def test_a_command_that_would_be_refused_is_not_shown() -> None:
    # One size has no line through it, so `bench collectives` asks for two.
    left = [exchanged(1024, 7.25, 1.0), exchanged(4096, 8.25, 1.0), exchanged(4096, 1.25, 9.0, torch="3")]
    text = page(left)
    captions, made_by, _ = drawn_and_listed(text, "The wire")
    assert captions == ["Median time, torch 2.", "Median time, torch 3."]
    assert made_by == ["", ""]
    assert not commands(text)
    [shown] = commands(page(left[:2]))
    assert shown == "flashspan bench collectives --sizes 1024 4096"


def test_one_machine_is_not_named_beside_its_rows() -> None:
    made = (studied, attended, trained)
    text = page(
        [make(size, 7.25) for make in made for size in (128, 256)] + [exchanged(1024, 7.25, 1.0), stepped(2, 7.25)]
    )
    for title, caption, table in (
        ("Attention over lengths and head sizes", ["Median time."], "study flash: median milliseconds"),
        ("The wire", ["Median time."], "collectives"),
        ("Attention on one device", [], "median milliseconds, both passes"),
        ("Models", ["Median time of forward, backward and optimizer."], STEPS),
        ("Data, optimizer and tensor parallelism", [], "a step"),
    ):
        captions, _, tables = drawn_and_listed(text, title)
        assert captions == caption
        assert list(tables) == [table]


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


def test_each_figure_shows_the_command_of_its_own_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = page([*rows(), *other_sweeps()])
    common = "flashspan bench context --ranks 1 2 --dtype {} --layers 2 --width {} --heads 4 --tokens 256"
    assert commands(text) == [
        common.format("float32", 64).replace("--dtype float32 ", ""),
        common.format("bfloat16", 64),
        common.format("float32", 128).replace("--dtype float32 ", ""),
        "flashspan plan draw --strategy ring --layout zigzag --ranks 2 --tokens 256",
    ]
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert all(("--width 128" in caption) == ("2x128" in caption) for caption in captions)
    monkeypatch.chdir(tmp_path)  # where the pictures go
    assert main(shlex.split(commands(text)[-1])[1:]) == 0


def test_the_command_of_data_parallelism_is_the_one_that_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def measure(num_ranks: int, only: Sequence[str], *, batch: int, **_: Any) -> list[Row]:
        asked.append((num_ranks, only, batch))
        return record.read(Path(__file__).parents[3] / "docs" / "benchmarks" / "data.jsonl")

    monkeypatch.chdir(tmp_path)  # where the rows go
    monkeypatch.setattr(data, "measure_ranks", measure)
    found = [
        replace(rows()[0], what="data", impl=name, shape="2x64 3x128 per rank", ranks=2)
        for name in ("context", "torch DDP")
    ]
    [shown] = commands(page(found))
    assert main(shlex.split(shown)[1:]) == 0
    assert asked == [(2, ("torch DDP", "context"), 3)]


def test_collectives_that_all_ran_out_of_memory_are_a_table_of_that() -> None:
    lost = replace(rows()[0], what="collective", impl="all-reduce", status=record.OUT_OF_MEMORY, bytes=4e11, more={})
    text = page([*rows(), lost])
    assert "The wire" in text
    assert '<td class="number">out of memory</td>' in text


def upgraded(row: Row, **changes: Any) -> Row:
    """A row measured again with a newer PyTorch, twice as fast."""
    return replace(row, torch="3", p50_ms=row.p50_ms / 2, tflops=2 * row.tflops, **changes)


def test_an_upgrade_is_not_taken_for_a_speed_up() -> None:
    # The second run was killed before the contiguous ring.
    both = [*rows(), *(upgraded(row) for row in rows() if row.impl != "ring contiguous")]
    found = find(both)
    assert "is fastest, 27.50 ms forward and backward, 1.82 times as fast as one device" in found[0]
    assert "Left out: 6 rows (context) of torch 2. " in found[-1]
    assert not any("contiguous" in text for text in found)
    assert "1.82x" in page(both)
    assert "3.64x" not in page(both)
    # Only the strategies were measured again: nothing to compare them with.
    assert not any("one device" in text for text in find([*rows(), *(upgraded(r) for r in rows() if r.ranks == 2)]))
    # The older one measured last.
    assert "55.00 ms" in find([*(upgraded(row) for row in rows()), *rows()])[0]


def test_attention_and_models_are_compared_on_one_device_only() -> None:
    def attention(impl: str, time: float, device: str) -> Row:
        return replace(rows()[0], what="attention", kind="both", impl=impl, p50_ms=time, device=device)

    found = find([attention("flashspan", 1.0, "old"), attention("flex", 2.0, "old"), attention("flex", 0.1, "new")])
    assert "ours runs at 2.00 times the speed of the fastest other on 1 shapes" in found[0]
    step = replace(rows()[0], what="model", kind="training", impl="flashspan, eager")
    assert "autocast" not in find([step, replace(step, dtype="bfloat16", device="new")])[0]
    half = replace(step, dtype="bfloat16", p50_ms=step.p50_ms / 2)
    assert find([step, half])[0] == "bfloat16 autocast: a training step is 2.00 times as fast."


def test_our_own_variants_are_not_others() -> None:
    def attention(impl: str, time: float, shape: str) -> Row:
        return replace(rows()[0], what="attention", kind="both", impl=impl, p50_ms=time, shape=shape)

    one = [attention("flashspan", 1.0, "A"), attention("flashspan-repeatable", 1.1, "A")]
    assert not any("the fastest other" in text for text in find(one))
    one += [attention("sdpa-cudnn", 2.0, "A"), attention("flex", 3.0, "A")]
    two = [attention("flashspan", 1.0, "B"), attention("flex", 8.0, "B"), attention("flashspan-portable", 0.5, "B")]
    [found] = find([*one, *two])
    assert "ours runs at 4.00 times the speed of the fastest other on 2 shapes" in found
    assert "from 2.00 (A, sdpa-cudnn) to 8.00 (B, flex)." in found


def lines_of(table: str) -> list[list[str]]:
    """The cells of a table of a page, its headings first."""
    parts = re.findall("<tr>(.*?)</tr>", table, flags=re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", part)] for part in parts]


def test_models_are_a_line_each_from_the_smallest_on() -> None:
    def measured(shape: str, dtype: str, impl: str, warmup: int = 5, what: str = "model") -> list[Row]:
        same: dict[str, Any] = {"what": what, "shape": shape, "dtype": dtype, "impl": impl, "std_ms": 0.5}
        same["more"] = {"warmup": warmup, "steps": 10}
        peaks = {"inference": 100.0, "training": 2048.0}
        found = [
            replace(rows()[0], kind=kind, mean_ms=10.0 + number, peak_mib=peaks.get(kind, math.nan), **same)
            for number, kind in enumerate(model.KINDS)
        ]
        return found[::-1]

    wanted = [
        ("tiny 4x512", "flashspan, eager", "float32"),
        ("small 4x128", "flashspan, eager", "bfloat16"),
        ("small 4x128", "plain, eager", "bfloat16"),
        ("small 4x128", "flashspan, eager", "float32"),
        ("small 4x1024", "flashspan, eager", "float32"),
        ("xl 4x128", "flashspan, eager", "float32"),
        ("2.7B 4x128", "flashspan, eager", "float32"),
        ("of-another-version 4x128", "flashspan, eager", "float32"),
    ]
    found = [row for shape, impl, dtype in reversed(wanted) for row in measured(shape, dtype, impl)]
    lost = next(row for row in found if row.shape.startswith("xl") and row.kind == "training")
    found[found.index(lost)] = replace(lost, status=record.OUT_OF_MEMORY, mean_ms=math.nan)
    unknown = next(row for row in found if row.shape.startswith("2.7B") and row.kind == "inference")
    found[found.index(unknown)] = replace(unknown, mean_ms=math.nan, std_ms=math.nan)
    for warmup in (10, 2):
        study = f"flashspan, eager, {warmup} warm-ups"
        found += measured("tiny 4x512", "float32", study, warmup, "warm-up")
        wanted.insert(1, ("tiny 4x512", study, "float32"))
    _, _, tables = drawn_and_listed(page(found), "Models")
    headings, *cells = lines_of(tables[STEPS])
    assert headings == ["model", "implementation", "dtype", *model.KINDS, "peak MiB"]
    assert [tuple(line[:3]) for line in cells] == wanted
    assert cells[0][3:] == ["10 ± 0.5", "11 ± 0.5", "12 ± 0.5", "13 ± 0.5", "14 ± 0.5", "2,048"]
    by_model = {line[0]: line for line in cells}
    assert by_model["xl 4x128"][-2:] == ["OOM", ""]
    slow = replace(found[0], mean_ms=12345.6, std_ms=678.9)
    assert model.table([slow]).cells[0][3] == "12,346 ± 679"  # and not 1.235e+04 ± 6.8e+02
    assert by_model["2.7B 4x128"][3:5] == ["", "11 ± 0.5"]


def masked(size: str, impl: str, forward: float, backward: float, **place: Any) -> list[Row]:
    """Rows of `bench sparse`: as fast per block as they are."""
    same = {"what": "sparse", "dtype": "bfloat16", "shape": size, "impl": impl, "more": {}, **place}
    times = {"forward": forward, "backward": backward}
    return [replace(rows()[0], kind=kind, p50_ms=time, tflops=60 / time, **same) for kind, time in times.items()]


def sparse_rows() -> list[Row]:
    """Two masks beside others, and a sweep."""
    found = masked("1x16x16384x128 window 1024", "flashspan intervals", 1.0, 4.0)
    found += masked("1x16x16384x128 window 1024", "flashspan blocks", 2.0, 3.0)
    found += masked("1x16x16384x128 window 1024", "flex", 2.5, 6.0)
    found += masked("1x16x16384x128 window 1024", "flashspan causal", 0.25, 0.25)  # another question
    found += masked("1x16x16384x64 random 10%", "flashspan blocks", 1.0, 2.0)
    found += masked("1x16x16384x64 random 10%", "flex", 1.5, 5.0)
    found += masked("1x16x8192x128 full", "flashspan intervals", 10.0, 20.0)
    found += masked("1x16x8192x128 random 50%", "flashspan blocks", 20.0, 25.0)
    found += masked("1x16x8192x128 random 2%", "flashspan blocks", 40.0, 80.0)
    return found


def test_sparse_masks_and_the_leaderboard_are_read_listed_drawn_and_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [replace(row, p50_ms=99.0) for row in sparse_rows()]  # of an earlier run
    record.append([*slow, *sparse_rows()], tmp_path / sparse.PATH.name)
    earlier, now = attended(16384, 5.25), attended(16384, 4.25)
    record.append([earlier, now], tmp_path / leaderboard.PATH.name)
    step = replace(now, shape="1.24B 1x8192", kind="step", p50_ms=130.0)
    record.append([replace(step, impl="another", p50_ms=195.0), step], tmp_path / "trainer.csv")
    assert main(["report", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert (
        "ours against FlexAttention on 2 masks: forward 1.50 (1x16x16384x64 random 10%) to 2.50 "
        "(1x16x16384x128 window 1024) times as fast, backward 2.00 (1x16x16384x128 window 1024) to 2.50 "
        "(1x16x16384x64 random 10%) times as fast."
    ) in found
    assert "the fastest other" not in found
    assert "Training and generating, times as fast as another: 1.50 in step of 1.24B 1x8192." in found
    text = (tmp_path / "report.html").read_text()
    captions, made_by, tables = drawn_and_listed(text, "Block-sparse attention")
    assert captions == ["Median time. Ideal: that of the dense kernel at 8,192 tokens, times the share."]
    assert made_by == ["flashspan bench sparse --rows sweep --no-others"]
    times, rates = map(lines_of, tables.values())
    assert times == [
        ["shape", "flashspan intervals", "flashspan blocks", "flex", "vs flex"],
        ["1x16x16384x128 window 1024", "1.000 / 4.000", "2.000 / 3.000", "2.500 / 6.000", "2.50x / 2.00x"],
        ["1x16x16384x64 random 10%", "", "1.000 / 2.000", "1.500 / 5.000", "1.50x / 2.50x"],
        ["1x16x8192x128 full", "10.00 / 20.00", "", "", ""],
        ["1x16x8192x128 random 50%", "", "20.00 / 25.00", "", ""],
        ["1x16x8192x128 random 2%", "", "40.00 / 80.00", "", ""],
    ]
    assert rates == [["blocks visited", "50%", "2%"], ["efficiency", "50% / 80%", "25% / 25%"]]
    _, _, tables = drawn_and_listed(text, "Leaderboard")
    [table] = tables.values()
    assert [line[:4] for line in lines_of(table)[1:]] == [[now.shape, now.impl, now.kind, "4.250"]]
    assert commands(text)[0] == "flashspan bench leaderboard"
    _, _, tables = drawn_and_listed(text, "Training and generating, beside transformers")
    [table] = tables.values()
    assert lines_of(table)[2][:4] == ["1.24B 1x8192", "flashspan", "step", "130.0"]
    assert "flashspan bench training" in text
    assert "Attention on one device" not in text


def test_a_sparse_sweep_without_its_dense_kernel_is_a_table_alone() -> None:
    left = [row for row in sparse_rows() if "full" not in row.shape]
    captions, _, tables = drawn_and_listed(page(left), "Block-sparse attention")
    assert captions == []
    assert len(tables) == 1
    one_pass = [row for row in sparse_rows() if row.kind == "forward"]  # killed between the two
    _, _, tables = drawn_and_listed(page(one_pass), "Block-sparse attention")
    assert lines_of(list(tables.values())[1])[1] == ["efficiency", "50% / -", "25% / -"]
    with pytest.raises(ValueError, match=r"has no shape like .*: another version wrote it"):
        page([replace(left[0], shape="1x16x16384 random")])


def test_sparse_masks_of_two_machines_are_compared_and_listed_apart() -> None:
    size = "1x16x16384x128 window 1024"
    both = [*masked(size, "flashspan blocks", 1.0, 1.0), *masked(size, "flex", 2.0, 2.0, **GPU)]
    assert not any("FlexAttention" in text for text in find(both))
    _, _, tables = drawn_and_listed(page(both), "Block-sparse attention")
    assert len(tables) == 2
    both += masked(size, "flashspan blocks", 1.0, 0.5, **GPU)
    assert f"on 1 masks: forward 2.00 ({size}) times as fast, backward 4.00 ({size}) times as fast." in find(both)[0]


@pytest.mark.parametrize("name", list(sparse.CASES))
def test_the_command_of_sparse_masks_measures_those(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = masks.random_blocks
    monkeypatch.setattr(masks, "random_blocks", lambda T, share, **_: on_cpu(T, share, device="cpu"))
    shapes = [str(make()) for make in sparse.CASES[name]()]
    asked: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(sparse, "run", lambda names, *, others: asked.append((names, others)))
    for impl in ("flex", "flashspan blocks"):
        [shown] = commands(page([row for shape in shapes for row in masked(shape, impl, 1.0, 1.0)]))
        assert main(shlex.split(shown)[1:]) == 0
    assert asked == [([name], True), ([name], name == "window")]


def test_a_device_of_more_threads_is_another_device() -> None:
    def with_threads(row: Row, threads: int) -> Row:
        return replace(row, more={**row.more, "threads": threads})

    same = [with_threads(row, 1) for row in rows()]
    assert find(same) == find(rows())
    other = [with_threads(row, 2 if row.impl == ALONE else 1) for row in rows()]
    assert find(other)[0].startswith("2x64, 4/2 heads, 256 tokens, threads per rank 1: on 2 ranks ring zigzag")
    assert not any("one device" in text for text in find(other))
    assert "x</td>" not in page(other).replace("1.00x</td>", "")  # no speed-up beside the strategies


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 0), ("tokens", "x"), ("hidden", "x"), ("mfu", []), ("product_share", {}), ("threads", [])],
)
def test_a_row_with_something_else_in_place_of_a_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"has {name} {value!r}: another version wrote it")):
        page([replace(row, more={**row.more, name: value}) for row in rows()])


def test_what_was_not_measured_is_not_spoken_of() -> None:
    bare = {"hidden": None, "mfu": None, "product_share": None}
    unknown = [replace(r, peak_mib=math.nan, tflops=math.nan, more={**r.more, **bare}) for r in rows()]
    unknown.append(replace(rows()[0], what="collective", impl="all-reduce", more={"alpha_us": 3.0, "gb_per_s": None}))
    assert "1.82 times as fast" in find(unknown)[0]
    words = ("nan", "memory", "bound by", "hidden", "scaling", "fit the measured")
    assert not [text for text in find(unknown) if any(word in text for word in words)]
    assert "nan" not in re.sub("<svg.*?</svg>", "", page(unknown), flags=re.DOTALL)


def test_the_file_that_cannot_be_written_is_the_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.append(rows(), tmp_path / "context.jsonl")
    figures = tmp_path / "context.jsonl" / "figures"  # a file where a folder should be
    assert main(["report", str(tmp_path), "--figures", str(figures)]) == 2
    said = capsys.readouterr().err
    assert f"{figures / 'latency.svg'} cannot be written" in said
    assert "give another --figures" in said


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
