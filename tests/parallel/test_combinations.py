"""All parallelism together on one mesh: data x shard x tensor, clipping, mixed precision, and the hybrid block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from examples.hybrid_block import HybridBlock
from flashspan.checkpoint.sharded import full_state_dict, load_full_state_dict
from flashspan.parallel import (
    DataParallel,
    ShardedOptimizer,
    apply_fully_sharded,
    apply_tensor_parallel,
    build_mesh,
    clip_grad_norm,
    grad_norm,
    submesh,
)
from flashspan.parallel.collectives import full_tensor, local_part
from tests.parallel.models import distance

PLAN: dict[str, Any] = {"*.up": "column", "*.down": "row"}
MESHES: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"tensor": 2}),
    (3, {"shard": 3}),
    (4, {"data": 2, "tensor": 2}),
    (4, {"shard": 2, "tensor": 2}),
    (4, {"data": 2, "shard": 2}),
    (4, {"shard": 2, "context": 2}),
    (4, {"context": 2, "tensor": 2}),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _model() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 5))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 5, generator=generator)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: int,
    part: int,
    max_norm: float,
    params: list[Any],
    steps: range = range(4),
) -> list[float]:
    """Clipped steps on this part of each batch; the loss is divided by the whole batch's size."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        x, weight = (t.tensor_split(parts)[part] for t in _batch(step))
        ((model(x).square() * weight).sum() / 12).backward()
        norms.append(clip_grad_norm(params, max_norm).item())
        optimizer.step()
    return norms


def _alone(max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        x, weight = _batch(step)
        ((model(x).square() * weight).sum() / 12).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return norms, model.state_dict()


def _train_on(
    degrees: dict[str, int], engine: str, max_norm: float, saved: dict[str, Tensor]
) -> tuple[list[float], dict[str, Tensor], bool, dict[str, Tensor]]:
    """On a rank: the norms of four steps, the trained state, whether parameters are split, and the state after a whole
    checkpoint is loaded into the model."""
    mesh = build_mesh(**degrees)
    model: nn.Module = _model()
    if dist.get_rank():
        with torch.no_grad():
            for p in model.parameters():
                p += 1.0
    if degrees.get("tensor", 1) > 1:
        apply_tensor_parallel(model, mesh["tensor"], PLAN)
    gradient = submesh(mesh, "gradient")
    optimizer: torch.optim.Optimizer
    if engine == "fully sharded":
        apply_fully_sharded(model, mesh, [model[0], model[1]], op="sum")  # type: ignore[index]
        optimizer, running = torch.optim.AdamW(model.parameters(), lr=0.02), model
    else:
        running = DataParallel(model, bucket_mb=0.0005, group=gradient.get_group(), op="sum")
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, group=gradient.get_group(), chunk_mb=0.0005, lr=0.02
        )
    params = list(model.parameters())
    norms = _train(running, optimizer, gradient.size(), gradient.get_local_rank(), max_norm, params)
    split = any(isinstance(p, DTensor) for p in params)
    trained = {name: value.clone() for name, value in full_state_dict(model).items()}
    load_full_state_dict(model, saved)
    return norms, trained, split, full_state_dict(model)


@pytest.mark.parametrize("engine", ["data parallel", "fully sharded"])
@pytest.mark.parametrize(("num_ranks", "degrees"), MESHES)
def test_every_combination_trains_clips_and_loads_as_one_device_does(
    on_ranks, num_ranks: int, degrees: dict[str, int], engine: str
) -> None:
    want_norms, want = _alone(0.3)
    assert min(want_norms) > 0.3  # so that gradients are clipped
    saved = {name: torch.randn_like(value) for name, value in want.items()}
    for norms, state, split, loaded in on_ranks(num_ranks, _train_on, degrees, engine, 0.3, saved):
        assert distance([torch.tensor(norms)], [torch.tensor(want_norms)]) <= 1e-6
        assert state.keys() == want.keys()
        assert distance(state.values(), want.values()) <= 1e-6
        assert split == (engine == "fully sharded" or degrees.get("tensor", 1) > 1)
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert loaded.keys() == saved.keys()


