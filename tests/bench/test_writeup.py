"""The write-up is made from rows: with none it says what is missing, with all it answers every question."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashspan.bench import precision, profile, record, study, writeup, writeup_jobs
from flashspan.bench.record import Row

ROOT = Path(__file__).parent.parent.parent


def made_up(row: Row, number: int) -> Row:
    """An expected row as if it had been measured."""
    more = dict(row.more)
    if row.what == "profile":
        parts = dict(zip(profile.PARTS, (2.0, 3.0, 1.0, 2.0), strict=True))
        more |= {"product_share": 0.7, "other_share": 0.3, "top": [["gemm", 3.0, 12]], "parts": parts}
        more |= {"others": [["elementwise", 1.0], ["reduce", 0.5]], "busy_ms": 10.0, "head_dim": 64}
    if row.what == "memory":
        phases = [["forward", 0.0, 1.0], ["backward", 1.0, 3.0]]
        largest = [[2.0**21, "forward > layer", 3]]
        more["timeline"] = {
            "held": 1.0,
            "times": [0.0, 2.0],
            "allocated": [2.0, 2.0**30],
            "phases": phases,
            "largest": largest,
        }
    if row.what == "precision":
        pairs = [["logits", "float16"]]
        more |= {"sums": precision.accumulate(), "float16": pairs, "bfloat16": pairs, "squares": [["float16", "inf"]]}
    status = record.OUT_OF_MEMORY if row.what == "study eager" and more["tokens"] == 16384 else "ok"
    time = 1.0 + number % 7
    return replace(
        row, p20_ms=time, p50_ms=time, p80_ms=time, mean_ms=time, std_ms=0.1, peak_mib=2048.0, status=status, more=more
    )


def test_without_rows_it_says_what_is_missing(tmp_path: Path) -> None:
    text = writeup.Writer([], tmp_path).page()
    assert text.count("Not measured yet: `python") == text.count("\n## ") == 10
    assert not re.search(r"\d+ ms|times as fast", text)


def test_eager_rows_do_not_stand_for_compiled_ones(tmp_path: Path) -> None:
    jobs = writeup_jobs.measurements(torch.device("cpu"))
    eager = [row for job in jobs for row in job.expected if row.what == "model" and row.impl == writeup.EAGER]
    text = writeup.Writer([made_up(row, i) for i, row in enumerate(eager)], tmp_path).page()
    assert "Not measured yet" in text.split("## 1.3.1")[1].split("##")[0]


def test_with_all_rows_every_question_is_answered(tmp_path: Path) -> None:
    jobs = writeup_jobs.measurements(torch.device("cpu"))
    expected = [row for job in jobs for row in job.expected]
    assert len({row.key for row in expected}) == len(expected)
    record.append([made_up(row, i) for i, row in enumerate(expected)], tmp_path / "writeup.jsonl")
    writeup.write(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "Not measured yet" not in text
    for words in (
        "Backward takes",
        "Without warm-up",
        "Matrix products take 70%",
        "In 20 of 20 cases inference and a training step have the same longest kernel. It is a product everywhere",
        "(c) Besides products, in inference: elementwise up to 10%; reduce up to 5%.",
        "softmax takes 0.25 to 0.25 of the time of the two products, for 0.020 to 0.020 of their operations",
        "So are scaling and mask, which take 0.75 to 0.75 of it",
        "A training step in bfloat16",
        "4 x 512 x 2560 x 4 / 1024² = 20 MiB",
        "Peaks of the phases of a training step: forward 0.0 GiB, backward 1.0 GiB",
        "The largest allocations of inference: 3 x 2.0 MiB in forward > layer",
        "The smallest that runs out of memory is 8x16384x16",
        "With our attention a step is",
        "asks for them: flashspan attention at 512 tokens, plain attention at 4096 and 16384 tokens.",
        "Both passes: ours is",
    ):
        assert words in text
    assert "OOM" in text
    for name in ("flash-bfloat16", "flash-float32", "memory-inference", "memory-training"):
        assert (tmp_path / f"{name}.svg").exists()
    for line in text.splitlines():
        if line.startswith("| ---"):
            assert line.endswith("|")


def test_the_page_is_what_its_rows_say_today(tmp_path: Path) -> None:
    shutil.copy(ROOT / writeup.FOLDER / "writeup.jsonl", tmp_path)
    writeup.write(tmp_path, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / writeup.PAGE).read_text()


def test_cells_that_are_measured_are_not_called_unasked(tmp_path: Path) -> None:
    """Only ours at 256 tokens: whatever else is missing of that line is a job that is left, and named as that."""
    jobs = writeup_jobs.sections(torch.device("cpu"))["lengths"]
    rows = [made_up(row, 0) for job in jobs for row in job.expected]
    few = [row for row in rows if row.more["attention"] == "flashspan" and row.more["tokens"] == 256]
    text = writeup.Writer(few, tmp_path).page()
    assert "Empty cells" not in text
    assert "Not measured yet: 22 of 27 jobs" in text


def test_a_section_says_what_is_missing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeup.Writer, "picture", lambda *_: None)

    def sections(rows: list[Row]) -> dict[str, str]:
        page = writeup.Writer(rows, tmp_path).page()
        return {text.split("\n")[0]: text for text in page.split("\n## ")[1:]}

    for title, parts, _ in writeup.Writer([], tmp_path).outline():
        jobs = [job for part in parts for job in writeup_jobs.sections(torch.device("cpu"))[part]]
        rows = [made_up(row, i) for job in jobs for i, row in enumerate(job.expected)]
        assert "Not measured yet" not in sections(rows)[title]
        last = {row.key for row in jobs[-1].expected}
        found = sections([row for row in rows if row.key not in last])[title]
        if len(jobs) == 1:
            assert "Not measured yet: `python" in found
            continue
        assert f"Not measured yet: 1 of {len(jobs)} jobs of this section ({jobs[-1].name})" in found
        # A failure is not a result; running out of memory is one.
        for status, missing in (("failed: no", True), (record.OUT_OF_MEMORY, False)):
            found = sections([replace(row, status=status) if row.key in last else row for row in rows])[title]
            assert ("Not measured yet" in found) == missing


def test_the_sweep_holds_what_the_assignment_asks_for_the_most_telling_first() -> None:
    jobs = writeup_jobs.measurements(torch.device("cpu"))
    rows = [row for job in jobs for row in job.expected]
    found = {(row.what, row.shape, row.impl, row.dtype, row.kind) for row in rows}
    for size in writeup_jobs.SIZES:
        for impl, dtype in ((writeup.EAGER, "float32"), (writeup.EAGER, "bfloat16"), (writeup.COMPILED, "bfloat16")):
            for kind in ("forward", "backward", "inference", "training"):
                assert ("model", f"{size} 4x128", impl, dtype, kind) in found
        for length in (128, 256, 512, 1024):
            for kind in ("inference", "training"):
                assert ("profile", f"{size} 4x{length}", writeup.EAGER, "float32", kind) in found
    for dtype in ("float32", "bfloat16"):
        for length in (128, 256, 512):
            assert ("model", f"2.7B 4x{length}", writeup.EAGER, dtype, "training") in found
    assert sum(row.what == "study flash" for row in rows) == 10 * 4 * 2 * 2 * 3
    assert sum(row.what == "study eager" for row in rows) == 5 * 4 * 2 * 2
    assert [row.more["warmup"] for row in rows if row.what == "warm-up" and row.kind == "training"] == [0, 1, 2, 5]
    # A part is finished before the next begins, and what nobody asked for comes last.
    place = {job.expected[0].key: number for number, job in enumerate(jobs)}
    parts = writeup_jobs.sections(torch.device("cpu"))
    ends = [max(place[job.expected[0].key] for job in part) for part in parts.values()]
    assert ends == sorted(ends)
    assert (next(iter(parts)), list(parts)[-1]) == ("sizes", "lengths")
    # Shared jobs have the same settings in every part: else each would undo the other's.
    for part in parts.values():
        for job in part:
            assert [row.more for row in job.expected] == [row.more for row in jobs[place[job.expected[0].key]].expected]


def test_what_is_compiled_ahead_and_which_process_measures() -> None:
    jobs = writeup_jobs.measurements(torch.device("cpu"))
    wanted = [job.prepare for job in jobs if job.prepare is not None]
    assert {job.expected[0].what for job in jobs if job.prepare is not None} == {"model", "study eager", "study flash"}
    assert len({(ready.func, ready.args) for ready in wanted}) == 5 + 5 + 4 * 2  # sizes; lengths; head sizes and dtypes
    # The profiler's process times nothing, and nothing that was run before warms up the warm-up study.
    apart = {"profile": "profiled", "memory": "profiled", "warm-up": None}
    assert all(job.process == apart.get(job.expected[0].what, "timed") for job in jobs)
    study.compile_ours((16, 48), 16, "float32", torch.device("cpu"))


def test_a_part_goes_on_where_the_last_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_processes: None
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        writeup_jobs, "sections", lambda device: {"precision": [writeup_jobs.precision_job(cpu)],
                                                  "flash": study.jobs("flash", (16,), (16,), cpu, 1)[1:]}
    )  # fmt: skip
    monkeypatch.setattr(writeup_jobs, "COMPILER", ())
    assert writeup_jobs.measure(0.0, tmp_path, cpu) == 3
    assert writeup_jobs.measure(1.0, tmp_path, cpu) == 0
    rows = record.read(tmp_path / "writeup.jsonl")
    assert [row.impl for row in rows] == ["autocast", *["flashspan"] * 3, *["pytorch"] * 3]
    assert all(row.ok for row in rows)
    assert writeup_jobs.measure(1.0, tmp_path, cpu) == 0
    assert "nothing left to measure" in capsys.readouterr().out
    writeup.main(["left", "--folder", str(tmp_path)])
    assert "flash: 0 of 1 jobs left" in capsys.readouterr().out


def test_tables_are_in_the_order_of_tokens_and_sizes_whenever_rows_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeup.Writer, "picture", lambda *_: None)
    jobs = [job for job in writeup_jobs.measurements(torch.device("cpu")) if job.expected[0].what != "warm-up"]
    rows = [made_up(row, i) for job in reversed(jobs) for i, row in enumerate(job.expected)]
    sections = writeup.Writer(rows, tmp_path).page().split("\n## ")[1:]

    def first(title: str) -> list[str]:
        [section] = [section for section in sections if section.startswith(title)]
        return list(dict.fromkeys(re.findall(r"^\| ([^|]*\d[^|]*|small|medium|large|xl) \|", section, re.MULTILINE)))

    by_length = [f"{size} 4x{tokens}" for tokens in writeup_jobs.LENGTHS for size in writeup_jobs.SIZES]
    assert first("1.1.4") == by_length
    assert first("1.1.3 Forward") == first("1.3.1") == by_length[:5]
    assert first("1.1.5 (c)") == list(writeup_jobs.SIZES)
    assert first("1.1.6") == ["128", "256", "512"]
    assert first("1.2.1") == [f"8x{n}x{d}" for d in study.HEAD_DIMS for n in study.EAGER_LENGTHS]
    assert first("1.3.2") == [f"1x{n}x{d} causal" for d in study.HEAD_DIMS for n in study.FLASH_LENGTHS]
    [lengths] = [section for section in sections if section.startswith("Longer contexts")]
    wanted = [(size, str(n)) for n in writeup_jobs.LENGTHS[1:] for size in writeup_jobs.SIZES]
    wanted += [("llama-3.2-1b", "4096"), ("llama-3.2-1b", "16384")]
    assert re.findall(r"^\| (\S+) \| (\d+) \|", lengths, re.MULTILINE) == 2 * wanted


def test_the_page_in_docs_is_the_one_the_rows_make(tmp_path: Path) -> None:
    file = ROOT / writeup.FOLDER / "writeup.jsonl"
    rows = record.read(file) if file.exists() else []
    assert (ROOT / writeup.PAGE).read_text(encoding="utf-8") == writeup.Writer(rows, tmp_path).page()
