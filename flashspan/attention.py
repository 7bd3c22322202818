"""attention(q, k, v, ...): exact attention on one device, differentiable, in place of PyTorch's SDPA.

Inputs are checked here, once (by arguments.py); below this file code trusts. The work is one torch operator with a
fake implementation, so `torch.compile(fullgraph=True)`, autocast and activation checkpointing treat it like any other.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from flashspan.arguments import (
    autocast,
    check_inputs,
    check_seed,
    check_unchanged,
    dense_rows,
    draw_seed,
    mask_versions,
    no_autocast,
    resolve_mask,
    scale_of,
    unknown_argument,
)
from flashspan.call_cache import Prepared, call_key, keep_call, kept_call, plainly_eager
from flashspan.kernels import masks
from flashspan.kernels.backends import Choice, Chosen, choose
from flashspan.kernels.contract import Problem
from flashspan.kernels.delta import kept_dtype, row_delta
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Mask
from flashspan.kernels.torch_private import has_tangents, is_transformed


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
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + mask) v, exactly, without the [T, S] matrix; differentiable.

    It takes the place of `F.scaled_dot_product_attention`: is_causal -> causal, a bool attn_mask -> mask,
    dropout_p -> dropout. `torch.compile(fullgraph=True)` needs a mask made before: `masks.Blocks.from_dense(tensor)`
    in place of a tensor, `blocks & masks.causal()` in place of causal=True with blocks. float32 is true float32;
    `torch.set_float32_matmul_precision("high")` asks for tf32.

    Args:
        q: Queries [B, H, T, D].
        k: Keys [B, K, S, D]; K divides H (grouped queries; keys and values are not expanded).
        v: Values [B, K, S, D].
        causal: Query i sees keys 0..i, counted from the start, as in PyTorch; `masks.causal(offset)` for another
            alignment.
        window: The number of nearest keys on each side that a query sees, its own included (with causal: the last
            `window` keys); or (left, right).
        mask: A value of `flashspan.masks`, or a bool tensor [T, S], [B, T, S], [H, T, S] or [B, H, T, S], in which 1
            broadcasts (three dimensions are [H, T, S] if the first is not B). A tensor is read in every call.
        scale: Factor of the scores; by default 1 / sqrt(D).
        dropout: Probability that a pair is dropped, as decided by the seed and the pair's position alone.
        seed: Seed of the dropout. By default one is drawn from `generator`.
        generator: Generator of that seed, by default PyTorch's. Leave it out under activation checkpointing: forward
            runs twice there, and PyTorch restores only its default generator.
        return_lse: Return the log-sum-exp of each query's scores too.
        backend: "auto", or an implementation by name; `explain` lists them.
        deterministic: Gradients that repeat bit for bit, as outputs do; or `torch.use_deterministic_algorithms(True)`.

    Returns:
        The output [B, H, T, D] in q's dtype, stored so that merging the heads is a view; with `return_lse` also the
        float32 log-sum-exp [B, H, T], differentiable (float64 for float64 inputs). A query that sees no key gets
        output 0 and log-sum-exp -inf.

    Raises:
        ValueError: For inputs that do not fit, with the rule, the values and the remedy.

    Example:
        ```python
        import torch
        from flashspan import attention, masks

        q = torch.randn(1, 8, 1000, 64, requires_grad=True)
        k, v = torch.randn(2, 1, 2, 1000, 64)
        out = attention(q, k, v, mask=masks.documents([300, 700]) & masks.causal())
        out.backward(torch.randn_like(out))
        ```
    """
    if unknown:
        raise unknown_argument(unknown)
    key = call_key(q, k, v, causal, window, mask, scale, dropout, backend, deterministic)
    call = None if key is None else kept_call(key, mask, q.device)
    kept = call is not None
    if call is None:
        q, k, v = autocast(q, k, v)
        check_inputs(q, k, v, dropout, scale)
        check_seed(seed, generator)
        resolved = resolve_mask(q, k, causal=causal, window=window, mask=mask).to(q.device)
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        drop = Dropout(float(dropout), draw_seed(q.device, seed, generator)) if dropout > 0 else None
        call = Prepared(Problem(resolved, scale_of(q, scale), drop, bool(deterministic)), str(backend))
        if not plainly_eager(q, k, v):
            out, lse, _ = _attend(q, k, v, *_parts(call.problem), call.backend)
            return (out, lse) if return_lse else out
        refuse_transforms()
    run = _Attend.apply if _differentiated(q, k, v) else _forward
    out, lse = run(q, k, v, call)
    if key is not None and not kept:
        keep_call(key, call, q, k, v, mask)
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Choice:
    """Which implementation `attention` would use for this call, and why not the others.

    It reads shapes, dtypes and devices, not the numbers: at run time an implementation may pass a case that it does not
    serve (rows that see NaN, a scale of 0 or less, gradients of intervals that do not ascend) to the next one.

    Returns:
        The choice. Print it for one line per implementation. The arguments are those of `attention`.

    Example:
            print(explain(q, k, v, causal=True))
    """
    bound = _SIGNATURE.bind(q, k, v, **options)
    bound.apply_defaults()
    given = bound.arguments
    if given["unknown"]:
        raise unknown_argument(given["unknown"])
    q, k, v = autocast(q, k, v)
    check_inputs(q, k, v, given["dropout"], given["scale"])
    check_seed(given["seed"], given["generator"])
    resolved = resolve_mask(q, k, causal=given["causal"], window=given["window"], mask=given["mask"])
    dropout, deterministic = given["dropout"] > 0, bool(given["deterministic"])
    return choose(q, resolved, dropout=dropout, deterministic=deterministic, backend=given["backend"])


