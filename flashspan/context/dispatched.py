"""LocalAttention that chooses the implementation for each tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashspan.kernels import dispatch
from flashspan.kernels.contract import Carry, Dropout
from flashspan.kernels.masks import Mask


@dataclass(frozen=True)
class Dispatched:
    """LocalAttention that chooses, for every tile, the implementation that runs it."""

    backend: str = "auto"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        scale: float,
        carry: Carry | None = None,
        out_dtype: torch.dtype = torch.float32,
        dropout: Dropout | None = None,
    ) -> Carry:
        local = dispatch.choose(q, k, v, mask=mask, dropout=dropout, backend=self.backend).load()
        return local.forward(q, k, v, mask=mask, scale=scale, carry=carry, out_dtype=out_dtype, dropout=dropout)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, **rest: Any) -> None:
        choice = dispatch.choose(q, k, v, mask=rest["mask"], dropout=rest["dropout"], backend=self.backend)
        choice.load().backward(dout, q, k, v, lse, delta, **rest)
