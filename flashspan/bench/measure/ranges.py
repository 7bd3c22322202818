"""Named ranges on the parts of a model: for torch.profiler, and as NVTX for Nsight Systems; and an attention in parts.

    with named(model): loss = step(model)

The model is not changed: hooks begin and end a range around every module while the context is active.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

PHASES = ("warm-up", "forward", "backward", "optimizer")
"""The phases of a step. All other ranges are parts of a phase."""


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A range of this name, for both profilers. In compiled code there is none, since it would break the graph."""
    nvtx = not torch.compiler.is_compiling() and _has_nvtx()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


def _has_nvtx() -> bool:
    return torch.cuda.is_available()


@contextlib.contextmanager
def named(model: nn.Module) -> Iterator[None]:
    """A range around the forward of every submodule, with the name of the submodule."""
    open_ranges: list[Any] = []
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            scope = span(name)
            scope.__enter__()
            open_ranges.append(scope)

        return hook

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        if path and not isinstance(module, nn.ModuleList):
            words = [word for word in path.split(".") if word not in ("layers", "blocks")]
            name = " ".join(word for word in words if not word.isdigit())
            handles.append(module.register_forward_pre_hook(enter(name or "layer")))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def in_parts(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Any = None) -> Tensor:
    """Plain attention, which stores the scores, with a range on each part. q [B, H, T, D], k and v [B, K, S, D]."""
    if mask is not None:
        raise ValueError("plain attention in parts supports only causal masks: got mask=; use flashspan.attention")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    with span("attention scores"):
        scores = q @ k.transpose(-2, -1)
    with span("attention scale and mask"):
        scores = scores / math.sqrt(q.shape[-1])
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~visible, -math.inf)
    with span("attention softmax"):
        weights = scores.softmax(-1)
    with span("attention values"):
        return weights.to(v.dtype) @ v
