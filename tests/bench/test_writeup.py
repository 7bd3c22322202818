"""The write-up is made from rows: with none it says what is missing, with all it answers every question."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashspan.bench import leaderboard, precision, profile, record, study, writeup, writeup_jobs
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


def rows_of(part: str) -> list[Row]:
    """All rows of a part of the sweep, made up, each of a millisecond."""
    jobs = writeup_jobs.sections(torch.device("cpu"))[part]
    return [made_up(row, 0) for job in jobs for row in job.expected]


def of_leaderboard(impl: str, milliseconds: float, commit: str) -> Row:
    times = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), milliseconds)
    return Row("a chip", "2", "3", commit, "1x16/16x16384x64 causal", impl, "both", **times, tflops=500.0, error=2e-3,
               peak_mib=1.0, what="leaderboard")  # fmt: skip


def test_without_rows_it_says_what_is_missing(tmp_path: Path) -> None:
    text = writeup.Writer([], tmp_path).page()
    assert text.count("Not measured yet: `") == text.count("\n## ") == 11
    assert text.count("Not measured yet: `flashspan bench leaderboard` on a GPU") == 1
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
    folder = tmp_path / "writeup"
    record.append([made_up(row, i) for i, row in enumerate(expected)], folder / "writeup.jsonl")
    record.append([of_leaderboard("flashspan", 4.0, "abc")], tmp_path / leaderboard.PATH.name)
    writeup.write(folder, tmp_path / "page.md")
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
        assert (folder / f"{name}.svg").exists()
    for line in text.splitlines():
        if line.startswith("| ---"):
            assert line.endswith("|")


def test_the_page_is_what_its_rows_say_today(tmp_path: Path) -> None:
    folder = tmp_path / "writeup"
    folder.mkdir()
    shutil.copy(ROOT / writeup.FOLDER / "writeup.jsonl", folder)
    shutil.copy(ROOT / leaderboard.PATH, tmp_path)
    writeup.write(folder, tmp_path / "page.md")
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
        if not parts:
            continue
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


@pytest.mark.parametrize(("here", "told"), [(2.0, True), (0.92, False), (1.08, False)])
def test_two_times_of_the_same_settings_are_explained_if_they_differ(tmp_path: Path, here: float, told: bool) -> None:
    warmups = [replace(row, mean_ms=here) for row in rows_of("warm-up")]
    profiles = [replace(row, more=row.more | {"busy_ms": 0.25}) for row in rows_of("profiles")]
    text = writeup.Writer([*rows_of("sizes"), *warmups, *profiles], tmp_path).page()
    words = (
        f"The table of sizes has 1.00 ms for the training step that has {here:.2f} here, with the same settings and "
        "the same commit, in another process and other minutes: a step that is bound by the host's launches, as its "
        "kernels take 0.2 ms of it (1.1.4)."
    )
    assert (words in text) == told
    assert ("The table of sizes has" in text) == told


def test_launches_are_blamed_only_where_kernels_take_less(tmp_path: Path) -> None:
    warmups = [replace(row, mean_ms=2.0, commit="another") for row in rows_of("warm-up")]
    text = writeup.Writer([*rows_of("sizes"), *warmups, *rows_of("profiles")], tmp_path).page()
    assert "with the same settings but not the same commit, in another process and other minutes.\n" in text


def test_ratios_are_those_of_the_numbers_in_the_table(tmp_path: Path) -> None:
    """Medians that would say otherwise are not in the tables, and must not be in the sentences."""

    def is_slow(row: Row) -> bool:
        return row.more["attention"] == "plain" and (row.dtype == "float32" or row.impl == writeup.EAGER)

    mixed, compiled, lengths = map(rows_of, ("mixed", "compiled", "lengths"))
    slow = [replace(row, mean_ms=3.0) if row.dtype == "float32" else row for row in mixed]
    assert "so many times as fast: 3.00 (small), 3.00 (medium)" in writeup.Writer(slow, tmp_path).page()
    slow = [replace(row, mean_ms=3.0) if is_slow(row) else row for row in [*mixed, *compiled]]
    text = writeup.Writer(slow, tmp_path).page()
    assert "Forward is 3.00 (2.7B) to 3.00 (xl) times as fast compiled" in text
    assert "A training step is 3.00 (2.7B) to 3.00 (xl) times as fast compiled" in text
    slow = [replace(row, mean_ms=3.0) if is_slow(row) else row for row in lengths]
    assert re.search(r"a step is 3.00 \(.*\) to 3.00 \(.*\) times as fast", writeup.Writer(slow, tmp_path).page())


def test_ratios_on_the_page_follow_from_its_tables() -> None:
    page = (ROOT / writeup.PAGE).read_text(encoding="utf-8")
    section = page.split("## 1.3.1")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (\S+) 4x128 \| (.*) \|$", section, re.MULTILINE)
    times = {name: [float(cell.replace(",", "")) for cell in cells.split(" | ")] for name, cells in lines}
    for place, what in enumerate(("Forward", "A training step")):
        said = re.search(rf"^{what} is (\S+) \((\S+)\) to (\S+) \((\S+)\) times", section, re.MULTILINE)
        assert said is not None
        gains = {name: row[place] / row[place + 2] for name, row in times.items()}
        for ratio, name, pick in ((said[1], said[2], min), (said[3], said[4], max)):
            assert name == pick(gains, key=lambda key: gains[key])
            assert float(ratio) == pytest.approx(gains[name], abs=0.01)


def test_the_models_at_both_ends_are_named(tmp_path: Path) -> None:
    times = {"small 4x128": 2.5, "xl 4x128": 1.5}
    profiles = [replace(row, p50_ms=times.get(row.shape, 2.0)) for row in rows_of("profiles")]
    text = writeup.Writer([*rows_of("sizes"), *profiles], tmp_path).page()
    assert "profiler takes 1.50 (xl 4x128) to 2.50 (small 4x128) times the benched time" in text


def flash_page(folder: Path, times: dict[tuple[str, int, int], tuple[float, float, float]]) -> str:
    """The section on our attention beside PyTorch's, ours 2 ms and the other's 4 but for these cells: ours, how far its
    percentiles lie apart, and the other's."""
    rows = []
    for row in rows_of("flash"):
        cell = (row.dtype, row.more["head_dim"], row.more["tokens"])
        ours, apart, theirs = times.get(cell, (2.0, 0.0, 4.0))
        middle, apart = (ours, apart) if row.impl == "flashspan" else (theirs, 0.0)
        rows.append(replace(row, p20_ms=middle, p50_ms=middle, p80_ms=middle + apart, tflops=8 / middle))
    return writeup.Writer(rows, folder).page().split("## 1.3.2")[1].split("\n## ")[0]


