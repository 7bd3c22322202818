"""Ulysses: all-to-all from tokens to heads, attention over the group's tokens, and all-to-all back.

Every rank of the group holds a part of the tokens and all heads. The inner attention runs on all tokens of the group
and a part of the heads. Ranks may have different numbers of query heads. If there are more ranks than kv heads, or a
rank's query heads do not divide evenly over its kv heads, kv heads are replicated as by `repeat_interleave`, and their
gradients are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashspan.context.bundle import BufferPool, Fields, lay_out
from flashspan.context.core import Core, Gradients, Options, Saved
from flashspan.context.layout import Placement
from flashspan.context.recompute import keep
from flashspan.context.transport import Transport, all_to_all
from flashspan.kernels.contract import Carry
from flashspan.kernels.masks import Mask


@dataclass(frozen=True)
class Share:
    """One rank's heads: query heads `q`, and the kv heads it receives (repeated numbers are replicas)."""

    q: range
    kv: tuple[int, ...]


def share_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> list[Share]:
    """The heads of each rank: whole groups of query heads if there are enough kv heads, otherwise evenly split query
    heads."""
    group = num_heads // max(1, num_kv_heads)
    units, per_unit = (num_kv_heads, group) if num_kv_heads >= num_ranks else (num_heads, 1)
    shares = []
    for rank in range(num_ranks):
        heads = range(rank * units // num_ranks * per_unit, (rank + 1) * units // num_ranks * per_unit)
        behind = [head // group for head in heads]
        distinct = sorted(set(behind))
        even = all(behind.count(kv) * len(distinct) == len(behind) for kv in distinct)
        shares.append(Share(heads, tuple(distinct if even else behind)))
    return shares


def bytes_per_token(shares: Sequence[Share], head_dim: int, itemsize: int) -> tuple[float, float]:
    """Bytes that all ranks together send per token, in forward and in backward, if all have the same number of tokens.

    With U ranks and K' kv heads, replicas counted: forward (U - 1) / U * ((2 H + 2 K') D E + 4 H), backward (U - 1) / U
    * (2 H D E + 4 H + 2 K' D E'), where E = itemsize, and E' is 4 if replicas are summed (at least E), else E.
    """
    num_heads, kv, exact = shares[-1].q.stop, [kv for share in shares for kv in share.kv], max(4, itemsize)
    queries, keys = 2 * num_heads * head_dim * itemsize + num_heads * exact, 2 * len(kv) * head_dim
    summed = exact if len(kv) > len(set(kv)) else itemsize
    elsewhere = (len(shares) - 1) / len(shares)
    return elsewhere * (queries + keys * itemsize), elsewhere * (queries + keys * summed)


@dataclass(frozen=True, eq=False)
class Ulysses:
    """A core around an inner core: `row` places the group's tokens on its ranks, `inner` attends over all of them."""

    inner: Core
    transport: Transport
    row: Placement
    call: int = 0  # equal on all ranks that make the same call

    @property
    def mask(self) -> Mask:
        return self.inner.mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Carry, Saved]:
        shares = share_heads(q.shape[1], k.shape[1], self.transport.num_ranks)
        heads = [(share.q, share.kv, share.kv) for share in shares]
        q, k, v = self._to_heads((q, k, v), heads, "the all-to-all of q, k, v")
        exact = torch.promote_types(q.dtype, torch.float32)
        if q.shape[1]:
            carry, saved = self.inner.forward(q, k, v, self._inner_options(options, shares))
        else:
            carry = Carry(torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=exact))
            saved = (q, k, v, *carry)

        def back() -> tuple[Tensor, ...]:
            parts = self._to_tokens(carry, [(len(share.q),) * 2 for share in shares], "the all-to-all of out, lse")
            return tuple(torch.cat(list(x), 1) for x in zip(*parts, strict=True))

        return Carry(*keep(back)), saved

    def backward(self, dout: Tensor, dlse: Tensor | None, saved: Saved, options: Options) -> Gradients:
        shares = share_heads(dout.shape[1], options.num_kv_heads, self.transport.num_ranks)
        exact = torch.promote_types(dout.dtype, torch.float32)
        dlse = dout.new_zeros(dout.shape[:-1], dtype=exact) if dlse is None else dlse.to(exact)
        heads = [(share.q, share.q) for share in shares]
        dout, dlse = self._to_heads((dout, dlse), heads, "the all-to-all of dout, dlse")
        inner_options = self._inner_options(options, shares)
        if dout.shape[1]:
            dq, dk, dv = self.inner.backward(dout, dlse, saved, inner_options)
        else:
            dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        # A complete gradient is sent in its final dtype, a partial one in float32.
        kv_dtype = exact if inner_options.partial else dout.dtype
        sizes = [(len(share.q), len(share.kv), len(share.kv)) for share in shares]
        grads = (dq.to(dout.dtype), dk.to(kv_dtype), dv.to(kv_dtype))
        parts = self._to_tokens(grads, sizes, "the all-to-all of dq, dk, dv")
        dq = torch.cat([part[0] for part in parts], 1)
        B, _, T, D = dq.shape
        dk, dv = (dq.new_zeros((B, options.num_kv_heads, T, D), dtype=kv_dtype) for _ in range(2))
        for share, (_, *kv_parts) in zip(shares, parts, strict=True):
            index = torch.tensor(share.kv, dtype=torch.int64, device=dq.device)
            for total, part in zip((dk, dv), kv_parts, strict=True):
                total.index_add_(1, index, part)
        return dq, dk, dv

    def _inner_options(self, options: Options, shares: Sequence[Share]) -> Options:
        """The options of the inner call: this rank's number of kv heads, and dropout that starts at its first query
        head."""
        share, num_heads = shares[self.transport.rank], shares[-1].q.stop
        dropout = options.dropout
        if dropout is not None:
            stride = num_heads if dropout.batch_stride is None else dropout.batch_stride
            dropout = replace(dropout, first=dropout.first + share.q.start, batch_stride=stride)
        replicated = sum(len(share.kv) for share in shares) > options.num_kv_heads
        return Options(options.scale, len(share.kv), dropout, options.partial or replicated)

    def _to_heads(
        self, xs: Sequence[Tensor], heads: Sequence[Sequence[Sequence[int]]], label: str
    ) -> tuple[Tensor, ...]:
        """Exchange each x [B, heads, T_rank, ...] for [B, my heads, T, ...]; `heads[rank]` has a rank's heads of each
        x."""
        outgoing = [tuple(x[:, list(chosen)] for x, chosen in zip(xs, theirs, strict=True)) for theirs in heads]

        def shapes(src: int, dst: int) -> Fields:
            size = self.row.sizes[src]
            return [((len(x), len(h), size, *x.shape[3:]), x.dtype) for x, h in zip(xs, heads[dst], strict=True)]

        parts = all_to_all_tensors(self.transport, outgoing, shapes, label, self.call)
        return tuple(self.row.unshard(part, 2) for part in zip(*parts, strict=True))

    def _to_tokens(self, xs: Sequence[Tensor], heads: Sequence[Sequence[int]], label: str) -> list[tuple[Tensor, ...]]:
        """Exchange each x [B, my heads, T, ...] for every rank's heads of this rank's tokens, [B, its heads, T_rank,
        ...]; `heads[rank]` has the number of a rank's heads of each x."""
        outgoing = [tuple(self.row.shard(x, 2, rank) for x in xs) for rank in range(self.transport.num_ranks)]

        def shapes(src: int, dst: int) -> Fields:
            size = self.row.sizes[dst]
            return [((len(x), num, size, *x.shape[3:]), x.dtype) for x, num in zip(xs, heads[src], strict=True)]

        return all_to_all_tensors(self.transport, outgoing, shapes, label, self.call)


