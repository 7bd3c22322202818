"""Which implementation runs a call, what explain returns, and what replaces a kernel that fails."""

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import flashspan
from flashspan import attention, masks
from flashspan.kernels import backends, cpu
from flashspan.kernels.failure import KernelFailed
from tests.cases import inputs


def test_explain_names_the_implementation_and_why_others_do_not_serve() -> None:
    text = str(flashspan.explain(*inputs(*[(1, 2, 9, 8)] * 3), causal=True, dropout=0.1))
    assert "computes float32 on cpu, head size 8, Band mask, dropout" in text
    assert "no counter-based dropout" in text


def test_explain_takes_what_attention_takes() -> None:
    wanted, found = (list(inspect.signature(f).parameters) for f in (attention, flashspan.explain))
    assert found == wanted


def test_deterministic_is_a_field_of_the_call() -> None:
    q, k, v = torch.randn(3, 1, 2, 37, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    dout = torch.randn(1, 2, 37, 16, generator=torch.Generator().manual_seed(1))
    choice = flashspan.explain(q, k, v, causal=True, deterministic=True)
    assert choice.call.deterministic
    assert "deterministic gradients" in str(choice)
    assert "Hopper" in choice.reasons["hopper"]
    plain, asked = (attention(q, k, v, causal=True, deterministic=flag) for flag in (False, True))
    for a, b in zip(
        torch.autograd.grad(plain, (q, k, v), dout), torch.autograd.grad(asked, (q, k, v), dout), strict=True
    ):
        assert torch.equal(a, b)
    named = attention(q, k, v, causal=True, backend="reference", deterministic=True)
    assert torch.allclose(named, plain, atol=1e-6)
    with pytest.raises(ValueError, match="does not support this call"):
        attention(q, k, v, causal=True, backend="hopper", deterministic=True)


@contextmanager
def input_on(capability: tuple[int, int]) -> Iterator[Any]:
    """A stand-in for a tensor on an NVIDIA GPU that this machine does not have. Choices for it are cleared at the
    end."""
    backends._choose.cache_clear()
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            mock.patch.object(torch.version, "hip", None),
        ):
            yield SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 2, 37, 64))
    finally:
        backends._choose.cache_clear()


def test_repeatable_gradients_stay_on_hopper(request: pytest.FixtureRequest) -> None:
    """With the argument, or with the setting of the whole process."""
    pytest.importorskip("flashspan.kernels.hopper")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    with input_on((9, 0)) as x:
        asked = backends.choose(x, masks.causal(), deterministic=True)
        assert (asked.name, asked.call.deterministic) == ("hopper", True)
        blocks = masks.random_blocks(37, 0.5)
        assert backends.choose(x, blocks).name == "hopper"
        asked = backends.choose(x, blocks, deterministic=True)
        assert (asked.name, asked.reasons["hopper"]) == ("portable", "adds dq of block maps in no fixed order")
        torch.use_deterministic_algorithms(True)
        assert backends.choose(x, blocks).name == "portable"
        assert backends.choose(x, masks.causal(), dropout=True).name == "portable"


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "tiled"), ((8, 9), "portable"), ((12, 0), "portable")])
def test_a_gpu_that_triton_does_not_serve_gets_plain_pytorch(capability: tuple[int, int], name: str) -> None:
    with input_on(capability) as x:
        choice = backends.choose(x, masks.causal())
    assert choice.name == name
    assert name == "portable" or "sm_80 and later, not sm_75" in choice.reasons["portable"]


@pytest.mark.parametrize("missing", [("barrier", "thread_barrier"), ("NVMMASharedLayout",)])
def test_a_release_of_triton_with_other_names_is_left_to_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    pytest.importorskip("flashspan.kernels.hopper")
    from triton.experimental.gluon import language

    for name in [name for name in sys.modules if name.startswith("flashspan.kernels.hopper")]:
        monkeypatch.delitem(sys.modules, name)
    for name in missing:
        monkeypatch.delattr(language, name, raising=False)
    with input_on((9, 0)) as x:
        choice = backends.choose(x, masks.causal())
    assert choice.name == "portable"
    assert missing[-1] in choice.reasons["hopper"]


def test_explain_notes_a_gpu_on_which_no_tiles_were_measured() -> None:
    for name, told in (("NVIDIA H200", False), ("NVIDIA L4", True)):
        with input_on((8, 9)) as x, mock.patch.object(torch.cuda, "get_device_name", return_value=name):
            choice = backends.choose(x, masks.causal())
            assert (name in str(choice.note), "not on this GPU" in str(choice)) == (told, told)


def test_a_kernel_that_fails_to_compile_retires_its_backend_for_that_kind_of_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KernelFailed("could not be compiled here: no such instruction")

    def device_fails(*_: object, **__: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    q, k, v = inputs(*[(1, 2, 9, 8)] * 3)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    want = attention(q, k, v, causal=True)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(want, (q, k, v), dout, retain_graph=True)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "backward", device_fails)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            torch.autograd.grad(want, (q, k, v), dout)
    assert not backends.RETIRED
    for name in ("forward", "backward"):
        try:
            with monkeypatch.context() as patch:
                patch.setattr(cpu, name, fails)
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    out = attention(q, k, v, causal=True, backend="cpu")
                    grads = torch.autograd.grad(out, (q, k, v), dout)
                    assert torch.allclose(attention(q, k, v, causal=True), want, atol=1e-6)
            (warning,) = warned
            assert "attention backend 'cpu' " in str(warning.message)
            assert "no such instruction" in str(warning.message)
            assert torch.allclose(out, want, atol=1e-6)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))
            assert "no such instruction" in flashspan.explain(q, k, v, causal=True).reasons["cpu"]
            with pytest.raises(ValueError, match="no such instruction"):
                attention(q, k, v, causal=True, backend="cpu")
            assert flashspan.explain(q, k, v, mask=masks.documents([4, 5])).name == "cpu", "another kind of call"
        finally:
            backends.RETIRED.clear()
            backends._choose.cache_clear()
