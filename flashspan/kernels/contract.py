"""The contract of every implementation of one device's attention, and its types.

An implementation is a module with two plain functions (`LocalAttention`): no autograd, no process group. Their inputs
are already checked. `Problem` holds the arguments that are not tensors.

Shapes: q, dout, dq [B, H, T, D]; k, v, dk, dv [B, K, S, D] with K dividing H; lse, delta [B, H, T] float32. Any
strides, as long as the last dimension is contiguous. Any length, 0 included.

Forward continues an online softmax. With a carry, the result covers the carry's keys and these. The carry is float32
and may be updated in place; use the returned one. (On the CPU its lse may be float64; kernels that support that return
lse in float64. Over many calls, lse has the largest rounding error.) Without a carry, forward starts one in
`out_dtype`: q's dtype for a single call, float32 if more keys follow. Nothing is rounded to 16 bits between calls, so
the error does not grow with the number of calls. A row that has seen no key has out 0 and lse -inf.

Backward takes lse and delta over *all* keys of a row, even if forward was several calls. With `accumulate` it adds to
dq, dk and dv, which are float32. Without, it overwrites them, in any floating dtype. Gradients of rows with lse -inf
are zero.

Two optional functions save time:

    backward_of_output(dout, q, k, v, out, lse, problem, *, dq, dk, dv) -> None
    repeat_forward(q, k, v, problem, out_dtype) -> Callable[[q, k, v, mask], Carry | None] | None

The first is backward without `accumulate`; it computes delta from dout and from out over all keys. The second returns a
`Repeat`, the forward function for later calls with the same layouts, or None if no such call has run.

Masked-out keys have no effect: a NaN in one of them reaches no result. On the CPU, a NaN in a query that sees no key
reaches no result either. Dropout drops and scales probabilities, never lse. A kernel that cannot be compiled or loaded
raises `KernelFailed` (failure.py) before anything is computed, so that another implementation can run the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Mask


class Carry(NamedTuple):
    """The state of an online softmax: out [B, H, T, D], normalised over the keys so far, and lse [B, H, T] float32."""

    out: Tensor
    lse: Tensor


Grads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""


class Problem(NamedTuple):
    """The arguments of attention that are not tensors."""

    mask: Mask
    scale: float
    dropout: Dropout | None = None
    deterministic: bool = False  # gradients must be bitwise reproducible; the output always is


Repeat: TypeAlias = Callable[[Tensor, Tensor, Tensor, Mask], Carry | None]
"""forward as a function of q, k, v and a mask with the layouts of an earlier call. It returns None if it cannot run."""

RepeatBackward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Mask], Grads | None]
"""dq, dk and dv as a function of dout, q, k, v, out, lse and a mask with the layouts of an earlier call, or None."""


class LocalAttention(Protocol):
    """The functions of an implementation's module; the module docstring above is their contract."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        problem: Problem,
        *,
        carry: Carry | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> Carry: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        problem: Problem,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        accumulate: bool,
    ) -> None: ...
