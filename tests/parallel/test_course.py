"""The course's hooks, used as the course's tests use them: a toy and a tied model, against one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.models import batch, distance, make

PATH = Path(__file__).parents[2] / "examples" / "cs336" / "_distributed.py"


def _hooks() -> Any:
    spec = importlib.util.spec_from_file_location("cs336_distributed", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(name: str, kind: str, ranks: int, rank: int) -> dict[str, Tensor]:
    hooks = _hooks()
    model = make(name, seed=rank)
    after: Any = lambda model, optimizer: None  # noqa: E731
    if kind == "ddp":
        wrapped, after = hooks.get_ddp(model), hooks.ddp_on_after_backward
    elif kind == "individual":
        wrapped = hooks.get_ddp_individual_parameters(model)
        after = hooks.ddp_individual_parameters_on_after_backward
    elif kind in ("bucketed", "one bucket"):
        wrapped = hooks.get_ddp_bucketed(model, bucket_size_mb=0.0003 if kind == "bucketed" else None)
        after = hooks.ddp_bucketed_on_after_backward
    elif kind == "fsdp":
        wrapped, after = hooks.get_fsdp(model), hooks.fsdp_on_after_backward
    else:
        wrapped = model
    if kind == "ddp":
        optimizer = hooks.get_sharded_optimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.02)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02)
    for step in range(5):
        x, weight = (t.tensor_split(ranks)[rank] for t in batch(name, step))
        if "bucket" in kind:
            hooks.ddp_bucketed_on_train_batch_start(wrapped, optimizer)
        optimizer.zero_grad()
        ((wrapped(x).square() * weight).sum() / len(x)).backward()
        after(wrapped, optimizer)
        optimizer.step()
    if kind == "fsdp":
        return hooks.fsdp_gather_full_params(wrapped)
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def _train_on_rank(name: str, kind: str) -> dict[str, Tensor]:
    return _train(name, kind, dist.get_world_size(), dist.get_rank())


@pytest.mark.parametrize("kind", ["ddp", "individual", "bucketed", "one bucket", "fsdp"])
@pytest.mark.parametrize("name", ["toy", "tied"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_hooks_train_as_one_process_does(on_ranks, num_ranks: int, name: str, kind: str) -> None:
    want = _train(name, "alone", 1, 0)
    for got in on_ranks(num_ranks, _train_on_rank, name, kind):
        assert got.keys() == want.keys()
        assert distance(got.values(), (want[key] for key in got)) <= 1e-6


def _half() -> tuple[torch.dtype, torch.dtype]:
    model = make("toy")
    seen: list[torch.dtype] = []
    model.first.register_forward_hook(lambda module, args, out: seen.append(out.dtype))  # type: ignore[union-attr]
    wrapped = _hooks().get_fsdp(model, compute_dtype=torch.float16)
    wrapped(batch("toy", 0)[0])
    return seen[0], next(iter(_hooks().fsdp_gather_full_params(wrapped).values())).dtype


def test_fsdp_computes_in_the_asked_type_and_keeps_its_own(on_ranks) -> None:
    assert on_ranks(2, _half) == [(torch.float16, torch.float32)] * 2
