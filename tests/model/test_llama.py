"""The model: its logits compared with an independent model and with transformers, its loss, its positions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention, masks
from flashspan.model import (
    IGNORE,
    PRESETS,
    Llama,
    LlamaConfig,
    RopeScaling,
    linear_cross_entropy,
    preset,
    save_llama,
)
from flashspan.model.loss import _add_product, losses_and_gradients_at_once

FAMILIES = {
    "llama-2": LlamaConfig(101, 48, 2, 4, 4, 80),
    "llama-3": LlamaConfig(101, 48, 2, 6, 2, 80, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
    "llama-3.2": LlamaConfig(
        101, 48, 3, 6, 2, 80, head_dim=16, rope_theta=5e5, rope_scaling=RopeScaling(32.0, 1, 4, 32), tie_embeddings=True
    ),
    "llama-2-tied": LlamaConfig(101, 48, 2, 4, 4, 80, tie_embeddings=True, norm_eps=1e-6),
}


def make(config: LlamaConfig, seed: int = 0) -> Llama:
    """A model with weights large enough to make mistakes visible."""
    model = Llama(config, attention=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            scale = 0.3 if "norm" in name else 0.15
            param.copy_(torch.randn(param.shape, generator=generator) * scale + ("norm" in name))
    return model


def draw_tokens(config: LlamaConfig, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def eager_logits(model: Llama, tokens: Tensor) -> Tensor:
    """The same network in float64, written separately from the papers, with complex numbers for the rotation."""
    config = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weights[name]

    num_tokens, half = tokens.shape[1], config.head_dim // 2
    rates = []
    for pair in range(half):
        rate = config.rope_theta ** (-2.0 * pair / config.head_dim)
        if config.rope_scaling is not None:
            scaling = config.rope_scaling
            wavelength = 2 * math.pi / rate
            long, short = (scaling.original_max_tokens / f for f in (scaling.low_freq_factor, scaling.high_freq_factor))
            if wavelength > long:
                rate /= scaling.factor
            elif wavelength >= short:
                smooth = (scaling.original_max_tokens / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                rate = (1 - smooth) * rate / scaling.factor + smooth * rate
        rates.append(rate)
    turns = torch.polar(
        torch.ones(num_tokens, half).double(), torch.outer(torch.arange(num_tokens), torch.tensor(rates).double())
    )

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["embed.weight"][tokens]
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attention_norm.weight")
        q, k, v = (
            (h @ weights[f"{at}attention.{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for y in (k, v))
        scores = (q @ k.mT / math.sqrt(config.head_dim)).masked_fill(hidden, -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights[at + "attention.output.weight"].T
        h = norm(x, at + "ffn_norm.weight")
        gate, up = (h @ weights[f"{at}ffn.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "ffn.down.weight"].T
    return norm(x, "norm.weight") @ weights["head.weight"].T


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_an_independent_float64_model(family: str) -> None:
    model = make(FAMILIES[family])
    tokens = draw_tokens(model.config, 2, 63)
    assert error(model.logits(model(tokens)), eager_logits(model, tokens)) <= 2e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = make(FAMILIES[family])
    save_llama(model, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = draw_tokens(model.config, 2, 63)
    with torch.no_grad():
        want = theirs(tokens).logits
        got = model.logits(model(tokens))
    assert error(got, want) <= 2e-6
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_part_of_a_sequence_with_its_positions_is_that_part_of_the_whole() -> None:
    """Positions travel with the tokens: permuted tokens under a permuted mask give permuted hidden states."""
    config = FAMILIES["llama-3"]
    tokens, order = draw_tokens(config, 1, 31), torch.randperm(31, generator=torch.Generator().manual_seed(2))
    visible = torch.ones(31, 31, dtype=torch.bool).tril()[order][:, order]

    def eager(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    model = make(config)
    whole = model(tokens)
    shuffled = model(tokens[:, order], order, visible, attends=[eager] * config.num_layers)
    assert error(shuffled, whole[:, order]) <= 2e-6
    assert error(model(tokens[:, order]), whole[:, order]) > 1e-2


def test_packed_documents_do_not_see_each_other() -> None:
    model = make(FAMILIES["llama-2"])
    tokens = draw_tokens(model.config, 1, 40)
    packed = model(tokens, torch.cat((torch.arange(13), torch.arange(27))), masks.documents([13, 27]) & masks.causal())
    for begin, end in ((0, 13), (13, 40)):
        assert error(packed[:, begin:end], model(tokens[:, begin:end])) <= 2e-6


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_chunked_loss_and_its_gradients_equal_the_whole_one(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(23, 12, generator=generator, requires_grad=True)
    weight = torch.randn(31, 12, generator=generator, requires_grad=True)
    targets = torch.randint(0, 31, (23,), generator=generator)
    targets[::5] = -100
    (linear_cross_entropy(x, weight, targets, chunk=chunk) * 0.37).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy(wide[0] @ wide[1].T, targets, ignore_index=-100, reduction="sum")
    (want * 0.37).backward()
    for got, right in zip((x, weight), wide, strict=True):
        assert got.grad is not None
        assert right.grad is not None
        assert error(got.grad, right.grad) <= 1e-6
    assert abs(linear_cross_entropy(x, weight, targets, chunk=chunk).item() - want.item()) <= 1e-6 * want.item()


def test_many_rows_of_few_logits_stay_in_the_range_of_float16() -> None:
    x = torch.full((70_000, 1), 2.0, dtype=torch.float16)
    weight = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    (linear_cross_entropy(x, weight, torch.zeros(70_000, dtype=torch.int64)) / 70_000).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-1.0], [1.0]]  # the sum over rows, before it is divided, is 70,000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_chunks_add_to_the_weight_gradient_without_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4096, 64, generator=generator).to("cuda", dtype).requires_grad_()
    weight = torch.randn(512, 64, generator=generator).to("cuda", dtype).requires_grad_()
    targets = torch.randint(0, 512, (4096,), generator=generator).cuda()
    total = None
    for begin in range(0, 4096, 64):
        rows = slice(begin, begin + 64)
        gradients = losses_and_gradients_at_once((x @ weight.T)[rows], targets[rows])[1]
        total = _add_product(total, gradients.T, x[rows])
    gradients = losses_and_gradients_at_once(x @ weight.T, targets)[1]
    assert total is not None
    assert error(total, gradients.double().T @ x.double()) <= 1e-6
    grads = []
    for chunk in (64, 4096):
        weight.grad = None
        linear_cross_entropy(x, weight, targets, chunk=chunk).backward()
        assert weight.grad is not None
        grads.append(weight.grad)
    assert error(grads[0], grads[1]) <= torch.finfo(dtype).eps


def test_a_model_trains_through_its_loss_as_through_its_logits() -> None:
    model = make(FAMILIES["llama-3.2"])
    tokens, targets = draw_tokens(model.config, 2, 17), draw_tokens(model.config, 2, 17, seed=5)
    model.loss(model(tokens), targets).backward()
    got = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    F.cross_entropy(model.logits(model(tokens)).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert error(got[name], param.grad) <= 1e-5, name


@pytest.mark.slow
def test_compiled_losses_and_gradients_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    compiled = torch.compile(losses_and_gradients_at_once, fullgraph=True, dynamic=False)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (3 * torch.randn(37, 257, generator=generator)).to(dtype)
        targets = torch.randint(0, 257, (37,), generator=generator)
        targets[5] = IGNORE
        (losses, gradients), (got, got_gradients) = (
            losses_and_gradients_at_once(logits, targets),
            compiled(logits, targets),
        )
        assert torch.allclose(got, losses, rtol=1e-6)
        assert (got_gradients - gradients).abs().max() <= 1e-6
        assert float(losses[5]) == float(gradients[5].abs().max()) == 0


def test_initial_weights_depend_only_on_seed_and_name() -> None:
    first, second, other = (Llama(preset("tiny"), attention=attention) for _ in range(3))
    for model, seed in ((first, 7), (second, 7), (other, 8)):
        model.initialize(seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert not torch.equal(first.layers[0].ffn.up.weight, first.layers[1].ffn.up.weight)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-3-8b", 8.030), ("llama-3.2-1b", 1.236), ("llama-3.2-3b", 3.213)],
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    assert abs(PRESETS[name].num_parameters / 1e9 - billions) < 1e-3
    with torch.device("meta"):
        model = Llama(PRESETS[name], attention=attention)
    assert sum(param.numel() for param in model.parameters()) == PRESETS[name].num_parameters


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'small'"):
        preset("smal")
    with pytest.raises(ValueError, match="the key heads must divide the query heads: got 4 heads, 3 kv"):
        preset("tiny", num_kv_heads=3)
    with pytest.raises(ValueError, match="the heads must divide the width: got width 130 and 4 heads"):
        preset("tiny", width=130)
    with pytest.raises(ValueError, match=r"head_dim must be even.* got 7"):
        preset("tiny", head_dim=7)
