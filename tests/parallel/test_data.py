"""What DataParallel promises: training on ranks is training on the whole batch, however gradients travel."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashspan.parallel.collectives import sum_in_rank_order
from flashspan.parallel.data import DataParallel, Mode
from tests.parallel.models import batch, distance, make

MODES = get_args(Mode)
RANKS = (1, 2, 3, 4)


def _share(x: Tensor) -> Tensor:
    """This rank's part of a batch; uneven where the ranks do not divide it."""
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


def _train(name: str, mode: Mode, op: str, size: int, steps: int = 10, accumulate: int = 1) -> list[Tensor]:
    model = make(name, seed=dist.get_rank())  # different weights on each rank until the wrapper makes them one
    wrapped = DataParallel(model, mode, bucket_mb=0.0003, op=op)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        x, weight = map(_share, batch(name, step, size))
        parts = list(zip(x.tensor_split(accumulate), weight.tensor_split(accumulate), strict=True))
        for index, (xs, ws) in enumerate(parts):
            divisor = size if op == "sum" else size / dist.get_world_size()
            loss = (wrapped(xs).square() * ws).sum() / divisor
            if index < len(parts) - 1:
                with wrapped.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _train_alone(name: str, size: int, steps: int = 10) -> list[Tensor]:
    model = make(name, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        x, weight = batch(name, step, size)
        ((model(x).square() * weight).sum() / size).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _train_every_mode(name: str, op: str, size: int, accumulate: int) -> list[list[Tensor]]:
    return [_train(name, mode, op, size, accumulate=accumulate) for mode in MODES]


@pytest.mark.parametrize("name", ["toy", "tied"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_training_on_ranks_is_training_on_the_whole_batch(on_ranks, num_ranks: int, name: str) -> None:
    per_rank = on_ranks(num_ranks, _train_every_mode, name, "mean", 12, 1)
    want = _train_alone(name, 12)
    for modes in per_rank:
        assert distance(modes[0], want) <= 1e-6
        for mode, weights in zip(MODES, modes, strict=True):
            same = [torch.equal(a, b) for a, b in zip(weights, per_rank[0][0], strict=True)]
            assert all(same), f"{mode} differs in its bits"


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_uneven_batches_summed_and_accumulated_are_the_whole_batch(on_ranks, num_ranks: int) -> None:
    per_rank = on_ranks(num_ranks, _train_every_mode, "toy", "sum", 13, 3)
    want = _train_alone("toy", 13)
    for modes in per_rank:
        assert all(distance(weights, want) <= 1e-6 for weights in modes)
        assert all(torch.equal(a, b) for weights in modes for a, b in zip(weights, per_rank[0][0], strict=True))


def _sums(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    everyone = torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(7)).to(dtype)
    whole = everyone[rank].clone()
    sum_in_rank_order(whole, None)
    pieces = everyone[rank].clone()
    cut = size // num_ranks // 3 * num_ranks
    for piece in (pieces[:cut], pieces[cut:]):
        sum_in_rank_order(piece, None)
    total = everyone[0].float()
    for term in everyone[1:]:
        total = total + term.float()
    return whole, pieces, total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_sum_does_not_depend_on_how_it_was_packed(on_ranks, num_ranks: int, dtype: torch.dtype) -> None:
    for whole, pieces, in_order in on_ranks(num_ranks, _sums, 12 * 1001, dtype):
        assert torch.equal(whole, in_order)
        assert torch.equal(pieces, in_order)


def _unused_and_state() -> tuple[bool, list[str], bool]:
    model = make("toy")
    wrapped = DataParallel(model)
    x, weight = map(_share, batch("toy", 0))
    (wrapped(x) * weight).sum().backward()
    keys = list(wrapped.state_dict())
    state = {key: torch.full_like(value, 2.0) for key, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(state)
    return model.unused.grad is None, keys, all(bool((p == 2).all()) for p in model.parameters())


def test_unused_parameters_stay_without_gradient_and_names_stay_bare(on_ranks) -> None:
    for unused, keys, loaded in on_ranks(3, _unused_and_state):
        assert unused
        assert keys == list(make("toy").state_dict())
        assert loaded


def _batchnorm() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    wrapped = DataParallel(model)
    with torch.no_grad():
        model[1].running_mean += dist.get_rank()
    x, _ = map(_share, batch("toy", 0))
    wrapped(x).square().sum().backward()
    wrapped.eval()
    before = model[1].running_mean.clone()
    wrapped.train()
    wrapped(x)
    return [before, model[1].num_batches_tracked]


def test_buffers_follow_the_first_rank(on_ranks) -> None:
    results = on_ranks(2, _batchnorm)
    x = batch("toy", 0)[0].tensor_split(2)[1]
    torch.manual_seed(0)
    linear = nn.Linear(7, 5)
    # The second rank saw its own samples, but began from the first rank's statistics (0, not 1).
    assert distance([results[1][0]], [0.1 * linear(x).detach().mean(0)]) <= 1e-5
    assert results[0][1] == results[1][1] == 2


def _traffic(mode: Mode) -> tuple[int, float, float]:
    wrapped = DataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), mode, bucket_mb=0.05)
    wrapped(torch.randn(8, 64)).square().sum().backward()
    return len(wrapped._buckets), wrapped.traffic.communication, wrapped.traffic.exposed


def test_buckets_are_capped_and_traffic_is_reported(on_ranks) -> None:
    count = {mode: on_ranks(2, _traffic, mode)[0] for mode in MODES}
    assert {mode: c[0] for mode, c in count.items()} == {"naive": 12, "flat": 1, "overlapped": 12, "bucketed": 2}
    assert all(communication > 0 and exposed > 0 for _, communication, exposed in count.values())


def _wrap_again() -> tuple[Tensor, Tensor]:
    model = make("toy")
    wrapped = DataParallel(model, "flat", op="sum")
    x, weight = map(_share, batch("toy", 0))
    (wrapped(x) * weight).sum().backward()
    model.zero_grad()
    model.second = nn.Linear(13, 5, bias=False)
    wrapped = DataParallel(model, "flat", op="sum")
    (wrapped(x) * weight).sum().backward()
    assert model.first.weight.grad is not None
    whole = make("toy")
    whole.load_state_dict(model.state_dict())
    x, weight = batch("toy", 0)
    (whole(x) * weight).sum().backward()
    return model.first.weight.grad, whole.first.weight.grad


def test_a_changed_module_can_be_wrapped_again(on_ranks) -> None:
    for got, want in on_ranks(2, _wrap_again):
        assert distance([got], [want]) <= 1e-6  # reduced once, not once per wrapper


# Failures: the same words on every rank, and ranks that still work afterwards.


def _caught(kind: str) -> str:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    try:
        if kind == "different models":
            DataParallel(nn.Linear(4, 5 if rank == last else 6))
        wrapped = DataParallel(make("toy"), "bucketed", bucket_mb=0.0003)
        x, weight = map(_share, batch("toy", 0))
        if kind == "missing gradient":
            out = wrapped(x) * weight
            extra = wrapped.module.unused.sum() if rank == last else 0.0
            (out.sum() + extra).backward()
        if kind == "changed module":
            if rank == last:
                wrapped.module.second = nn.Linear(13, 5, bias=False)
            (wrapped(x) * weight).sum().backward()
        if kind == "frozen later":
            wrapped.module.second.weight.requires_grad_(rank != last)
            (wrapped(x) * weight).sum().backward()
        if kind == "lost buffer":
            if rank == last:
                wrapped.module.scale = wrapped.module._buffers.pop("scale")
            (wrapped(x) * weight).sum().backward()
        if kind == "missing key":
            state = wrapped.state_dict()
            if rank == last:
                del state["first.bias"]
                state["third.bias"] = torch.zeros(1)
            wrapped.load_state_dict(state)
        if kind == "sparse gradient":
            wrapped = DataParallel(nn.Embedding(5, 3, sparse=True))
            wrapped(torch.tensor([1, 2])).sum().backward()
    except ValueError as error:
        return str(error)
    return "no error"


FAILURES: dict[str, tuple[str, ...]] = {
    "different models": ("the model must be the same", "weight (6, 4)", "weight (5, 4)", "rank 2"),
    "missing gradient": ("ranks 0, 1: no gradient for unused", "on every rank or on none"),
    "changed module": ("rank 2: the module changed", "second.weight", "wrap it again"),
    "frozen later": (
        "rank 2: the module changed",
        "second.weight was (5, 13) float32 on cpu, and is now (5, 13) float32 on cpu, frozen",
    ),
    "lost buffer": ("rank 2: the module changed", "buffer scale", "wrap it again"),
    "missing key": ("rank 2:", 'Missing key(s) in state_dict: "first.bias"', '"third.bias"'),
    "sparse gradient": ("cannot be reduced", "'weight'", "sparse"),
}


@pytest.mark.parametrize("kind", list(FAILURES))
def test_a_failure_is_named_on_every_rank(on_ranks, kind: str) -> None:
    texts = on_ranks(3, _caught, kind)
    for text in texts:
        assert all(part in text for part in FAILURES[kind]), text


def test_bad_arguments_are_named() -> None:
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"mode": "bucket"}, "naive, flat, overlapped, bucketed"),
        ({"bucket_mb": 0}, "must be positive"),
        ({"op": "max"}, '"mean" or "sum"'),
    ]
    for kwargs, says in arguments:
        with pytest.raises(ValueError, match=says):
            DataParallel(nn.Linear(2, 2), **kwargs)
