"""Which launches need the same compiled kernel; compilation ahead of launches changes no call; no GPU needed."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

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
    """A tensor that claims to be on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_an_argument_that_is_none_under_other_constants_is_part_of_the_key() -> None:
    kernel, x = SimpleNamespace(arg_names=["x", "table", "LINE"], do_not_specialize=[]), torch.zeros(64)

    def key(table: Tensor | None, line: int) -> tuple[Any, ...]:
        return Launch(kernel, (1,), (x, table), {"LINE": line}).key()

    assert key(None, 0) == key(None, 0)
    assert len({key(None, 0), key(x, 64), key(x[1:], 64), key(x.half(), 64)}) == 4
    assert key(x, 64) == key(x.clone(), 64)


@pytest.mark.parametrize(("name", "dtype"), [("tiled", "float64"), ("reference", "float32"), ("portable", "float32")])
def test_only_kernels_are_compiled_ahead(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends in plain PyTorch can run on a GPU too, but they read values, which meta tensors lack."""
    monkeypatch.setattr(backends, "_choose", lambda backend, call: Choice(BACKENDS[name], call, {}))
    started: list[Launch] = []
    monkeypatch.setattr(compiling, "compile_ahead", lambda launches, index: started.extend(launches))
    monkeypatch.setattr(cache, "CACHE", cache.Cache())
    monkeypatch.setattr(backends, "CACHE", cache.CACHE)
    q = torch.zeros(1, 2, 40, 16, dtype=getattr(torch, dtype)).as_subclass(OnGpu)
    Chosen(name).compile_backward(q, q, q, Problem(CAUSAL, 0.25))
    assert bool(started) is (name == "portable")


def test_compilations_that_are_done_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(launch: Launch, index: int | None) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    monkeypatch.setattr(compiling, "start", start)
    monkeypatch.setattr(compiling, "PENDING", {})
    kernel = SimpleNamespace()
    for _ in range(20):
        compiling.compile_ahead([Launch(kernel, (1,), (), {})], 0)
    assert len(compiling.PENDING[id(kernel)]) == 1


def compile_in_thread() -> None:
    """Wait for the compilation of a kernel that compiles to nothing."""
    kernel = SimpleNamespace(warmup=lambda *_, **__: "compiled")
    assert compiling.start(Launch(kernel, (1,), (), {}), None).result(30) == "compiled"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_compiles_in_threads_of_its_own() -> None:
    compile_in_thread()
    child = multiprocessing.get_context("fork").Process(target=compile_in_thread)
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
