"""16-bit matmuls and recomputed activations give the same curve."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashspan import attention
from flashspan.model.llama import Block
from flashspan.model.rope import rotation
from flashspan.train import TrainConfig, offload
from flashspan.train.loop import Trainer
from flashspan.train.offload import SMALL

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]


def losses(config: TrainConfig, scale: float | None = None) -> tuple[list[float], float, set[torch.dtype]]:
    """The loss of each step, the last loss scale, and the dtypes of the weights."""
    trainer = Trainer(config)
    trainer.scale = trainer.scale if scale is None else scale
    curve = []
    while trainer.step < config.train.steps:
        before = trainer.step
        loss = trainer.take_step()[0]
        if trainer.step > before:
            curve.append(loss)
    return curve, trainer.scale, {param.dtype for param in trainer.parts.names}


plain: list[float] = []  # the losses of one device without options, with which several tests compare


def plain_losses(on_ranks: OnRanks, config_of: ConfigOf) -> list[float]:
    plain[:] = plain or on_ranks(1, losses, config_of())[0][0]
    return plain


SHARDED = ["--parallel.shard=2", "--parallel.context=1"]


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bfloat16", ["--parallel.context=2"]),
        ("float16", SHARDED),
        pytest.param("bfloat16", SHARDED, marks=pytest.mark.slow),
        pytest.param("float16", ["--parallel.context=2"], marks=pytest.mark.slow),
    ],
)
def test_16_bit_matmuls_follow_the_float32_curve(
    on_ranks: OnRanks, config_of: ConfigOf, precision: str, options: list[str]
) -> None:
    want = on_ranks(2, losses, config_of(*options))[0][0]
    got, _, dtypes = on_ranks(2, losses, config_of(*options, f"--train.precision={precision}"))[0]
    assert dtypes == {torch.float32}
    assert got != want
    assert all(abs(a - b) <= 1e-2 * b for a, b in zip(got, want, strict=True))


def test_an_overflow_of_float16_lowers_the_scale_and_repeats_the_step(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--parallel.context=2", "--train.precision=float16")
    calm = on_ranks(2, losses, config)[0]
    for curve, scale, _ in on_ranks(2, losses, config, 2.0**30):
        assert scale < 2.0**30
        assert all(abs(a - b) <= 1e-2 * b for a, b in zip(curve, calm[0], strict=True))


@contextlib.contextmanager
def quick_compiler() -> Iterator[None]:
    """torch.compile without the minutes it takes to write C++: graphs, partitions and recomputation are the same."""
    real = torch.compile
    torch.compile = functools.partial(real, backend="aot_eager")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


def compiled_losses(config: TrainConfig) -> tuple[list[float], float, set[torch.dtype]]:
    with quick_compiler():
        return losses(config)


def kept_numbers(config: TrainConfig) -> tuple[int, int, int]:
    """Return how many numbers a compiled layer and an eager one save for backward (without weights, each storage once),
    and how many float32 tensors with one number per row the compiled one saves."""
    with quick_compiler():
        layers = Trainer(config).parts.model.layers
    found, roots = [], 0
    x = torch.randn(1, 63, config.model.resolve().width, dtype=torch.bfloat16, requires_grad=True)
    turn = rotation(torch.arange(63), config.model.resolve())
    for run in (layers[0].forward, Block(config.model.resolve()).bfloat16()):
        kept: dict[int, int] = {}

        def pack(value: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            nonlocal roots
            roots += not found and value.dtype == torch.float32 and value.shape == (1, 63, 1)
            if value.dtype == torch.bfloat16 and not isinstance(value, torch.nn.Parameter) and 63 in value.shape:
                kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes() // 2
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            run(x, turn, None, attention)
        found.append(sum(kept.values()))
    return found[0], found[1], roots


def test_elementwise_recompute_saves_only_matmuls_and_attention(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--train.recompute=elementwise", "--train.compile=true", "--train.precision=bfloat16"]
    config = config_of(*options, "--train.weights=bfloat16", "--parallel.context=1")
    shape = config.model.resolve()
    got, everything, roots = on_ranks(1, kept_numbers, config)[0]
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    assert got == 63 * (2 * shape.width + heads + 2 * shape.ffn_width)
    assert got < 0.8 * everything
    assert roots == 2


@pytest.mark.parametrize("options", [["--train.recompute=elementwise"], ["--train.recompute=full"], []])
def test_a_compiled_model_follows_the_curve(on_ranks: OnRanks, config_of: ConfigOf, options: list[str]) -> None:
    want = plain_losses(on_ranks, config_of)
    got = on_ranks(1, compiled_losses, config_of(*options, "--train.compile=true"))[0][0]
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(got, want, strict=True))


def evaluate(config: TrainConfig) -> list[float]:
    """The validation loss before and after a step."""
    with quick_compiler():
        trainer = Trainer(config)
        return [trainer.evaluate(), *trainer.take_step()[:1], trainer.evaluate()]


def test_a_compiled_model_is_evaluated_between_steps(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    want = on_ranks(1, evaluate, config_of())[0]
    got = on_ranks(1, evaluate, config_of("--train.compile=true", "--train.recompute=elementwise"))[0]
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        ["--parallel.context=2"],
        pytest.param(["--parallel.shard=2", "--parallel.context=1"], marks=pytest.mark.slow),
        pytest.param(["--parallel.tensor=2", "--parallel.context=1"], marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_on_ranks_follows_the_curve(
    on_ranks: OnRanks, config_of: ConfigOf, options: list[str]
) -> None:
    options = [*options, "--train.steps=3"]
    want = on_ranks(2, losses, config_of(*options))[0][0]
    options += ["--train.recompute=elementwise", "--train.compile=true"]
    for got, *_ in on_ranks(2, compiled_losses, config_of(*options)):
        assert all(abs(a - b) <= 1e-5 * b for a, b in zip(got, want, strict=True))


def test_bfloat16_weights_learn(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--train.precision=bfloat16", "--train.weights=bfloat16", "--optimizer.lr=8e-3"]
    want = on_ranks(1, losses, config_of("--optimizer.lr=8e-3"))[0][0]
    got, _, dtypes = on_ranks(1, losses, config_of(*options))[0]
    assert dtypes == {torch.bfloat16}
    assert all(abs(a - b) <= 2e-2 * b for a, b in zip(got, want, strict=True))
    assert got[-1] < got[0] - 0.3


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["full", "attention"])
def test_offloading_changes_no_bit(on_ranks: OnRanks, config_of: ConfigOf, mode: str, compiled: bool) -> None:
    sizes = ["--data.sequence=1000", "--train.steps=2", "--train.batch=2"]  # large enough for tensors to be moved
    sizes.append(f"--train.compile={str(compiled).lower()}")
    config = config_of(*sizes, f"--train.recompute={mode}", "--train.offload=true")
    assert 2 * 1000 * config.model.resolve().width > SMALL
    assert on_ranks(1, losses, config)[0][0] == on_ranks(1, losses, config_of(*sizes))[0][0]


def count_moves(config: TrainConfig) -> int:
    """The number of tensors that a step moves to the host."""
    moves = 0
    send = offload._send

    def count(x: torch.Tensor) -> Any:
        nonlocal moves
        kept = send(x)
        moves += isinstance(kept, offload.Away)
        return kept

    trainer = Trainer(config)
    offload._send = count
    try:
        trainer.take_step()
    finally:
        offload._send = send
    return moves


def test_only_the_input_of_a_layer_is_offloaded(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--data.sequence=1000", "--train.batch=2", "--train.offload=true", "--train.recompute=full"]
    assert on_ranks(1, count_moves, config_of(*options)) == [2]


@pytest.mark.parametrize("mode", ["full", "attention", "elementwise"])
def test_recomputing_on_one_device_changes_no_bit(on_ranks: OnRanks, config_of: ConfigOf, mode: str) -> None:
    want = plain_losses(on_ranks, config_of)
    assert on_ranks(1, losses, config_of(f"--train.recompute={mode}"))[0][0] == want


def count_attentions(config: TrainConfig) -> int:
    """The number of times that attention's forward ran in a step."""
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal calls
            calls += op is torch.ops.flashspan.attend.default
            return op(*args, **(kwargs or {}))

    trainer = Trainer(config)
    with Count():
        trainer.take_step()
    return calls


@pytest.mark.parametrize(("mode", "calls"), [("none", 2), ("full", 4), ("attention", 2)])
def test_attention_aware_recomputing_runs_attention_once(
    on_ranks: OnRanks, config_of: ConfigOf, mode: str, calls: int
) -> None:
    assert on_ranks(1, count_attentions, config_of(f"--train.recompute={mode}")) == [calls]
