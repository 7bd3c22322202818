"""A step that begins before the host knows the result of the previous one gives the same bits, and is never undone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.parallel.collectives import local_part
from flashspan.train import TrainConfig
from flashspan.train.loop import DONE, NOT_FINITE, STOPPED, Trainer

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]
ALONE = ["--parallel.context=1"]


def a_trainer(config: TrainConfig, *, guarded: bool) -> Trainer:
    """A trainer. If guarded, its optimizer itself skips steps with results that are not finite, as on GPUs."""
    trainer = Trainer(config)
    groups = [{**group} for group in trainer.parts.optimizer.param_groups]
    for group in groups:
        group.update(fused=True, foreach=None)
    trainer.parts.optimizer = torch.optim.AdamW(groups, fused=True)
    trainer.guarded = guarded
    return trainer


def train(
    config: TrainConfig, guarded: bool, scale: float | None, may_begin_early: bool = True
) -> tuple[list[float], int, int, list[Tensor]]:
    """The loss of each attempt, the number of attempts, the number that began early, and the weights."""
    trainer = a_trainer(config, guarded=guarded)
    trainer.alone &= may_begin_early
    trainer.scale = trainer.scale if scale is None else scale
    losses, early = [], 0
    while trainer.step < config.train.steps:
        losses.append(trainer.take_step()[0])
        early += trainer.ahead.begun
    return losses, len(losses), early, [local_part(param).detach() for param in trainer.parts.names]


@pytest.mark.parametrize(
    ("num_ranks", "options", "scale", "early"),
    [
        # After steps 2, 3, 4 and 6, no step begins early, because a checkpoint or an evaluation comes first.
        (1, [*ALONE, "--train.accumulate=2", "--checkpoint.every=2", "--train.evaluate_every=3"], None, 2),
        (1, [*ALONE, "--train.precision=float16", "--train.steps=3"], 2.0**19, 2),
        (2, [*ALONE, "--parallel.data=2"], None, 5),
        (2, ["--parallel.context=2"], None, 0),
    ],
)
def test_a_step_that_begins_early_changes_no_bit(
    on_ranks: OnRanks, config_of: ConfigOf, num_ranks: int, options: list[str], scale: float | None, early: int
) -> None:
    config = config_of("--train.steps=6", "--optimizer.clip=1000", *options)  # no gradient is clipped
    guarded, plain = (on_ranks(num_ranks, train, config, guarded, scale) for guarded in (True, False))
    for got, want in zip(guarded, plain, strict=True):
        assert str(got[0]) == str(want[0])  # as text, because some may be nan
        assert (got[1] > config.train.steps) == (scale is not None)
        assert (got[2], want[2]) == (early, 0)
        assert all(torch.equal(a, b) for a, b in zip(got[3], want[3], strict=True))


def test_a_step_that_begins_early_changes_no_bit_of_clipped_gradients(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--train.steps=4", "--optimizer.clip=0.1", *ALONE)
    early, late, plain = (
        on_ranks(1, train, config, *how)[0] for how in ((True, None), (True, None, False), (False, None))
    )
    assert (early[2], late[2], plain[2]) == (3, 0, 0)
    assert early[0] == late[0]
    assert all(torch.equal(a, b) for a, b in zip(early[3], late[3], strict=True))
    # The optimizer divides by the reciprocal of the trainer's factor, so the bits are not the same.
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(early[3], plain[3], strict=True))


def run(config: TrainConfig, spoil: int, ask: int) -> tuple[str, int, bool]:
    """The end of a run whose loss is not finite in one step, and whose last rank is asked to stop in another."""
    trainer = a_trainer(config, guarded=True)
    asked: list[int] = []
    forward, take_step, numbers = trainer._forward, trainer.take_step, itertools.count(1)

    def forward_with_nan(batch: Any) -> Tensor:
        return forward(batch) * (float("nan") if next(numbers) == spoil else 1.0)

    def take(asked: Any) -> Any:
        asked += [1] * (trainer.step + 1 == ask and dist.get_rank() == dist.get_world_size() - 1)
        return take_step(asked)

    trainer._forward = forward_with_nan  # type: ignore[method-assign]
    trainer.take_step = take  # type: ignore[method-assign, assignment]
    how = trainer.run(asked)
    return how, trainer.step, not trainer.ahead.begun


@pytest.mark.parametrize(
    ("num_ranks", "spoil", "ask", "how", "steps"),
    [(1, 0, 0, DONE, 6), (1, 3, 0, NOT_FINITE, 2), (1, 3, 2, STOPPED, 2), (2, 0, 3, STOPPED, 3)],
)
def test_a_forward_begun_early_can_be_dropped(
    on_ranks: OnRanks, config_of: ConfigOf, num_ranks: int, spoil: int, ask: int, how: str, steps: int
) -> None:
    config = config_of("--train.steps=6", *ALONE, f"--parallel.data={num_ranks}", "--train.evaluate_every=0")
    assert on_ranks(num_ranks, run, config, spoil, ask) == num_ranks * [(how, steps, True)]


def run_out(config: TrainConfig) -> list[int]:
    """The step that ran out of memory, and AdamW's step count, if the third forward never fits into memory."""
    trainer = a_trainer(config, guarded=True)
    forward, numbers = trainer._forward, itertools.count(1)

    def short(batch: Any) -> Tensor:
        if next(numbers) >= 3:
            raise torch.OutOfMemoryError
        return forward(batch)

    trainer._forward = short  # type: ignore[method-assign]
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            trainer.take_step()
    return [trainer.step + 1, *{int(state["step"]) for state in trainer.parts.optimizer.state.values()}]


def test_missing_memory_is_reported_by_the_step_itself(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    assert on_ranks(1, run_out, config_of("--train.steps=6", *ALONE)) == [[3, 2]]
