"""Two online softmaxes over different keys as one."""

from __future__ import annotations

import torch

from flashspan.kernels.contract import Carry


def merge(total: Carry, part: Carry) -> None:
    """Continue `total` with `part`, in place. Where neither has seen a key, out stays 0 and lse -inf.

    The few numbers a row needs for it are computed in float64: then only the sums themselves are rounded.
    """
    lse = torch.logaddexp(total.lse.double(), part.lse.double())
    share = torch.exp(part.lse - lse.masked_fill(lse == -torch.inf, 0.0))
    total.out.lerp_(part.out, share[..., None].to(total.out.dtype))
    total.lse.copy_(lse)
