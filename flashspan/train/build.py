"""Build the model on a mesh: the only file that uses both a LLaMA's weights and process groups."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flashspan.agreement import from_each, from_first
from flashspan.attention import attention
from flashspan.checkpoint.format import refuse_damaged
from flashspan.context import ContextAttention, balanced, context_parallel, keep_attention
from flashspan.context.layout import Layout
from flashspan.kernels.masks import Blocks, Mask
from flashspan.model import IGNORE, Llama, LlamaConfig, initial_weight, read_weights
from flashspan.model.huggingface import check_config
from flashspan.model.loss import losses_and_gradients_at_once
from flashspan.ops import cross_entropy
from flashspan.ops.adamw import adamw_for
from flashspan.parallel import (
    DataParallel,
    ShardedOptimizer,
    apply_fully_sharded,
    apply_tensor_parallel,
    submesh,
    vocabulary_parallel_cross_entropy,
)
from flashspan.parallel.collectives import local_part, local_slices, part_like
from flashspan.parallel.mesh import set_timeout_of_world
from flashspan.parallel.sharded import is_fully_sharded

from . import products
from .config import OptimizerSection, TrainConfig
from .offload import on_host

# One collective before the three projections of attention, and one before the two of the feed-forward.
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
    """The model and its loss in one forward, so that data parallelism can wrap both."""

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
        # Each chunk's logits are recomputed in backward. A rank without tokens runs an empty chunk: its zero loss must
        # depend on the parameters, because backward has collectives with the other ranks.
        for begin in range(0, max(1, len(goals)), LOSS_CHUNK):
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
    """The result of `build`: `runner` is called, `optimizer` is stepped, and `model` has the weights."""

    model: Llama
    runner: nn.Module
    optimizer: torch.optim.Optimizer
    attend: ContextAttention | None
    names: dict[nn.Parameter, str]

    @contextlib.contextmanager
    def without_sync(self, quiet: bool) -> Iterator[None]:
        """If `quiet`, backward passes in this context do not reduce gradients over ranks."""
        if is_fully_sharded(self.runner):
            self.runner.set_requires_gradient_sync(not quiet)
        with self.runner.no_sync() if quiet and isinstance(self.runner, DataParallel) else contextlib.nullcontext():
            yield


def build(config: TrainConfig, shape: LlamaConfig, mesh: DeviceMesh, device: torch.device, pattern: Mask) -> Parts:
    """The model, split and wrapped according to the mesh, with its initial weights. A collective.

    `pattern` is the mask from which a balanced layout is made. All ranks refuse a checkpoint of another model.
    """
    if config.model.load:  # checked before anything is built: the weights must match config.json
        from_first(lambda: refuse_damaged(config.model.load))  # hashing reads the whole file: only on one rank
        check_config(config.model.load, shape)
    degree = {axis: mesh[axis].size() for axis in ("data", "shard", "context", "tensor")}
    attend = None
    if degree["context"] > 1:
        attend = split_attention(config, mesh["context"], pattern)
    with torch.device("meta"):
        model = Llama(shape, attention=attend or attention)
    if degree["tensor"] > 1:
        apply_tensor_parallel(model, mesh["tensor"], TENSOR_PLAN)
    group = submesh(mesh, "gradient").get_group()
    if degree["shard"] > 1:
        model.to(getattr(torch, config.train.weights))  # filled after it is sharded: see below
    else:
        reads = dist.get_rank(group) == 0
        # The other ranks wait for those that read, if necessary longer than the timeout of a collective.
        from_each(lambda: fill(model, config, device, reads=reads))
    if degree["tensor"] == 1:
        served = products.serves(shape, device, config.train.precision)
        if all(from_each(lambda: served)):  # on all ranks or none: the kernels scale queries differently
            model.use(products.PRODUCTS)
    options = config.train
    # A layer is compiled in one piece if it has no collectives, no copies to the host, and no documents, whose mask
    # changes in each step.
    whole = options.compile and degree["tensor"] == 1 and attend is None
    whole = whole and not (options.offload or config.data.documents)
    apply_recompute(model, options.recompute, split=attend is not None, offload=options.offload, whole=whole)
    if config.train.compile:
        # With tensor parallelism, collectives break the graph inside the compiled functions.
        apply_compile(model, whole=whole, unbroken=degree["tensor"] == 1)
    if cross_entropy.has_kernel(device):
        model.losses_and_gradients = partial(cross_entropy.losses_and_gradients, ignored=IGNORE)
    elif config.train.compile:
        model.losses_and_gradients = torch.compile(losses_and_gradients_at_once, fullgraph=True, dynamic=False)
    objective = Objective(model, mesh["tensor"] if degree["tensor"] > 1 else None)
    runner: nn.Module = objective
    if degree["shard"] > 1:
        apply_fully_sharded(objective, mesh, model.layers, op="sum")
        fill_shards(objective, config, device)
    elif dist.get_world_size(group) > 1:  # with one rank there is nothing to reduce
        runner = DataParallel(objective, group=group, op="sum")
    names = {param: name for name, param in model.named_parameters()}
    sharded = config.optimizer.sharded and degree["shard"] == 1
    optimizer = make_optimizer(names, config.optimizer, device, ShardedOptimizer if sharded else None, group)
    return Parts(model, runner, optimizer, attend, names)


def split_attention(config: TrainConfig, mesh: DeviceMesh, pattern: Mask) -> ContextAttention:
    """Attention over the context ranks, with the strategy and layout of the config."""
    parallel, group, num_tokens = config.parallel, mesh, config.data.sequence
    layout: Layout = parallel.layout
    if layout == "balanced":
        layout = balanced(Blocks.of(pattern, num_tokens, num_tokens))
    options: dict[str, Any] = {}
    if parallel.inner:
        sizes = (mesh.size() // parallel.inner, parallel.inner)
        if parallel.strategy == "hybrid":
            group = mesh._unflatten(0, sizes, ("across", "heads"))
            set_timeout_of_world(group)
        else:
            options["sizes"] = sizes
    return context_parallel(
        group,
        layout=layout,
        strategy=parallel.strategy,
        num_tokens=num_tokens,
        transport=parallel.transport,
        timeout=parallel.timeout,
        **options,
    )


def fill(model: Llama, config: TrainConfig, device: torch.device, *, reads: bool) -> None:
    """Give a model on the meta device its initial weights: from a checkpoint, or random ones that depend on the name.

    A tensor-parallel rank reads only its slices. Among ranks with the same weights, the first reads them (`reads`). The
    others only allocate memory: the wrapper of the model broadcasts the weights later.
    """
    places = {name: (module, key) for module, name, key in _slots(model)}
    owners: dict[Tensor, nn.Parameter] = {}
    wanted = {name: module._parameters[key] for name, (module, key) in places.items()}
    dtype = getattr(torch, config.train.weights)

    def part(name: str, shape: torch.Size) -> tuple[slice, ...] | None:
        value = wanted[name]
        assert value is not None
        return local_slices(value)

    def weights() -> Iterator[tuple[str, Tensor]]:
        if not reads:
            for name, param in model.named_parameters():
                yield name, torch.empty(local_part(param).shape, dtype=dtype, device=device)
            return
        if config.model.load:
            yield from read_weights(config.model.load, model.config, part=part)
            return
        for name, param in model.named_parameters():
            yield name, initial_weight(name, param.shape, model.config, config.train.seed)[local_slices(param) or ...]

    for name, value in weights():
        old = wanted[name]
        assert old is not None
        local = value.to(device, dtype).contiguous()
        owners[old] = nn.Parameter(part_like(old, local))
    for module, key in places.values():  # tied weights: two names, one parameter
        old = module._parameters[key]
        assert old is not None
        module._parameters[key] = owners[old]


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield module, f"{prefix}.{key}" if prefix else key, key


def fill_shards(objective: Objective, config: TrainConfig, device: torch.device) -> None:
    """Give a fully sharded model on the meta device its initial weights: each rank reads or generates its shards."""
    model = objective.model
    objective.to_empty(device=device)
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight  # to_empty has untied them
    if config.model.load:
        load_into(model, config.model.load)
        return
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = initial_weight(name, param.shape, model.config, config.train.seed)
            local_part(param).copy_(whole[local_slices(param) or ...])


def load_into(model: Llama, folder: str | Path) -> None:
    """Load a checkpoint's weights into a model on its device: whole, tensor parallel, fully sharded, or both.

    Each rank reads only its slices of each tensor, without communication. A checkpoint of another model is refused
    before anything is overwritten.
    """
    check_config(folder, model.config)
    held = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in read_weights(folder, model.config, part=lambda name, _: local_slices(held[name])):
            local_part(held[name]).copy_(value)


def apply_recompute(model: Llama, mode: str, *, split: bool, offload: bool = False, whole: bool = False) -> None:
    """Recompute activations in backward, in place. The mode is `full` (everything in a layer), `attention` (everything
    except attention's output) or `elementwise` (norms, RoPE and SwiGLU, which cost almost nothing).

    With `offload`, layer inputs are kept in host memory until backward.
    """
    layer: Any
    for layer in model.layers:
        if mode == "elementwise" and whole:
            layer.forward = _recomputed(layer.forward, _keep_matmuls)
        elif mode == "elementwise":
            layer.before, layer.after = (_recomputed(run, _keep_matmuls) for run in (layer.before, layer.after))
        elif mode == "attention":
            layer.forward = _recomputed(layer.forward, keep_attention if split else _keep_local_attention)
        elif mode == "full":
            layer.forward = _recomputed(layer.forward, None)
        if offload:
            layer.forward = on_host(layer.forward)


def apply_compile(model: Llama, *, whole: bool, unbroken: bool) -> None:
    """Compile each layer in place: with `whole` in one piece, otherwise its parts before and after attention. All
    layers share the graphs. With `unbroken`, and always with `whole`, a graph break is an error."""
    # `apply_recompute` has decided what is saved: hide the compiler's warnings about it.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    layer: Any
    for layer in model.layers:
        if whole:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
        else:
            layer.before, layer.after = (
                torch.compile(run, fullgraph=unbroken, dynamic=False) for run in (layer.before, layer.after)
            )


def _recomputed(run: Callable[..., Any], contexts: Callable[[], Any] | None) -> Callable[..., Any]:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def checkpointed(*args: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, **options)

    return checkpointed


def _keep_local_attention() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.flashspan.attend.default])


def _keep_matmuls() -> Any:
    aten, ours = torch.ops.aten, torch.ops.flashspan
    # Also the rsqrt of compiled norms, one number per row: recomputation then need not reduce each row again.
    return create_selective_checkpoint_contexts(
        [
            *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.rsqrt.default),
            *(ours.project.default, ours.add_product.default, ours.feed_forward.default, ours.attend.default),
        ]
    )


def make_optimizer(
    names: Mapping[nn.Parameter, str],
    options: OptimizerSection,
    device: torch.device,
    sharded: type[ShardedOptimizer] | None,
    group: Any,
) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices only."""
    groups = [
        {"params": [p for p in names if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in names if p.dim() < 2], "weight_decay": 0.0},
    ]
    kwargs: dict[str, Any] = {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}
    adamw = adamw_for(device)
    if device.type == "cuda":
        kwargs["fused"] = True
    if sharded is not None:
        return sharded(groups, adamw, group=group, **kwargs)
    return adamw(groups, **kwargs)
