"""Cases of distributed tests as values, the function with which ranks run them, and the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashspan import promise
from flashspan.context.layout import Layout, Placement, deal, place
from flashspan.context.strategy import ContextAttention, context_parallel
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Blocks, Mask
from flashspan.masks.patterns import documents, prefix, ragged
from tests.context import nccl_like

RESULTS = ("out", "lse", "dq", "dk", "dv")
MASKS = ("full", "causal", "window", "both sides", "documents", "causal documents", "prefix", "ragged")


def make_mask(name: str, T: int, heads: int = 1) -> Mask | Tensor:
    """Masks that hide all rows of some tiles, and documents with borders inside shards."""
    if name in DRAWN:
        generator = torch.Generator().manual_seed(T)
        visible = torch.rand(1, heads if name == "block map heads" else 1, T, T, generator=generator) < 0.3
        visible[..., T // 2 :, : T // 3] = True
        visible[..., : T // 3, T // 2 :] = False
        return visible if name == "bool" else Blocks.from_dense(visible, block=64)
    lengths = [T // 3, 0, T // 5, T - T // 3 - T // 5]
    return {
        "full": lambda: EVERYTHING,
        "causal": lambda: CAUSAL,
        "window": lambda: Band(-(T // 6), 0),
        "both sides": lambda: Band(-(T // 7), T // 9),
        "documents": lambda: documents(lengths),
        "causal documents": lambda: documents(lengths) & CAUSAL,
        "prefix": lambda: prefix(T // 2, T),
        "ragged": lambda: ragged([T // 2, T], T, T),
        "nothing": lambda: Band(5 * T, None),
    }[name]()


DRAWN = ("bool", "block map", "block map heads")


def blocks_of_five(num_tokens: int, num_ranks: int) -> Placement:
    """A user's layout: blocks of five tokens, assigned to ranks in turn."""
    runs = [range(i, min(i + 5, num_tokens)) for i in range(0, num_tokens, 5)]
    return Placement(num_tokens, tuple(tuple(runs[rank::num_ranks]) for rank in range(num_ranks)))


