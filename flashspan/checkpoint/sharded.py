"""Whole tensors from shards and back, so that a checkpoint is the same file at any degree of parallelism.

    state = full_state_dict(model)             # plain tensors, as from the unsplit model
    load_full_state_dict(model, state)         # each rank takes its shard

Both accept any combination of plain parameters, tensor-parallel layers and FSDP2, whose parameters are all DTensors.
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

    The results of `get_extra_state` are those of this rank, unchanged.
    """
    return {
        name: full_tensor(value).cpu().clone() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the state of the unsplit module. ValueError on all ranks if names or shapes differ."""
    targets = module.state_dict(keep_vars=True)
    raise_together(_mismatch(targets, state))
    for name, target in targets.items():
        if not _is_extra(name):
            target.copy_(shard_like(target, state[name].to(dtype=target.dtype, device=target.device)))
    if extra := {name: state[name] for name in targets if _is_extra(name)}:
        module.load_state_dict(extra, strict=False)


def _is_extra(name: str) -> bool:
    """Whether an entry is the result of `get_extra_state`: an object of any type, not a tensor to copy into."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _mismatch(targets: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    problems = []
    if missing := [name for name in targets if name not in state]:
        problems.append(f"missing {', '.join(missing)}")
    if extra := [name for name in state if name not in targets]:
        problems.append(f"unexpected {', '.join(extra)}")
    for name, target in targets.items():
        if name not in state or _is_extra(name):
            continue
        if not isinstance(state[name], Tensor):
            problems.append(f"{name} is of type {type(state[name]).__name__}, not a tensor")
        elif state[name].shape != target.shape:
            problems.append(f"{name} is {tuple(state[name].shape)}, not {tuple(target.shape)}")
    return f"the state does not fit the module: {'; '.join(problems)}" if problems else None
