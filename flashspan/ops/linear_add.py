"""A linear layer with the residual added in its epilogue; and sums of matmuls, for gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan.ops.checks import check_tokens, check_weights
from flashspan.ops.choice import autocast, choose


def linear_add(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """x + a W^T [B, T, E], for a [B, T, K] and W [E, K]."""
    check_tokens("linear_add", x=x, a=a)
    check_weights("linear_add", x.shape[-1], a.shape[-1], weight=weight)
    a, weight = autocast(a, weight)
    if x.dtype != a.dtype:  # a float32 residual under autocast
        return x + F.linear(a, weight)
    return _add_product(x.flatten(0, 1), a.flatten(0, 1), weight).view(x.shape)


@torch.library.custom_op("flashspan::add_product", mutates_args=())
def _add_product(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    return x + a @ weight.T


@_add_product.register_kernel("cuda")
def _(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    def kernel() -> Tensor:
        from flashspan.ops.kernels import residual

        return residual.sum_of_products(x, (a, weight), transposed=True)

    return choose("linear_add", kernel, lambda: x + a @ weight.T, x, a, weight)


@_add_product.register_fake
def _(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_addition(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _add_product_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
    a, weight = ctx.saved_tensors
    return dout, dout @ weight, dout.T @ a


_add_product.register_autograd(_add_product_backward, setup_context=_keep_addition)


def _sum(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    first, *rest = (a @ weight for a, weight in zip(rows, weights, strict=True))
    return sum(rest, start=first)


@torch.library.custom_op("flashspan::sum_of_products", mutates_args=())
def sum_of_products(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The sum of a W over up to three pairs of a [M, K] and W [K, N], in one kernel."""
    return _sum(rows, weights)


@sum_of_products.register_kernel("cuda")
def _(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    def kernel() -> Tensor:
        from flashspan.ops.kernels import residual

        return residual.sum_of_products(None, *zip(rows, weights, strict=True), transposed=False)

    return choose("linear_add", kernel, lambda: _sum(rows, weights), *rows, *weights)


@sum_of_products.register_fake
def _(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    return rows[0].new_empty(len(rows[0]), weights[0].shape[1])
