"""torch.optim.AdamW with one launch per parameter group; the reference is PyTorch's step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with the same state. Each group is one launch if `fits` and all groups' options
    allow it; otherwise PyTorch's step runs."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; if `found_inf` is set and not 0, update nothing."""
        from flashspan.ops.kernels.adamw import adamw, fits

        parts: list[tuple[dict[str, Any], list[list[Tensor]]]] = []
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            params, grads, means, squares, _, steps = lists
            if params:
                parts.append((group, [params, grads, means, squares, steps]))
        if closure is not None or not all(_is_plain(group) and fits(*lists[:4]) for group, lists in parts):
            return super().step(closure)
        scale, guard = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, lists in parts:
            steps = lists[-1]
            found = torch.zeros_like(steps[0]) if guard is None else guard
            torch._foreach_add_(steps, 1)
            adamw(
                *lists,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                decay=group["weight_decay"],
                divisor=torch.ones_like(steps[0]) if scale is None else scale,
                skip=found,
            )
            torch._foreach_sub_(steps, [found] * len(steps))
        return None


def _is_plain(group: dict[str, Any]) -> bool:
    return group["fused"] and isinstance(group["lr"], float) and not (group["amsgrad"] or group["maximize"])


def adamw_for(device: torch.device) -> type[torch.optim.AdamW]:
    """The fastest AdamW for a device."""
    has_kernel = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return AdamW if has_kernel else torch.optim.AdamW
