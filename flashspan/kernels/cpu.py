"""PyTorch's fused CPU attention as an implementation of the contract.

The operator supports no mask, a top-left causal mask, and a dense mask; only a dense mask costs time. So a mask is cut
into strips of query rows, most of which need no dense mask (see Note [Strips]). For the others, dense masks of CHUNK
rows and the keys that these rows see are allocated one at a time, so a window takes time and memory linear in T.
`tiled` computes calls with dropout, with a scale that is not positive in float32 (the operator multiplies its own -inf
by it), or with non-finite keys or values behind a mask.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan.kernels import tiled
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.masks import Band, Mask, Rows
from flashspan.kernels.merge import merge
from flashspan.kernels.torch_private import flash_cpu, flash_cpu_backward

CHUNK = 256  # rows that share one dense mask
SHORT = 64  # runs of rows shorter than this share dense masks: a call for each run would take longer
TEMPORARY = 2**17  # elements of a temporary tensor, which limit the number of heads in one call
VECTOR = 16  # float32 numbers in the longest vector register
LEAST_SCALE = torch.finfo(torch.float32).tiny  # smaller numbers may be 0 in float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    carry: Carry | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Carry:
    """See contract.py. Computes in float32 (float64 for float64 inputs), because a CPU without 16-bit matmuls takes 5
    to 100 times as long in 16 bits."""
    strips, scale = _cut(problem.mask, q, k), problem.scale
    if problem.dropout is not None or scale < LEAST_SCALE or _may_leak(strips, k, v):
        return tiled.forward(q, k, v, problem, carry=carry, out_dtype=out_dtype)
    work = torch.promote_types(q.dtype, torch.float32)
    out_dtype = work if work == torch.float64 else out_dtype
    if carry is None and q.dtype == work and _is_one_call(strips, q):  # otherwise, a few heads at a time are copied
        part = strips[0].parts[0]
        out, lse = _attend(q, k, v, part, scale=scale, dtype=work)
        return Carry(out.to(out_dtype), lse.contiguous())

    result = carry
    if result is None:
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=work, device=q.device)
        result = Carry(torch.zeros_like(q, dtype=out_dtype), lse)
    for (heads, kv_heads), (sequence, rows, parts) in itertools.product(_head_groups(q, k), strips):
        here = Carry(result.out[sequence, heads, rows], result.lse[sequence, heads, rows])
        total = None if carry is None else here
        keys, values = k[sequence, kv_heads], v[sequence, kv_heads]
        for part in parts:
            partial = _attend(q[sequence, heads, rows], keys, values, part, scale=scale, dtype=work)
            if total is None:
                total = partial
            else:
                merge(total, partial)
        if carry is None and total is not None:
            here.out.copy_(total.out)
            here.lse.copy_(total.lse)
    return result


def backward(
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
) -> None:
    """See contract.py. Computes in float32 (float64 for float64 inputs): in 16 bits the operator also rounds delta, and
    is at most a fifth faster."""
    strips, scale = _cut(problem.mask, q, k), problem.scale
    if problem.dropout is not None or scale < LEAST_SCALE or _may_leak(strips, k, v):
        tiled.backward(dout, q, k, v, lse, delta, problem, dq=dq, dk=dk, dv=dv, accumulate=accumulate)
        return
    work = torch.promote_types(q.dtype, torch.float32)
    # One call with all keys gives complete gradients. The gradients of several calls are summed in float32.
    one_call = _is_one_call(strips, q) and len(strips[0].parts[0].keys) == k.shape[2]
    overwrite = one_call and not accumulate
    for heads, kv_heads in _head_groups(q, k):
        sums = totals = [dq[:, heads], dk[:, kv_heads], dv[:, kv_heads]]
        if not accumulate and not one_call:
            sums = [x.zero_() if x.dtype == work else torch.zeros_like(x, dtype=work) for x in totals]
        for sequence, rows, parts in strips:
            of_rows = [x[sequence, heads, rows].to(work) for x in (q, dout, lse, delta)]
            q_rows, dout_rows, lse_rows, delta_rows = of_rows
            blind = lse_rows == -torch.inf
            if bool(blind.any()):  # their gradients are 0: exp(score - inf) = 0, but 0 * NaN is NaN
                q_rows, dout_rows = (x.masked_fill(blind[..., None], 0.0) for x in (q_rows, dout_rows))
                lse_rows, delta_rows = lse_rows.masked_fill(blind, torch.inf), delta_rows.masked_fill(blind, 0.0)
            stand_in, out_rows = _stand_in(dout_rows, delta_rows)
            for part in parts:
                keys = slice(part.keys.start, part.keys.stop)
                k_part, v_part = (x[sequence, kv_heads, keys].to(work) for x in (k, v))
                options = {"attn_mask": part.bias(work), "scale": scale}
                tensors = (q_rows, k_part, v_part, out_rows, lse_rows, 0.0, part.causal)
                grads = [*flash_cpu_backward(stand_in, *tensors, **options)]
                if stand_in is not dout_rows:
                    grads[2] = flash_cpu_backward(dout_rows, *tensors, **options)[2]
                for total, where, grad in zip(sums, (rows, keys, keys), grads, strict=True):
                    total.copy_(grad) if overwrite else total[sequence, :, where].add_(grad)
        for total, total_sum in zip(totals, sums, strict=True):
            if total_sum is not total:
                total.copy_(total_sum)


# Note [Heads]
# The operator allocates its results, and its inputs may need float32 copies. To keep these small compared with the
# whole tensors, one call has only a few heads; the operator computes each head separately anyway. A call has at least
# one head for each thread, because backward parallelises over heads only.


def _head_groups(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """The query heads and the kv heads of each call; see Note [Heads]."""
    if q.numel() == 0:
        return [(slice(None), slice(None))]
    group = q.shape[1] // k.shape[1]
    size = group * q.shape[0] * max(q.shape[2], k.shape[2]) * q.shape[3]
    least = -(-torch.get_num_threads() // (q.shape[0] * group))
    num = least * max(1, TEMPORARY // (least * size))
    firsts = range(0, k.shape[1], num)
    return [(slice(first * group, (first + num) * group), slice(first, first + num)) for first in firsts]


# Note [Strips]
# A mask gives each query one interval of keys. If consecutive rows have the same interval, the operator needs no mask:
# it gets only those keys. This is so for tiles of a zigzag ring, where long runs of rows see all keys or none. If the
# start is the same and the end grows by one key per row, all rows see the keys before the first row's last one, and the
# rest is top-left causal: two calls without a dense mask. This is so for causal masks with any offset, and for each
# document of a packed batch. Any other strip gets a dense mask.


class _Part(NamedTuple):
    """The keys of one call for a strip of rows. A row sees all of them, the causal part, or its interval start..end."""

    keys: range
    causal: bool = False
    start: Tensor | None = None
    end: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The dense mask to add to the scores, [rows, keys]: 0 where visible, -inf elsewhere; None if not needed."""
        if self.start is None or self.end is None:
            return None
        keys = torch.arange(self.keys.start, self.keys.stop, device="cpu")
        hidden = (keys < self.start[:, None]) | (keys >= self.end[:, None])
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


