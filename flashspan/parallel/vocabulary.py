"""A vocabulary split over ranks: an embedding, and a cross entropy without whole logits on any rank.

embed = VocabularyParallelEmbedding(V, E, mesh=mesh["tensor"])
head = ColumnParallelLinear(E, V, bias=False, mesh=mesh["tensor"])
loss = vocabulary_parallel_cross_entropy(head(x), targets, vocab_size=V, mesh=mesh["tensor"])     # per token
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .collectives import chunk_range
from .placement import leave_parallel, local_of, shard_parameter


class VocabularyParallelEmbedding(nn.Module):
    """An embedding with a range of the vocabulary on each rank. [B, T] -> [B, T, E], the sum over ranks."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mesh: DeviceMesh,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mesh, self.sequence_dim = mesh, sequence_dim
        dense = nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.weight = shard_parameter(dense.weight, mesh, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        _require_tokens(tokens, self.num_embeddings)
        weight = local_of(self.weight)
        begin, end = chunk_range(self.num_embeddings, self.mesh.size(), self.mesh.get_local_rank())
        if begin == end:  # more ranks than tokens: nothing to look up, but the weight stays in the graph
            found = weight.new_zeros(*tokens.shape, self.embedding_dim) + weight.sum()
        else:
            elsewhere = (tokens < begin) | (tokens >= end)
            found = F.embedding((tokens - begin).masked_fill(elsewhere, 0), weight)
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_parallel(found, self.mesh, sequence_dim=self.sequence_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.mesh.size()}"


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, vocab_size: int, mesh: DeviceMesh, ignore_index: int = -100
) -> Tensor:
    """The loss of each token, float32, 0 where ignored. [..., V / ranks], [...] -> [...].

    `logits` is this rank's range of the vocabulary. Three numbers per token are reduced: the largest logit, the sum of
    exponentials, and the target's logit.
    """
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    begin, end = chunk_range(vocab_size, num_ranks, rank)
    if logits.shape != (*targets.shape, end - begin):
        raise ValueError(
            f"rank {rank} of {num_ranks} needs the logits of tokens {begin} to {end} of {vocab_size}, one row per "
            f"target: expected {(*targets.shape, end - begin)}, got {tuple(logits.shape)}"
        )
    _require_tokens(targets.masked_fill(targets == ignore_index, 0), vocab_size)
    return _CrossEntropy.apply(logits, targets, begin, ignore_index, mesh.get_group())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, begin: int, ignore_index: int, group: dist.ProcessGroup
    ) -> Tensor:
        x = logits.float()
        here = (targets >= begin) & (targets < begin + x.shape[-1]) & (targets != ignore_index)
        index = (targets - begin).masked_fill(~here, 0).unsqueeze(-1)  # [..., 1]
        if x.shape[-1]:
            peak = x.amax(-1)
            chosen = x.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0)
        else:
            peak, chosen = x.new_full(targets.shape, -torch.inf), x.new_zeros(targets.shape)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        sums = torch.stack([(x - peak.unsqueeze(-1)).exp().sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()  # kept apart from the peak: adding a large peak would round it
        ignored = targets == ignore_index
        ctx.save_for_backward(logits, peak, log_sum, index, here, ignored)
        return (log_sum + (peak - sums[1])).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, peak, log_sum, index, here, ignored = ctx.saved_tensors
        grad = (logits.float() - peak.unsqueeze(-1) - log_sum.unsqueeze(-1)).exp()  # softmax, this rank's share
        if grad.shape[-1]:
            grad.scatter_add_(-1, index, -here.float().unsqueeze(-1))
        grad *= dout.masked_fill(ignored, 0.0).unsqueeze(-1)
        return grad.to(logits.dtype), None, None, None, None


def _require_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError (on a GPU, a device assertion) for tokens that no rank has, which would silently give zeros."""
    fine = ((tokens >= 0) & (tokens < vocab_size)).all()
    if fine.is_cuda:
        torch._assert_async(fine)  # without waiting for the device
    elif not fine:
        low, high = tokens.min().item(), tokens.max().item()
        raise ValueError(f"tokens must lie in [0, {vocab_size}): got {low} to {high}; use the model's tokenizer")
