"""The displayed loss and gradient norm are one device's, under every parallelism config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashspan import attention, manifest, masks
from flashspan.checkpoint import format as checkpoint
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.model import Llama, huggingface, read_weights, save_llama
from flashspan.parallel import build_mesh
from flashspan.train import TrainConfig, build
from flashspan.train.dataset import open_samples
from flashspan.train.loop import Trainer

PARALLEL_CONFIGS = {
    "4 context": ["--parallel.context=4"],
    "2 data x 2 context": ["--parallel.data=2", "--parallel.context=2"],
    "2 tensor x 2 context": ["--parallel.tensor=2", "--parallel.context=2"],
    "4 fully sharded": ["--parallel.shard=4", "--parallel.context=1"],
    "2 fully sharded x 2 context": ["--parallel.shard=2", "--parallel.context=2"],
    "2 fully sharded x 2 tensor": ["--parallel.shard=2", "--parallel.tensor=2", "--parallel.context=1"],
    "4 data, sharded optimizer": ["--parallel.data=4", "--parallel.context=1", "--optimizer.sharded=true"],
    "2 data x 2 context, accumulating": ["--parallel.data=2", "--parallel.context=2", "--train.accumulate=2"],
    "4 context striped ulysses": [
        "--parallel.data=2",
        "--parallel.context=2",
        "--parallel.strategy=ulysses",
        "--parallel.layout=striped",
    ],
    "4 context double ring": ["--parallel.context=4", "--parallel.strategy=double_ring", "--parallel.inner=2"],
    "2 x 2 context hybrid": ["--parallel.context=4", "--parallel.strategy=hybrid", "--parallel.inner=2"],
    "2 fully sharded x 2 context, recomputing": [
        "--parallel.shard=2",
        "--parallel.context=2",
        "--train.recompute=attention",
        "--train.accumulate=2",
    ],
    "2 data x 2 context, recomputing": ["--parallel.data=2", "--parallel.context=2", "--train.recompute=full"],
}


def take_steps(config: TrainConfig) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, on a rank."""
    trainer = Trainer(config)
    return [trainer.take_step()[:2] for _ in range(config.train.steps)]


def count_and_take_steps(config: TrainConfig) -> tuple[list[tuple[float, float]], list[float]]:
    """Loss and gradient norm of each step, on a rank, and the reported number of query-key pairs of each step."""
    trainer = Trainer(config)
    steps = [(trainer.take_step()[:2], trainer.num_pairs) for _ in range(config.train.steps)]
    return [curve for curve, _ in steps], [num_pairs for _, num_pairs in steps]


def assert_same_curve(got: list[Any], want: list[Any], bound: float) -> None:
    assert len(got) == len(want) > 0
    for (loss, norm), (right, right_norm) in zip(got, want, strict=True):
        assert abs(loss - right) <= bound * right
        assert abs(norm - right_norm) <= bound * right_norm


alone: dict[str, list[Any]] = {}  # the curve of one device, with which every parallelism config is compared


