"""The course's hooks for distributed training (assignment 2), answered by flashspan.parallel.

Both the 2025 names (`get_ddp_individual_parameters`, `get_ddp_bucketed`) and the later ones (`get_ddp`, `get_fsdp`) are
here. Gradients are ready when backward returns, so the `on_after_backward` hooks have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flashspan.parallel import DataParallel, ShardedOptimizer, apply_fully_sharded, build_mesh, full_state_dict


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """The module, with gradients averaged over ranks while backward runs."""
    return DataParallel(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is left to do."""


def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """The module, with each parameter's gradient sent as soon as it is there."""
    return DataParallel(module, mode="overlapped")


def ddp_individual_parameters_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is left to do."""


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float) -> torch.nn.Module:
    """The module, with gradients sent in buckets of at most this size; None means one bucket for all."""
    return DataParallel(module, mode="bucketed", bucket_mb=float("inf") if bucket_size_mb is None else bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is left to do."""


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is to be prepared."""


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The module, in place, with every parameter split over all ranks and computing in `compute_dtype`.

    Each direct child that has parameters of its own or below is gathered by itself, and each item of a ModuleList.
    """
    blocks: list[torch.nn.Module] = []
    for child in module.children():
        members = child if isinstance(child, torch.nn.ModuleList) else [child]
        blocks.extend(member for member in members if any(True for _ in member.parameters()))
    world = torch.distributed.get_world_size()
    apply_fully_sharded(module, build_mesh(shard=world), _untied(blocks), param_dtype=compute_dtype)
    return module


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing is left to do."""


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters, by name, on every rank."""
    whole = full_state_dict(fsdp_model)
    return {name: whole[name] for name, _ in fsdp_model.named_parameters(remove_duplicate=False)}


def get_sharded_optimizer(
    params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """An `optimizer_cls` whose state is split over all ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def _untied(blocks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that share no parameter with another: what is shared belongs to the whole model."""
    owners: dict[torch.nn.Parameter, int] = {}
    for block in blocks:
        for param in block.parameters():
            owners[param] = owners.get(param, 0) + 1
    return [block for block in blocks if all(owners[param] == 1 for param in block.parameters())]
