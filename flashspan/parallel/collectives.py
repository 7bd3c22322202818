"""The collectives of this package: a reproducible reduction, a broadcast from the first rank, and five differentiable
ones.

Tensor parallelism needs two conjugate pairs (Megatron-LM's f and g, and their sequence-parallel forms):

    forward                       backward
    copy:     x                   sum of the gradients over ranks
    add:      sum over ranks      the gradient
    gather:   all slices          own slice of the sum     (all-gather / reduce-scatter)
    scatter:  own slice of sum    all slices               (reduce-scatter / all-gather)
    collect:  all slices          own slice of the gradient (if all ranks compute the same from the slices)

A dimension is split as `torch.chunk` and DTensor do: ceil(size / ranks) elements per rank. The last ranks may have
fewer elements, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# torch 2.13 renamed this function: there the old name warns, and earlier releases do not have the new name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sum_in_rank_order(flat: Tensor, group: dist.ProcessGroup | None = None, *, divisor: int = 1) -> None:
    """Sum a tensor [N] over ranks in place, in rank order: (x0 + x1) + x2 ...; then divide by `divisor`.

    Sums are float32 or wider. The number of ranks must divide N.

    A ring all-reduce adds an element's terms in an order that depends on its place in the buffer, so with three ranks
    or more the result depends on how gradients are packed. This function sends the same number of bytes (an all-to-all
    and an all-gather), and its result does not depend on the packing.
    """
    num_ranks = dist.get_world_size(group)
    if flat.is_cuda and num_ranks > 1 and dist.get_backend(group) == "gloo":  # ranks share a GPU: gloo sends CPU memory
        host = flat.cpu()
        sum_in_rank_order(host, group, divisor=divisor)
        flat.copy_(host)
        return
    # The order of two terms does not matter. But the sum of two float16 numbers may overflow where their mean does not.
    if num_ranks == 1 or (num_ranks == 2 and flat.dtype != torch.float16):
        dist.all_reduce(flat, group=group)
        flat /= divisor
        return
    terms = torch.empty_like(flat)
    dist.all_to_all_single(terms, flat, group=group)
    first, *others = terms.view(num_ranks, -1)
    total = first.to(torch.promote_types(flat.dtype, torch.float32))
    for term in others:
        total += term
    total /= divisor
    _all_gather_flat(flat, total.to(flat.dtype), group=group)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group; None if its backend has none."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors, or this rank's shards of them, with those of the group's first rank. A collective."""
    for tensor in tensors:
        local = local_part(tensor)
        if local.numel() and not local.is_meta:
            whole = local.contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            if whole.data_ptr() != local.data_ptr():
                local.copy_(whole)


def chunk_size(size: int, num_ranks: int) -> int:
    """The size of a rank's slice of a dimension; the slices of the last ranks may be smaller."""
    return -(-size // num_ranks)


def chunk_range(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The begin and end of a rank's slice of a dimension."""
    step = chunk_size(size, num_ranks)
    return min(size, rank * step), min(size, (rank + 1) * step)


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor. This does not import DTensor, since the import takes most of a second."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or a plain tensor itself; detached, in the same memory."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def part_like(tensor: Tensor, local: Tensor) -> Tensor:
    """A DTensor with `local` as this rank's shard, sharded like `tensor`; for a plain `tensor`, `local` itself."""
    if not is_dtensor(tensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return type(tensor).from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def local_slices(tensor: Tensor) -> tuple[slice, ...] | None:
    """The slices of the whole tensor that this rank holds; None if it holds all of it."""
    if not is_dtensor(tensor):
        return None
    mesh, ranges = tensor.device_mesh, [(0, size) for size in tensor.shape]
    cuts = [(axis, placed) for axis, placed in enumerate(tensor.placements) if hasattr(placed, "dim")]
    # A strided shard splits the pieces that the other axes have made, as FSDP2 does with tensor-parallel layers.
    for axis, placed in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        begin, end = ranges[placed.dim]
        first, last = chunk_range(end - begin, mesh.size(axis), mesh.get_local_rank(axis))
        ranges[placed.dim] = (begin + first, begin + last)
    return tuple(slice(*bounds) for bounds in ranges)


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, unchanged; its gradient is summed over the group."""
    return _Copy.apply(x, group)


def add(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over the group; its gradient passes unchanged."""
    return _Add.apply(x, group)


def gather(x: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' slices, joined along `dim` to `size`; backward returns this rank's slice of the summed gradient."""
    return _Gather.apply(x, dim, size, group)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice along `dim` of the sum of x over the group; backward gathers the gradient's slices."""
    return _Scatter.apply(x, dim, group)


def collect(x: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' slices, joined along `dim` to `size`. Backward only slices the gradient: it is equal on all ranks."""
    return _Collect.apply(x, dim, size, group)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A contiguous clone: gloo is silently wrong for other strides, and all_reduce writes in place.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    step = chunk_size(size, num_ranks)
    # Pad to equal slices, with `dim` first: each rank sends one contiguous message, which is never empty.
    rows = x.movedim(dim, 0)
    mine = x.new_zeros(step, *rows.shape[1:])
    mine[: rows.shape[0]] = rows
    padded = x.new_empty(num_ranks * step, *rows.shape[1:])
    _all_gather_flat(padded, mine, group=group)
    # Only the last slices are short, so all padding is at the end. Later layers would copy a tensor with other strides.
    return padded[:size].movedim(0, dim).contiguous()


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = x.shape[dim]
    rows = x.movedim(dim, 0)
    padded = x.new_zeros(num_ranks * chunk_size(size, num_ranks), *rows.shape[1:])
    padded[:size] = rows
    terms = torch.empty_like(padded)
    dist.all_to_all_single(terms, padded, group=group)
    total = terms.view(num_ranks, -1, *rows.shape[1:]).sum(0)
    begin, end = chunk_range(size, num_ranks, rank)
    return total[: end - begin].movedim(0, dim).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _sum(dout, ctx.group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(dout, ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(dout, ctx.dim, ctx.size, ctx.group), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return _all_gather(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        begin, _ = chunk_range(dout.shape[ctx.dim], dist.get_world_size(ctx.group), dist.get_rank(ctx.group))
        return dout.narrow(ctx.dim, begin, ctx.length), None, None, None


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor, or a plain tensor itself. A collective on the DTensor's mesh."""
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()


def shard_like(reference: Tensor, whole: Tensor) -> Tensor:
    """`whole`, sharded like `reference`. Every rank has the whole tensor, so nothing is sent."""
    if not is_dtensor(reference):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh = reference.device_mesh
    return distribute_tensor(whole.to(reference.device), mesh, reference.placements, src_data_rank=None)
