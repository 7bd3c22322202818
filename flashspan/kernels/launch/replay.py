"""The kernel launches of a call, repeated on other tensors of the same layouts.

The layouts of the tensors and a few values determine a launch, except for its addresses: the grid, the numbers, the
compiled kernel, the descriptors. So only the first call with a cache key builds its launches and uses Triton's
launcher. A repeated call fills in the addresses and calls one C function (start.c), which starts all launches of the
pass. No tensor is stored.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashspan.kernels.contract import Carry, Grads, Repeat, RepeatBackward
from flashspan.kernels.launch import triton_abi
from flashspan.kernels.launch.cache import CACHE
from flashspan.kernels.launch.compiling import launch_together
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks.mask import Mask, Packed
from flashspan.kernels.torch_private import current_index, empty_strided

KEPT_ADDRESSES = 256
"""Number of encoded addresses at which the cache of one descriptor is cleared."""

FORMATS = {"i32": "i", "i64": "q", "fp32": "f", "u1": "?", "i1": "?"}
"""The types of numbers that kernels take, as `struct` formats."""

CONSTANT = -1
"""The place of a parameter that is not an address."""


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
        known([*before, *tables.addresses, *after], triton_abi.stream_of(device.index))
        return True
    # This call may pass one tensor twice, and the next one two tensors. So each argument becomes an object of its own.
    tensors = [x.detach() for x in (*inputs, *tables.tensors, *outputs)]
    launches = build(tensors, *tables.what, *values)
    if launches is None:
        return False
    kernels = launch_together(launches)
    if not kernels:
        return True
    prepared = PreparedPass.of(launches, kernels, tensors)
    if prepared is not None:
        CACHE.keep(key, prepared)
    return True


def recall(
    build: Callable[..., Any], inputs: Sequence[Tensor], tables: Packed, num_outputs: int, *values: Hashable
) -> PreparedPass | None:
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

    def allocate(
        self, results: Sequence[int], device: torch.device, empty: Callable[..., Tensor]
    ) -> tuple[list[int], list[Tensor]]:
        """The addresses of the temporary tensors, given those of the results; and the memory, allocated with `empty`,
        which must exist until the launches are queued."""
        held, start = [], 0
        if self.num_bytes:
            held.append(empty((self.num_bytes,), (1,), torch.uint8))
            start = held[0].data_ptr()
        addresses = [start + offset if same is None else results[same] for same, offset in self.places]
        if self.counter is not None:
            held.append(self.counter(device))
            addresses.append(held[-1].data_ptr())
        return addresses, held


def repeated_forward(
    launches: PreparedPass | None, device: torch.device, outputs: Sequence[Tensor], room: Room
) -> Repeat | None:
    """A forward pass that repeats the launches from `recall`; None if there are none. `outputs` are meta tensors with
    the layouts of out and lse."""
    if launches is None:
        return None
    index, current, empty = device.index, current_index(device), empty_strided(device)
    out_layout, lse_layout = map(_layout, outputs)

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Carry | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15 or triton_abi.is_watched():
            return None
        if current() != index:
            with torch.cuda.device(device):
                return forward(q, k, v, mask)
        out, lse = empty(*out_layout), empty(*lse_layout)
        results = out.data_ptr(), lse.data_ptr()
        temporary, held = room.allocate(results, device, empty)
        launches([at_q, at_k, at_v, *mask.packed.addresses, *results, *temporary], triton_abi.stream_of(index))
        del held
        return Carry(out, lse)

    return forward


def repeated_backward(
    launches: PreparedPass | None, device: torch.device, grads: Sequence[Tensor], room: Room
) -> RepeatBackward | None:
    """`repeated_forward` for a backward pass. `grads` are meta tensors with the layouts of dq, dk and dv."""
    if launches is None:
        return None
    index, current, empty = device.index, current_index(device), empty_strided(device)
    dq_layout, dk_layout, dv_layout = map(_layout, grads)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads | None:
        # in the order of the launches' builders
        inputs = [dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), lse.data_ptr(), out.data_ptr()]
        if (inputs[0] | inputs[1] | inputs[2] | inputs[3] | inputs[4] | inputs[5]) & 15 or triton_abi.is_watched():
            return None
        if current() != index:
            with torch.cuda.device(device):
                return backward(dout, q, k, v, out, lse, mask)
        dq, dk, dv = empty(*dq_layout), empty(*dk_layout), empty(*dv_layout)
        results = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        temporary, held = room.allocate(results, device, empty)
        launches([*inputs, *results, *mask.packed.addresses, *temporary], triton_abi.stream_of(index))
        del held
        return dq, dk, dv

    return backward


def _layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.stride(), x.dtype


def _key(
    build: Callable[..., Any],
    inputs: Sequence[Tensor],
    tables: Packed,
    alignments: list[int],
    values: tuple[Hashable, ...],
) -> tuple[Hashable, ...]:
    layouts = [(x.shape, x.stride(), x.dtype) for x in inputs]
    return build, tables.what, values, inputs[0].device, *layouts, tables.layouts, *alignments


class PreparedPass(NamedTuple):
    """The launches of a pass. Called with the addresses of its tensors and a stream, it starts them."""

    start: Callable[[bytes, int, list[Any]], None]
    launches: bytes
    descriptors: list[tuple[int, _Descriptor]]  # (tensor, its tensor map by address)

    def __call__(self, addresses: list[int], stream: int) -> None:
        self.start(self.launches, stream, addresses + [maps[addresses[i]] for i, maps in self.descriptors])

    @classmethod
    def of(cls, launches: Sequence[Launch], kernels: Sequence[Any], tensors: Sequence[Tensor]) -> PreparedPass | None:
        """The prepared pass; None if Triton's launcher must always run: interpreter, other vendor, new release."""
        start = None if None in kernels else triton_abi.starter()
        if start is None:
            return None
        index = {id(x): i for i, x in enumerate(tensors)}
        descriptors: list[tuple[int, _Descriptor]] = []
        encoded = b""
        for launch, kernel in zip(launches, kernels, strict=True):
            form = triton_abi.launch_form(kernel)
            if form is None:
                return None
            (function, *sizes), types, metadata = form
            parameters: list[bytes] = []
            for x, kind in zip([*launch.arguments, *launch.constexprs()], types, strict=True):
                # A descriptor becomes its tensor map, the tensor's shape, and its strides.
                described = hasattr(x, "block_shape")
                base = x.base if described else x
                if isinstance(base, Tensor) and id(base) not in index:
                    return None
                if described:
                    parameters.append(_parameter(len(tensors) + len(descriptors)))
                    descriptors.append((index[id(base)], _Descriptor(x, metadata.pop(0))))
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
            head = struct.pack("Q7I4x", function, *grid, *sizes, len(parameters))
            encoded += b"".join([head, *parameters]) if min(grid) else b""
        return cls(start, encoded, descriptors)


def _parameter(place: int, kind: str = "Q", constant: float = 0) -> bytes:
    """A Parameter of start.c."""
    return struct.pack(f"q{kind}", place, constant).ljust(16, b"\0")


class _Descriptor(dict[int, Any]):
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
