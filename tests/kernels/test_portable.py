"""The Triton kernels in the interpreter, on small shapes: every mask, GQA, carry, dropout, strides, empty rows.

On a GPU, test_contract.py and test_gpu.py test the same at full size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashspan.kernels import portable
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, Rows
from flashspan.masks.patterns import documents, ragged
from tests.kernels.cases import FORWARD_BOUND, GRADIENT_BOUND, Inputs, Shape, check_lse, make_inputs, relative, solve

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")

random = torch.Generator().manual_seed(0)
SCATTERED = Rows(*torch.randint(0, 71, (2, 50), generator=random), 70)  # intervals in no order: not convex

CASES: dict[str, tuple[Shape, Mask]] = {
    "full": (Shape(1, 1, 1, 150, 70, 16), EVERYTHING),
    "causal with shared heads": (Shape(1, 4, 2, 40, 170, 16), CAUSAL),
    "window, odd head size": (Shape(2, 1, 1, 65, 130, 20), Band(-30, 40)),
    "documents": (Shape(1, 2, 1, 60, 60, 32), documents([10, 0, 20, 30]) & CAUSAL),
    "ragged batch": (Shape(2, 1, 1, 60, 70, 16), ragged([10, 40], 60, 70)),
    "scattered rows": (Shape(1, 1, 1, 50, 70, 16), SCATTERED),
    "rows that see nothing": (Shape(1, 1, 1, 50, 30, 16), Band(None, -7)),
    "one query, one key": (Shape(1, 1, 1, 1, 1, 1), CAUSAL),
    "large head, two passes": (Shape(1, 1, 1, 20, 40, 130), CAUSAL),
}


def forward(x: Inputs, mask: Mask, *, scale: float = 0.3, dropout: Dropout | None = None, parts: int = 1) -> Carry:
    """Forward in one call, or in several over parts of the keys."""
    if parts == 1:
        return portable.forward(x.q, x.k, x.v, Problem(mask, scale, dropout), out_dtype=x.q.dtype)
    T, S = x.q.shape[2], x.k.shape[2]
    carry = None
    for low in range(0, S, -(-S // parts)):
        part = range(low, min(S, low - (-S // parts)))
        drop = dropout and Dropout(
            dropout.p, dropout.seed, torch.arange(T).int(), torch.arange(part.start, part.stop).int()
        )
        k, v = x.k[:, :, low : part.stop], x.v[:, :, low : part.stop]
        sliced = mask.slice(range(T), part)
        carry = portable.forward(x.q, k, v, Problem(sliced, scale, drop), carry=carry)
    assert carry is not None
    return carry


def backward(
    x: Inputs, mask: Mask, lse: Tensor, delta: Tensor, *, scale: float = 0.3, dropout: Dropout | None = None
) -> list[Tensor]:
    grads = [torch.full_like(t, torch.nan) for t in (x.q, x.k, x.v)]
    dq, dk, dv = grads
    portable.backward(
        x.dout, x.q, x.k, x.v, lse, delta, Problem(mask, scale, dropout), dq=dq, dk=dk, dv=dv, accumulate=False
    )
    return grads


def check(
    x: Inputs, mask: Mask, *, scale: float = 0.3, dropout: Dropout | None = None, loose: float = 1.0, parts: int = 1
) -> None:
    right = solve(x, mask, scale, dropout)
    out, lse = forward(x, mask, scale=scale, dropout=dropout, parts=parts)
    assert relative(out, right.out) <= FORWARD_BOUND * loose
    check_lse(lse, right.lse)
    grads = backward(x, mask, lse, right.delta.float(), scale=scale, dropout=dropout)
    for grad, wanted in zip(grads, (right.dq, right.dk, right.dv), strict=True):
        assert relative(grad, wanted, right.dv) <= GRADIENT_BOUND * loose


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str) -> None:
    shape, mask = CASES[name]
    check(make_inputs(shape, seed=1), mask)


@pytest.mark.parametrize("name", ["causal with shared heads", "scattered rows"])
def test_a_carry_continues_the_softmax(name: str) -> None:
    shape, mask = CASES[name]
    check(make_inputs(shape, seed=2), mask, parts=3)


def test_sixteen_bits() -> None:
    check(make_inputs(Shape(1, 2, 2, 70, 70, 16), seed=3, dtype=torch.float16), CAUSAL, loose=1e3)


@pytest.mark.parametrize("parts", [1, 2])
def test_dropout_is_the_contract_s(parts: int) -> None:
    drop = Dropout(0.3, torch.tensor([0x123456789ABCDEF]))
    check(make_inputs(Shape(2, 2, 1, 40, 40, 16), seed=4), CAUSAL, dropout=drop, parts=parts)


def test_a_negative_scale() -> None:
    check(make_inputs(Shape(1, 1, 1, 70, 70, 16), seed=5), CAUSAL, scale=-1.5)


def test_strided_views() -> None:
    check(make_inputs(Shape(1, 2, 1, 40, 40, 16), seed=6, layout="fused"), CAUSAL)


def test_gradients_add_into_what_is_there() -> None:
    x, mask = make_inputs(Shape(1, 1, 1, 40, 40, 16), seed=7), CAUSAL
    right = solve(x, mask, 0.3)
    start = [torch.randn_like(t) for t in (x.q, x.k, x.v)]
    dq, dk, dv = (t.clone() for t in start)
    lse, delta = right.lse.float(), right.delta.float()
    portable.backward(x.dout, x.q, x.k, x.v, lse, delta, Problem(mask, 0.3), dq=dq, dk=dk, dv=dv, accumulate=True)
    for total, first, wanted in zip((dq, dk, dv), start, (right.dq, right.dk, right.dv), strict=True):
        assert relative(total, wanted + first) <= GRADIENT_BOUND


def test_nan_in_a_key_reaches_only_the_queries_that_see_it() -> None:
    x = make_inputs(Shape(1, 1, 1, 40, 40, 16), seed=8)
    clean = solve(x, CAUSAL, 0.3)
    for tensor, value in ((x.k, torch.nan), (x.v, torch.inf)):
        tensor[:, :, 25] = value
    out, lse = forward(x, CAUSAL)
    assert relative(out[:, :, :25], clean.out[:, :, :25]) <= FORWARD_BOUND
    assert not out[:, :, 25:].isfinite().any()
    dq, _, _ = backward(x, CAUSAL, lse, clean.delta.float())
    assert relative(dq[:, :, :25], clean.dq[:, :, :25]) <= GRADIENT_BOUND


@pytest.mark.parametrize("shape", [(1, 1, 1, 0, 5, 8), (1, 1, 1, 5, 0, 8), (0, 1, 1, 5, 5, 8)])
def test_nothing_in_gives_nothing_out(shape: tuple[int, ...]) -> None:
    x = make_inputs(Shape(*shape), seed=9)
    out, lse = forward(x, EVERYTHING)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert all(not grad.any() for grad in backward(x, EVERYTHING, lse, torch.zeros_like(lse)))
