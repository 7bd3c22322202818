"""The reference: attention as in a textbook, in the precision of its inputs (float64 in tests).

It allocates the whole [T, S] matrix, so it is for small shapes. Its results define correctness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import dense
from flashspan.kernels.merge import merge


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    carry: Carry | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Carry:
    """See contract.py. Computes in float32, or float64 when q is float64."""
    scores, visible = _scores(q, k, problem)
    lse = scores.logsumexp(-1)
    probs = _probabilities(scores, lse) * _survival(q, k, problem.dropout)
    out = _weigh(probs, _expand(v, q).to(probs.dtype), visible)
    if carry is not None:
        merge(carry, Carry(out.to(carry.out.dtype), lse))
        return carry
    out_dtype = torch.promote_types(out_dtype, torch.float64) if q.dtype == torch.float64 else out_dtype
    return Carry(out.to(out_dtype), lse)


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
    """See contract.py."""
    blind = (lse == -torch.inf)[..., None]  # a query that sees no key has no effect, not even as 0 * NaN
    q, dout = q.masked_fill(blind, 0.0), dout.masked_fill(blind, 0.0)
    scores, visible = _scores(q, k, problem)
    probs = _probabilities(scores, lse.to(scores.dtype))
    survival = _survival(q, k, problem.dropout)
    dout = dout.to(scores.dtype)
    dprobs = dout @ _expand(v, q).to(scores.dtype).mT * survival
    dscores = torch.where(visible, probs * (dprobs - delta.to(scores.dtype)[..., None]), 0.0) * problem.scale
    for total, part in (
        (dq, _weigh(dscores, _expand(k, q).to(scores.dtype), visible)),
        (dk, _sum_groups(dscores.mT @ q.to(scores.dtype), k)),
        (dv, _sum_groups((torch.where(visible, probs, 0.0) * survival).mT @ dout, v)),
    ):
        total.add_(part) if accumulate else total.copy_(part)


def _scores(q: Tensor, k: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Scaled scores [B, H, T, S], -inf where masked, and the mask [1 or B, 1 or H, T, S], True where visible."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    visible = dense(problem.mask.to(q.device), q.shape[-2], k.shape[-2]).to(q.device)
    if visible.dim() < 4:
        visible = visible[None, None] if visible.dim() == 2 else visible[:, None]
    scores = q.to(dtype) @ _expand(k, q).to(dtype).mT * problem.scale
    return torch.where(visible, scores, -torch.inf), visible


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in a row that sees no key."""
    return torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])


def _survival(q: Tensor, k: Tensor, dropout: Dropout | None) -> Tensor | float:
    """The factor of each probability under dropout: 0, or 1 / (1 - p)."""
    if dropout is None:
        return 1.0
    keep = dropout.keep(q.shape[0], q.shape[1], range(q.shape[2]), range(k.shape[2]))
    return keep.to(torch.promote_types(q.dtype, torch.float32)) * dropout.gain


def _weigh(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights @ values, in which a masked row of values has no effect, not even as 0 * NaN."""
    finite = values.isfinite()
    if bool(finite.all()):
        return weights @ values
    result = weights @ torch.where(finite, values, 0.0)
    # A row that sees a non-finite value has a non-finite result.
    seen = visible.to(values.dtype) @ (~finite).to(values.dtype)
    return torch.where(seen > 0, torch.nan, result)


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """K/V heads repeated for the query heads that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if x.shape[1] != q.shape[1] else x


def _sum_groups(grad: Tensor, x: Tensor) -> Tensor:
    return grad.unflatten(1, (x.shape[1], grad.shape[1] // max(1, x.shape[1]))).sum(2)
