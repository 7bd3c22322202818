"""Switch off the attention or the transfers of a ContextAttention, to time the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from flashspan.context.strategy import ContextAttention
from flashspan.kernels.contract import Carry, LocalAttention, Problem


class Switch:
    """LocalAttention and transports that can be switched off. Then they return at once, with uninitialised tensors."""

    def __init__(self, attend: ContextAttention) -> None:
        self.computes = self.sends = True
        self.local: LocalAttention = attend.local
        attend.local = self
        for transport in {id(w): w for w in (attend.outer, attend.inner)}.values():
            setattr(transport, "post", self._gate(transport.post))  # noqa: B010 - a method of one object
            setattr(transport, "wait", self._gate(transport.wait))  # noqa: B010

    def _gate(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda argument: call(argument) if self.sends else None

    def without(self, which: Literal["computes", "sends"], call: Callable[[], None]) -> None:
        """Run a call with one of the two switched off."""
        setattr(self, which, False)
        try:
            call()
        finally:
            setattr(self, which, True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, **rest: Any) -> Carry:
        if self.computes:
            return self.local.forward(q, k, v, problem, **rest)
        carry = rest.get("carry")
        exact = torch.promote_types(q.dtype, torch.float32)
        return carry or Carry(q.new_empty(q.shape, dtype=rest["out_dtype"]), q.new_empty(q.shape[:-1], dtype=exact))

    def backward(self, *args: Any, **rest: Any) -> None:
        if self.computes:
            self.local.backward(*args, **rest)
