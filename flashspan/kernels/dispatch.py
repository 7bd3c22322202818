"""Which implementation serves a call, and why the others do not.

Implementations are tried in the order of TABLE; the first that does not refuse serves. `backend=` names one instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Choice:
    """The implementation that serves, and what each one said; prints as a small table."""

    name: str
    call: Call
    reasons: dict[str, str]

    def load(self) -> LocalAttention:
        """The module that serves; imported when first used, so that Triton is not needed until it is."""
        return cast(LocalAttention, importlib.import_module(f"flashspan.kernels.{self.name}"))

    def __str__(self) -> str:
        call = self.call
        head = (
            f"{self.name} serves {str(call.dtype).removeprefix('torch.')} on {call.device.type}, head size "
            f"{call.head_dim}, {call.mask} mask{', dropout' if call.dropout else ''}"
        )
        return "\n".join([head, *(f"  {name:<10} {reason}" for name, reason in self.reasons.items())])


def _portable(call: Call) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if call.device.type == "cpu":
        if not _interpreting():
            return "needs a GPU (or TRITON_INTERPRET=1, for debugging)"
        return "has no bfloat16 in Triton's interpreter" if call.dtype == torch.bfloat16 else None
    if call.device.type != "cuda":
        return f"needs a CUDA or ROCm device, not {call.device.type}"
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
    "portable": _portable,
    "tiled": _anything,
    "reference": _anything,
}


def choose(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, dropout: Dropout | bool | None = None, backend: str = "auto"
) -> Choice:
    """The implementation for these inputs. ValueError when the one asked for cannot serve, saying which can."""
    call = Call(q.device, q.dtype, q.shape[-1], type(mask).__name__, dropout is not None and dropout is not False)
    return _choose(call, backend)


@cache
def _choose(call: Call, backend: str) -> Choice:
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
