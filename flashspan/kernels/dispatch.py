"""Which implementation serves a call, and why the others do not.

Implementations are tried in the order of TABLE; the first that does not refuse serves. `backend=` names one instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch
from torch import Tensor

from flashspan.kernels.contract import Dropout, LocalAttention
from flashspan.kernels.masks import Mask


@dataclass(frozen=True)
class Call:
    """What a choice depends on: everything but the data."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    mask: str
    dropout: bool
    deterministic: bool = False
    block: tuple[int, int] | None = None  # of a block map


@dataclass(frozen=True)
class Choice:
    """The implementation that serves, and what each one said; prints as a small table."""

    name: str
    call: Call
    reasons: dict[str, str]

    def load(self) -> LocalAttention:
        """The module that serves; imported when first used, so that Triton is not needed until it is."""
        return _load(self.name)

    def __str__(self) -> str:
        call = self.call
        head = (
            f"{self.name} serves {str(call.dtype).removeprefix('torch.')} on {call.device.type}, head size "
            f"{call.head_dim}, {call.mask} mask{', dropout' if call.dropout else ''}"
            f"{', repeatable gradients' if call.deterministic else ''}"
        )
        return "\n".join([head, *(f"  {name:<18} {reason}" for name, reason in self.reasons.items())])


@cache
def _load(name: str) -> LocalAttention:
    return cast(LocalAttention, importlib.import_module(f"flashspan.kernels.{name}"))


DETERMINISTIC = "+deterministic"
"""Behind a backend's name: an operator's schema carries one string."""

FAILED: dict[str, str] = {}
"""Implementations that could not be compiled or launched on this machine, and what went wrong."""


def retire(name: str, reason: str) -> None:
    """Never choose an implementation again in this process: it has failed here. Warns the first time."""
    if name not in FAILED:
        warnings.warn(
            f"attention backend {name!r} is off for the rest of this process, and calls take the next one, which may "
            f"be slower: it {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    FAILED[name] = reason
    _choose.cache_clear()


def no_hopper(device: torch.device) -> str | None:
    """Why kernels written in Gluon cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs a Hopper GPU (sm_90), not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90), not sm_{major}{minor}"
    return _fault_of_gluon()


def _hopper(call: Call) -> str | None:
    if (fault := no_hopper(call.device)) is not None:
        return fault
    if "hopper" in FAILED:
        return FAILED["hopper"]
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {call.dtype} kernels"
    if call.head_dim % 8:
        return f"needs a head size divisible by 8, not {call.head_dim}"
    if call.mask not in ("Band", "Rows", "Blocks"):
        return f"has no {call.mask} masks"
    if call.dropout:
        return "has no dropout"
    if call.deterministic:
        return "adds dq in no fixed order"
    if call.block is not None:
        from flashspan.kernels.hopper.lists import refusal

        return refusal(call.block, call.head_dim)
    return None


def _repeatable(call: Call) -> str | None:
    if call.block is not None:
        return "has no block maps"
    return _hopper(replace(call, deterministic=False))


def _fault_of_gluon() -> str | None:
    try:
        importlib.import_module("flashspan.kernels.hopper")
    except Exception as error:  # a name may be gone, but also take other arguments or be something else
        return f"cannot be imported with this release of Triton: {type(error).__name__}: {error}"
    return None


def _portable(call: Call) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if call.device.type == "cpu":
        if not _interpreting():
            return "needs a GPU (or TRITON_INTERPRET=1, for debugging)"
        if call.dtype == torch.bfloat16:
            return "has no bfloat16 in Triton's interpreter"
    elif call.device.type != "cuda":
        return f"needs a CUDA or ROCm device, not {call.device.type}"
    elif torch.version.hip is None and torch.cuda.get_device_capability(call.device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(call.device)
        return f"needs Triton, which serves sm_80 and later, not sm_{major}{minor}"
    if call.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"has no {call.dtype} kernels"
    return None


def _cpu(call: Call) -> str | None:
    if call.device.type != "cpu":
        return f"runs on the CPU, not on {call.device.type}"
    if call.mask == "Blocks":
        return "serves intervals of keys, not lists of tiles"
    return "PyTorch's fused CPU attention has no counter-based dropout" if call.dropout else None


def _anything(call: Call) -> str | None:
    return None


TABLE: dict[str, Callable[[Call], str | None]] = {
    "cpu": _cpu,
    "hopper": _hopper,
    "hopper.repeatable": _repeatable,
    "portable": _portable,
    "tiled": _anything,
    "reference": _anything,
}


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    dropout: Dropout | bool | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> Choice:
    """The implementation for these inputs. ValueError when the one asked for cannot serve, saying which can.

    `deterministic`, or DETERMINISTIC behind the backend's name, asks for gradients that repeat bit for bit, as
    `torch.use_deterministic_algorithms` does.
    """
    drops = dropout is not None and dropout is not False
    backend = str(backend)  # of what is no name at all, too, the error below says what is
    repeatable = deterministic or backend.endswith(DETERMINISTIC) or torch.are_deterministic_algorithms_enabled()
    kind, block = type(mask).__name__, getattr(mask, "block", None)
    name = backend.removesuffix(DETERMINISTIC)
    return _choose(name, q.device, q.dtype, q.shape[-1], kind, drops, repeatable, block)


@cache
def _choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    mask: str,
    dropout: bool,
    deterministic: bool,
    block: tuple[int, int] | None,
) -> Choice:
    call = Call(device, dtype, head_dim, mask, dropout, deterministic, block)
    refusals = {name: refuses(call) for name, refuses in TABLE.items()}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if backend not in ("auto", *TABLE):
        raise ValueError(
            f"backend must be one of {', '.join(['auto', *TABLE])}: got {backend!r}; "
            f"these would serve this call: {', '.join(able)}"
        )
    if backend != "auto" and refusals[backend] is not None:
        raise ValueError(
            f"backend {backend!r} cannot serve this call: it {refusals[backend]}; use one of: {', '.join(able)}"
        )
    # The interpreter is for debugging kernels: it serves when named.
    fast = [name for name in able if (name, call.device.type) != ("portable", "cpu")]
    name = fast[0] if backend == "auto" else backend
    reasons = {other: refusal or "could serve" for other, refusal in refusals.items()}
    reasons[name] = "chosen" if backend == "auto" else "chosen by name"
    return Choice(name, call, reasons)


def _interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
