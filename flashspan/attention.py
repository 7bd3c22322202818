"""attention(q, k, v, ...): exact attention on one device, differentiable, a drop-in for PyTorch's SDPA.

Inputs are checked here, once; below this file code trusts. The work is one torch operator with a fake implementation,
so `torch.compile(fullgraph=True)`, autocast and activation checkpointing treat it like any other.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flashspan.kernels import dispatch, masks
from flashspan.kernels.blocks import Blocks
from flashspan.kernels.contract import Dropout, row_delta
from flashspan.kernels.masks import Band, Mask, Rows

MAX_HEAD_DIM = 256
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + mask) v, never drawing the [T, S] matrix.

    q [B, H, T, D]; k, v [B, K, S, D] with K dividing H (grouped queries; K/V are not expanded). Returns [B, H, T, D]
    in q's dtype, laid out so that merging the heads is free; with `return_lse` also the float32 log-sum-exp [B, H, T],
    itself differentiable (float64 for float64 inputs). A query that sees no key gets 0, and -inf.

    causal: query i sees keys 0..i (counted from the start, as in PyTorch; `masks.causal(offset)` for the other way).
    window: an int w sees the w nearest keys on each side counting its own (with causal: the last w); or (left, right).
    mask: a value of `flashspan.masks`, or a bool tensor [T, S], [B, T, S] or [B, H, T, S] (1 broadcasts; [H, T, S] if H
    is not B). A tensor is read in every call: make it `masks.Blocks.from_dense(tensor)` once instead, and write
    `blocks & masks.causal()` once instead of causal=True with blocks. `torch.compile(fullgraph=True)` demands both.
    scale: 1 / sqrt(D) unless given. dropout: probability, decided by `seed` (or drawn from `generator`, or PyTorch's
    default) and the pair's position alone. float32 is true float32; `torch.set_float32_matmul_precision("high")` asks
    for tf32. backend: "auto", or an implementation by name; `explain` says which serves. deterministic: gradients that
    repeat bit for bit (the output always does); `torch.use_deterministic_algorithms(True)` asks for it everywhere.
    """
    q, k, v = _autocast(q, k, v)
    check_inputs(q, k, v, dropout)
    resolved = resolve_mask(q, k, causal=causal, window=window, mask=mask).to(q.device)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    seeds = draw_seed(q.device, seed, generator) if dropout > 0 else None
    backend += dispatch.DETERMINISTIC if deterministic else ""
    if _plainly_eager(q, k, v):
        run = _Attend.apply if _differentiated(q, k, v) else _forward
        out, lse = run(q, k, v, resolved, scale, float(dropout), seeds, backend)
    else:
        out, lse = _attend(q, k, v, *resolved.pack(), scale, float(dropout), seeds, backend)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mask: Mask | Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    deterministic: bool = False,
) -> dispatch.Choice:
    """Which implementation `attention` would use for this call, and why not the others. Print it."""
    q, k, v = _autocast(q, k, v)
    check_inputs(q, k, v, dropout)
    resolved = resolve_mask(q, k, causal=causal, window=window, mask=mask)
    return dispatch.choose(q, k, v, mask=resolved, dropout=dropout > 0, backend=backend, deterministic=deterministic)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> None:
    """One ValueError for anything attention cannot mean: the rule, the values, the remedy."""
    kinds = [x.layout if isinstance(x, Tensor) else type(x).__name__ for x in (q, k, v)]
    if kinds != [torch.strided] * 3:
        raise ValueError(
            f"q, k and v must be dense tensors: got {', '.join(map(str, kinds))}; use torch.as_tensor or .to_dense()"
        )

    def shapes() -> str:
        return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be [batch, heads, tokens, head size]: {shapes()}; unsqueeze what is missing")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype: got {q.dtype}, {k.dtype}, {v.dtype}; cast with .to(q.dtype)")
    if q.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"attention works on {names}: got {q.dtype}; cast the inputs")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device: got {q.device}, {k.device}, {v.device}; move them with .to(q.device)"
        )
    batch, heads, _, head_dim = q.shape
    kv_batch, kv_heads, _, kv_head_dim = k.shape
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape: {shapes()}")
    if batch != kv_batch:
        raise ValueError(f"q and k must have the same batch: {shapes()}; expand the smaller one")
    if head_dim != kv_head_dim:
        raise ValueError(f"q and k must have the same head size: {shapes()}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head size must be 1 to {MAX_HEAD_DIM}: {shapes()}; split larger heads")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"the key heads must divide the query heads: got {heads} query heads and {kv_heads} key heads")
    if not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is a probability in [0, 1): got {dropout}")


