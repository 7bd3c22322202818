"""A kernel launch as data."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.cache import CACHE

RECORDED: ContextVar[list[Launch]] = ContextVar("RECORDED")
"""Where launches on meta tensors go, which run nothing; set by compiling.py."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: calling it launches; compiling it needs no GPU.

    Triton's own launcher works out at every call which compiled kernel the arguments want. That depends on less than it
    looks at, so what it found is kept by that alone: most of a short call's time is spent on the host.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        """Launch on the current device; on meta tensors, only record the launch."""
        if self.first.is_meta:
            RECORDED.get().append(self)
        else:
            self.start(self.compiled())

    def compiled(self) -> Any:
        """The kernel as it is compiled for these arguments and the current device, and loaded there: what can go wrong
        before it runs goes wrong here, as KernelFailed. None where Triton's interpreter runs it."""
        if not self._is_compiled():
            return None
        key = self.key()
        found = CACHE.get(key)
        if found is None:
            try:
                found = triton_abi.compile_and_load(self.kernel, self.arguments, self.grid, self.constants)
            except Exception as error:
                if not triton_abi.is_of_the_compiler(error):
                    raise
                reason = f"could not be compiled here: {type(error).__name__}: {error}"[:500]
                raise KernelFailed(reason) from error
            CACHE.keep(key, found)
        return found

    def is_missing(self) -> bool:
        """Whether `compiled` would have to compile it, or read it from Triton's cache."""
        return self._is_compiled() and self.key() not in CACHE

    def key(self) -> tuple[Any, ...]:
        """Equal for launches that want the same compiled kernel on the same device."""
        places = CACHE.get(("places", id(self.kernel)))
        if places is None:
            places = _Places.of(self)
            CACHE.keep(("places", id(self.kernel)), places)
        return places.key(self)

    def start(self, compiled: Any) -> None:
        """Launch what `compiled` gave."""
        if compiled is None or triton_abi.is_watched() or not triton_abi.is_known():
            self.kernel[self.grid](*self.arguments, **self.constants)
            return
        stream = triton_abi.stream_of(self.first.device.index)
        triton_abi.run(compiled, self.grid, stream, [*self.arguments, *self.constexprs()])

    def _is_compiled(self) -> bool:
        return self.first.is_cuda and triton_abi.is_kernel(self.kernel)

    @property
    def device_index(self) -> int | None:
        """The index of the GPU it runs on."""
        return self.first.device.index

    @property
    def first(self) -> Tensor:
        """Its first tensor."""
        found = (x if isinstance(x, Tensor) else getattr(x, "base", None) for x in self.arguments)
        return next(x for x in found if x is not None)

    def constexprs(self) -> list[Any]:
        """The constants that are the kernel's own parameters, which stand behind the arguments, in its order."""
        return [self.constants[name] for name in self.kernel.arg_names[len(self.arguments) :]]


@dataclass(frozen=True)
class _Places:
    """Which of a kernel's arguments a compiled kernel depends on."""

    tensors: tuple[int, ...]
    fixed: tuple[int, ...]  # numbers the kernel is compiled for
    free: tuple[int, ...]  # numbers it is not, beyond whether they fit 32 bits
    descriptors: tuple[int, ...]

    @classmethod
    def of(cls, launch: Launch) -> _Places:
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
        x = launch.arguments
        wide = [i for i in self.free if not -0x80000000 <= x[i] < 0x80000000]
        return (
            "compiled",
            id(launch.kernel),
            launch.first.device.index,
            *launch.constants.values(),
            *[(x[i].dtype, x[i].data_ptr() & 15) for i in self.tensors],
            *[x[i] for i in self.fixed],
            *[(x[i].base.dtype, *x[i].block_shape) for i in self.descriptors],
            *wide,
        )


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device; make it the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def on_index(index: int | None) -> contextlib.AbstractContextManager[Any]:
    """The same by a GPU's index; None changes nothing."""
    return _HERE if index is None else torch.cuda.device(index)


_HERE = contextlib.nullcontext()
