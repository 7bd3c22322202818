"""Tensor parallelism: the dense layer's output and gradients, and its checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashspan.checkpoint.sharded import full_state_dict, load_full_state_dict
from flashspan.parallel.collectives import full_tensor
from flashspan.parallel.data import DataParallel
from flashspan.parallel.tensor import ColumnParallelLinear, RowParallelLinear, apply_tensor_parallel
from flashspan.parallel.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy
from tests.parallel.models import distance

RANKS = (1, 2, 3, 4)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


class Language(nn.Module):
    """Embedding, one gated MLP with norms and biases, and a head: a model without any parallelism."""

    def __init__(self, vocab: int, width: int, hidden: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.last = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.last(x))


PLAN = {"embed": "vocabulary", "gate": "column", "up": "column", "down": "row", "head": "column"}
SEQUENCE = {**PLAN, "norm": "norm", "last": "norm"}
ENTERING = {**SEQUENCE, "norm": "norm-entering", "gate": "column-entered", "up": "column-entered"}


def _language(sizes: tuple[int, int, int], tied: bool) -> Language:
    torch.manual_seed(3)
    return Language(*sizes, tied=tied)


def _data(vocab: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(vocab, (2, 2, length), generator=generator)
    targets[0, 0] = -100
    return tokens, targets, torch.randn(2, length, generator=generator)


def _dense(sizes: tuple[int, int, int], tied: bool, length: int) -> dict[str, Tensor]:
    """Loss of each token and gradients, float64."""
    model = _language(sizes, tied).double()
    tokens, targets, dout = _data(sizes[0], length)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view_as(dout)
    loss.backward(dout.double())
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def _split(sizes: tuple[int, int, int], tied: bool, length: int, kind: str) -> tuple[dict[str, Tensor], int]:
    mesh = _mesh()
    model = _language(sizes, tied)
    if dist.get_rank():  # only the first rank's weights are used
        with torch.no_grad():
            for p in model.parameters():
                p += 1.0
    plan = {"plain": PLAN, "sequence": SEQUENCE, "entering": ENTERING, "entering sequence": ENTERING}[kind]
    apply_tensor_parallel(model, mesh, plan, sequence_dim=1 if "sequence" in kind else None)
    tokens, targets, dout = _data(sizes[0], length)
    logits = model(tokens)
    loss = vocabulary_parallel_cross_entropy(logits, targets, vocab_size=sizes[0], mesh=mesh)
    loss.backward(dout)
    grads = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}, logits.shape[-1]


@pytest.mark.parametrize("kind", ["plain", "sequence", "entering", "entering sequence"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_split_model_is_the_dense_model(on_ranks, num_ranks: int, tied: bool, kind: str) -> None:
    sizes, length = (37, 10, 23), 12  # no number of ranks divides 37 tokens and 23 features
    want = _dense(sizes, tied, length)
    for got, width in on_ranks(num_ranks, _split, sizes, tied, length, kind):
        assert got.keys() == want.keys()
        for name in want:
            assert distance([got[name]], [want[name]]) <= 1e-6, name
        assert width <= -(-37 // num_ranks)  # never the whole vocabulary


def _still_tied() -> bool:
    model = Language(8, 4, 4, tied=True)
    apply_tensor_parallel(model, _mesh(), {"up": "column"})
    return model.head.weight is model.embed.weight


def test_weights_the_plan_does_not_name_stay_tied(on_ranks) -> None:
    assert on_ranks(2, _still_tied) == [True, True]


def test_more_ranks_than_tokens_or_features_is_still_right(on_ranks) -> None:
    sizes, length = (5, 16, 5), 4  # on 4 ranks: 2, 2, 1 and 0 tokens
    want = _dense(sizes, False, length)
    for got, _ in on_ranks(4, _split, sizes, False, length, "plain"):
        assert max(distance([got[name]], [want[name]]) for name in want) <= 1e-6


def _layers(in_features: int, out_features: int, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (split, dense) of outputs and gradients for each layer class."""
    mesh, rank = _mesh(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, in_features, generator=generator)
    dout = torch.randn(*shape, out_features, generator=generator)
    pairs = []

    torch.manual_seed(rank)
    column = ColumnParallelLinear(in_features, out_features, mesh=mesh, gather_output=True)
    torch.manual_seed(rank)
    row = RowParallelLinear(in_features, out_features, mesh=mesh)
    for layer in (column, row):
        dense = nn.Linear(in_features, out_features)
        dense.load_state_dict(full_state_dict(layer))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        mine = a.tensor_split(1)[0] if layer is column else a.chunk(mesh.size(), -1)
        if layer is row:
            mine = mine[rank] if rank < len(mine) else a[..., :0]
        y, z = layer(mine), dense(b)
        y.backward(dout)
        z.backward(dout)
        if layer is row:  # each rank has only the gradient of its own features
            dist.all_reduce(a.grad)
        pairs += [(y.detach(), z.detach()), (a.grad, b.grad)]
        pairs += [(full_tensor(p.grad), q.grad) for p, q in zip(layer.parameters(), dense.parameters(), strict=True)]
    return pairs


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("sizes", "shape"), [((8, 12), (3, 5)), ((7, 5), (1,)), ((63, 130), (2, 3, 4))])
def test_each_layer_is_the_dense_layer(
    on_ranks, num_ranks: int, sizes: tuple[int, int], shape: tuple[int, ...]
) -> None:
    for pairs in on_ranks(num_ranks, _layers, *sizes, shape):
        for split, dense in pairs:
            assert distance([split], [dense]) <= 1e-6


