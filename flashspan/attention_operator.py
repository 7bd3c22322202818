"""The attention of one device as PyTorch sees it: an operator for compilers, an autograd.Function for eager calls.

Both call the same forward and backward. Compilers, exporters and dispatch modes see the operator, which costs them
nothing. In eager mode, autograd through a Python operator takes 150 us a call. Eager calls therefore use
`EagerAttention`, or `forward` itself without autograd. An operator's schema cannot contain a mask, so the operator
takes the mask's packed parts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashspan.arguments import check_unchanged, dense_rows, mask_versions
from flashspan.call_cache import Prepared
from flashspan.kernels import masks
from flashspan.kernels.backends import Chosen
from flashspan.kernels.contract import Problem
from flashspan.kernels.delta import kept_dtype, row_delta
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.torch_private import apply_eagerly, has_tangents, is_batched, is_transformed

MAX_LAYOUTS = 8
"""A cached call stores its backward launches for at most this many layouts of dout and saved tensors."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Prepared,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out, in out_dtype (by default q's dtype), and lse."""
    problem, backend = call.problem, call.backend
    if call.forward is not None and (carry := call.forward(q, k, v, problem.mask)) is not None:
        return carry
    local = Chosen(backend)
    with no_autocast(q.device.type):
        out, lse = local.forward(q, k, v, problem, out_dtype=out_dtype or q.dtype)
    _, H, T, D = q.shape
    if out.stride() != (T * H * D, D, H * D, 1):
        out = empty_output(q, out.dtype).copy_(out)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, lse if lse.dtype == exact else lse.to(exact)


_NULL = nullcontext()


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without autocast, so that sums inside an implementation stay float32."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NULL


