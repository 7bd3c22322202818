"""Compilation ahead of launches changes no call; no GPU needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashspan.kernels import backends
from flashspan.kernels.backends import BACKENDS, Choice, Chosen
from flashspan.kernels.contract import Problem
from flashspan.kernels.launch import cache, compiling
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.masks import CAUSAL


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize(("name", "dtype"), [("tiled", "float64"), ("reference", "float32"), ("portable", "float32")])
def test_only_kernels_are_compiled_ahead(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends in plain PyTorch serve a GPU too, and read values, which tensors without storage lack."""
    monkeypatch.setattr(backends, "_choose", lambda backend, call: Choice(BACKENDS[name], call, {}))
    started: list[Launch] = []
    monkeypatch.setattr(compiling, "compile_ahead", lambda launches, index: started.extend(launches))
    monkeypatch.setattr(cache, "CACHE", cache.Cache())
    monkeypatch.setattr(backends, "CACHE", cache.CACHE)
    q = torch.zeros(1, 2, 40, 16, dtype=getattr(torch, dtype)).as_subclass(OnGpu)
    Chosen(name).compile_backward(q, q, q, Problem(CAUSAL, 0.25))
    assert bool(started) is (name == "portable")