def test_where_ours_is_slower_is_said_and_why(tmp_path: Path) -> None:
    launched = {("bfloat16", 16, 128): (1.0, 0.5, 0.5), ("bfloat16", 16, 512): (1.4, 0.5, 1.12)}
    kernels = {("float32", 128, 2**power): (2.0 ** (power - 10), 0.0, 4.0 ** (power - 13)) for power in range(11, 17)}
    text = flash_page(tmp_path, launched | kernels)
    assert "ours is 0.03 (1x2048x128 causal in float32) to 2.00 (1x8192x64 causal in float32) times as fast." in text
    assert "It is slower in 7 of 80 cells:" in text
    assert "| launches | bfloat16 | 16 | 2 of 2 | 128, 512 | 0.50 to 0.80 |" in text
    assert "| kernels | float32 | 128 | 5 of 10 | 2048, 4096, 8192, 16384, 32768 | 0.03 to 0.50 |" in text
    assert "from 128 to 512 tokens ours takes 1.0 to 1.4 ms in these cells whatever the length" in text
    assert "float32 with head size 128 takes us 1.00, 1.00, 1.00, 1.00, 2.00, 2.00, 2.00, 2.00, 2.00 times" in text
    assert "our float32 runs at 4 TFLOP/s (head size 16), 4 TFLOP/s (head size 32)" in text


def test_where_ours_is_nowhere_slower_nothing_is_explained(tmp_path: Path) -> None:
    text = flash_page(tmp_path, {})
    assert not re.search("slower|Launches|Kernels", text)


def test_the_figures_show_both_wide_heads(tmp_path: Path) -> None:
    flash_page(tmp_path, {})
    for dtype in ("bfloat16", "float32"):
        picture = (tmp_path / f"flash-{dtype}.svg").read_text(encoding="utf-8")
        for name in ("flashspan", "pytorch"):
            assert all(f">{name}, head size {head_dim}<" in picture for head_dim in (64, 128))


def test_the_leaderboard_shows_the_newest_row_of_each_implementation(tmp_path: Path) -> None:
    rows = [
        of_leaderboard("flashspan", 5.0, "old"),
        of_leaderboard("flashspan untraced", 6.0, "old"),
        of_leaderboard("flashspan", 4.0, "new"),
    ]
    text = writeup.Writer(rows, tmp_path).page().split("## 1.3.3")[1].split("\n## ")[0]
    assert re.findall(r"^\| (flash.*)$", text, re.MULTILINE) == [
        "flashspan | 1x16/16x16384x64 causal | new | 4.000 | 4.000 to 4.000 | 500.0 | 2.00e-03 |",
        "flashspan untraced | 1x16/16x16384x64 causal | old | 6.000 | 6.000 to 6.000 | 500.0 | 2.00e-03 |",
    ]
    assert "`flashspan bench leaderboard` runs the course's test on a chip" in text
    assert "Not measured yet" not in text
