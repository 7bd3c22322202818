"""The choice between an operator's kernel and its reference in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from flashspan.kernels.backends import no_hopper
from flashspan.kernels.failure import KernelFailed

Result = TypeVar("Result")

RETIRED: dict[str, str] = {}
"""operator -> why its kernel failed to compile on this machine."""


def choose(name: str, kernel: Callable[[], Result], reference: Callable[[], Result], *tensors: Tensor) -> Result:
    """The kernel's result if it supports these tensors, else the reference's. A kernel that fails to compile is
    retired, with one warning."""
    if name in RETIRED or not fits(*tensors):
        return reference()
    try:
        return kernel()
    except KernelFailed as failure:
        RETIRED[name] = str(failure)
        warnings.warn(f"the kernel of ops.{name} {failure}; PyTorch is used instead", RuntimeWarning, stacklevel=2)
        return reference()


def fits(*tensors: Tensor) -> bool:
    """Whether the Hopper kernels support these matrices: a Hopper GPU, one 16-bit dtype, rows of a multiple of 16 B."""
    kinds = {(x.device, x.dtype) for x in tensors}
    ((device, dtype),) = kinds if len(kinds) == 1 else ((torch.device("cpu"), torch.float32),)
    sixteen = dtype in (torch.float16, torch.bfloat16)
    return sixteen and all(x.shape[-1] % 8 == 0 for x in tensors) and _is_hopper(device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return no_hopper(device) is None


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors; under autocast, converted to its dtype like the inputs of a matmul, except float64."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
