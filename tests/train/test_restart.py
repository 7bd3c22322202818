"""A run whose ranks fail is restarted by its own command, up to the limit and only if that may help."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint.format import checkpoints
from flashspan.launch import SilentRank
from flashspan.model import Llama, preset
from flashspan.train import TrainConfig, run, train
from flashspan.train.loop import Trainer
from flashspan.train.metrics import read_metrics
from flashspan.train.restart import Attempts

ConfigOf = Callable[..., TrainConfig]
OPTIONS = ("--parallel.ranks=2", "--parallel.context=2", "--checkpoint.every=2", "--checkpoint.keep=9")


def attempts_in(folder: str) -> int:
    return len((Path(folder) / "attempts").read_text())


def fail(config: TrainConfig, steps: tuple[int, ...], how: Callable[[], None]) -> str:
    """A run in which rank 1 dies, or all ranks raise, before the step in `steps` of this attempt. Later attempts use
    the last step."""
    attempts = Path(config.checkpoint.folder) / "attempts"
    dist.barrier()
    number = len(attempts.read_text()) if attempts.exists() else 0
    dist.barrier()
    if dist.get_rank() == 0:
        attempts.write_text("x" * (number + 1))
    trainer = Trainer(config)
    take_step = trainer.take_step

    def take_or_fail(asked: Any) -> Any:
        if trainer.step + 1 == steps[min(number, len(steps) - 1)] and (dist.get_rank() == 1 or how is not die):
            how()
        return take_step(asked)

    trainer.take_step = take_or_fail  # type: ignore[method-assign]
    return trainer.run()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide_by_zero() -> None:
    raise ZeroDivisionError("in this step")


def refuse() -> None:
    raise ValueError("this is bad input")


def die_in_5(config: TrainConfig, on_signal: Any = None) -> str:
    return fail(config, (5, 99), die)


def divide_in_4(config: TrainConfig, on_signal: Any = None) -> str:
    return fail(config, (4,), divide_by_zero)


def die_later_each_time(config: TrainConfig, on_signal: Any = None) -> str:
    return fail(config, (1, 3, 5, 6), die)


def refuse_in_3(config: TrainConfig, on_signal: Any = None) -> str:
    return fail(config, (3,), refuse)


def discard_stdout(config: TrainConfig, on_signal: Any = None) -> str:
    raise SilentRank("rank 1 did not answer during step 3: stalled or dead; first error: timed out")


def weights(folder: str) -> dict[str, torch.Tensor]:
    path = checkpoint.newest(folder)
    assert path is not None
    state = checkpoint.read(path)
    return {**state.model, **state.optimizer}


def test_a_killed_rank_restarts_the_run_which_ends_with_the_same_bits(
    config_of: ConfigOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = config_of(*OPTIONS, f"--checkpoint.folder={tmp_path / 'whole'}")
    assert train(whole) == 0
    config = config_of(*OPTIONS)
    monkeypatch.setattr(run, "run_rank", die_in_5)
    assert train(config) == 0
    folder = config.checkpoint.folder
    assert attempts_in(folder) == 2
    said = capfd.readouterr().out
    assert "step 5: the process of rank 1 died: killed by SIGKILL; restart 1 of 3 resumes from step 4" in said
    want, got = weights(whole.checkpoint.folder), weights(folder)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert [row["step"] for row in read_metrics(Path(folder) / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_fails_twice_is_not_tried_again(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(*OPTIONS)
    monkeypatch.setattr(run, "run_rank", divide_in_4)
    assert train(config) == 1
    assert attempts_in(config.checkpoint.folder) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert re.fullmatch(
        r"flashspan: step 4: rank [01]: ZeroDivisionError: in this step; not restarted: .* failed at step 4 too",
        error[-1],
    )
    assert sum(line.startswith("ZeroDivisionError") for line in error) == 2  # one traceback for each attempt


def test_a_run_restarts_at_most_max_restarts_times(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(*OPTIONS, "--train.max_restarts=2")
    monkeypatch.setattr(run, "run_rank", die_later_each_time)
    assert train(config) == 1
    assert attempts_in(config.checkpoint.folder) == 3
    said = capfd.readouterr()
    assert "restart 1 of 2 resumes from step 0" in said.out
    assert "restart 2 of 2 resumes from step 2" in said.out
    assert re.fullmatch(r"flashspan: step 5: .* rank 1 .* SIGKILL; after 2 restarts, .*max_restarts.*\n", said.err)


def test_bad_input_is_never_retried(config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(*OPTIONS)
    monkeypatch.setattr(run, "run_rank", refuse_in_3)
    with pytest.raises(ValueError, match=r"^this is bad input$"):
        train(config)
    assert attempts_in(config.checkpoint.folder) == 1


def test_a_stalled_rank_is_one_line(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run_rank", discard_stdout)
    assert train(config_of(*OPTIONS, "--train.max_restarts=0")) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("flashspan: step 1: rank 1 did not answer during step 3")


def save(folder: str, step: int) -> None:
    config = preset("tiny", num_layers=1)
    state = Llama(config, attention=lambda *_: None).state_dict()
    checkpoint.write(folder, checkpoint.State(step, config, state, {}, {}, {}))


def test_a_run_started_over_restarts_from_its_own_checkpoints_only(config_of: ConfigOf) -> None:
    config = config_of("--checkpoint.resume=false", "--checkpoint.keep=1", "--train.steps=50")
    folder = config.checkpoint.folder
    save(folder, 40)
    attempts = Attempts(config)
    assert attempts.restart() is None
    assert attempts.describe() == "restart 1 of 3 resumes from step 0"
    assert not attempts.config.checkpoint.resume
    save(folder, 40)  # the run has reached this step, and its metrics have the rows
    (Path(folder) / "metrics.jsonl").write_text(f'{{"step": 45, "time": {time.time() + 1}}}\n')
    assert attempts.restart() is None
    assert attempts.failed_at == 46
    assert attempts.describe() == "restart 2 of 3 resumes from step 40"
    assert attempts.config.checkpoint.resume
    (checkpoints(folder)[0] / "state.json").write_text("{}")  # damaged, so the run does not resume here
    (Path(folder) / "metrics.jsonl").write_text("")
    assert attempts.restart() is None
    assert attempts.describe() == "restart 3 of 3 resumes from step 0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_torchrun_restarts_a_run_from_its_newest_checkpoint(config_of: ConfigOf, tmp_path: Path) -> None:
    options = ("--parallel.context=2", "--checkpoint.every=1", "--train.steps=60")
    whole = config_of(*options, "--parallel.ranks=2", f"--checkpoint.folder={tmp_path / 'whole'}")
    assert train(whole) == 0
    config = config_of(*options)
    (tmp_path / "run.toml").write_text(config.describe())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with subprocess.Popen(
        [*launch, "-m", "flashspan.train", str(tmp_path / "run.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            if line.startswith("step  5/") and not any(line.startswith("step  5/") for line in lines):
                word = f"/proc/{process.pid}/task/{process.pid}/children"
                ranks = [int(pid) for pid in Path(word).read_text().split()]
                victims = [pid for pid in ranks if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
                os.kill(victims[0], signal.SIGKILL)
            lines.append(line)
    said = "".join(lines)
    assert process.returncode == 0, said
    (resumed,) = re.findall(r"resuming .* at step (\d+)", said)
    assert int(resumed) >= 3
    want, got = weights(whole.checkpoint.folder), weights(config.checkpoint.folder)
    assert all(torch.equal(got[name], want[name]) for name in want)
    steps = [row["step"] for row in read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")]
    assert steps == list(range(1, 61))
