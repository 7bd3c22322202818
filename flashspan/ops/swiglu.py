"""A SwiGLU feed-forward layer in two kernels: gate and up, then down with the residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan.ops.checks import check_tokens, check_weights
from flashspan.ops.choice import autocast, choose
from flashspan.ops.linear_add import sum_of_products


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """(silu(x Wg^T) * (x Wu^T)) Wd^T [B, T, E], plus the residual if there is one."""
    check_tokens("swiglu", x=x, residual=residual)
    check_weights("swiglu", None, x.shape[-1], gate=gate)
    check_weights("swiglu", len(gate), x.shape[-1], up=up)
    check_weights("swiglu", None if residual is None else residual.shape[-1], len(gate), down=down)
    x, gate, up, down = autocast(x, gate, up, down)
    rows = x.flatten(0, 1)
    if residual is None or residual.dtype != x.dtype:  # a float32 residual under autocast
        out = _feed_forward(None, rows, gate, up, down)[0].view(*x.shape[:-1], len(down))
        return out if residual is None else residual + out
    return _feed_forward(residual.flatten(0, 1), rows, gate, up, down)[0].view(residual.shape)


def reference(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (plus x unless that is None), gate and up."""
    gate, up = normed @ gate_weight.T, normed @ up_weight.T
    out = (F.silu(gate) * up) @ down_weight.T
    return out if x is None else x + out, gate, up


def reference_backward(dout: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dh = dout @ down_weight
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return dh * up * (sigmoid + silu * (1 - sigmoid)), dh * silu, silu * up


@torch.library.custom_op("flashspan::feed_forward", mutates_args=())
def _feed_forward(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [M, E], and gate and up [M, F] for backward."""
    return reference(x, normed, gate_weight, up_weight, down_weight)


@_feed_forward.register_kernel("cuda")
def _(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor, Tensor]:
        from flashspan.ops.kernels import gated, residual

        gate, up, h = gated.gated(normed, gate_weight, up_weight)
        return residual.sum_of_products(x, (h, down_weight), transposed=True), gate, up

    tensors = (normed, gate_weight, up_weight, down_weight)
    return choose("swiglu", kernel, lambda: reference(x, *tensors), *tensors, *(() if x is None else (x,)))


@_feed_forward.register_fake
def _(
    x: Tensor | None, normed: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    widths = (len(down_weight), len(gate_weight), len(gate_weight))
    out, gate, up = (normed.new_empty(len(normed), width) for width in widths)
    return out, gate, up


@torch.library.custom_op("flashspan::gated_backward", mutates_args=())
def _gated_backward(dout: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and silu(gate) * up, recomputed."""
    return reference_backward(dout, down_weight, gate, up)


@_gated_backward.register_kernel("cuda")
def _(dout: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor, Tensor]:
        from flashspan.ops.kernels import gated

        return gated.gated_backward(dout, down_weight, gate, up)

    tensors = (dout, down_weight, gate, up)
    return choose("swiglu", kernel, lambda: reference_backward(*tensors), *tensors)


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
    dnormed = sum_of_products([dgate, dup], [gate_weight, up_weight])
    return dout if ctx.adds else None, dnormed, dgate.T @ normed, dup.T @ normed, dout.T @ h


_feed_forward.register_autograd(_feed_forward_backward, setup_context=_keep_feed_forward)
