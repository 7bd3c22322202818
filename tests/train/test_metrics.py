"""Errors while metrics are written or shown do not end a run."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashspan.plan.devices import DEVICES
from flashspan.train import metrics
from flashspan.train.metrics import Display, StepMetrics, describe, read_metrics


def row(step: int) -> StepMetrics:
    return StepMetrics(step, 1.0, 1.0, 1e-3, 1.0, 0.1, 0.1, 0.1)


def steps(folder: Path) -> list[int]:
    return [each["step"] for each in read_metrics(folder / "metrics.jsonl")]


def test_a_full_disk_is_reported_once_and_costs_no_other_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display(tmp_path, 9, active=True) as display:
        display.step(row(1))
        log = display._log
        with open("/dev/full", "ab", buffering=0) as full:
            display._log = full
            display.step(row(2))
            display.evaluation(2, 1.0)
        display._log = log
        display.step(row(3))
    assert steps(tmp_path) == [1, 3]
    assert capsys.readouterr().out.count("metrics were not written: [Errno 28] No space left on device") == 1


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    class Filling:
        """A file on a disk with room for five bytes."""

        def __init__(self, real: Any) -> None:
            self.seek, self.truncate, self._real = real.seek, real.truncate, real

        def write(self, data: bytes) -> int:
            return int(self._real.write(data[:5]))

    with Display(tmp_path, 9, active=True) as display:
        display.step(row(1))
        log = display._log
        display._log = Filling(log)  # type: ignore[assignment]
        display.step(row(2))
        display._log = log
        display.step(row(3))
    assert steps(tmp_path) == [1, 3]


def test_a_damaged_line_costs_itself(tmp_path: Path) -> None:
    for step, damage in (
        (1, b'{"step": 2, "lo\xff\n'),
        (3, b'\0\0\0\n[4]\n{"loss": 1.0}\n{"step": null}\n'),
        (5, b'{"st'),
    ):
        with Display(tmp_path, 9, active=True, start=step) as display:
            display.step(row(step))
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(damage)
    assert steps(tmp_path) == [1, 3, 5]


def test_rows_are_dropped_where_no_other_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    with Display(tmp_path, 9, active=True) as display:
        for step in (1, 2, 3, 4):
            display.step(row(step))
            display.evaluation(step, 1.0)
    with file.open("ab") as stream:
        stream.write(b'{"step": 5, "lo')
    before, open_path = file.stat().st_ino, Path.open

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not path.exists():
            raise OSError(28, "No space left on device", str(path))
        return open_path(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    with Display(tmp_path, 9, active=True, start=2) as display:
        for step in (3, 4, 5):
            display.step(row(step))
    assert steps(tmp_path) == [1, 1, 2, 2, 3, 4, 5]  # with two validation losses
    assert file.stat().st_ino == before


def test_a_folder_that_takes_no_metrics_costs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with Display(tmp_path, 9, active=True, start=1) as display:
        for step in (2, 3):
            display.step(row(step))
    told = capsys.readouterr().out
    assert told.count("metrics were not written") == 1
    assert "step 3" in told.replace("/9", "")


def test_a_run_from_the_first_step_keeps_the_curves_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps_of_a_run in ((1, 2, 3), (1, 2), (1,)):
        with Display(tmp_path, 9, active=True) as display:
            for step in steps_of_a_run:
                display.step(row(step))
    assert steps(tmp_path) == [1]
    told = capsys.readouterr().out
    for name, kept in (("metrics-1.jsonl", [1, 2, 3]), ("metrics-2.jsonl", [1, 2])):
        assert [each["step"] for each in read_metrics(tmp_path / name)] == kept
        assert f"the metrics.jsonl of an earlier run is kept as {tmp_path / name}\n" in told
    with Display(tmp_path, 9, active=True, start=1):
        pass
    assert steps(tmp_path) == [1]
    assert len(list(tmp_path.iterdir())) == 3  # a resumed run has one file


def test_a_resumed_run_continues_its_own_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the meantime, two other runs were started in the folder, and ended before their first checkpoint."""
    with Display(tmp_path, 9, active=True) as display:
        for step in (1, 2, 3):
            display.step(row(step))
    saved = time.time()
    for steps_of_a_run in ((1, 2), (1, 2, 3, 4)):
        with Display(tmp_path, 9, active=True) as display:
            for step in steps_of_a_run:
                display.step(row(step))
    for _ in range(2):  # the second time, there is nothing to restore
        with Display(tmp_path, 9, active=True, start=2, saved=saved) as display:
            display.step(row(3))
        assert steps(tmp_path) == [1, 2, 3]
        others = [[each["step"] for each in read_metrics(path)] for path in sorted(tmp_path.glob("metrics-*.jsonl"))]
        assert others == [[1, 2], [1, 2, 3, 4]]
    assert capsys.readouterr().out.count("of a run that left no checkpoint is kept as") == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_a_card_has_the_peak_of_its_own_data_sheet(monkeypatch: pytest.MonkeyPatch, name: str, peak: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.peak_flops(torch.device("cuda"), 2, "bfloat16") == 2 * peak


def test_float32_is_measured_by_the_peak_that_plan_counts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    whole = metrics.peak_flops(torch.device("cuda"), 1, "float32")
    assert whole == DEVICES["H200"].peak(4) < metrics.peak_flops(torch.device("cuda"), 1, "float16") / 10
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert metrics.peak_flops(torch.device("cuda"), 1, "float32") == pytest.approx(494.5e12)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_number_that_is_none_is_left_out(tmp_path: Path) -> None:
    with Display(tmp_path, 9, active=True) as display:
        display.step(replace(row(1), mfu=float("nan")))  # of a device with an unknown peak
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line
    assert "mfu" not in json.loads(line)


NAMES = ("step ", " loss ", " lr ", " norm ", " tok/s ", " mfu ", " left ")


@pytest.mark.parametrize("num_steps", [7, 30, 999, 1000, 123_456])
def test_a_step_is_one_line_of_a_terminal_with_each_field_in_its_place(num_steps: int) -> None:
    usual = StepMetrics(num_steps, 5.6057, 1.01, 1e-3, 4499.0, 0.079, 0.33, 0.1)
    rows = [
        usual,
        replace(usual, step=1, loss=11.762, grad_norm=0.0531, tokens_per_second=12.0, mfu=0.0004, memory_gib=0.004),
        replace(usual, loss=0.00004, grad_norm=99.9996, tokens_per_second=999_999.0, mfu=0.0996, memory_gib=9.999),
        replace(usual, loss=9.99999, grad_norm=4e7, tokens_per_second=9_999_999.0, mfu=1.0, memory_gib=139.12),
        replace(usual, loss=123.4567, tokens_per_second=999.9, mfu=0.5, memory_gib=1500.0),
    ]
    spans = (45.2, 0.0, 3599.9, 3600.0, 1e5)
    lines = [describe(row, num_steps, left) for row, left in zip(rows, spans, strict=True)]
    assert max(map(len, lines)) <= 79
    assert len({tuple(line.index(name) for name in NAMES) for line in lines}) == 1
    assert "loss 5.6057 lr 1.0e-03 norm 1.010 4.50k tok/s mfu 7.9% left  0:45" in lines[0]
    assert [line[-5:] for line in lines] == [" 0:45", " 0:00", "1h00m", "1h00m", "27.8h"]
    unknown = describe(replace(usual, mfu=float("nan")), num_steps, 0.0)
    assert "mfu" not in unknown
    assert "nan" not in unknown


def test_a_cpu_has_no_peak_that_changes_from_run_to_run() -> None:
    assert math.isnan(metrics.peak_flops(torch.device("cpu"), 4, "float32"))


def test_a_run_says_how_many_steps_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(row(12), 130, 0.0).startswith("step  12/130 loss")
    assert describe(row(12), 1000, 0.0).startswith("step   12 loss")
    for num_steps, start, said in ((999, 0, ""), (1000, 0, "training to step 1000\n"), (1000, 1000, "")):
        with Display(tmp_path, num_steps, active=True, start=start):
            assert capsys.readouterr().out == said


@pytest.mark.parametrize("refuses", ["a pipe that nobody reads", "a full disk"])
def test_a_screen_that_takes_no_lines_costs_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    if refuses == "a full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    with open(writing, "w", encoding="utf-8") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        with Display(tmp_path, 9, active=True) as display:
            for step in (1, 2, 3):
                display.step(row(step))
    assert steps(tmp_path) == [1, 2, 3]
