"""The promise: its numbers are correct, it holds in extreme cases, and wrong results break it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashspan import attention, promise
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Blocks, Mask, dense
from flashspan.masks.patterns import documents, ragged
from tests.kernels.cases import Inputs, Shape, Watched, make_inputs
from tests.kernels.cases import solve as solve_by_reference

NAMES = ("out", "lse", "dq", "dk", "dv")


def attend(x: Inputs, mask: Mask, scale: float, dropout: float = 0.0, *, dlse: bool = False) -> dict[str, Tensor]:
    """The results of `attention` and its gradients, by name."""
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = attention(*leaves, mask=mask, scale=scale, dropout=dropout, seed=5, return_lse=True)
    grads = torch.autograd.grad((out, lse) if dlse else out, leaves, (x.dout, x.dlse) if dlse else x.dout)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mask", [CAUSAL, documents([20, 0, 17]), ragged([5, 37], 37, 37), "blocks"], ids=str)
def test_the_answer_is_that_of_the_reference(mask: Mask | str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a few rows, for a mask or a bool tensor, with dropout and a gradient of lse."""
    monkeypatch.setattr(promise, "CHUNK", 2000)
    if isinstance(mask, str):
        mask = Blocks.from_dense(torch.rand(1, 4, 37, 37, generator=torch.Generator().manual_seed(1)) < 0.4, block=64)
    x = make_inputs(Shape(2, 4, 2, 37, 37, 8), seed=3, dtype=torch.float64)
    drop = Dropout(dropout, torch.tensor([5])) if dropout else None
    want = solve_by_reference(x, mask, 0.5, drop)
    drawn = dense(mask, 37, 37)
    drawn = drawn[:, None] if drawn.dim() == 3 else drawn.expand(2, 4, 37, 37)
    for given in (mask, drawn):
        answer = promise.solve(x.q, x.k, x.v, x.dout, mask=given, scale=0.5, dropout=drop, dlse=x.dlse)
        assert max(answer.ratios(torch.float64, **{name: getattr(want, name) for name in NAMES}).values()) <= 1.0
        if not dropout:
            assert answer.terms["out"] == pytest.approx(float(want.spread.norm()), rel=1e-12)


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize(
    ("dtype", "dropout", "head_dim"), [(torch.float16, 0.2, 7), (torch.bfloat16, 0.2, 64), (torch.float16, 0.0, 64)]
)
def test_gradients_of_sixteen_bits_are_rounded_once_on_a_cpu(
    dtype: torch.dtype, dropout: float, head_dim: int, watched: bool
) -> None:
    """They equal float32 gradients that are then rounded, even for a sharp softmax. Delta of a rounded output gave 4
    times that error."""
    x = make_inputs(Shape(2, 4, 2, 64, 64, head_dim), seed=0, dtype=dtype)
    drop = Dropout(dropout, torch.tensor([5])) if dropout else None
    with Watched() if watched else nullcontext():
        got = attend(x, EVERYTHING, 1.7, dropout)
    answer = promise.solve(x.q, x.k, x.v, x.dout, mask=EVERYTHING, scale=1.7, dropout=drop)
    for name in ("out", "dq", "dk", "dv"):
        exact = answer.results[name]
        assert float((got[name].detach().double() - exact).norm()) <= 1.02 * float(
            (exact.to(dtype).double() - exact).norm()
        )


@pytest.mark.parametrize("length", [1, 2, 3, 40])
@pytest.mark.parametrize("sharpness", [1.0, 10.0, 1000.0])
def test_where_gradients_cancel_the_promise_holds_and_the_plain_relative_error_does_not(
    length: int, sharpness: float
) -> None:
    """For rows that see one key, and rows in which one key has all the weight. Their dq is 0, or nearly 0, except for
    rounding."""
    plain, kept = [], []
    for seed in range(10):
        x = make_inputs(Shape(1, 2, 2, length, length, 16), seed=seed)
        scale = sharpness / 4
        got = attend(x, CAUSAL, scale, dlse=True)
        answer = promise.solve(x.q, x.k, x.v, x.dout, mask=CAUSAL, scale=scale, dlse=x.dlse)
        kept.append(max(answer.ratios(**got).values()))
        x.dlse = torch.zeros_like(x.dlse)
        got = attend(x, CAUSAL, scale)
        answer = promise.solve(x.q, x.k, x.v, x.dout, mask=CAUSAL, scale=scale)
        kept.append(max(answer.ratios(**got).values()))
        norm = float(answer.results["dq"].norm())
        error = float((got["dq"] - answer.results["dq"]).norm())
        plain.append(error / norm if norm else math.inf)
    assert max(kept) <= 1.0
    if sharpness == 1000.0 or length == 1:
        assert max(plain) > promise.GRADIENT


def test_the_promise_can_be_broken() -> None:
    """By a relative error of a few times the promise in any result, a NaN, a row too many, or another shape."""
    x = make_inputs(Shape(1, 2, 1, 50, 50, 16), seed=1)
    answer = promise.solve(x.q, x.k, x.v, x.dout, mask=CAUSAL, scale=0.25)
    assert answer.score <= promise.SCORE
    for name in NAMES:
        exact = answer.results[name]
        bound = promise.GRADIENT if name.startswith("d") else promise.FORWARD
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for times, keeps in ((0.5, True), (3.0, False)):
            wrong = exact + noise * (times * bound * exact.norm() / noise.norm())
            assert (answer.ratios(**{name: wrong})[name] <= 1.0) == keeps
        broken = exact.clone()
        broken.view(-1)[3] = torch.nan
        assert answer.ratios(**{name: broken})[name] == math.inf
        assert answer.ratios(**{name: exact[..., :1]})[name] == math.inf
    lse = answer.results["lse"].clone()
    lse[0, 0, 0] = -torch.inf
    assert answer.ratios(lse=lse)["lse"] == math.inf


def test_sixteen_bits_are_allowed_their_rounding_and_kernels_that_of_products() -> None:
    x = make_inputs(Shape(1, 2, 1, 50, 50, 16), seed=1, dtype=torch.bfloat16)
    answer = promise.solve(x.q, x.k, x.v, x.dout, mask=CAUSAL, scale=0.25)
    for name in ("out", "dq", "dk", "dv"):
        exact = answer.results[name]
        assert answer.ratios(torch.bfloat16, **{name: exact.bfloat16()})[name] <= 1.0
        twice = exact + 2 * (exact.bfloat16().double() - exact)
        twice += 3 * (exact.bfloat16().double() - exact)
        assert answer.ratios(torch.bfloat16, **{name: twice})[name] > 1.0
        assert replace(answer, rounded=True).ratios(torch.bfloat16, **{name: exact.bfloat16()})[name] < 0.5
