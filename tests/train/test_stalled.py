"""A stalled rank is reported by name. A slow disk does not end a run."""

from __future__ import annotations

import pkgutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from flashspan import agreement
from flashspan.attention import attention
from flashspan.launch import RankError, Ranks
from flashspan.model import Llama, save_llama
from flashspan.train import TrainConfig, loop, silent_ranks
from flashspan.train.loop import DONE, Trainer
from flashspan.train.run import run_rank
from tests.train.cases import ConfigOf, OnRanks


def stall(config: TrainConfig, rank: int, call: str) -> None:
    """A run in which one rank sleeps in this call after its second step, and the other has a short timeout."""
    silent_ranks.PATIENCE = 1.0
    trainer = Trainer(config)
    real = getattr(trainer, call)

    def sleepy(*args: Any) -> Any:
        if trainer.step == 2 and dist.get_rank() == rank:
            time.sleep(60)
        return real(*args)

    setattr(trainer, call, sleepy)
    trainer.run()


@pytest.mark.parametrize(
    ("option", "call", "when"),
    [
        ("--parallel.context=2", "take_step", "step 3"),
        pytest.param("--parallel.data=2", "take_step", "step 3", marks=pytest.mark.slow),
        pytest.param("--parallel.data=2", "evaluate", "the evaluation after step 2", marks=pytest.mark.slow),
    ],
)
def test_a_stalled_rank_is_named(config_of: ConfigOf, option: str, call: str, when: str) -> None:
    config = config_of("--parallel.context=1", option, "--parallel.timeout=3", "--train.evaluate_every=2")
    with (
        Ranks(2, threads=1, timeout=3) as ranks,
        pytest.raises(RankError, match=f"rank 1 did not answer during {when}: stalled or dead"),
    ):
        ranks.run(stall, config, 1, call, timeout=60)


def stall_at_the_start(config: TrainConfig) -> str:
    silent_ranks.PATIENCE = 1.0
    real = loop.build

    def late(*args: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(60)
        return real(*args)

    with mock.patch.object(loop, "build", late):
        return run_rank(config)


@pytest.mark.slow
def test_a_rank_that_stalls_before_the_first_step_is_named(config_of: ConfigOf) -> None:
    with (
        Ranks(2, threads=1, timeout=3) as ranks,
        pytest.raises(RankError, match="rank 1 did not answer during the initialisation of the model"),
    ):
        ranks.run(stall_at_the_start, config_of("--parallel.context=2", "--parallel.timeout=3"), timeout=60)


def run_on_a_slow_disk(config: TrainConfig, call: str) -> tuple[str, int]:
    """Run with a call that takes until the ranks have met three more times. Returns how it ends, and the number of
    calls."""
    meetings, calls = threading.Semaphore(0), []
    meet, real = dist.all_gather_object, pkgutil.resolve_name(call)

    def count(*args: Any, **options: Any) -> None:
        meet(*args, **options)
        meetings.release()

    def slow(*args: Any, **options: Any) -> Any:
        while meetings.acquire(blocking=False):
            pass
        calls.append(call)
        assert all(meetings.acquire(timeout=20) for _ in range(3)), "ranks wait for the disk"
        return real(*args, **options)

    with (
        mock.patch.object(agreement, "MEET", 0.01),
        mock.patch.object(dist, "all_gather_object", count),
        mock.patch(call, slow),
    ):
        return run_rank(config), len(calls)


def slow_calls(found: list[tuple[str, int]]) -> int:
    assert [how for how, _ in found] == [DONE] * len(found)
    return sum(calls for _, calls in found)


def test_a_disk_slower_than_an_exchange_ends_no_run(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--parallel.context=2", "--checkpoint.every=1"]
    for num_steps, call in ((2, "flashspan.checkpoint.writer.write"), (3, "flashspan.checkpoint.format.damage")):
        config = config_of(*options, f"--train.steps={num_steps}")
        assert slow_calls(on_ranks(2, run_on_a_slow_disk, config, call)) > 0


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_slow_load_ends_no_run(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path, axis: str) -> None:
    """With data ranks, only the first one reads; with tensor ranks, each one reads its part."""
    model = Llama(config_of().model.resolve(), attention=attention)
    model.initialize(9)
    save_llama(model, tmp_path / "model")
    config = config_of(f"--model.load={tmp_path / 'model'}", f"--parallel.{axis}=2", "--train.steps=1")
    assert slow_calls(on_ranks(2, run_on_a_slow_disk, config, "flashspan.train.build.read_weights")) > 0
