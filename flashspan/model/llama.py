"""LLaMA 2 and 3 on one page: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    model = Llama(preset("tiny"), attention=flashspan.attention)
    hidden = model(tokens, positions)          # [B, T] -> [B, T, E]
    loss = model.loss(hidden, targets)         # the sum over tokens, without storing all logits
    logits = model.logits(hidden[:, -1])       # [B, V]

The attention is an argument, called as attention(q, k, v, causal=True) or attention(q, k, v, mask=mask). The model has
no code for several devices. For a part of a sequence, its inputs are the tokens of that part, their positions, and the
mask of the whole sequence. The model passes the mask to an attention that communicates with the other ranks.
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
from .loss import LossesAndGradients, linear_cross_entropy, losses_and_gradients_in_parts
from .rope import Rotation, rotate, rotation

Attend = Callable[..., Any]
"""attention(q [B, H, T, D], k, v [B, K, S, D], *, causal or mask) -> [B, H, T, D]; with `Products`, also scale."""


class Products(NamedTuple):
    """Replacements for a layer's matmuls, each fused with the operations that follow it. The caller provides them."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(x, Wq, Wk, Wv, cos, sin) -> q and k, rotated, and v, [B, T, heads, D]; q is multiplied by a constant."""
    add_product: Callable[..., Tensor]
    """(x, a, W) -> x + a W^T."""
    feed_forward: Callable[..., Tensor]
    """(x, normed, Wg, Wu, Wd) -> x + (silu(normed Wg^T) * (normed Wu^T)) Wd^T."""
    scale: float
    """Attention's scale in place of 1 / sqrt(D): it accounts for the constant in q."""


class RMSNorm(nn.RMSNorm):
    """Divides each row by its root mean square and multiplies it by a weight.

    It uses PyTorch's kernel, but plain operators under torch.compile: then the inverse roots are a separate tensor. If
    that is saved, recomputing the norm needs no reduction.
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
        """Queries, keys and values: q [B, T, H, D]; k, v [B, T, K, D]."""
        if self.products is not None:
            weights = (self.query.weight, self.key.weight, self.value.weight)
            return self.products.project(x, *weights, cos, sin)
        # The number of heads follows from the features: tensor parallelism may have split the layers.
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [B, T, E] plus the output projection of attention's result `mixed` [B, H, T, D]."""
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
        """x plus SwiGLU of `normed`, the normalised x."""
        if self.products is not None:
            return self.products.feed_forward(x, normed, self.gate.weight, self.up.weight, self.down.weight)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Block(nn.Module):
    """One pre-norm layer: x + attention, then x + feed-forward. [B, T, E] -> [B, T, E].

    `before` and `after`, the parts around attention, are functions of tensors only. So the trainer can compile or
    recompute them with any attention.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, turn: Rotation, mask: Any, attend: Attend) -> Tensor:
        # Transposed here, outside the compiled `before`: a compiled function needs the gradients of its outputs in the
        # memory layout of the outputs, and attention's gradients have the layout of its inputs.
        q, k, v = (each.transpose(1, 2) for each in self.before(x, turn.cos, turn.sin))
        options: dict[str, Any] = {"causal": True} if mask is None else {"mask": mask}
        if self.attention.products is not None:
            options["scale"] = self.attention.products.scale
        return self.after(x, attend(q, k, v, **options))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x, [B, T, heads, D]."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer after attention's result `mixed`."""
        x = self.attention.merge(x, mixed)
        return self.ffn(x, self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens to hidden states; `loss` and `logits` apply the head. Call `initialize` or load weights before use."""

    def __init__(self, config: LlamaConfig, *, attention: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attention
        self.losses_and_gradients: LossesAndGradients = losses_and_gradients_in_parts
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
        """Hidden states [B, T, E] of tokens [B, T] at `positions` [T] or [B, T] (default: 0, 1, 2, ...).

        `mask` is passed to the attention; None means causal. `attends` has one attention per layer, such as its KV
        cache, in place of the model's.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        turn = rotation(positions, self.config)
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, turn, mask, self.attend if attends is None else attends[index])
        return self.norm(x)

    def use(self, products: Products) -> None:
        """Use these fused operators in all layers, in place."""
        layer: Any
        for layer in self.layers:
            layer.attention.products = layer.ffn.products = products

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states. [..., E] -> [..., V]."""
        return self.head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross entropies of hidden [B, T, E] and targets [B, T], float32; -100 is ignored."""
        return linear_cross_entropy(
            hidden.flatten(0, -2), self.head.weight, targets.flatten(), losses_and_gradients=self.losses_and_gradients
        )

    def initialize(self, seed: int) -> None:
        """Random weights, which depend only on the seed and each parameter's name."""
        for name, param in self.named_parameters():
            with torch.no_grad():
                param.copy_(initial_weight(name, param.shape, self.config, seed))


def initial_weight(name: str, shape: Sequence[int], config: LlamaConfig, seed: int) -> Tensor:
    """A parameter's initial value: 1 for norms, otherwise normal with standard deviation 0.02, or less for matrices
    whose output is added to the residual stream.

    An untied embedding has standard deviation 1: with a much smaller one, the outputs of the first layers dominate, and
    the loss jumps early in training. The value depends only on the seed and the name, so a split model starts with the
    same weights as a whole one.
    """
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    std = 0.02 / math.sqrt(2 * config.num_layers) if name.endswith(("output.weight", "down.weight")) else 0.02
    if name == "embed.weight" and not config.tie_embeddings:
        std = 1.0
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.empty(*shape).normal_(0.0, std, generator=generator)
