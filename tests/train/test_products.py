"""A layer's matmuls as one operator each: their results and gradients are correct, also compiled and recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan import attention
from flashspan.model import Llama, LlamaConfig, preset
from flashspan.train import TrainConfig, products

from .test_precision import kept_numbers, losses, quick_compiler

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]
SHAPE = LlamaConfig(vocab_size=61, width=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=80)


def gradients(model: Llama, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients of all parameters."""
    model.zero_grad()
    loss = model.loss(model(tokens, positions), tokens.roll(-1, 1))
    loss.backward()
    return {"loss": loss.detach()} | {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("positions", [torch.arange(17), torch.arange(34).view(2, 17) * 3])
def test_a_model_is_the_same_with_fused_operators(positions: Tensor) -> None:
    model = Llama(SHAPE, attention=attention).double()
    model.initialize(1)
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(2))
    want = gradients(model, tokens, positions)
    model.use(products.PRODUCTS)
    got = gradients(model, tokens, positions)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_pytorch_is_used_if_the_compiler_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(products, "no_hopper", lambda _: None)
    shape = preset("llama-3.2-1b")
    asked = products._runs
    asked.cache_clear()
    assert products.serves(shape, torch.device("cpu"), "bfloat16")
    assert not products.serves(shape, torch.device("cpu"), "float32")
    asked.cache_clear()
    monkeypatch.setattr(products, "linear_add", lambda *_: 1 / 0)
    assert not products.serves(shape, torch.device("cpu"), "bfloat16")
    assert "ZeroDivisionError" in caplog.text
    asked.cache_clear()


def used(run: Callable[..., Any], *args: Any) -> Any:
    """The result of `run` as on a device with kernels for all these operators."""
    real = products.serves
    products.serves = lambda *_: True  # type: ignore[assignment]
    try:
        with quick_compiler():
            return run(*args)
    finally:
        products.serves = real


def test_a_compiled_layer_leaves_fused_operators_unchanged(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--train.recompute=elementwise", "--train.compile=true", "--train.precision=bfloat16"]
    config = config_of(*options, "--train.weights=bfloat16", "--parallel.context=1")
    shape = config.model.resolve()
    got, _, roots = on_ranks(1, used, kept_numbers, config)[0]
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    assert got == 63 * (2 * shape.width + heads + 2 * shape.ffn_width)
    assert roots == 2


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["--train.compile=true", "--train.recompute=elementwise", "--parallel.context=2"], marks=pytest.mark.slow
        ),
        ["--train.recompute=full", "--parallel.data=2", "--parallel.context=1"],
        pytest.param(
            ["--parallel.shard=2", "--parallel.context=1", "--train.compile=true", "--train.recompute=elementwise"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_with_fused_products_follows_the_curve(
    on_ranks: OnRanks, config_of: ConfigOf, options: list[str]
) -> None:
    options = [*options, "--train.steps=3"]
    want = on_ranks(2, losses, config_of(*[x for x in options if "compile" not in x]))[0][0]
    for got, *_ in on_ranks(2, used, losses, config_of(*options)):
        assert all(abs(a - b) <= 1e-5 * b for a, b in zip(got, want, strict=True))


def test_a_run_in_bfloat16_with_fused_products_follows_the_curve(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--train.precision=bfloat16", "--parallel.context=1", "--train.steps=3"]
    want = on_ranks(1, losses, config_of(*options))[0][0]
    got = on_ranks(1, used, losses, config_of(*options))[0][0]
    assert got != want
    assert all(abs(a - b) <= 1e-2 * b for a, b in zip(got, want, strict=True))
