"""What a rank reads: its part of the samples of each step, prepared on the host and placed on the device."""

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
"""tokens and targets [B, T of this rank] on the host, and where each token's document lies."""
Placed: TypeAlias = tuple[Tensor, Tensor, Mask]
"""The same on the device, with the mask of the whole sequence."""


@dataclass(frozen=True)
class Feed:
    """How one of `num_ranks` that read different samples gets its own; `attend` splits sequences, if anything does."""

    config: TrainConfig
    rank: int
    num_ranks: int
    attend: ContextAttention | None
    pattern: Mask
    device: torch.device

    def read(self, samples: Samples, step: int) -> list[Batch]:
        """A step's samples that this rank reads, for each of its backward passes."""
        train = self.config.train
        each = train.batch // (train.accumulate * self.num_ranks)
        first = step * train.batch
        starts = [first + (i * self.num_ranks + self.rank) * each for i in range(train.accumulate)]
        return [self.prepare(samples, range(start, start + each)) for start in starts]

    def prepare(self, samples: Samples, numbers: Iterable[int]) -> Batch:
        """Samples as this rank sees them, on the host: the device may be busy with the step before."""
        tokens, targets = samples.read(numbers)
        inside = None
        if samples.documents:
            first = samples.first_keys(tokens)
            inside = Rows(first, torch.arange(1, samples.sequence + 1).expand_as(first), samples.sequence)
        if self.attend is not None:
            tokens, targets = (self.attend.shard(x, 1) for x in (tokens, targets))
        if self.device.type == "cuda":  # from there they are copied without waiting for what the device has to do
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens, targets, inside

    def num_pairs(self, batches: Iterable[Batch]) -> int:
        """(query, key) pairs that are visible in these samples, of whole sequences even where context ranks split them.
        Of a map over documents no more than this: nobody counts what is in both."""
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
        """Pairs that the pattern shows of one sequence; to count those of a map waits for the device."""
        return count(self.pattern, self.config.data.sequence, self.config.data.sequence)

    def place(self, tokens: Tensor, targets: Tensor, inside: Rows | None) -> Placed:
        """A batch on the device. Where there are documents the host waits for it: their table is ordinary memory."""
        mask = self.pattern if inside is None else self.pattern & inside.to(self.device)
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True), mask


def num_targets(batches: Iterable[Batch]) -> int:
    """How many tokens of these batches have something to predict."""
    return sum(int((targets >= 0).sum()) for _, targets, _ in batches)
