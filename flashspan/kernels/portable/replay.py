"""A call's kernel launches once more, on other tensors of the same layouts.

All of a launch but the addresses follows from how the tensors lie in memory and from a few values: the grid, the
numbers, the compiled kernel, what the copy engine is told. So only the first call of a kind makes its launches and goes
through Triton's launcher; the next ones fill in addresses and call the C function at the end of it. No tensor is kept.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from flashspan.kernels.masks import Mask
from flashspan.kernels.portable.arguments import Launch, watched

KEPT_CALLS, KEPT_ADDRESSES = 128, 256
"""How many kinds of call are remembered, and addresses for each descriptor of one; then it starts afresh."""


class Tables(NamedTuple):
    """A mask as a call passes it on: kind and numbers, and tensors, which are looked at once, not in every call."""

    what: tuple[Hashable, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    addresses: tuple[int, ...] = ()
    layouts: tuple[Hashable, ...] = ()

    @classmethod
    def of(cls, mask: Mask) -> Tables:
        kind, numbers, tensors = mask.pack()
        layouts = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in tensors)
        return cls((kind, tuple(numbers)), tuple(tensors), tuple(x.data_ptr() for x in tensors), layouts)


_TABLES: dict[int, tuple[weakref.ref[Mask], Tables]] = {}


def tables_of(mask: Mask) -> Tables:
    """Those of a mask, which must be where the call is; kept as long as the mask is. PyTorch's `WeakIdKeyDictionary`
    does the same and takes six times as long."""
    place = id(mask)
    known = _TABLES.get(place)
    if known is not None and known[0]() is mask:
        return known[1]
    tables = Tables.of(mask)
    _TABLES[place] = weakref.ref(mask, lambda gone: _forget(place, gone)), tables
    return tables


def _forget(place: int, gone: weakref.ref[Mask]) -> None:
    if (known := _TABLES.get(place)) is not None and known[0] is gone:
        del _TABLES[place]


def replay(
    make: Callable[..., Sequence[Launch] | None],
    given: Sequence[Tensor],
    tables: Tables,
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
    known = _KNOWN.get(key)
    if known is not None and not watched():
        _launch_at(known, [*ours, *tables.addresses, *others], device)
        return True
    # A caller may pass one tensor twice and two the next time: each place gets an object of its own.
    apart = [x.detach() for x in (*given, *tables.tensors, *made)]
    launches = make(apart, *tables.what, *what)
    if launches is None:
        return False
    # All compile before any runs: whoever serves instead of one that does not must find nothing done.
    kernels = [launch.compiled() for launch in launches]
    for launch, kernel in zip(launches, kernels, strict=True):
        launch.start(kernel)
    found = [_Again.of(launch, kernel, apart) for launch, kernel in zip(launches, kernels, strict=True)]
    complete = [again for again in found if again is not None]
    if len(complete) == len(found):
        if len(_KNOWN) >= KEPT_CALLS:
            _KNOWN.clear()
        _KNOWN[key] = complete
    return True


def recall(
    make: Callable[..., Any], given: Sequence[Tensor], tables: Tables, num_made: int, *what: Hashable
) -> list[_Again] | None:
    """What `replay` would launch, given so, where all addresses fall on 16 bytes; None if it has not been called so."""
    return _KNOWN.get(_key(make, given, tables, [0] * (len(given) + num_made), what))


def launch_all(launches: list[_Again], given: Sequence[Tensor], tables: Tables, made: Sequence[Tensor]) -> None:
    """Launch what `recall` gave, on other tensors."""
    addresses = [*[x.data_ptr() for x in given], *tables.addresses, *[x.data_ptr() for x in made]]
    _launch_at(launches, addresses, given[0].device)


def _launch_at(launches: list[_Again], addresses: list[int], device: torch.device) -> None:
    stream = driver.active.get_current_stream(device.index)
    for launch in launches:
        launch(addresses, stream)


def _key(
    make: Callable[..., Any], given: Sequence[Tensor], tables: Tables, aligned: list[int], what: tuple[Hashable, ...]
) -> tuple[Hashable, ...]:
    layouts = [(x.shape, x.stride(), x.dtype) for x in given]
    return make, tables.what, what, given[0].device, *layouts, tables.layouts, *aligned


@dataclass(frozen=True)
class _Again:
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
    def of(cls, launch: Launch, compiled: Any, tensors: Sequence[Tensor]) -> _Again | None:
        """None where it must go the plain way each time: interpreted, another vendor, an unknown release of Triton."""
        found = None if compiled is None else _c_launcher(compiled, launch.grid)
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


_KNOWN: dict[tuple[Any, ...], list[_Again]] = {}


class _Descriptor(dict[int, Any]):
    """What the copy engine is told of tensors of one layout, by address: 128 bytes that take longer to make than to
    launch."""

    def __init__(self, descriptor: Any, metadata: dict[str, Any]) -> None:
        super().__init__()
        self.form, self.metadata = copy.copy(descriptor), metadata
        self.form.base = None

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        form = copy.copy(self.form)
        form.base = SimpleNamespace(data_ptr=lambda: address)
        if len(self) >= KEPT_ADDRESSES:
            self.clear()
        made = self[address] = make_tensordesc_arg(form, self.metadata)[0]
        return made


def _c_launcher(compiled: Any, grid: tuple[int, ...]) -> tuple[Callable[[int, list[Any]], None], list[Any]] | None:
    """Triton's C function for a compiled kernel, of a stream and the arguments, and what it knows of each descriptor.

    Its signature is Triton's own affair: only releases that were read are used so.
    """
    run, release = compiled.run, triton.__version__.split(".")[:2]
    if compiled.metadata.target.backend != "cuda" or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, metadata = run.launch, []
    if inspect.isfunction(launch):  # it lies within a Python function, which makes descriptors for it
        cells = zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True)
        within = {name: cell.cell_contents for name, cell in cells}
        launch, metadata = within["launcher"], within["tensordesc_meta"]
    if None in metadata:
        return None
    size = (*grid, 1, 1)[:3]
    kernel = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    hooks, scratch = (None, None, None), (None, None)
    if release == ["3", "6"]:
        fixed: tuple[Any, ...] = (*kernel, *scratch, compiled.packed_metadata, *hooks)
        return lambda stream, arguments: launch(*size, stream, *fixed, *arguments), metadata
    if release == ["3", "7"]:
        fixed = (*kernel, compiled.packed_metadata, *hooks, *scratch, run.arg_annotations, run.kernel_signature)
        return lambda stream, arguments: launch(*size, stream, *fixed, arguments), metadata
    return None
