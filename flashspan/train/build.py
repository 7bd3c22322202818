"""A model on a mesh: the one place that knows both a LLaMA's weights and a process group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashspan.attention import attention
from flashspan.context import ContextAttention, context_parallel, keep_attention
from flashspan.model import IGNORE, Llama, LlamaConfig, initial_weight, read_weights
from flashspan.parallel import (
    DataParallel,
    ShardedOptimizer,
    apply_fully_sharded,
    apply_tensor_parallel,
    submesh,
    vocabulary_parallel_cross_entropy,
)
from flashspan.parallel.checkpoint import full_tensor, shard_like
from flashspan.parallel.collectives import chunk_range

from .config import OptimizerSection, TrainConfig

# One exchange before the three projections of attention and one before the two of the feed-forward.
TENSOR_PLAN: dict[str, Any] = {
    "embed": "vocabulary",
    "layers.*.attention_norm": "norm-entering",
    "layers.*.attention.query": "column-entered",
    "layers.*.attention.key": "column-entered",
    "layers.*.attention.value": "column-entered",
    "layers.*.attention.output": "row",
    "layers.*.ffn_norm": "norm-entering",
    "layers.*.ffn.gate": "column-entered",
    "layers.*.ffn.up": "column-entered",
    "layers.*.ffn.down": "row",
    "norm": "norm-entering",
    "head": "column-entered",
}
LOSS_CHUNK = 2048


class Objective(nn.Module):
    """The model and its loss in one forward, which is what data parallelism wraps: its parameters are whole inside."""

    def __init__(self, model: Llama, tensor: DeviceMesh | None) -> None:
        super().__init__()
        self.model, self.tensor = model, tensor

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """The sum of the losses of this rank's tokens [B, T], float32."""
        hidden = self.model(tokens, positions, mask)
        if self.tensor is None:
            return self.model.loss(hidden, targets)
        total = torch.zeros((), device=hidden.device)
        rows, goals = hidden.flatten(0, 1), targets.flatten()
        for begin in range(0, len(goals), LOSS_CHUNK):  # each chunk's logits are made again in backward, not kept
            part = slice(begin, begin + LOSS_CHUNK)
            total = total + checkpoint(self._chunk, rows[part], goals[part], use_reentrant=False)
        return total

    def _chunk(self, rows: Tensor, goals: Tensor) -> Tensor:
        assert self.tensor is not None
        losses = vocabulary_parallel_cross_entropy(
            self.model.head(rows),
            goals,
            vocab_size=self.model.config.vocab_size,
            mesh=self.tensor,
            ignore_index=IGNORE,
        )
        return losses.sum()


@dataclass
class Parts:
    """What `build` makes: call `runner`, step `optimizer`; `model` is where the weights are."""

    model: Llama
    runner: nn.Module
    optimizer: torch.optim.Optimizer
    attend: ContextAttention | None
    names: dict[nn.Parameter, str]

    @contextlib.contextmanager
    def without_sync(self, quiet: bool) -> Iterator[None]:
        """Backward passes inside keep their gradients to this rank, if `quiet`."""
        if isinstance(self.runner, DataParallel):
            with self.runner.no_sync() if quiet else contextlib.nullcontext():
                yield
        else:
            assert isinstance(self.runner, FSDPModule)
            self.runner.set_requires_gradient_sync(not quiet)
            yield


def build(config: TrainConfig, shape: LlamaConfig, mesh: DeviceMesh, device: torch.device) -> Parts:
    """The model, split and wrapped as the mesh says, with its first weights. A collective."""
    degree = {axis: mesh[axis].size() for axis in ("data", "shard", "context", "tensor")}
    attend = None
    if degree["context"] > 1:
        attend = context_parallel(
            mesh["context"],
            layout=config.parallel.layout,
            strategy=config.parallel.strategy,
            num_tokens=config.data.sequence,
            timeout=config.parallel.timeout,
        )
    with torch.device("meta"):
        model = Llama(shape, attention=attend or attention)
    if degree["tensor"] > 1:
        apply_tensor_parallel(model, mesh["tensor"], TENSOR_PLAN)
    fill(model, config, device)
    apply_recompute(model, config.train.recompute, split=attend is not None)
    if config.train.compile:
        for layer in model.layers:
            layer.compile()
    objective = Objective(model, mesh["tensor"] if degree["tensor"] > 1 else None)
    group = submesh(mesh, "gradient").get_group()
    runner: nn.Module = objective
    if degree["shard"] > 1:
        apply_fully_sharded(objective, mesh, model.layers, op="sum")
    else:
        runner = DataParallel(objective, group=group, op="sum")
    names = {param: name for name, param in model.named_parameters()}
    sharded = config.optimizer.sharded and degree["shard"] == 1
    optimizer = make_optimizer(names, config.optimizer, device, ShardedOptimizer if sharded else None, group)
    return Parts(model, runner, optimizer, attend, names)


