"""What a run writes beside its checkpoints is worth less than the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flashspan.train import metrics
from flashspan.train.metrics import Display, StepMetrics, read_metrics


def row(step: int) -> StepMetrics:
    return StepMetrics(step, 1.0, 1.0, 1e-3, 1.0, 0.1, 0.1, 0.1)


def steps(folder: Path) -> list[int]:
    return [each["step"] for each in read_metrics(folder / "metrics.jsonl")]


def test_a_full_disk_is_told_once_and_costs_no_other_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        """A file whose disk takes five bytes and no more."""

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


def test_rows_are_dropped_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Display(tmp_path, 9, active=True) as display:
        for step in (1, 2, 3):
            display.step(row(step))

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            metrics._drop_later(tmp_path / "metrics.jsonl", 2)
    assert steps(tmp_path) == [1, 2, 3]
    metrics._drop_later(tmp_path / "metrics.jsonl", 2)
    assert steps(tmp_path) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