def resolve_mask(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mask: Mask | Tensor | None = None,
) -> Mask:
    """causal, window and mask as the one mask they mean together, checked against q [B, H, T, D] and k [B, K, S, D]."""
    result: Mask = masks.CAUSAL if causal else masks.EVERYTHING
    if window is not None:
        pair = (window - 1, window - 1) if isinstance(window, int) else window
        if not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, int) and x >= 0 for x in pair)
        ):
            raise ValueError(
                f"a window is an int >= 1 or a pair (left, right) of ints >= 0: got {window!r}; use None for no window"
            )
        left, right = pair
        result = result & Band(-left, right)
    if mask is None:
        return result
    if isinstance(mask, Tensor):
        mask = mask_of(mask, q, q.shape[2], k.shape[2])
    if not isinstance(mask, (Band, Rows, Blocks)):
        raise ValueError(
            f"mask must be a bool tensor or made by flashspan.masks: got {type(mask).__name__}; "
            f"additive masks are not supported, use mask=bias.isfinite() where they only hide keys"
        )
    if isinstance(mask, Blocks):
        mask.check(q.shape[0], q.shape[2], k.shape[2], q.shape[1])
    else:
        mask.check(q.shape[0], q.shape[2], k.shape[2])
    return mask if result == masks.EVERYTHING else mask & result


def mask_of(visible: Tensor, q: Tensor, num_queries: int, num_keys: int) -> Rows | Blocks:
    """A bool tensor [T, S], [B, T, S], [H, T, S] or [B, H, T, S] for q [B, H, ...]: Rows if every row is one run."""
    if visible.dtype != torch.bool:
        raise ValueError(
            f"a mask tensor must be bool, True where visible: got {visible.dtype}; "
            f"use mask.bool(), or mask.isfinite() if it is an additive one"
        )
    if visible.device != q.device and not q.is_meta:
        raise ValueError(
            f"a mask tensor must be on q's device, {q.device}: got {visible.device}; move it with .to(q.device), once"
        )
    if visible.dim() not in (2, 3, 4):
        raise ValueError(
            f"a mask tensor must be [T, S], [B, T, S], [H, T, S] or [B, H, T, S]: got {tuple(visible.shape)}"
        )
    if visible.dim() == 3 and visible.shape[0] in (1, q.shape[0]):
        visible = visible[:, None]
    visible = visible[(None,) * (4 - visible.dim())]
    if visible.shape[0] not in (1, q.shape[0]) or visible.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"a mask tensor must broadcast to q's batch and heads, [{q.shape[0]}, {q.shape[1]}, T, S]: "
            f"got {tuple(visible.shape)}"
        )
    visible = visible.expand(-1, -1, -1, num_keys if visible.shape[3] == 1 else -1)
    rows = num_queries if visible.shape[2] == 1 else visible.shape[2]  # one row, a padding mask's, is looked at once
    if visible.shape[1] == 1 or visible.stride(1) == 0:
        runs = visible[:, 0, :, :1].sum(-1) + (visible[:, 0, :, 1:] & ~visible[:, 0, :, :-1]).sum(-1)
        if bool((runs <= 1).all()):
            return _rows_of(visible[0, 0] if len(visible) == 1 else visible[:, 0], rows)
    return Blocks.from_dense(visible.expand(-1, -1, rows, -1))


def _rows_of(visible: Tensor, num_queries: int) -> Rows:
    """A bool tensor [T or 1, S] or [B, T or 1, S] in which every row is one run of True, or none."""
    num_keys = visible.shape[-1]
    length = visible.sum(-1, dtype=torch.int32)
    start = visible.view(torch.uint8).argmax(-1).int() if num_keys else length
    start, length = (x.expand(*x.shape[:-1], num_queries) for x in (start, length))
    return Rows(start, start + length, num_keys)


