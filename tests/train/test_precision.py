"""16-bit products, recomputed activations: other ways to the same curve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashspan.train import TrainConfig
from flashspan.train.loop import Trainer

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]


def losses(config: TrainConfig, scale: float | None = None) -> tuple[list[float], float, set[torch.dtype]]:
    """The loss of each step, the last loss scale, and the types of the weights."""
    trainer = Trainer(config)
    trainer.scale = trainer.scale if scale is None else scale
    curve = []
    while trainer.step < config.train.steps:
        before = trainer.step
        loss = trainer.take_step()[0]
        if trainer.step > before:
            curve.append(loss)
    return curve, trainer.scale, {param.dtype for param in trainer.parts.names}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [["--parallel.context=2"], ["--parallel.shard=2", "--parallel.context=1"]])
def test_16_bit_products_follow_the_float32_curve(
    on_ranks: OnRanks, config_of: ConfigOf, precision: str, options: list[str]
) -> None:
    want = on_ranks(2, losses, config_of(*options))[0][0]
    got, _, dtypes = on_ranks(2, losses, config_of(*options, f"--train.precision={precision}"))[0]
    assert dtypes == {torch.float32}
    assert got != want
    assert all(abs(a - b) <= 1e-2 * b for a, b in zip(got, want, strict=True))


def test_an_overflow_of_float16_lowers_the_scale_and_takes_the_step_again(
    on_ranks: OnRanks, config_of: ConfigOf
) -> None:
    config = config_of("--parallel.context=2", "--train.precision=float16")
    calm = on_ranks(2, losses, config)[0]
    for curve, scale, _ in on_ranks(2, losses, config, 2.0**30):
        assert scale < 2.0**30
        assert all(abs(a - b) <= 1e-2 * b for a, b in zip(curve, calm[0], strict=True))


@pytest.mark.parametrize("mode", ["full", "attention"])
def test_recomputing_on_one_device_changes_no_bit(on_ranks: OnRanks, config_of: ConfigOf, mode: str) -> None:
    want = on_ranks(1, losses, config_of())[0][0]
    assert on_ranks(1, losses, config_of(f"--train.recompute={mode}"))[0][0] == want


def count_attentions(config: TrainConfig) -> int:
    """How often attention's forward ran in a step."""
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal calls
            calls += op is torch.ops.flashspan.attend.default
            return op(*args, **(kwargs or {}))

    trainer = Trainer(config)
    with Count():
        trainer.take_step()
    return calls


@pytest.mark.parametrize(("mode", "calls"), [("none", 2), ("full", 4), ("attention", 2)])
def test_attention_aware_recomputing_runs_attention_once(
    on_ranks: OnRanks, config_of: ConfigOf, mode: str, calls: int
) -> None:
    assert on_ranks(1, count_attentions, config_of(f"--train.recompute={mode}")) == [calls]
