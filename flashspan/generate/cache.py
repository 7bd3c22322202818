"""Keys and values of the tokens so far. A cache is a layer's attention; a context is all layers' caches.

context = Whole()
hidden = context.begin(model, prompt, capacity)                 # fills the caches
hidden = context.extend(model, token, position)                 # one query, every key so far
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flashspan import masks
from flashspan.attention import attention
from flashspan.model import Llama


class Context(Protocol):
    """What decoding needs of a memory: the last token's hidden state [B, E], for a prompt and for a token after it."""

    def begin(self, model: Llama, tokens: Tensor, capacity: int) -> Tensor: ...

    def extend(self, model: Llama, tokens: Tensor, position: int) -> Tensor: ...


class Whole:
    """The context of one device."""

    def __init__(self, attend: Callable[..., Any] = attention) -> None:
        self.attend = attend
        self.caches: list[Cache] = []

    def begin(self, model: Llama, tokens: Tensor, capacity: int) -> Tensor:
        """The prompt [B, T] through the model at once; room for `capacity` tokens is taken."""
        self.caches = [Cache(self.attend, capacity) for _ in model.layers]
        return model(tokens, attends=self.caches)[:, -1]

    def extend(self, model: Llama, tokens: Tensor, position: int) -> Tensor:
        """One token more, [B, 1]."""
        positions = torch.tensor([position], device=tokens.device)
        return model(tokens, positions, attends=self.caches)[:, -1]


class Cache:
    """Attention of the new tokens over all tokens so far. Room for `capacity` tokens is taken when the first come."""

    def __init__(self, attend: Callable[..., Any], capacity: int) -> None:
        self.attend, self.capacity, self.length = attend, capacity, 0
        self._room: Tensor | None = None  # [2, B, K, capacity, D]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **sight: Any) -> Tensor:
        """q [B, H, T, D]; k, v [B, K, T, D] of T new tokens, which see each other causally and all before them."""
        before = self.length
        k, v = self.append(k, v)
        return self.attend(q, k, v, mask=masks.causal(before))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep these keys and values; all that are kept, [B, K, S, D]."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"this cache has room for {self.capacity} tokens: got {end}; make a larger one")
        if self._room is None:
            B, K, _, D = k.shape
            self._room = k.new_empty(2, B, K, self.capacity, D)
        self._room[0, :, :, self.length : end] = k
        self._room[1, :, :, self.length : end] = v
        self.length = end
        keys, values = self._room[:, :, :, :end]
        return keys, values
