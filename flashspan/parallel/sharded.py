"""Fully sharded data parallelism: PyTorch's FSDP2 on our mesh, under tensor and context parallelism or by itself.

apply_tensor_parallel(model, mesh["tensor"], plan)               # first, if at all
apply_fully_sharded(model, mesh, model.layers, param_dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())                # after: the parameters are new
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .collectives import copy_from_first
from .mesh import submesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import TypeIs


def is_fully_sharded(module: object) -> TypeIs[FSDPModule]:
    """Whether FSDP2 holds it, which is imported with the first that it does: see `is_dtensor`."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    return sharding is not None and isinstance(module, sharding.FSDPModule)


def apply_fully_sharded(
    model: nn.Module,
    mesh: DeviceMesh,
    blocks: Iterable[nn.Module] = (),
    *,
    param_dtype: torch.dtype | None = None,
    op: Literal["mean", "sum"] = "mean",
    replicated: Collection[nn.Parameter] = (),
) -> None:
    """Split every parameter over the mesh's shard and context axes, in place; copies along data. A collective.

    Each of `blocks` is gathered for its own forward and backward and then let go; what is in none of them, with the
    model. Computes in `param_dtype` and reduces in float32, while the split parameters keep theirs. Every model
    starts from the first rank's weights. `op` says what gradients become over all gradient ranks, as in DataParallel.
    Parameters in `replicated` are not split and their gradients not reduced: that is left to the caller.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if mesh.mesh_dim_names is None or "shard" not in mesh.mesh_dim_names:
        raise ValueError(f"a mesh from build_mesh is needed, with a shard axis: got {mesh.mesh_dim_names}")
    group = submesh(mesh, "gradient").get_group()
    copy_from_first([*model.parameters(), *model.buffers()], group)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    # A second axis makes FSDP2 keep copies along it.
    over = submesh(mesh, "data", "fully") if mesh["data"].size() > 1 else submesh(mesh, "fully")
    for module in [*blocks, model]:
        fully_shard(module, mesh=over, mp_policy=policy, ignored_params=set(replicated))
        if op == "sum":
            assert is_fully_sharded(module)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies as it goes
