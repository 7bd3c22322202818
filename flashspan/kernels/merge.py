"""Merge two online softmaxes over different keys."""

from __future__ import annotations

import torch

from flashspan.kernels.contract import Carry


def merge(total: Carry, part: Carry) -> None:
    """Merge `part` into `total`, in place. Where neither has seen a key, out stays 0 and lse -inf.

    The weights of a row are computed in float64, so that only the sums are rounded.
    """
    lse = torch.logaddexp(total.lse.double(), part.lse.double())
    share = torch.exp(part.lse - lse.masked_fill(lse == -torch.inf, 0.0))
    total.out.lerp_(part.out, share[..., None].to(total.out.dtype))
    total.lse.copy_(lse)