_SIGNATURE = inspect.signature(attention)
explain.__signature__ = _SIGNATURE.replace(return_annotation=Choice)  # type: ignore[attr-defined]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Prepared,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """out, in q's dtype or the one asked for, and lse."""
    problem, backend, repeat = call
    if repeat is not None and (carry := repeat(q, k, v, problem.mask)) is not None:
        return carry
    with no_autocast(q):
        out, lse = Chosen(backend).forward(q, k, v, problem, out_dtype=out_dtype or q.dtype)
    _, H, T, D = q.shape
    if out.stride() != (T * H * D, D, H * D, 1):
        out = _room(q, out.dtype).copy_(out)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, lse if lse.dtype == exact else lse.to(exact)


def _room(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for an output, stored as [B, T, H, D] so that merging heads is a view."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D, dtype=dtype).transpose(1, 2)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    local, dq, dk, dv = Chosen(backend), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with no_autocast(q):
        if dlse is None:
            local.backward_of_output(dout, q, k, v, out, lse, problem, dq=dq, dk=dk, dv=dv)
        else:
            delta = row_delta(dout, out, dlse)
            local.backward(dout, q, k, v, lse, delta, problem, dq=dq, dk=dk, dv=dv, accumulate=False)
    return dq, dk, dv


def _parts(problem: Problem) -> tuple[Any, ...]:
    """A problem as an operator's schema can carry it; `_whole` is the inverse."""
    drop = problem.dropout
    dropout = (0.0, None) if drop is None else (drop.p, drop.seed)
    return *problem.mask.pack(), problem.scale, *dropout, problem.deterministic


def _whole(
    kind: str, numbers: list[int], tensors: list[Tensor], scale: float, p: float, seed: Tensor | None, repeats: bool
) -> Problem:
    return Problem(masks.unpack(kind, numbers, tensors), scale, None if seed is None else Dropout(p, seed), repeats)


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
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the output as backward wants it: empty where that is `out` itself."""
    problem = _whole(mask_kind, mask_numbers, mask_tensors, scale, dropout, seed, deterministic)
    kept, lse = _forward(q, k, v, Prepared(problem, backend), out_dtype=kept_dtype(q))
    out = kept.to(q.dtype)
    return out, lse, q.new_empty(0) if kept is out else kept


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    kept = q.new_empty(0) if kept_dtype(q) == q.dtype else _room(q, kept_dtype(q))
    return _room(q, q.dtype), lse, kept


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
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _whole(mask_kind, mask_numbers, mask_tensors, scale, dropout, seed, deterministic)
    return _backward(dout, dlse, q, k, v, out, lse, problem, backend)


@_attend_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def refuse_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    """What follows a gradient in a graph of gradients."""
    raise RuntimeError(
        "attention has no second derivative: got a gradient of its gradient; for one, use "
        "F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), on one device"
    )


_attend_backward.register_autograd(refuse_second_derivative)


def refuse_forward_derivative(ctx: Any, *tangents: Any) -> NoReturn:
    """What a dual tensor meets."""
    raise RuntimeError(
        "attention has no forward derivative: got a dual tensor; differentiate backward, or use "
        "F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), on one device"
    )


def refuse_transforms() -> None:
    """Refuse a call inside a transform of torch.func, where neither way in (see the note) has a rule to follow."""
    if is_transformed():
        raise RuntimeError(
            "attention has no rules for the transforms of torch.func: got a call inside one of grad, vjp, jvp, vmap; "
            "use torch.autograd.grad or backward(), and a larger batch in place of vmap"
        )


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.kind, ctx.numbers, tensors, ctx.scale, ctx.dropout, seed, *ctx.rest = inputs
    out, lse, kept = output
    ctx.save_for_backward(q, k, v, out if kept.dtype == out.dtype else kept, lse, seed, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, seed, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out, dtype=q.dtype) if dout is None else dense_rows(dout)
    grads = _attend_backward(
        dout, dlse, q, k, v, out, lse, ctx.kind, ctx.numbers, tensors, ctx.scale, ctx.dropout, seed, *ctx.rest
    )
    return (*grads, None, None, [None] * len(tensors), None, None, None, None, None)


_attend.register_autograd(_differentiate_operator, setup_context=_save_operator)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Prepared) -> tuple[Tensor, Tensor]:
        if call.forward is None:
            Chosen(call.backend).compile_backward(q, k, v, call.problem)
        out, lse = _forward(q, k, v, call, out_dtype=kept_dtype(q))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.versions = call, mask_versions(call.problem.mask)
        ctx.set_materialize_grads(False)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        problem, backend, _ = ctx.call
        check_unchanged(problem.mask, ctx.versions)
        dout = torch.zeros_like(out, dtype=q.dtype) if dout is None else dense_rows(dout)
        given = (dout, dlse, q, k, v, out, lse)
        if torch.is_grad_enabled():  # a graph of the gradients is wanted: the operator, in it, refuses the next ones
            grads = _attend_backward(*given, *_parts(problem), backend)
        else:
            grads = _backward(*given, problem, backend)
        return (*grads, None)

    jvp = staticmethod(refuse_forward_derivative)


def _differentiated(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd must hear of this call, in whatever mode: backward or forward."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return wanted or has_tangents()
