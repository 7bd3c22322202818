"""A run that is asked to stop, killed, or left with a loss that is not finite keeps its last state."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint import writer as checkpoint_writer
from flashspan.launch import RankError, Ranks
from flashspan.train import TrainConfig
from flashspan.train.loop import DONE, NOT_FINITE, NOT_SAVED, STOPPED, Trainer
from flashspan.train.metrics import read_metrics
from flashspan.train.run import run_rank
from tests.train.cases import ConfigOf, OnRanks, assert_same_bits, final_state, start, wait_for


def test_a_loss_that_is_not_finite_stops_all_ranks_with_the_state_before_it(
    on_ranks: OnRanks, config_of: ConfigOf
) -> None:
    config = config_of("--optimizer.lr=1e30", "--optimizer.warmup=0", "--parallel.data=2", "--parallel.context=1")
    assert on_ranks(2, run_rank, config) == [NOT_FINITE] * 2
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).step == 1
    assert len(read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")) == 1


def run_poisoned(config: TrainConfig) -> tuple[str, list[float]]:
    """The end of a float16 run whose weights are not finite, and the loss scales that it tried."""
    trainer, tried = Trainer(config), []
    trainer.scale = 4.0
    trainer.parts.model.norm.weight.data.fill_(float("nan"))
    take_step = trainer.take_step

    def count(asked: list[int]) -> Any:
        tried.append(trainer.scale)
        return take_step(asked)

    trainer.take_step = count  # type: ignore[method-assign]
    return trainer.run(), tried


def test_a_loss_that_no_scale_makes_finite_leaves_the_scale_as_it_was(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--train.precision=float16", "--train.batch=1", "--data.sequence=15", "--parallel.context=1")
    assert on_ranks(1, run_poisoned, config) == [(NOT_FINITE, [4.0, 2.0, 1.0])]
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    assert checkpoint.read(path).extra["scale"] == 4.0


def kill_one(config: TrainConfig, rank: int, wait: Callable[[], None]) -> bool:
    """Run on 2 ranks, and kill one when `wait` returns. Returns whether the run ended early."""
    with Ranks(2, threads=1, timeout=20) as ranks:
        pid = ranks.pids[rank]
        over = threading.Event()

        def kill() -> None:
            wait()
            if not over.is_set():
                os.kill(pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        try:
            ranks.run(run_rank, config, timeout=60)
        except RankError as error:
            return f"the process of rank {rank} died" in str(error)
        finally:
            over.set()
    return False


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumed_after_a_killed_rank_ends_with_the_same_bits(
    on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path, rank: int
) -> None:
    options = ["--checkpoint.every=1", "--parallel.context=2", "--train.steps=12"]
    config = config_of(*options, f"--checkpoint.folder={tmp_path / 'whole'}")
    on_ranks(2, run_rank, config)
    killed = config_of(*options)

    def first_checkpoint() -> None:
        while not checkpoint.checkpoints(killed.checkpoint.folder):
            time.sleep(0.005)

    assert kill_one(killed, rank, first_checkpoint)
    path = checkpoint.newest(killed.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).step < 12
    on_ranks(2, run_rank, killed)
    assert_same_bits(final_state(killed), final_state(config))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_resumed_after_twenty_kills_end_with_the_same_bits(
    on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path
) -> None:
    options = ["--checkpoint.every=1", "--parallel.context=2", "--train.steps=12"]
    config = config_of(*options, f"--checkpoint.folder={tmp_path / 'whole'}")
    on_ranks(2, run_rank, config)
    want, chance, kills = final_state(config), random.Random(0), 0
    while kills < 20:
        killed = config_of(*options, f"--checkpoint.folder={tmp_path / str(kills)}")
        while kill_one(killed, chance.randrange(2), lambda: time.sleep(chance.uniform(0.2, 2.5))):
            kills += 1
        assert_same_bits(final_state(killed), want)


@pytest.mark.parametrize(
    ("kind", "whom"),
    [
        (signal.SIGTERM, "its group"),
        pytest.param(signal.SIGINT, "the parent", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "the parent", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "its group", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "its group", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_exits(config_of: ConfigOf, tmp_path: Path, kind: signal.Signals, whom: str) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    process = start(config, tmp_path / "run.toml")
    wait_for(process, 3)
    os.kill(process.pid, kind) if whom == "the parent" else os.killpg(process.pid, kind)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + (signal.SIGINT if kind == signal.SIGINT else signal.SIGTERM), rest
    assert f"{kind.name}: saving the state" in rest
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert 3 <= checkpoint.read(path).step < 500


@pytest.mark.slow
def test_a_signal_before_the_ranks_start_stops_them_after_one_step(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    process = start(config, tmp_path / "run.toml")
    while not Path(config.checkpoint.folder).exists():  # the folder is created before the ranks
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, rest
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    assert checkpoint.read(path).step == 1


IN_A_TERMINAL = r"""
import os, pty, re, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-m", "flashspan.train", sys.argv[1]])
seen = b""
while not re.search(rb"step +2/", seen):
    seen += os.read(terminal, 4096)
