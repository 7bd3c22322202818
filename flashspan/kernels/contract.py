"""What every implementation of one device's attention promises, and the two values it trades in.

An implementation is a module with two plain functions: no autograd, no process group, inputs already checked.

    forward(q, k, v, *, mask, scale, carry=None, out_dtype=torch.float32, dropout=None) -> Carry
    backward(dout, q, k, v, lse, delta, *, mask, scale, dq, dk, dv, accumulate, dropout=None) -> None

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

Two more functions it may have, for whoever can save something by them: `again` makes a forward for calls like one that
was made (Again, below), and

    backward_of_output(dout, q, k, v, out, lse, *, mask, scale, dq, dk, dv, dropout=None) -> None

is backward without `accumulate`, of which the output is the whole row's and delta that of dout and it.

Masked-out keys do not exist: a NaN in one of them reaches nobody. Nor, on the CPU, does a NaN in a query that sees no
key. Dropout scales and drops probabilities, never lse.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from flashspan.kernels.masks import Mask


class Carry(NamedTuple):
    """An online softmax so far: `out` [B, H, T, D] normalised over the keys seen, `lse` [B, H, T] float32."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Dropout:
    """Drop each (query, key) pair with probability p, decided by a hash of the seed and the pair's global place.

    The same seed drops the same pairs however the work is split: a caller that holds a part of the sequence gives its
    tokens' global positions (int32; None means 0, 1, 2, ...), one that holds a part of the heads says where they begin:
    head h of batch b is stream `first + b * batch_stride + h`.
    """

    p: float
    seed: Tensor  # int64, one element, on q's device
    q_positions: Tensor | None = None  # [T]
    k_positions: Tensor | None = None  # [S]
    first: int = 0
    batch_stride: int | None = None  # None: the number of heads in q

    def streams(self, num_batch: int, num_heads: int) -> Tensor:
        """The stream number of each (batch, head), int64 [B, H]."""
        device = self.seed.device
        stride = num_heads if self.batch_stride is None else self.batch_stride
        batch = torch.arange(num_batch, device=device) * stride
        return self.first + batch[:, None] + torch.arange(num_heads, device=device)

    def keep(self, num_batch: int, num_heads: int, q: range, k: range) -> Tensor:
        """Which pairs of these local rows and columns survive, bool [B, H, len(q), len(k)]."""
        device = self.seed.device
        i = (
            torch.arange(q.start, q.stop, device=device)
            if self.q_positions is None
            else self.q_positions[q.start : q.stop]
        )
        j = (
            torch.arange(k.start, k.stop, device=device)
            if self.k_positions is None
            else self.k_positions[k.start : k.stop]
        )
        low, high = self.seed & MASK32, (self.seed >> 32) & MASK32
        stream = mix(low ^ mix(self.streams(num_batch, num_heads)))
        row = mix((stream[..., None] + i.long()) & MASK32)
        column = mix((mix(high) + j.long()) & MASK32)
        return mix(row[..., None] ^ column) >= self.threshold

    @property
    def threshold(self) -> int:
        """A pair is dropped when its 32-bit hash falls below this."""
        return min(int(self.p * 2.0**32), 2**32 - 1)

    @property
    def gain(self) -> float:
        """What a surviving probability is multiplied by."""
        return 1.0 / (1.0 - self.p)


MASK32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with full avalanche, on int64 tensors holding 32-bit values (the kernels have a twin)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


class LocalAttention(Protocol):
    """The shape of an implementation module; the module docstring above is the contract."""

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
    ) -> Carry: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        mask: Mask,
        scale: float,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        accumulate: bool,
        dropout: Dropout | None = None,
    ) -> None: ...


Again: TypeAlias = Callable[[Tensor, Tensor, Tensor, Mask], Carry | None]
"""forward once more, of q, k, v and a mask that lie in memory as those of a call before, without asking what follows
from that; None if it cannot this time. Made by again(q, k, v, *, mask, scale, out_dtype), which gives None if there was
no such call."""


def merge(total: Carry, part: Carry) -> None:
    """Continue `total` with `part`, in place. Where neither has seen a key, out stays 0 and lse -inf.

    The few numbers a row needs for it are computed in float64: then only the sums themselves are rounded.
    """
    lse = torch.logaddexp(total.lse.double(), part.lse.double())
    share = torch.exp(part.lse - lse.masked_fill(lse == -torch.inf, 0.0))
    total.out.lerp_(part.out, share[..., None].to(total.out.dtype))
    total.lse.copy_(lse)


def kept_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which the output is kept for backward: at least float32 on a CPU, q's own elsewhere.

    An output rounded to 16 bits makes delta wrong by as much, and gradients up to 4 times as wrong as their own
    rounding where the softmax is sharp. PyTorch's GPU kernels accept this and so do ours; its CPU path with dropout
    does not. See docs/numerics.md.
    """
    return torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) in float32 [B, H, T] (float64 stays): the one number a row's backward needs of its output.

    d lse / d score is the probability, so a gradient of lse enters here too, with the other sign.
    """
    if dlse is not None:
        return row_delta(dout, out) - dlse
    if out.is_cuda and out.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from flashspan.kernels.portable.delta import row_delta as fused

        return fused(dout, out)
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(dtype) * out).sum(-1, dtype=dtype)
