"""The choice of the next token: greedy, or sampled with temperature, top-k and top-p."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspan.kernels.failure import KernelFailed, give_up

FAILED: list[str] = []
"""The error with which the kernel of `most_probable` failed on this machine, after which it is not tried again."""

LEAST_TEMPERATURE = 1e-6
"""The least temperature above 0: divided by a much smaller one, logits would exceed float32."""


@dataclass(frozen=True)
class Sampling:
    """The choice of a token. Temperature 0 takes the most probable one; top_k and top_p leave out improbable ones
    (top_k 0 and top_p 1 leave out none)."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in (("temperature", (int, float)), ("top_k", int), ("top_p", (int, float))):
            if not isinstance(value := getattr(self, name), kind) or isinstance(value, bool):
                raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number: got {value!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be finite and at least 0 (0 takes the most probable token): got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 1, or 0 for all tokens: got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1: got {self.top_p}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}: got {self.temperature:g}; use 0: "
                "such a small temperature always takes the most probable token too"
            )

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Tokens [B] from logits [B, V]; each row has its own generator."""
        if self.temperature == 0:
            return logits.argmax(-1)
        rows = zip(self.probabilities(logits), generators, strict=True)
        return torch.cat([torch.multinomial(chances, 1, generator=generator) for chances, generator in rows])

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities with which `choose` samples, float32 [B, V]."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(-1)
        if self.top_p < 1:
            falling, order = chances.sort(-1, descending=True)
            # A token stays if the more probable ones together do not reach top_p; the most probable one always stays.
            surplus = falling.cumsum(-1) - falling >= self.top_p
            surplus[..., 0] = False  # top_p may be 0 in float32
            chances = chances.masked_fill(surplus.scatter(-1, order, surplus), 0.0)
            chances = chances / chances.sum(-1, keepdim=True)
        return chances


def most_probable(logits: Tensor, ended: Tensor, not_finite: Tensor, ends: Tensor) -> Tensor | None:
    """The most probable tokens [B] of logits [B, V], by one kernel; None without a GPU or if the kernel does not
    compile. Two bool tensors [B] are updated in place. First, `not_finite` becomes True for rows that have not ended
    and have a logit that is not finite; then `ended` becomes True for rows whose token is one of `ends`."""
    if not logits.is_cuda or FAILED or importlib.util.find_spec("triton") is None:
        return None
    from flashspan.generate.kernels import most_probable as kernel

    try:
        return kernel.most_probable(logits, ended, not_finite, ends)
    except KernelFailed as failure:
        give_up(FAILED, failure, "the kernel for greedy decoding is off and PyTorch is used: the kernel {}")
        return None