def all_to_all_tensors(
    transport: Transport,
    outgoing: Sequence[tuple[Tensor, ...]],
    shapes: Callable[[int, int], Fields],
    label: str,
    call: int = 0,
) -> list[tuple[Tensor, ...]]:
    """Send `outgoing[rank]` to each rank, and return the tensors received from each rank. This rank's own are not
    copied.

    `shapes(src, dst)` returns the shapes and dtypes of the tensors that src sends to dst. The next pass may overwrite
    received tensors.
    """
    device = outgoing[0][0].device

    def num_bytes(src: int, dst: int) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes(src, dst))

    buffers = []
    for rank, xs in enumerate(outgoing):
        fields, buffer = lay_out(shapes(transport.rank, rank) if rank != transport.rank else [], BufferPool(device))
        for field, x in zip(fields, xs, strict=False):
            field.copy_(x)
        buffers.append(buffer)
    incoming = all_to_all(transport, buffers, num_bytes, BufferPool(device), label, call)
    return [
        xs if rank == transport.rank else lay_out(shapes(rank, transport.rank), incoming[rank])[0]
        for rank, xs in enumerate(outgoing)
    ]


def all_gather(transport: Transport, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Every rank's x [n, ...] in rank order; `sizes` has each rank's n."""

    def shapes(src: int, dst: int) -> Fields:
        return [((sizes[src], *x.shape[1:]), x.dtype)]

    return [part for (part,) in all_to_all_tensors(transport, [(x,)] * transport.num_ranks, shapes, "shards to join")]
