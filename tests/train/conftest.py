"""A small run for ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashspan import launch
from flashspan.data.prepare import VALIDATION, encode, write_files
from flashspan.data.prepare import corpus as texts
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.train import TrainConfig, parse

# The first rank of a run draws the loss at the end, and most tests start their own first rank.
launch.PRELOAD += ["matplotlib.backends.backend_agg", "matplotlib.figure"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, coder = tmp_path_factory.mktemp("data"), ByteTokenizer()
    write_files(folder, coder, encode(texts(), coder), VALIDATION)
    return folder / "train.bin"


@pytest.fixture(scope="session")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, in which every speech is a document."""
    folder, coder = tmp_path_factory.mktemp("speeches"), ByteTokenizer()
    write_files(folder, coder, encode([speech for text in texts() for speech in text.split("\n\n")], coder), 0.1)
    return folder


@pytest.fixture
def config_of(tmp_path: Path, corpus: Path) -> Callable[..., TrainConfig]:
    """config_of("--train.steps=3", ...): a config with two layers and odd sizes, in the test's own folder."""

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