class _Strip(NamedTuple):
    """Rows of one sequence of the batch (or of all sequences), and the operator calls for them."""

    sequence: slice
    rows: slice
    parts: list[_Part]


def _cut(mask: Mask, q: Tensor, k: Tensor) -> list[_Strip]:
    """The strips of rows that see any keys."""
    if q.numel() == 0:
        return []
    if isinstance(mask, Band):
        return _cut_band(mask, q.shape[2], k.shape[2])
    assert isinstance(mask, Rows), "this backend refuses block maps"
    start, end = mask.start, mask.end
    if start.dim() == 1 or len(start) == 1:
        return list(_strips(start.view(-1), end.view(-1), slice(None)))
    return [strip for b in range(len(start)) for strip in _strips(start[b], end[b], slice(b, b + 1))]


@functools.lru_cache(maxsize=16)
def _cut_band(band: Band, num_queries: int, num_keys: int) -> list[_Strip]:
    """Cached, because all layers of a model use the same few bands."""
    return list(_strips(*band.intervals(num_queries, num_keys), slice(None)))


def _strips(start: Tensor, end: Tensor, sequence: slice) -> Iterator[_Strip]:
    """The strips of one sequence; see Note [Strips]."""
    empty = start >= end
    start, end = start.masked_fill(empty, 0), end.masked_fill(empty, 0)
    for first, last, even in _segments(start, end, empty):
        rows = slice(first, last)
        left, right = int(start[first]), int(end[first])
        if even and int(end[last - 1]) == right:
            if left < right:
                yield _Strip(sequence, rows, [_Part(range(left, right))])
        elif even:
            corner = right - 1
            before = [_Part(range(left, corner))] if left < corner else []
            yield _Strip(sequence, rows, [*before, _Part(range(corner, corner + last - first), causal=True)])
        else:
            for top in range(first, last, CHUNK):
                rows = slice(top, min(top + CHUNK, last))
                seen = ~empty[rows]
                if bool(seen.any()):
                    left, right = int(start[rows][seen].min()), int(end[rows].max())
                    part = _Part(range(left, right), start=start[rows], end=end[rows])
                    yield _Strip(sequence, rows, [part])


