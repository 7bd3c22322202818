"""ShardedOptimizer has the plain optimizer's result, a share of its state, and checkpoints for any degree."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashspan.parallel.optimizer import ShardedOptimizer
from tests.parallel.models import batch, distance, make

RANKS = (1, 2, 3, 4)
ADAMW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with weight decay for matrices, and none for vectors."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def _steps(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for step in range(first, last):
        x, weight = batch(name, step)

        def closure(x: Tensor = x, weight: Tensor = weight) -> float:
            optimizer.zero_grad()
            loss = (model(x).square() * weight).sum() / len(x)
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) is not None
        scheduler.step()


def _sharded(name: str, optimizer_cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """Ten sharded steps and the whole state after them, in chunks small enough that there are several."""
    model = make(name)
    optimizer = ShardedOptimizer(_groups(model), optimizer_cls, chunk_mb=0.0003, **kwargs)
    _steps(name, model, optimizer, 0, 10)
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def _plain(name: str, optimizer_cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> tuple[list[Tensor], Any]:
    model = make(name)
    optimizer = optimizer_cls(_groups(model), **kwargs)
    _steps(name, model, optimizer, 0, 10)
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("name", ["toy", "tied"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_sharded_adamw_is_adamw(on_ranks, num_ranks: int, name: str) -> None:
    # The plain optimizer also runs on a rank, because the last bits of gradients depend on the number of threads.
    want, state = on_ranks(num_ranks, _plain, name, torch.optim.AdamW, ADAMW)[0]
    for weights, sharded_state in on_ranks(num_ranks, _sharded, name, torch.optim.AdamW, ADAMW):
        for got, expected in zip(weights, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-7, atol=0)
        for index, entry in state["state"].items():
            assert sharded_state["state"][index].keys() == entry.keys()
            assert all(torch.equal(sharded_state["state"][index][key], value) for key, value in entry.items())


@pytest.mark.parametrize(
    ("optimizer_cls", "kwargs"),
    [
        (torch.optim.AdamW, {**ADAMW, "foreach": True}),
        (torch.optim.AdamW, {**ADAMW, "fused": True}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.Adafactor, {"lr": 0.01}),
    ],
)
def test_any_optimizer_can_be_sharded(on_ranks, optimizer_cls: type[torch.optim.Optimizer], kwargs: Any) -> None:
    want, _ = on_ranks(3, _plain, "toy", optimizer_cls, kwargs)[0]
    for weights, _ in on_ranks(3, _sharded, "toy", optimizer_cls, kwargs):
        assert distance(weights, want) <= 1e-7


def _reload_adagrad() -> bool:
    """The optimizer has state before its first step, and one parameter has no gradient."""
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(3)]
    optimizer = ShardedOptimizer(params, torch.optim.Adagrad, lr=0.1)
    for param in params[1:]:
        param.grad = torch.ones(3, 3)
    optimizer.step()
    state = optimizer.state_dict()
    torch.optim.Adagrad(params, lr=0.1).load_state_dict(state)
    ShardedOptimizer(params, torch.optim.Adagrad, lr=0.1).load_state_dict(state)
    return sorted(state["state"]) == [0, 1, 2]


def test_a_state_made_before_the_first_step_is_saved_whole(on_ranks) -> None:
    assert on_ranks(2, _reload_adagrad) == [True, True]


def _matrices(sharded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False))
    make_one = partial(ShardedOptimizer, optimizer_cls=torch.optim.Muon) if sharded else torch.optim.Muon
    optimizer = make_one(model.parameters(), lr=0.02)
    _steps("toy", model, optimizer, 0, 3)
    return [p.detach() for p in model.parameters()]


def test_an_optimizer_of_matrices_alone_can_be_sharded(on_ranks) -> None:
    want = on_ranks(2, _matrices, False)[0]
    for weights in on_ranks(2, _matrices, True):
        assert distance(weights, want) <= 1e-7


def _save(steps: int) -> dict[str, Any]:
    model = make("toy")
    optimizer = ShardedOptimizer(_groups(model), torch.optim.AdamW, **ADAMW)
    _steps("toy", model, optimizer, 0, steps)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _resume(saved: dict[str, Any], steps: int, last: int) -> list[Tensor]:
    model = make("toy", seed=9)
    model.load_state_dict(saved["model"])
    optimizer = ShardedOptimizer(_groups(model), torch.optim.AdamW, lr=1.0)
    optimizer.load_state_dict(saved["optimizer"])
    _steps("toy", model, optimizer, steps, last)
    return [p.detach() for p in model.parameters()]


def test_a_state_saved_on_some_ranks_is_loaded_on_others(on_ranks) -> None:
    saved = {n: on_ranks(n, _save, 4)[-1] for n in (1, 3)}
    reference = on_ranks(1, _resume, saved[1], 4, 9)[0]
    for source, target in ((3, 1), (1, 4), (3, 2)):
        for weights in on_ranks(target, _resume, saved[source], 4, 9):
            assert distance(weights, reference) <= 1e-6  # ranks have fewer threads, which changes last bits
    model = make("toy")
    plain = torch.optim.AdamW(_groups(model), lr=1.0)
    plain.load_state_dict(saved[3]["optimizer"])
    model.load_state_dict(saved[3]["model"])
    _steps("toy", model, plain, 4, 9)
    assert distance([p.detach() for p in model.parameters()], reference) <= 1e-6


class _Layers(nn.Module):
    """The weights of a 12-layer transformer: attention, MLP and norms per layer, and an embedding."""

    def __init__(self, width: int = 48, vocab: int = 640) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList()
        for _ in range(12):
            shapes = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]
            layer = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in [*shapes, (width,), (width,)]])
            self.layers.append(layer)


def _held() -> tuple[int, int]:
    """The bytes of optimizer state on this rank, and in total."""
    model = _Layers()
    optimizer = ShardedOptimizer(_groups(model), torch.optim.AdamW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = sum(v.nbytes for entry in optimizer.state.values() for v in entry.values())
    return held, sum(2 * p.nbytes for p in model.parameters())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_holds_its_share_of_the_state(on_ranks, num_ranks: int) -> None:
    for held, total in on_ranks(num_ranks, _held):
        assert held <= 1.05 * total / num_ranks


def _grow() -> list[Tensor]:
    params = [nn.Parameter(torch.full((n,), float(n))) for n in (3, 5, 2)]
    optimizer = ShardedOptimizer(params[:1], torch.optim.SGD, lr=0.5)
    optimizer.add_param_group({"params": params[1:], "lr": 0.25})
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.detach() for p in params]


def test_a_group_added_later_is_stepped_with_its_own_settings(on_ranks) -> None:
    for num_ranks in (1, 4):  # with 4 ranks, one rank has no parameters
        for weights in on_ranks(num_ranks, _grow):
            assert [w.tolist() for w in weights] == [[2.5] * 3, [4.75] * 5, [1.75] * 2]


def _caught(kind: str, saved: dict[str, Any]) -> str:
    model = make("toy")
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        if kind == "different":
            ShardedOptimizer([nn.Parameter(torch.zeros(3 + last))], torch.optim.SGD)
        optimizer = ShardedOptimizer(_groups(model), torch.optim.AdamW)
        state = saved["optimizer"]
        if last and kind == "missing":
            del state["state"][1]
        if last and kind == "extra":
            state["state"][99] = {}
        if last and kind == "groups":
            state["param_groups"].pop()
        if last and kind == "no groups":
            del state["param_groups"]
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "rank 1: the state has no entry for parameters 1 of 6"),
        ("extra", "rank 1: the state has entries for unknown parameters 99: there are 6"),
        (
            "groups",
            "rank 1: the parameter groups must have the same sizes: the state has [2], the optimizer has [2, 4]",
        ),
        ("no groups", "param_groups is missing"),
        ("different", "must be the same on every rank: item 0 is (3,) torch.float32 on rank 0 and (4,)"),
    ],
)
def test_a_state_that_does_not_fit_is_named_on_every_rank(on_ranks, kind: str, says: str) -> None:
    for text in on_ranks(2, _caught, kind, on_ranks(1, _save, 1)[0]):
        assert says in text


def test_an_optimizer_of_one_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be sharded"):
        ShardedOptimizer([nn.Parameter(torch.zeros(2))], torch.optim.LBFGS)
