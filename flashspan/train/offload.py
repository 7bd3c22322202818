"""What a layer keeps for its backward, in the host's memory while it waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALL = 2**16
"""Fewer numbers than this stay where they are."""


class Away(NamedTuple):
    """A tensor on the host, and the device it came from."""

    copy: Tensor
    device: torch.device


def on_host(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose saved tensors are moved to the host and come back when backward asks for them."""

    def moved(*args: Any) -> Any:
        with saved_tensors_hooks(_send, _fetch):
            return run(*args)

    return moved


def _send(x: Tensor) -> Tensor | Away:
    """x, or where it went: on a GPU a copy into pinned memory, on a stream of its own so that nobody waits for it."""
    if x.numel() < SMALL or isinstance(x, torch.nn.Parameter):
        return x
    if not x.is_cuda:
        return Away(x.detach().clone(), x.device)
    copy = torch.empty_like(x, device="cpu", pin_memory=True)
    lane = _lane(x.device)
    lane.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(lane):
        copy.copy_(x, non_blocking=True)
    x.record_stream(lane)  # its memory is not given to another before the copy is made
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
