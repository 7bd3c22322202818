"""Buckets of gradients: flat tensors that data parallelism reduces."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn

from .collectives import local_part, part_like


class Bucket:
    """Gradients that are reduced together: one flat tensor with a view per parameter, and two flags per parameter. The
    first flag is 1 if this rank has the gradient, the second is 1 if it lacks the gradient.

    Flags are summed with the gradients. So every rank knows, without another collective, whether any rank has or lacks
    a gradient. Sums are only compared with 0, because 16-bit sums are rounded: 511 of 512 ranks would read as 512.
    """

    def __init__(self, params: list[nn.Parameter], num_ranks: int) -> None:
        self.params = params
        sizes = [local_part(p).numel() for p in params]
        used = sum(sizes) + 2 * len(params)
        self.flat = local_part(params[0]).new_zeros(used + -used % num_ranks)
        *pieces, flags, _ = self.flat.split([*sizes, 2 * len(params), self.flat.numel() - used])
        self.flags = flags.view(-1, 2)
        self.had, self.lacked = self.flat.new_tensor([[1.0, 0.0], [0.0, 1.0]])
        self.views = [piece.view(local_part(p).shape) for piece, p in zip(pieces, params, strict=True)]
        self.reset()

    def reset(self) -> None:
        self.awaited = set(range(len(self.params)))
        self.without_gradient: set[int] = set()
        self.job: Future[float] | None = None

    def put(self, index: int) -> None:
        """Copy a parameter's gradient into the bucket; afterwards `.grad` is a view of the bucket."""
        param, view = self.params[index], self.views[index]
        assert param.grad is not None
        grad = local_part(param.grad)
        if grad.shape != view.shape or grad.layout != view.layout:
            raise TypeError(
                f"got {tuple(grad.shape)} {grad.layout}, the parameter had {tuple(view.shape)} {view.layout}"
            )
        if grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad)
            param.grad = part_like(param, view)
        self._flag(index, had=True)
        self.awaited.discard(index)

    def put_zeros(self, index: int) -> None:
        """Put zeros for a gradient that this rank does not have."""
        self.views[index].zero_()
        self._flag(index, had=False)
        self.awaited.discard(index)
        self.without_gradient.add(index)

    def _flag(self, index: int, *, had: bool) -> None:
        self.flags[index].copy_(self.had if had else self.lacked)


def pack(params: list[nn.Parameter], cap: float, num_ranks: int) -> list[Bucket]:
    """Pack parameters into buckets of at most `cap` bytes (or one parameter), last parameters first: backward computes
    gradients in about that order."""
    filled: list[list[nn.Parameter]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for param in reversed(params):
        local = local_part(param)
        kind = (local.dtype, local.device)
        bucket, size = current.get(kind, ([], 0))
        if not bucket or size + local.nbytes > cap:
            bucket, size = [], 0
            filled.append(bucket)
        bucket.append(param)
        current[kind] = (bucket, size + local.nbytes)
    return [Bucket(bucket, num_ranks) for bucket in filled]
