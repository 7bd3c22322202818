"""Cross entropies of rows of logits, and their gradients, which may overwrite the logits."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def has_kernel(device: torch.device) -> bool:
    """Whether there is a kernel for the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def losses_and_gradients(logits: Tensor, targets: Tensor, *, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses [n], float32 or wider, of logits [n, V], and their gradients, which may overwrite the logits.

    A gradient is the probabilities, minus 1 at the target; it is 0 in a row whose target is `ignored`.
    """
    if has_kernel(logits.device):
        from flashspan.ops.kernels.cross_entropy import losses_and_gradients

        return losses_and_gradients(logits, targets, ignored=ignored)
    return reference(logits, targets, ignored=ignored)


def reference(logits: Tensor, targets: Tensor, *, ignored: int) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = torch.nn.functional.cross_entropy(wide, targets, ignore_index=ignored, reduction="none")
    valid = (targets != ignored).unsqueeze(-1)
    gradients = wide.softmax(-1).scatter_add(-1, targets.clamp(min=0).unsqueeze(-1), -valid.to(wide.dtype))
    return losses, (gradients * valid).to(logits.dtype)
