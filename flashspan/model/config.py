"""The config of a LLaMA, and presets by name.

config = preset("llama-3.2-1b")
config = preset("tiny", num_layers=2)
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of RoPE frequencies: low ones are divided by `factor`, high ones kept, others interpolated."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192

    def __post_init__(self) -> None:
        factors = 1 <= self.factor < math.inf and 0 < self.low_freq_factor < self.high_freq_factor < math.inf
        if not (factors and self.original_max_tokens > 0):
            raise ValueError(
                "rope scaling needs factor >= 1, 0 < low_freq_factor < high_freq_factor, all finite, and "
                f"original_max_tokens >= 1: got {self}"
            )


LARGEST = 2**28
"""The maximum of any size: the bytes of a matrix with two such sizes still fit in 64 bits."""


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a LLaMA. `max_tokens` is the length it was trained for; longer sequences are not refused."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_width: int
    head_dim: int = 0  # 0: width / num_heads
    max_tokens: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width", "max_tokens"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} must be 1 to {LARGEST:,}: got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"the key heads must divide the query heads: got {self.num_heads} heads, {self.num_kv_heads} kv heads"
                "; change num_heads or num_kv_heads"
            )
        if self.head_dim == 0:
            if self.width % self.num_heads:
                raise ValueError(
                    f"the heads must divide the width: got width {self.width} and {self.num_heads} heads; "
                    "change one of them, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.width // self.num_heads)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since RoPE rotates pairs of features: got {self.head_dim}")
        if not (0 < self.rope_theta < math.inf and 0 <= self.norm_eps < math.inf):
            raise ValueError(
                "rope_theta must be positive and norm_eps at least 0, both finite: "
                f"got {self.rope_theta} and {self.norm_eps}"
            )

    @property
    def num_matrix_parameters(self) -> int:
        """The number of parameters in matmuls: with the head, without the embedding."""
        attention = 2 * self.width * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.width * self.ffn_width) + self.vocab_size * self.width

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.width
        return self.num_matrix_parameters + embedding + (2 * self.num_layers + 1) * self.width

    def flops_per_token(self, num_tokens: float) -> float:
        """FLOPs of a training step per token, for causal sequences of this length."""
        scores = self.num_layers * self.num_heads * self.head_dim * num_tokens  # causal: half of the pairs are hidden
        return 6.0 * (self.num_matrix_parameters + scores)


def _course(width: int, ffn_width: int, num_layers: int, num_heads: int) -> LlamaConfig:
    return LlamaConfig(10_000, width, num_layers, num_heads, num_heads, ffn_width, max_tokens=2048)


_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "rope_theta": 500_000.0}
_LLAMA_3_2: dict[str, Any] = {**_LLAMA_3, "max_tokens": 131_072, "tie_embeddings": True}

PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(1024, 128, 2, 4, 2, 384, max_tokens=512),
    "small": _course(768, 3072, 12, 12),
    "medium": _course(1024, 4096, 24, 16),
    "large": _course(1280, 5120, 36, 20),
    "xl": _course(1600, 6400, 48, 25),
    "2.7B": _course(2560, 10240, 32, 32),
    "llama-2-7b": LlamaConfig(32_000, 4096, 32, 32, 32, 11_008),
    "llama-3-8b": LlamaConfig(
        width=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_width=14_336, max_tokens=8192, **_LLAMA_3
    ),
    "llama-3.2-1b": LlamaConfig(
        width=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_width=8192,
        rope_scaling=RopeScaling(32.0),
        **_LLAMA_3_2,
    ),
    "llama-3.2-3b": LlamaConfig(
        width=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        ffn_width=8192,
        rope_scaling=RopeScaling(32.0),
        **_LLAMA_3_2,
    ),
}


def preset(name: str, **changes: Any) -> LlamaConfig:
    """The preset of this name, with the fields in `changes` replaced."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown model {name!r}: {hint}choose one of {', '.join(PRESETS)}")
    if changes and "head_dim" not in changes:
        changes = {"head_dim": 0, **changes} if {"width", "num_heads"} & changes.keys() else changes
    return dataclasses.replace(PRESETS[name], **changes)