os.close(terminal)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Runs the config in a terminal, and closes the terminal after two steps."""


@pytest.mark.slow
def test_a_closed_terminal_saves_and_exits(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    file = tmp_path / "run.toml"
    file.write_text(config.describe())
    done = subprocess.run([sys.executable, "-c", IN_A_TERMINAL, file], capture_output=True, text=True, timeout=90)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGTERM}\n", "")
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    assert 2 <= checkpoint.read(path).step < 500


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_second_signal_ends_the_run_at_once(config_of: ConfigOf, tmp_path: Path) -> None:
    process = start(config_of("--parallel.context=2", "--train.steps=500"), tmp_path / "run.toml")
    wait_for(process, 3)
    ranks = [pid for server in children(process.pid) for pid in children(server)]
    assert len(ranks) == 2
    for pid in ranks:  # the ranks are in a step that does not end
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "stopped at once, without saving" in said.splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow  # two faster tests cover its halves: a signal saves, and a resumed run has the same bits
def test_a_stopped_run_ends_with_the_same_bits(config_of: ConfigOf, on_ranks: OnRanks, tmp_path: Path) -> None:
    options = ["--parallel.context=2", "--train.steps=30", "--checkpoint.every=0"]
    whole = config_of(*options, f"--checkpoint.folder={tmp_path / 'whole'}")
    on_ranks(2, run_rank, whole)
    config = config_of(*options)
    process = start(config, tmp_path / "run.toml")
    wait_for(process, 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert 1 <= checkpoint.read(path).step < 30
    on_ranks(2, run_rank, config)
    assert_same_bits(final_state(config), final_state(whole))


def overflow_and_ask(config: TrainConfig) -> tuple[str, int]:
    """A float16 run in which every step overflows, and which is asked to stop in the first step."""
    trainer, asked = Trainer(config), []
    trainer.scale = 2.0**60
    take_step = trainer.take_step

    def ask(asked: list[int]) -> Any:
        asked.append(1)
        return take_step(asked)

    trainer.take_step = ask  # type: ignore[method-assign]
    return trainer.run(asked), len(asked)


def ask_in(config: TrainConfig, step: int) -> tuple[str, int]:
    """Ask a run to stop during this step. Returns the end of the run, and its number of steps."""
    trainer, asked = Trainer(config), []
    take_step = trainer.take_step

    def ask(asked: list[int]) -> Any:
        if trainer.step + 1 == step:
            asked.append(1)
        return take_step(asked)

    trainer.take_step = ask  # type: ignore[method-assign]
    return trainer.run(asked), trainer.step


@pytest.mark.parametrize(("step", "how"), [(2, STOPPED), (6, DONE)])
def test_a_run_stops_after_the_step_in_which_it_was_asked(
    on_ranks: OnRanks, config_of: ConfigOf, step: int, how: str
) -> None:
    assert on_ranks(1, ask_in, config_of("--parallel.context=1"), step) == [(how, step)]


def stop_on_a_full_disk(config: TrainConfig) -> tuple[str, int]:
    with mock.patch.object(checkpoint_writer, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        return ask_in(config, 2)


def test_a_stopped_run_that_cannot_save_ends_as_not_saved(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    assert on_ranks(1, stop_on_a_full_disk, config_of("--parallel.context=1")) == [(NOT_SAVED, 2)]


def test_a_run_that_overflows_stops_when_asked(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--parallel.context=1", "--train.precision=float16")
    assert on_ranks(1, overflow_and_ask, config) == [(STOPPED, 1)]


def run_until_asked(config: TrainConfig) -> str:
    return Trainer(config).run([signal.SIGTERM])


def test_an_evaluation_due_at_a_stop_is_made_after_resuming(
    on_ranks: OnRanks, config_of: ConfigOf, corpus: Path
) -> None:
    """An evaluation that is due when the run is asked to stop is done after the run resumes."""
    validation = f"--data.validation={corpus.parent}"
    config = config_of("--parallel.context=1", "--train.steps=3", "--train.evaluate_every=1", validation)
    assert on_ranks(1, run_until_asked, config) == [STOPPED]
    file = Path(config.checkpoint.folder) / "metrics.jsonl"
    assert [row["step"] for row in read_metrics(file) if "validation_loss" in row] == []
    assert on_ranks(1, run_rank, config) == [DONE]
    assert [row["step"] for row in read_metrics(file) if "validation_loss" in row] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(file) if "loss" in row] == [1, 2, 3]
