"""A decode step of few kernels computes the model's logits, in Triton's interpreter and (`pytest -m gpu`) on a GPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan.attention import attention
from flashspan.generate import Sampling, Whole, decode, fused_step
from flashspan.generate.cache import Recorded
from flashspan.generate.fused_step import FusedStep, gains, serves
from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.portable import decode as split_keys
from flashspan.model import Llama, LlamaConfig, RopeScaling, preset

GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(GPU, reason="the kernels are compiled here, not interpreted")

CONFIGS = {
    "grouped, heads of 16": LlamaConfig(67, 48, 2, 4, 2, 72, head_dim=16, rope_scaling=RopeScaling(8, 1, 4, 32)),
    "odd widths, heads of 6": LlamaConfig(131, 33, 2, 3, 1, 45, head_dim=6),
    "heads of 64, tied": LlamaConfig(50, 80, 1, 2, 2, 96, head_dim=64, tie_embeddings=True),
    "heads of 128": LlamaConfig(50, 64, 1, 2, 1, 40, head_dim=128, norm_eps=1e-3),
}


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small GPU, for which few parts are enough, because the interpreter runs programs one after another."""
    if not GPU:
        monkeypatch.setattr(split_keys, "multiprocessors", lambda device: 4)


def make(config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Llama:
    """A model whose logits are of order 1 and depend on all its weights."""
    model = Llama(config, attention=attention).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * (0.3 if "norm" in name else 0.15))
            if "norm" in name:
                param += 1
    return model.to(device, dtype)


def draw_prompts(config: LlamaConfig, lengths: list[int]) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    return tokens, torch.tensor(lengths)


def rooms_of(context: Whole) -> list[Tensor]:
    return [cache.room for cache in context.caches]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@torch.inference_mode()
def errors(model: Llama, lengths: list[int], num_steps: int) -> list[tuple[float, float]]:
    """After each step, the errors of the logits compared with the model in float64: of the fused step, and of the model
    in its own dtype with the same tokens."""
    right = copy.deepcopy(model).double()
    tokens, sizes = draw_prompts(model.config, lengths)
    tokens = tokens.to(model.embed.weight.device)
    contexts = [Whole(graph=False, fused=False) for _ in range(3)]
    models = (model, model, right)
    for context, of in zip(contexts, models, strict=True):
        context.begin(of, tokens, sizes, tokens.shape[1] + num_steps)
    fused, plain, exact = contexts
    step = FusedStep(model, rooms_of(fused), fused.positions, even=not fused.ragged)
    step.compile()
    found = []
    given = torch.arange(len(lengths), device=tokens.device).unsqueeze(1) % model.config.vocab_size
    for _ in range(num_steps):
        want = exact._step(right, given, exact.capacity)
        found.append((relative(step(given), want), relative(plain._step(model, given, plain.capacity), want)))
        given = want.argmax(-1, keepdim=True)
    assert torch.equal(fused.positions.cpu(), sizes + num_steps)
    for cache, model_s, right_s in zip(*(context.caches for context in contexts), strict=True):
        error, allowed = relative(cache.room, right_s.room), relative(model_s.room, right_s.room)
        assert error <= max(1.3 * allowed, torch.finfo(cache.room.dtype).eps)
    return found


@interpreted
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("heads of 64, tied", [7]),
        ("grouped, heads of 16", [4, 4]),
        *((name, [3, 1, 9]) for name in CONFIGS),
        *(pytest.param(name, [7], marks=pytest.mark.slow) for name in CONFIGS if name != "heads of 64, tied"),
    ],
    ids=str,
)
def test_a_step_is_the_model_s(name: str, lengths: list[int]) -> None:
    for fused, plain in errors(make(CONFIGS[name]), lengths, 3):
        assert fused <= max(2e-6, 1.5 * plain)


@interpreted
@pytest.mark.parametrize("name", ["grouped, heads of 16", "heads of 64, tied"])
def test_sixteen_rows_of_sixteen_bits(name: str) -> None:
    for fused, plain in errors(make(CONFIGS[name], torch.float16), [1 + i % 5 for i in range(16)], 1):
        assert fused <= 1.2 * plain


@interpreted
def test_a_norm_s_weight_cannot_overflow_float16() -> None:
    model = make(CONFIGS["grouped, heads of 16"], torch.float16)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention_norm.weight *= 1000
            layer.attention.query.weight /= 1000
            layer.attention.key.weight /= 1000
            layer.attention.value.weight /= 1000
        model.embed.weight *= 200
    assert gains([model.layers[0].attention_norm.weight], torch.float16)[0] <= 2.0**-10
    for fused, plain in errors(model, [4], 1):
        assert fused <= max(2e-3, 1.5 * plain)


@interpreted
def test_a_layer_is_six_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(Launch, "start", lambda launch, compiled: launched.append(launch.kernel.__name__))
    config = LlamaConfig(67, 48, 3, 4, 2, 72, head_dim=16)
    model, context = make(config), Whole(graph=False)
    with torch.inference_mode():
        context.begin(model, *draw_prompts(config, [5, 300]), 1000)
        step = FusedStep(model, rooms_of(context), context.positions)
        step(torch.zeros(2, 1, dtype=torch.int64))
    layer = ["project_kernel", "split_kernel", "combine_kernel", "add_kernel", "gated_kernel", "add_kernel"]
    assert launched == ["begin_kernel", *layer * 3, "head_kernel"]


