"""Whether the kernel of an operator serves its tensors, or its reference in PyTorch."""

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
"""Operators whose kernels could not be compiled on this machine, and what went wrong."""


def choose(name: str, kernel: Callable[[], Result], reference: Callable[[], Result], *tensors: Tensor) -> Result:
    """The kernel's result, where it serves these tensors; if it fails to compile it is retired, with one warning."""
    if name in RETIRED or not fits(*tensors):
        return reference()
    try:
        return kernel()
    except KernelFailed as failure:
        RETIRED[name] = str(failure)
        warnings.warn(
            f"the kernel of ops.{name} is off, and PyTorch serves: it {failure}", RuntimeWarning, stacklevel=2
        )
        return reference()


def fits(*tensors: Tensor) -> bool:
    """Whether the copy engine of a Hopper GPU takes these matrices: 16 bits, rows of whole 16 bytes."""
    kinds = {(x.device, x.dtype) for x in tensors}
    ((device, dtype),) = kinds if len(kinds) == 1 else ((torch.device("cpu"), torch.float32),)
    sixteen = dtype in (torch.float16, torch.bfloat16)
    return sixteen and all(x.shape[-1] % 8 == 0 for x in tensors) and _is_hopper(device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return no_hopper(device) is None


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the dtype that autocast would have matmuls in."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
    return tensors
