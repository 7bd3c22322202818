"""Fully sharded data parallelism: PyTorch's FSDP2 on our mesh, alone or with tensor and context parallelism.

apply_tensor_parallel(model, mesh["tensor"], plan)               # optional; must be first
apply_fully_sharded(model, mesh, model.layers, param_dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())                # afterwards, because the parameters are new tensors
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
    """Whether a module is an FSDP2 module. This does not import FSDP2 (see `is_dtensor`)."""
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
    """Shard every parameter over the shard and context axes, in place; replicate along the data axis. A collective.

    Each of `blocks` is gathered for its forward and backward, and freed afterwards; other parameters are gathered with
    the model. The model computes in `param_dtype`, and gradients are reduced in float32; sharded parameters keep their
    dtype. All ranks start with the first rank's weights. `op` reduces gradients over all gradient ranks, as in
    DataParallel. Parameters in `replicated` are not sharded, and the caller must reduce their gradients.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if mesh.mesh_dim_names is None or "shard" not in mesh.mesh_dim_names:
        raise ValueError(f"a mesh from build_mesh is needed, with a shard axis: got {mesh.mesh_dim_names}")
    group = submesh(mesh, "gradient").get_group()
    copy_from_first([*model.parameters(), *model.buffers()], group)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    # FSDP2 replicates along the first of two axes.
    over = submesh(mesh, "data", "fully") if mesh["data"].size() > 1 else submesh(mesh, "fully")
    for module in [*blocks, model]:
        fully_shard(module, mesh=over, mp_policy=policy, ignored_params=set(replicated))
        if op == "sum":
            assert is_fully_sharded(module)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
