"""DataParallel: training on ranks equals training on the whole batch, in all modes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashspan.launch import Ranks
from flashspan.parallel.collectives import sum_in_rank_order
from flashspan.parallel.data import DataParallel, Mode
from tests.parallel.models import batch, distance, make

MODES = get_args(Mode)
RANKS = (1, 2, 3, 4)


def _share(x: Tensor) -> Tensor:
    """This rank's part of a batch; parts are uneven if the ranks do not divide it."""
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


def _train(name: str, mode: Mode, op: str, size: int, steps: int = 10, accumulate: int = 1) -> list[Tensor]:
    model = make(name, seed=dist.get_rank())  # different weights on each rank until the wrapper makes them equal
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


def _mean_of_large_halves() -> list[float]:
    flat = torch.full((12,), 40000.0, dtype=torch.float16)
    sum_in_rank_order(flat, None, divisor=dist.get_world_size())
    return flat.tolist()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_mean_of_float16_does_not_overflow(on_ranks, num_ranks: int) -> None:
    assert on_ranks(num_ranks, _mean_of_large_halves) == [[40000.0] * 12] * num_ranks


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


def _after_an_exception(mode: Mode, again: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of a backward pass after one that raised an error in the loss, before any gradient was sent."""
    model = make("toy")
    wrapped = DataParallel(model, mode, op="sum")
    x, weight = map(_share, batch("toy", 0))
    out, attempts = wrapped(x), []

    def interrupt(_: Tensor) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise KeyboardInterrupt

    model.second.weight.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        (out * weight).sum().backward(retain_graph=again)
    model.zero_grad()
    ((out if again else wrapped(x)) * weight).sum().backward()
    return _with_whole_batch(model)


def _with_whole_batch(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients on ranks, and those of the whole batch in one process."""
    whole = make("toy")
    x, weight = batch("toy", 0)
    (whole(x) * weight).sum().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    got, want = zip(*[(p.grad, q.grad) for p, q in pairs if q.grad is not None], strict=True)
    return list(got), list(want)


@pytest.mark.parametrize("again", [False, True], ids=["another forward", "the same graph"])
@pytest.mark.parametrize("mode", ["naive", "flat", "bucketed"])
def test_a_backward_after_one_that_raised_is_reduced(on_ranks, mode: Mode, again: bool) -> None:
    for got, want in on_ranks(2, _after_an_exception, mode, again):
        assert distance(got, want) <= 1e-6


class _Twice(nn.Module):
    """Two layers with a buffer, called one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.tanh(self.layers[which](x)) * self.scale


def _checkpointed_twice(mode: Mode) -> tuple[list[Tensor], list[Tensor]]:
    grads = []
    for recompute in (True, False):
        torch.manual_seed(0)
        wrapped = DataParallel(_Twice(), mode, bucket_mb=1e-5)
        x = _share(batch("toy", 0)[0])
        for which in (0, 1):
            x = checkpoint(wrapped, x, which, use_reentrant=False) if recompute else wrapped(x, which)
        x.square().sum().backward()
        grads.append([p.grad for p in wrapped.parameters()])
    return grads[0], grads[1]


@pytest.mark.parametrize("mode", ["overlapped", "bucketed"])
def test_a_wrapper_may_be_checkpointed_and_used_twice(on_ranks, mode: Mode) -> None:
    for got, want in on_ranks(2, _checkpointed_twice, mode):
        assert distance(got, want) <= 1e-6


def _reentrant_inside() -> tuple[list[Tensor], list[Tensor]]:
    model = make("toy")
    first, forward = model.first, model.first.forward
    first.forward = lambda x: checkpoint(forward, x.requires_grad_(), use_reentrant=True)
    wrapped = DataParallel(model, "flat", op="sum")
    x, weight = map(_share, batch("toy", 0))
    (wrapped(x) * weight).sum().backward()
    return _with_whole_batch(model)


def test_a_backward_within_a_backward_is_part_of_it(on_ranks) -> None:
    for got, want in on_ranks(2, _reentrant_inside):
        assert distance(got, want) <= 1e-6


def _penalized(mode: Mode) -> tuple[list[Tensor], list[Tensor], int]:
    """Sums over an accumulated part and one with a gradient penalty, and the number of buckets reduced for
    autograd.grad."""

    def loss(model: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = (model(x) * weight).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    wrapped, launched = DataParallel(make("toy"), mode, op="sum"), []
    wrapped._reduce = lambda *args: launched.append(1) or DataParallel._reduce(wrapped, *args)
    x, weight = map(_share, batch("toy", 0))
    with wrapped.no_sync():
        (wrapped(x) * weight).sum().backward()
    penalized = loss(wrapped, x, weight)
    num_launched = len(launched)
    penalized.backward()
    whole = make("toy")
    x, weight = batch("toy", 0)
    (whole(x) * weight).sum().backward()
    loss(whole, x, weight).backward()
    pairs = zip(wrapped.parameters(), whole.parameters(), strict=True)
    got, want = zip(*[(p.grad, q.grad) for p, q in pairs if q.grad is not None], strict=True)
    return list(got), list(want), num_launched


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_penalty_is_reduced_once_with_what_was_accumulated(on_ranks, mode: Mode) -> None:
    for got, want, num_launched in on_ranks(2, _penalized, mode):
        assert distance(got, want) <= 1e-5
        assert num_launched == 0


def _load_within(kind: str) -> tuple[list[str], bool]:
    wrapped = DataParallel(make("toy"))
    parent = nn.ModuleDict({"part": wrapped}) if kind == "part" else torch.compile(wrapped, backend="eager")
    state = {name: torch.full_like(value, 2.0) for name, value in parent.state_dict().items()}
    parent.load_state_dict(state)
    return list(state), all(bool((p == 2).all()) for p in wrapped.parameters())


@pytest.mark.parametrize(("kind", "prefix"), [("part", "part."), ("compiled", "_orig_mod.")])
def test_a_wrapper_within_a_module_loads_what_it_saved(on_ranks, kind: str, prefix: str) -> None:
    for names, loaded in on_ranks(2, _load_within, kind):
        assert names == [prefix + name for name in make("toy").state_dict()]
        assert loaded


# Failures: the same error on every rank, and ranks that still work afterwards.


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
        if kind == "no gradient at all":
            x = x.requires_grad_()
            wrapped.module.register_forward_hook(lambda *_: x * 2 if rank == last else None)
            wrapped(x).sum().backward()
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


def _as_one_of_512(op: str, others_lack: bool) -> bool:
    """Whether a bfloat16 gradient survives if only one rank of 512 has it, or lacks it."""
    wrapped = DataParallel(nn.Linear(3, 2, bias=False).bfloat16(), "flat", op=op)
    others = torch.tensor([0.0] * 6 + [511.0 * (not others_lack), 511.0 * others_lack])

    def over_512(flat: Tensor, group: object, *, divisor: int) -> None:
        flat.copy_((flat.float() + others) / (512 if op == "mean" else 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashspan.parallel.data.sum_in_rank_order", over_512)
        wrapped(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    return wrapped.module.weight.grad is not None


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_one_gradient_among_512_ranks_is_seen_in_16_bits(op: str) -> None:
    with Ranks(1) as ranks:
        assert ranks.run(_as_one_of_512, op, True) == [True]
        assert ranks.run(_as_one_of_512, op, False) == [True]


FAILURES: dict[str, tuple[str, ...]] = {
    "different models": ("the model must be the same", "weight (6, 4)", "weight (5, 4)", "rank 2"),
    "missing gradient": ("ranks 0, 1: no gradient for unused", "on every rank or on none"),
    "no gradient at all": ("rank 2: no gradient for second.weight", "first.bias", "on every rank or on none"),
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


def _wrap_with_a_pair_of_ranks(ranks: list[int] | None) -> str:
    """The first gradient, or the error, of a model that is wrapped over the world or over these ranks, if ranks 0 and 1
    are in a group without rank 2."""
    dist.new_group([0, 1])  # on every rank, as torch requires
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return ""
    try:
        wrapped = DataParallel(nn.Linear(2, 2), group=group)
    except ValueError as error:
        return str(error)
    wrapped(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    return str(wrapped.module.weight.grad[0, 0].item())


@pytest.mark.parametrize(
    ("ranks", "want"),
    [
        (None, ["1.0", "1.0", "1.0"]),
        ([0, 1], ["0.5", "0.5", ""]),
        ([1, 2], ["", *["got 3 on rank 1, 2 on rank 2; wrap the model before"] * 2]),
    ],
)
def test_ranks_in_different_numbers_of_groups_get_an_error(ranks: list[int] | None, want: list[str]) -> None:
    """torch names a group that not all ranks create by the rank's number of groups, and different names never match."""
    with Ranks(3, threads=1, timeout=10) as pool:
        found = pool.run(_wrap_with_a_pair_of_ranks, ranks, timeout=40)
    assert all(text in said for text, said in zip(want, found, strict=True)), found


def test_bad_arguments_are_named() -> None:
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"mode": "bucket"}, "naive, flat, overlapped, bucketed"),
        ({"bucket_mb": 0}, "must be a positive number: got 0"),
        ({"bucket_mb": "x"}, "must be a positive number: got 'x'"),
        ({"op": "max"}, '"mean" or "sum"'),
    ]
    for kwargs, says in arguments:
        with pytest.raises(ValueError, match=says):
            DataParallel(nn.Linear(2, 2), **kwargs)
