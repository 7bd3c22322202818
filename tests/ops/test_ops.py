"""The fused operators of a layer match their references, satisfy their declarations to compilers, and work if Triton's
compiler fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import ops
from flashspan.kernels.failure import KernelFailed
from flashspan.model.loss import IGNORE, losses_and_gradients_at_once
from flashspan.ops import choice, cross_entropy


@pytest.mark.parametrize("operator", ["project", "add_product", "feed_forward", "sum_of_products", "gated_backward"])
def test_operators_keep_their_word_to_compilers(operator: str) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(
            *shape, dtype=torch.float64, requires_grad=operator not in ("sum_of_products", "gated_backward")
        )

    angles = torch.randn(5, 4, dtype=torch.float64)
    arguments: dict[str, tuple[Any, ...]] = {
        "project": (make(10, 6), make(16, 6), make(8, 6), make(8, 6), angles.cos(), angles.sin(), 0.3),
        "add_product": (make(10, 6), make(10, 4), make(6, 4)),
        "feed_forward": (make(10, 6), make(10, 6), make(9, 6), make(9, 6), make(6, 9)),
        "sum_of_products": ([make(10, 6), make(10, 4)], [make(6, 3), make(4, 3)]),
        "gated_backward": (make(10, 6), make(6, 9), make(10, 9), make(10, 9)),
    }
    torch.library.opcheck(getattr(torch.ops.flashspan, operator).default, arguments[operator])


def some(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def make_layer(name: str, **changed: Tensor) -> Tensor:
    """An operator's first result; `changed` replaces tensors that fit together."""
    cos = torch.ones(5, 1, 4)
    fitting = {
        "qkv_rope": {"x": (2, 5, 6), "wq": (16, 6), "wk": (8, 6), "wv": (8, 6)},
        "linear_add": {"x": (2, 5, 6), "a": (2, 5, 4), "weight": (6, 4)},
        "swiglu": {"x": (2, 5, 6), "gate": (9, 6), "up": (9, 6), "down": (6, 9)},
    }[name]
    given = {key: torch.zeros(shape) for key, shape in fitting.items()} | changed
    if name == "qkv_rope":
        given = {"cos": cos, "sin": cos} | given
    return getattr(ops, name)(**given)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("qkv_rope", {"cos": (10, 1, 4), "sin": (10, 1, 4)}, "cut a longer table"),
        ("qkv_rope", {"cos": (1, 1, 4), "sin": (1, 1, 4)}, r"cos and sin \[5, 1, D / 2\]"),
        ("qkv_rope", {"cos": (2, 1, 1, 4), "sin": (2, 1, 1, 4)}, r"\[2, 5, 1, D / 2\]"),
        ("qkv_rope", {"sin": (5, 1, 3)}, "cos and sin"),
        ("qkv_rope", {"wk": (8, 7)}, r"wk \[rows, 6\]: got \(8, 7\)"),
        ("linear_add", {"a": (5, 2, 4)}, r"the same B and the same T: got x \(2, 5, 6\), a \(5, 2, 4\)"),
        ("linear_add", {"weight": (1, 4)}, r"weight \[6, 4\]: got \(1, 4\)"),
        ("swiglu", {"residual": (5, 2, 6)}, "the same B and the same T"),
        ("swiglu", {"up": (1, 6)}, r"up \[9, 6\]"),
        ("swiglu", {"residual": (2, 5, 6), "down": (7, 9)}, r"down \[6, 9\]"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(name: str, changed: dict[str, tuple[int, ...]], said: str) -> None:
    make_layer(name)
    with pytest.raises(ValueError, match=said):
        make_layer(name, **{key: torch.zeros(shape) for key, shape in changed.items()})


def test_angles_that_require_gradients_are_refused() -> None:
    angles = torch.ones(5, 1, 4, requires_grad=True)
    with pytest.raises(ValueError, match="computes no gradients of cos and sin"):
        make_layer("qkv_rope", cos=angles.cos(), sin=angles.sin())


def test_autocast_leaves_float64() -> None:
    x, weight = some(2, 5, 6, seed=0), some(6, 6, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ops.linear_add(x, x, weight), x + F.linear(x, weight))


def test_they_are_what_they_say_in_anyones_model() -> None:
    x, weights = some(2, 5, 6, seed=0), [some(16, 6, seed=1), some(8, 6, seed=2), some(8, 6, seed=3)]
    angles = torch.rand(5, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    q, k, v = ops.qkv_rope(x, *weights, angles.cos(), angles.sin(), q_scale=0.5)
    heads = [F.linear(x, weight).unflatten(-1, (-1, 8)) for weight in weights]
    pairs = [torch.complex(*head.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles) for head in heads[:2]]
    wanted = [torch.cat([pair.real, pair.imag], -1) for pair in pairs]
    gate, up, down, out = some(9, 6, seed=5), some(9, 6, seed=6), some(6, 9, seed=7), some(6, 16, seed=8)
    fed = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    made = [q, k, v, ops.swiglu(x, gate, up, down), ops.swiglu(x, gate, up, down, residual=x)]
    made.append(ops.linear_add(x, q.flatten(-2), out))
    wanted = [0.5 * wanted[0], wanted[1], heads[2], fed, x + fed, x + F.linear(0.5 * wanted[0].flatten(-2), out)]
    leaves = [x, *weights, gate, up, down, out]
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other)
        dout = some(*one.shape, seed=9).detach()
        found, right = (
            torch.autograd.grad(y, leaves, dout, retain_graph=True, materialize_grads=True) for y in (one, other)
        )
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b)


def test_a_kernel_that_does_not_compile_is_replaced_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def kernel() -> str:
        calls.append(None)
        raise KernelFailed("could not be compiled here: no such instruction")

    monkeypatch.setattr(choice, "RETIRED", {})
    monkeypatch.setattr(choice, "fits", lambda *_: True)
    with pytest.warns(RuntimeWarning, match="swiglu .*no such instruction.*PyTorch is used"):
        assert choice.choose("swiglu", kernel, lambda: "reference") == "reference"
    assert choice.choose("swiglu", kernel, lambda: "reference") == "reference"
    assert len(calls) == 1
    assert choice.choose("linear_add", lambda: "kernel", lambda: "reference") == "kernel", "another operator"


def test_what_no_kernel_takes_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_is_hopper", lambda device: True)
    wide, odd = torch.zeros(4, 16).bfloat16(), torch.zeros(4, 12).bfloat16()
    assert choice.fits(wide, wide)
    assert not choice.fits(wide, odd)
    assert not choice.fits(wide, wide.half())
    assert not choice.fits(wide.float())


def test_losses_and_their_gradients_are_the_model_s() -> None:
    logits = some(7, 11, seed=0).detach()
    targets = torch.tensor([3, IGNORE, 0, 10, 5, IGNORE, 2])
    for one, other in zip(
        cross_entropy.losses_and_gradients(logits, targets, ignored=IGNORE),
        losses_and_gradients_at_once(logits, targets),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
