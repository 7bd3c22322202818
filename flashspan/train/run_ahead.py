"""Prepare the next step while the device still runs the present one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashspan.parallel.collectives import is_dtensor

from .batches import Placed


@dataclass
class RunAhead:
    """The prepared part of the next step: its samples, and the loss of its first batch if that was launched.

    State diagram::

                   place                begin
        EMPTY ----------------> PLACED ----------------> BEGUN
          ^                       ^ |                      |
          |                       | | batches_of           | take_loss (the step runs)
          |                       | +--------> used        | drop_loss (not finite, or asked to stop)
          |                       +------------------------+
          +---- place(no samples): the last step, or samples that cannot be read

    EMPTY: the step reads its own samples. PLACED: samples and counts are on the device. BEGUN: the forward of the first
    batch has been launched with the present weights, before the host knows whether the previous step was finite. A
    repeated step does not match the samples here, and reads its own.
    """

    step: int = -1
    batches: list[Placed] = field(default_factory=list)
    counts: Tensor | None = None
    """The numbers of targets and of visible pairs of these samples, over all ranks."""
    loss: Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether a forward has been launched and its loss not yet been taken."""
        return self.loss is not None

    def place(self, step: int, batches: list[Placed], counts: Tensor) -> None:
        """Store the samples of a step and their counts. `batches` is empty if there is no next step."""
        self.step, self.batches, self.counts = step if batches else -1, batches, counts if batches else None

    def begin(self, forward: Callable[[Placed], Tensor]) -> None:
        """Launch the forward of the first batch. If memory runs out, the step launches it later, and then reports the
        failure."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self.loss = forward(self.batches[0])

    def batches_of(self, step: int) -> tuple[list[Placed], Tensor] | None:
        """The samples of this step and their counts, if they are ready; else None."""
        return (self.batches, self.counts) if step == self.step and self.counts is not None else None

    def take_loss(self) -> Tensor | None:
        """Return the loss of the launched forward, and forget it; None if none was launched."""
        loss, self.loss = self.loss, None
        return loss

    def drop_loss(self) -> None:
        """Discard a launched forward that will not be used."""
        self.loss = None


def copy_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Begin a copy of values to the host. The function that is returned waits for the copy, but not for work that was
    launched after it, and returns the values."""
    host = values.to("cpu", non_blocking=True)
    if values.device.type != "cuda":
        return host.tolist
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return wait


def skips_bad_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer skips a step by itself if its `found_inf` is 1. Then its step can be launched before the
    host has read the results, and the device does not wait for the host."""
    whole = not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])
    return isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"]) and whole
