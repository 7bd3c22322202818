"""The implementations of one device's attention, and the choice between them.

A call runs on the first of `BACKENDS` that does not refuse it, or on the one that `backend=` names. A backend whose
kernels fail to compile or load is retired for equal `Call`s, with one warning, and the next one is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flashspan.kernels.contract import Carry, LocalAttention, Problem, Repeat, RepeatBackward
from flashspan.kernels.delta import row_delta
from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.launch.cache import CACHE
from flashspan.kernels.masks import Band, Mask, Rows

Result = TypeVar("Result")


class Call(NamedTuple):
    """The properties of a call that the choice of a backend depends on."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    mask: str
    dropout: bool
    deterministic: bool = False
    block: tuple[int, int] | None = None  # the block size of a block map


@dataclass(frozen=True)
class Backend:
    """An implementation: a module with the functions of `LocalAttention`."""

    name: str
    module: str
    refuses: Callable[[Call], str | None]
    """Return the reason why the backend cannot run a call; None if it can."""
    tuned_on: str | None = None
    """The GPU on which the tile sizes were measured; None if the backend has none."""


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and for each backend the reason. Its text is a small table."""

    backend: Backend
    call: Call
    reasons: dict[str, str]

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def note(self) -> str | None:
        """A note if the tile sizes were not measured on this GPU, else None."""
        tuned_on, device = self.backend.tuned_on, self.call.device
        gpu = torch.cuda.get_device_name(device) if tuned_on and device.type == "cuda" else tuned_on
        return None if gpu == tuned_on else f"its tile sizes were measured on an {tuned_on}, not on this GPU, {gpu}"

    def __str__(self) -> str:
        call = self.call
        head = (
            f"{self.name} computes {str(call.dtype).removeprefix('torch.')} on {call.device.type}, head size "
            f"{call.head_dim}, {call.mask} mask{', dropout' if call.dropout else ''}"
            f"{', deterministic gradients' if call.deterministic else ''}"
        )
        lines = [f"  {name:<18} {reason}" for name, reason in self.reasons.items()]
        return "\n".join([head, *([f"  note: {self.note}"] if self.note else []), *lines])


@cache
def _load(backend: Backend) -> LocalAttention:
    """The backend's module, imported on first use, because Triton may not be installed."""
    return cast(LocalAttention, importlib.import_module(backend.module))


RETIRED: dict[tuple[str, Call], str] = {}
"""(backend, call) -> why the backend's kernels failed to compile or load on this machine."""


