"""Queries, keys and values of a layer in one kernel, with RoPE applied to queries and keys in its epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashspan.ops.checks import check_angles, check_tokens, check_weights
from flashspan.ops.choice import autocast, choose
from flashspan.ops.linear_add import sum_of_products

HEAD_DIMS = (64, 128)
"""Head sizes that the kernel supports."""


def qkv_rope(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, *, q_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, T, heads, D] from x [B, T, E] and weights [heads * D, E]; RoPE on q and k, q times `q_scale`.

    cos, sin: float32 [T, 1, D / 2] or [B, T, 1, D / 2], the angles of the pairs (d, d + D / 2).
    """
    check_tokens("qkv_rope", x=x)
    check_weights("qkv_rope", None, x.shape[-1], wq=wq, wk=wk, wv=wv)
    check_angles("qkv_rope", x, cos, sin)
    x, wq, wk, wv = autocast(x, wq, wk, wv)
    head_dim = 2 * cos.shape[-1]
    rows = _project(x.flatten(0, 1), wq, wk, wv, cos.flatten(0, -2), sin.flatten(0, -2), q_scale)
    q, k, v = (each.view(*x.shape[:2], each.shape[1] // head_dim, head_dim) for each in rows)
    return q, k, v


def reference(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_rope` for rows x [M, E] and angles [period, D / 2]; row i has angle i % period."""
    q, k, v = (x @ weight.T for weight in (wq, wk, wv))
    return _rotate(q, cos * unit, sin * unit), _rotate(k, cos, sin), v


@torch.library.custom_op("flashspan::project", mutates_args=())
def _project(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    return reference(x, wq, wk, wv, cos, sin, unit)


@_project.register_kernel("cuda")
def _(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor, Tensor]:
        from flashspan.ops.kernels import projection

        return projection.project(x, (wq, wk, wv), cos.contiguous(), sin.contiguous(), unit)

    def plain() -> tuple[Tensor, Tensor, Tensor]:
        return reference(x, wq, wk, wv, cos, sin, unit)

    return choose("qkv_rope", kernel, plain, x, wq, wk, wv) if 2 * cos.shape[1] in HEAD_DIMS else plain()


@_project.register_fake
def _(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(len(x), len(weight)) for weight in (wq, wk, wv))


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on rows [M, heads * D] with angles [period, D / 2]; row i has angle i % period."""
    head_dim = 2 * cos.shape[1]
    heads = rows.view(len(rows) // max(1, len(cos)), len(cos), rows.shape[1] // head_dim, head_dim)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = heads.chunk(2, -1)  # float32 after multiplication with cos
    rotated = (left * cos - right * sin, right * cos + left * sin)
    return torch.cat([half.to(rows.dtype) for half in rotated], -1).view(rows.shape)


def _keep_projection(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.unit = inputs
    ctx.save_for_backward(*tensors)


def _project_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    x, wq, wk, wv, cos, sin = ctx.saved_tensors
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq, dk = _rotate(dq, cos * ctx.unit, -sin * ctx.unit), _rotate(dk, cos, -sin)
    dx = sum_of_products([dq, dk, dv], [wq, wk, wv])
    return dx, dq.T @ x, dk.T @ x, dv.T @ x, None, None, None


_project.register_autograd(_project_backward, setup_context=_keep_projection)
