"""attention(q, k, v, ...): exact attention on one device, differentiable, in place of PyTorch's SDPA.

arguments.py checks a call once; the code below trusts its arguments. A repeated call uses what the first one prepared
(call_cache.py). attention_operator.py runs the call.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, overload

import torch
from torch import Tensor

from flashspan.arguments import (
    autocast,
    check_inputs,
    check_seed,
    dense_rows,
    draw_seed,
    resolve_mask,
    scale_of,
    unknown_argument,
)
from flashspan.attention_operator import (
    EagerAttention,
    attend,
    differentiated,
    forward,
    pack_problem,
    record_repeated,
    refuse_transforms,
)
from flashspan.call_cache import Prepared, call_key, is_eager, keep_call, kept_call
from flashspan.kernels.backends import Choice, choose
from flashspan.kernels.contract import Problem
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Mask


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

    It replaces `F.scaled_dot_product_attention`: is_causal -> causal, a bool attn_mask -> mask, dropout_p -> dropout.
    `torch.compile(fullgraph=True)` needs a mask that exists before the call: `masks.Blocks.from_dense(tensor)` for a
    tensor, `blocks & masks.causal()` for causal=True with blocks. float32 matmuls are exact;
    `torch.set_float32_matmul_precision("high")` allows tf32.

    Args:
        q: Queries [B, H, T, D].
        k: Keys [B, K, S, D]; K divides H (grouped queries; keys and values are not expanded).
        v: Values [B, K, S, D].
        causal: Query i sees keys 0..i, counted from the start, as in PyTorch; use `masks.causal(offset)` for another
            alignment.
        window: The number of nearest keys on each side that a query sees, its own included (with causal: the last
            `window` keys); or (left, right).
        mask: A value of `flashspan.masks`, or a bool tensor [T, S], [B, T, S], [H, T, S] or [B, H, T, S], in which 1
            broadcasts (three dimensions are [H, T, S] if the first is not B). A tensor is read in every call.
        scale: Factor of the scores; by default 1 / sqrt(D).
        dropout: Probability that a (query, key) pair is dropped. The seed and the pair's position determine the result.
        seed: Seed of the dropout; by default, drawn from `generator`.
        generator: Generator that draws the seed; by default, PyTorch's default one. Leave it out under activation
            checkpointing: forward runs twice there, and PyTorch restores only its default generator.
        return_lse: Also return the log-sum-exp of each query's scores.
        backend: "auto", or the name of an implementation; `explain` lists them.
        deterministic: Make gradients bitwise reproducible, as outputs always are;
            `torch.use_deterministic_algorithms(True)` has the same effect.

    Returns:
        The output [B, H, T, D] in q's dtype, stored so that merging the heads is a view; with `return_lse` also the
        float32 log-sum-exp [B, H, T], differentiable (float64 for float64 inputs). A query that sees no key gets
        output 0 and log-sum-exp -inf.

    Raises:
        ValueError: For invalid inputs, with the rule, the values and the remedy.

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
    eager = is_eager(q, k, v)
    key = call_key(q, k, v, causal, window, mask, scale, dropout, backend, deterministic) if eager else None
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
        if not eager:
            out, lse, _ = attend(q, k, v, *pack_problem(call.problem), call.backend)
            return (out, lse) if return_lse else out
        refuse_transforms()
    run = forward
    if differentiated(q, k, v):
        run = record_repeated if kept else EagerAttention.apply
    out, lse = run(q, k, v, call)
    if key is not None and not kept:
        keep_call(key, call, q, k, v, mask)
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Choice:
    """Return the implementation that `attention` would use for this call, and why each of the others is not used.

    The arguments are those of `attention`. The choice depends on shapes, dtypes and devices, not on values. At run time
    an implementation may still pass a call to the next one (rows that see NaN, a scale of 0 or less, gradients of
    intervals that do not ascend).

    Returns:
        The choice; its text has a line for each implementation.

    Example:
            print(explain(q, k, v, causal=True))
    """
    bound = _SIGNATURE.bind(q, k, v, **options)
    bound.apply_defaults()
    arguments = bound.arguments
    if arguments["unknown"]:
        raise unknown_argument(arguments["unknown"])
    q, k, v = autocast(q, k, v)
    check_inputs(q, k, v, arguments["dropout"], arguments["scale"])
    check_seed(arguments["seed"], arguments["generator"])
    resolved = resolve_mask(q, k, causal=arguments["causal"], window=arguments["window"], mask=arguments["mask"])
    dropout, deterministic = arguments["dropout"] > 0, bool(arguments["deterministic"])
    return choose(q, resolved, dropout=dropout, deterministic=deterministic, backend=arguments["backend"])


_SIGNATURE = inspect.signature(attention)
explain.__signature__ = _SIGNATURE.replace(return_annotation=Choice)  # type: ignore[attr-defined]
