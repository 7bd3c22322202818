"""FlashAttention-2 in plain PyTorch: Algorithms 1 and 2 as published, one pair of tiles at a time.

Read this before the Triton kernels, which compute the same in the same order and with the same names. Only one
[BLOCK_Q, BLOCK_K] tile of the [T, S] matrix exists at a time. Query heads that share a key head are a dimension of
their own, of size G = H / K: q is viewed as [B, K, G, T, D], and keys and values are not expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import FULL, PARTIAL, Blocks, Mask
from flashspan.kernels.masks.bits import unpack
from flashspan.kernels.masks.build import interval_kinds

BLOCK_Q, BLOCK_K = 128, 128


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    carry: Carry | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Carry:
    """Algorithm 1; see contract.py. Computes in float32, or float64 when q is float64.

    A carry is a state of the algorithm: m = lse, l = 1 and O = out, a normalised softmax.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    if carry is None:
        out = torch.zeros_like(q, dtype=work if work == torch.float64 else out_dtype)
        carry = Carry(out, torch.full(q.shape[:-1], -torch.inf, dtype=work, device=q.device))
    if q.numel() == 0:
        return carry
    if isinstance(problem.mask, Blocks) and problem.mask.num_batch * problem.mask.num_heads > 1:
        for part, b, h, kv in _each_map(problem, problem.mask, q, k):
            forward(q[b, h], k[b, kv], v[b, kv], part, carry=Carry(carry.out[b, h], carry.lse[b, h]))
        return carry
    plan, scale = _Plan(q, k, v, problem.mask, problem.dropout), problem.scale
    q, out, lse = (_group(x, k) for x in (q, *carry))
    for i in plan.q_tiles:
        q_i = q[..., i, :].to(work)
        m = lse[..., i].to(work)  # the running maximum of the scores
        # The sum of exp(score - m) is 1, times the rounding error of m if the carry's lse is float64.
        l = torch.exp(torch.where(m == -torch.inf, 0.0, lse[..., i] - m))
        o = (out[..., i, :] * l[..., None]).to(work)
        for j, visible in plan.keys(i):
            k_j, v_j = k[:, :, j].to(work), v[:, :, j].to(work)
            s = torch.einsum("bkgtd,bksd->bkgts", q_i, k_j) * scale
            if visible is not None:
                s = torch.where(visible, s, -torch.inf)
            m_new = torch.maximum(m, s.amax(-1))
            shift = torch.where(m_new == -torch.inf, 0.0, m_new)  # for a row that has seen no key, exp(-inf - 0) is 0
            p = torch.exp(s - shift[..., None])
            shrink = torch.exp(m - shift)
            l = shrink * l + p.sum(-1)
            o = shrink[..., None] * o + plan.weigh(p * plan.survival(i, j), v_j, visible)
            m = m_new
        out[..., i, :] = o / torch.where(l == 0, 1.0, l)[..., None]
        lse[..., i] = m + torch.log(l)
    return carry


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    problem: Problem,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
) -> None:
    """Algorithm 2; see contract.py. dK and dV are complete after each key tile, dQ after all of them."""
    work = torch.promote_types(q.dtype, torch.float32)
    if not accumulate:
        for total in (dq, dk, dv):
            total.zero_()
    if q.numel() == 0:
        return
    if isinstance(problem.mask, Blocks) and problem.mask.num_batch * problem.mask.num_heads > 1:
        sums = [torch.zeros_like(x, dtype=work) for x in (dq, dk, dv)]
        for part, b, h, kv in _each_map(problem, problem.mask, q, k):
            inputs = (dout[b, h], q[b, h], k[b, kv], v[b, kv], lse[b, h], delta[b, h])
            dq_part, dk_part, dv_part = (x[b, heads] for x, heads in zip(sums, (h, kv, kv), strict=True))
            backward(*inputs, part, dq=dq_part, dk=dk_part, dv=dv_part, accumulate=True)
        for total, added in zip((dq, dk, dv), sums, strict=True):
            total += added
        return
    plan, scale = _Plan(q, k, v, problem.mask, problem.dropout), problem.scale
    blind = lse == -torch.inf
    if bool(blind.any()):  # a query that sees no key has no effect, not even as 0 * NaN
        q, dout = (x.masked_fill(blind[..., None], 0.0) for x in (q, dout))
    dq_sum = dq if dq.dtype == work else torch.zeros_like(dq, dtype=work)
    dout, q, lse, delta, dq_grouped = (_group(x, k) for x in (dout, q, lse, delta, dq_sum))
    for j in plan.k_tiles:
        k_j, v_j = k[:, :, j].to(work), v[:, :, j].to(work)
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        for i, visible in plan.queries(j):
            q_i, dout_i = q[..., i, :].to(work), dout[..., i, :].to(work)
            lse_i, delta_i = lse[..., i, None].to(work), delta[..., i, None].to(work)
            survival = plan.survival(i, j)
            p = torch.exp(torch.einsum("bkgtd,bksd->bkgts", q_i, k_j) * scale - lse_i)
            if visible is not None:
                p = torch.where(visible, p, 0.0)
            dv_j += torch.einsum("bkgts,bkgtd->bksd", p * survival, dout_i)
            dp = torch.einsum("bkgtd,bksd->bkgts", dout_i, v_j) * survival
            ds = p * (dp - delta_i) * scale
            if visible is not None:
                ds = torch.where(visible, ds, 0.0)
            dq_grouped[..., i, :] += plan.weigh(ds, k_j, visible)
            dk_j += torch.einsum("bkgts,bkgtd->bksd", ds, q_i)
        dk[:, :, j] += dk_j
        dv[:, :, j] += dv_j
    if dq_sum is not dq:
        dq += dq_sum


