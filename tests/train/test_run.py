"""The command from start to end: it learns, writes the files that it announces, and `generate` can use its weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashspan.checkpoint.format import checkpoints
from flashspan.generate import generate
from flashspan.train import TrainConfig, estimate, run, train
from flashspan.train.loop import DONE, NOT_SAVED, STOPPED, Trainer
from flashspan.train.metrics import read_metrics


def test_a_default_run_learns_and_its_model_generates(
    config_of: Callable[..., TrainConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        "--parallel.ranks=2",
        "--train.steps=10",
        "--train.evaluate_every=5",
        "--train.evaluate_samples=3",
        "--optimizer.lr=8e-3",
        "--checkpoint.every=2",
        "--checkpoint.keep=3",
    )
    assert train(config) == 0
    folder = Path(config.checkpoint.folder)
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert {"grad_norm", "tokens_per_second", "lr", "memory_gib"} <= set(steps[0])
    assert "mfu" not in steps[0]  # not reported for a CPU
    held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(held_out) == 2
    assert held_out[1] < held_out[0]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in checkpoints(folder)] == ["step-00000006", "step-00000008", "step-00000010"]
    assert f"flashspan generate {folder}" in capfd.readouterr().out
    assert generate(str(folder), prompt="First", tokens=5) == 0
    assert capfd.readouterr().out.startswith("First")
    (tmp_path / "run.toml").write_text(config.describe())
    # In a process of its own, because ranks write to the stdout at the time when this process's first ranks started.
    command = [sys.executable, "-m", "flashspan.cli", "train", str(tmp_path / "run.toml"), "--train.steps=3"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "step-00000010 is already at step 10, and train.steps is 3: nothing to do" in said
    assert "resuming" not in said
    assert "the same command with --train.steps 20" in said
    assert [path.name for path in checkpoints(folder)] == ["step-00000006", "step-00000008", "step-00000010"]


def test_a_command_starts_without_what_only_split_weights_need() -> None:
    code = "import sys, flashspan.train.run; print(*sys.modules, sep='\\n')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True).stdout
    assert "flashspan.train.build" in said.split()
    assert not {"torch.distributed.tensor", "torch.distributed.fsdp"} & {*said.split()}


@pytest.mark.parametrize("how", [DONE, STOPPED, NOT_SAVED, "failed"])
def test_a_command_that_starts_over_is_not_said_to_resume(config_of: Callable[..., TrainConfig], how: str) -> None:
    config = config_of("--checkpoint.resume=false")
    (Path(config.checkpoint.folder) / "step-00000001").mkdir(parents=True)
    assert "the same command with --checkpoint.resume true " in run._summary(config, how)
    assert "--checkpoint.resume" not in run._summary(config_of(), how)


@pytest.mark.parametrize("how", [NOT_SAVED, "failed"])
def test_the_last_lines_name_the_files_there_are(config_of: Callable[..., TrainConfig], how: str) -> None:
    config = config_of()
    folder = Path(config.checkpoint.folder)
    for there, says in (
        ("", ""),
        ("metrics.jsonl", f"\n  metrics.jsonl is in {folder}"),
        ("loss.png", f"\n  metrics.jsonl and loss.png are in {folder}"),
    ):
        (folder / there).mkdir(parents=True)
        said = run._summary(config, how)
        assert said.endswith(f"the same command starts over{says}")
    (folder / "step-00000001").mkdir()
    said = run._summary(config, how)
    assert "the same command resumes from" in said
    assert said.endswith(f"\n  checkpoints, metrics.jsonl and loss.png are in {folder}")


def test_a_run_joins_the_ranks_of_torchrun(config_of: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = config_of("--parallel.data=2", "--parallel.context=1", "--train.steps=2")
    (tmp_path / "run.toml").write_text(config.describe())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "flashspan.train", str(tmp_path / "run.toml")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("step 2/2") == 1
    assert done.stdout.count("generate text:") == 1
    assert [path.name for path in checkpoints(config.checkpoint.folder)] == ["step-00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["before the first line", "after the first step"])
def test_a_closed_pipe_does_not_end_the_run(config_of: Callable[..., TrainConfig], tmp_path: Path, closed: str) -> None:
    config = config_of("--parallel.context=2", "--train.steps=3")
    (tmp_path / "run.toml").write_text(config.describe())
    with subprocess.Popen(
        [sys.executable, "-m", "flashspan.cli", "train", str(tmp_path / "run.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if closed == "after the first step":
                assert any(line.startswith("step 1/3 loss") for line in process.stdout)
            process.stdout.close()
            process.wait(timeout=60)
        finally:
            process.kill()  # otherwise a stalled process would block the test forever
        assert process.stderr.read() == ""
    assert process.returncode == 0
    folder = Path(config.checkpoint.folder)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]
    assert [path.name for path in checkpoints(folder)] == ["step-00000003"]


@pytest.mark.parametrize(("slow", "said"), [(0.0, True), (1e9, False)])
def test_slow_16_bit_matmuls_on_a_cpu_are_reported(
    slow: float, said: bool, config_of: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(run, "SLOW", slow)
    run.warn_of_slow_matmuls(config_of("--train.precision=bfloat16"))
    out = "".join(capsys.readouterr())
    assert (re.search(r"bfloat16 matmul .* \d+ times as long", out) is not None) == said
    run.warn_of_slow_matmuls(config_of())
    assert not "".join(capsys.readouterr())


def test_the_timed_matmul_is_large_enough_to_hide_overhead(
    config_of: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(size: int, dtype: torch.dtype) -> float:
        return 1e-3 + (size / 128) ** 3 * (
            2e-5 if dtype == torch.float32 else 4e-3
        )  # 5 times as long at 128, and 200 times at the end

    monkeypatch.setattr(run, "time_matmul", seconds)
    run.warn_of_slow_matmuls(config_of("--train.precision=bfloat16"))
    assert "at least 113 times as long" in capsys.readouterr().out  # at 512, with a quarter of a second


def test_ranks_that_the_memory_cannot_hold_are_refused(
    config_of: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("--parallel.data=2", "--parallel.context=2")
    need = estimate.estimate(config, 4).peak + estimate.PROCESS_BYTES
    monkeypatch.setattr(run, "_start", lambda *_: DONE)
    monkeypatch.setattr(estimate, "available_bytes", lambda: 4 * need - 1)
    with pytest.raises(ValueError, match=r"4 ranks of about .* GiB need .* GiB, but .* are available; use fewer ranks"):
        train(config)
    with pytest.raises(ValueError, match="4 ranks of about"):
        train(config, dry_run=True)
    assert "  peak  " in capsys.readouterr().out  # the dry run prints the plan before the error
    assert not Path(config.checkpoint.folder).exists()
    with monkeypatch.context() as joined:  # ranks of a launcher that does not set the local number of ranks
        joined.setattr(run, "_join", lambda *_: DONE)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "4")):
            joined.setenv(name, value)
        assert train(config) == 0
        joined.setenv("LOCAL_WORLD_SIZE", "4")
        with pytest.raises(ValueError, match="4 ranks of about"):
            train(config)
    for free in (4 * need, None):
        monkeypatch.setattr(estimate, "available_bytes", lambda free=free: free)
        assert train(config) == 0
        assert train(config, dry_run=True) == 0
    monkeypatch.undo()
    free = estimate.available_bytes()
    assert free is None or 2**20 < free < 2**50


def precision_of(config: TrainConfig) -> str:
    try:
        Trainer(config)
        return torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")  # restored, because other tests run in this process


@pytest.mark.parametrize(("tf32", "precision"), [("true", "high"), ("false", "highest")])
def test_float32_matmuls_are_tf32_on_request(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tf32: str, precision: str
) -> None:
    assert on_ranks(1, precision_of, config_of(f"--train.tf32={tf32}")) == [precision]
