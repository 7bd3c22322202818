"""The course's own checks of FlashAttention-2, with this package's bounds.

Without a GPU, the check of Triton's version runs in the interpreter, so shapes are small.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.cs336 import adapters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FUNCTIONS = {
    "pytorch": adapters.get_flashattention_autograd_function_pytorch,
    "triton": adapters.get_flashattention_autograd_function_triton,
}


@pytest.fixture(params=FUNCTIONS)
def flash(request: pytest.FixtureRequest) -> type[torch.autograd.Function]:
    if request.param == "triton":
        pytest.importorskip("triton")
    return FUNCTIONS[request.param]()


def make_inputs(num_queries: int = 128, num_keys: int = 128, head_dim: int = 64) -> tuple[Tensor, ...]:
    """q, k and v that require gradients, and dout."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 4, num_queries, head_dim, device=DEVICE)
    k, v = torch.randn(2, 4, num_keys, head_dim, device=DEVICE)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def textbook(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Differentiable out and log-sum-exp in float64."""
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if is_causal:
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_its_one_saved_lse(flash: type[torch.autograd.Function], is_causal: bool) -> None:
    q, k, v, _ = make_inputs()
    out = flash.apply(q, k, v, is_causal)
    rows = [saved for saved in out.grad_fn.saved_tensors if saved.shape == q.shape[:2]]
    assert len(rows) == 1
    assert len(out.grad_fn.saved_tensors) == 5
    want, want_lse = textbook(q, k, v, is_causal)
    assert relative(out, want) <= 1e-6
    assert relative(rows[0], want_lse) <= 1e-6


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(128, 128, 64), (63, 100, 40)], ids=str)
def test_backward_gives_all_three_gradients(
    flash: type[torch.autograd.Function], is_causal: bool, shape: tuple[int, int, int]
) -> None:
    q, k, v, dout = make_inputs(*shape)
    got = torch.autograd.grad(flash.apply(q, k, v, is_causal), (q, k, v), dout)
    want = torch.autograd.grad(textbook(q, k, v, is_causal)[0], (q, k, v), dout.double())
    for name, mine, theirs in zip("qkv", got, want, strict=True):
        assert relative(mine, theirs) <= 1e-5, f"d{name}"


def test_is_causal_is_off_unless_asked_for(flash: type[torch.autograd.Function]) -> None:
    q, k, v, _ = make_inputs(32, 32, 16)
    assert torch.equal(flash.apply(q, k, v), flash.apply(q, k, v, False))


def step(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """The leaderboard's loop body: a loss that is a plain sum."""
    q, k, v, _ = make_inputs(64, 64, 16)
    out = call(q, k, v, True)
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def test_it_may_be_compiled(flash: type[torch.autograd.Function]) -> None:
    for compiled, eager in zip(step(torch.compile(flash.apply, backend="aot_eager")), step(flash.apply), strict=True):
        assert torch.equal(compiled, eager)
