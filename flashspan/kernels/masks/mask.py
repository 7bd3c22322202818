"""The base class of masks: which keys each query sees, as values that can be sliced and composed with &, | and ~.

`Band` (band.py) and `Rows` (rows.py) give each query one interval of keys; `Blocks` (blocks.py) lists tiles. Each of
these files imports the ones before it. An operation whose result has a later class calls `as_rows` or `as_blocks`,
which the later file implements.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, singledispatch
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from flashspan.kernels.masks.intervals import Positions
from flashspan.kernels.torch_private import is_in_torch_dispatch_mode

EMPTY, FULL, PARTIAL = 0, 1, 2
"""The kinds of tiles."""

DERIVED_KEPT = 16
"""The number of derived masks (copies on devices, intersections) that a mask caches."""

_LOCK = threading.Lock()

Derived = TypeVar("Derived")


class Packed(NamedTuple):
    """A mask as arguments of a kernel launch: kind and numbers (what), and its tensors with addresses and layouts."""

    what: tuple[Hashable, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    addresses: tuple[int, ...] = ()
    layouts: tuple[Hashable, ...] = ()


class Mask:
    """A mask: `Band`, `Rows` or `Blocks`."""

    _derived: dict[object, Any]

    def intervals(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """start, end int32 [T] or [B, T]: the keys that each query sees. `Band` and `Rows` only."""
        raise NotImplementedError

    def slice(self, q: Positions, k: Positions) -> Mask:
        """The mask of some queries and keys: query a of the slice is query q[a] of this mask, key b is key k[b]."""
        raise NotImplementedError

    def check(self, num_batch: int, num_queries: int, num_keys: int, num_heads: int | None = None) -> None:
        """ValueError for sizes that this mask does not fit."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """This mask with its tensors on a device. The copy is cached."""
        device, one = torch.device(device), self._one_tensor()
        eager = not torch.compiler.is_compiling()
        # Tensors created in inference mode must be cloned for training: autograd cannot save them.
        clone = eager and one.is_inference() and not torch.is_inference_mode_enabled()
        if one.device == device and not clone:
            return self

        def copy() -> Any:
            _, numbers, tensors = self.pack()
            return self.unpack(numbers, [x.to(device).clone() if clone else x.to(device) for x in tensors])

        return copy() if clone else self.derived(device, copy)

    def _one_tensor(self) -> Tensor:
        """Any of the mask's tensors."""
        raise NotImplementedError

    def pack(self) -> tuple[str, list[int], list[Tensor]]:
        """The mask as kind, numbers and tensors, which an operator's schema allows."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Self:
        """The inverse of `pack`."""
        raise NotImplementedError

    @cached_property
    def packed(self) -> Packed:
        """The mask as `Packed`, cached, because reading tensor attributes takes as long as a launch. The tensors must
        be on the call's device."""
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
        """`other & mask` if `other` is not a mask."""
        refuse_tensor(other)
        return NotImplemented

    __ror__ = __rand__

    def derived(self, key: object, build: Callable[[], Derived]) -> Derived:
        """A mask built from this one, cached for all layers and steps; the cache has the newest DERIVED_KEPT.

        Traced tensors, fake tensors, and inference tensors, which autograd cannot save, are not cached.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_in_torch_dispatch_mode():
            return build()
        mask: Derived | None = self._derived.get(key)
        if mask is None:
            mask = build()
            with _LOCK:  # other threads may use this mask at the same time
                while len(self._derived) >= DERIVED_KEPT:
                    self._derived.pop(next(iter(self._derived)))
                self._derived[key] = mask
        return mask

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in vars(self).items() if name != "packed"}
        return state | {"_derived": {}} if "_derived" in state else state


@singledispatch
def as_rows(mask: Mask, q: Positions, k: Positions) -> Mask:
    """A slice of a band whose result is not a band (rows.py)."""
    raise TypeError(f"{type(mask).__name__} cannot be sliced into Rows")


@singledispatch
def as_blocks(mask: Mask) -> Mask:
    """A mask as a block map (blocks.py)."""
    raise TypeError(f"{type(mask).__name__} has no block map")


def refuse_tensor(other: object) -> None:
    """TypeError for a tensor as an operand, before `&` or `|` calls the tensor's own operator."""
    if isinstance(other, Tensor):
        raise TypeError(
            f"unsupported operand for & and |: masks compose with masks, got a tensor {tuple(other.shape)} of "
            f"{other.dtype}; use Blocks.from_dense(tensor)"
        )


def whole_number(value: Any) -> int | None:
    """An int, a NumPy integer or an integer tensor of one element as an int; None for anything else."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a tensor with several elements has __index__ too
        return None


def check_whole(least: int | None = 0, **values: Any) -> list[int]:
    """The values as ints; ValueError for a value that is not a whole number, or is less than `least`."""
    found = []
    for name, value in values.items():
        number = whole_number(value)
        if number is None or (least is not None and number < least):
            limit = "" if least is None else f", {least} or more"
            raise ValueError(f"{name} is a whole number{limit}: got {value!r}")
        found.append(number)
    return found