def fill(model: Llama, config: TrainConfig, device: torch.device) -> None:
    """Give a model on the meta device its first weights, each rank its part: a checkpoint's, or random by name."""
    places = {name: (module, key) for module, name, key in _slots(model)}
    owners: dict[Tensor, nn.Parameter] = {}
    wanted = {name: module._parameters[key] for name, (module, key) in places.items()}

    def part(name: str, shape: torch.Size) -> tuple[slice, ...] | None:
        return _local_slices(wanted[name])

    def weights() -> Iterator[tuple[str, Tensor]]:
        if config.model.load:
            yield from read_weights(config.model.load, model.config, part=part)
            return
        for name, param in model.named_parameters():
            assert param is not None
            yield name, initial_weight(name, param.shape, model.config, config.train.seed)[_local_slices(param) or ...]

    for name, value in weights():
        old = wanted[name]
        assert old is not None
        local = value.to(device, torch.float32).contiguous()
        made: Tensor = local
        if isinstance(old, DTensor):
            made = DTensor.from_local(
                local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
        owners[old] = nn.Parameter(made)
    for module, key in places.values():  # tied weights have two places and one owner
        old = module._parameters[key]
        assert old is not None
        module._parameters[key] = owners[old]


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield module, f"{prefix}.{key}" if prefix else key, key


def _local_slices(param: Tensor | None) -> tuple[slice, ...] | None:
    """This rank's part of a tensor-parallel parameter; None for all of it."""
    if not isinstance(param, DTensor) or not isinstance(param.placements[0], Shard):
        return None
    dim, mesh = param.placements[0].dim, param.device_mesh
    begin, end = chunk_range(param.shape[dim], mesh.size(), mesh.get_local_rank())
    return (*[slice(None)] * dim, slice(begin, end))


def apply_recompute(model: Llama, mode: str, *, split: bool) -> None:
    """Recompute each layer's activations in backward: all, or all but the attention's output. In place."""
    if mode == "none":
        return
    contexts: dict[str, Any] = {}
    if mode == "attention":
        contexts["context_fn"] = keep_attention if split else _keep_local_attention
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **contexts)


def _keep_local_attention() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.flashspan.attend.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def make_optimizer(
    names: Mapping[nn.Parameter, str],
    options: OptimizerSection,
    device: torch.device,
    sharded: type[ShardedOptimizer] | None,
    group: Any,
) -> torch.optim.Optimizer:
    """AdamW, whose weight decay is for matrices."""
    groups = [
        {"params": [p for p in names if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in names if p.dim() < 2], "weight_decay": 0.0},
    ]
    kwargs: dict[str, Any] = {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}
    if device.type == "cuda":
        kwargs["fused"] = True
    if sharded is not None:
        return sharded(groups, torch.optim.AdamW, group=group, **kwargs)
    return torch.optim.AdamW(groups, **kwargs)


def model_state(parts: Parts, *, keep: bool) -> dict[str, Tensor]:
    """The whole weights on the CPU of the ranks that `keep` them, nothing on the others. A collective."""
    return _gather(parts.model.state_dict(), keep)


def optimizer_state(parts: Parts, *, keep: bool) -> dict[str, Tensor]:
    """The whole state of the optimizer, `<what>/<parameter>` -> tensor, as `model_state`. A collective."""
    order = _in_order(parts)
    if isinstance(parts.optimizer, ShardedOptimizer):
        entries = parts.optimizer.state_dict()["state"]
    else:
        entries = {i: parts.optimizer.state.get(p, {}) for i, p in enumerate(order)}
    flat = {f"{key}/{parts.names[p]}": v for i, p in enumerate(order) for key, v in entries[i].items()}
    return _gather(flat, keep)


def _gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    whole = {}
    for name, value in tensors.items():
        gathered = full_tensor(value)
        if keep:
            whole[name] = gathered.cpu().clone()
    return whole


def load_optimizer_state(parts: Parts, state: Mapping[str, Tensor]) -> None:
    """Take this rank's share of a whole state."""
    order = _in_order(parts)
    numbers = {parts.names[param]: i for i, param in enumerate(order)}
    entries: dict[int, dict[str, Any]] = {i: {} for i in range(len(order))}
    for name, value in state.items():
        key, _, owner = name.partition("/")
        if owner not in numbers:
            raise ValueError(f"the checkpoint's optimizer knows {owner!r}, the model does not: is it of another model?")
        entries[numbers[owner]][key] = value
    groups = parts.optimizer.param_groups
    counts = [len(group["params"]) for group in groups]
    described = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": list(range(sum(counts[:i]), sum(counts[: i + 1]))),
        }
        for i, group in enumerate(groups)
    ]
    if not isinstance(parts.optimizer, ShardedOptimizer):
        entries = {
            i: {k: shard_like(order[i], v) if v.shape == order[i].shape else v for k, v in entry.items()}
            for i, entry in entries.items()
            if entry
        }
    parts.optimizer.load_state_dict({"state": entries, "param_groups": described})


def _in_order(parts: Parts) -> list[nn.Parameter]:
    return [param for group in parts.optimizer.param_groups for param in group["params"]]
