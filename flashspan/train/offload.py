"""Keep the tensors that a layer saves for backward in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALL = 2**16
"""Tensors with fewer elements are not moved."""


class Away(NamedTuple):
    """A copy of a tensor on the host, and the tensor's device."""

    copy: Tensor
    device: torch.device


def on_host(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with its saved tensors moved to the host, and copied back when backward needs them."""

    def moved(*args: Any) -> Any:
        with saved_tensors_hooks(_send, _fetch):
            return run(*args)

    return moved


def _send(x: Tensor) -> Tensor | Away:
    """x itself, or its copy on the host: from a GPU into pinned memory, on a separate stream, without waiting."""
    if x.numel() < SMALL or isinstance(x, torch.nn.Parameter):
        return x
    if not x.is_cuda:
        return Away(x.detach().clone(), x.device)
    copy = torch.empty_like(x, device="cpu", pin_memory=True)
    lane = _lane(x.device)
    lane.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(lane):
        copy.copy_(x, non_blocking=True)
    x.record_stream(lane)  # its memory is not reused before the copy is complete
    return Away(copy, x.device)


def _fetch(kept: Tensor | Away) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.device.type == "cuda":
        torch.cuda.current_stream(kept.device).wait_stream(_lane(kept.device))
    return kept.copy.to(kept.device, non_blocking=True)


@cache
def _lane(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