@dataclass(frozen=True)
class Case:
    """One call of a strategy on `ranks` ranks."""

    ranks: int
    strategy: str = "ring"
    layout: Layout = "zigzag"
    mask: str = "causal"
    T: int = 61
    heads: int = 4
    kv_heads: int = 2
    D: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    sharpness: float = 1.0  # the scale times sqrt(D)
    seed: int = 0
    device: str = "cpu"
    network: str | None = None  # the backend of the case's groups; None means the world's
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self.sharpness * self.D**-0.5

    @property
    def id(self) -> str:
        return "-".join(str(x) for x in (self.ranks, self.strategy, self.layout, self.mask, self.T, self.heads))

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, dout, dlse of the whole sequence."""
        make = torch.Generator().manual_seed(self.T * 31 + self.heads + 10_000 * self.seed)
        shapes = [(self.batch, h, self.T, self.D) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        q, k, v, dout = (torch.randn(shape, generator=make).to(self.dtype) for shape in shapes)
        return q, k, v, dout, torch.randn(shapes[0][:3], generator=make)


@cache
def group_of(num_ranks: int, name: str = "", network: str | None = None) -> dist.ProcessGroup | None:
    """The *last* ranks of the world as a group, so that ranks in the group differ from global ranks."""
    world = dist.get_world_size()
    return new_group(list(range(world - num_ranks, world)), network)


def new_group(ranks: list[int], network: str | None, timeout: float = 20.0) -> dist.ProcessGroup | None:
    if network == nccl_like.NAME:
        nccl_like.register()
    return dist.new_group(ranks, timedelta(seconds=timeout), network)  # type: ignore[no-any-return]


@cache
def mesh_of(num_ranks: int, network: str | None = None) -> DeviceMesh | None:
    """The last ranks as a 2-D mesh, ranks / 2 by 2."""
    world = dist.get_world_size()
    mesh = torch.arange(world - num_ranks, world).view(-1, 2)
    if network is None:
        return DeviceMesh("cpu", mesh)
    groups = [[new_group(ranks, network) for ranks in lines.tolist()] for lines in (mesh.T, mesh)]
    if dist.get_rank() < world - num_ranks:
        return None
    row, column = divmod(dist.get_rank() - world + num_ranks, 2)
    mine = [groups[0][column], groups[1][row]]
    return DeviceMesh.from_group(mine, "cpu", mesh, mesh_dim_names=("across", "ulysses"))


def attention_of(case: Case, **more: Any) -> ContextAttention | None:
    """The case's attention, on its ranks; None on other ranks, which take part in creating the groups, a collective."""
    network = case.network
    group: Any = mesh_of(case.ranks, network) if case.strategy == "hybrid" else group_of(case.ranks, "", network)
    slow = group_of(case.ranks, "slow", network) if case.options.get("two_groups") else None
    if dist.get_rank() < dist.get_world_size() - case.ranks:
        return None
    options = {"timeout": 30.0, **case.options, **more}
    if options.pop("two_groups", False):
        options["slow_group"] = slow
    if "double_ring" in (case.strategy, options.get("across")):
        nodes = case.ranks // (2 if case.strategy == "hybrid" else 1)
        options.setdefault("sizes", (nodes // 2, 2) if nodes % 2 == 0 else (nodes, 1))
    return context_parallel(group, layout=case.layout, strategy=case.strategy, **options)


def run_cases(cases: list[Case]) -> list[Any]:
    """On a rank: for each case this rank's (out, lse, dq, dk, dv) as float64 numpy, or None. Cases that differ only in
    their inputs are calls of one attention."""
    results: list[Any] = []
    made: dict[str, ContextAttention | None] = {}
    for case in cases:
        key = repr((case.ranks, case.strategy, case.layout, case.network, case.options))
        if key not in made:
            made[key] = attention_of(case)
        attend = made[key]
        if attend is None:
            results.append(None)
            continue
        q, k, v, dout, dlse = (attend.shard(x, 2).to(case.device) for x in case.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask = make_mask(case.mask, case.T, case.heads)
        out, lse = attend(q, k, v, mask=mask, scale=case.scale, dropout=case.dropout, seed=7, return_lse=True)
        assert out.dtype == case.dtype
        finite = lse.isfinite()
        torch.autograd.backward([out, lse], [dout, torch.where(finite, dlse, 0.0)])
        results.append([x.detach().double().cpu().numpy() for x in (out, lse, *(leaf.grad for leaf in leaves))])
    return results


def truth(case: Case) -> promise.Answer:
    """The results on one device, in float64."""
    q, k, v, dout, dlse = case.inputs()
    drop = Dropout(case.dropout, torch.tensor([7])) if case.dropout else None
    mask = make_mask(case.mask, case.T, case.heads)
    return promise.solve(
        q, k, v, dout, mask=mask, scale=case.scale, dropout=drop, dlse=dlse, rounded=case.device == "cuda"
    )


def join(case: Case, answers: list[Any]) -> list[Tensor]:
    """The whole tensors of a case, joined from the ranks' results."""
    placement = place(case.layout, case.T, case.ranks)
    if case.strategy == "hybrid":
        placement = deal(place(case.layout, case.T, case.ranks // 2), 2)
        if case.ranks == 2:
            placement = place(case.layout, case.T, 2)
    parts = [answer for answer in answers if answer is not None]
    return [placement.unshard([torch.from_numpy(x) for x in xs], 2) for xs in zip(*parts, strict=True)]


def errors(case: Case, answers: list[Any]) -> list[float]:
    """Relative error of out, lse, dq, dk, dv (lse: absolute); infinite if rows without keys are not reported."""
    found = []
    results = truth(case).results
    for name, mine in zip(RESULTS, join(case, answers), strict=True):
        exact = results[name]
        if name == "lse":
            if not torch.equal(mine.isfinite(), exact.isfinite()):
                return [float("inf")]
            finite = exact.isfinite()
            found.append(float((mine - exact)[finite].abs().max()) if bool(finite.any()) else 0.0)
        else:
            scale = float(exact.norm())
            found.append(float((mine - exact).norm()) / scale if scale else float(mine.norm()))
    return found


def ratios(case: Case, answers: list[Any]) -> dict[str, float]:
    """The error of each result divided by its promised bound."""
    return truth(case).ratios(case.dtype, **dict(zip(RESULTS, join(case, answers), strict=True)))
