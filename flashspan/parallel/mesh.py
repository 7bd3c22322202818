"""Degrees of parallelism in, one named DeviceMesh out.

    mesh = build_mesh(data=2, context=2, tensor=2)       # on 8 ranks
    mesh["tensor"].get_group()                           # the ranks that hold one layer together
    submesh(mesh, "gradient").get_group()                # the ranks over which gradients are summed

Axes, from the farthest ranks to the nearest, because the inner ones talk the most:

    data     each holds the model (or its shards) and its own samples
    shard    parameters, gradients and optimizer state are split (fully sharded); own samples
    context  one sequence is split; same samples
    tensor   each layer is split; same samples

Derived: `batch` = data x shard (who reads different samples), `fully` = shard x context (over whom parameters are split
when fully sharded), `gradient` = data x shard x context (over whom gradients and norms are summed).
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
    """The mesh of all ranks with axes data, shard, context, tensor, and batch, fully, gradient derived from them.

    `data=None` takes the ranks that the other degrees leave. A collective: every rank calls it.
    """
    degrees = resolve_degrees(dist.get_world_size(), data=data, shard=shard, context=context, tensor=tensor)
    device = "cuda" if dist.get_backend() == "nccl" and torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, tuple(degrees[axis] for axis in AXES), mesh_dim_names=AXES)
    for name, axes in DERIVED.items():
        mesh[axes]._flatten(name)
    for name in (*AXES, *DERIVED):
        wait_like_the_world(submesh(mesh, name))
    return mesh


def wait_like_the_world(mesh: DeviceMesh) -> None:
    """Let the groups of a mesh's axes wait for a rank as long as the group of all ranks does, and not for the ten or
    thirty minutes with which torch makes them: a stalled rank is to be noticed by all in one time."""
    world = dist.group.WORLD
    assert world is not None
    timeout = timeout_of(world)
    if timeout is not None:
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """`mesh[names]`, derived axes included, without the warning torch gives for those."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        return mesh[names]


def resolve_degrees(
    world_size: int, *, data: int | None = None, shard: int = 1, context: int = 1, tensor: int = 1
) -> dict[str, int]:
    """All four degrees, whose product is the world size; ValueError, saying which would fit, if that cannot be."""
    asked = {"data": data, "shard": shard, "context": context, "tensor": tensor}
    for axis, degree in asked.items():
        if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            raise ValueError(f"a degree must be an integer, at least 1: got {axis}={degree!r}")
    product = math.prod(degree for degree in asked.values() if degree is not None)
    if data is None and world_size % product == 0:
        asked["data"] = world_size // product
        product = world_size
    if product != world_size:
        given = " x ".join(f"{axis}={degree}" for axis, degree in asked.items() if degree is not None)
        raise ValueError(
            f"the degrees must multiply to the {world_size} ranks: {given} = {product}; {_suggest(world_size, asked)}"
        )
    return {axis: degree for axis, degree in asked.items() if degree is not None}


def _suggest(world_size: int, asked: dict[str, int | None]) -> str:
    """Which single change would make the degrees fit."""
    fits = []
    for axis, degree in asked.items():
        rest = math.prod(other or 1 for name, other in asked.items() if name != axis)
        if degree is None or world_size % rest:
            continue
        left = world_size // rest
        if asked["data"] is None and axis != "data":
            fits.append(f"{axis}={' or '.join(str(n) for n in range(1, left + 1) if left % n == 0)}")
        else:
            fits.append(f"{axis}={left}")
    if fits:
        return f"with the others as they are, {', or '.join(fits)} would fit"
    return f"degrees that fit divide {world_size}: {', '.join(str(n) for n in _divisors(world_size))}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
