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
"""The list to which launches on meta tensors are added, instead of running; set by compiling.py."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: calling it launches; compiling it needs no GPU.

    At every launch, Triton's launcher derives from all arguments which compiled kernel they need. Here the compiled
    kernel is cached under a shorter key, of only the properties that it depends on, because short calls spend most of
    their time on the host.
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
        """The kernel, compiled for these arguments and loaded on the current device; None in Triton's interpreter.

        KernelFailed if it cannot be compiled or loaded.
        """
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
        """Whether `compiled` would have to compile the kernel, or read it from Triton's cache."""
        return self._is_compiled() and self.key() not in CACHE

    def key(self) -> tuple[Any, ...]:
        """The cache key: equal for launches that need the same compiled kernel on the same device."""
        constants = tuple(self.constants.values())  # they determine which arguments are None
        places = CACHE.get(("places", id(self.kernel), constants))
        if places is None:
            places = _Places.of(self)
            CACHE.keep(("places", id(self.kernel), constants), places)
        return places.key(self)

    def start(self, compiled: Any) -> None:
        """Launch the result of `compiled`."""
        if compiled is None or triton_abi.is_watched() or not triton_abi.is_known():
            self.kernel[self.grid](*self.arguments, **self.constants)
            return
        stream = triton_abi.stream_of(self.first.device.index)
        triton_abi.run(compiled, self.grid, stream, [*self.arguments, *self.constexprs()])

    def _is_compiled(self) -> bool:
        return self.first.is_cuda and triton_abi.is_kernel(self.kernel)

    @property
    def first(self) -> Tensor:
        """The first tensor: the first argument, or the tensor that it describes."""
        x = self.arguments[0]
        return x if isinstance(x, Tensor) else x.base

    def constexprs(self) -> list[Any]:
        """The values of the kernel's constexpr parameters, which follow the arguments, in the kernel's order."""
        return [self.constants[name] for name in self.kernel.arg_names[len(self.arguments) :]]


@dataclass(frozen=True)
class _Places:
    """The positions of a kernel's arguments, by how the compiled kernel depends on them."""

    tensors: tuple[int, ...]  # on dtype and alignment
    fixed: tuple[int, ...]  # on the number itself
    free: tuple[int, ...]  # on whether the number fits 32 bits
    descriptors: tuple[int, ...]  # on dtype and block shape

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
        """The cache key: equal for launches that need the same compiled kernel on the same device."""
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
    """A context in which `device` is current: Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def on_index(index: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which the GPU of this index is current; None changes nothing."""
    return _HERE if index is None else torch.cuda.device(index)


_HERE = contextlib.nullcontext()
