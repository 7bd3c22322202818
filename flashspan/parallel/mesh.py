"""A DeviceMesh with named axes, from the degrees of parallelism.

    mesh = build_mesh(data=2, context=2, tensor=2)       # on 8 ranks
    mesh["tensor"].get_group()                           # the ranks that hold one layer together
    submesh(mesh, "gradient").get_group()                # the ranks over which gradients are summed

Axes, from the outermost to the innermost. The innermost axis communicates most, so its ranks are the nearest:

    data     the model (or its shards) is replicated; different samples
    shard    parameters, gradients and optimizer state are sharded (fully sharded); different samples
    context  each sequence is split; same samples
    tensor   each layer is split; same samples

Derived axes: `batch` = data x shard (ranks with different samples), `fully` = shard x context (fully sharded parameters
are split over it), `gradient` = data x shard x context (gradients and norms are summed over it).
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .collectives import timeout_of

AXES = ("data", "shard", "context", "tensor")
DERIVED = {"batch": ("data", "shard"), "fully": ("shard", "context"), "gradient": ("data", "shard", "context")}


def build_mesh(*, data: int | None = None, shard: int = 1, context: int = 1, tensor: int = 1) -> DeviceMesh:
    """The mesh of all ranks, with the axes data, shard, context and tensor and the derived axes (see above).

    `data=None` means the number of ranks divided by the product of the other degrees. A collective of all ranks.
    """
    degrees = resolve_degrees(dist.get_world_size(), data=data, shard=shard, context=context, tensor=tensor)
    device = "cuda" if dist.get_backend() == "nccl" and torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)
    for name, axes in DERIVED.items():
        mesh[axes]._flatten(name)
    for name in (*AXES, *DERIVED):
        set_timeout_of_world(submesh(mesh, name))
    return mesh


def set_timeout_of_world(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh's axes the timeout of the world group, in place of torch's default of ten or thirty
    minutes, so that all groups notice a stalled rank at the same time."""
    world = dist.group.WORLD
    assert world is not None
    timeout = timeout_of(world)
    if timeout is not None:
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """`mesh[names]`, without the warning that torch gives for derived axes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        return mesh[names]


def resolve_degrees(
    world_size: int, *, data: int | None = None, shard: int = 1, context: int = 1, tensor: int = 1
) -> dict[str, int]:
    """All four degrees, whose product is the world size. If no degrees fit, a ValueError suggests some that would."""
    degrees = {"data": data, "shard": shard, "context": context, "tensor": tensor}
    for axis, degree in degrees.items():
        if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            raise ValueError(f"a degree must be an integer, at least 1: got {axis}={degree!r}")
    product = math.prod(degree for degree in degrees.values() if degree is not None)
    if data is None and world_size % product == 0:
        degrees["data"] = world_size // product
        product = world_size
    if product != world_size:
        given = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree is not None)
        raise ValueError(
            f"the degrees must multiply to the {world_size} ranks: {given} = {product}; {_suggest(world_size, degrees)}"
        )
    return {axis: degree for axis, degree in degrees.items() if degree is not None}


def _suggest(world_size: int, degrees: dict[str, int | None]) -> str:
    """Text with the changes of one degree that would fit; if there are none, with the divisors of the world size."""
    fits = []
    for axis, degree in degrees.items():
        rest = math.prod(other or 1 for name, other in degrees.items() if name != axis)
        if degree is None or world_size % rest:
            continue
        left = world_size // rest
        if degrees["data"] is None and axis != "data":
            fits.append(f"{axis}={' or '.join(str(n) for n in range(1, left + 1) if left % n == 0)}")
        else:
            fits.append(f"{axis}={left}")
    if fits:
        return f"with the others as they are, {', or '.join(fits)} would fit"
    return f"a degree must be a divisor of {world_size}: {', '.join(str(n) for n in _divisors(world_size))}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
