"""`flashspan attend` runs on CPU processes, reports what it did, and detects wrong results."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashspan import attention
from flashspan.bench.measure.memory import free_bytes, peak_of
from flashspan.bench.measure.strategies import over_all_ranks
from flashspan.commands import attend as program
from flashspan.commands.attend import Job, attend, make_inputs, needed_bytes, row_error
from flashspan.kernels import cpu


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {"causal": True, "heads": 4, "kv_heads": 2, "dtype": "bfloat16", "strategy": "ulysses"}),
        (3, {"causal": True, "strategy": "helper", "layout": "contiguous"}),
    ],
)
def test_attend_prints_output_error_time_and_memory(
    devices: int, options: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert attend(devices, 301, 16, **options) == 0  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert f"Devices: {devices} (CPU processes" in text
    assert "sequence length T: 301, head dim D: 16" in text
    sample = re.search(r"Output O\[0\.\.7\]:((?: +-?\d+\.\d{6}){8})\n", text)
    assert sample is not None
    allowed = "0.01" if "dtype" in options else "1e-06"
    assert re.search(rf"Error against float64: \d\.\de-\d\d \(allowed {allowed}\) ok", text)
    lines = re.findall(r"^ +(\d) +(\d+) +[\d.]+ +([\d.]+) +[\d.]+$", text, re.MULTILINE)
    assert [int(rank) for rank, *_ in lines] == list(range(devices))
    assert sum(int(tokens) for _, tokens, _ in lines) == 301
    assert ("speedup" in text) == (devices > 1)  # one device has no speedup to report


def test_the_sample_is_the_same_on_any_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    samples = []
    for devices in (1, 2):
        attend(devices, 64, 8, heads=2, causal=True)
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Output"))
        samples.append([float(x) for x in line.split(":")[1].split()])
    assert samples[0] == pytest.approx(samples[1], abs=2e-6)


def used_dtypes(job: Job) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """On a rank: the dtypes in which one device computes, and those of all ranks, in calls like the timed ones."""
    found: list[torch.dtype] = []
    flash = cpu.flash_cpu

    def note(q: torch.Tensor, *args: Any, **rest: Any) -> Any:
        found.append(q.dtype)
        return flash(q, *args, **rest)

    setattr(cpu, "flash_cpu", note)  # noqa: B010 - the original has a type of its own
    try:
        whole = make_inputs(job, torch.device("cpu"))
        attention(*whole, causal=job.causal)
        alone = len(found)
        together = over_all_ranks(job.strategy, job.layout, "cpu", num_tokens=job.seq_len)
        together(*(together.shard(x, 2) for x in whole), causal=job.causal)
    finally:
        cpu.flash_cpu = flash
    return set(found[:alone]), set(found[alone:])


def test_one_device_and_the_ranks_compute_alike(on_ranks: Callable[..., list[Any]]) -> None:
    """Otherwise, on a CPU without bfloat16 matmuls, the speedup would compare two dtypes."""
    job = Job(301, 16, "ring", "zigzag", True, 2, 1, "bfloat16", 0, "cpu")
    for alone, together in on_ranks(2, used_dtypes, job):
        assert alone
        assert alone == together


def test_a_wrong_output_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "BOUNDS", {"float32": (0.0, 0.0)})
    assert attend(1, 64, 8) == 1
    assert "WRONG" in capsys.readouterr().out
    job = Job(64, 8, "ring", "zigzag", True, 2, 2, "float32", 0, "cpu")
    inputs = make_inputs(job, torch.device("cpu"))
    assert row_error(job, inputs, torch.zeros_like(inputs[0])) == pytest.approx(1.0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 devices: got 9"):
        attend(9, 64, 8)
    with pytest.raises(ValueError, match="head size of 1 to 256: got 64 and 300"):
        attend(2, 64, 300)
    with pytest.raises(ValueError, match="must divide the query heads: got 4 query heads and 3 kv heads"):
        attend(2, 64, 8, heads=4, kv_heads=3)
    with pytest.raises(ValueError, match=r"^attend needs 1 or more heads: got 0$"):
        attend(2, 64, 8, heads=0)
    with pytest.raises(ValueError, match=r"strategy must be one of ring, .*: got 'spiral'"):
        attend(2, 64, 8, strategy="spiral")


def test_too_little_memory_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "Ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(program, "free_bytes", lambda _: 2.0**34)
    with pytest.raises(ValueError, match=r"attend 2 100000000 64 needs about 786\.8 GiB .* 16\.0 .*: lower T"):
        attend(2, 10**8, 64)


def test_a_failed_allocation_on_a_rank_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "free_bytes", lambda _: None)  # a system that does not report its memory
    with pytest.raises(ValueError, match=r"needs about \d+\.\d GiB of memory.*: lower T"):
        attend(1, 10**13, 64)  # more than the address space of a process


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_free_memory_is_some_of_this_machines() -> None:
    free = free_bytes("cpu")
    assert free is not None
    assert 2**26 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("head_dim", "heads", "dtype"), [(8, 1, "float32"), (128, 2, "bfloat16")])
def test_needed_memory_is_that_of_the_comparison(head_dim: int, heads: int, dtype: str) -> None:
    job = Job(20_000, head_dim, "ring", "zigzag", True, heads, heads, dtype, 0, "cpu")
    whole = make_inputs(job, torch.device("cpu"))
    peak, _ = peak_of(lambda: row_error(job, whole, whole[0]), torch.device("cpu"))
    held = sum(x.nbytes for x in whole)
    assert held + peak == pytest.approx(needed_bytes(job, 1), rel=0.2)
    assert needed_bytes(job, 1000) == 1000 * held  # all ranks draw the whole inputs


def test_peak_memory_sees_what_is_freed_again() -> None:
    def use() -> int:
        x = torch.ones(16 * 2**20)  # 64 MiB
        return int(x[-1])

    use()
    peak, last = peak_of(use, torch.device("cpu"))
    assert last == 1
    assert 2**26 <= peak < 1.01 * 2**26
