"""Calls with a cached key do what the first call did, without checks."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan import attention, call_cache, masks
from flashspan.kernels import backends, cpu
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.launch import cache
from flashspan.kernels.masks import Mask


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


def tensors(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or (1, 2, 40, 16), generator=generator).as_subclass(OnGpu) for _ in range(count)]


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "PLAIN", {*call_cache.PLAIN, OnGpu})


def kind(q: Tensor, k: Tensor, v: Tensor, **changed: Any) -> Any:
    given = {
        "causal": False, "window": None, "mask": None, "scale": None, "dropout": 0.0, "backend": "auto",
        "deterministic": False,
    }  # fmt: skip
    return call_cache.call_key(q, k, v, **(given | changed)) if call_cache.is_eager(q, k, v) else None


def test_whatever_decides_a_call_is_part_of_its_key() -> None:
    q, k, v = tensors()
    one = kind(q, k, v)
    assert one is not None
    assert one == kind(*tensors()), "numbers and addresses are not"
    assert kind(q, k, v, mask=masks.window(3, 4)) == kind(q, k, v, mask=masks.window(3, 4)), "made anew in each call"
    one_mask, another = masks.documents([20, 20]), masks.documents([20, 20])
    apart = torch.randn(1, 40, 2, 16).as_subclass(OnGpu).transpose(1, 2)
    kinds = [
        one, kind(*tensors(1, 2, 41, 16)), kind(q.half(), k, v), kind(apart, k, v), kind(q, apart, v),
        kind(q, k, v, causal=True), kind(q, k, v, causal=True, window=8), kind(q, k, v, mask=one_mask),
        kind(q, k, v, mask=another), kind(q, k, v, mask=masks.causal()), kind(q, k, v, mask=masks.window(3, 4)),
        kind(q, k, v, scale=0.5), kind(q, k, v, backend="reference"), kind(q, k, v, deterministic=True),
    ]  # fmt: skip
    torch.use_deterministic_algorithms(True)
    kinds.append(kind(q, k, v))
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high")
    kinds.append(kind(q, k, v))
    torch.set_float32_matmul_precision("highest")
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)


def test_nothing_is_remembered_where_a_call_has_more_to_do() -> None:
    q, k, v = tensors()
    assert kind(*torch.randn(3, 1, 2, 40, 16)) is None, "on the CPU"
    assert kind([1.0], k, v) is None  # type: ignore[arg-type]
    assert kind(q, k.as_subclass(Tensor).to_sparse(), v) is None
    for changed in (
        {"dropout": 0.1}, {"mask": torch.ones(40, 40, dtype=torch.bool)}, {"window": (3, 4)}, {"scale": torch.ones(1)},
        {"mask": masks.documents([40]), "causal": True}, {"mask": masks.documents([40]), "window": 3},
    ):  # fmt: skip
        assert kind(q, k, v, **changed) is None, changed
    assert kind(torch.randn(1, 2, 16, 40).as_subclass(OnGpu).transpose(2, 3), k, v) is None, "it is copied first"
    torch.set_autocast_enabled("cuda", True)  # the context manager does not work without a GPU
    try:
        assert kind(q, k, v) is None
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.func.grad(lambda x: x.sum() * (kind(x, k, v) is None))(q).sum() > 0, "refused there"


def test_a_mask_that_is_gone_is_not_taken_for_another() -> None:
    q, k, v = tensors()
    mask, other = masks.documents([20, 20]), masks.documents([10, 30])
    found = kind(q, k, v, mask=mask)
    call_cache.keep_call(found, call_cache.Prepared(Problem(mask, 0.25), "auto"), q, k, v, mask)
    kept = call_cache.kept_call(found, mask, q.device)
    assert kept is not None
    assert kept.problem.mask is mask
    assert call_cache.kept_call(found, other, q.device) is None, "whatever lies in its place now"
    del mask, kept
    gc.collect()
    assert call_cache.kept_call(found, other, q.device) is None


def test_kinds_without_end_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT", 5)
    for length in range(1, 20):
        q, k, v = tensors(1, 1, length, 16)
        call_cache.keep_call(kind(q, k, v), call_cache.Prepared(Problem(masks.full(), 0.25), "auto"), q, k, v, None)
        assert 1 <= len(cache.CACHE) <= 5


def test_what_is_retired_is_forgotten_by_calls_that_were_prepared() -> None:
    q, k, v = tensors()
    call_cache.keep_call(kind(q, k, v), call_cache.Prepared(Problem(masks.full(), 0.25), "auto"), q, k, v, None)
    assert call_cache.kept_call(kind(q, k, v), None, q.device) is not None
    try:
        with pytest.warns(RuntimeWarning, match="'tiled' .*from now on the next backend"):
            backends.retire(backends.choose(q, masks.full(), backend="tiled"), "could not be compiled here")
        assert call_cache.kept_call(kind(q, k, v), None, q.device) is None
    finally:
        backends.RETIRED.clear()
        backends.forget()


class Local:
    """An implementation that can repeat a forward pass, if it is `willing`."""

    def __init__(self) -> None:
        self.calls, self.willing = 0, True
        self.forward, self.backward = cpu.forward, cpu.backward

    def repeat_forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, out_dtype: torch.dtype) -> Any:
        def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Carry | None:
            self.calls += 1
            return cpu.forward(q, k, v, Problem(mask, problem.scale), out_dtype=out_dtype) if self.willing else None

        return forward


@pytest.mark.parametrize("willing", [True, False])
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("way", ["full", "causal", "window", "documents", "band"])
def test_the_second_call_does_what_the_first_did(
    way: str, differentiated: bool, willing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local()
    local.willing = willing
    monkeypatch.setattr(backends, "_load", lambda backend: local)
    documents = masks.documents([15, 25])
    ways: dict[str, dict[str, Any]] = {
        "full": {}, "causal": {"causal": True, "scale": 0.3}, "window": {"causal": True, "window": 7},
        "documents": {"mask": documents}, "band": {"mask": masks.window(3, 4)},
    }  # fmt: skip
    given = ways[way]
    for call in range(3):
        *inputs, dout = tensors(count=4 * (call + 1))[-4:]
        inputs = [x.requires_grad_(differentiated) for x in inputs]
        plain = [x.detach().as_subclass(Tensor).requires_grad_(differentiated) for x in inputs]
        out, lse = attention(*inputs, **given, return_lse=True)
        want, want_lse = attention(*plain, **given, return_lse=True)
        assert local.calls == call
        assert torch.equal(out.as_subclass(Tensor), want)
        assert torch.equal(lse.as_subclass(Tensor), want_lse)
        if differentiated:
            got = torch.autograd.grad(out, inputs, dout)
            wanted = torch.autograd.grad(want, plain, dout.as_subclass(Tensor))
            assert all(torch.equal(a.as_subclass(Tensor), b) for a, b in zip(got, wanted, strict=True))


def test_a_repeated_backward_serves_the_layouts_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading returns saved tensors as contiguous ones, whatever their layout was."""
    met: list[tuple[int, ...]] = []

    class Repeating(Local):
        def repeat_backward(self, dout: Tensor, q: Tensor, *rest: Any) -> Any:
            made_for = q.stride()

            def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
                assert q.stride() == made_for
                met.append(made_for)
                return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

            return backward

    local = Repeating()
    monkeypatch.setattr(backends, "_load", lambda backend: local)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous())
    for step in range(6):
        q, k, v, dout = (x.transpose(1, 2) for x in tensors(1, 24, 2, 16, count=4))
        q.requires_grad_()
        with hooks if step % 2 else contextlib.nullcontext():
            out = attention(q, k, v, scale=0.7)
        torch.autograd.grad(out, q, dout)
    assert len(met) >= 2
    assert len(set(met)) == 2
