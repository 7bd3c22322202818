"""A layer's products with what follows them in one operator each, and their gradients.

On a Hopper GPU each is one kernel (flashspan/kernels/hopper: projection.py, residual.py, gated.py); elsewhere they are
what they say, in plain PyTorch. Operators, because a compiled layer calls them, and what is kept of a layer is decided
operator by operator.

Queries come times log2(e) / sqrt(D), and are rounded after that: with a scale of ln 2 scores are exponents of 2 as they
are, and attention's kernels need not multiply them.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan.kernels import backends
from flashspan.model import LlamaConfig
from flashspan.model.llama import Products
from flashspan.model.rope import rotate

SCALE = math.log(2)


def project(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, rotated, and v, [B, T, heads, D], of x [B, T, E]; q for a scale of ln 2."""
    x, wq, wk, wv = _as_products(x, wq, wk, wv)
    head_dim = 2 * cos.shape[-1]
    unit = head_dim**-0.5 / SCALE
    rows = _project(x.flatten(0, 1), wq, wk, wv, cos.flatten(0, -2), sin.flatten(0, -2), unit)
    return tuple(each.view(*x.shape[:2], each.shape[1] // head_dim, head_dim) for each in rows)


def add_product(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """x + a W^T, [B, T, E]."""
    a, weight = _as_products(a, weight)
    if x.dtype != a.dtype:  # the residual of float32 weights
        return x + F.linear(a, weight)
    return _add_product(x.flatten(0, 1), a.flatten(0, 1), weight).view(x.shape)


def feed_forward(x: Tensor, normed: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x + (silu(n Wg^T) * (n Wu^T)) Wd^T, [B, T, E]."""
    normed, gate, up, down = _as_products(normed, gate, up, down)
    if x.dtype != normed.dtype:  # the residual of float32 weights
        return x + _feed_forward(None, normed.flatten(0, 1), gate, up, down)[0].view(x.shape)
    return _feed_forward(x.flatten(0, 1), normed.flatten(0, 1), gate, up, down)[0].view(x.shape)


PRODUCTS = Products(project, add_product, feed_forward, SCALE)


def serves(shape: LlamaConfig, device: torch.device, precision: str) -> bool:
    """Whether there is a kernel for each of them."""
    widths = (shape.width, shape.ffn_width, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    return (
        precision != "float32"
        and shape.head_dim in (64, 128)
        and all(width % 8 == 0 for width in widths)
        and backends.no_hopper(device) is None
        and _runs(device, getattr(torch, precision), shape.head_dim)
    )


@cache
def _runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this release of Triton compiles them: of one token, with gradients. Compiled once, they are kept."""
    x, angles = torch.zeros(1, 1, 64, device=device, dtype=dtype), torch.zeros(1, head_dim // 2, device=device)
    square, wide = (
        torch.zeros(64, 64, device=device, dtype=dtype),
        torch.zeros(head_dim, 64, device=device, dtype=dtype),
    )
    x.requires_grad_()
    try:
        with torch.enable_grad():
            sum(each.sum() for each in project(x, wide, wide, wide, angles, angles)).backward()  # type: ignore[union-attr]
            feed_forward(add_product(x, x, square), x, square, square, square).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as problem:  # whatever a compiler may raise
        text = f"{type(problem).__name__}: {problem}"[:500]
        logging.getLogger(__name__).warning("kernels for a layer's products do not run here, PyTorch's do: %s", text)
        return False
    return True


def _as_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the dtype that autocast would have products in."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
    return tensors


@torch.library.custom_op("flashspan::project", mutates_args=())
def _project(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x @ weight.T for weight in (wq, wk, wv))
    return _rotate(q, cos * unit, sin * unit), _rotate(k, cos, sin), v


@_project.register_kernel("cuda")
def _(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flashspan.kernels.hopper import projection

    return projection.project(x, (wq, wk, wv), cos.contiguous(), sin.contiguous(), unit)


@_project.register_fake
def _(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, unit: float) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(len(x), len(weight)) for weight in (wq, wk, wv))


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads of rows [M, heads * D] rotated by angles [period, D / 2], for rows in turn."""
    head_dim = 2 * cos.shape[1]
    heads = rows.view(len(rows) // max(1, len(cos)), len(cos), rows.shape[1] // head_dim, head_dim)
    return rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1)).view(rows.shape)


def _keep_projection(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.unit = inputs
    ctx.save_for_backward(*tensors)


def _project_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    x, wq, wk, wv, cos, sin = ctx.saved_tensors
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq, dk = _rotate(dq, cos * ctx.unit, -sin * ctx.unit), _rotate(dk, cos, -sin)
    dx = _sum_of_products([dq, dk, dv], [wq, wk, wv])
    return dx, dq.T @ x, dk.T @ x, dv.T @ x, None, None, None


_project.register_autograd(_project_backward, setup_context=_keep_projection)


@torch.library.custom_op("flashspan::sum_of_products", mutates_args=())
def _sum_of_products(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The sum of a W over up to three pairs of a [M, K] and W [K, N]."""
    first, *rest = (a @ weight for a, weight in zip(rows, weights, strict=True))
    return sum(rest, start=first)


@_sum_of_products.register_kernel("cuda")
def _(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    from flashspan.kernels.hopper import residual

    return residual.sum_of_products(None, *zip(rows, weights, strict=True), turned=False)


@_sum_of_products.register_fake
def _(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    return rows[0].new_empty(len(rows[0]), weights[0].shape[1])


@torch.library.custom_op("flashspan::add_product", mutates_args=())
def _add_product(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    return x + a @ weight.T


@_add_product.register_kernel("cuda")
def _(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    from flashspan.kernels.hopper import residual

    return residual.sum_of_products(x, (a, weight), turned=True)


@_add_product.register_fake
def _(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_addition(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _add_product_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
    a, weight = ctx.saved_tensors
    return dout, dout @ weight, dout.T @ a


_add_product.register_autograd(_add_product_backward, setup_context=_keep_addition)


@torch.library.custom_op("flashspan::feed_forward", mutates_args=())
def _feed_forward(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """And gate and up [M, F], for backward."""
    gate, up = normed @ gate_weight.T, normed @ up_weight.T
    made = (F.silu(gate) * up) @ down_weight.T
    return made if x is None else x + made, gate, up


@_feed_forward.register_kernel("cuda")
def _(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from flashspan.kernels.hopper import gated, residual

    gate, up, h = gated.gated(normed, gate_weight, up_weight)
    return residual.sum_of_products(x, (h, down_weight), turned=True), gate, up


@_feed_forward.register_fake
def _(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    widths = (len(down_weight), len(gate_weight), len(gate_weight))
    out, gate, up = (normed.new_empty(len(normed), width) for width in widths)
    return out, gate, up


@torch.library.custom_op("flashspan::gated_backward", mutates_args=())
def _gated_backward(dout: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and h again."""
    dh = dout @ down_weight
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return dh * up * (sigmoid + silu * (1 - sigmoid)), dh * silu, silu * up


@_gated_backward.register_kernel("cuda")
def _(dout: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from flashspan.kernels.hopper import gated

    return gated.gated_backward(dout, down_weight, gate, up)


@_gated_backward.register_fake
def _(dout: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)


def _keep_feed_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[1:], *output[1:])
    ctx.adds = inputs[0] is not None
    ctx.set_materialize_grads(False)


def _feed_forward_backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 5
    normed, gate_weight, up_weight, down_weight, gate, up = ctx.saved_tensors
    dout = dout.contiguous()
    dgate, dup, h = _gated_backward(dout, down_weight, gate, up)
    dnormed = _sum_of_products([dgate, dup], [gate_weight, up_weight])
    return dout if ctx.adds else None, dnormed, dgate.T @ normed, dup.T @ normed, dout.T @ h


_feed_forward.register_autograd(_feed_forward_backward, setup_context=_keep_feed_forward)
