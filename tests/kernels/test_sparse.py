"""The Triton kernels for block maps, in the interpreter: every kind of tile, GQA, carry, dropout, ragged ends."""

from __future__ import annotations

import pytest
import torch

from flashspan.kernels import portable
from flashspan.kernels.contract import Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import CAUSAL, Band, Blocks, Rows
from tests.kernels.cases import GRADIENT_BOUND, Shape, make_inputs, relative, solve
from tests.kernels.test_portable import backward, check, forward

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted")

random = torch.Generator().manual_seed(0)


def scattered(*shape: int, share: float = 0.5) -> Blocks:
    """Random pairs, with a stretch of empty rows, a full square and an empty one."""
    visible = torch.rand(shape, generator=random) < share
    visible[..., 20:30, :] = False
    visible[..., 64:, :64] = True
    visible[..., :64, 64:] = False
    return Blocks.from_dense(visible, block=64)


WATCHERS = Rows(torch.zeros(260).int(), torch.where(torch.arange(260) // 10 == 8, 260, 0), 260)  # ten queries see all

CASES: dict[str, tuple[Shape, Blocks]] = {
    "bits, ragged": (Shape(1, 1, 1, 70, 150, 16), scattered(70, 150)),
    "a map for each head, shared keys": (Shape(1, 2, 1, 70, 70, 16), scattered(1, 2, 70, 70)),
    "a map for each sequence": (Shape(2, 1, 1, 70, 65, 20), scattered(2, 1, 70, 65)),
    "full and partial tiles": (Shape(1, 2, 1, 200, 200, 16), Blocks.of(Band(-200, 20), 200, 200, block=64)),
    "tiles larger than the kernels'": (Shape(1, 1, 1, 400, 300, 16), Blocks.of(Band(None, 20), 400, 300)),
    "unequal edges": (Shape(1, 1, 1, 130, 130, 32), Blocks.of(CAUSAL, 130, 130, block=(64, 128))),
    "nothing": (Shape(1, 1, 1, 70, 70, 16), Blocks.of(Band(0, -1), 70, 70)),
    "a long line": (Shape(1, 2, 1, 260, 260, 16), Blocks.of(Band(0, 0), 260, 260, block=64) | WATCHERS),
    "large head, two passes": (Shape(1, 1, 1, 33, 40, 130), scattered(33, 40)),
}


def test_the_cases_are_what_they_are_called() -> None:
    assert CASES["a long line"][1].rows.num_long > 0
    for name in ("full and partial tiles", "tiles larger than the kernels'"):
        spans = CASES[name][1].rows.spans
        assert set(CASES[name][1].kinds().flatten().tolist()) == {0, 1, 2}
        assert int((spans[..., 1] - spans[..., 0]).max()) >= 2, "a line with two full tiles"


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str) -> None:
    shape, mask = CASES[name]
    check(make_inputs(shape, seed=1), mask)


def test_a_carry_continues_the_softmax() -> None:
    shape, mask = CASES["a map for each head, shared keys"]
    check(make_inputs(shape, seed=2), mask, parts=2)


def test_sixteen_bits() -> None:
    check(make_inputs(Shape(1, 1, 1, 70, 70, 16), seed=3, dtype=torch.float16), scattered(70, 70), loose=1e3)


def test_dropout_is_the_contract_s() -> None:
    drop = Dropout(0.3, torch.tensor([0x123456789ABCDEF]))
    check(make_inputs(Shape(1, 2, 1, 70, 70, 16), seed=4), scattered(1, 2, 70, 70), dropout=drop)


def test_nan_in_a_masked_key_reaches_no_result() -> None:
    visible = torch.rand(70, 70, generator=random) < 0.5
    visible[:40, 25] = False
    mask, x = Blocks.from_dense(visible, block=64), make_inputs(Shape(1, 1, 1, 70, 70, 16), seed=8)
    clean = solve(x, mask, 0.3)
    x.k[:, :, 25], x.v[:, :, 25] = torch.nan, torch.inf
    out, lse = forward(x, mask)
    blind = ~visible[:, 25]
    assert relative(out[:, :, blind], clean.out[:, :, blind]) <= 1e-6
    assert not out[:, :, ~blind].isfinite().any()
    dq, _, _ = backward(x, mask, lse, clean.delta.float())
    assert relative(dq[:, :, blind], clean.dq[:, :, blind]) <= GRADIENT_BOUND


def test_gradients_add_into_what_is_there() -> None:
    x, mask = make_inputs(Shape(1, 1, 1, 70, 70, 16), seed=7), scattered(70, 70)
    right = solve(x, mask, 0.3)
    start = [torch.randn_like(t) for t in (x.q, x.k, x.v)]
    dq, dk, dv = (t.clone() for t in start)
    lse, delta = right.lse.float(), right.delta.float()
    portable.backward(x.dout, x.q, x.k, x.v, lse, delta, Problem(mask, 0.3), dq=dq, dk=dk, dv=dv, accumulate=True)
    for total, first, wanted in zip((dq, dk, dv), start, (right.dq, right.dk, right.dv), strict=True):
        assert relative(total, wanted + first) <= GRADIENT_BOUND
