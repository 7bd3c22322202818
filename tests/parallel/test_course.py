"""The course's hooks, used as in the course's tests, on a toy and a tied model, compared with one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.models import batch, distance, make

PATH = Path(__file__).parents[2] / "examples" / "cs336" / "adapters.py"


def _hooks() -> Any:
    spec = importlib.util.spec_from_file_location("cs336_adapters", PATH)
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


def test_fsdp_computes_in_the_given_dtype_and_keeps_its_own(on_ranks) -> None:
    assert on_ranks(2, _half) == [(torch.float16, torch.float32)] * 2


class Course(nn.Module):
    """The kinds of layer that the course shards (an embedding, linear layers) and replicates (norms), some nested."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(Norm(7), nn.Linear(7, 7, bias=i > 0)) for i in range(2))
        self.norm = Norm(7)
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Norm(nn.Module):
    """RMSNorm that computes in float32, for inputs of any dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _course_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (12, 5), generator=generator), torch.randn(12, 5, 11, generator=generator)


def _make_course() -> Course:
    torch.manual_seed(3)
    return Course()


def _train_course(compute_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Three steps of SGD as in the course's FSDP test, with its checks of every gradient."""
    hooks, rank, num_ranks = _hooks(), dist.get_rank(), dist.get_world_size()
    wrapped = hooks.get_fsdp(_make_course(), compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in wrapped.module.parameters()}
    for step in range(3):
        tokens, weight = (x.tensor_split(num_ranks)[rank] for x in _course_batch(step))
        optimizer.zero_grad(set_to_none=True)
        ((wrapped(tokens).float() * weight).sum() / len(tokens)).backward()
        hooks.fsdp_on_after_backward(wrapped, optimizer)
        for name, param in wrapped.module.named_parameters():
            assert param.grad is not None, name
            assert (param.grad.shape, param.grad.dtype) == (param.data.shape, param.data.dtype), name
            if name.endswith(("norm.weight", ".0.weight")):
                copies = [torch.zeros_like(param.grad) for _ in range(num_ranks)]
                dist.all_gather(copies, param.grad)
                assert all(torch.equal(copies[0], copy) for copy in copies[1:]), name
        optimizer.step()
    return hooks.fsdp_gather_full_params(wrapped)


@pytest.mark.parametrize(("compute_dtype", "bound"), [(None, 1e-6), (torch.float16, 2e-3)], ids=["fp32", "fp16"])
def test_fsdp_as_the_course_of_2026_tests_it(on_ranks, compute_dtype: torch.dtype | None, bound: float) -> None:
    model = _make_course()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        tokens, weight = _course_batch(step)
        optimizer.zero_grad()
        ((model(tokens) * weight).sum() / len(tokens)).backward()
        optimizer.step()
    want = {name: param.detach() for name, param in model.named_parameters()}
    assert distance(before.values(), want.values()) > 0.1
    for got in on_ranks(2, _train_course, compute_dtype):
        assert got.keys() == want.keys()
        assert distance(got.values(), want.values()) <= bound


class Choosy(nn.Module):
    """Two norms in a container. `forward` uses one of them on request, and never the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"some": Norm(4), "none": Norm(4)})
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.linear(self.norms["some"](x) if use else x)


def _unused_on_some_ranks() -> list[float | None]:
    """The sums of both norms' gradients if only the first rank uses one of them."""
    hooks = _hooks()
    wrapped = hooks.get_fsdp(Choosy())
    wrapped(torch.ones(2, 4), dist.get_rank() == 0).sum().backward()
    hooks.fsdp_on_after_backward(wrapped, None)
    grads = [norm.weight.grad for norm in wrapped.module.norms.values()]
    return [None if grad is None else float(grad.sum()) for grad in grads]


def test_a_norm_that_only_some_ranks_use_has_one_gradient(on_ranks) -> None:
    (used, unused), second = on_ranks(2, _unused_on_some_ranks)
    assert [used, unused] == second
    assert used is not None
    assert unused is None