def no_hopper(device: torch.device) -> str | None:
    """The reason why Gluon kernels for Hopper cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs a Hopper GPU (sm_90), not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90), not sm_{major}{minor}"
    try:
        importlib.import_module("flashspan.kernels.hopper")
    except Exception as error:  # a name that changed in Triton may raise any error
        return f"cannot be imported with this release of Triton: {type(error).__name__}: {error}"
    return None


def _hopper(call: Call) -> str | None:
    if (fault := no_hopper(call.device)) is not None:
        return fault
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {call.dtype} kernels"
    if call.head_dim % 8:
        return f"needs a head size divisible by 8, not {call.head_dim}"
    if call.mask not in ("Band", "Rows", "Blocks"):
        return f"has no {call.mask} masks"
    if call.dropout:
        return "has no dropout"
    if call.block is not None:
        if call.deterministic:
            return "adds dq of block maps in no fixed order"
        from flashspan.kernels.hopper.lists import refusal

        return refusal(call.block, call.head_dim)
    return None


def _portable(call: Call) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if call.device.type == "cpu":
        from flashspan.kernels.launch import triton_abi

        if not triton_abi.is_interpreting():
            return "needs a GPU (or TRITON_INTERPRET=1, for debugging)"
        if call.dtype == torch.bfloat16:
            return "has no bfloat16 in Triton's interpreter"
    elif call.device.type != "cuda":
        return f"needs a CUDA or ROCm device, not {call.device.type}"
    elif torch.version.hip is None and torch.cuda.get_device_capability(call.device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(call.device)
        return f"needs Triton, which supports sm_80 and later, not sm_{major}{minor}"
    if call.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"has no {call.dtype} kernels"
    return None


def _cpu(call: Call) -> str | None:
    if call.device.type != "cpu":
        return f"runs on the CPU, not on {call.device.type}"
    if call.mask == "Blocks":
        return "supports masks with one interval of keys per query, not block maps"
    return "has no counter-based dropout, because PyTorch's fused CPU attention has none" if call.dropout else None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpu", "flashspan.kernels.cpu", _cpu),
        Backend("hopper", "flashspan.kernels.hopper", _hopper, "NVIDIA H200"),
        Backend("portable", "flashspan.kernels.portable", _portable, "NVIDIA H200"),
        Backend("tiled", "flashspan.kernels.tiled", lambda call: None),
        Backend("reference", "flashspan.kernels.reference", lambda call: None),
    )
}


def choose(
    q: Tensor, mask: Mask, *, dropout: bool = False, deterministic: bool = False, backend: str = "auto"
) -> Choice:
    """Choose the backend for inputs like q under a mask. ValueError, with the able backends, if the named one refuses.

    deterministic: gradients must be bitwise reproducible, as with `torch.use_deterministic_algorithms`.
    """
    return _choose(str(backend), _call(q, mask, dropout, deterministic))


def _call(q: Tensor, mask: Mask, dropout: bool, deterministic: bool) -> Call:
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    block = getattr(mask, "block", None)
    return Call(q.device, q.dtype, q.shape[-1], type(mask).__name__, dropout, deterministic, block)


@cache
def _choose(backend: str, call: Call) -> Choice:
    refusals = {name: RETIRED.get((name, call)) or one.refuses(call) for name, one in BACKENDS.items()}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"backend must be one of {', '.join(['auto', *BACKENDS])}: got {backend!r}; "
            f"these support this call: {', '.join(able)}"
        )
    if backend != "auto" and refusals[backend] is not None:
        raise ValueError(
            f"backend {backend!r} does not support this call: it {refusals[backend]}; use one of: {', '.join(able)}"
        )
    # Triton's interpreter is for debugging kernels: it is used only if named.
    fast = [name for name in able if (name, call.device.type) != ("portable", "cpu")]
    name = fast[0] if backend == "auto" else backend
    reasons = {other: refusal or "supports this call too" for other, refusal in refusals.items()}
    reasons[name] = "chosen" if backend == "auto" else "chosen by name"
    return Choice(BACKENDS[name], call, reasons)


def retire(choice: Choice, reason: str) -> None:
    """Warn once, and never choose this backend again for equal calls."""
    warnings.warn(
        f"attention backend {choice.name!r} {reason}; from now on the next backend, which may be slower, computes "
        f"calls like this one ({str(choice).splitlines()[0]})",
        RuntimeWarning,
        stacklevel=2,
    )
    RETIRED[choice.name, choice.call] = reason
    forget()


def forget() -> None:
    """Clear the caches of choices and calls."""
    _choose.cache_clear()
    CACHE.clear()


def backward_of_output(local: Any, given: tuple[Tensor, ...], problem: Problem, **into: Tensor) -> None:
    """`backward_of_output` of a backend's module, given dout, q, k, v, out and lse; if it has none, `backward` with a
    delta computed here."""
    of_output = getattr(local, "backward_of_output", None)
    if of_output is not None:
        of_output(*given, problem, **into)
    else:
        dout, q, k, v, out, lse = given
        local.backward(dout, q, k, v, lse, row_delta(dout, out), problem, accumulate=False, **into)


class Chosen(NamedTuple):
    """`LocalAttention` that chooses a backend for each call."""

    backend: str = "auto"
    deterministic: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **rest: Any) -> Carry:
        return self._serve(lambda local, problem: local.forward(q, k, v, problem, **rest), q, problem, True)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, problem: Problem, **rest: Any
    ) -> None:
        tensors = (dout, q, k, v, lse, delta)
        self._serve(lambda local, problem: local.backward(*tensors, problem, **rest), q, problem)

    def backward_of_output(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem, **into: Tensor
    ) -> None:
        """backward without `accumulate`, with delta = rowsum(dout * out), where `out` is the output over all keys."""
        given = (dout, q, k, v, out, lse)
        self._serve(lambda local, problem: backward_of_output(local, given, problem, **into), q, problem)

    def compile_backward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> None:
        """Start compiling the kernels of a call's backward pass while forward compiles; once for similar calls. Only
        for intervals on a GPU and backends that compile. Other backward passes compile at their first call."""
        mask, device = problem.mask, q.device
        kind = mask if isinstance(mask, Band) else type(mask)
        key = ("backward ahead", self.backend, device, kind, *problem[1:], q.dtype, q.shape, k.shape)
        if device.type != "cuda" or not isinstance(mask, (Band, Rows)) or problem.dropout is not None or key in CACHE:
            return
        CACHE.keep(key, True)
        from flashspan.kernels.launch.compiling import compile_ahead, launches_of

        like_q, like_k, like_v = (torch.empty_like(x, device="meta") for x in (q, k, v))
        lse = like_q.new_empty(q.shape[:3], dtype=torch.float32)
        tensors, into = (like_q, like_q, like_k, like_v, like_q, lse), {"dq": like_q, "dk": like_k, "dv": like_v}

        def start(local: Any, problem: Problem) -> None:
            if not getattr(local, "COMPILES", False):
                return
            alike = problem._replace(mask=mask.to("meta"))
            launches = launches_of(lambda: backward_of_output(local, tensors, alike, **into))
            compile_ahead(launches, device.index)

        self._serve(start, q, problem)

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[bool, Repeat | None]:
        """Return whether the backend's module has `repeat_forward`, and what that returns for this call, with out in
        q's dtype: the repeated forward pass if such a call has run, else None."""
        repeat_forward = self._serve(lambda local, _: getattr(local, "repeat_forward", None), q, problem)
        return repeat_forward is not None, repeat_forward and repeat_forward(q, k, v, problem, q.dtype)

    def repeat_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
    ) -> RepeatBackward | None:
        """The repeated backward pass of a call whose gradients were just computed; None if there is none."""

        def find(local: Any, problem: Problem) -> RepeatBackward | None:
            repeat = getattr(local, "repeat_backward", None)
            return repeat and repeat(dout, q, k, v, out, lse, problem)

        return self._serve(find, q, problem)

    def _serve(
        self, serve: Callable[[LocalAttention, Problem], Result], q: Tensor, problem: Problem, or_raise: bool = False
    ) -> Result:
        """The result of `serve` on the chosen backend, or on the next one if its kernels fail.

        If the named backend was retired in forward, backward uses any backend; with `or_raise`, it raises ValueError.
        """
        call = _call(q, problem.mask, problem.dropout is not None, self.deterministic or problem.deterministic)
        if call.deterministic != problem.deterministic:
            problem = problem._replace(deterministic=True)
        retired = RETIRED and not or_raise and (self.backend, call) in RETIRED
        choice = _choose("auto" if retired else self.backend, call)
        while True:
            try:
                return serve(_load(choice.backend), problem)
            except KernelFailed as failure:
                retire(choice, str(failure))
                choice = _choose("auto", call)
