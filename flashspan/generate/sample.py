"""One token out of many: greedy, or drawn by temperature, top-k and top-p."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspan.kernels.failure import KernelFailed

FAILED: list[str] = []
"""Why the kernel of `likeliest` could not be compiled here, if so: then it is not tried again."""

LEAST_TEMPERATURE = 1e-6
"""Logits divided by much less are beyond float32."""


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 takes the likeliest; top_k and top_p leave out the unlikely (0 and 1: nothing)."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                f"temperature and top_k must be at least 0 and top_p in (0, 1]: got temperature {self.temperature}, "
                f"top_k {self.top_k}, top_p {self.top_p}"
            )
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}: got {self.temperature:g}; use 0, which "
                "takes the likeliest, as anything so small would"
            )

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Tokens [B] from logits [B, V], each row by a generator of its own."""
        if self.temperature == 0:
            return logits.argmax(-1)
        rows = zip(self.probabilities(logits), generators, strict=True)
        return torch.cat([torch.multinomial(chances, 1, generator=generator) for chances, generator in rows])

    def probabilities(self, logits: Tensor) -> Tensor:
        """What `choose` draws from, float32 [B, V]."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(-1)
        if self.top_p < 1:
            falling, order = chances.sort(-1, descending=True)
            # A token stays if those likelier than it do not reach top_p yet; the likeliest always stays.
            surplus = falling.cumsum(-1) - falling >= self.top_p
            surplus[..., 0] = False  # top_p may be 0 in float32
            chances = chances.masked_fill(surplus.scatter(-1, order, surplus), 0.0)
            chances = chances / chances.sum(-1, keepdim=True)
        return chances


def likeliest(logits: Tensor, said: Tensor, spoiled: Tensor, ends: Tensor) -> Tensor | None:
    """The greedy tokens [B] of logits [B, V] by one kernel, None where there is none. In place, of bools [B]: `spoiled`
    where a row that has not `said` an end is not all finite, then `said` where the token is one of `ends`."""
    if not logits.is_cuda or FAILED or importlib.util.find_spec("triton") is None:
        return None
    from flashspan.kernels.portable import likeliest as kernel

    try:
        return kernel.likeliest(logits, said, spoiled, ends)
    except KernelFailed as failure:
        FAILED.append(str(failure))
        warnings.warn(
            f"the kernel for greedy decoding is off, and PyTorch serves: it {failure}", RuntimeWarning, stacklevel=2
        )
        return None
