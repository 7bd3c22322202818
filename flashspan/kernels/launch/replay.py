"""The kernel launches of a call, repeated on other tensors of the same layouts.

The layouts of the tensors and a few values determine a launch, except for its addresses: the grid, the numbers, the
compiled kernel, the descriptors. So only the first call with a cache key builds its launches and uses Triton's
launcher. A repeated call fills in the addresses and calls the launcher's C function. No tensor is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.contract import Carry, Grads, Repeat, RepeatBackward
from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.cache import CACHE
from flashspan.kernels.launch.compiling import launch_together
from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.masks.mask import Mask, Packed

KEPT_ADDRESSES = 256
"""Number of encoded addresses at which the cache of one descriptor is cleared."""


def replay(
    build: Callable[..., Sequence[Launch] | None],
    inputs: Sequence[Tensor],
    tables: Packed,
    outputs: Sequence[Tensor],
    *values: Hashable,
) -> bool:
    """Run the launches build(tensors, *tables.what, *values) in order on the current device. False if it returns None.

    The tensors are the inputs, the mask's tables, and the outputs, which include temporary ones. `build` may depend
    only on its values, the tensors' layouts and whether each address is a multiple of 16; its launches may use no other
    tensors. The layouts of the outputs must follow from the other arguments.
    """
    device = inputs[0].device
    before, after = [x.data_ptr() for x in inputs], [x.data_ptr() for x in outputs]
    key = _key(build, inputs, tables, [address & 15 for address in (*before, *after)], values)
    known = CACHE.get(key)
    if known is not None and not triton_abi.is_watched():
        _launch_at(known, [*before, *tables.addresses, *after], device)
        return True
    # This call may pass one tensor twice, and the next one two tensors. So each argument becomes an object of its own.
    tensors = [x.detach() for x in (*inputs, *tables.tensors, *outputs)]
    launches = build(tensors, *tables.what, *values)
    if launches is None:
        return False
    kernels = launch_together(launches)
    if not kernels:
        return True
    found = [PreparedLaunch.of(launch, kernel, tensors) for launch, kernel in zip(launches, kernels, strict=True)]
    complete = [prepared for prepared in found if prepared is not None]
    if len(complete) == len(found):
        CACHE.keep(key, complete)
    return True


def recall(
    build: Callable[..., Any], inputs: Sequence[Tensor], tables: Packed, num_outputs: int, *values: Hashable
) -> list[PreparedLaunch] | None:
    """The launches that `replay` has cached for such a call with 16-byte aligned addresses; None if there are none."""
    return CACHE.get(_key(build, inputs, tables, [0] * (len(inputs) + num_outputs), values))


def launch_all(
    launches: list[PreparedLaunch], inputs: Sequence[Tensor], tables: Packed, outputs: Sequence[Tensor]
) -> None:
    """Run the launches from `recall` on other tensors."""
    addresses = [*[x.data_ptr() for x in inputs], *tables.addresses, *[x.data_ptr() for x in outputs]]
    _launch_at(launches, addresses, inputs[0].device)


def repeated_forward(
    launches: list[PreparedLaunch] | None, device: torch.device, room: Callable[[Tensor, Tensor], Sequence[Tensor]]
) -> Repeat | None:
    """A forward pass that repeats the launches from `recall`; None if there are none. `room(q, v)` returns
    uninitialised out and lse, then temporary tensors."""
    if launches is None:
        return None

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Carry | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or triton_abi.is_watched():
            return None
        with on(device):
            outputs = room(q, v)
            launch_all(launches, (q, k, v), mask.packed, outputs)
        return Carry(outputs[0], outputs[1])

    return forward


def repeated_backward(
    launches: list[PreparedLaunch] | None, device: torch.device, room: Callable[[Grads], Sequence[Tensor]]
) -> RepeatBackward | None:
    """`repeated_forward` for a backward pass. `room(grads)` returns the tensors that follow the gradients."""
    if launches is None:
        return None

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads | None:
        tensors = dout, q, k, v, lse, out  # in the order of the launches' builders
        if any(x.data_ptr() & 15 for x in tensors) or triton_abi.is_watched():
            return None
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        with on(device):
            launch_all(launches, (*tensors, *grads), mask.packed, room(grads))
        return grads

    return backward


def _launch_at(launches: list[PreparedLaunch], addresses: list[int], device: torch.device) -> None:
    stream = triton_abi.stream_of(device.index)
    for launch in launches:
        launch(addresses, stream)


def _key(
    build: Callable[..., Any],
    inputs: Sequence[Tensor],
    tables: Packed,
    alignments: list[int],
    values: tuple[Hashable, ...],
) -> tuple[Hashable, ...]:
    layouts = [(x.shape, x.stride(), x.dtype) for x in inputs]
    return build, tables.what, values, inputs[0].device, *layouts, tables.layouts, *alignments


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch without its addresses."""

    launch: Callable[[int, list[Any]], None]
    arguments: list[Any]
    pointers: list[tuple[int, int]]  # (argument, tensor whose address it is)
    descriptors: list[tuple[int, int, _Descriptor]]  # (argument, tensor, its descriptor by address)

    def __call__(self, addresses: list[int], stream: int) -> None:
        arguments = self.arguments.copy()
        for place, tensor in self.pointers:
            arguments[place] = addresses[tensor]
        for place, tensor, descriptor in self.descriptors:
            arguments[place] = descriptor[addresses[tensor]]
        self.launch(stream, arguments)

    @classmethod
    def of(cls, launch: Launch, compiled: Any, tensors: Sequence[Tensor]) -> PreparedLaunch | None:
        """The prepared launch; None if Triton's launcher must always run: interpreter, other vendor, new release."""
        found = None if compiled is None or not triton_abi.is_known() else triton_abi.c_launcher(compiled, launch.grid)
        if found is None:
            return None
        run, metadata = found
        index = {id(x): i for i, x in enumerate(tensors)}
        arguments: list[Any] = []
        pointers: list[tuple[int, int]] = []
        descriptors: list[tuple[int, int, _Descriptor]] = []
        for x in launch.arguments:
            # A descriptor becomes three arguments: its encoding, the tensor's shape, and its strides.
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
    """The encodings of a descriptor, by address, for tensors of one layout. Encoding takes longer than a launch."""

    def __init__(self, descriptor: Any, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.form, self.metadata = copy.copy(descriptor), metadata
        self.form.base = None

    def __missing__(self, address: int) -> Any:
        if len(self) >= KEPT_ADDRESSES:
            self.clear()
        encoding = self[address] = triton_abi.encode_descriptor(copy.copy(self.form), self.metadata, address)
        return encoding