class _Plan:
    """The tiles to visit, the masks of the partial tiles, and dropout."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: Dropout | None) -> None:
        self.num_batch, self.num_heads, num_queries, _ = q.shape
        _, self.num_kv_heads, num_keys, _ = k.shape
        self.dropout, self.work = dropout, torch.promote_types(q.dtype, torch.float32)
        mask = mask.to(q.device)
        self.mask, self.block_q, self.block_k = mask, BLOCK_Q, BLOCK_K
        if isinstance(mask, Blocks):
            self.block_q, self.block_k = mask.block
            self.kinds = mask.kinds()[0, 0]
            self.numbers: list[list[int]] = mask.grid()[0, 0].tolist()  # the numbers of partial tiles' bits
        else:
            start, end = (torch.atleast_2d(x.to(q.device)) for x in mask.intervals(num_queries, num_keys))
            kinds = interval_kinds(start, end, num_keys, BLOCK_Q, BLOCK_K)
            # A tile that differs between sequences of the batch is masked in all of them.
            self.kinds = torch.where((kinds == kinds[0]).all(0), kinds[0], PARTIAL)
            self.bounds = [x[:, None, None] for x in (start, end)]
        self.q_tiles, self.k_tiles = _split(num_queries, self.block_q), _split(num_keys, self.block_k)
        self.finite = bool(k.isfinite().all() & v.isfinite().all())

    def keys(self, i: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The key tiles that some query of tile i sees, each with its mask (None if all pairs are visible)."""
        for number in self.kinds[i.start // self.block_q].nonzero().flatten().tolist():
            yield self.k_tiles[number], self.visible(i, self.k_tiles[number])

    def queries(self, j: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The query tiles that see some key of tile j, each with its mask."""
        for number in self.kinds[:, j.start // self.block_k].nonzero().flatten().tolist():
            yield self.q_tiles[number], self.visible(self.q_tiles[number], j)

    def visible(self, i: slice, j: slice) -> Tensor | None:
        """The mask of a tile, bool [1 or B, 1, 1, len(i), len(j)]; None if all pairs are visible."""
        row, column = i.start // self.block_q, j.start // self.block_k
        if self.kinds[row, column] == FULL:
            return None
        if isinstance(self.mask, Blocks):
            number = self.numbers[row][column]
            seen = unpack(self.mask.bits[number : number + 1])
            return seen[:, None, None, : i.stop - i.start, : j.stop - j.start]
        start, end = (bound[..., i, None] for bound in self.bounds)
        keys = torch.arange(j.start, j.stop, device=start.device)
        return (start <= keys) & (keys < end)

    def survival(self, i: slice, j: slice) -> Tensor | float:
        """The factor of each probability under dropout, 0 or 1 / (1 - p): [B, K, G, len(i), len(j)]."""
        if self.dropout is None:
            return 1.0
        rows, columns = range(i.start, i.stop), range(j.start, j.stop)
        keep = self.dropout.keep(self.num_batch, self.num_heads, rows, columns)
        return keep.unflatten(1, (self.num_kv_heads, -1)).to(self.work) * self.dropout.gain

    def weigh(self, weights: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
        """weights @ values, [B, K, G, T, D], in which a masked row of values has no effect, not even as 0 * NaN."""
        matmul = "bkgts,bksd->bkgtd"
        if self.finite or visible is None:
            return torch.einsum(matmul, weights, values)
        finite = values.isfinite()
        clean = torch.einsum(matmul, weights, torch.where(finite, values, 0.0))
        seen = torch.einsum(matmul, visible.to(values.dtype).expand_as(weights), (~finite).to(values.dtype))
        return torch.where(seen > 0, torch.nan, clean)


def _each_map(problem: Problem, mask: Blocks, q: Tensor, k: Tensor) -> Iterator[tuple[Problem, slice, slice, slice]]:
    """The problem of each map, with its slices of the batch, of the query heads and of the key heads."""
    num_heads, group = q.shape[1], q.shape[1] // max(1, k.shape[1])
    every = slice(None)
    for b in range(mask.num_batch):
        for h in range(mask.num_heads):
            dropout = problem.dropout
            if dropout is not None:
                stride = num_heads if dropout.batch_stride is None else dropout.batch_stride
                dropout = replace(dropout, first=dropout.first + b * stride + h, batch_stride=stride)
            heads = (slice(h, h + 1), slice(h // group, h // group + 1)) if mask.num_heads > 1 else (every, every)
            part = problem._replace(mask=mask.map(b, h), dropout=dropout)
            yield part, slice(b, b + 1) if mask.num_batch > 1 else every, *heads


def _split(length: int, block: int) -> list[slice]:
    return [slice(first, min(first + block, length)) for first in range(0, length, block)]


def _group(x: Tensor, k: Tensor) -> Tensor:
    """A view of [B, H, ...] as [B, K, G, ...]."""
    return x.unflatten(1, (k.shape[1], x.shape[1] // max(k.shape[1], 1)))
