"""Calls of `attention` prepared once: what a call's arguments mean, kept for the calls like it.

On a GPU a short call waits for the host, and most of what the host does follows from how the tensors lie and from a few
values: whether the arguments are valid, which backend serves, what is launched. So the first plain call of a kind keeps
that. No tensor is kept, and a mask the caller gave is only pointed at.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from flashspan.kernels.backends import Chosen, Repeat
from flashspan.kernels.contract import Problem
from flashspan.kernels.launch.cache import CACHE
from flashspan.kernels.masks import Band, Mask
from flashspan.kernels.torch_private import has_tangents, is_in_torch_dispatch_mode, is_transformed

PLAIN = {Tensor, torch.nn.Parameter}


class Prepared(NamedTuple):
    """A call's arguments but for the tensors, checked; and its forward pass, if the backend can repeat one."""

    problem: Problem
    backend: str
    forward: Repeat | None = None


class _Pointing(NamedTuple):
    """A prepared call whose mask is the caller's."""

    mask: weakref.ref[Mask]
    scale: float
    deterministic: bool
    backend: str
    forward: Repeat | None


def plainly_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is no compiler, no dispatch mode, no tensor subclass and no meta tensor."""
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        and not q.is_meta
    )


def call_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | tuple[int, int] | None,
    mask: Mask | Tensor | None,
    scale: float | None,
    dropout: float,
    backend: str,
    deterministic: bool,
) -> tuple[Hashable, ...] | None:
    """All that decides what a call does, but for the numbers in its tensors and whether it is differentiated. None
    where nothing is kept: not on a GPU, not plainly eager, or a mask to be made in each call."""
    if not q.is_cuda or torch.is_autocast_enabled("cuda"):
        return None
    if not q.layout == k.layout == v.layout == torch.strided:
        return None
    if is_transformed() or has_tangents():
        return None
    if type(dropout) is not float or dropout or type(backend) is not str or type(causal) is not bool:
        return None
    if type(window) not in (NoneType, int) or type(scale) not in (NoneType, int, float):
        return None
    if mask is not None and (causal or window is not None or isinstance(mask, Tensor)):
        return None
    steps = q.stride(), k.stride(), v.stride()
    if not all(step and step[-1] == 1 for step in steps):  # they would be copied first
        return None
    return (
        "attention", q.shape, k.shape, v.shape, *steps, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        causal, window, mask if isinstance(mask, Band) else id(mask), scale, backend, bool(deterministic),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def kept_call(key: tuple[Hashable, ...], given: Mask | Tensor | None, device: torch.device) -> Prepared | None:
    """The call kept under a key, with the mask given. Another mask may lie where one has been that is gone."""
    call: Prepared | _Pointing | None = CACHE.get(key)
    if not isinstance(call, _Pointing):
        return call
    mask, scale, deterministic, backend, forward = call
    pointed = mask()
    if pointed is None or pointed is not given:
        return None
    return Prepared(Problem(pointed.to(device), scale, None, deterministic), backend, forward)


def keep_call(
    key: tuple[Hashable, ...], call: Prepared, q: Tensor, k: Tensor, v: Tensor, given: Mask | Tensor | None
) -> None:
    """Keep a call that was made, unless its backend will repeat it only later."""
    problem, backend, _ = call
    able, forward = Chosen(backend).repeat(q, k, v, problem)
    if able and forward is None:
        return
    if isinstance(given, Mask) and not isinstance(given, Band):
        CACHE.keep(key, _Pointing(weakref.ref(given), problem.scale, problem.deterministic, backend, forward))
    else:
        CACHE.keep(key, Prepared(problem, backend, forward))
