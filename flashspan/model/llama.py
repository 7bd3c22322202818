"""LLaMA 2 and 3 on one page: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    model = Llama(preset("tiny"), attention=flashspan.attention)
    hidden = model(tokens, positions)          # [B, T] -> [B, T, E]
    loss = model.loss(hidden, targets)         # the sum over tokens; whole logits never exist
    logits = model.logits(hidden[:, -1])       # [B, V]

The attention is handed in and called as attention(q, k, v, causal=True) or (q, k, v, mask=mask). The model is told
nothing of devices: on a part of a sequence it gets that part's tokens and their positions, the mask of the whole
sequence, which it does not open, and an attention that knows the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import LlamaConfig
from .loss import Slope, linear_cross_entropy, slope_in_parts
from .rope import Rotation, rotate, rotation

Attend = Callable[..., Any]
"""attention(q [B, H, T, D], k, v [B, K, S, D], *, causal or mask, scale with `Products`) -> [B, H, T, D]."""


class Products(NamedTuple):
    """A layer's products with what follows them, where someone who knows the device has one kernel for each."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(x, Wq, Wk, Wv, cos, sin) -> q and k, rotated, and v, [B, T, heads, D]; q in the unit that `scale` undoes."""
    add_product: Callable[..., Tensor]
    """(x, a, W) -> x + a W^T."""
    feed_forward: Callable[..., Tensor]
    """(x, normed, Wg, Wu, Wd) -> x + (silu(normed Wg^T) * (normed Wu^T)) Wd^T."""
    scale: float
    """What attention is told, in place of 1 / sqrt(D), the rest of which is in q."""


class RMSNorm(nn.RMSNorm):
    """Each row over the root of its mean square, times a weight: PyTorch's one kernel, or spelled out for a compiler.

    Spelled out, the roots are a tensor of their own: kept, they spare whoever makes the rest again a look at each row.
    """

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * inverse * self.weight).to(x.dtype)


class Attention(nn.Module):
    """The projections around grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.products: Products | None = None
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.width, query_width, bias=False)
        self.key = nn.Linear(config.width, key_width, bias=False)
        self.value = nn.Linear(config.width, key_width, bias=False)
        self.output = nn.Linear(query_width, config.width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What to attend with, a token's heads side by side: q [B, T, H, D]; k, v [B, T, K, D]."""
        if self.products is not None:
            weights = (self.query.weight, self.key.weight, self.value.weight)
            return self.products.project(x, *weights, cos, sin)
        # As many heads as the features at hand: the layers may have been split.
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [B, T, E] with what the attention found, [B, H, T, D], added."""
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.products is not None:
            return self.products.add_product(x, mixed, self.output.weight)
        return x + self.output(mixed)


class FeedForward(nn.Module):
    """SwiGLU. [B, T, E] -> [B, T, E]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.products: Products | None = None
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """x with what is made of it, normalised, added."""
        if self.products is not None:
            return self.products.feed_forward(x, normed, self.gate.weight, self.up.weight, self.down.weight)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalised input and added to it. [B, T, E] -> [B, T, E].

    What is before the attention and what is after it are two functions of tensors: whoever trains may compile or
    recompute them, whatever the attention is.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, turn: Rotation, mask: Any, attend: Attend) -> Tensor:
        # Turned here and not inside: a compiled function wants the gradients of its outputs in their own order, and
        # attention's are in the order that its inputs had.
        q, k, v = (each.transpose(1, 2) for each in self.before(x, turn.cos, turn.sin))
        options: dict[str, Any] = {"causal": True} if mask is None else {"mask": mask}
        if self.attention.products is not None:
            options["scale"] = self.attention.products.scale
        return self.after(x, attend(q, k, v, **options))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x, [B, T, heads, D]."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x with what the attention found, and then what the feed-forward makes of it, added."""
        x = self.attention.merge(x, mixed)
        return self.ffn(x, self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens to hidden states; `loss` and `logits` apply the head. Weights are random until `initialize` or a load."""

    def __init__(self, config: LlamaConfig, *, attention: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attention
        self.slope: Slope = slope_in_parts
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        *,
        attends: Sequence[Attend] | None = None,
    ) -> Tensor:
        """Hidden states [B, T, E] of tokens [B, T] at `positions` [T] or [B, T] (0, 1, 2, ... unless given).

        `mask` goes to the attention; None means causal. `attends` gives each layer an attention of its own, in place
        of the model's: a cache of keys is one.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        turn = rotation(positions, self.config)
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, turn, mask, self.attend if attends is None else attends[index])
        return self.norm(x)

    def use(self, products: Products) -> None:
        """Have all layers make their products so. In place."""
        layer: Any
        for layer in self.layers:
            layer.attention.products = layer.ffn.products = products

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V]."""
        return self.head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross entropies of hidden [B, T, E] against targets [B, T], float32; -100 does not count."""
        return linear_cross_entropy(hidden.flatten(0, -2), self.head.weight, targets.flatten(), slope=self.slope)

    def initialize(self, seed: int) -> None:
        """Fresh weights, decided by the seed and each parameter's name."""
        for name, param in self.named_parameters():
            with torch.no_grad():
                param.copy_(initial_weight(name, param.shape, self.config, seed))


def initial_weight(name: str, shape: Sequence[int], config: LlamaConfig, seed: int) -> Tensor:
    """A parameter's first value: 1 for norms, else normal with deviation 0.02, less for what adds to the residual.

    An embedding that is not also the head has deviation 1: beside one much smaller, what the first layers add is so
    large that early training leaps. The value is a function of the seed and the name alone, so a model split in any way
    begins as the whole one does.
    """
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    std = 0.02 / math.sqrt(2 * config.num_layers) if name.endswith(("output.weight", "down.weight")) else 0.02
    if name == "embed.weight" and not config.tie_embeddings:
        std = 1.0
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.empty(*shape).normal_(0.0, std, generator=generator)
