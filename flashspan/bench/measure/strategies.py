"""The strategies and layouts of commands and benchmarks, and a function that makes one over all ranks."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashspan.context.strategy import ContextAttention, context_parallel

Strategy: TypeAlias = Literal["ring", "double_ring", "gather", "helper", "ulysses", "hybrid"]
Layout: TypeAlias = Literal["contiguous", "zigzag", "striped"]


def over_all_ranks(strategy: str, layout: str, device_type: str, **options: Any) -> ContextAttention:
    """A strategy over all ranks, with a 2-D mesh or two levels if the strategy needs them."""
    world = dist.get_world_size()
    group: Any = dist.group.WORLD
    if strategy == "hybrid":
        device_type = device_type if dist.get_backend() == "nccl" else "cpu"
        group = init_device_mesh(device_type, (world // 2, 2) if world % 2 == 0 else (world, 1))
    elif strategy == "double_ring":
        nodes = max(n for n in range(1, math.isqrt(world) + 1) if world % n == 0)
        options.setdefault("sizes", (nodes, world // nodes))
    return context_parallel(group, strategy=strategy, layout=layout, **options)
