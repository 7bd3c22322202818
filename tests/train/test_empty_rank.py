"""A context rank without tokens takes part in training: the loss and the gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashspan.train import TrainConfig
from flashspan.train.loop import Trainer

SPLIT = ("--parallel.context=2", "--parallel.tensor=2")


def take_steps(config: TrainConfig) -> tuple[int, list[tuple[float, float]]]:
    """The number of a sequence's tokens on this rank, and the loss and gradient norm of each step."""
    trainer = Trainer(config)
    attend = trainer.parts.attend
    held = config.data.sequence if attend is None else attend.placement(config.data.sequence).sizes[attend.rank]
    return held, [trainer.take_step()[:2] for _ in range(config.train.steps)]


@pytest.mark.parametrize(
    "options",
    [
        ("--data.sequence=64", "--parallel.layout=balanced"),  # split into blocks of 128
        ("--data.sequence=1",),
        ("--data.sequence=1", "--train.recompute=full", "--train.accumulate=2"),
    ],
    ids=["balanced", "one token", "one token, recomputed"],
)
def test_a_rank_without_tokens_trains_along(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], options: tuple[str, ...]
) -> None:
    given = ("--train.batch=4", "--train.steps=3", *options)
    alone = [option for option in given if "layout" not in option]
    _, want = on_ranks(1, take_steps, config_of(*alone))[0]
    results = on_ranks(4, take_steps, config_of(*given, *SPLIT))
    assert min(held for held, _ in results) == 0
    for _, curve in results:
        for (loss, norm), (right, right_norm) in zip(curve, want, strict=True):
            assert loss == pytest.approx(right, rel=2e-5)
            assert norm == pytest.approx(right_norm, rel=2e-5)
