"""Autograd across ranks: second derivatives and changed masks are refused; inference mode does no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, noop_context_fn

from flashspan.context import STRATEGIES, context_parallel
from flashspan.context.recompute import keep_attention
from flashspan.kernels.masks import Blocks
from flashspan.masks.patterns import documents
from tests.context.cases import Case, attention_of

OnRanks = Callable[..., list[Any]]


def differentiate_twice(strategy: str) -> list[str] | None:
    """On a rank: the errors for second derivatives by q, k, v and dout, all of which have another path to the loss."""
    attend = attention_of(Case(4, strategy))
    if attend is None:
        return None
    q, k, v, dout, dlse = (attend.shard(x, 2).requires_grad_() for x in Case(4, strategy).inputs())
    said = []
    for wanted in (q, k, v, dout, dlse):
        for x in (q, k, v, dout, dlse):
            x.requires_grad_(x is wanted)
        q.requires_grad_()  # otherwise there is no first derivative
        out, lse = attend(q, k, v, causal=True, return_lse=True)
        (plain,) = torch.autograd.grad([out, lse], q, [dout, dlse], retain_graph=True)
        (first,) = torch.autograd.grad([out, lse], q, [dout, dlse], create_graph=True)
        assert torch.equal(first, plain)
        try:
            torch.autograd.grad(wanted.sum() + first.square().sum(), wanted)
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_second_derivative_is_refused_and_not_forgotten(on_ranks: OnRanks, strategy: str) -> None:
    for answer in on_ranks(differentiate_twice, strategy)[4:]:
        assert len(answer) == 5
        assert all("attention has no second derivative" in said for said in answer)


def kept_for_second_derivatives() -> list[int]:
    """On a rank: the bytes of the tensors that are saved only to refuse second derivatives."""
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    out = context_parallel(dist.group.WORLD)(q, k, v)
    return [x.untyped_storage().nbytes() for x in out.grad_fn.saved_tensors[:3]]


def test_refusing_second_derivatives_keeps_no_memory(on_ranks: OnRanks) -> None:
    assert on_ranks(kept_for_second_derivatives) == [[0, 0, 0]] * 8


def change_the_mask(strategy: str, kind: str) -> str | None:
    """On a rank: the error of backward if the mask was changed after forward."""
    case = Case(4, strategy)
    attend = attention_of(case)
    if attend is None:
        return None
    q, k, v, dout, _ = (attend.shard(x, 2) for x in case.inputs())
    rows = documents([20, case.T - 20])
    mask = rows if kind == "rows" else Blocks.of(rows, case.T, case.T)
    out = attend(q.requires_grad_(), k, v, mask=mask)
    torch.autograd.grad(out, q, dout, retain_graph=True)
    mask.pack()[2][0].add_(0)
    try:
        torch.autograd.grad(out, q, dout)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_changed_between_forward_and_backward_is_refused(on_ranks: OnRanks, strategy: str, kind: str) -> None:
    for answer in on_ranks(change_the_mask, strategy, kind)[4:]:
        assert "a mask must not change" in answer


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_a_mask_changed_between_two_calls_is_refused(kind: str) -> None:
    q = torch.randn(1, 2, 9, 8)
    rows = documents([4, 5])
    mask = rows if kind == "rows" else Blocks.of(rows, 9, 9)
    attend = context_parallel(None)
    attend(q, q, q, mask=mask)
    mask.pack()[2][0].add_(0)
    with pytest.raises(RuntimeError, match="a mask must not change"):
        attend(q, q, q, mask=mask)


@pytest.mark.parametrize("context_fn", [noop_context_fn, keep_attention])
def test_a_changed_mask_is_refused_in_recomputation(context_fn: Any) -> None:
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    mask, other = documents([4, 5]), documents([3, 6])
    attend = context_parallel(None)
    out = checkpoint(lambda x: attend(x, x, x, mask=mask), q, use_reentrant=False, context_fn=context_fn)
    attend(q, q, q, mask=other)  # so that the first mask is not the last one that was checked
    mask.pack()[2][0].add_(0)
    with pytest.raises(RuntimeError, match="a mask must not change"):
        out.sum().backward()


def test_a_padding_mask_of_no_tokens_is_one() -> None:
    q, padding = torch.randn(2, 2, 0, 4), torch.ones(2, 1, 1, 0, dtype=torch.bool)
    for declared in (None, 0):
        assert context_parallel(None, num_tokens=declared)(q, q, q, mask=padding).shape == (2, 2, 0, 4)


def test_a_mask_made_in_inference_mode_still_trains() -> None:
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    with torch.inference_mode():
        mask = documents([4, 5])
    attend = context_parallel(None)
    (found,) = torch.autograd.grad(attend(q, q, q, mask=mask).square().sum(), q)
    (wanted,) = torch.autograd.grad(attend(q, q, q, mask=documents([4, 5])).square().sum(), q)
    assert torch.equal(found, wanted)
    with torch.inference_mode():
        attend(q, q, q, mask=mask)
