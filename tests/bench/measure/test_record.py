"""Rows, sweeps and tables: no measurement is lost or repeated, and no number is typed by hand."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from flashspan.bench.measure import record, sweep
from flashspan.bench.measure.record import Row
from flashspan.bench.report import page as report
from flashspan.bench.report import tables
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask
from flashspan.masks.patterns import documents, random_blocks

WHERE = {"device": "toy", "torch": "2", "triton": "3", "commit": "abc"}


def make(shape: str, samples: Sequence[float] = (), **rest: object) -> Row:
    return record.row(
        WHERE, what="toy", shape=shape, impl="ours", kind="both", dtype="float32", samples_ms=samples, **rest
    )


def test_every_field_survives_json_lines(tmp_path: Path) -> None:
    rows = [make("a", [1.0, 2.0, 3.0], tflop=0.5, more={"x": 1.5, "y": "<b>"}), make("b", ranks=4, bytes=2.0**20)]
    record.append(rows, tmp_path / "rows.jsonl")
    back = record.read(tmp_path / "rows.jsonl")
    assert repr(back) == repr(rows)  # nan is not equal to itself
    assert back[0].p50_ms == 2.0
    assert back[0].tflops == 250.0
    assert back[0].std_ms == 1.0
    assert math.isnan(back[1].p50_ms)


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record.append([make("a"), make("b")], path)
    path.write_text(path.read_text()[:-40])
    record.append([make("c")], path)
    assert [row.shape for row in record.read(path)] == ["a", "c"]


def test_rows_of_another_version_and_empty_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text('{"speed": 3}\n')
    with pytest.raises(ValueError, match=r"old\.jsonl, line 1, does not hold a row of this version"):
        record.read(tmp_path / "old.jsonl")
    record.append([make("a", [1.0], more={"x": 1})], tmp_path / "new.jsonl")
    line = (tmp_path / "new.jsonl").read_text()
    for old, new in (('"p50_ms": 1.0', '"p50_ms": "1"'), ('"p50_ms": 1.0', '"p50_ms": 0'), ('"ranks": 1', '"ranks": 0'),
                     ('"p80_ms": 1.0', '"p80_ms": NaN'), ('{"x": 1}', '"x"'), ('"a"', "7")):  # fmt: skip
        (tmp_path / "old.jsonl").write_text(line.replace(old, new))
        with pytest.raises(ValueError, match=r"old\.jsonl, line 1, does not hold a row of this version"):
            record.read(tmp_path / "old.jsonl")
    (tmp_path / "new.jsonl").unlink()
    (tmp_path / "old.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="no rows in"):
        report.read(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        report.read(tmp_path / "nowhere")


def test_a_sweep_resumes_where_it_stopped(tmp_path: Path) -> None:
    path, ran = tmp_path / "rows.jsonl", []

    def job(name: str, error: Exception | None = None) -> sweep.Job:
        def measure() -> list[Row]:
            ran.append(name)
            if error is not None:
                raise error
            return [make(name, [1.0])]

        return sweep.Job((make(name),), measure)

    with pytest.raises(KeyboardInterrupt):
        sweep.run([job("a"), job("b", KeyboardInterrupt())], path)  # type: ignore[arg-type]
    jobs = [job("a"), job("b", torch.cuda.OutOfMemoryError("CUDA out of memory")), job("c", KeyError("no"))]
    outcome = sweep.run(jobs, path)
    assert ran == ["a", "b", "b", "c"]
    assert [row.status for row in outcome.rows] == ["ok", "out of memory", "failed: 'no'"]
    assert [left.name for left in sweep.left(jobs, path)] == [jobs[2].name]  # a failure may have been temporary
    outcome = sweep.run(jobs, path)
    assert outcome.num_measured == 1
    assert outcome.note(path) == f"1 measured, 2 recorded earlier (--again repeats them), rows in {path}"
    outcome = sweep.run(jobs, path, again=True)
    assert outcome.num_measured == 3
    assert outcome.note(path) == f"3 measured, rows in {path}"
    assert sweep.run([job("d")], path, seconds=-1.0).num_left == 1


def measure_well(name: str) -> list[Row]:
    return [make(name, [1.0], more={"process": os.getpid()})]


def measure_badly(how: str) -> list[Row]:
    if how == "dies":
        os._exit(7)
    if how == "hangs":
        time.sleep(600)
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.timeout(120)
def test_what_dies_or_hangs_costs_itself(tmp_path: Path, quick_processes: None) -> None:
    def good(name: str, process: str | None = "timed") -> sweep.Job:
        return sweep.Job((make(name),), partial(measure_well, name), process=process)

    def bad(how: str) -> sweep.Job:
        return sweep.Job((make(how),), partial(measure_badly, how))

    path = tmp_path / "rows.jsonl"
    jobs = [
        good("a"),
        bad("dies"),
        good("b"),
        good("new", None),
        bad("oom"),
        good("c"),
        bad("hangs"),
        good("d"),
        good("e", "other"),
    ]
    with sweep.Apart(limit=5.0) as apart:
        rows = sweep.run(jobs, path, attempt=apart).rows
    assert [row.shape for row in rows] == ["a", "dies", "b", "new", "oom", "c", "hangs", "d", "e"]
    status = {row.shape: row.status for row in rows}
    assert status["dies"] == "failed: its process died (exit code 7)"
    assert status["hangs"] == "failed: not done after 5 s"
    assert status["oom"] == record.OUT_OF_MEMORY
    process = {row.shape: row.more["process"] for row in rows if row.ok}
    assert process["b"] == process["c"]  # neither an out of memory nor a fresh process in between ends it
    assert len({process[name] for name in "abde"} | {process["new"], os.getpid()}) == 6
    assert [job.expected[0].shape for job in sweep.left(jobs, path)] == ["dies", "hangs"]
    # A job that is not done at the deadline is left for the next run, without a row.
    with sweep.Apart(deadline=time.monotonic() + 1.0) as apart:
        outcome = sweep.run([bad("hangs"), good("e")], tmp_path / "late.jsonl", attempt=apart)
    assert (outcome.num_measured, outcome.num_left, outcome.rows) == (0, 2, [])


def leave_a_mark(folder: str, name: str) -> None:
    if name == "dies":
        os._exit(1)
    (Path(folder) / f"{name} {os.getpid()}").touch()
    if name == "fails":
        raise ValueError(name)


@pytest.mark.timeout(120)
def test_what_jobs_share_is_prepared_once(tmp_path: Path, quick_processes: None) -> None:
    names = ("dies", "x", "y", "x", "fails", "z")
    jobs = [sweep.Job((make(n),), partial(measure_well, n), partial(leave_a_mark, str(tmp_path), n)) for n in names]
    assert (
        sweep.prepare([*jobs, sweep.Job((make("none"),), partial(measure_well, "none"))], seconds=60, num_processes=2)
        == 3
    )
    assert sorted(path.name.split()[0] for path in tmp_path.iterdir()) == ["fails", "x", "y", "z"]
    assert sweep.prepare([], seconds=1) == 0


def test_other_settings_are_measured_anew(tmp_path: Path) -> None:
    def job(steps: int) -> sweep.Job:
        settings = {"steps": steps, "third": 1 / 3}
        return sweep.Job((make("a", more=settings),), lambda: [make("a", [1.0], more={**settings, "found": 2.0})])

    path = tmp_path / "rows.jsonl"
    assert [sweep.run([job(steps)], path).num_measured for steps in (5, 5, 6)] == [1, 0, 1]


def test_a_folder_that_cannot_be_written_to_is_found_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = sweep.Job((make("a"),), lambda: pytest.fail("measured before looking"))
    with pytest.raises(ValueError, match="rows cannot be written to"):
        sweep.run([job], tmp_path / "file" / "rows.jsonl")


def test_rows_are_matched_by_what_was_measured_where() -> None:
    row = make("a")
    assert row.key == replace(row, commit="def", p50_ms=3.0).key
    assert row.key != replace(row, device="other").key
    assert record.newest([row, replace(row, commit="def")])[0].commit == "def"


def test_tables_show_numbers_statuses_and_escape() -> None:
    rows = [make("<script>", [1.23456]), replace(make("b|c"), status="out of memory")]
    shown = tables.pivot(
        "t", rows, line=lambda r: (r.shape,), names=("shape",), column=lambda r: r.impl, cell=lambda r: r.p50_ms
    )
    assert "1.235" in shown.markdown()
    assert "OOM" in shown.markdown()
    assert "b\\|c" in shown.markdown()
    assert "<script>" not in shown.html()
    assert shown.rich().row_count == 2


def test_a_table_is_cut_for_a_narrow_terminal_and_whole_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    headings = ("strategy", *(f"heading {i}" for i in range(8)))
    table = tables.Table("t", headings, (("ring zigzag", *"12345678"),))
    tables.show_tables([tables.Table("wider than the table below", ("x",), (("1",),)), table], "a note")
    assert capsys.readouterr().out.startswith("wider than the table below\n")
    tables.show_tables([table], "a note")
    assert "heading 7" in next(line for line in capsys.readouterr().out.splitlines() if "strategy" in line)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    tables.show_tables([table], "a note " * 20)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, shown[:-1])) <= 60
    assert sum("ring zigzag" in line for line in shown) == 3
    assert all(any(heading in line for line in shown) for heading in headings)
    assert [part.headings[0] for part in table.parts(5)] == ["strategy"] * 8  # no column fits: one per part


def test_an_absent_device_is_named() -> None:
    with pytest.raises(ValueError, match="auto, cpu or cuda"):
        record.find_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA device: found none"):
            record.find_device("cuda")


def test_a_row_can_be_had_as_a_file_gives_it_back(tmp_path: Path) -> None:
    random = Random(0)
    made = [make(str(i), [random.uniform(1, 100) for _ in range(5)], tflop=random.random(), more={"x": random.random()})
            for i in range(100)]  # fmt: skip
    made.append(make("unknown", more={"x": math.nan}))
    record.append(made, tmp_path / "rows.jsonl")
    assert repr(record.read(tmp_path / "rows.jsonl")) == repr([record.kept(row) for row in made])
    assert record.kept(made[0]) != made[0]


@pytest.mark.parametrize("mask", [EVERYTHING, CAUSAL, Band(-99, 0), documents([300, 1001]), random_blocks(1301, 0.3)])
def test_an_output_s_error_is_that_of_rows_from_the_first_to_the_last(mask: Mask) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 1301, 16, generator=generator) for heads in (2, 1, 1))
    out = reference.forward(q, k, v, Problem(mask, 0.25)).out
    assert record.output_error(q, k, v, out, mask) < 1e-6
    for rows in (slice(0, 3), slice(600, 603), slice(1296, 1299)):
        worse = out.clone()
        worse[:, :, rows] += 0.1 * out.norm() / 1301
        assert record.output_error(q, k, v, worse, mask) > 1e-4


def test_a_csv_with_a_field_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "attention.csv").write_text('"' + "x" * 200_000)
    with pytest.raises(ValueError, match=r"attention\.csv does not hold rows of this version"):
        record.read(tmp_path / "attention.csv")


def test_rows_are_not_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.jsonl")
    with pytest.raises(ValueError, match=r"data\.jsonl is not a regular file"):
        record.append([], tmp_path / "data.jsonl")


def test_rows_say_whether_the_package_differs_from_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were appended to docs/ do not count as a difference."""
    for name in ("flashspan/bench/measure/record.py", "docs/rows.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(record, "__file__", str(tmp_path / "flashspan/bench/measure/record.py"))
    person = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "."], [*person, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "docs/rows.csv").write_text("more")
    found = record.commit.__wrapped__()
    assert found.isalnum()
    (tmp_path / "flashspan/new.py").write_text("")
    assert record.commit.__wrapped__() == found + "+"