def draw_seed(device: torch.device, seed: int | None, generator: torch.Generator | None) -> Tensor:
    """A dropout seed as an int64 tensor on the device: the given one, or one drawn."""
    if seed is not None and generator is not None:
        raise ValueError("give dropout a seed or a generator, not both")
    if seed is not None:
        if not isinstance(seed, int):
            raise ValueError(f"a seed is a whole number: got {seed!r}")
        return torch.full((1,), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    return torch.randint(0, 2**62, (1,), device=source, generator=generator).to(device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float, seed: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    drop = None if seed is None else Dropout(dropout, seed)
    local = dispatch.choose(q, k, v, mask=mask, dropout=drop, backend=backend).load()
    with _no_autocast(q):
        out, lse = local.forward(q, k, v, mask=mask, scale=scale, out_dtype=q.dtype, dropout=drop)
    _, H, T, D = q.shape
    if out.stride() != (T * H * D, D, H * D, 1):
        out = _outputs(q)[0].copy_(out)
    return out, lse.to(torch.promote_types(q.dtype, torch.float32))


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output, stored as [B, T, H, D] so that merging heads is a view, and for lse."""
    B, H, T, D = q.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(B, T, H, D).transpose(1, 2), q.new_empty(B, H, T, dtype=exact)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    drop = None if seed is None else Dropout(dropout, seed)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    local = dispatch.choose(q, k, v, mask=mask, dropout=drop, backend=backend).load()
    with _no_autocast(q):
        # d lse / d score is the probability: a gradient of lse enters where delta does, with the other sign.
        delta = row_delta(dout, out) if dlse is None else row_delta(dout, out) - dlse
        local.backward(
            dout, q, k, v, lse, delta, mask=mask, scale=scale, dq=dq, dk=dk, dv=dv, accumulate=False, dropout=drop
        )
    return dq, dk, dv


# Note: two ways in. The operator is what compilers, exporters and dispatch modes see; it costs them nothing, but eager
# autograd through a Python operator costs 150 us a call. Plain eager calls go through an autograd.Function over the
# same two functions instead, or straight to the first of them if nobody will differentiate. An operator's schema knows
# no masks: there they travel in parts.
@torch.library.custom_op("flashspan::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_kind: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    scale: float,
    dropout: float,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    mask = masks.unpack(mask_kind, mask_numbers, mask_tensors)
    return _forward(q, k, v, mask, scale, dropout, seed, backend)


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@torch.library.custom_op("flashspan::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_kind: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    scale: float,
    dropout: float,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = masks.unpack(mask_kind, mask_numbers, mask_tensors)
    return _backward(dout, dlse, q, k, v, out, lse, mask, scale, dropout, seed, backend)


@_attend_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@_attend_backward.register_autograd
def _(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "attention has no second derivative: got a gradient of its gradient; for one, use "
        "F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.kind, ctx.numbers, tensors, ctx.scale, ctx.dropout, seed, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output, seed, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, seed, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else _dense_rows(dout)
    grads = _attend_backward(
        dout, dlse, q, k, v, out, lse, ctx.kind, ctx.numbers, tensors, ctx.scale, ctx.dropout, seed, ctx.backend
    )
    return (*grads, None, None, [None] * len(tensors), None, None, None, None)


_attend.register_autograd(_differentiate_operator, setup_context=_save_operator)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        dropout: float,
        seed: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, mask, scale, dropout, seed, backend)
        ctx.save_for_backward(q, k, v, out, lse, seed)
        ctx.rest = mask, scale, dropout, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, seed = ctx.saved_tensors
        mask, scale, dropout, backend = ctx.rest
        dout = torch.zeros_like(out) if dout is None else _dense_rows(dout)
        given = (dout, dlse, q, k, v, out, lse)
        if torch.is_grad_enabled():  # a graph of the gradients is wanted: the operator, in it, refuses the next ones
            grads = _attend_backward(*given, *mask.pack(), scale, dropout, seed, backend)
        else:
            grads = _backward(*given, mask, scale, dropout, seed, backend)
        return (*grads, None, None, None, None, None)


def _dense_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, float32 tensors in its dtype."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def _plainly_eager(*tensors: Tensor) -> bool:
    """Whether nobody watches: no compiler, no dispatch mode, no tensor subclass, no mere shapes."""
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and {type(x) for x in tensors} <= _PLAIN
        and not tensors[0].is_meta
    )


_PLAIN = {Tensor, torch.nn.Parameter}


def _differentiated(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd must hear of this call, in whatever mode: backward, forward, or a function transform."""
    return (
        (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Sums inside an implementation are float32 and stay so."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
