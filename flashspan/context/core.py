"""Attention of one rank's shard: a forward and a backward function, and the autograd.Function that calls them.

A core is any object with `forward` and `backward`: `Scheduled` runs a schedule, `Ulysses` wraps another core. Both are
plain functions of tensors, so that cores nest and sums stay float32 between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from flashspan.arguments import check_unchanged, dense_rows, mask_versions
from flashspan.attention_operator import refuse_batched, refuse_forward_derivative, refuse_second_derivative
from flashspan.context.execute import Call, Plan, run
from flashspan.context.passes import BackwardPass, ForwardPass
from flashspan.context.recompute import keep
from flashspan.context.transport import Transport
from flashspan.kernels.contract import Carry, LocalAttention
from flashspan.kernels.delta import row_delta
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Mask

Saved: TypeAlias = tuple[Tensor, ...]
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Options(NamedTuple):
    """The arguments of a call, except its tensors; forward and backward use the same options."""

    scale: float
    num_kv_heads: int
    dropout: Dropout | None = None
    partial: bool = False  # gradients of k and v are added to other ranks' later: keep them float32


class Core(Protocol):
    """Attention as two functions of q [B, H, T, D], k and v [B, K, T, D], for this rank's T tokens."""

    @property
    def mask(self) -> Mask:
        """The mask of this core's attention."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Carry, Saved]:
        """Return (out in q's dtype, lse), and the tensors that backward needs."""
        ...

    def backward(self, dout: Tensor, dlse: Tensor | None, saved: Saved, options: Options) -> Gradients:
        """Return dq, dk and dv, in q's dtype or a wider one."""
        ...


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A core that runs a schedule with the executor."""

    plan: Plan
    transport: Transport
    local: LocalAttention

    @property
    def mask(self) -> Mask:
        return self.plan.mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Carry, Saved]:
        call = Call(q, k, v, options.scale, options.dropout)
        out, lse = keep(lambda: run(ForwardPass(self.plan, self.transport, self.local, call)))
        return Carry(out.to(q.dtype), lse), (q, k, v, out, lse)

    def backward(self, dout: Tensor, dlse: Tensor | None, saved: Saved, options: Options) -> Gradients:
        q, k, v, out, lse = saved
        delta = row_delta(dout, out, dlse)
        call = Call(q, k, v, options.scale, options.dropout, options.partial)
        return run(BackwardPass(self.plan, self.transport, self.local, call, dout, lse, delta))


class Final(torch.autograd.Function):
    """The identity on dq, dk and dv. Its backward raises the error for a second derivative."""

    @staticmethod
    def forward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *depends_on: Tensor | None) -> Gradients:
        return dq, dk, dv

    backward = staticmethod(refuse_second_derivative)


class Attend(torch.autograd.Function):
    """A core as a differentiable function: (q, k, v, core, options) -> (out, lse)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: Core, options: Options) -> tuple[Tensor, Tensor]:
        carry, saved = core.forward(q, k, v, options)
        # New views: autograd must not return the same tensor objects that are saved here or on the recompute tape.
        out, lse = carry.out.view_as(carry.out), carry.lse.view_as(carry.lse)
        with torch.enable_grad():  # for `Final`: empty views that keep the graph of q, k and v, but not their memory
            to_q, to_k, to_v = (x[:0].clone() for x in (q, k, v))
        ctx.save_for_backward(to_q, to_k, to_v, *saved)
        ctx.core, ctx.options, ctx.shape, ctx.versions = core, options, q.shape, mask_versions(core.mask)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        refuse_batched(dout, dlse)
        check_unchanged(ctx.core.mask, ctx.versions)
        to_q, to_k, to_v, *saved = ctx.saved_tensors
        with torch.no_grad():
            rows = saved[0].new_zeros(ctx.shape) if dout is None else dense_rows(dout)
            grads = [grad.to(to_q.dtype) for grad in ctx.core.backward(rows, dlse, tuple(saved), ctx.options)]
        if torch.is_grad_enabled():  # create_graph=True: a second derivative is refused in that graph
            grads = Final.apply(*grads, dout, dlse, to_q, to_k, to_v)
        return (*grads, None, None)

    jvp = staticmethod(refuse_forward_derivative)
