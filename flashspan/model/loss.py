"""The head and the cross entropy as one operation over chunks of tokens, so that all logits are never stored at once.

Forward also computes both gradients of each chunk. Backward then only multiplies them by the incoming gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
CHUNK_BYTES = 2**31
"""The size of a chunk's logits: 8192 tokens of a vocabulary of 128,256 in bfloat16. Each chunk reads and writes the
weight's gradient once (a gigabyte in float32 for this vocabulary and width 2048), so chunks should be large."""
MOST_ROWS = 2**14
"""The maximum number of rows in a chunk. The weight's gradient is a sum over the rows: with more, it could overflow
float16."""
PART_NUMBERS = 2**26
"""The number of logits in a part of an unfused computation: 256 MiB for each float32 intermediate."""

LossesAndGradients = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""f(logits [n, V], targets [n]) -> losses [n] and their gradients [n, V]; it may overwrite the logits."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    losses_and_gradients: LossesAndGradients | None = None,
) -> Tensor:
    """sum(cross_entropy(x @ weight.T, targets)) in float32. x [N, E], weight [V, E], targets [N]; -100 is ignored.

    Under autocast, matmuls use its dtype, as in a linear layer. Differentiable once. `losses_and_gradients` is
    `losses_and_gradients_in_parts`, a compiled `losses_and_gradients_at_once`, or a kernel.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if chunk is None:
        chunk = chunk_rows(weight.shape[0], weight.element_size())
    learning = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        x,
        weight,
        targets,
        chunk,
        losses_and_gradients or losses_and_gradients_in_parts,
        learning and x.requires_grad,
        learning and weight.requires_grad,
    )


def chunk_rows(vocab_size: int, itemsize: int) -> int:
    """The number of rows in a chunk: a multiple of a matmul's tile."""
    return min(max(256, CHUNK_BYTES // (vocab_size * itemsize) // 256 * 256), MOST_ROWS)


def losses_and_gradients_at_once(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses [n] of logits [n, V], float32 or wider, and their gradients [n, V].

    The gradient of a row is its probabilities, minus 1 at the target; it is 0 in an ignored row.

    The gradients are a new tensor, because compiled code (torch 2.11) reads an overwritten input too late.
    """
    goals = targets.unsqueeze(-1)  # [n, 1]
    valid = goals != IGNORE
    wide = logits.to(_wide(logits.dtype))
    lse = wide.logsumexp(-1, keepdim=True)
    losses = ((lse - wide.gather(-1, goals.clamp(min=0))) * valid).squeeze(-1)
    at_target = torch.arange(logits.shape[-1], device=logits.device) == goals
    return losses, (((wide - lse).exp() - at_target.to(wide.dtype)) * valid).to(logits.dtype)


def losses_and_gradients_in_parts(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`losses_and_gradients_at_once` for a few rows at a time; the gradients overwrite the logits."""
    rows = max(1, PART_NUMBERS // logits.shape[-1])
    losses = []
    for part, goals in zip(logits.split(rows), targets.split(rows), strict=True):
        found, gradients = losses_and_gradients_at_once(part, goals)
        losses.append(found)
        part.copy_(gradients)
    return torch.cat(losses), logits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        losses_and_gradients: LossesAndGradients,
        wants_x: bool,
        wants_weight: bool,
    ) -> Tensor:
        dx = torch.empty_like(x) if wants_x else None
        dweight: Tensor | None = None
        total = torch.zeros((), dtype=_wide(x.dtype), device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for begin in range(0, len(x), chunk):
                rows = x[begin : begin + chunk]
                losses, gradients = losses_and_gradients(rows @ weight.T, targets[begin : begin + chunk])
                total += losses.sum()
                if dx is not None:
                    torch.mm(gradients, weight, out=dx[begin : begin + chunk])
                if wants_weight:
                    dweight = _add_product(dweight, gradients.T, rows)
                del gradients  # freed before the next chunk's logits are computed
        if wants_weight and dweight is None:
            dweight = torch.zeros_like(weight)
        ctx.save_for_backward(dx, dweight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        dx, dweight = ctx.saved_tensors
        if dweight is not None:  # written in the weight's dtype: float32 may take a gigabyte
            dweight = torch.mul(dweight, dout, out=torch.empty_like(dweight, dtype=ctx.dtype))
        if dx is not None:
            dx = (dx.to(_wide(dx.dtype)) * dout).to(dx.dtype)
        return dx, dweight, None, None, None, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in float32 or wider, in place if there is a total."""
    wide = _wide(a.dtype)
    if a.is_cuda and a.dtype != wide:  # the matmul adds in float32, without a 16-bit intermediate
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    part = a @ b
    return part.to(wide) if total is None else total.add_(part)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
