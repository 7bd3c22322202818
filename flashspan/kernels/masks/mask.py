"""The base of all masks: who may look at whom, as a value that is closed under slicing and composes with &, | and ~.

`Band` (band.py) and `Rows` (rows.py) give each query one interval of keys, which is all a kernel needs to know;
`Blocks` (blocks.py) lists tiles. Each of these files imports the ones before it. Where an operation on a mask gives one
of a later kind, it goes through `as_rows` or `as_blocks`, which the later file implements.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable
from functools import cached_property, singledispatch
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from flashspan.kernels.masks.intervals import Positions
from flashspan.kernels.torch_private import is_in_torch_dispatch_mode

EMPTY, FULL, PARTIAL = 0, 1, 2
"""What a tile of a mask is."""

DERIVED_KEPT = 16
"""How many masks made from another it keeps: copies on devices, intersections."""

_KEEPING = threading.Lock()

Made = TypeVar("Made")


class Packed(NamedTuple):
    """A mask as a kernel's launch takes it: kind and numbers, and its tensors, with their addresses and layouts."""

    what: tuple[Hashable, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    addresses: tuple[int, ...] = ()
    layouts: tuple[Hashable, ...] = ()


class Mask:
    """A mask: `Band`, `Rows` or `Blocks`."""

    _derived: dict[object, Any]

    def intervals(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """start, end int32 [T] or [B, T]: the keys each query sees, of a `Band` or `Rows`."""
        raise NotImplementedError

    def slice(self, q: Positions, k: Positions) -> Mask:
        """The same visibility in a slice's coordinates: local query a is global q[a], local key b is global k[b]."""
        raise NotImplementedError

    def check(self, num_batch: int, num_queries: int, num_keys: int, num_heads: int | None = None) -> None:
        """Refuse queries, keys, a batch or heads this mask was not made for."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """This mask with its tensors on a device; copied once."""
        raise NotImplementedError

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        """Kind, numbers and tensors: an operator's schema can carry those, not objects. `unpack` is the inverse."""
        raise NotImplementedError

    @cached_property
    def packed(self) -> Packed:
        """Found once: asking the tensors takes as long as a launch. The mask must be where the call is."""
        kind, numbers, tensors = self.pack()
        layouts = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in tensors)
        return Packed((kind, tuple(numbers)), tuple(tensors), tuple(x.data_ptr() for x in tensors), layouts)

    def __and__(self, other: Mask) -> Mask:
        raise NotImplementedError

    def __or__(self, other: Mask) -> Mask:
        raise NotImplementedError

    def __invert__(self) -> Mask:
        raise NotImplementedError

    def __rand__(self, other: object) -> Any:
        """`other & mask` where the other is no mask."""
        refuse_tensor(other)
        return NotImplemented

    __ror__ = __rand__

    def derived(self, key: object, make: Callable[[], Made]) -> Made:
        """A mask made from this one, kept so that every layer and step shares it; only the newest few are kept.

        Only plain tensors are kept: none that the compiler traces, no fake ones, none that autograd cannot save.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_in_torch_dispatch_mode():
            return make()
        made: Made | None = self._derived.get(key)
        if made is None:
            made = make()
            with _KEEPING:  # other threads use this mask too
                while len(self._derived) >= DERIVED_KEPT:
                    self._derived.pop(next(iter(self._derived)))
                self._derived[key] = made
        return made

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in vars(self).items() if name != "packed"}
        return state | {"_derived": {}} if "_derived" in state else state


@singledispatch
def as_rows(mask: Mask, q: Positions, k: Positions) -> Mask:
    """A slice of a mask by positions that no band describes (rows.py)."""
    raise TypeError(f"{type(mask).__name__} has no slice as rows")


@singledispatch
def as_blocks(mask: Mask) -> Mask:
    """A mask as a block map, whose tiles its result's may follow (blocks.py)."""
    raise TypeError(f"{type(mask).__name__} has no block map")


def refuse_tensor(other: object) -> None:
    """Say how a tensor is joined with a mask, before `&` or `|` asks the tensor."""
    if isinstance(other, Tensor):
        raise TypeError(
            f"unsupported operand for & and |: masks compose with masks, got a tensor {tuple(other.shape)} of "
            f"{other.dtype}; use Blocks.from_dense(tensor)"
        )


def whole_number(value: Any) -> int | None:
    """The value as a plain integer, from NumPy's or a tensor of one for instance; None if it is no whole number."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a tensor of two has __index__ too
        return None


def check_whole(least: int | None = 0, **values: Any) -> list[int]:
    """These as plain integers; refuse what is no whole number, or less than the least."""
    found = []
    for name, value in values.items():
        number = whole_number(value)
        if number is None or (least is not None and number < least):
            limit = "" if least is None else f", {least} or more"
            raise ValueError(f"{name} is a whole number{limit}: got {value!r}")
        found.append(number)
    return found
