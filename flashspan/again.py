"""Calls of `attention` that have been made before.

On a GPU a short call waits for the host, and most of what the host does, it has done before: it checks the arguments,
chooses an implementation and makes its launches, all of which follow from how the tensors lie and from a few values. So
the first plain call of a kind leaves behind what the next one of that kind is to do. No tensor is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flashspan.kernels import dispatch
from flashspan.kernels.blocks import Blocks
from flashspan.kernels.contract import Again, LocalAttention
from flashspan.kernels.masks import Band, Mask, Rows

KEPT = 256
"""How many kinds are remembered; then it starts afresh."""

PLAIN = {Tensor, torch.nn.Parameter}


class Known(NamedTuple):
    """A call that was made: its forward pass, and what it found mask, scale and backend to be. A mask the caller gave
    is his: it is only pointed at, and may be gone."""

    forward: Again
    mask: Callable[[], Mask | None]
    scale: float
    backend: str


_KNOWN: dict[tuple[Hashable, ...], Known] = {}


def plainly_eager(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody watches: no compiler, no dispatch mode, no tensor subclass, no mere shapes."""
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        and not q.is_meta
    )


def kind_of(
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
    where nothing is remembered: not on a GPU, somebody watches, or there is a mask to be made in each call."""
    if not (isinstance(q, Tensor) and q.is_cuda and plainly_eager(q, k, v)) or torch.is_autocast_enabled("cuda"):
        return None
    if not q.layout == k.layout == v.layout == torch.strided:
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
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
        q.shape, k.shape, v.shape, *steps, q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, causal, window, mask if isinstance(mask, Band) else id(mask), scale, backend, bool(deterministic),
        torch.are_deterministic_algorithms_enabled(), len(dispatch.FAILED),
    )  # fmt: skip


def known(kind: tuple[Hashable, ...] | None, given: Mask | Tensor | None) -> tuple[Known, Mask] | None:
    """What was remembered of this kind, and its mask. Another may lie where one has been that is gone."""
    found = None if kind is None else _KNOWN.get(kind)
    mask = None if found is None else found.mask()
    if found is None or mask is None or not (mask is given or given is None or isinstance(given, Band)):
        return None
    return found, mask


def remember(
    kind: tuple[Hashable, ...],
    local: LocalAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Mask | Tensor | None,
    mask: Mask,
    scale: float,
    backend: str,
) -> None:
    """Keep what a call did, if its implementation can do it once more."""
    make = getattr(local, "again", None)
    forward = make and make(q, k, v, mask=mask, scale=scale, out_dtype=q.dtype)
    if forward is None:
        return
    if len(_KNOWN) >= KEPT:
        _KNOWN.clear()
    points = weakref.ref(given) if isinstance(given, (Rows, Blocks)) else lambda: mask
    _KNOWN[kind] = Known(forward, points, scale, backend)
