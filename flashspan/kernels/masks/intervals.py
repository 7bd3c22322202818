"""Intervals of keys, one for each query, as tensors; and the positions of a slice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from flashspan.kernels.torch_private import is_in_torch_dispatch_mode

Positions: TypeAlias = range | Sequence[range]
"""Global positions of a slice's tokens: one range, or several, ascending and disjoint."""


def place(positions: Positions, number: int | None = None) -> Tensor:
    """Positions as an int64 tensor. They must be below `number` and ascend: so a slice of an interval is one."""
    parts = [positions] if isinstance(positions, range) else positions
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, range) for part in parts):
        raise ValueError(f"a mask is sliced by a range or several of them: got {positions!r}; use range(start, stop)")
    parts = [part for part in parts if len(part)]
    bad = any(part.step < 1 for part in parts) or any(a[-1] >= b[0] for a, b in itertools.pairwise(parts))
    if bad:
        raise ValueError(f"a mask is sliced by ascending positions: got {positions}")
    if number is not None and parts and not 0 <= parts[0][0] <= parts[-1][-1] < number:
        raise ValueError(f"positions in a mask of {number} must be 0 to {number - 1}: got {positions}")
    return torch.from_numpy(np.concatenate([np.arange(p.start, p.stop, p.step) for p in parts] or [np.arange(0)]))


def one_range(positions: Positions) -> Positions:
    """The range itself if positions is a list of one range, else positions."""
    return positions[0] if isinstance(positions, (list, tuple)) and len(positions) == 1 else positions


def clean(start: Tensor, end: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Check a user's intervals. Return them as int32 within 0..num_keys, with canonical empty rows."""
    for name, bound in (("start", start), ("end", end)):
        if not isinstance(bound, Tensor) or bound.dtype.is_floating_point or bound.dtype == torch.bool:
            raise ValueError(f"Rows needs integer tensors of shape [T] or [B, T]: got {name}={bound!r}")
    if start.shape != end.shape or start.dim() not in (1, 2) or start.device != end.device:
        raise ValueError(
            f"Rows needs start and end of one shape, [T] or [B, T], on one device: "
            f"got {tuple(start.shape)} on {start.device} and {tuple(end.shape)} on {end.device}"
        )
    return canonical(start.long().clamp(0, num_keys).int(), end.long().clamp(0, num_keys).int())


def canonical(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The same intervals, with each empty one moved to the greatest end before it, so that equal masks are equal."""
    # At this place, an empty row keeps the intervals ascending if the other rows ascend.
    empty = start >= end
    reach = _cummax(torch.where(empty, 0, end))
    return torch.where(empty, reach, start).contiguous(), torch.where(empty, reach, end).contiguous()


def transpose(start: Tensor, end: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """first, last [.., S]: the first query whose end is after key j; 1 + the last query whose start is not after it."""
    reach = _cummax(end)
    ahead = -_cummax(-start.flip(-1)).flip(-1)  # the least start from here on
    keys = torch.arange(num_keys, dtype=torch.int32, device=start.device)
    keys = keys.expand(*start.shape[:-1], num_keys).contiguous()
    first = torch.searchsorted(reach, keys, right=True).int()
    return first, torch.searchsorted(ahead.contiguous(), keys, right=True).int()


def reach_of(start: Tensor, end: Tensor) -> int:
    """The power of 2 at or below the mean length; 0 if computing it would wait for a device, or under tracing."""
    if not start.is_cpu or not start.numel() or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return 0
    mean = int((end - start).clamp(min=0).sum()) // start.numel()
    return 1 << mean.bit_length() >> 1


def extremes(offsets: Tensor, informative: Tensor) -> list[int]:
    """The least and the greatest of the informative offsets: two numbers, one if they are equal, or an empty list."""
    values = offsets[informative]
    return sorted({int(values.min()), int(values.max())}) if len(values) else []


def _cummax(x: Tensor) -> Tensor:
    return x.cummax(-1).values if x.numel() else x