def _save_split(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = Language(37, 10, 23)
    apply_tensor_parallel(model, _mesh(), PLAN)
    return full_state_dict(model)


def _load_split(state: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(99)
    model = Language(37, 10, 23)
    apply_tensor_parallel(model, _mesh(), PLAN)
    load_full_state_dict(model, state)
    return full_state_dict(model)


def test_a_checkpoint_is_the_same_at_any_degree(on_ranks) -> None:
    torch.manual_seed(4)
    dense = Language(37, 10, 23).state_dict()
    for source, target in ((1, 3), (3, 2), (4, 1)):
        saved = on_ranks(source, _save_split, 4)[-1]
        loaded = on_ranks(target, _load_split, saved)[0]
        for state in (saved, loaded):
            assert state.keys() == dense.keys()
            assert all(type(state[name]) is Tensor and torch.equal(state[name], dense[name]) for name in dense)


def _loss_in(dtype: torch.dtype) -> list[Tensor]:
    mesh = _mesh()
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(6, 37, generator=generator) * 30).to(dtype)  # large: needs the running maximum
    targets = torch.randint(37, (6,), generator=generator)
    parts = logits.chunk(mesh.size(), -1)
    mine = parts[dist.get_rank()].clone().requires_grad_()
    dout = torch.randn(6, generator=generator)
    loss = vocabulary_parallel_cross_entropy(mine, targets, vocab_size=37, mesh=mesh)
    loss.backward(dout)
    whole = logits.double().requires_grad_()
    want = F.cross_entropy(whole, targets, reduction="none")
    want.backward(dout.double())
    return [loss.detach(), want.detach(), mine.grad, whole.grad.chunk(mesh.size(), -1)[dist.get_rank()]]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_cross_entropy_of_large_logits(on_ranks, dtype: torch.dtype, bound: float) -> None:
    for loss, want, grad, want_grad in on_ranks(3, _loss_in, dtype):
        assert distance([loss], [want]) <= 1e-6
        assert distance([grad], [want_grad]) <= bound


class Counting(nn.Linear):
    """A layer with extra state: a number, or a tensor."""

    def __init__(self, count: Any) -> None:
        super().__init__(4, 4)
        self.count = count

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def _extra_state(saved: Any, other: Any, wrapped: bool) -> Any:
    models = [nn.Sequential(Counting(saved), nn.BatchNorm1d(4)), nn.Sequential(Counting(other), nn.BatchNorm1d(4))]
    state = full_state_dict(models[0])
    load_full_state_dict(DataParallel(models[1]) if wrapped else models[1], state)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    return models[1][0].count


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_holds_what_modules_add_to_it(on_ranks, wrapped: bool) -> None:
    assert on_ranks(2, _extra_state, {"seen": 3}, {"seen": 0}, wrapped) == [{"seen": 3}] * 2
    assert on_ranks(2, _extra_state, torch.tensor(3), torch.tensor(0), wrapped) == [torch.tensor(3)] * 2


def _star() -> tuple[list[str], bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apply_tensor_parallel(model, _mesh(), {"*": "column-gathered"})
    return list(model._modules), all(isinstance(layer, ColumnParallelLinear) for layer in model)


def test_a_star_in_a_plan_is_every_submodule_and_not_the_module(on_ranks) -> None:
    assert on_ranks(2, _star) == [(["0", "1"], True)] * 2


def _caught(kind: str, arguments: Any) -> str:
    mesh = _mesh()
    try:
        if kind == "plan":
            apply_tensor_parallel(Language(8, 4, 4), mesh, arguments)
        if kind == "unnamed":
            apply_tensor_parallel(Language(8, 4, 4), mesh, PLAN, sequence_dim=1)
        if kind == "padding":
            apply_tensor_parallel(nn.Sequential(nn.Embedding(8, 4, padding_idx=0)), mesh, {"0": "vocabulary"})
        if kind == "tied":
            apply_tensor_parallel(Language(8, 4, 4, tied=True), mesh, arguments)
        if kind == "sequence":
            VocabularyParallelEmbedding(9, 4, mesh=mesh, sequence_dim=1)(torch.zeros(1, 5, dtype=torch.long))
        if kind == "token":
            VocabularyParallelEmbedding(9, 4, mesh=mesh)(torch.tensor([[1, 9]]))
        if kind == "logits":
            vocabulary_parallel_cross_entropy(torch.zeros(1, 9), torch.tensor([1]), vocab_size=9, mesh=mesh)
        if kind == "load":
            model = Language(8, 4, 4)
            state = {**full_state_dict(model), "surplus": torch.zeros(1), "up.bias": torch.zeros(3)}
            del state["down.weight"]
            load_full_state_dict(model, state if dist.get_rank() else full_state_dict(model))
        if kind == "no tensor":
            model = Language(8, 4, 4)
            state = {**full_state_dict(model), "up.bias": [0.0] * 4, "down.weight": np.zeros((4, 4))}
            load_full_state_dict(model, state if dist.get_rank() else full_state_dict(model))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("plan", {"layers.*": "row"}, "'layers.*', which no submodule matches"),
        ("plan", {"norm": "row"}, "'row' does not apply to 'norm', a LayerNorm"),
        ("tied", {"embed": "vocabulary", "head": "row"}, "must be split the same way"),
        ("tied", {"embed": "vocabulary"}, "must be split the same way"),
        ("plan", {"norm": "norm", "*norm": "whole"}, "names 'norm' twice, by 'norm' and by '*norm'"),
        ("unnamed", None, "norm, last are missing"),
        ("padding", None, "'0' has padding_idx"),
        ("sequence", None, "divisible by the tensor degree: got 5 tokens on 2 ranks"),
        ("token", None, "tokens must lie in [0, 9): got 1 to 9"),
        ("logits", None, "expected (1, 5), got (1, 9)"),
        (
            "load",
            None,
            "rank 1: the state does not fit the module: missing down.weight; unexpected surplus; up.bias is",
        ),
        ("no tensor", None, "down.weight is of type ndarray, not a tensor"),
        ("no tensor", None, "up.bias is of type list, not a tensor"),
    ],
)
def test_a_misuse_is_named_on_every_rank(on_ranks, kind: str, arguments: Any, says: str) -> None:
    for rank, text in enumerate(on_ranks(2, _caught, kind, arguments)):
        assert says in text or (kind == "logits" and rank == 1 and "expected (1, 4), got (1, 9)" in text)
