"""What every implementation of one device's attention promises, and the values it trades in: types, no code.

An implementation is a module with two plain functions (`LocalAttention`): no autograd, no process group, inputs already
checked. `Problem` says what to compute, besides the tensors.

Shapes: q, dout, dq [B, H, T, D]; k, v, dk, dv [B, K, S, D] with K dividing H; lse, delta [B, H, T] float32. Any
strides, as long as the last dimension is contiguous. Any length, 0 included.

Forward continues an online softmax. Given a carry, the result covers the carry's keys and these; the carry must be
float32 (on the CPU its lse may be float64, and is kept so where a kernel can: over many calls lse rounds the most) and
may be updated in place: what is returned counts. With no carry it starts one, in `out_dtype`: q's own for a
plain call, float32 when more keys are to come. Between calls nothing is rounded to 16 bits, so the error does not grow
with the number of calls. A row that has seen no key has out 0 and lse -inf.

Backward takes the lse and delta of the *whole* row, however many calls forward was split into. With `accumulate` it
adds into dq, dk and dv, which are float32; without, it overwrites them, in any floating dtype. A row whose lse is -inf
has zero gradients.

An implementation may have one more function, which saves time:

    backward_of_output(dout, q, k, v, out, lse, problem, *, dq, dk, dv) -> None

is backward without `accumulate`, where out is the whole row's and delta is that of dout and out.

Masked-out keys do not exist: a NaN in one of them does not reach any result. Nor, on the CPU, does a NaN in a query
that sees no key. Dropout scales and drops probabilities, never lse. A kernel that cannot be compiled or loaded raises
`KernelFailed` (failure.py) before anything was computed, so that another implementation can serve the call.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Mask


class Carry(NamedTuple):
    """An online softmax so far: `out` [B, H, T, D] normalised over the keys seen, `lse` [B, H, T] float32."""

    out: Tensor
    lse: Tensor


class Problem(NamedTuple):
    """What to compute of q, k and v."""

    mask: Mask
    scale: float
    dropout: Dropout | None = None
    deterministic: bool = False  # gradients must repeat bit for bit; the output always does


class LocalAttention(Protocol):
    """The shape of an implementation module; the module docstring above is the contract."""

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
