"""The contract's functions on the Hopper kernels. They turn tensors into descriptors, and numbers into arguments.

Descriptors have the caller's strides, so a transposed or a fused view needs no copy. Rows and columns past the end are
read as zero and are not written, so lengths and head sizes are arbitrary. Tiles were chosen by measurement on an H200
(docs/log/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from flashspan.kernels import portable
from flashspan.kernels.contract import Carry, Problem, Repeat, RepeatBackward
from flashspan.kernels.delta import row_delta
from flashspan.kernels.hopper.float16_values import empty_float16, float16_launch, is_faster
from flashspan.kernels.hopper.forward import forward_kernel
from flashspan.kernels.hopper.lists import lists_forward_launch, refusal
from flashspan.kernels.hopper.one_pass import backward_launch, count_key_parts
from flashspan.kernels.hopper.parts import is_unit, new_rows
from flashspan.kernels.hopper.repair import KEEP_ROWS, MARK_ROWS, MOST_KEYS, MOST_TILES, NOTE_ROWS
from flashspan.kernels.hopper.rows_and_cast import cast_launch, rows_kernel
from flashspan.kernels.hopper.tensors import (
    BackwardInputs,
    aligned,
    block_dim,
    describe,
    forward_dim,
    is_aligned,
    key_heads_for_queries,
    new_counter,
)
from flashspan.kernels.hopper.tiles import BACKWARD, forward_tile, warps
from flashspan.kernels.hopper.two_pass import count_dq_parts, two_pass_launches
from flashspan.kernels.launch.launch import Launch, on
from flashspan.kernels.launch.replay import Room, recall, repeated_backward, repeated_forward, replay
from flashspan.kernels.masks import Band, Blocks, Mask, Rows, unpack
from flashspan.kernels.portable import decode, few_tiles
from flashspan.kernels.portable.arguments import LOG2E, empty_outputs, mask_arguments
from flashspan.kernels.portable.forward import forward_launch as repair_launch
from flashspan.kernels.portable.gradient_parts import add_gradients_launch, empty_parts
from flashspan.kernels.portable.tiles import multiprocessors


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    carry: Carry | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Carry:
    """See contract.py. The carry is updated in place."""
    mask, scale = problem.mask, problem.scale
    refused = isinstance(mask, Blocks) and refusal(mask.block, q.shape[-1])
    if not q.numel() or not k.shape[2] or scale <= 0 or refused or decode.takes(q, k, mask, problem.dropout):
        return portable.forward(q, k, v, problem, carry=carry, out_dtype=out_dtype)
    if carry is None and (size := few_tiles.forward_tile(q, k, mask)) is not None:
        return few_tiles.forward(q, k, v, problem, size, out_dtype)
    if carry is None:
        out, lse = empty_outputs(q, out_dtype)
    else:
        out, lse = aligned(carry.out), carry.lse.float().contiguous()
    tables = mask.to(q.device).packed
    with on(q.device):
        in_float16 = is_faster(q, k, mask, carry is not None)
        marks = carry is not None or marks_rows(q, k, mask, out.dtype, in_float16)
        made = (out, lse, *_forward_tensors(q, v, in_float16, marks), new_counter(q.device))
        steps = None if carry is None else out.stride()  # a carry may have any strides
        done = replay(_forward_launches, (q, k, v), tables, made, scale, steps, out.dtype, in_float16, marks)
    if done:
        return Carry(out, lse)
    q, k, v = aligned(q), aligned(k), aligned(v)
    return forward(q, k, v, problem, carry=carry, out_dtype=out_dtype)


def repeat_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, out_dtype: torch.dtype) -> Repeat | None:
    """See contract.py. None unless such a call has run, without a carry, on these kernels."""
    mask, scale = problem.mask, problem.scale
    if not q.numel() or not k.shape[2] or scale <= 0:
        return None
    if decode.takes(q, k, mask):
        return decode.repeat_forward(q, k, v, problem, out_dtype)
    if (size := few_tiles.forward_tile(q, k, mask)) is not None:
        return few_tiles.repeat_forward(q, k, v, problem, size, out_dtype)
    in_float16 = is_faster(q, k, mask)
    marks = marks_rows(q, k, mask, out_dtype, in_float16)
    values = (scale, None, out_dtype, in_float16, marks)
    launches = recall(_forward_launches, (q, k, v), mask.packed, 3 + in_float16 + marks, *values)
    like_q, like_v = q.to("meta"), v.to("meta")
    outputs, temporary = empty_outputs(like_q, out_dtype), _forward_tensors(like_q, like_v, in_float16, marks)
    return repeated_forward(launches, q.device, outputs, Room.of(temporary, counter=new_counter))


def marks_rows(q: Tensor, k: Tensor, mask: Mask, out_dtype: torch.dtype, in_float16: bool) -> bool:
    """Whether rows that are not finite are marked, and computed again by a second launch (repair.py). It is so with a
    carry, too. A float32 output's buffers leave no room for notes; and tables often hide memory that was never written,
    where a NaN is not rare."""
    (B, H, T, _), S = q.shape, k.shape[2]
    if in_float16 or not isinstance(mask, Band):
        return True
    lo, hi = mask.bounds(T, S)
    num_tiles = triton.cdiv(T, 128) * B * H
    long = num_tiles > MOST_TILES or num_tiles * min(S, hi - lo + 1) > MOST_KEYS
    return (long or out_dtype == torch.float32) and hidden_sides(mask, T, S) > 0


def _forward_tensors(q: Tensor, v: Tensor, in_float16: bool, marks: bool) -> list[Tensor]:
    """Temporary tensors of forward: a mark for each 64 queries of a head, if `marks`; V in float16, if `in_float16`."""
    B, H, T, _ = q.shape
    flags = [q.new_empty((B, H, -(-T // 64)), dtype=torch.int32)] if marks else []
    return [*flags, *([empty_float16(v)] if in_float16 else [])]


def _forward_launches(
    tensors: Sequence[Tensor],
    kind: str,
    numbers: tuple[int, ...],
    scale: float,
    carry_steps: tuple[int, ...] | None,
    out_dtype: torch.dtype,
    in_float16: bool,
    marks: bool,
) -> list[Launch] | None:
    """The launches of forward: the conversion of V to float16 if `in_float16`; the kernel; and, if it marks rows, the
    portable kernel for the marked ones. None if a tensor is not aligned."""
    *given, counter = tensors
    fine = [given.pop()] if in_float16 else []
    bad = given.pop() if marks else None
    q, k, v, *tables, out, lse = given
    if not all(is_aligned(x) for x in (q, k, v)):
        return None
    mask, carry = unpack(kind, numbers, tables), carry_steps is not None
    launches = [forward_launch(q, k, fine[0] if in_float16 else v, out, lse, bad, mask, scale, carry, counter)]
    if bad is not None:
        launches.append(repair_launch(q, k, v, out, lse, mask, scale, carry, None, only=bad))
    return [*(float16_launch(v, x) for x in fine), *launches]


def hidden_sides(mask: Mask, num_queries: int, num_keys: int) -> int:
    """Return where keys are hidden: 0 nowhere; 1 after the keys that a query sees; 2 on both sides, or anywhere."""
    if not isinstance(mask, Band):
        return 2
    lo, hi = mask.bounds(num_queries, num_keys)
    return 2 if lo > 1 - num_queries else 1 if hi < num_keys - 1 else 0


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bad: Tensor | None,
    mask: Mask,
    scale: float,
    carry: bool,
    counter: Tensor | None = None,
) -> Launch:
    """The launch of the forward kernel. `bad` is given if `marks_rows`; `counter` comes from `new_counter`."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    counter = new_counter(q.device) if counter is None else counter
    if isinstance(mask, Blocks):
        assert bad is not None, "a block map hides keys"
        return lists_forward_launch(q, k, v, out, lse, bad, mask, scale, carry, counter)
    table, start, end, _, _, rows_stride, _, lo, hi, _ = mask_arguments(mask, T, S, counter)
    wide = forward_dim(D)
    slice_d = 64 if wide == 192 else wide  # slices.py
    sides = hidden_sides(mask, T, S)
    repair = MARK_ROWS if bad is not None else NOTE_ROWS if sides else KEEP_ROWS
    tile = forward_tile(wide, v.dtype != q.dtype, not (table or carry), T, min(hi - lo + 1, S))
    group = H // K
    tiles_per_head = triton.cdiv(T, 64 * tile.warpgroups)
    num_tiles, chip = tiles_per_head * B * H, multiprocessors(q.device)
    assert repair is not NOTE_ROWS or num_tiles <= MOST_TILES
    section = key_heads_for_queries(q, k, tiles_per_head)
    return Launch(
        forward_kernel,
        (min(num_tiles, chip),),
        (
            describe(q, 1, 1, 64, slice_d), *(describe(x, 1, 1, tile.block_k, slice_d) for x in (k, v)),
            describe(out, 1, 1, 64, slice_d * 2 // out.itemsize), None, q, k, v, out, lse,
            counter if bad is None else bad, start, end, *(None,) * 4, counter,
            *(step // 8 for step in out.stride()[:3]), rows_stride, *(None,) * 4, H, group, T, S, lo, hi, scale * LOG2E,
            B * H, section * group, num_tiles,
        ),
        {
            "HEAD_DIM": D, "STAGES": tile.stages, "Q_STAGES": tile.queries, "HIDDEN_SIDES": sides, "TABLE": table,
            "BLOCK_MAP": False, "CARRY": carry, "REPAIR": repair.value,
            "UNIT_SCALE": is_unit(q, scale) and v.dtype != q.dtype, **warps(tile.warpgroups),
        },
    )  # fmt: skip


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    problem: Problem,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    out: Tensor | None = None,
) -> None:
    """See contract.py. Deterministic gradients take two passes, in which every sum has a fixed order. The portable
    kernels compute masks whose transpose is not an interval, and deterministic block maps. If delta is None, it is
    computed from out.
    """
    mask, scale = problem.mask, problem.scale
    if not _serves_backward(q, k, problem):
        portable.backward(
            dout, q, k, v, lse, _settled(delta, dout, out), problem, dq=dq, dk=dk, dv=dv, accumulate=accumulate
        )
        return
    two_passes = problem.deterministic or block_dim(q.shape[-1]) not in BACKWARD
    tables = mask.to(q.device).packed
    with on(q.device):
        rows_of = out if out is not None and delta is None else _settled(delta, dout, out).contiguous()
        given = (dout, q, k, v, lse.contiguous(), rows_of, dq, dk, dv)
        parts = count_key_parts(q, k, mask, accumulate, not two_passes)
        dq_parts = count_dq_parts(q, k, mask, accumulate)
        made = _backward_tensors(q, k, parts, dq_parts, accumulate, two_passes, dq, dk, dv)
        done = replay(_backward_launches, given, tables, made, scale, accumulate, two_passes, delta is None)
    if done:
        return
    delta = _settled(delta, dout, out)
    dout, q, k, v = aligned(dout), aligned(q), aligned(k), aligned(v)
    into = [x if is_aligned(x) else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (dq, dk, dv)]
    backward(dout, q, k, v, lse, delta, problem, dq=into[0], dk=into[1], dv=into[2], accumulate=accumulate)
    for x, y in zip((dq, dk, dv), into, strict=True):
        if x is not y:
            x.add_(y) if accumulate else x.copy_(y)


def _serves_backward(q: Tensor, k: Tensor, problem: Problem) -> bool:
    """Whether these kernels compute the gradients. Not for empty tensors, scales of 0 or less, `Rows` whose transpose
    is not intervals, or refused or deterministic block maps."""
    mask = problem.mask
    serves = isinstance(mask, Band) or (isinstance(mask, Rows) and mask.convex)
    if isinstance(mask, Blocks):
        serves = not refusal(mask.block, q.shape[-1]) and not problem.deterministic
    return serves and q.numel() > 0 and k.numel() > 0 and problem.scale > 0


def _backward_tensors(
    q: Tensor,
    k: Tensor,
    parts: int,
    dq_parts: int,
    accumulate: bool,
    two_passes: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, ...]:
    """Temporary tensors of backward: -lse, -delta, sums or parts of dq, parts of dk and dv, states, a counter."""
    minus_lse, minus_delta = new_rows(q), new_rows(q)
    num_rows = len(minus_lse)
    sums = empty_parts(q, dq_parts) if dq_parts > 1 else dq
    if not (accumulate or two_passes):
        sums = q.new_empty((num_rows * block_dim(q.shape[-1]) // 256, 256), dtype=torch.float32)
    of_parts = [empty_parts(k, parts) if parts > 1 else x for x in (dk, dv)]
    states = q.new_empty(num_rows // 64, dtype=torch.int32)
    return minus_lse, minus_delta, sums, *of_parts, states, new_counter(q.device)


def repeat_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
) -> RepeatBackward | None:
    """See contract.py. None unless backward_of_output has run for such a call, on these kernels."""
    if (size := few_tiles.backward_tile(q, k, problem.mask)) is not None:
        return few_tiles.repeat_backward((dout, q, k, v, lse, out), problem, size)
    if not _serves_backward(q, k, problem):
        return None
    two_passes = problem.deterministic or block_dim(q.shape[-1]) not in BACKWARD
    grads = [torch.empty_like(x, device="meta") for x in (q, k, v)]
    values = (problem.scale, False, two_passes, True)
    launches = recall(_backward_launches, (dout, q, k, v, lse, out, *grads), problem.mask.packed, 7, *values)
    if launches is None:
        return None
    parts = count_key_parts(q, k, problem.mask, False, not two_passes)  # for this GPU: meta tensors stand for an H200
    dq_parts = count_dq_parts(q, k, problem.mask, False)
    *temporary, _ = _backward_tensors(q.to("meta"), k.to("meta"), parts, dq_parts, False, two_passes, *grads)
    return repeated_backward(launches, q.device, grads, Room.of(temporary, grads, new_counter))


def backward_of_output(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem, **into: Tensor
) -> None:
    """See contract.py."""
    size, grads = few_tiles.backward_tile(q, k, problem.mask), (into["dq"], into["dk"], into["dv"])
    if size is not None and few_tiles.backward((dout, q, k, v, lse, out), grads, problem, size):
        return
    backward(dout, q, k, v, lse, None, problem, out=out, accumulate=False, **into)


def _settled(delta: Tensor | None, dout: Tensor, out: Tensor | None) -> Tensor:
    """delta, computed from dout and out if it is None."""
    if delta is not None:
        return delta
    assert out is not None, "backward takes delta, or the output to make it of"
    return row_delta(dout, out)


def _backward_launches(
    tensors: Sequence[Tensor],
    kind: str,
    numbers: tuple[int, ...],
    scale: float,
    accumulate: bool,
    two_passes: bool,
    of_output: bool,
) -> list[Launch] | None:
    """The launches of backward: one that prepares rows; one or two passes; and one that casts dq, if it was not summed
    in place, and adds the parts of gradients, if there are parts. None if a tensor is not aligned. `of_output`: the
    tensor in delta's place is out."""
    dout, q, k, v, lse, delta, dq, dk, dv, *tables = tensors[:-7]
    minus_lse, minus_delta, sums, dk_parts, dv_parts, states, counter = tensors[-7:]
    if not all(is_aligned(x) for x in (dout, q, k, v, dq, dk, dv, *([delta] if of_output else []))):
        return None
    mask = unpack(kind, numbers, tables)
    B, H, T, D = q.shape
    padded, wide, summed = len(minus_lse) // (B * H), block_dim(D), not (accumulate or two_passes)
    given = BackwardInputs(
        dout, q, k, v, minus_lse, minus_delta, mask, scale, sums, dk_parts, dv_parts, accumulate, states, counter
    )
    passes = two_pass_launches(given) if two_passes else [backward_launch(given)]
    block = passes[0].arguments[0].block_shape[2] if summed else 0  # queries whose dQ is added together
    grain = mask.block[0] if isinstance(mask, Blocks) else block  # rows of sums that are claimed together
    claimed = grain if passes[0].constants.get("FIRST_STORES", False) else 0
    prepare = Launch(
        rows_kernel,
        (padded // 128 * B * H,),
        (
            lse, delta, dout, minus_lse, minus_delta, sums, states,
            *(step // 8 for x in (delta if of_output else dout, dout) for step in x.stride()[:3]), H, T, padded,
            1 / scale,
        ),
        {
            "D": D if of_output else 0, "BD": wide, "CLEAR": wide if summed and not claimed else 0, "BLOCK": 128,
            "STATES": 128 // claimed if claimed else 0, "num_warps": 8,
        },
    )  # fmt: skip
    if summed:
        parts, rows = (dk_parts, dv_parts), {"padded": padded, "block": block, "claimed": claimed}
        return [prepare, *passes, cast_launch(sums, states, parts, (dq, dk, dv), scale, **rows)]
    if sums.shape != dq.shape or dk_parts.shape != dk.shape:
        passes.append(add_gradients_launch((sums, dk_parts, dv_parts), (dq, dk, dv), accumulate))
    return [prepare, *passes]