@interpreted
def test_tokens_may_be_a_column_of_a_table() -> None:
    config = CONFIGS["heads of 64, tied"]
    model, table = make(config), torch.arange(6).view(3, 2)
    found = []
    for tokens in (table[:, 1:], table[:, 1:].clone()):
        context = Whole(graph=False)
        with torch.inference_mode():
            context.begin(model, *draw_prompts(config, [5, 2, 3]), 9)
            found.append(FusedStep(model, rooms_of(context), context.positions)(tokens))
    assert torch.equal(*found)


def test_what_a_model_s_page_does_not_say_is_left_to_the_model() -> None:
    config = CONFIGS["grouped, heads of 16"]
    model, context = make(config), Whole(graph=False)
    with torch.inference_mode():
        context.begin(model, *draw_prompts(config, [5]), 9)
    rooms = rooms_of(context)
    assert serves(model, rooms)
    assert not serves(model, [room.expand(2, 17, *room.shape[2:]).contiguous() for room in rooms])
    changed = [copy.deepcopy(model) for _ in range(5)]
    changed[0].layers[0].attention.query = torch.nn.Linear(48, 64, bias=True)
    changed[1].layers[0].ffn.down.weight.data = changed[1].layers[0].ffn.down.weight.data.half()
    changed[2].layers[1].register_forward_hook(lambda *args: None)
    changed[3].norm = torch.nn.LayerNorm(48)
    changed[4].double()
    assert not any(serves(other, rooms) for other in changed)


@interpreted
def test_a_shape_that_does_not_compile_is_served_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(launch: Launch) -> None:
        raise KernelFailed("no such instruction")

    monkeypatch.setattr(fused_step, "FAILED", {})
    monkeypatch.setattr(fused_step, "_has_gpu", lambda device: True)
    monkeypatch.setattr(Launch, "compiled", fail)
    config = CONFIGS["grouped, heads of 16"]
    model, context = make(config), Whole(graph=False)
    with torch.inference_mode():
        context.begin(model, *draw_prompts(config, [5]), 9)
        with pytest.warns(RuntimeWarning, match="fused decode step is off for this shape"):
            assert fused_step.fused_step(model, rooms_of(context), context.positions) is None
        assert fused_step.fused_step(model, rooms_of(context), context.positions) is None  # without a second warning


def test_a_step_is_recorded_on_a_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's default stream for recordings belongs to one device. Kernels of another device would run and not be
    recorded."""
    recorded: list[Any] = []

    def make_stream(device: torch.device) -> Any:
        return SimpleNamespace(device=device, wait_stream=lambda other: None)

    def record(graph: Any, stream: Any = None) -> Any:
        recorded.append(stream and stream.device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", make_stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", record)
    x = torch.zeros(1)
    Recorded(lambda given: given + 1, x, torch.zeros(1))
    assert recorded == [x.device]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lengths", [[300], [300, 1, 77], [200 - 11 * i for i in range(16)]], ids=len)
def test_greedy_text_is_that_of_the_model_in_float32(lengths: list[int]) -> None:
    config = preset("tiny", width=256, num_heads=8, ffn_width=600, vocab_size=1003, num_layers=3)
    model = make(config, device="cuda")
    prompts = [torch.randint(1003, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    texts = [
        torch.stack(list(decode(model, prompts, 60, sampling=Sampling(0), context=Whole(graph=graph, fused=fused))), 1)
        for graph, fused in ((True, True), (False, True), (True, False))
    ]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_logits_on_a_gpu_are_as_exact_as_the_model_s(dtype: torch.dtype, num_rows: int, head_dim: int) -> None:
    config = LlamaConfig(1003, 512, 3, 8, 2, 1400, head_dim=head_dim)
    found = errors(make(config, dtype, "cuda"), [1 + 37 * i for i in range(num_rows)], 8)
    fused, plain = (mean(x) for x in zip(*found, strict=True))  # the errors of single steps vary by half
    assert fused <= max(1e-6, 1.3 * plain)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_recorded_step_repeats_bit_for_bit() -> None:
    config = LlamaConfig(1003, 512, 3, 8, 2, 1400)
    model = make(config, torch.bfloat16, "cuda")
    prompts = [[5, 6, 7] * 50, [8, 9]]
    first, second = (
        torch.stack(list(decode(model, prompts, 100, sampling=Sampling(0.8, top_k=50), seed=3)), 1) for _ in range(2)
    )
    assert torch.equal(first, second)
    alone = torch.cat(list(decode(make(config, torch.float32, "cuda"), prompts[1], 50, sampling=Sampling(0))))
    together = torch.stack(list(decode(make(config, torch.float32, "cuda"), prompts, 50, sampling=Sampling(0))), 1)
    assert torch.equal(alone, together[1])
