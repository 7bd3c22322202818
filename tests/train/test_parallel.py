"""The displayed loss and gradient norm are one device's, under every mixture of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashspan import attention
from flashspan.model import Llama, read_weights, save_llama
from flashspan.train import TrainConfig, build
from flashspan.train.data import ByteTokenizer
from flashspan.train.loop import Trainer
from flashspan.train.prepare import corpus, encode, write_files

MIXTURES = {
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


def assert_same_curve(got: list[Any], want: list[Any], bound: float) -> None:
    assert len(got) == len(want) > 0
    for (loss, norm), (right, right_norm) in zip(got, want, strict=True):
        assert abs(loss - right) <= bound * right
        assert abs(norm - right_norm) <= bound * right_norm


alone: dict[str, list[Any]] = {}  # the curve of one device, for every mixture to be compared with


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_shows_the_loss_of_one_device(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], name: str
) -> None:
    if "plain" not in alone:
        alone["plain"] = on_ranks(1, take_steps, config_of())[0]
    assert alone["plain"][-1][0] < alone["plain"][0][0] - 0.1
    for got in on_ranks(4, take_steps, config_of(*MIXTURES[name])):
        assert_same_curve(got, alone["plain"], 2e-5)


def test_documents_are_apart_however_the_sequence_is_split(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    coder = ByteTokenizer()
    speeches = [speech for text in corpus() for speech in text.split("\n\n")]
    write_files(tmp_path / "speeches", coder, encode(speeches, coder), 0.1)
    data = f"--data.train={tmp_path / 'speeches'}"
    want = on_ranks(1, take_steps, config_of(data, "--data.documents=true"))[0]
    for got in on_ranks(4, take_steps, config_of(data, "--data.documents=true", *MIXTURES["2 data x 2 context"])):
        assert_same_curve(got, want, 2e-5)
    seen_whole = on_ranks(1, take_steps, config_of(data))[0]
    assert abs(seen_whole[-1][0] - want[-1][0]) > 1.5e-4  # past the bound above


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
        for got in on_ranks(4, take_steps, config_of(*options, *MIXTURES[name])):
            assert_same_curve(got, want, 2e-5)


def count_bytes_read(config: TrainConfig) -> int:
    """How many bytes of weights this rank took from the disk."""
    total = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal total
        for name, value in read_weights(*args, **kwargs):
            total += value.nbytes
            yield name, value

    build.read_weights = counted  # type: ignore[attr-defined]
    try:
        Trainer(config)
    finally:
        build.read_weights = read_weights  # type: ignore[attr-defined]
    return total


def test_each_weight_leaves_the_disk_once(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    model = Llama(config_of().model.resolve(), attention=attention)
    model.initialize(9)
    save_llama(model, tmp_path / "model", shard_bytes=20_000)
    size = sum(p.nbytes for p in model.parameters())
    norms = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    load = f"--model.load={tmp_path / 'model'}"
    read = on_ranks(4, count_bytes_read, config_of(load, *MIXTURES["4 fully sharded"]))
    assert read == [size, 0, 0, 0]
    # Two tensor ranks: each its slices and the norms, which are small and whole; an odd row may go to one of them.
    read = on_ranks(4, count_bytes_read, config_of(load, *MIXTURES["2 fully sharded x 2 tensor"]))
    assert sum(read) == size + norms
    assert read[2:] == [0, 0]
    assert max(read) <= 0.51 * size + norms


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MIXTURES)
def test_fifty_steps_show_the_loss_of_one_device(
    on_ranks: Callable[..., list[Any]], config_of: Callable[..., TrainConfig], name: str
) -> None:
    # The model, batch and rate of `flashspan train` as it is.
    sizes = [f"--model.{name}=0" for name in ("width", "num_layers", "ffn_width")]
    options = [*sizes, "--data.sequence=256", "--train.batch=12", "--train.steps=50", "--optimizer.warmup=10"]
    if "fifty" not in alone:
        alone["fifty"] = on_ranks(1, take_steps, config_of(*options), timeout=400)[0]
    for got in on_ranks(4, take_steps, config_of(*options, *MIXTURES[name]), timeout=400):
        assert_same_curve(got, alone["fifty"], 1e-4)
