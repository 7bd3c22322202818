"""The content of one message: a few tensors in one byte buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flashspan.context.runs import Runs

Fields: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""The shapes and dtypes of tensors that share a buffer."""


class Bundle(NamedTuple):
    """Tensors of the same local rows, each [B, heads, rows, ...]; `buffer` is their memory, if they can be sent."""

    rows: Runs
    fields: tuple[Tensor, ...]
    buffer: Tensor | None = None
    borrowed: bool = False  # the buffer belongs to the transport

    def take(self, rows: range | Runs) -> tuple[Tensor, ...]:
        """Views of the tensors, from the first to the last of these rows."""
        first, last = self.rows.below(rows.start), self.rows.below(rows.stop)
        return tuple(field[:, :, first:last] for field in self.fields)

    def runs(self, rows: Runs) -> Iterator[tuple[Tensor, ...]]:
        """Views of exactly these rows, one run at a time; usually there is one run."""
        return map(self.take, rows.parts)

    def clear(self) -> None:
        for field in self.fields:
            field.zero_()


class BufferPool:
    """Buffers to reuse.

    A pass needs a few buffers of similar size at any time. Freeing and reallocating them fragments memory: on a CPU,
    the process grew to 1.5 times the memory in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.UntypedStorage] = []

    def take(self, size: int) -> Tensor:
        """Uninitialised bytes: the smallest free buffer that is large enough, or a new one."""
        fitting = [storage for storage in self._free if storage.nbytes() >= size]
        if not fitting:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        storage = min(fitting, key=torch.UntypedStorage.nbytes)
        self._free.remove(storage)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (size,), (1,))

    def put(self, buffer: Tensor) -> None:
        """Put back a buffer that is no longer read or written."""
        self._free.append(buffer.untyped_storage())


def allocate(
    kind: str,
    sizes: tuple[int, int, int, int],
    rows: Runs,
    dtype: torch.dtype,
    sums: torch.dtype,
    source: BufferPool | Tensor,
) -> Bundle:
    """Uninitialised tensors of a kind (see schedule.Kind) for these rows.

    sizes: (B, H, K, D); sums: the dtype of carries and gradients; source: the buffer, or the pool to take it from.
    """
    B, H, K, D = sizes
    n = len(rows)
    queries, keys, row = (B, H, n, D), (B, K, n, D), (B, H, n)
    shapes: dict[str, Fields] = {
        "kv": [(keys, dtype)] * 2,
        "dkv": [(keys, sums)] * 2,
        "q": [(queries, dtype)],
        "dq": [(queries, sums)],
        "carry": [(queries, sums), (row, sums)],
        "rows": [(queries, dtype)] * 2 + [(row, sums)] * 2,
    }
    fields, buffer = lay_out(shapes[kind], source)
    return Bundle(rows, fields, buffer, borrowed=isinstance(source, Tensor))


def lay_out(shapes: Fields, source: BufferPool | Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return uninitialised tensors, which lie one after another in one byte buffer, and the buffer. Tensors with larger
    elements come first, so that each begins at a multiple of its element size."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    buffer = source if isinstance(source, Tensor) else source.take(sum(sizes))
    order = sorted(range(len(shapes)), key=lambda i: -shapes[i][1].itemsize)
    parts = dict(zip(order, buffer.split([sizes[i] for i in order]), strict=True))
    return tuple(parts[i].view(dtype).view(shape) for i, (shape, dtype) in enumerate(shapes)), buffer
