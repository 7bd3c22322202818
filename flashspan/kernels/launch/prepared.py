"""The launches of a pass without their addresses, which one call of a C function (start.c) starts.

The kernel parameters that are numbers are stored as bytes. A repeated pass only fills in addresses.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.launch import Launch

KEPT_ADDRESSES = 256
"""Number of encoded addresses at which the cache of one descriptor is cleared."""

FORMATS = {"i32": "i", "i64": "q", "fp32": "f", "u1": "?", "i1": "?"}
"""The types of numbers that kernels take, as `struct` formats."""

CONSTANT = -1


class PreparedPass(NamedTuple):
    """The launches of a pass. Called with the addresses of its tensors and a stream, it starts them."""

    start: Callable[[bytes, int, list[Any]], None]
    launches: bytes
    descriptors: list[tuple[int, Descriptor]]  # (tensor, its tensor map by address)

    def __call__(self, addresses: list[int], stream: int) -> None:
        self.start(self.launches, stream, addresses + [maps[addresses[i]] for i, maps in self.descriptors])

    @classmethod
    def of(cls, launches: Sequence[Launch], kernels: Sequence[Any], tensors: Sequence[Tensor]) -> PreparedPass | None:
        """The prepared pass; None if Triton's launcher must always run: interpreter, other vendor, new release."""
        start = None if None in kernels else triton_abi.starter()
        if start is None:
            return None
        index = {id(x): i for i, x in enumerate(tensors)}
        descriptors: list[tuple[int, Descriptor]] = []
        encoded = b""
        for launch, kernel in zip(launches, kernels, strict=True):
            form = triton_abi.launch_form(kernel)
            if form is None:
                return None
            parameters: list[bytes] = []
            maps = iter(form.descriptors)
            for x, kind in zip([*launch.arguments, *launch.constexprs()], form.types, strict=True):
                # A descriptor becomes its tensor map, the tensor's shape, and its strides.
                described = hasattr(x, "block_shape")
                base = x.base if described else x
                if isinstance(base, Tensor) and id(base) not in index:
                    return None
                if described:
                    parameters.append(_parameter(len(tensors) + len(descriptors)))
                    descriptors.append((index[id(base)], Descriptor(x, next(maps))))
                    parameters += [_parameter(CONSTANT, "i", size) for size in x.shape]
                    parameters += [_parameter(CONSTANT, "q", step) for step in x.strides]
                elif isinstance(x, Tensor):
                    parameters.append(_parameter(index[id(x)]))
                elif kind in FORMATS:
                    parameters.append(_parameter(CONSTANT, FORMATS[kind], x))
                elif kind != "constexpr":
                    return None
            parameters += [_parameter(CONSTANT)] * 2  # no scratch memory
            grid = (*launch.grid, 1, 1)[:3]
            head = struct.pack("Q7I4x", form.function, *grid, form.threads, form.shared, form.early, len(parameters))
            encoded += b"".join([head, *parameters]) if min(grid) else b""
        return cls(start, encoded, descriptors)


def _parameter(place: int, kind: str = "Q", constant: float = 0) -> bytes:
    """A Parameter of start.c."""
    return struct.pack(f"q{kind}", place, constant).ljust(16, b"\0")


class Descriptor(dict[int, Any]):
    """The tensor maps of a descriptor, by address, for tensors of one layout. Encoding takes longer than a launch."""

    def __init__(self, descriptor: Any, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.form, self.metadata = copy.copy(descriptor), metadata
        self.form.base = None

    def __missing__(self, address: int) -> Any:
        if len(self) >= KEPT_ADDRESSES:
            self.clear()
        encoding = self[address] = triton_abi.encode_descriptor(copy.copy(self.form), self.metadata, address)
        return encoding
