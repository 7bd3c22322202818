"""A call's kernel launches repeated on other tensors of the same layouts.

All of a launch but the addresses follows from how the tensors lie in memory and from a few values: the grid, the
numbers, the compiled kernel, what the copy engine is told. So only the first call of a kind makes its launches and goes
through Triton's launcher; the next ones fill in addresses and call the C function at the end of it. No tensor is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.cache import CACHE
from flashspan.kernels.launch.compiling import launch_together
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks.mask import Packed

KEPT_ADDRESSES = 256
"""How many addresses are kept for each descriptor of a launch; then it starts afresh."""


def replay(
    make: Callable[..., Sequence[Launch] | None],
    given: Sequence[Tensor],
    tables: Packed,
    made: Sequence[Tensor],
    *what: Hashable,
) -> bool:
    """Launch what make(tensors, *what) gives, in order, on the tensors' device, which is the current one. False if it
    gives None: such tensors it does not serve. The tensors are those given, the tables' and those made for this call,
    and what the tables are comes before `what`.

    `make` must be a function of `what`, the layouts of the tensors and whether each falls on 16 bytes, and its launches
    must name no other tensors. The layouts of those made for the call must follow from the rest.
    """
    device = given[0].device
    ours, others = [x.data_ptr() for x in given], [x.data_ptr() for x in made]
    key = _key(make, given, tables, [at & 15 for at in (*ours, *others)], what)
    known = CACHE.get(key)
    if known is not None and not triton_abi.is_watched():
        _launch_at(known, [*ours, *tables.addresses, *others], device)
        return True
    # A caller may pass one tensor twice and two the next time: each place gets an object of its own.
    apart = [x.detach() for x in (*given, *tables.tensors, *made)]
    launches = make(apart, *tables.what, *what)
    if launches is None:
        return False
    kernels = launch_together(launches)
    if not kernels:
        return True
    found = [Prepared.of(launch, kernel, apart) for launch, kernel in zip(launches, kernels, strict=True)]
    complete = [prepared for prepared in found if prepared is not None]
    if len(complete) == len(found):
        CACHE.keep(key, complete)
    return True


def recall(
    make: Callable[..., Any], given: Sequence[Tensor], tables: Packed, num_made: int, *what: Hashable
) -> list[Prepared] | None:
    """What `replay` would launch, given so, where all addresses fall on 16 bytes; None if it has not been called so."""
    return CACHE.get(_key(make, given, tables, [0] * (len(given) + num_made), what))


def launch_all(launches: list[Prepared], given: Sequence[Tensor], tables: Packed, made: Sequence[Tensor]) -> None:
    """Launch what `recall` gave, on other tensors."""
    addresses = [*[x.data_ptr() for x in given], *tables.addresses, *[x.data_ptr() for x in made]]
    _launch_at(launches, addresses, given[0].device)


def _launch_at(launches: list[Prepared], addresses: list[int], device: torch.device) -> None:
    stream = triton_abi.stream_of(device.index)
    for launch in launches:
        launch(addresses, stream)


def _key(
    make: Callable[..., Any], given: Sequence[Tensor], tables: Packed, aligned: list[int], what: tuple[Hashable, ...]
) -> tuple[Hashable, ...]:
    layouts = [(x.shape, x.stride(), x.dtype) for x in given]
    return make, tables.what, what, given[0].device, *layouts, tables.layouts, *aligned


@dataclass(frozen=True)
class Prepared:
    """A launch with all of its arguments but the addresses."""

    launch: Callable[[int, list[Any]], None]
    arguments: list[Any]
    pointers: list[tuple[int, int]]  # which argument is the address of which tensor
    descriptors: list[tuple[int, int, _Descriptor]]

    def __call__(self, addresses: list[int], stream: int) -> None:
        arguments = self.arguments.copy()
        for place, tensor in self.pointers:
            arguments[place] = addresses[tensor]
        for place, tensor, descriptor in self.descriptors:
            arguments[place] = descriptor[addresses[tensor]]
        self.launch(stream, arguments)

    @classmethod
    def of(cls, launch: Launch, compiled: Any, tensors: Sequence[Tensor]) -> Prepared | None:
        """None where it must go the plain way each time: interpreted, another vendor, an unknown release of Triton."""
        found = None if compiled is None or not triton_abi.is_known() else triton_abi.c_launcher(compiled, launch.grid)
        if found is None:
            return None
        run, metadata = found
        index = {id(x): i for i, x in enumerate(tensors)}
        arguments: list[Any] = []
        pointers: list[tuple[int, int]] = []
        descriptors: list[tuple[int, int, _Descriptor]] = []
        for x in launch.arguments:
            # A descriptor becomes three: how the copy engine sees the tensor, its shape, its strides.
            described = hasattr(x, "block_shape")
            base = x.base if described else x
            if not isinstance(base, Tensor):
                arguments.append(x)
                continue
            if id(base) not in index:
                return None
            if described:
                descriptor = _Descriptor(x, metadata[len(descriptors)])
                descriptors.append((len(arguments), index[id(base)], descriptor))
                arguments += [None, *x.shape, *x.strides]
            else:
                pointers.append((len(arguments), index[id(base)]))
                arguments.append(None)
        return cls(run, [*arguments, *launch.constexprs()], pointers, descriptors)


class _Descriptor(dict[int, Any]):
    """What the copy engine is told of tensors of one layout, by address: 128 bytes that take longer to make than to
    launch."""

    def __init__(self, descriptor: Any, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.form, self.metadata = copy.copy(descriptor), metadata
        self.form.base = None

    def __missing__(self, address: int) -> Any:
        if len(self) >= KEPT_ADDRESSES:
            self.clear()
        made = self[address] = triton_abi.encode_descriptor(copy.copy(self.form), self.metadata, address)
        return made