def _segments(start: Tensor, end: Tensor, empty: Tensor) -> list[tuple[int, int, bool]]:
    """(first, last, even): rows first..last - 1; `even` if all have one interval, or the end grows by one key per row.

    Consecutive even runs shorter than SHORT are joined into one that is not even; a single row is even.
    """
    stays = (start.diff() == 0) & ~empty.diff()
    step = end.diff()
    kinds = torch.where(stays & (step == 0), 1, torch.where(stays & (step == 1), 2, 0))  # 0: neither
    kinds = F.pad(kinds, (0, 1))  # the last row has no next row
    turns = [0, *(kinds.diff().nonzero().flatten() + 1).tolist(), len(kinds)]
    segments: list[tuple[int, int, bool]] = []
    first, was_loose = 0, False
    for stop, kind in zip(turns[1:], kinds[turns[:-1]].tolist(), strict=True):
        even = kind > 0
        last = stop + even  # an even run includes the row after its last step
        if last - first <= even:
            continue  # a single row, which the next run may include
        loose = not even or last - first < SHORT
        if loose and was_loose:
            segments[-1] = (segments[-1][0], last, False)
        else:
            segments.append((first, last, even or last - first == 1))
        first, was_loose = last, loose
    return segments


def _is_one_call(strips: list[_Strip], q: Tensor) -> bool:
    """Whether one call of the operator computes every row."""
    if len(strips) != 1 or len(strips[0].parts) != 1:
        return False
    sequence, rows, _ = strips[0]
    return sequence == slice(None) and rows == slice(0, q.shape[2])


def _may_leak(strips: list[_Strip], k: Tensor, v: Tensor) -> bool:
    """Whether a dense mask would hide non-finite keys or values, which the operator cannot do: 0 * NaN is NaN."""
    if all(not part.causal and part.start is None for strip in strips for part in strip.parts):
        return False
    return not all(math.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32))) for x in (k, v))


def _attend(q: Tensor, k: Tensor, v: Tensor, part: _Part, *, scale: float, dtype: torch.dtype) -> Carry:
    """One call of the operator: rows q over one part of the keys, computed in dtype."""
    k, v = (x[:, :, part.keys.start : part.keys.stop].to(dtype) for x in (k, v))
    out, lse = flash_cpu(q.to(dtype), k, v, 0.0, part.causal, attn_mask=part.bias(dtype), scale=scale)
    if k.shape[2] < VECTOR:  # the operator returns 0 for a row that sees NaN; no mask hides a NaN (`_may_leak`)
        keys = k.isnan().any(-1).any(-1).repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1)
        lost = q.isnan().any(-1) | keys[..., None]
        out, lse = out.masked_fill(lost[..., None], torch.nan), lse.masked_fill(lost, torch.nan)
    if part.start is not None and part.end is not None:
        blind = part.start >= part.end
        if bool(blind.any()):  # the operator returns lse 0 for them, and NaN if their query is NaN
            out, lse = out.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, -torch.inf)
    return Carry(out, lse)


# Note [Stand-in output]
# The operator's backward uses `out` only to compute delta = rowsum(dout * out). We have delta itself, over all keys of
# the row, and it may include the gradient of lse. So we pass another `out` that gives the same delta: dout times
# delta / |dout|^2. All terms of the sum then have one sign, so no digits cancel.
#
# If a square could underflow or overflow, sign(dout) times delta / sum(|dout|) works too, with one more pass over dout.
# If dout is too small compared with delta (0, while lse has a gradient), a constant row 2^60 times smaller than delta
# replaces dout. It is too small to change the rounding of dq or dk. dv does not depend on delta: a second call computes
# it from dout itself.


def _stand_in(dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dout, out) with rowsum(dout * out) = delta. dout is the argument, unless that is too small for delta."""
    delta = delta[..., None]
    nothing = delta == 0
    size = torch.linalg.vector_norm(dout, dim=-1, keepdim=True)
    tame = (size > 2.0**-40) & (size < 2.0**40) & (delta.abs() < 2.0**40 * size)
    if bool((tame | nothing).all()):
        return dout, dout * torch.where(nothing, 0.0, delta / size / size)
    size = dout.abs().sum(-1, keepdim=True)
    pivot = (delta.abs() * 2.0**-60).clamp(min=torch.finfo(dout.dtype).tiny)
    lost = (size < pivot) & ~nothing
    if bool(lost.any()):
        dout = torch.where(lost, pivot, dout)
        size = torch.where(lost, pivot * dout.shape[-1], size)
    return dout, dout.sign() * torch.where(nothing, 0.0, delta / size)
