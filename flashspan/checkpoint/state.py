"""Gather and load the state of a model and its optimizer as whole tensors on the CPU, under any parallelism config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flashspan.parallel import ShardedOptimizer
from flashspan.parallel.collectives import full_tensor, local_slices, part_like

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of AdamW for each parameter, in addition to a step."""


class Trained(Protocol):
    """A model, its optimizer, and the name of each parameter."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def names(self) -> Mapping[nn.Parameter, str]: ...


def model_state(trained: Trained, *, keep: bool) -> dict[str, Tensor]:
    """The whole weights on the CPU of the ranks with `keep`; empty on the others. A collective."""
    return _gather(trained.model.state_dict(), keep)


def optimizer_state(trained: Trained, *, keep: bool) -> dict[str, Tensor]:
    """The whole optimizer state, `<kind>/<parameter>` -> tensor, on the ranks with `keep`. A collective."""
    order = _in_order(trained)
    if isinstance(trained.optimizer, ShardedOptimizer):
        entries = trained.optimizer.state_dict()["state"]
    else:
        entries = {i: trained.optimizer.state.get(p, {}) for i, p in enumerate(order)}
    flat = {f"{key}/{trained.names[p]}": v for i, p in enumerate(order) for key, v in entries[i].items()}
    return _gather(flat, keep)


def _gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    whole = {}
    for name, value in tensors.items():
        gathered = full_tensor(value)
        if keep:
            whole[name] = gathered.cpu().clone()
    return whole


def load_optimizer_state(trained: Trained, state: Mapping[str, Tensor], step: int) -> None:
    """Load a copy of this rank's share of a whole state that was saved after `step` steps. The rest of the mapped files
    is not read. ValueError if it is not the state of this model at that step."""
    order = _in_order(trained)
    numbers = {trained.names[param]: i for i, param in enumerate(order)}
    entries: dict[int, dict[str, Any]] = {i: {} for i in range(len(order))}
    for name, value in state.items():
        key, _, owner = name.partition("/")
        if owner not in numbers:
            raise ValueError(
                f"the checkpoint's optimizer has state of the parameter {owner!r}, which this model does not have; "
                "use a checkpoint of this model"
            )
        shape = order[numbers[owner]].shape if key in MOMENTS else torch.Size()
        if key not in (*MOMENTS, "step") or value.shape != shape:
            raise ValueError(
                f"the checkpoint's optimizer has {name} of shape {tuple(value.shape)}: AdamW needs "
                f"{', '.join(MOMENTS)} of the parameter's shape, and a scalar step; use another checkpoint"
            )
        entries[numbers[owner]][key] = value
    if partial := [name for name, i in numbers.items() if len(entries[i]) != (len(MOMENTS) + 1 if step else 0)]:
        raise ValueError(
            f"the checkpoint's optimizer has no state of {partial[0]} after {step} steps; use another checkpoint"
        )
    made = {float(value["step"]) for value in entries.values() if value}
    if made - {float(torch.tensor(float(step)))}:  # AdamW counts steps in float32
        raise ValueError(
            f"the checkpoint's optimizer has made {', '.join(f'{count:g}' for count in sorted(made))} steps and its "
            f"state.json says {step}: its files are of different checkpoints; use another"
        )
    groups = trained.optimizer.param_groups
    counts = [len(group["params"]) for group in groups]
    described = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": list(range(sum(counts[:i]), sum(counts[: i + 1]))),
        }
        for i, group in enumerate(groups)
    ]
    if not isinstance(trained.optimizer, ShardedOptimizer):
        entries = {
            i: {k: _share(order[i], v) if v.shape == order[i].shape else v.clone() for k, v in entry.items()}
            for i, entry in entries.items()
            if entry
        }
    trained.optimizer.load_state_dict({"state": entries, "param_groups": described})


def _share(param: Tensor, whole: Tensor) -> Tensor:
    return part_like(param, whole[local_slices(param) or ...].to(param.device, copy=True))


def _in_order(trained: Trained) -> list[nn.Parameter]:
    return [param for group in trained.optimizer.param_groups for param in group["params"]]
