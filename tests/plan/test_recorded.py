"""The planner's time compared with an H200's, and its counts with the model's operators.

h200.json: small configurations; h200_large.json: the 12 that test_gpu.py measures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashspan.bench.suites.model import Setting, Stepper
from flashspan.model import LlamaConfig
from flashspan.model.loss import linear_cross_entropy
from flashspan.plan import ParallelConfig, Run, ledger, step_time
from flashspan.plan.devices import make_cluster
from flashspan.plan.step import (
    CAST_OPERATORS,
    LAYER_OPERATORS,
    OUTER_OPERATORS,
    moved_per_logit,
    moved_per_token,
    num_tensors,
)
from tests.plan.twelve import MEASURED, RECORDED, STEPS, WARMUP, Samples, calibrated, off, parse, ratios

CONFIG = LlamaConfig(250, 64, 2, 4, 4, 192)


def recorded(file: str) -> Samples:
    return json.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))["ms"]


@pytest.fixture(scope="module")
def samples() -> Samples:
    return recorded("h200.json")


@pytest.mark.parametrize(("file", "cases"), [("h200.json", RECORDED), ("h200_large.json", MEASURED)])
def test_calibrated_time_is_within_15_percent_on_12_configurations(file: str, cases: list[str]) -> None:
    samples = recorded(file)
    assert set(samples) == set(cases)
    assert not off(ratios(make_cluster("H200", 1), samples), 0.15)


@pytest.mark.parametrize("word", ["small", "medium", "large"])
def test_a_model_outside_of_the_calibration_is_planned_within_20_percent(samples: Samples, word: str) -> None:
    used = [case for case in RECORDED if word not in case.split()]
    assert len(used) == 8
    assert not off(ratios(make_cluster("H200", 1), samples, used), 0.20)


def test_the_12_to_measure_are_bound_by_the_device_and_differ(samples: Samples) -> None:
    cluster = calibrated(make_cluster("H200", 1), samples)
    # A host with half the recorded speed, and one that takes no time.
    slow, none = (replace(cluster, device=replace(cluster.device, launch=launch))
                  for launch in (2 * cluster.device.launch, 1e-15))  # fmt: skip
    seconds = {}
    for case in MEASURED:
        run = parse(case)
        seconds[case] = step_time(run, ParallelConfig(), none).total
        assert seconds[case] > 0.06, case
        assert 1 - seconds[case] / step_time(run, ParallelConfig(), slow).total < 0.10, f"{case} waits for the host"
        assert ledger(run, ParallelConfig()).peak < 100 * 2**30, case
    # A sample is inference, which takes about a third of a step, and the step.
    assert (WARMUP + STEPS) * 4 / 3 * sum(seconds.values()) < 60
    models, _, dtypes = (set(words) for words in zip(*(case.split() for case in MEASURED), strict=True))
    assert len(seconds) == 12
    assert len(models) >= 5
    assert dtypes == {"float32", "bfloat16"}
    for dtype in dtypes:
        assert {parse(case).tokens for case in MEASURED if dtype in case} == {512, 1024, 2048, 4096}


class Count(TorchDispatchMode):
    """The number of dispatched operators, forward or backward, and the bytes moved by those that are not matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.moved = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.calls += 1
            self.moved += self._moved(func, [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)])
        return out

    def _moved(self, func: Any, tensors: list[Tensor]) -> int:
        name = func._opname
        if func.is_view or name in ("mm", "detach", "empty", "empty_like", "_unsafe_view", "gather"):
            return 0  # a gather reads only one target per row
        if name == "logsumexp":  # on a GPU: maximum (one pass), differences (two), exponentials (two), sum (one)
            return 6 * tensors[0].nbytes
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


class OneOperator(torch.autograd.Function):
    """Replaces a GPU's norm: one operator forward, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout * 1, ctx.saved_tensors[0]


class NoAttention(torch.autograd.Function):
    """Replaces attention by no operators: those of attention are counted separately."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dout, dout, dout


def count(num_layers: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Count, Count]:
    """Forward and backward with the loss, for 128 tokens."""
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: OneOperator.apply(x, self.weight))
    config = replace(CONFIG, num_layers=num_layers)
    stepper = Stepper(Setting("tiny", 2, 64, dtype), torch.device("cpu"), config)
    assert len(list(stepper.model.parameters())) == num_tensors(config)
    stepper.model.attend = lambda q, k, v, **_: NoAttention.apply(q, k, v)
    with Count() as forward:
        stepper.forward()
    with Count() as backward:
        stepper.backward()
    return forward, backward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planner_counts_the_operators_of_a_layer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = (count(num, dtype, monkeypatch) for num in (2, 3))
    for index, (two, three) in enumerate(zip(few, more, strict=True)):
        planned = LAYER_OPERATORS[index] + (CAST_OPERATORS[index] if dtype == "bfloat16" else 0)
        layer = three.calls - two.calls
        assert layer == pytest.approx(planned, rel=0.05)
        assert two.calls - 2 * layer == pytest.approx(OUTER_OPERATORS[index], abs=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planner_counts_the_bytes_a_layer_moves(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two, three = (sum(one.moved for one in count(num, dtype, monkeypatch)) for num in (2, 3))
    planned = 128 * 3 * moved_per_token(Run(CONFIG, 2, 64, dtype), 1)  # backward moves twice what forward does
    if dtype == "bfloat16":  # weights are cast, and their gradients back
        planned += 12 * (CONFIG.num_matrix_parameters - CONFIG.vocab_size * CONFIG.width) / CONFIG.num_layers
    assert three - two == pytest.approx(planned, rel=0.10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_planner_counts_the_bytes_the_loss_moves(dtype: torch.dtype) -> None:
    x, weight = torch.randn(512, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    with Count() as found, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        linear_cross_entropy(x, weight, torch.randint(5000, (512,)))
    run = Run(CONFIG, 1, 512, str(dtype).removeprefix("torch."), plain_loss=True)
    assert found.moved / (512 * 5000) == pytest.approx(moved_per_logit(run, 1), rel=0.02)
