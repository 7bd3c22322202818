"""The functions that the tests of Stanford's CS336 assignment 2 (systems) call, implemented with flashspan.

With flashspan installed, copy this one file over the course's `tests/adapters.py` and run its tests. The names of 2025
(`get_ddp_individual_parameters`, `get_ddp_bucketed`) and of 2026 (`get_ddp`, `get_fsdp`) are both here.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashspan.checkpoint.sharded import full_state_dict
from flashspan.kernels.contract import LocalAttention, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import CAUSAL, EVERYTHING
from flashspan.parallel import DataParallel, ShardedOptimizer, apply_fully_sharded, build_mesh


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in plain PyTorch, its backward compiled: apply(q, k, v, is_causal=False) on [B, N, D]."""
    return _flash_attention("tiled", compiled=True)


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton, forward and backward: apply(q, k, v, is_causal=False) on [B, N, D]."""
    return _flash_attention("portable")


get_flash_autograd_function_triton = get_flashattention_autograd_function_triton  # as the handout also calls it


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by the handout's equations 13 to 19, with recomputed scores. It is written for torch.compile."""
    q, k, v, dout = (x.to(lse.dtype) for x in (q, k, v, dout))  # float32 at least
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    if is_causal:
        p = p.tril()
    ds = p * (dout @ v.mT - delta[..., None]) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


@functools.cache
def _compiled(device_type: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The function `gradients`, compiled on a GPU. On a CPU, compilation would take longer than the course's tests."""
    return torch.compile(gradients) if device_type == "cuda" else gradients


@functools.cache
def _flash_attention(name: str, *, compiled: bool = False) -> type[torch.autograd.Function]:
    """An autograd.Function with one implementation of flashspan.kernels, or with its forward and a compiled backward.
    The course's tensors [B, N, D] have one head."""
    kernels: LocalAttention = importlib.import_module(f"flashspan.kernels.{name}")
    # torch.compile may compile the code around the kernels, but must not trace into them.
    attend, pull = torch.compiler.disable(kernels.forward), torch.compiler.disable(kernels.backward)

    class FlashAttention2(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
            ctx.problem = Problem(CAUSAL if is_causal else EVERYTHING, 1.0 / math.sqrt(q.shape[-1]))
            heads = (x.unsqueeze(1) for x in (q, k, v))
            out, lse = attend(*heads, ctx.problem, out_dtype=q.dtype)
            out, lse = out.squeeze(1), lse.squeeze(1)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dout = douts[0].contiguous()  # the gradient of a plain sum() has stride 0
            delta = row_delta(dout.unsqueeze(1), out.unsqueeze(1)).squeeze(1)
            if compiled:
                problem = ctx.problem
                found = _compiled(q.device.type)(dout, q, k, v, lse, delta, problem.mask is CAUSAL, problem.scale)
                return (*(grad.to(q.dtype) for grad in found), None)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            dq, dk, dv = (x.unsqueeze(1) for x in grads)
            q, k, v, dout, lse, delta = (x.unsqueeze(1) for x in (q, k, v, dout, lse, delta))
            pull(dout, q, k, v, lse, delta, ctx.problem, dq=dq, dk=dk, dv=dv, accumulate=False)
            return (*grads, None)

    return FlashAttention2


def get_ddp(module: nn.Module) -> nn.Module:
    """The module, with gradients averaged over ranks during backward."""
    return DataParallel(module)


def ddp_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to do: gradients are averaged when backward returns."""


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    """The module, with each parameter's gradient sent as soon as it is computed."""
    return DataParallel(module, mode="overlapped")


def ddp_individual_parameters_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to do: gradients are averaged when backward returns."""


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """The module, with gradients sent in buckets of at most this size; None means one bucket for all."""
    return DataParallel(module, mode="bucketed", bucket_mb=float("inf") if bucket_size_mb is None else bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to do: gradients are averaged when backward returns."""


def ddp_bucketed_on_train_batch_start(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing to prepare."""


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """The module with its linear layers and embeddings sharded over all ranks; norms are replicated."""
    return FullySharded(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: FullySharded, optimizer: torch.optim.Optimizer) -> None:
    """Average the gradients of replicated parameters; those of sharded ones are averaged during backward."""
    fsdp_model.average_replicated()


def fsdp_gather_full_params(fsdp_model: FullySharded) -> dict[str, Tensor]:
    """The whole parameters by name, on every rank."""
    whole = full_state_dict(fsdp_model.module)
    return {name: whole[name] for name, _ in fsdp_model.module.named_parameters(remove_duplicate=False)}


class FullySharded(nn.Module):
    """A module under PyTorch's FSDP2, with the interface that the course tests: the optimizer updates the parameters
    of `.module`, and every gradient has the shape and dtype of its parameter.

    A layer with a matrix is sharded, gathered in `compute_dtype` and stored in its own dtype; its gradient is reduced
    in float32. The parameters of other layers (norms) are plain tensors, the same on every rank. Each child module, and
    each item of a ModuleList, is gathered alone.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        replicated: set[nn.Parameter] = set()
        for layer in module.modules():
            own = list(layer.parameters(recurse=False))
            if all(param.dim() < 2 for param in own):
                replicated.update(own)
        self._replicated = [param for param in module.parameters() if param in replicated and param.requires_grad]
        mesh = build_mesh(shard=dist.get_world_size())
        blocks = _sharded_blocks(module, replicated)
        apply_fully_sharded(module, mesh, blocks, param_dtype=compute_dtype, replicated=replicated)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def average_replicated(self) -> None:
        """Average the gradients of replicated parameters over ranks, in one message. A collective.

        If only some ranks have a gradient, it counts as 0 on the others; if no rank has it, it stays None.
        """
        if not self._replicated:
            return
        present = torch.tensor([param.grad is not None for param in self._replicated], dtype=torch.float32)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._replicated]
        flat = torch.cat([present.to(grads[0].device), *(grad.flatten().float() for grad in grads)])
        dist.all_reduce(flat)
        present, *sums = flat.split([len(present), *(grad.numel() for grad in grads)])
        for param, used, total in zip(self._replicated, present.tolist(), sums, strict=True):
            if used:
                param.grad = (total / dist.get_world_size()).view_as(param).to(param.dtype)


def _sharded_blocks(module: nn.Module, replicated: set[nn.Parameter]) -> list[nn.Module]:
    """The children to gather one at a time. A parameter that two of them share is gathered with the whole model."""
    blocks = list(_callable_children(module))
    sharded = [set(block.parameters()) - replicated for block in blocks]
    shared = {param for i, mine in enumerate(sharded) for other in sharded[:i] for param in mine & other}
    return [block for block, mine in zip(blocks, sharded, strict=True) if mine and not mine & shared]


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module. A container, which has no forward, is replaced by its items."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child)
        else:
            yield child


def get_sharded_optimizer(
    params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """An `optimizer_cls` whose state is sharded over all ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
