"""The hooks that the systems assignment of Stanford's CS336 tests, answered by flashspan.

Copy this file and `_distributed.py` into the course's `tests/` folder, over its own `adapters.py`, with flashspan
installed; its tests then run against this package.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels.contract import LocalAttention, row_delta
from flashspan.kernels.masks import CAUSAL, EVERYTHING

from ._distributed import (
    ddp_bucketed_on_after_backward,
    ddp_bucketed_on_train_batch_start,
    ddp_individual_parameters_on_after_backward,
    ddp_on_after_backward,
    fsdp_gather_full_params,
    fsdp_on_after_backward,
    get_ddp,
    get_ddp_bucketed,
    get_ddp_individual_parameters,
    get_fsdp,
    get_sharded_optimizer,
)

__all__ = [
    "ddp_bucketed_on_after_backward",
    "ddp_bucketed_on_train_batch_start",
    "ddp_individual_parameters_on_after_backward",
    "ddp_on_after_backward",
    "fsdp_gather_full_params",
    "fsdp_on_after_backward",
    "get_ddp",
    "get_ddp_bucketed",
    "get_ddp_individual_parameters",
    "get_flash_autograd_function_triton",
    "get_flashattention_autograd_function_pytorch",
    "get_flashattention_autograd_function_triton",
    "get_fsdp",
    "get_sharded_optimizer",
]


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in plain PyTorch, its backward compiled: apply(q, k, v, is_causal=False) on [B, N, D]."""
    return _flash_attention("tiled", compiled=True)


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton, forward and backward: apply(q, k, v, is_causal=False) on [B, N, D]."""
    return _flash_attention("portable")


get_flash_autograd_function_triton = get_flashattention_autograd_function_triton  # as the handout also calls it


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by the handout's equations 13 to 19: the scores again, from what forward kept. For torch.compile."""
    q, k, v, dout = (x.to(lse.dtype) for x in (q, k, v, dout))  # float32 at least
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    if is_causal:
        p = p.tril()
    ds = p * (dout @ v.mT - delta[..., None]) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


@functools.cache
def _compiled(device_type: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """On a CPU as it is: there a compilation takes longer than the course's tests."""
    return torch.compile(gradients) if device_type == "cuda" else gradients


@functools.cache
def _flash_attention(name: str, *, compiled: bool = False) -> type[torch.autograd.Function]:
    """An autograd.Function on one implementation of flashspan.kernels, or on its forward and a compiled backward; the
    course's [B, N, D] has one head."""
    kernels: LocalAttention = importlib.import_module(f"flashspan.kernels.{name}")
    # The kernels are finished code: torch.compile may compile around them, and is kept from looking inside.
    attend, pull = torch.compiler.disable(kernels.forward), torch.compiler.disable(kernels.backward)

    class FlashAttention2(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
            ctx.mask = CAUSAL if is_causal else EVERYTHING
            ctx.scale = 1.0 / math.sqrt(q.shape[-1])
            heads = (x.unsqueeze(1) for x in (q, k, v))
            out, lse = attend(*heads, mask=ctx.mask, scale=ctx.scale, out_dtype=q.dtype)
            out, lse = out.squeeze(1), lse.squeeze(1)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dout = douts[0].contiguous()  # that of a plain sum() has stride 0
            delta = row_delta(dout, out)
            if compiled:
                is_causal = ctx.mask is CAUSAL
                found = _compiled(q.device.type)(dout, q, k, v, lse, delta, is_causal, ctx.scale)
                return (*(grad.to(q.dtype) for grad in found), None)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            dq, dk, dv = (x.unsqueeze(1) for x in grads)
            q, k, v, dout, lse, delta = (x.unsqueeze(1) for x in (q, k, v, dout, lse, delta))
            pull(dout, q, k, v, lse, delta, mask=ctx.mask, scale=ctx.scale, dq=dq, dk=dk, dv=dv, accumulate=False)
            return (*grads, None)

    return FlashAttention2