IN_OTHERS = ("2 data x 2 context", "4 fully sharded", "2 fully sharded x 2 context")
"""Configs that CI skips, because it runs a config that adds accumulation, recomputation or another dimension."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in IN_OTHERS else []) for x in PARALLEL_CONFIGS]
)
def test_every_parallelism_config_shows_the_loss_of_one_device(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], name: str
) -> None:
    steps = "--train.steps=4"
    if "plain" not in alone:
        alone["plain"] = on_ranks(1, take_steps, config_of(steps))[0]
    assert alone["plain"][-1][0] < alone["plain"][0][0] - 0.1
    for got in on_ranks(4, take_steps, config_of(steps, *PARALLEL_CONFIGS[name])):
        assert_same_curve(got, alone["plain"], 2e-5)


def test_documents_are_apart_however_the_sequence_is_split(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], speeches: Path
) -> None:
    """Also, the reported number of pairs, from which the utilisation is computed, is correct."""
    data = [f"--data.train={speeches}", "--data.documents=true"]
    ((want, num_pairs),) = on_ranks(1, count_and_take_steps, config_of(*data))
    tokens, _ = open_samples(config_of(*data))[0].read(range(4))  # the tokens of the first step
    past = [(row[:i] == ByteTokenizer().end).nonzero() for row in tokens for i in range(63)]
    begins = [int(ends[-1]) + 1 if len(ends) else 0 for ends in past]
    assert num_pairs[0] == sum(i % 63 - begin + 1 for i, begin in enumerate(begins)) < 4 * 63 * 64 / 2
    for got, counted in on_ranks(4, count_and_take_steps, config_of(*data, *PARALLEL_CONFIGS["2 data x 2 context"])):
        assert_same_curve(got, want, 2e-5)
        assert counted == num_pairs
    ((seen_whole, num_pairs),) = on_ranks(1, count_and_take_steps, config_of(data[0]))
    assert abs(seen_whole[-1][0] - want[-1][0]) > 1.5e-4  # larger than the bound above
    assert set(num_pairs) == {4 * 63 * 64 / 2}


def plan_and_take_steps(config: TrainConfig) -> tuple[list[tuple[float, float]], int]:
    """Loss and gradient norm of each step, and the number of times attention was planned, on a rank."""
    trainer = Trainer(config)
    curve = [trainer.take_step()[:2] for _ in range(config.train.steps)]
    return curve, 0 if trainer.parts.attend is None else len(trainer.parts.attend._cores)


PATTERNS = {
    "longformer": ["--attention.pattern=longformer", "--attention.window=40", "--attention.num_global=4"],
    "bigbird, documents": [
        "--attention.pattern=bigbird",
        "--attention.window=30",
        "--attention.num_global=4",
        "--attention.num_random=1",
        "--attention.size=64",
        "--data.documents=true",
    ],
    "window, documents": ["--attention.pattern=window", "--attention.window=40", "--data.documents=true"],
}
SPLITS = {
    "longformer": [("ring", "zigzag"), ("ulysses", "striped")],
    "bigbird, documents": [("helper", "balanced")],
    "window, documents": [("gather", "zigzag")],
}


@pytest.mark.parametrize(
    "name", ["longformer", pytest.param("bigbird, documents", marks=pytest.mark.slow), "window, documents"]
)
def test_a_pattern_has_the_loss_of_one_device(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], speeches: Path, name: str
) -> None:
    """4 steps on 1 rank and on 4 context ranks. If the mask is the same in every step, it is planned once."""
    plain = ["--data.sequence=601", "--train.batch=2", "--train.steps=4", f"--data.train={speeches}"]
    options = [*plain, *PATTERNS[name]]
    ((want, _),) = on_ranks(1, plan_and_take_steps, config_of(*options))
    ((dense_curve, _),) = on_ranks(1, plan_and_take_steps, config_of(*plain))
    assert abs(dense_curve[-1][0] - want[-1][0]) > 3e-4  # hidden keys change the loss by more than the bound below
    for strategy, layout in SPLITS[name]:
        split = ["--parallel.context=4", f"--parallel.strategy={strategy}", f"--parallel.layout={layout}"]
        for got, num_plans in on_ranks(4, plan_and_take_steps, config_of(*options, *split)):
            assert_same_curve(got, want, 2e-5)
            assert num_plans == (4 if "documents" in name else 1)


def test_a_loaded_tied_model_is_read_in_parts_and_starts_the_same(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = config_of()
    model = Llama(replace(config.model.resolve(), tie_embeddings=True), attention=attention)
    model.initialize(9)
    save_llama(model, tmp_path / "model", shard_bytes=20_000)
    options = [f"--model.load={tmp_path / 'model'}", "--train.steps=2"]
    want = on_ranks(1, take_steps, config_of(*options))[0]
    assert abs(want[0][0] - on_ranks(1, take_steps, config)[0][0][0]) > 1e-4
    for name in ("2 tensor x 2 context", "2 fully sharded x 2 tensor", "4 data, sharded optimizer"):
        for got in on_ranks(4, take_steps, config_of(*options, *PARALLEL_CONFIGS[name])):
            assert_same_curve(got, want, 2e-5)


def count_bytes_read(config: TrainConfig) -> int:
    """The number of bytes of weights that this rank read from the disk."""
    total = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal total
        for name, value in read_weights(*args, **kwargs):
            total += value.nbytes
            yield name, value

    build.read_weights = huggingface.read_weights = counted  # type: ignore[attr-defined,assignment]
    try:
        Trainer(config)
    finally:
        build.read_weights = huggingface.read_weights = read_weights  # type: ignore[attr-defined]
    return total


def test_each_weight_is_read_from_disk_once(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    model = Llama(config_of().model.resolve(), attention=attention)
    model.initialize(9)
    save_llama(model, tmp_path / "model", shard_bytes=20_000)
    size = sum(p.nbytes for p in model.parameters())
    norms = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    load = f"--model.load={tmp_path / 'model'}"
    read = on_ranks(4, count_bytes_read, config_of(load, *PARALLEL_CONFIGS["4 fully sharded"]))
    assert sum(read) == size
    assert max(read) <= 0.26 * size
    # Tensor ranks have whole copies of the norms, which are small. One of them may have an odd row.
    read = on_ranks(4, count_bytes_read, config_of(load, *PARALLEL_CONFIGS["2 fully sharded x 2 tensor"]))
    assert sum(read) == size + norms
    assert max(read) <= 0.26 * size + norms
    # If ranks have the same weights, one of them reads the file.
    read = on_ranks(4, count_bytes_read, config_of(load, *PARALLEL_CONFIGS["4 data, sharded optimizer"]))
    assert read == [size, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PARALLEL_CONFIGS)
def test_fifty_steps_show_the_loss_of_one_device(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], name: str
) -> None:
    # The default model, batch and learning rate of `flashspan train`.
    sizes = [f"--model.{name}=0" for name in ("width", "num_layers", "ffn_width")]
    options = [*sizes, "--data.sequence=256", "--train.batch=12", "--train.steps=50", "--optimizer.warmup=10"]
    if "fifty" not in alone:
        alone["fifty"] = on_ranks(1, take_steps, config_of(*options), timeout=400)[0]
    for got in on_ranks(4, take_steps, config_of(*options, *PARALLEL_CONFIGS[name]), timeout=400):
        assert_same_curve(got, alone["fifty"], 1e-4)


def build_another(config: TrainConfig) -> str:
    """On a rank: the error if a checkpoint is loaded into a different model."""
    degrees: dict[str, Any] = {**config.parallel.degrees(dist.get_world_size())}
    shape = replace(config.model.resolve(), rope_theta=123.0)
    try:
        build.build(config, shape, build_mesh(**degrees), torch.device("cpu"), masks.causal())
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["4 fully sharded", "2 tensor x 2 context", "4 data, sharded optimizer"])
def test_every_rank_refuses_a_checkpoint_of_another_model(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tmp_path: Path, name: str
) -> None:
    model = Llama(config_of().model.resolve(), attention=attention)
    model.initialize(9)
    save_llama(model, tmp_path / "model")
    for said in on_ranks(4, build_another, config_of(f"--model.load={tmp_path / 'model'}", *PARALLEL_CONFIGS[name])):
        assert "a checkpoint of another model" in said
        assert "rope_theta is 10000.0, not 123.0" in said


def build_and_count(config: TrainConfig) -> tuple[str, int]:
    """The result of `build_another`, and the number of files that this rank has hashed."""
    with mock.patch.object(manifest, "hash_file", wraps=manifest.hash_file) as counted:
        return build_another(config), counted.call_count


def test_a_damaged_checkpoint_is_not_loaded(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """Its own hashes detect the damage; a Hugging Face folder has no hashes."""
    model = Llama(config_of().model.resolve(), attention=attention)
    model.initialize(9)
    path = checkpoint.write(tmp_path, checkpoint.State(7, model.config, model.state_dict(), {}, {}))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    answers = on_ranks(2, build_and_count, config_of(f"--model.load={path}", "--parallel.data=2"))
    for said, _ in answers:
        assert "step-00000007 is damaged (the hash of model.safetensors does not match" in said
    assert [count > 0 for _, count in answers] == [True, False]  # one rank hashes; others would read all again


def evaluate(config: TrainConfig) -> float:
    return Trainer(config).evaluate()


@pytest.mark.parametrize("num_samples", [1, 7, 32])
def test_every_parallelism_config_is_evaluated_on_the_same_samples(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], num_samples: int
) -> None:
    options = [f"--train.evaluate_samples={num_samples}", "--train.batch=6"]
    want = on_ranks(1, evaluate, config_of(*options))[0]
    for kind in ("data", "shard"):
        got = on_ranks(3, evaluate, config_of(*options, f"--parallel.{kind}=3", "--parallel.context=1"))
        assert all(abs(loss - want) <= 1e-6 * want for loss in got)
