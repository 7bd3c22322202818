"""Gradient clipping by global norm, for whole and for sharded gradients.

A plain gradient is whole on every rank (it has been reduced over data and context) and counts once. The norm of a
DTensor gradient (tensor parallel, FSDP2, or both) is reduced over exactly the mesh axes along which it is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import is_dtensor, local_part

_Split = tuple[DeviceMesh | None, tuple[int, ...]]


def grad_norm(params: Tensor | Iterable[Tensor], *, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, in float32 or wider, equal on every rank. A collective if any parameter is sharded."""
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive (2 for the Euclidean norm, inf for the maximum): got {norm_type}")
    params = _distinct(params)
    # Take the split from the parameters: it is the same on all ranks, even if some ranks have no gradient.
    splits: dict[_Split, list[Tensor]] = {}
    for param in params:
        splits.setdefault(_split_of(param), [])
        if param.grad is not None:
            splits[_split_of(param)].append(_whole_or_shard(param.grad))
    device = params[0].device if params else torch.device("cpu")
    powers = [_over_ranks(_local_power(grads, norm_type, device), split, norm_type) for split, grads in splits.items()]
    if math.isinf(norm_type):
        return torch.stack(powers).amax() if powers else torch.zeros((), device=device)
    return torch.stack(powers).sum() ** (1.0 / norm_type) if powers else torch.zeros((), device=device)


@torch.no_grad()
def clip_grad_norm(params: Tensor | Iterable[Tensor], max_norm: float, *, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients in place to a norm of at most `max_norm`; return the norm before scaling. A collective."""
    params = _distinct(params)
    norm, factor = clip_factor(params, max_norm, norm_type=norm_type)
    grads = [param.grad for param in params if param.grad is not None]
    for (device, dtype), group in _by_device_and_dtype([local_part(grad) for grad in grads]).items():
        if dtype.itemsize > 2:
            torch._foreach_mul_(group, factor.to(device, dtype))
        else:  # one by one: _foreach_mul_ would round the factor to 16 bits
            for grad in group:
                grad.mul_(factor.to(device))
    return norm


@torch.no_grad()
def clip_factor(params: Tensor | Iterable[Tensor], max_norm: float, *, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
    """The norm of all gradients, and the factor that reduces it to at most `max_norm`. A collective."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive: got {max_norm}")
    norm = grad_norm(params, norm_type=norm_type)
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _distinct(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The parameters as a list, each tied parameter once."""
    return [params] if isinstance(params, Tensor) else list(dict.fromkeys(params))


def _split_of(param: Tensor) -> _Split:
    if not is_dtensor(param):
        return None, ()
    # Not is_shard(): it is False for the strided shards of FSDP2 over tensor parallelism.
    whole = [placement.is_replicate() or placement.is_partial() for placement in param.placements]
    return param.device_mesh, tuple(axis for axis, is_whole in enumerate(whole) if not is_whole)


def _whole_or_shard(grad: Tensor) -> Tensor:
    """This rank's shard of a gradient; partial sums are reduced first."""
    if not is_dtensor(grad):
        return grad
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
    return grad.redistribute(placements=placements).to_local()


def _local_power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |x|^p over this rank's elements, or the maximum of |x| for p = inf, in float64 (on MPS, float32)."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device, dtype=wide)
    # One call per device and dtype: launching a kernel for each tensor takes longer than the computation.
    norms = torch.cat(
        [
            torch.stack(torch._foreach_norm(group, norm_type, _at_least_float32(dtype))).to(device, wide)
            for (_, dtype), group in _by_device_and_dtype(grads).items()
        ]
    )
    return norms.amax() if math.isinf(norm_type) else (norms**norm_type).sum()


def _by_device_and_dtype(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        found.setdefault((x.device, x.dtype), []).append(x)
    return found


def _over_ranks(power: Tensor, split: _Split, norm_type: float) -> Tensor:
    mesh, axes = split
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis in axes:
        assert mesh is not None
        dist.all_reduce(power, op, group=mesh.get_group(axis))
    return power


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
