"""The kernel launches of a call, repeated on other tensors of the same layouts.

The layouts of the tensors and a few values determine a launch, except for its addresses: the grid, the numbers, the
compiled kernel, the descriptors. So only the first call with a cache key builds its launches and uses Triton's
launcher. A repeated call fills in the addresses and calls the launcher's C function. No tensor is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


ALIGNMENT = 256
"""Temporary tensors begin at multiples of this many bytes."""


class Room(NamedTuple):
    """The temporary tensors of a repeated pass: parts of one allocation, since launches need only their addresses."""

    places: list[tuple[int | None, int]]
    """For each tensor, the number of the result that takes its place, or None and its offset in bytes."""
    num_bytes: int
    counter: Callable[[torch.device], Tensor] | None
    """Returns the counters of the launches, which follow the temporary tensors."""

    @classmethod
    def of(
        cls,
        temporary: Sequence[Tensor],
        results: Sequence[Tensor] = (),
        counter: Callable[[torch.device], Tensor] | None = None,
    ) -> Room:
        """The room for tensors like these, which may be meta tensors, and of which some may be results."""
        places: list[tuple[int | None, int]] = []
        num_bytes = 0
        for x in temporary:
            same = next((i for i, result in enumerate(results) if result is x), None)
            places.append((same, num_bytes))
            if same is None:
                num_bytes += -(-x.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        return cls(places, num_bytes, counter)

    def allocate(self, results: Sequence[int], device: torch.device) -> tuple[list[int], list[Tensor]]:
        """The addresses of the temporary tensors, given those of the results; and the memory, which must exist until
        the launches are queued."""
        held, start = [], 0
        if self.num_bytes:
            held.append(torch.empty(self.num_bytes, dtype=torch.uint8, device=device))
            start = held[0].data_ptr()
        addresses = [start + offset if same is None else results[same] for same, offset in self.places]
        if self.counter is not None:
            held.append(self.counter(device))
            addresses.append(held[-1].data_ptr())
        return addresses, held


def repeated_forward(
    launches: list[PreparedLaunch] | None, device: torch.device, outputs: Sequence[Tensor], room: Room
) -> Repeat | None:
    """A forward pass that repeats the launches from `recall`; None if there are none. `outputs` are meta tensors with
    the layouts of out and lse."""
    if launches is None:
        return None
    # `empty_like` of a meta tensor would take 25 us.
    (out_shape, out_steps, out_dtype), (lse_shape, lse_steps, lse_dtype) = [
        (x.shape, x.stride(), x.dtype) for x in outputs
    ]
    empty = torch.empty_strided

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Carry | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15 or triton_abi.is_watched():
            return None
        with on(device):
            out = empty(out_shape, out_steps, dtype=out_dtype, device=device)
            lse = empty(lse_shape, lse_steps, dtype=lse_dtype, device=device)
            results = out.data_ptr(), lse.data_ptr()
            temporary, held = room.allocate(results, device)
            _launch_at(launches, [at_q, at_k, at_v, *mask.packed.addresses, *results, *temporary], device)
            del held
        return Carry(out, lse)

    return forward


def repeated_backward(launches: list[PreparedLaunch] | None, device: torch.device, room: Room) -> RepeatBackward | None:
    """`repeated_forward` for a backward pass."""
    if launches is None:
        return None

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads | None:
        # in the order of the launches' builders
        inputs = [dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), lse.data_ptr(), out.data_ptr()]
        if (inputs[0] | inputs[1] | inputs[2] | inputs[3] | inputs[4] | inputs[5]) & 15 or triton_abi.is_watched():
            return None
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        with on(device):
            results = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
            temporary, held = room.allocate(results, device)
            _launch_at(launches, [*inputs, *results, *mask.packed.addresses, *temporary], device)
            del held
        return dq, dk, dv

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
