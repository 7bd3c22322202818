"""Whole tensors from parts and back: a checkpoint that is the same file at any degree of parallelism.

    state = full_state_dict(model)             # plain tensors, as the unsplit model would give
    load_full_state_dict(model, state)         # each rank takes its part

Both accept any mixture of plain parameters, tensor-parallel layers and FSDP2, whose parameters are all DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from flashspan.agreement import raise_together
from flashspan.parallel.collectives import full_tensor, shard_like


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state of the unsplit module, plain tensors on the CPU of every rank. A collective.

    What a module's `get_extra_state` gives is taken as it is, this rank's own.
    """
    return {
        name: full_tensor(value).cpu().clone() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the state of the unsplit module. Missing, extra or misshapen entries on any rank: a ValueError on all."""
    targets = module.state_dict(keep_vars=True)
    raise_together(_misfit(targets, state))
    for name, target in targets.items():
        if not _is_extra(name):
            target.copy_(shard_like(target, state[name].to(dtype=target.dtype, device=target.device)))
    if extra := {name: state[name] for name in targets if _is_extra(name)}:
        module.load_state_dict(extra, strict=False)


def _is_extra(name: str) -> bool:
    """Whether an entry is what a module's `get_extra_state` gave: any object at all, and not one to copy into."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _misfit(targets: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    complaints = []
    if missing := [name for name in targets if name not in state]:
        complaints.append(f"missing {', '.join(missing)}")
    if extra := [name for name in state if name not in targets]:
        complaints.append(f"unexpected {', '.join(extra)}")
    for name, target in targets.items():
        if name not in state or _is_extra(name):
            continue
        if not isinstance(state[name], Tensor):
            complaints.append(f"{name} is of type {type(state[name]).__name__}, not a tensor")
        elif state[name].shape != target.shape:
            complaints.append(f"{name} is {tuple(state[name].shape)}, not {tuple(target.shape)}")
    return f"the state does not fit the module: {'; '.join(complaints)}" if complaints else None
