"""What travels in one message: a few tensors over one byte buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Bundle(NamedTuple):
    """Tensors that hold the same local rows, each [B, heads, rows, ...]; `buffer` backs them if they can be sent."""

    rows: range
    fields: tuple[Tensor, ...]
    buffer: Tensor | None = None

    def take(self, rows: range) -> tuple[Tensor, ...]:
        """Views of some of the rows."""
        first = self.rows.start
        return tuple(field[:, :, rows.start - first : rows.stop - first] for field in self.fields)

    def clear(self) -> None:
        for field in self.fields:
            field.zero_()


def allocate(
    kind: str,
    sizes: tuple[int, int, int, int],
    rows: range,
    dtype: torch.dtype,
    sums: torch.dtype,
    device: torch.device,
) -> Bundle:
    """Room for some rows of a kind (see schedule.Kind); sizes are (B, H, K, D), `sums` the dtype of what is summed."""
    B, H, K, D = sizes
    n = len(rows)
    queries, keys, row = (B, H, n, D), (B, K, n, D), (B, H, n)
    shapes: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
        "kv": [(keys, dtype)] * 2,
        "dkv": [(keys, sums)] * 2,
        "q": [(queries, dtype)],
        "dq": [(queries, sums)],
        "carry": [(queries, sums), (row, sums)],
        "rows": [(queries, dtype)] * 2 + [(row, sums)] * 2,
    }
    fields, buffer = lay_out(shapes[kind], device)
    return Bundle(rows, fields, buffer)


def lay_out(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Uninitialised tensors one after another in one byte buffer, and the buffer. Put those with more elements first:
    then each begins at a multiple of its element size."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    parts = zip(shapes, buffer.split(sizes), strict=True)
    return tuple(part.view(dtype).view(shape) for (shape, dtype), part in parts), buffer
