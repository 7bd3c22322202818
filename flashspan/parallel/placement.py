"""Placement of parameters (sharded or replicated), and the collectives before and after sharded layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .collectives import add, chunk_range, copy, copy_from_first, gather, is_dtensor, scatter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard_parameter(param: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """The first rank's parameter, sharded along `dim` over a one-axis mesh. A collective."""
    from torch.distributed.tensor import DTensor, Shard

    whole = first_rank_of(param, mesh)
    begin, end = chunk_range(whole.shape[dim], mesh.size(), mesh.get_local_rank())
    local = whole.narrow(dim, begin, end - begin).clone(memory_format=torch.contiguous_format)
    split = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(split, requires_grad=param.requires_grad)


def share_parameter(param: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """The first rank's parameter, replicated on every rank as a DTensor. A collective.

    Optimizers that step many parameters in one call refuse plain tensors together with DTensors.
    """
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(first_rank_of(param, mesh), mesh, [Replicate()], run_check=False)
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def enter_parallel(x: Tensor, mesh: DeviceMesh, *, sequence_dim: int | None = None) -> Tensor:
    """The input of column layers: x, or with a sequence dimension all ranks' slices. Backward sums over ranks."""
    if sequence_dim is None:
        return copy(x, mesh.get_group())
    return gather(x, sequence_dim, x.shape[sequence_dim] * mesh.size(), mesh.get_group())


def leave_parallel(x: Tensor, mesh: DeviceMesh, *, sequence_dim: int | None = None) -> Tensor:
    """The output of row layers: the sum over ranks, or with a sequence dimension, this rank's slice of the sum."""
    if sequence_dim is None:
        return add(x, mesh.get_group())
    if x.shape[sequence_dim] % mesh.size():
        raise ValueError(
            f"sequence parallelism needs a length divisible by the tensor degree: got {x.shape[sequence_dim]} tokens "
            f"on {mesh.size()} ranks; pad the sequence or use sequence_dim=None"
        )
    return scatter(x, sequence_dim, mesh.get_group())


def first_rank_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A contiguous copy of the first rank's tensor; on the meta device, an empty tensor of its shape."""
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    copy_from_first([whole], mesh.get_group())
    return whole


def local_of(param: Tensor) -> Tensor:
    """This rank's shard of a parameter; its gradient is sharded in the same way."""
    return cast("DTensor", param).to_local()


def split_once(param: Tensor, mesh: DeviceMesh, dim: int | None, shared: dict[Tensor, nn.Parameter]) -> nn.Parameter:
    """A parameter sharded along `dim`, or replicated; the same object at each call, so that tied weights stay tied."""
    if param not in shared:
        shared[param] = share_parameter(param, mesh) if dim is None else shard_parameter(param, mesh, dim)
    held = shared[param]
    assert is_dtensor(held)
    (placement,) = held.placements
    if not (placement.is_replicate() if dim is None else placement.is_shard(dim)):
        raise ValueError(
            "weights shared by two layers must be split the same way: name both in the plan, as vocabulary and column"
        )
    return held
