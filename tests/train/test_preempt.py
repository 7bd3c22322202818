"""Machines that may be taken away at any time: the lost work is bounded, and a run stops within the available time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flashspan.checkpoint import format as checkpoint
from flashspan.train import TrainConfig, run, train
from flashspan.train.loop import DONE, Trainer
from flashspan.train.signals import catch_signals

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]


def steps_saved(config: TrainConfig) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.checkpoints(config.checkpoint.folder)]


def run_with_clocks(config: TrainConfig) -> str:
    """A run in which an hour passes on the first rank's clock before steps 3 and 5, on the other's before each step."""
    trainer = Trainer(config)
    take_step = trainer.take_step

    def take_late(asked: Any) -> Any:
        if dist.get_rank() or trainer.step + 1 in (3, 5):
            trainer.saved_at -= 3600
        return take_step(asked)

    trainer.take_step = take_late  # type: ignore[method-assign]
    return trainer.run()


def test_a_checkpoint_due_by_time_is_written_by_all_ranks(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ("--parallel.shard=2", "--parallel.context=1", "--checkpoint.every=0", "--checkpoint.keep=9")
    config = config_of(*options, "--checkpoint.minutes=30")
    assert on_ranks(2, run_with_clocks, config) == [DONE] * 2
    assert steps_saved(config) == [3, 5, 6]


@pytest.mark.parametrize("name", ["minutes", "grace"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
def test_invalid_times_are_refused(config_of: ConfigOf, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^checkpoint\.{name} must be .* got "):
        config_of(f"--checkpoint.{name}={value}")


def hang_in_step_3(config: TrainConfig) -> str:
    with catch_signals() as asked:
        trainer = Trainer(config)
        take_step = trainer.take_step

        def hang(asked: Any) -> Any:
            if trainer.step == 2:
                (Path(config.checkpoint.folder) / "slow").touch()
                time.sleep(60)
            return take_step(asked)

        trainer.take_step = hang  # type: ignore[method-assign]
        return trainer.run(asked)


def terminate_when(path: Path, process: int) -> None:
    """Send SIGTERM to a process as soon as a file exists."""

    def wait_and_send() -> None:
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(process, signal.SIGTERM)

    threading.Thread(target=wait_and_send, daemon=True).start()


def test_a_stop_that_exceeds_the_grace_time_is_reported(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--parallel.ranks=2", "--parallel.context=2", "--checkpoint.every=2")
    config = config_of(*options, "--checkpoint.grace=0.5")
    folder = Path(config.checkpoint.folder)
    terminate_when(folder / "slow", os.getpid())
    monkeypatch.setattr(run, "run_rank", hang_in_step_3)
    begin = time.monotonic()
    assert train(config) == 1
    assert time.monotonic() - begin < 30
    said = capfd.readouterr()
    assert "the state could not be saved within checkpoint.grace 0.5 s" in said.out
    assert "resumes from the last checkpoint, step 2" in said.out
    assert "restart" not in said.out + said.err
    assert "Traceback" not in said.out + said.err
    assert steps_saved(config) == [2]


def test_a_stop_within_the_grace_time_saves(config_of: ConfigOf, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_of("--parallel.ranks=1", "--checkpoint.every=0", "--train.steps=3000", "--checkpoint.grace=60")
    folder = Path(config.checkpoint.folder)
    terminate_when(folder / "metrics.jsonl", os.getpid())
    assert train(config) == 128 + signal.SIGTERM
    assert "stopped as asked, state saved" in capfd.readouterr().out
    (step,) = steps_saved(config)
    assert 1 <= step < 3000


PROGRAM = """
import sys, time
from pathlib import Path
from flashspan.train import run
from flashspan.train.loop import Trainer
folder = Path(sys.argv[1])

def slow(self, asked):
    (folder / "slow").touch()
    time.sleep(60)

Trainer.take_step = slow
sys.exit(run.main([str(folder / "run.toml")]))
"""


@pytest.mark.slow
def test_a_rank_of_torchrun_ends_in_time_too(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of("--parallel.context=1", "--checkpoint.grace=0.5")
    (tmp_path / "run.toml").write_text(config.describe())
    joined = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **joined},
    ) as process:
        terminate_when(tmp_path / "slow", process.pid)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "could not be saved within checkpoint.grace 0.5 s; there is no checkpoint" in said
    assert "Traceback" not in said
