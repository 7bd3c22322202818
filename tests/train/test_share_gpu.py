"""Training on ranks that share one GPU: collectives by gloo, attention by copies; the curve is one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashspan.launch import Ranks
from flashspan.train import TrainConfig
from flashspan.train.options import parse
from flashspan.train.run import train
from tests.train.test_parallel import assert_same_curve, take_steps

CONFIGS = {
    "2 context": (2, ["--parallel.context=2"]),
    "4 context": (4, ["--parallel.context=4"]),
    "2 data x 2 context": (4, ["--parallel.data=2", "--parallel.context=2"]),
}
alone: list[list[tuple[float, float]]] = []


def config_of(folder: Path, *more: str) -> TrainConfig:
    options = ["--train.steps=50", "--train.batch=2", "--data.sequence=256", "--parallel.share_gpu=true"]
    return parse([*options, f"--checkpoint.folder={folder}", "--parallel.timeout=60", *more])


def curve(folder: Path, num_ranks: int, *more: str) -> list[tuple[float, float]]:
    with Ranks(num_ranks, threads=1, timeout=60, share_gpu=True) as ranks:
        return ranks.run(take_steps, config_of(folder, *more), timeout=110.0)[0]  # type: ignore[no-any-return]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_of_one_gpu_show_the_curve_of_one(tmp_path: Path, name: str) -> None:
    if not alone:
        alone.append(curve(tmp_path / "one", 1, "--parallel.context=1"))
    num_ranks, options = CONFIGS[name]
    got = curve(tmp_path / "many", num_ranks, *options)
    worst = max(abs(a / b - 1) for a, b in zip(sum(got, ()), sum(alone[0], ()), strict=True))
    print(f"{name}: {len(got)} steps, worst relative difference of loss and gradient norm {worst:.1e}")
    assert_same_curve([step[:1] * 2 for step in got], [step[:1] * 2 for step in alone[0]], 1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_sharing_a_gpu_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.share_gpu needs a GPU"):
        train(config_of(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("degree", ["shard", "tensor"])
def test_degrees_that_gloo_cannot_serve_on_a_gpu_are_refused(tmp_path: Path, degree: str) -> None:
    with pytest.raises(ValueError, match="data and context degrees"):
        train(config_of(tmp_path, f"--parallel.{degree}=2", "--parallel.ranks=2"))
