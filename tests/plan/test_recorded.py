"""The planner's time against what an H200 took (h200.json), and the host's part of it against the model's operators."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashspan.bench.model import Setting, Stepper
from flashspan.model import LlamaConfig
from flashspan.plan.devices import make_cluster
from flashspan.plan.step import CAST_OPERATORS, LAYER_OPERATORS, OUTER_OPERATORS, num_tensors
from tests.plan.twelve import CASES, Samples, off, ratios


@pytest.fixture(scope="module")
def samples() -> Samples:
    return json.loads((Path(__file__).parent / "h200.json").read_text(encoding="utf-8"))["ms"]


def test_calibrated_time_is_within_15_percent_on_12_recorded_configurations(samples: Samples) -> None:
    assert set(samples) == set(CASES)
    assert not off(ratios(make_cluster("H200", 1), samples), 0.15)


@pytest.mark.parametrize("word", ["small", "medium", "large"])
def test_a_model_left_out_of_the_calibration_is_planned_within_20_percent(samples: Samples, word: str) -> None:
    used = [case for case in CASES if word not in case.split()]
    assert len(used) == 8
    assert not off(ratios(make_cluster("H200", 1), samples, used), 0.20)


class Count(TorchDispatchMode):
    """How often each operator is dispatched, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class OneOperator(torch.autograd.Function):
    """In the place of a GPU's norm: one operator forward, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout * 1, ctx.saved_tensors[0]


class NoAttention(torch.autograd.Function):
    """Nothing: an attention's operators are counted apart."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dout, dout, dout


def count_operators(num_layers: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of forward and of backward, loss included."""
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: OneOperator.apply(x, self.weight))
    config = LlamaConfig(500, 128, num_layers, 4, 4, 384)
    stepper = Stepper(Setting("tiny", 2, 64, dtype), torch.device("cpu"), config)
    assert len(list(stepper.model.parameters())) == num_tensors(config)
    stepper.model.attend = lambda q, k, v, **_: NoAttention.apply(q, k, v)
    counts = []
    for call in (stepper.forward, stepper.backward):
        with Count() as count:
            call()
        counts.append(count.calls.total())
    return counts[0], counts[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planner_knows_how_many_operators_a_layer_launches(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = (count_operators(num, dtype, monkeypatch) for num in (2, 3))
    for index, (two, three) in enumerate(zip(few, more, strict=True)):
        planned = LAYER_OPERATORS[index] + (CAST_OPERATORS[index] if dtype == "bfloat16" else 0)
        assert three - two == pytest.approx(planned, rel=0.05)
        assert two - 2 * (three - two) == pytest.approx(OUTER_OPERATORS[index], abs=5)
