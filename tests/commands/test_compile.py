"""`flashspan compile` fills Triton's cache with the kernels that later calls need, and compiles nothing twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashspan import progress
from flashspan.commands.compile import Kernels, compile_calls, compile_kernels
from flashspan.kernels.launch import compiling
from flashspan.kernels.launch.compiling import launches_of
from flashspan.model import preset

SHAPE = "1,4,2,256,16,causal"


def run(folder: Path, *words: str, code: str = "") -> str:
    """The output of a command, or of a program (`code`), that runs with a cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    program = ["-c", code] if code else ["-m", "flashspan", *words]
    done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def counts(text: str) -> tuple[int, int]:
    """The numbers of kernels compiled and of kernels found in the cache."""
    found = re.search(r"(\d+) kernels compiled in [\d.]+ s, (\d+) were there", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def cubins(folder: Path) -> set[Path]:
    return set(folder.rglob("*.cubin"))


WORDS = ("compile", "--shapes", SHAPE, "--dtype", "bfloat16", "--architecture", "80")


def test_every_kernel_of_a_shape_is_compiled(tmp_path: Path) -> None:
    compiled, there = counts(run(tmp_path, *WORDS))
    assert compiled == len(cubins(tmp_path)) >= 3  # forward, dk and dv, dq
    assert there == 0


@pytest.mark.slow
def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    compiled, _ = counts(run(tmp_path, *WORDS))
    assert counts(run(tmp_path, *WORDS)) == (0, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal=True", "window=100", "mask=masks.documents([1000, 3096]) & masks.causal()"])
def test_calls_find_what_was_compiled(tmp_path: Path, mask: str) -> None:
    pattern = {"causal=True": "causal", "window=100": "window 100"}.get(mask, "documents 2")
    run(tmp_path, "compile", "--shapes", f"1,16,4,4096,128,{pattern}")
    before = cubins(tmp_path)
    run(
        tmp_path,
        code=f"""
import torch
from flashspan import attention, masks
q, k, v = (torch.randn(1, 4096, h, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (16, 4, 4))
out = attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), {mask})
out.backward(torch.randn_like(out))
torch.cuda.synchronize()
""",
    )
    assert before
    assert cubins(tmp_path) == before


def test_a_model_asks_for_every_kernel_of_its_training_and_generation() -> None:
    kernels = Kernels(90, torch.bfloat16)
    calls = kernels.of_model(preset("llama-3.2-1b"), 8192, 1, training=True, generation=True)
    names = {launch.kernel.__name__ for call in calls for launch in launches_of(call)}
    assert names >= {
        *("forward_kernel", "repair_kernel", "float16_kernel", "rows_kernel", "backward_kernel", "cast_kernel"),
        *("projection_kernel", "gated_kernel", "sum_kernel", "cross_entropy_kernel", "adamw_kernel"),
        *("split_kernel", "combine_kernel", "project_kernel", "head_kernel"),
    }


def test_an_older_gpu_gets_the_portable_kernels() -> None:
    calls = Kernels(80, torch.bfloat16).of_model(preset("tiny"), 64, 1, training=True, generation=True)
    modules = {launch.kernel.fn.__module__ for call in calls for launch in launches_of(call)}
    assert modules
    assert not any(".hopper." in module for module in modules)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_first_call_of_both_passes_takes_ten_seconds(tmp_path: Path) -> None:
    """With an empty cache and PyTorch imported. Forward and backward compile at the same time."""
    text = run(
        tmp_path,
        code="""
import time, torch
from flashspan import attention
q, k, v = (torch.randn(1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
torch.cuda.synchronize()
began = time.perf_counter()
out = attention(q, k, v, causal=True)
out.backward(torch.randn_like(out))
torch.cuda.synchronize()
print(time.perf_counter() - began)
""",
    )
    print(f"first forward and backward: {float(text):.1f} s")
    assert float(text) <= 10


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, ["neither"]),
        ({"model": "tiny", "tokens": 0}, ["0 tokens"]),
        ({"model": "tiny", "architecture": 70}, ["80", "70"]),
        ({"shapes": ("1,2,3",)}, ["'1,2,3'"]),
        ({"model": "llama-9"}, ["llama-9"]),
    ],
)
def test_bad_options_are_named(options: dict[str, object], values: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        compile_kernels(**options)  # type: ignore[arg-type]
    assert all(value in str(error.value) for value in values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_an_architecture_is_asked_for() -> None:
    with pytest.raises(ValueError, match="--architecture"):
        compile_kernels("tiny")


def test_an_interrupt_does_not_wait_for_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: Future[None] = Future()
    done: Future[None] = Future()
    done.set_result(None)
    futures = iter((done, waiting))

    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "start", lambda launch, index: next(futures))
    monkeypatch.setattr(compiling, "launches_of", lambda call: call())
    monkeypatch.setattr(progress.Line, "advance", interrupt)
    launches = [SimpleNamespace(key=lambda i=i: i, kernel=SimpleNamespace(__name__="kernel")) for i in range(2)]
    with pytest.raises(KeyboardInterrupt):
        compile_calls([lambda: launches])
    assert waiting.cancelled()
