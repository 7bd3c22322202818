"""The cache of calls of `attention`: the first call with a cache key is checked and prepared, later ones reuse that.

On a GPU a short call waits for the host. Most of the host's work depends only on the tensors' layouts and a few values:
whether the arguments are valid, which backend runs the call, what is launched. The cache stores the results of this
work. It stores no tensor, and only a weak reference to the caller's mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from flashspan.kernels.backends import Chosen
from flashspan.kernels.contract import Problem, Repeat, RepeatBackward
from flashspan.kernels.launch.cache import CACHE
from flashspan.kernels.masks import Band, Mask
from flashspan.kernels.torch_private import has_tangents, is_in_torch_dispatch_mode, is_transformed

PLAIN = {Tensor, torch.nn.Parameter}


class Prepared(NamedTuple):
    """The checked arguments of a call, without its tensors, and its passes if the backend can repeat them.

    `backwards` has a backward pass for each layout of dout and saved tensors so far; None if the call is not cached.
    """

    problem: Problem
    backend: str
    forward: Repeat | None = None
    backwards: dict[Hashable, RepeatBackward] | None = None


class _WithMask(NamedTuple):
    """A prepared call with a weak reference to the caller's mask."""

    mask: weakref.ref[Mask]
    scale: float
    deterministic: bool
    backend: str
    forward: Repeat | None
    backwards: dict[Hashable, RepeatBackward]


def is_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is eager and its tensors are plain: no compiler, dispatch mode, tensor subclass or meta tensor."""
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
    """The cache key of an eager call: everything the call depends on, except its tensors' values and autograd.

    None for calls that are not cached: not on a GPU, with dropout, under autocast, or with a mask to build in each
    call.
    """
    if not q.is_cuda or torch.is_autocast_enabled("cuda"):
        return None
    if is_transformed() or has_tangents():
        return None
    if type(dropout) is not float or dropout or type(backend) is not str or type(causal) is not bool:
        return None
    if type(window) not in (NoneType, int) or type(scale) not in (NoneType, int, float):
        return None
    if mask is not None and (causal or window is not None or isinstance(mask, Tensor)):
        return None
    try:
        q_steps, k_steps, v_steps = q.stride(), k.stride(), v.stride()
        if not q_steps[-1] == k_steps[-1] == v_steps[-1] == 1:  # attention copies such tensors first
            return None
    except (RuntimeError, IndexError):  # sparse and nested tensors, tensors without dimensions
        return None
    dtype = q.dtype
    return (
        "attention", q.shape, k.shape, v.shape, q_steps, k_steps, v_steps, dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(),
        causal, window, mask if isinstance(mask, Band) else id(mask), scale, backend, bool(deterministic),
        torch.are_deterministic_algorithms_enabled(),
        dtype == torch.float32 and torch.get_float32_matmul_precision(),
    )  # fmt: skip


def kept_call(key: tuple[Hashable, ...], mask: Mask | Tensor | None, device: torch.device) -> Prepared | None:
    """The cached call, or None. The key contains the mask's id; the result is None if a new mask has reused that id."""
    call: Prepared | _WithMask | None = CACHE.get(key)
    if not isinstance(call, _WithMask):
        return call
    reference, scale, deterministic, backend, forward, backwards = call
    cached = reference()
    if cached is None or cached is not mask:
        return None
    return Prepared(Problem(cached.to(device), scale, None, deterministic), backend, forward, backwards)


def keep_call(
    key: tuple[Hashable, ...], call: Prepared, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None
) -> None:
    """Cache a call that has run; not if its backend can repeat calls, but has no repeated pass for this one yet."""
    problem, backend = call.problem, call.backend
    able, forward = Chosen(backend).repeat(q, k, v, problem)
    if able and forward is None:
        return
    if isinstance(mask, Mask) and not isinstance(mask, Band):
        CACHE.keep(key, _WithMask(weakref.ref(mask), problem.scale, problem.deterministic, backend, forward, {}))
    else:
        CACHE.keep(key, Prepared(problem, backend, forward, {}))
