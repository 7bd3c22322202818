"""Small models, data and error measures for the tests of `flashspan.parallel`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Toy(nn.Module):
    """Odd sizes, a bias, a frozen parameter, a buffer, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 5, bias=False)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.norm(self.first(x)))) + self.frozen) * self.scale


class Tied(nn.Module):
    """An embedding tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.mix = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 11  # [B, 7]
        return self.head(torch.tanh(self.mix(self.embed(tokens)))).mean(1)


MODELS = {"toy": Toy, "tied": Tied}
OUTPUTS = {"toy": 5, "tied": 11}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(name: str, step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs [size, 7] and a random weight for each output, so that gradients have different signs and sizes."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size, 7, generator=generator)
    return x, torch.randn(size, OUTPUTS[name], generator=generator)


def distance(got: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    """The largest error relative to the norm, over pairs of tensors."""
    pairs = list(zip(got, want, strict=True))
    assert pairs
    return max(((g.double() - w.double()).norm() / w.double().norm().clamp_min(1e-30)).item() for g, w in pairs)
