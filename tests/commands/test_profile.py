"""Profiles have ranges on every part, a summary, and memory over time, on the CPU too."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import flashspan
from flashspan.attention import attention
from flashspan.bench.measure import memory, precision, ranges, trace
from flashspan.bench.suites.model import Setting, Stepper
from flashspan.cli import main
from flashspan.commands.profile import residual_mib


def test_the_profiler_is_quiet_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in ranks, and in `flashspan bench cpu-ring`. The profiler reads the variable when it first starts."""
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    trace.profiled(torch.device("cpu"))
    assert os.environ["KINETO_LOG_LEVEL"] == "99"


def test_the_summary_has_its_facts_and_the_trace_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--tokens", "32", "--batch", "1", "--warmup", "1", "--device", "cpu", "--folder", str(tmp_path)]
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("aten::", "Matmuls take", "In attention, softmax takes", "of a training step"):
        assert part in text
    for file in ("inference", "training"):
        events = json.loads((tmp_path / f"tiny-1x32-float32-plain-{file}.trace.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"forward", "layer", "ffn gate", "attention scores", "attention softmax", "attention values"} <= names
        assert ("optimizer" in names) == (file == "training")


def test_memory_over_time_is_drawn_with_its_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--memory", "--tokens", "32", "--warmup", "1", "--device", "cpu", "--folder", str(tmp_path)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "peak" in text
    assert "4 x 32 x 128 x 4 bytes = 0.06 MiB" in text
    picture = (tmp_path / "tiny-4x32-float32-plain-memory-training.svg").read_text()
    for phase in ("forward", "backward", "optimizer"):
        assert f">{phase}<" in picture


def test_a_timeline_counts_every_byte() -> None:
    with memory.watch(torch.device("cpu"), held=100.0) as timeline, ranges.span("forward"):
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(500, dtype=torch.float32)
        del a
    assert timeline.peak == 100 + 4000 + 2000
    assert timeline.allocated[-1] == 100 + 2000
    assert timeline.peak_of("forward") == timeline.peak
    assert timeline.peak_of("backward") == 0
    assert timeline.largest == [(4000.0, "forward", 1), (2000.0, "forward", 1)]
    del b


def test_equal_allocations_are_counted_by_range() -> None:
    kept = []
    with memory.watch(torch.device("cpu")) as timeline:
        for name, number in (("one", 3), ("two", 5)):
            with ranges.span(name):
                kept += [torch.empty(1000) for _ in range(number)]
    assert timeline.largest == [(4000.0, "two", 5), (4000.0, "one", 3)]


def test_kernels_have_names_to_read() -> None:
    native, anonymous = "void at::native::", "(anonymous namespace)::"
    names = {
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1": "sm80 gemm tn 128x64",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_nt_align1>(x)": "cutlass_80_simt_sgemm_nt_align1",
        f"{native}vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
        "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >": (
            "vectorized_elementwise_kernel (MulFunctor)"
        ),
        f"{native}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::{anonymous}"
        "masked_fill_kernel(at::TensorIterator&)::{lambda()#1}>>": "elementwise_kernel (masked_fill_kernel)",
        f"{native}{anonymous}multi_tensor_apply_kernel<at::native::{anonymous}FusedOptimizerTensorListMetadata<4>, "
        f"at::native::{anonymous}FusedAdamMathFunctor<float, 4>>": "multi_tensor_apply_kernel (FusedAdamMathFunctor)",
        f"void {anonymous}softmax_warp_forward<float, float, float, 8, false, false>(float*)": "softmax_warp_forward",
        "aten::mm": "aten::mm",
        "Memcpy DtoD (Device -> Device)": "Memcpy",
    }
    assert {name: trace.Kernel(name, 1.0, 1).short for name in names} == names


def test_attention_in_parts_is_attention() -> None:
    q, k, v = torch.randn(2, 4, 33, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 8)
    exact = attention(q.double(), k.double(), v.double(), causal=True)
    assert (ranges.in_parts(q, k, v, causal=True).double() - exact).norm() / exact.norm() < 1e-5


def test_ranges_do_not_break_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_has_nvtx", lambda: True)  # as on a GPU: a graph cannot contain NVTX
    q = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(ranges.in_parts, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, q, q, causal=True), attention(q, q, q, causal=True))


def test_the_name_of_a_kernel_says_what_it_computes() -> None:
    kinds = {
        "sm90_xmma_gemm_bf16": "product",
        "aten::bmm": "product",
        "ncclDevKernel_SendRecv": "wire",
        "flash_fwd_kernel": "attention",
        "forward_kernel": "attention",
        "keys_kernel": "attention",
        "delta_kernel": "attention",
        "layer_norm_backward_kernel": "other",
        "vectorized_elementwise_kernel": "other",
        "aten::_softmax": "other",
    }
    assert {name: trace.Kernel(name, 1.0, 1).kind for name in kinds} == kinds
    # All kernels: those of masks, loss gradients, the optimizer's step and tokens are not attention.
    sources = [path.read_text() for path in Path(flashspan.__path__[0]).rglob("*.py")]
    jitted = re.compile(r"^@(?:triton|gluon)\.jit(?:\([^)]*\))?\ndef (\w+_kernel)\(", re.MULTILINE)
    ours = {name for source in sources for name in jitted.findall(source)}
    words = ("classify", "measure", "write", "runs", "cross_entropy", "adamw", "begin", "slice", "choose")
    rest = {f"{word}_kernel" for word in words}
    assert {name for name in ours if trace.Kernel(name, 1.0, 1).kind == "other"} == rest
    words = ("gated", "gated_backward", "sum", "projection", "project", "add", "head")
    multiplied = {f"{word}_kernel" for word in words}
    assert {name for name in ours if trace.Kernel(name, 1.0, 1).kind == "product"} == multiplied
    listed = [trace.Kernel("aten::mm", 3.0, 2), trace.Kernel("aten::add", 1.0, 1)]
    assert trace.share(listed, "product") == 0.75


def test_sums_in_half_precision_lose_digits() -> None:
    sums = dict(precision.accumulate())
    assert abs(sums["float32 sum of float32"] - 10) < 1e-3
    assert abs(sums["float16 sum of float16"] - 10) > 0.03
    assert 1e-3 < abs(sums["float32 sum of float16"] - 10) < 0.01
    found = dict(precision.autocast_dtypes(torch.device("cpu"), torch.bfloat16))
    assert found["parameters inside autocast"] == found["gradients"] == found["loss"] == "float32"
    assert found["output of fc1"] == found["logits"] == "bfloat16"


def test_the_residual_stream_is_computed() -> None:
    assert residual_mib(Setting("2.7B", 4, 512)) == 4 * 512 * 2560 * 4 / 2**20


def test_an_impossible_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for extra in ([], ["--memory"]):
        words = ["profile", "--tokens", "8", "--warmup", "0", "--device", "cpu", "--folder", str(tmp_path / "file")]
        assert main(words + extra) == 2
        assert "cannot be written" in capsys.readouterr().err
    assert main(["profile", "--preset", "hug"]) == 2
    capsys.readouterr()
    assert main(["profile", "--memory", "--precision", "--folder", str(tmp_path)]) == 2
    assert "got both" in capsys.readouterr().err
    assert main(["profile", "--dtype", "int8"]) == 2


@pytest.mark.parametrize("extra", [[], ["--memory"], ["--batch", "1000000000"]], ids=["time", "memory", "overflow"])
def test_a_step_larger_than_memory_is_explained(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "--tokens", "1000000000000", "--device", "cpu", "--folder", str(tmp_path), *extra]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "x1000000000000 with plain attention" in message
    assert "--tokens" in message
    assert "--batch" in message


def test_other_errors_of_a_step_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stepper: Stepper) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Stepper, "infer", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["profile", "--tokens", "8", "--device", "cpu", "--folder", str(tmp_path)])
