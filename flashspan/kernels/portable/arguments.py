"""Values of the contract as arguments of a kernel."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flashspan.kernels.contract import Dropout
from flashspan.kernels.masks import Band, Mask, Rows

LOG2E = math.log2(math.e)

KEPT_KINDS = 1024
"""How many kinds of launch of a kernel are remembered; then it starts afresh. Strides are of a kind: so is a length."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: calling it launches; compiling it needs no GPU.

    Triton's own launcher works out at every call which compiled kernel the arguments want. That depends on less than it
    looks at, so what it found is remembered here by that alone: most of a short call's time is spent on the host.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        """Launch on the current device."""
        self.start(self.compiled())

    def compiled(self) -> Any:
        """The kernel as it is compiled for these arguments and the current device, and loaded there: what can go wrong
        before it runs goes wrong here. None where Triton's interpreter runs it."""
        if not (self._first.is_cuda and isinstance(self.kernel, JITFunction)):
            return None
        plan = _PLANS.get(id(self.kernel)) or _PLANS.setdefault(id(self.kernel), _Plan.of(self))
        key = plan.key(self)
        found = plan.compiled.get(key)
        if found is None:
            if len(plan.compiled) >= KEPT_KINDS:
                plan.compiled.clear()
            found = self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)
            _ = found.run  # asking for it loads the kernel
            plan.compiled[key] = found
        return found

    def start(self, compiled: Any) -> None:
        """Launch what `compiled` gave."""
        if compiled is None or watched():
            self.kernel[self.grid](*self.arguments, **self.constants)
            return
        stream = driver.active.get_current_stream(self._first.device.index)
        compiled.run(
            *(*self.grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None,
            *self.arguments, *self.constexprs(),
        )  # fmt: skip

    @property
    def _first(self) -> Tensor:
        found = (x if isinstance(x, Tensor) else getattr(x, "base", None) for x in self.arguments)
        return next(x for x in found if x is not None)

    def constexprs(self) -> list[Any]:
        """The constants that are the kernel's own parameters, which stand behind the arguments, in its order."""
        return [self.constants[name] for name in self.kernel.arg_names[len(self.arguments) :]]


def watched() -> bool:
    """Whether somebody, a profiler, listens to Triton's launches: they must all go Triton's way then."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


@dataclass(frozen=True)
class _Plan:
    """Where a kernel's arguments of each kind stand, and what was compiled for which of them."""

    tensors: tuple[int, ...]
    fixed: tuple[int, ...]  # numbers the kernel is compiled for
    free: tuple[int, ...]  # numbers it is not, beyond whether they fit 32 bits
    descriptors: tuple[int, ...]
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, launch: Launch) -> _Plan:
        names, arguments = launch.kernel.arg_names, launch.arguments
        free = set(launch.kernel.do_not_specialize)
        numbers = [i for i, x in enumerate(arguments) if isinstance(x, int)]
        return cls(
            tuple(i for i, x in enumerate(arguments) if isinstance(x, Tensor)),
            tuple(i for i in numbers if names[i] not in free),
            tuple(i for i in numbers if names[i] in free),
            tuple(i for i, x in enumerate(arguments) if hasattr(x, "block_shape")),
        )

    def key(self, launch: Launch) -> tuple[Any, ...]:
        """Equal for launches that want the same compiled kernel on the same device."""
        x = launch.arguments
        wide = [i for i in self.free if not -0x80000000 <= x[i] < 0x80000000]
        return (
            launch._first.device.index,
            *launch.constants.values(),
            *[(x[i].dtype, x[i].data_ptr() & 15) for i in self.tensors],
            *[x[i] for i in self.fixed],
            *[(x[i].base.dtype, *x[i].block_shape) for i in self.descriptors],
            *wide,
        )


_PLANS: dict[int, _Plan] = {}


def mask_arguments(
    mask: Mask, num_queries: int, num_keys: int, q: Tensor
) -> tuple[bool, Tensor, Tensor, Tensor, Tensor, int, int, int, int, bool]:
    """(table?, start, end, first, last, their batch strides, lo, hi, convex): a band's tensors are never read."""
    if isinstance(mask, Band):
        lo, hi = mask.bounds(num_queries, num_keys)
        return False, q, q, q, q, 0, 0, lo, hi, True
    mask = mask.to(q.device)
    assert isinstance(mask, Rows), "lists of tiles have kernels of their own"
    batched = mask.start.dim() == 2 and mask.start.shape[0] > 1
    strides = (num_queries, num_keys) if batched else (0, 0)
    return True, mask.start, mask.end, mask.first, mask.last, *strides, 0, 0, mask.convex


def dropout_arguments(dropout: Dropout | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor, int, float, int, int]:
    """(seed, query positions, key positions, threshold, gain, first stream, batch stride)."""
    if dropout is None:
        return q, q, q, 0, 1.0, 0, 0
    qpos, kpos = dropout.q_positions, dropout.k_positions
    assert (qpos is None) == (kpos is None), "dropout takes both position tables or neither"
    stride = q.shape[1] if dropout.batch_stride is None else dropout.batch_stride
    return (
        dropout.seed,
        q if qpos is None else qpos,
        q if kpos is None else kpos,
        dropout.threshold,
        dropout.gain,
        dropout.first,
        stride,
    )


FAR = 2**31 // 256
"""How far apart the rows of a tile are too far for the kernels' 32-bit offsets inside it."""


def is_near(x: Tensor) -> bool:
    """Whether the kernels reach all rows of a tile."""
    return x.stride(2) < FAR or x.shape[2] == 1


def near(x: Tensor) -> Tensor:
    """x, or a copy that is near."""
    return x if is_near(x) else x.contiguous()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; make it the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()
