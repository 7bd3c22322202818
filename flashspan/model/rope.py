"""RoPE in float32. Positions are an argument, so it works for any part of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import LlamaConfig, RopeScaling


@dataclass(frozen=True)
class Rotation:
    """cos and sin of each token's angles, float32 [.., T, 1, D / 2], for `rotate`.

    An object instead of two tensors, so that FSDP2's mixed precision does not cast them.
    """

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of x [B, T, H, D], as published weights expect: in float32, then in x's dtype."""
    left, right = x.chunk(2, -1)  # multiplied by float32 below, so the arithmetic is float32
    halves = (left * cos - right * sin, right * cos + left * sin)
    return torch.cat([half.to(x.dtype) for half in halves], -1)


def rotation(positions: Tensor, config: LlamaConfig) -> Rotation:
    """The rotation of tokens at these positions, [T] or [B, T]; all heads of a token share it."""
    angles = positions.reshape(*positions.shape, 1, 1).float() * frequencies(config, positions.device)
    return Rotation(angles.cos(), angles.sin())


def frequencies(config: LlamaConfig, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each pair, float32 [D / 2]."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    return plain if config.rope_scaling is None else _stretch(plain, config.rope_scaling)


def _stretch(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rule: divide frequencies with fewer than low_freq_factor turns over the original length by `factor`,
    keep those with more than high_freq_factor turns, and interpolate between."""
    turns = scaling.original_max_tokens * plain / (2 * math.pi)
    fast = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - fast) * plain / scaling.factor + fast * plain
