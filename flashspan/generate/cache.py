"""Caches of keys and values. A model calls a cache as a layer's attention; a context has the caches of all layers.

context = Whole()
logits = context.begin(model, prompts, lengths, capacity)       # fills the caches
logits = context.extend(model, tokens)                          # one new token per row, [B, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flashspan import masks
from flashspan.attention import attention
from flashspan.model import Llama

from .fused_step import FusedStep, fused_step


class Context(Protocol):
    """The caches of all layers, as decoding uses them. `begin` processes prompts, `extend` one more token; both return
    the last token's logits [B, V], which the next call may overwrite."""

    def begin(self, model: Llama, tokens: Tensor, lengths: Tensor, capacity: int) -> Tensor: ...

    def extend(self, model: Llama, tokens: Tensor) -> Tensor: ...


class Whole:
    """The context of one device. Rows may have any lengths; a row sees its own tokens only.

    On a GPU a new token takes many small kernels. They are recorded once as a CUDA graph (unless `graph` is False) and
    replayed with one launch per token. A replay cannot use new numbers from the host, so positions are on the device.
    If the kernels of fused_step.py support the model (and unless `fused` is False), they compute the step, otherwise
    the model's own layers do.
    """

    def __init__(self, *, graph: bool = True, fused: bool = True) -> None:
        self.graph, self.fused = graph, fused
        self.caches: list[Cache] = []
        self._next: Callable[[Tensor], Tensor] | None = None  # on a GPU: computes the next logits
        self._kept: FusedStep | None = None  # kept because the CUDA graph uses its buffers

    def begin(self, model: Llama, tokens: Tensor, lengths: Tensor, capacity: int) -> Tensor:
        """Process prompts [B, T]; row b has lengths[b] tokens, then padding. The caches have room for `capacity`
        tokens."""
        self.caches = [Cache(attention, capacity) for _ in model.layers]
        self._next = self._kept = None
        self.capacity, self.longest = capacity, tokens.shape[1]
        self.ragged = int(lengths.min()) < self.longest
        self.positions = lengths.to(tokens.device, torch.int64, copy=True)  # where each row's next token goes
        # Under a causal mask padding does not change the tokens before it; its keys are overwritten before they are
        # seen.
        hidden = model(tokens, attends=self.caches)
        return model.logits(hidden[torch.arange(len(tokens), device=tokens.device), self.positions - 1])

    def extend(self, model: Llama, tokens: Tensor) -> Tensor:
        """Process one more token of every row, [B, 1]."""
        self.longest += 1
        if self.longest > self.capacity:
            raise ValueError(f"this context has room for {self.capacity} tokens: got {self.longest}; make a larger one")
        if tokens.is_cuda:
            self._next = self._next or self._choose(model, tokens)
            return self._next(tokens)
        if self.ragged:
            return self._step(model, tokens, self.longest)
        # Rows of equal length need no `Rows` mask.
        position = torch.tensor([self.longest - 1], device=tokens.device)
        return model.logits(model(tokens, position, attends=self.caches)[:, -1])

    def _choose(self, model: Llama, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """The function that computes the logits of one token per row on a GPU."""
        rooms = [cache.room for cache in self.caches]
        self._kept = fused_step(model, rooms, self.positions, not self.ragged) if self.fused else None
        run = self._kept or (lambda given: self._step(model, given, self.capacity))
        return Recorded(run, tokens, self.positions) if self.graph else run

    def _step(self, model: Llama, tokens: Tensor, reach: int) -> Tensor:
        """`extend` with the model's own layers, over the first `reach` places of the caches."""
        end = (self.positions + 1).int().unsqueeze(1)
        seen = masks.Rows(torch.zeros_like(end), end, reach, convex=True)
        for cache in self.caches:
            cache.aim(self.positions, seen)
        logits = model.logits(model(tokens, self.positions.unsqueeze(1), attends=self.caches)[:, -1])
        self.positions += 1
        return logits


class Recorded:
    """A CUDA graph of `run`, a function of a tensor that also adds one to `counter`."""

    def __init__(self, run: Callable[[Tensor], Tensor], x: Tensor, counter: Tensor) -> None:
        self.given, self.graph = x.clone(), torch.cuda.CUDAGraph()
        # Run once, so that kernels are compiled and loaded before the recording; on a side stream, as CUDA requires.
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            run(self.given)
            counter -= 1
        torch.cuda.current_stream(x.device).wait_stream(side)
        # On that stream: PyTorch's default one belongs to the device on which the process recorded first.
        with torch.cuda.graph(self.graph, stream=side):
            self.result = run(self.given)

    def __call__(self, x: Tensor) -> Tensor:
        """The result; the next call overwrites it."""
        self.given.copy_(x)
        self.graph.replay()
        return self.result


class Cache:
    """Attention of the new tokens over all tokens so far. Memory for `capacity` tokens is allocated at the first
    call."""

    def __init__(self, attend: Callable[..., Any], capacity: int) -> None:
        self.attend, self.capacity, self.length = attend, capacity, 0
        self._room: Tensor | None = None  # [2, B, K, capacity, D]
        self._aim: tuple[Tensor, masks.Rows] | None = None

    @property
    def room(self) -> Tensor:
        """Keys and values, [2, B, K, capacity, D]; only after the first call."""
        assert self._room is not None
        return self._room

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, mask: Any = None) -> Tensor:
        """Attention of T new tokens, q [B, H, T, D] and k, v [B, K, T, D], to all tokens before and causally to each
        other. `causal` and `mask` are ignored."""
        if self._aim is not None:
            return self._extend(q, k, v, *self._aim)
        before = self.length
        k, v = self.append(k, v)
        return self.attend(q, k, v, mask=masks.causal(before))

    def aim(self, positions: Tensor, seen: masks.Rows) -> None:
        """From now on each call has one token per row. It is stored at `positions` [B] and sees the keys in `seen`."""
        self._aim = positions, seen

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, seen: masks.Rows) -> Tensor:
        room = self.room
        rows = torch.arange(len(positions), device=positions.device)
        room[:, rows, :, positions] = torch.stack((k, v))[..., 0, :].transpose(0, 1)
        keys, values = room[:, :, :, : seen.num_keys]
        return self.attend(q, keys, values, mask=seen)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store these keys and values. Returns all that are stored, [B, K, S, D]."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"this cache has room for {self.capacity} tokens: got {end}; make a larger one")
        if self._room is None:
            B, K, _, D = k.shape
            self._room = _zeros(k, 2, B, K, self.capacity, D)
        self._room[0, :, :, self.length : end] = k
        self._room[1, :, :, self.length : end] = v
        self.length = end
        keys, values = self._room[:, :, :, :end]
        return keys, values


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros with another tensor's dtype and device. On the host, memory is taken only when it is written to, because a
    text may end after ten tokens of a capacity of a million."""
    try:
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        raw = np.zeros(math.prod(shape) * like.element_size(), np.uint8)  # torch.zeros writes every element
        return torch.from_numpy(raw).view(like.dtype).view(shape)
    except (RuntimeError, MemoryError, ValueError, OverflowError) as error:
        raise ValueError(
            f"there is no memory for keys and values {list(shape)}: ask for fewer tokens, decode fewer prompts at a "
            "time, or split the context over ranks"
        ) from error
