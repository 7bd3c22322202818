"""Training and generation on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashspan import attention
from flashspan.checkpoint import format as checkpoint
from flashspan.generate import Sampling, Whole, decode
from flashspan.model import Llama, preset
from flashspan.train import TrainConfig, train
from flashspan.train.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def curve(config: TrainConfig) -> list[float]:
    assert train(config) == 0
    return [row["loss"] for row in read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")]


@pytest.mark.parametrize(
    "options",
    [
        ["--train.precision=float32"],
        ["--train.precision=bfloat16", "--train.recompute=attention"],
        ["--train.precision=float16", "--train.recompute=full"],
        ["--train.precision=bfloat16", "--train.compile=true", "--train.recompute=elementwise"],
        ["--train.precision=bfloat16", "--train.weights=bfloat16", "--train.compile=true"],
        ["--train.precision=bfloat16", "--train.recompute=full", "--train.offload=true", "--data.sequence=1000"],
        ["--train.precision=bfloat16", "--data.documents=true", "--train.accumulate=2"],
    ],
)
def test_a_gpu_follows_the_curve_of_the_cpu(
    config_of: Callable[..., TrainConfig], tmp_path: Path, options: list[str]
) -> None:
    sizes = ["--model.width=128", "--parallel.ranks=1", "--parallel.context=1"]
    shared_options = [option for option in options if "documents" in option or "sequence" in option]
    want = curve(config_of(*sizes, *shared_options, f"--checkpoint.folder={tmp_path / 'cpu'}"))
    got = curve(config_of(*sizes, *options, "--parallel.device=cuda", f"--checkpoint.folder={tmp_path / 'gpu'}"))
    bound = 1e-4 if options == ["--train.precision=float32"] else 1e-2
    assert all(abs(a - b) <= bound * b for a, b in zip(got, want, strict=True))


def test_a_step_that_is_not_finite_changes_nothing(config_of: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """The optimizer is launched before the host has the loss."""
    states = []
    for name, steps in (("one", 1), ("more", 3)):
        options = ["--parallel.ranks=1", "--parallel.context=1", "--parallel.device=cuda", f"--train.steps={steps}"]
        wild = ["--optimizer.lr=1e30", "--optimizer.warmup=0", f"--checkpoint.folder={tmp_path / name}"]
        assert (train(config_of(*options, *wild)) == 0) == (steps == 1)
        path = checkpoint.newest(tmp_path / name)
        assert path is not None
        states.append(checkpoint.read(path))
    one, more = states
    assert one.step == more.step == 1
    for want, got in ((one.model, more.model), (one.optimizer, more.optimizer)):
        assert want.keys() == got.keys()
        assert all(torch.equal(want[key], got[key]) for key in want)


def test_greedy_on_a_gpu_is_greedy_on_the_cpu() -> None:
    model = Llama(preset("tiny"), attention=attention).eval()
    model.initialize(1)
    prompt = list(b"First Citizen: before we proceed")
    want = [int(token) for token in decode(model, prompt, 40, sampling=Sampling(0))]
    several = [prompt, prompt[:5], prompt[3:]]
    together = torch.stack(list(decode(model, several, 20, sampling=Sampling(0))), 1)
    model.to("cuda")
    assert [int(token) for token in decode(model, prompt, 40, sampling=Sampling(0))] == want
    # The steps above ran as a CUDA graph; here kernels are launched one by one.
    plain = decode(model, prompt, 40, sampling=Sampling(0), context=Whole(graph=False))
    assert [int(token) for token in plain] == want
    assert torch.equal(torch.stack(list(decode(model, several, 20, sampling=Sampling(0))), 1).cpu(), together)
    assert torch.cuda.max_memory_allocated() > 0