def empty_output(q: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised output, stored as [B, T, H, D] so that merging the heads is a view."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D, dtype=dtype).transpose(1, 2)


def backward(
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
    with no_autocast(q.device.type):
        if dlse is None:
            local.backward_of_output(dout, q, k, v, out, lse, problem, dq=dq, dk=dk, dv=dv)
        else:
            delta = row_delta(dout, out, dlse)
            local.backward(dout, q, k, v, lse, delta, problem, dq=dq, dk=dk, dv=dv, accumulate=False)
    return dq, dk, dv


def repeated_backward(
    call: Prepared, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a cached call. The launches are repeated if they have run before for these layouts."""
    assert call.backwards is not None
    # Hooks on saved tensors (such as offloading) may return tensors with other layouts than those of forward.
    saved = [x.stride() for x in (q, k, v, out, lse)]
    key = (dout.stride(), dout.dtype, *saved, torch.are_deterministic_algorithms_enabled())
    repeat = call.backwards.get(key)
    if repeat is not None and (grads := repeat(dout, q, k, v, out, lse, call.problem.mask)) is not None:
        return grads
    grads = backward(dout, None, q, k, v, out, lse, call.problem, call.backend)
    if repeat is None and len(call.backwards) < MAX_LAYOUTS:
        repeat = Chosen(call.backend).repeat_backward(dout, q, k, v, out, lse, call.problem)
        if repeat is not None:
            call.backwards[key] = repeat
    return grads


def pack_problem(problem: Problem) -> tuple[Any, ...]:
    """A problem as arguments that an operator's schema allows; `unpack_problem` is the inverse."""
    drop = problem.dropout
    dropout = (0.0, None) if drop is None else (drop.p, drop.seed)
    return *problem.mask.pack(), problem.scale, *dropout, problem.deterministic


def unpack_problem(
    kind: str, numbers: list[int], tensors: list[Tensor], scale: float, p: float, seed: Tensor | None, repeats: bool
) -> Problem:
    return Problem(masks.unpack(kind, numbers, tensors), scale, None if seed is None else Dropout(p, seed), repeats)


@torch.library.custom_op("flashspan::attend", mutates_args=())
def attend(
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
    """Return out, lse, and the output in the dtype that backward needs, which is empty if `out` has that dtype."""
    problem = unpack_problem(mask_kind, mask_numbers, mask_tensors, scale, dropout, seed, deterministic)
    kept, lse = forward(q, k, v, Prepared(problem, backend), out_dtype=kept_dtype(q))
    out = kept.to(q.dtype)
    return out, lse, q.new_empty(0) if kept is out else kept


@attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    kept = q.new_empty(0) if kept_dtype(q) == q.dtype else empty_output(q, kept_dtype(q))
    return empty_output(q, q.dtype), lse, kept


@torch.library.custom_op("flashspan::attend_backward", mutates_args=())
def attend_backward(
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
    problem = unpack_problem(mask_kind, mask_numbers, mask_tensors, scale, dropout, seed, deterministic)
    return backward(dout, dlse, q, k, v, out, lse, problem, backend)


@attend_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def refuse_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    """Raise the error for the derivative of a gradient."""
    raise RuntimeError(
        "attention has no second derivative: got a gradient of its gradient; use F.scaled_dot_product_attention under "
        "sdpa_kernel(SDPBackend.MATH), on one device"
    )


attend_backward.register_autograd(refuse_second_derivative)


def refuse_forward_derivative(ctx: Any, *tangents: Any) -> NoReturn:
    """Raise the error for a forward-mode derivative."""
    raise RuntimeError(
        "attention has no forward-mode derivative: got a dual tensor; use backward(), or "
        "F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), on one device"
    )


def refuse_transforms() -> None:
    """Raise an error inside a transform of torch.func: neither the operator nor the Function has a rule for it."""
    if is_transformed():
        raise RuntimeError(
            "attention has no rules for the transforms of torch.func: got a call inside one of grad, vjp, jvp, vmap; "
            "use torch.autograd.grad or backward(), and a larger batch in place of vmap"
        )


def refuse_batched(*grads: Tensor | None) -> None:
    """Raise an error for a backward pass of several gradients at once."""
    for gradient in grads:
        if gradient is not None and is_batched(gradient):
            raise RuntimeError(
                "attention has no rule for batched gradients: got is_grads_batched=True, or a vectorized Jacobian; "
                "call torch.autograd.grad once for each gradient"
            )


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.kind, ctx.numbers, tensors, ctx.scale, ctx.dropout, seed, *ctx.rest = inputs
    out, lse, kept = output
    ctx.save_for_backward(q, k, v, out if kept.dtype == out.dtype else kept, lse, seed, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, seed, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out, dtype=q.dtype) if dout is None else dense_rows(dout)
    grads = attend_backward(
        dout, dlse, q, k, v, out, lse, ctx.kind, ctx.numbers, tensors, ctx.scale, ctx.dropout, seed, *ctx.rest
    )
    return (*grads, None, None, [None] * len(tensors), None, None, None, None, None)


attend.register_autograd(_differentiate_operator, setup_context=_save_operator)


class EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Prepared) -> tuple[Tensor, Tensor]:
        if call.forward is None:
            Chosen(call.backend).compile_backward(q, k, v, call.problem)
        out, lse = forward(q, k, v, call, out_dtype=kept_dtype(q))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.versions = call, mask_versions(call.problem.mask)
        ctx.set_materialize_grads(False)
        return (out if out.dtype == q.dtype else out.to(q.dtype)), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        refuse_batched(dout, dlse)
        q, k, v, out, lse = ctx.saved_tensors
        call = ctx.call
        problem, backend = call.problem, call.backend
        if ctx.versions:
            check_unchanged(problem.mask, ctx.versions)
        dout = torch.zeros_like(out, dtype=q.dtype) if dout is None else dense_rows(dout)
        tensors = (dout, dlse, q, k, v, out, lse)
        if call.backwards is not None and dlse is None and not torch.is_grad_enabled():
            grads = repeated_backward(call, dout, q, k, v, out, lse)
        elif torch.is_grad_enabled():  # create_graph=True: the operator in that graph refuses a second derivative
            grads = attend_backward(*tensors, *pack_problem(problem), backend)
        else:
            grads = backward(*tensors, problem, backend)
        return (*grads, None)

    jvp = staticmethod(refuse_forward_derivative)


record_repeated = apply_eagerly(EagerAttention)
"""`EagerAttention.apply` for a cached call: those are outside the transforms of torch.func."""


def differentiated(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd must record this call, for backward or forward mode."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return needs_grad or has_tangents()
