"""The batches of a rank: its part of each step's samples, prepared on the host and copied to the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from flashspan.context import ContextAttention
from flashspan.data.samples import Samples
from flashspan.kernels.masks import Band, Mask, Rows, count

from .config import TrainConfig

Batch: TypeAlias = tuple[Tensor, Tensor, Rows | None]
"""tokens and targets [B, T of this rank] on the host; with documents, also their mask in the whole sequence."""
Placed: TypeAlias = tuple[Tensor, Tensor, Mask]
"""tokens and targets on the device, and the mask of the whole sequence."""


@dataclass(frozen=True)
class Feed:
    """Reads the samples of one of `num_ranks` data ranks; `attend`, if given, splits sequences over context ranks."""

    config: TrainConfig
    rank: int
    num_ranks: int
    attend: ContextAttention | None
    pattern: Mask
    device: torch.device

    def read(self, samples: Samples, step: int) -> list[Batch]:
        """This rank's samples of a step, one batch for each of its backward passes."""
        train = self.config.train
        each = train.batch // (train.accumulate * self.num_ranks)
        first = step * train.batch
        starts = [first + (i * self.num_ranks + self.rank) * each for i in range(train.accumulate)]
        return [self.prepare(samples, range(start, start + each)) for start in starts]

    def prepare(self, samples: Samples, numbers: Iterable[int]) -> Batch:
        """This rank's part of these samples, on the host, because the device may still run the previous step."""
        tokens, targets = samples.read(numbers)
        inside = None
        if samples.documents:
            first = samples.first_keys(tokens)
            inside = Rows(first, torch.arange(1, samples.sequence + 1).expand_as(first), samples.sequence)
        if self.attend is not None:
            tokens, targets = (self.attend.shard(x, 1) for x in (tokens, targets))
        if self.device.type == "cuda":  # from pinned memory, the copy does not wait for the device
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens, targets, inside

    def num_pairs(self, batches: Iterable[Batch]) -> int:
        """Visible (query, key) pairs of these samples, for whole sequences even if context ranks split them. For a
        block map with documents it is an upper bound: the smaller of the two counts."""
        size, total = self.config.data.sequence, 0
        for tokens, _, inside in batches:
            seen = self._shown * len(tokens)
            if inside is not None and isinstance(self.pattern, Band):
                start, end = self.pattern.intervals(size, size)
                reach = torch.minimum(end, inside.end) - torch.maximum(start, inside.start)
                seen = int(reach.clamp(min=0).sum())
            elif inside is not None:
                seen = min(seen, count(inside, size, size))
            total += seen
        return total

    @cached_property
    def _shown(self) -> int:
        """The number of visible pairs of the pattern in one sequence. To count those of a block map, the host waits."""
        return count(self.pattern, self.config.data.sequence, self.config.data.sequence)

    def place(self, tokens: Tensor, targets: Tensor, inside: Rows | None) -> Placed:
        """A batch on the device. With documents the host waits for the copy, because `inside` is not pinned."""
        mask = self.pattern if inside is None else self.pattern & inside.to(self.device)
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True), mask


def num_targets(batches: Iterable[Batch]) -> int:
    """The number of targets in these batches that count in the loss."""
    return sum(int((targets >= 0).sum()) for _, targets, _ in batches)
