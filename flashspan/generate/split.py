"""A context split over ranks: each rank holds the keys and values of a part of the tokens, so the context may be larger
than the memory of one device.

    attend = context_parallel(group, layout="zigzag", strategy="ring")
    tokens = decode(model, prompt, 100, context=Split(attend))      # on every rank, the same prompt

The prompt is processed by a ring, a part on each rank. Then every rank computes the same new token: it attends to the
keys that it holds, and the partial results are weighted by their log-sum-exp and added in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.agreement import raise_together
from flashspan.attention import attention
from flashspan.context import ContextAttention
from flashspan.context.combine import combine
from flashspan.model import Llama

from .cache import Cache


class Split:
    """The context of a group of ranks. The ranks take turns to keep new tokens.

    group: all ranks of `attend`, in its order. By default the group of `attend`, or the world for a mesh of two
    dimensions.
    """

    def __init__(self, attend: ContextAttention, group: dist.ProcessGroup | None = None) -> None:
        self.attend, self.group = attend, _group_of(attend, group)
        self.caches: list[SplitCache] = []

    def begin(self, model: Llama, tokens: Tensor, lengths: Tensor, capacity: int) -> Tensor:
        """Process this rank's part of prompts [B, T], all of the same length and equal on every rank."""
        self.position = length = tokens.shape[1]
        if int(lengths.min()) != length:
            raise ValueError(
                f"a split context needs prompts of one length: got {lengths.tolist()}; decode them one by one"
            )
        placement = self.attend.placement(length)
        room = max(placement.sizes) + -(-(capacity - length) // self.attend.num_ranks)
        self.caches = [SplitCache(self.attend, room) for _ in model.layers]
        mine = self.attend.shard(tokens, 1)
        hidden = model(mine, self.attend.positions(length, tokens.device), attends=self.caches)
        for cache in self.caches:
            cache.filled = True
        # The last token's hidden state is on the rank that holds the last position.
        owner = next(rank for rank, part in enumerate(placement.ranges) if part and part[-1][-1] == length - 1)
        # Other ranks may hold no token: 5 tokens in zigzag on 4 ranks are 1, 2, 0 and 2.
        holds = owner == self.attend.rank
        last = hidden[:, -1].contiguous() if holds else hidden.new_empty(len(tokens), hidden.shape[2])
        if self.group is not None:
            dist.broadcast(last, group=self.group, group_src=owner)
        return model.logits(last)

    def extend(self, model: Llama, tokens: Tensor) -> Tensor:
        """Process one more token [B, 1], the same on every rank."""
        positions = torch.tensor([self.position], device=tokens.device)
        for cache in self.caches:
            cache.keeps = self.position % self.attend.num_ranks == self.attend.rank
        self.position += 1
        return model.logits(model(tokens, positions, attends=self.caches)[:, -1])


def _group_of(attend: ContextAttention, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of all ranks of an attention; None for one rank, which needs no communication."""
    given = group is not None
    if not given:
        transports = [transport for transport in (attend.outer, attend.inner) if transport.num_ranks > 1]
        if not transports:
            return None
        # A mesh of two dimensions has a group for each row and column, but none for all its ranks.
        group = transports[0].group if len(transports) == 1 else dist.group.WORLD
    place, fault = (dist.get_rank(group), dist.get_world_size(group)), None
    if place != (attend.rank, attend.num_ranks):
        fault = (
            f"group= must have the ranks of the attention in the same order: got rank {place[0]} of {place[1]} in the "
            f"group, rank {attend.rank} of {attend.num_ranks} in the attention; pass such a group"
        )
    if not given and place[1] == attend.num_ranks:
        raise_together(fault, group)
    elif fault is not None:  # no collective: the group may have ranks that do not make this call
        raise ValueError(fault)
    return group if attend.num_ranks > 1 else None


class SplitCache(Cache):
    """One layer's attention over the keys of all ranks."""

    def __init__(self, attend: ContextAttention, capacity: int) -> None:
        super().__init__(attend, capacity)
        self.ranks, self.filled, self.keeps = attend, False, False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, mask: Any = None) -> Tensor:
        """The first call has this rank's part of the prompt. Each later call has one new token, and one rank keeps its
        k and v."""
        if not self.filled:
            self.append(k, v)
            return self.attend(q, k, v, causal=True)
        nothing = k[:, :, :0]
        keys, values = self.append(k, v) if self.keeps else self.append(nothing, nothing)
        out, lse = attention(q, keys, values, return_lse=True)
        return combine(self.ranks, out, lse).to(q.dtype)
