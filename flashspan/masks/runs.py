"""The run of keys that each row of a bool tensor sees. If each row sees one run, the tensor is `Rows`, not `Blocks`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspan.kernels.masks.build import has_kernels


def find_runs(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """start, end int32 [B, T] of the keys that each row of bool [B, T, S] sees; None if some row has a gap."""
    if has_kernels(visible):
        from flashspan.masks import runs_triton

        return runs_triton.find_runs(visible)
    begins = visible[..., 1:] > visible[..., :-1]  # a run that begins after the first key
    if bool((_count(begins) + _count(visible[..., :1]) > 1).any()):
        return None
    length = _count(visible)
    start = visible.view(torch.uint8).argmax(-1).int() if visible.shape[-1] else length
    return start, start + length


def _count(seen: Tensor) -> Tensor:
    """The number of True along the last axis, int32. Summing in bytes first is many times as fast on a CPU."""
    parts = [part.sum(-1, dtype=torch.uint8) for part in seen.view(torch.uint8).split(255, -1)]
    return torch.stack(parts).sum(0, dtype=torch.int32)
