"""Ranks kept alive for a module's tests, and a small run to put on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashspan.launch import Ranks
from flashspan.train import TrainConfig, parse
from flashspan.train.data import ByteTokenizer
from flashspan.train.prepare import VALIDATION, encode, write_files
from flashspan.train.prepare import corpus as texts

RUNS = 12  # then ranks are renewed: they keep every group they made, and gloo's threads wake up for each all the time


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(4, fn, *args): fn on each of 4 ranks, and the list of what they returned."""
    pools: dict[int, Ranks] = {}
    runs: Counter[int] = Counter()

    def run(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        runs[num_ranks] += 1
        if num_ranks in pools and runs[num_ranks] % RUNS == 0:
            pools[num_ranks].close()
        if num_ranks not in pools or not pools[num_ranks]._processes:
            pools[num_ranks] = Ranks(num_ranks, threads=1, timeout=30)
        return pools[num_ranks].run(fn, *args, timeout=timeout)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, coder = tmp_path_factory.mktemp("data"), ByteTokenizer()
    write_files(folder, coder, encode(texts(), coder), VALIDATION)
    return folder / "train.bin"


@pytest.fixture(scope="session")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus with every speech a document of its own."""
    folder, coder = tmp_path_factory.mktemp("speeches"), ByteTokenizer()
    write_files(folder, coder, encode([speech for text in texts() for speech in text.split("\n\n")], coder), 0.1)
    return folder


@pytest.fixture
def config_of(tmp_path: Path, corpus: Path) -> Callable[..., TrainConfig]:
    """config_of("--train.steps=3", ...): a model of two layers and odd sizes, in a folder of the test's own."""

    def make(*options: str) -> TrainConfig:
        return parse(
            [
                f"--data.train={corpus}",
                f"--checkpoint.folder={tmp_path / 'run'}",
                "--model.num_layers=2",
                "--model.width=48",
                "--model.ffn_width=80",
                "--data.sequence=63",
                "--train.batch=4",
                "--train.steps=6",
                "--train.evaluate_every=0",
                "--optimizer.warmup=2",
                "--parallel.device=cpu",
                *options,
            ]
        )

    return make
