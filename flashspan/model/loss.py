"""The head and the cross entropy in one, chunk by chunk: logits of a few thousand tokens exist at a time, never all.

Both gradients are made while a chunk's logits are there, in forward, so backward computes nothing again: it scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
CHUNK_NUMBERS = 2**27
"""Logits alive at a time: 512 MiB of float32."""


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None) -> Tensor:
    """sum(cross_entropy(x @ weight.T, targets)) in float32. x [N, E], weight [V, E], targets [N]; -100 is ignored.

    Under autocast the products are in its dtype, as a linear layer's would be. Differentiable once.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    chunk = chunk or max(256, CHUNK_NUMBERS // weight.shape[0])
    learning = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        x, weight, targets, chunk, learning and x.requires_grad, learning and weight.requires_grad
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, wants_x: bool, wants_weight: bool
    ) -> Tensor:
        dx = torch.empty_like(x) if wants_x else None
        dweight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if wants_weight else None
        total = torch.zeros((), dtype=_wide(x.dtype), device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for begin in range(0, len(x), chunk):
                rows, goals = x[begin : begin + chunk], targets[begin : begin + chunk]
                valid = (goals != IGNORE).unsqueeze(-1)  # [n, 1]
                index = goals.clamp(min=0).unsqueeze(-1)
                logits = (rows @ weight.T).to(_wide(x.dtype))  # [n, V]
                lse = logits.logsumexp(-1, keepdim=True)
                total += ((lse - logits.gather(-1, index)) * valid).sum()
                if dx is None and dweight is None:
                    continue
                # The gradient of the logits: probabilities, less one at the target, nothing where ignored.
                slope = logits.sub_(lse).exp_()
                slope.scatter_add_(-1, index, -torch.ones_like(lse))
                low = slope.mul_(valid).to(x.dtype)
                if dx is not None:
                    torch.mm(low, weight, out=dx[begin : begin + chunk])
                if dweight is not None:
                    dweight += low.T @ rows
        ctx.save_for_backward(dx, dweight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        dx, dweight = ctx.saved_tensors
        return (
            None if dx is None else dx * dout.to(dx.dtype),
            None if dweight is None else (dweight * dout).to(ctx.dtype),
            None,
            None,
            None,
            None,
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