def _resume(degrees: dict[str, int], saved: dict[str, Any] | None, steps: range) -> dict[str, Any]:
    mesh = build_mesh(**degrees)
    model = _model()
    if degrees.get("tensor", 1) > 1:
        apply_tensor_parallel(model, mesh["tensor"], PLAN)
    gradient = submesh(mesh, "gradient")
    running = DataParallel(model, group=gradient.get_group(), op="sum")
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, group=gradient.get_group(), lr=0.02)
    if saved is not None:
        load_full_state_dict(model, saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    _train(running, optimizer, gradient.size(), gradient.get_local_rank(), 0.3, list(model.parameters()), steps)
    return {"model": full_state_dict(model), "optimizer": optimizer.state_dict()}


def test_training_resumes_under_another_combination(on_ranks) -> None:
    _, want = _alone(0.3)
    saved = on_ranks(4, _resume, {"data": 2, "tensor": 2}, None, range(2))[3]
    assert all(type(v) is Tensor for entry in saved["optimizer"]["state"].values() for v in entry.values())
    for num_ranks, degrees in ((1, {}), (2, {"tensor": 2}), (3, {"data": 3}), (4, {"context": 2, "tensor": 2})):
        for resumed in on_ranks(num_ranks, _resume, degrees, saved, range(2, 4)):
            assert distance(resumed["model"].values(), want.values()) <= 1e-6


def _norms() -> list[tuple[float, float]]:
    """Norms of known random gradients, split and whole, of order 2 and infinity, with a tied parameter given twice."""
    mesh = build_mesh(tensor=2)
    model = _model()
    plain = _model()
    for index, p in enumerate(plain.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(index))
    apply_tensor_parallel(model, mesh["tensor"], PLAN)
    x, weight = _batch(0)
    (model(x) * weight).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert q.grad is not None
        assert p.grad is not None
        assert isinstance(p, DTensor)
        placement = p.placements[0]
        split = isinstance(placement, Shard)
        whole = q.grad.chunk(2, placement.dim)[mesh["tensor"].get_local_rank()] if split else q.grad
        local_part(p.grad).copy_(whole)
    pairs = []
    for order in (2.0, float("inf"), 3.0):
        got = grad_norm([*model.parameters(), *model.parameters()], norm_type=order)
        pairs.append((got.item(), nn.utils.get_total_norm([p.grad for p in plain.parameters()], order).item()))
    return pairs


def test_norms_of_any_order_count_each_element_once(on_ranks) -> None:
    for pairs in on_ranks(4, _norms):
        assert all(abs(got - want) <= 1e-6 * want for got, want in pairs)


def test_a_single_parameter_is_clipped_like_a_list_of_it() -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad = torch.full((3, 2), 2.0)
    assert grad_norm(param) == grad_norm([param])
    norm = clip_grad_norm(param, 1.0)
    assert abs(norm.item() - 24**0.5) <= 1e-6
    assert abs(param.grad.norm().item() - 1.0) <= 1e-5


def _low_precision() -> tuple[list[torch.dtype], float]:
    mesh = build_mesh(shard=2)
    model = _model()
    seen: list[torch.dtype] = []
    model[0].up.register_forward_hook(lambda module, args, out: seen.extend([args[0].dtype, out.dtype]))
    apply_fully_sharded(model, mesh, [model[0], model[1]], param_dtype=torch.bfloat16)
    x, weight = _batch(0)
    (model(x).float() * weight).sum().backward()
    dtypes = [*seen, *(local_part(t).dtype for p in model.parameters() for t in (p, p.grad) if t is not None)]
    dense = _model()
    (dense(x) * weight).sum().backward()
    grads = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    return dtypes, distance(grads, [p.grad for p in dense.parameters() if p.grad is not None])


def test_mixed_precision_computes_low_and_keeps_high(on_ranks) -> None:
    for dtypes, error in on_ranks(2, _low_precision):
        assert dtypes[:2] == [torch.bfloat16, torch.bfloat16]
        assert set(dtypes[2:]) == {torch.float32}
        assert 1e-5 < error <= 2e-2


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _hybrid(
    sequence_parallel: bool, state: dict[str, Tensor] | None, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Any]:
    mesh = build_mesh(tensor=dist.get_world_size())["tensor"]
    torch.manual_seed(dist.get_rank())
    block = HybridBlock(
        24, 8, 31, attention=_causal, mesh=mesh, num_kv_heads=4, sequence_parallel=sequence_parallel, dtype=dtype
    )
    if state is not None:
        load_full_state_dict(block, state)
    generator = torch.Generator().manual_seed(6)
    x, dout = torch.randn(2, 2, 12, 24, generator=generator).to(dtype)
    ranks, rank = (mesh.size(), mesh.get_local_rank()) if sequence_parallel else (1, 0)
    mine = x.chunk(ranks, 1)[rank].clone().requires_grad_()
    out = block(mine)
    out.backward(dout.chunk(ranks, 1)[rank])
    assert mine.grad is not None
    parts = {"out": out.detach(), "x": mine.grad}
    if sequence_parallel:
        for name, part in parts.items():
            pieces = [torch.empty_like(part) for _ in range(ranks)]
            dist.all_gather(pieces, part.contiguous())
            parts[name] = torch.cat(pieces, 1)
    grads = {name: full_tensor(p.grad) for name, p in block.named_parameters() if p.grad is not None}
    return {**parts, **grads}, full_state_dict(block)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_hybrid_block_is_the_same_at_any_degree(on_ranks, num_ranks: int, sequence_parallel: bool) -> None:
    _, state = on_ranks(1, _hybrid, False, None, torch.float32)[0]
    want, _ = on_ranks(1, _hybrid, False, {k: v.double() for k, v in state.items()}, torch.float64)[0]
    for got, _ in on_ranks(num_ranks, _hybrid, sequence_parallel, state, torch.float32):
        assert got.keys() == want.keys()
        for name in want:
            assert distance([got[name]], [want[name]]) <= 1e-6, name


def _refused(kind: str) -> str:
    mesh = build_mesh(tensor=2)
    try:
        if kind == "heads":
            HybridBlock(24, 3, 8, attention=_causal, mesh=mesh["tensor"])
        if kind == "width":
            HybridBlock(24, 5, 8, attention=_causal, mesh=mesh["tensor"])
        if kind == "mesh":
            apply_fully_sharded(_model(), mesh["tensor"])
        if kind == "norm":
            clip_grad_norm([], 0.0)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("heads", "must divide the heads and the kv heads: got 3 and 3 heads on 2 ranks"),
        ("width", "got width 24, 5 heads"),
        ("mesh", "a mesh from build_mesh is needed"),
        ("norm", "max_norm must be positive: got 0.0"),
    ],
)
def test_a_misuse_is_named(on_ranks, kind: str, says: str) -> None:
    assert all(says in text for text in on_ranks(2, _refused, kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_clipping_rounds_once(dtype: torch.dtype) -> None:
    """The factor is at least float32, for gradients of any dtype."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (40, 7, 0)]
    for param in params:
        param.grad = torch.randn_like(param)
    before = [param.grad.double().clone() for param in params if param.grad is not None]
    factor = (1.0 / (clip_grad_norm(params, 1.0) + 1e-6)).to(torch.promote_types(dtype, torch.float32)).double()
    for param, grad in zip(params, before, strict=True):
        assert torch.equal(param.grad, (grad * factor).to(dtype))
