"""Combine partial attention over each rank's keys, for the sharded KV cache of `generate`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashspan.context.bundle import Fields
from flashspan.context.strategy import ContextAttention
from flashspan.context.symmetric import SymmetricTransport
from flashspan.context.ulysses import all_to_all_tensors
from flashspan.kernels.contract import Carry
from flashspan.kernels.merge import merge


def combine(attend: ContextAttention, out: Tensor, lse: Tensor) -> Tensor:
    """Attention over all ranks' keys, from each rank's partial result for the same queries: out [B, H, T, D], lse
    [B, H, T].

    The result is float32 and has the same bits on every rank: parts are merged in rank order.
    """
    if attend.num_ranks == 1:
        return out
    part = Carry(out.float(), lse.float())
    for transport in (attend.inner, attend.outer):
        part = _combine(transport, part)
    return part.out


def _combine(transport: SymmetricTransport, part: Carry) -> Carry:
    if transport.num_ranks == 1:
        return part
    fields: Fields = [(tuple(x.shape), x.dtype) for x in part]
    parts = all_to_all_tensors(
        transport, [tuple(part)] * transport.num_ranks, lambda src, dst: fields, "partial results"
    )
    total = Carry(torch.zeros_like(part.out), torch.full_like(part.lse, -torch.inf))
    for one in parts:
        merge(total, Carry(*one))
    return total
