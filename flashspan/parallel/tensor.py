"""Tensor parallelism: one layer's weights split over ranks (Megatron-LM's column and row layers, and sequence
parallel).

    up = ColumnParallelLinear(E, F, mesh=mesh["tensor"])       # [B, T, E] -> [B, T, F / ranks]
    down = RowParallelLinear(F, E, mesh=mesh["tensor"])        # [B, T, F / ranks] -> [B, T, E]

or, on a model already built, from outside:

    apply_tensor_parallel(model, mesh["tensor"], {"layers.*.up": "column", "layers.*.down": "row"})

Split weights are DTensors. So `checkpoint` can save whole weights and load them at any degree, and FSDP2 can split them
further. The degree need not divide the sizes of weights: DTensor splits like `torch.chunk`. With `sequence_dim`,
activations between the layers are split along that dimension, whose size the degree must divide. Column layers gather
the slices; row layers and embeddings scatter them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .collectives import collect, copy, is_dtensor
from .placement import (
    enter_parallel,
    first_rank_of,
    leave_parallel,
    local_of,
    shard_parameter,
    share_parameter,
    split_once,
)
from .vocabulary import VocabularyParallelEmbedding

Style = Literal["column", "column-gathered", "column-entered", "row", "vocabulary", "norm", "norm-entering", "whole"]


class ColumnParallelLinear(nn.Module):
    """A linear layer that computes this rank's share of the output features. [..., E] -> [..., F / ranks].

    All ranks start with the first rank's weights. With `gather_output` the result is whole on every rank: [..., F].
    Layers with the same input share its collective if `enter_parallel` is called before them and each has
    `enter=False`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        enter: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.mesh, self.sequence_dim = mesh, sequence_dim
        self.enter, self.gather_output = enter, gather_output
        dense = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight = shard_parameter(dense.weight, mesh, 0)
        self.bias = shard_parameter(dense.bias, mesh, 0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.enter:
            x = enter_parallel(x, self.mesh, sequence_dim=self.sequence_dim)
        bias = None if self.bias is None else local_of(self.bias)
        y = F.linear(x, local_of(self.weight), bias)
        return collect(y, -1, self.out_features, self.mesh.get_group()) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, ranks={self.mesh.size()}"


class RowParallelLinear(nn.Module):
    """A linear layer of this rank's share of the input features. [..., F / ranks] -> [..., E], the sum over ranks.

    All ranks start with the first rank's weights; the bias is whole on every rank and added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.mesh, self.sequence_dim = mesh, sequence_dim
        dense = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight = shard_parameter(dense.weight, mesh, 1)
        self.bias = share_parameter(dense.bias, mesh) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = leave_parallel(F.linear(x, local_of(self.weight)), self.mesh, sequence_dim=self.sequence_dim)
        if self.bias is None:
            return y
        # A rank with a part of the sequence computes a part of the bias's gradient; `copy` sums the parts.
        bias = local_of(self.bias)
        return y + (bias if self.sequence_dim is None else copy(bias, self.mesh.get_group()))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, ranks={self.mesh.size()}"


def apply_replicated(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence_dim: int | None = None,
    enter: bool = False,
    shared: dict[Tensor, nn.Parameter] | None = None,
) -> None:
    """Replicate a module's own parameters (of a norm, for example) from the first rank, in place. A collective.

    With `sequence_dim` the module runs on slices of the sequence, and its gradients are summed over ranks. With `enter`
    its output is passed to `enter_parallel`, for column layers with `enter=False`. Names do not change; the module's
    class is replaced by a subclass whose forward uses plain tensors. Calls with the same `shared` dictionary keep tied
    parameters tied.
    """
    if any(is_dtensor(p) for p in module._parameters.values()):
        raise ValueError(f"this {type(module).__name__} is already parallel: name it in the plan once")
    base: Any = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        local = {name: local_of(p) for name, p in self._parameters.items() if p is not None}
        if sequence_dim is not None:
            local = {name: copy(p, mesh.get_group()) for name, p in local.items()}
        self.__dict__.update(local)  # attributes take precedence over the parameters of the same names
        try:
            out = base.forward(self, *args, **kwargs)
        finally:
            for name in local:
                del self.__dict__[name]
        return enter_parallel(out, mesh, sequence_dim=sequence_dim) if enter else out

    shared = {} if shared is None else shared
    for name, param in list(module._parameters.items()):
        if param is not None:
            module._parameters[name] = split_once(param, mesh, None, shared)
    module.__class__ = type(f"Replicated{base.__name__}", (base,), {"forward": forward})


def apply_tensor_parallel(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style], *, sequence_dim: int | None = None
) -> None:
    """Replace submodules, in place, by parallel ones: `{"layers.*.attention.output": "row", ...}`. A collective.

    `column` and `row` split an nn.Linear, `column-gathered` also gathers its result, `vocabulary` splits an
    nn.Embedding, and `norm` is for modules that run on slices of the sequence if there is a `sequence_dim`. If one norm
    is the input of several column layers, `norm-entering` and `column-entered`, always used together, need one
    collective in place of one per layer. `whole` is for modules that compute the same on every rank, which is also the
    default; with a `sequence_dim` every module with parameters must be named. `*` in names matches any text. Tied
    weights stay tied. All weights become DTensors with the first rank's values.
    """
    shared: dict[Tensor, nn.Parameter] = {}
    replaced: dict[nn.Module, nn.Module] = {}
    taken: dict[str, str] = {}
    for pattern, style in plan.items():
        every = [name for name, _ in module.named_modules(remove_duplicate=False) if name]  # "" is the module itself
        names = [name for name in every if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"the plan names {pattern!r}, which no submodule matches: see module.named_modules()")
        for name in names:
            if name in taken:
                raise ValueError(f"the plan names {name!r} twice, by {taken[name]!r} and by {pattern!r}: keep one")
            taken[name] = pattern
            old = module.get_submodule(name)
            if old not in replaced:
                replaced[old] = _parallel_form(old, name, style, mesh, sequence_dim, shared)
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, replaced[old])
    rest = {
        name: part
        for name, part in module.named_modules()
        if any(p is not None and not is_dtensor(p) for p in part._parameters.values())
    }
    if sequence_dim is not None and rest:
        raise ValueError(
            f"with a sequence_dim the plan must name every module with parameters: {', '.join(rest)} are missing; use "
            "the style 'norm' for modules on slices of the sequence, and 'whole' for modules on all of it"
        )
    for part in rest.values():
        apply_replicated(part, mesh, shared=shared)
    for buffer in module.buffers():
        buffer.copy_(first_rank_of(buffer, mesh))


def _parallel_form(
    old: nn.Module,
    name: str,
    style: Style,
    mesh: DeviceMesh,
    sequence_dim: int | None,
    shared: dict[Tensor, nn.Parameter],
) -> nn.Module:
    """The parallel form of a submodule: the submodule itself, changed in place, or a split layer with its weights."""
    if style in ("norm", "norm-entering", "whole"):
        dim = None if style == "whole" else sequence_dim
        apply_replicated(old, mesh, sequence_dim=dim, enter=style == "norm-entering", shared=shared)
        return old
    split: dict[str, Any] = {"mesh": mesh, "sequence_dim": sequence_dim, "device": "meta"}
    new: VocabularyParallelEmbedding | RowParallelLinear | ColumnParallelLinear
    if style == "vocabulary" and type(old) is nn.Embedding:
        if old.padding_idx is not None or old.max_norm is not None or old.sparse or old.scale_grad_by_freq:
            raise ValueError(
                f"{name!r} has padding_idx, max_norm, sparse or scale_grad_by_freq: the style 'vocabulary' supports "
                "none of them"
            )
        new = VocabularyParallelEmbedding(old.num_embeddings, old.embedding_dim, **split)
        new.weight = split_once(old.weight, mesh, 0, shared)
    elif style == "row" and type(old) is nn.Linear:
        new = RowParallelLinear(old.in_features, old.out_features, old.bias is not None, **split)
        new.weight = split_once(old.weight, mesh, 1, shared)
        new.bias = None if old.bias is None else split_once(old.bias, mesh, None, shared)
    elif style in ("column", "column-gathered", "column-entered") and type(old) is nn.Linear:
        split |= {"enter": style != "column-entered", "gather_output": style == "column-gathered"}
        new = ColumnParallelLinear(old.in_features, old.out_features, old.bias is not None, **split)
        new.weight = split_once(old.weight, mesh, 0, shared)
        new.bias = None if old.bias is None else split_once(old.bias, mesh, 0, shared)
    else:
        raise ValueError(
            f"{style!r} does not apply to {name!r}, a {type(old).__name__}: column and row split an nn.Linear, "
            "vocabulary an nn.Embedding; norm, norm-entering and whole take anything"
        )
    return new.train(old.training)
