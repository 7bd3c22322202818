"""Random block masks, and a bitwise comparison of block maps."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspan.kernels.masks import (
    Blocks,
)

LENGTHS = (1, 63, 64, 65, 100, 128, 150, 200)

EDGES = (64, 128, (64, 128), (128, 64))


def random_mask(number: int, heads: int = 2) -> Tensor:
    """bool [T, S], [H, T, S] or [B, H, T, S] of any density, with empty rows, and empty and full squares."""
    random = torch.Generator().manual_seed(number)

    def pick(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=random))

    T, S = LENGTHS[pick(len(LENGTHS))], LENGTHS[pick(len(LENGTHS))]
    lead = ((), (heads,), (2, 1), (2, heads), (1, heads))[pick(5)]
    visible = torch.rand(*lead, T, S, generator=random) < (0.0, 0.01, 0.3, 0.9, 1.0)[pick(5)]
    if pick(2):
        visible[..., : T // 2, :] = False
    if pick(2):
        visible[..., T // 3 :, : S // 2] = bool(pick(2))
    if pick(3) == 0:
        visible = visible & torch.ones(T, S, dtype=torch.bool).tril(pick(S + T) - T)
    return visible


def lift(visible: Tensor) -> Tensor:
    return visible[(None,) * (4 - visible.dim())]


def same_to_the_bit(one: Blocks, two: Blocks) -> bool:
    """Whether lists, bits and transposed bits are equal, including their order, not only the masks."""
    (_, numbers, tensors), (_, wanted, right) = one.pack(), two.pack()
    pairs = zip(tensors, right, strict=True)
    return numbers == wanted and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
