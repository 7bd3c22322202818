"""Every private name of PyTorch that attention on one device uses; they exist in releases 2.11 to 2.13.

tests/kernels/test_torch_private.py tests each name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils import _python_dispatch

is_in_torch_dispatch_mode = _python_dispatch.is_in_torch_dispatch_mode
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def is_transformed() -> bool:
    """Whether this runs inside a transform of torch.func: grad, vjp, jvp, vmap."""
    return torch._C._are_functorch_transforms_active()


is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is batched, as with `torch.autograd.grad(..., is_grads_batched=True)`."""


def current_index(device: torch.device) -> Callable[[], int | None]:
    """Return a function that returns the current GPU's index, if `device` is a GPU; otherwise None, its own index."""
    return torch._C._cuda_getDevice if device.type == "cuda" else lambda: device.index


def empty_strided(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return a function of shape, strides and dtype that allocates on the CPU or the current GPU, in half the time of
    `torch.empty_strided`."""
    guards: Any = torch._C._dynamo.guards
    return guards._empty_strided_cuda if device.type == "cuda" else guards._empty_strided_cpu


def has_tangents() -> bool:
    """Whether this runs inside a level of forward-mode derivatives."""
    return forward_ad._current_level >= 0


def apply_eagerly(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` for calls outside the transforms of torch.func, without the Python code that serves them. That
    code takes 4 us a call."""
    return super(Function, function).apply  # type: ignore[misc]
