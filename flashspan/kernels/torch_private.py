"""Every private name of PyTorch that attention on one device uses; they exist in releases 2.11 to 2.13.

tests/kernels/test_torch_private.py tests each name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = [
    "apply_eagerly",
    "flash_cpu",
    "flash_cpu_backward",
    "has_tangents",
    "is_batched",
    "is_in_torch_dispatch_mode",
    "is_transformed",
]

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def is_transformed() -> bool:
    """Whether this runs inside a transform of torch.func: grad, vjp, jvp, vmap."""
    return torch._C._are_functorch_transforms_active()


def is_batched(gradient: Tensor | None) -> bool:
    """Whether a gradient is batched, as with `torch.autograd.grad(..., is_grads_batched=True)`."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)


def has_tangents() -> bool:
    """Whether this runs inside a level of forward-mode derivatives."""
    return forward_ad._current_level >= 0


def apply_eagerly(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` for calls outside the transforms of torch.func, without the Python code that serves them. That
    code takes 4 us a call."""
    return super(Function, function).apply  # type: ignore[misc]
