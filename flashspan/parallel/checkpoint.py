"""Whole tensors from parts and back: a checkpoint that is the same file at any degree of parallelism.

    state = full_state_dict(model)             # plain tensors, as the unsplit model would give
    load_full_state_dict(model, state)         # each rank takes its part

Both accept any mixture of plain parameters, tensor-parallel layers and FSDP2, whose parameters are all DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .agree import raise_together


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; a plain tensor is whole already. A collective on the DTensor's mesh."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def shard_like(reference: Tensor, whole: Tensor) -> Tensor:
    """`whole`, split as `reference` is. Every rank has the whole already, so nothing is sent."""
    if not isinstance(reference, DTensor):
        return whole
    mesh = reference.device_mesh
    return distribute_tensor(whole.to(reference.device), mesh, reference.placements, src_data_rank=None)


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state of the unsplit module, plain tensors on the CPU of every rank. A collective."""
    return {
        name: full_tensor(value).cpu().clone() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> None:
    """Load the state of the unsplit module. Missing, extra or misshapen entries on any rank: a ValueError on all."""
    targets = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    raise_together(_misfit(targets, state), group)
    for name, target in targets.items():
        target.copy_(shard_like(target, state[name].to(dtype=target.dtype, device=target.device)))


def _misfit(targets: dict[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    complaints = []
    if missing := [name for name in targets if name not in state]:
        complaints.append(f"missing {', '.join(missing)}")
    if extra := [name for name in state if name not in targets]:
        complaints.append(f"unexpected {', '.join(extra)}")
    complaints += [
        f"{name} is {tuple(state[name].shape)}, not {tuple(target.shape)}"
        for name, target in targets.items()
        if name in state and state[name].shape != target.shape
    ]
    return f"the state does not fit the module: {'; '.join(complaints)}" if complaints else None
