"""Measurements of random shapes: all implementations compute the same, and failures are rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flashspan import attention
from flashspan.bench.measure import record
from flashspan.bench.measure.clock import Samples
from flashspan.bench.suites import random_attention as suite
from flashspan.bench.suites.attention import bench_attention
from flashspan.bench.suites.random_shapes import RandomShape, draw
from flashspan.cli import main
from flashspan.kernels.masks import dense

CPU = torch.device("cpu")
MATH = dict.fromkeys(suite.BACKENDS, SDPBackend.MATH)
"""All other implementations run PyTorch's reference, the only backend that runs everywhere."""
SHAPES = (
    RandomShape(2, 4, 2, 1, 70, 8, "full"),
    RandomShape(1, 3, 3, 1, 5, 8, "causal"),
    RandomShape(1, 4, 1, 5, 33, 16, "causal"),
    RandomShape(2, 2, 2, 63, 63, 8, "causal"),
    RandomShape(1, 6, 3, 40, 70, 8, "causal"),
    RandomShape(1, 6, 3, 40, 25, 8, "full"),
    RandomShape(1, 2, 1, 65, 65, 8, "window 7"),
)
WHERE = {"device": "x", "torch": "2", "triton": "3", "commit": "abc"}


def tensors(shape: RandomShape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((shape.H, shape.T), (shape.K, shape.S), (shape.K, shape.S), (shape.H, shape.T))
    q, k, v, dout = (torch.randn(shape.B, *size, shape.D, generator=generator) for size in sizes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_implementation_computes_what_we_compute(shape: RandomShape) -> None:
    q, k, v, dout = tensors(shape)
    out = attention(q, k, v, mask=shape.mask())
    ours = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    found = suite.implementations(shape, CPU, torch.float32, backends=MATH)
    assert len(found) == (2 if shape.pattern.startswith("window") else 3) * (1 if shape.H == shape.K else 2)
    for implementation in found:
        with implementation.context():
            out = implementation.make()(q, k, v)
            theirs = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).norm() <= 1e-5 * mine.norm(), implementation.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_explicit_masks_are_the_dense_ones(shape: RandomShape) -> None:
    bias = suite.bias_of(shape, CPU, torch.bfloat16)
    assert bias.shape == (1, 1, shape.T, shape.S)
    assert torch.equal(bias[0, 0] == 0, dense(shape.mask(), shape.T, shape.S))
    assert bool(((bias == 0) | (bias == -math.inf)).all())


def test_who_is_asked() -> None:
    def names(words: str, flex: bool = False) -> list[str]:
        *sizes, pattern = words.split(",")
        shape = RandomShape(*map(int, sizes), pattern)
        return [each.name for each in suite.implementations(shape, CPU, flex=flex)]

    plain = ["sdpa-flash", "sdpa-cudnn", "sdpa-efficient"]
    assert names("1,2,2,64,64,8,causal") == plain
    assert names("1,2,2,64,99,8,full") == plain
    assert names("1,2,2,1,99,8,causal") == plain  # one query: it sees all
    assert names("1,2,2,64,99,8,causal") == ["sdpa-flash", "sdpa-cudnn-mask", "sdpa-efficient"]
    assert names("1,2,2,64,64,8,window 3", flex=True) == ["sdpa-cudnn-mask", "sdpa-efficient-mask", "flex"]
    assert names("1,2,2,32768,32768,8,window 3", flex=True) == ["flex"]  # a mask of 2 GiB
    assert names("1,4,2,64,64,8,full") == [name for each in plain for name in (each, f"{each}-expanded")]
    assert names("64,64,1,64,262144,128,full") == plain  # keys of 256 GiB


def rows_of(shape: RandomShape, **options: Any) -> list[record.Row]:
    settings: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "backends": MATH, "budget_ms": 1.0} | options
    return suite.measure(shape, WHERE, {"seed": 7, "number": 3}, **settings)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=str)
def test_rows_say_what_was_measured(shape: RandomShape, tmp_path: Path) -> None:
    rows = rows_of(shape)
    kinds = ["forward", "both"] if shape.trains else ["forward"]
    assert list(dict.fromkeys(row.kind for row in rows)) == kinds
    assert next(row.impl for row in rows if row.kind == "forward") == "flashspan"
    assert len(rows) == 4 * len(kinds)  # expanded keys are for implementations that refuse enable_gqa
    for row in rows:
        assert row.ok
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.error < 1e-5
        assert row.more["classes"] == list(shape.classes())
        assert (row.more["seed"], row.more["number"], row.shape) == (7, 3, str(shape))
    assert rows[0].more["backend"] == "cpu"
    record.append(rows, tmp_path / "random.csv")
    back = record.read(tmp_path / "random.csv")
    assert [(row.key[:5], row.more, row.status) for row in back] == [
        ((*row.key[:4], "bfloat16"), row.more, row.status) for row in rows
    ]
    assert all(abs(a.p50_ms / b.p50_ms - 1) < 1e-3 for a, b in zip(back, rows, strict=True))


def test_keys_are_expanded_where_grouped_queries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = suite.prepare

    def refuse(implementation: suite.Implementation, *rest: Any) -> Any:
        if implementation.name == "sdpa-efficient":
            raise RuntimeError("No available kernel")
        return plain(implementation, *rest)

    monkeypatch.setattr(suite, "prepare", refuse)
    names = [row.impl for row in rows_of(SHAPES[0])]
    assert names == ["flashspan", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient-expanded"]


def fail(*rest: Any, **options: Any) -> Tensor:
    raise RuntimeError("no kernel\nfor this")


def double(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return 2 * attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("ours", "reason"), [(fail, "no kernel for this"), (double, "wrong output: its relative error")]
)
def test_our_failure_is_a_row_beside_their_times(
    ours: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "attention", ours)
    rows = rows_of(SHAPES[4])
    failed = [row for row in rows if row.impl == "flashspan"]
    assert [row.kind for row in failed] == ["forward", "both"]
    assert all(row.status.startswith(f"failed: {reason}") for row in failed)
    assert all(row.ok for row in rows if row.impl != "flashspan")
    assert len(rows) == 8


def test_an_implementation_with_a_wrong_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "bias_of", lambda shape, device, dtype: torch.zeros(1, 1, shape.T, shape.S, dtype=dtype))
    (row,) = {row.impl: row for row in rows_of(SHAPES[6])}.values()
    assert row.impl == "flashspan"
    assert row.more["refusals"].keys() == {"sdpa-cudnn-mask", "sdpa-cudnn-mask-expanded"} | {
        "sdpa-efficient-mask",
        "sdpa-efficient-mask-expanded",
    }
    assert all("wrong output" in why for why in row.more["refusals"].values())


def test_a_failure_during_the_measurement_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "cold_samples", fail)
    rows, lost = suite.measure_or_fail(
        SHAPES[3], WHERE, {"seed": 1, "number": 0}, device=CPU, dtype=torch.float32, backends=MATH
    )
    assert [(row.impl, row.status, lost) for row in rows] == [("flashspan", "failed: no kernel for this", False)]
    assert rows[0].more["classes"] == list(SHAPES[3].classes())


def test_a_lost_device_names_who_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*rest: Any, **options: Any) -> None:
        raise suite.DeviceLost("sdpa-cudnn", "illegal memory access")

    monkeypatch.setattr(suite, "measure", lose)
    (row,), lost = suite.measure_or_fail(SHAPES[3], WHERE, {"seed": 1, "number": 0}, device=CPU)
    assert lost
    assert (row.impl, row.status) == ("sdpa-cudnn", "failed: sdpa-cudnn: illegal memory access")


def test_slow_implementations_are_left_after_their_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], int]] = []
    speed = {"flashspan": 9.0, "sdpa-flash": 1.0, "sdpa-cudnn": 1.9, "sdpa-efficient": 2.1}

    def sample(given: dict[str, Any], rounds: int, *rest: Any) -> dict[str, Samples]:
        calls.append((list(given), rounds))
        return {name: Samples([speed[name]] * rounds, [1.0] * rounds) for name in given}

    monkeypatch.setattr(suite, "cold_samples", sample)
    serving = {suite.Implementation(name, fail): fail for name in speed}
    times = suite.time_in_turns(serving, "forward", suite.Inputs(*(torch.zeros(1),) * 4), budget_ms=40)
    assert calls == [(list(speed), 2), (["flashspan", "sdpa-flash", "sdpa-cudnn"], 10)]
    assert {name: len(found.device) for name, found in times.items()} == {
        **dict.fromkeys(speed, 10),
        "sdpa-efficient": 2,
    }


def test_flex_attention_is_compiled_for_few_shapes() -> None:
    shapes = draw(200, 7)
    windows = [shape for shape in shapes if shape.pattern.startswith("window")]
    assert suite.flex_shapes(shapes, "none") == set()
    large = {shape for shape in windows if shape.T > 16384}
    assert suite.flex_shapes(shapes, "some") == large | set([shape for shape in windows if shape not in large][::4])
    assert (len(windows), len(large)) == (20, 5)
    small = RandomShape(1, 2, 2, 64, 64, 8, "window 3")
    assert suite.flex_shapes([small], "some") == {small}
    every = suite.flex_shapes(shapes, "all")
    assert every > set(windows)
    assert all(shape.pattern != "full" and not (shape.pattern == "causal" and shape.T == shape.S) for shape in every)


def test_parts_are_disjoint_and_together_everything() -> None:
    parts = [suite.chosen_part(f"{i}/4", 10) for i in (1, 2, 3, 4)]
    assert sorted(index for part in parts for index in part) == list(range(10))
    assert suite.chosen_part(None, 10) == range(10)


@pytest.mark.parametrize("part", ["0/4", "5/4", "1/11", "1", "a/b", "1/4/2", "-1/4", ""])
def test_other_parts_are_refused(part: str) -> None:
    with pytest.raises(ValueError, match="--part is I/N with 1 <= I <= N <= 10"):
        suite.chosen_part(part, 10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--random 0", "1 to 10,000: got 0"),
        ("--random 5 --seed -1", "--seed must be 0 or more: got -1"),
        ("--random 5 --part 6/5", "--part is I/N"),
        ("--random 5 --quick", "leave --quick, --shapes and --only out"),
        ("--random 5 --only flashspan", "leave --quick, --shapes and --only out"),
        ("--random 5 --page", "--page writes the pages"),
        ("--seed 5", "only --random takes --seed: add --random N"),
        ("--quick --part 1/4 --flex all", "only --random takes --part, --flex"),
        ("--random 5 --flex few", "--flex"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        bench_attention(random=3)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command on the CPU, with its rows in a folder of its own."""
    monkeypatch.setattr(suite, "PATH", tmp_path / "random.csv")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda device: WHERE)
    monkeypatch.setattr(suite, "draw", lambda number, seed: list(SHAPES[:number]))
    plain = suite.measure

    def measure(shape: RandomShape, where: Any, more: Any, *, device: Any, flex: bool) -> list[record.Row]:
        return plain(shape, where, more, device=CPU, dtype=torch.float32, backends=MATH, budget_ms=1.0)

    monkeypatch.setattr(suite, "measure", measure)
    return tmp_path / "random.csv"


def test_the_command_measures_its_part_and_prints_it(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.bench_random(4, part="2/2") == 0
    assert {row.shape for row in record.read(on_cpu)} == {str(SHAPES[1]), str(SHAPES[3])}
    said = capsys.readouterr().out
    assert f"2/4 {SHAPES[1]} [decode, odd length]: forward " in said
    assert "time of PyTorch's fastest / flashspan's, by class" in said
    assert suite.bench_random(4, part="1/2") == 0
    assert {row.shape for row in record.read(on_cpu)} == {str(shape) for shape in SHAPES[:4]}


def test_an_interrupt_keeps_the_rows_before_it(on_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = suite.measure

    def measure(shape: RandomShape, *rest: Any, **options: Any) -> list[record.Row]:
        if shape == SHAPES[2]:
            raise KeyboardInterrupt
        return plain(shape, *rest, **options)

    monkeypatch.setattr(suite, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        suite.bench_random(4)
    assert {row.shape for row in record.read(on_cpu)} == {str(shape) for shape in SHAPES[:2]}


def test_a_failure_is_recorded_printed_and_the_exit_code(
    on_cpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "attention", fail)
    assert suite.bench_random(3) == 1
    failed = [row for row in record.read(on_cpu) if row.impl == "flashspan"]
    assert {row.shape for row in failed} == {str(shape) for shape in SHAPES[:3]}
    assert all(row.status == "failed: no kernel for this" for row in failed)
    assert capsys.readouterr().out.count("flashspan failed: no kernel for this") == 3


def test_shapes_left_out_after_a_lost_device_are_the_exit_code(on_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*rest: Any, **options: Any) -> None:
        raise suite.DeviceLost("sdpa-cudnn", "illegal memory access")

    monkeypatch.setattr(suite, "measure", lose)
    assert suite.bench_random(3) == 1
    assert [row.impl for row in record.read(on_cpu)] == ["sdpa-cudnn"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_shapes_are_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "PATH", tmp_path / "random.csv")
    assert suite.bench_random(20, seed=3, flex="none") == 0
    rows = record.read(tmp_path / "random.csv")
    assert {row.shape for row in rows if row.impl == "flashspan"} == {str(shape) for shape in draw(20, 3)}
    assert {row.impl for row in rows} >= {"flashspan", *suite.BACKENDS}
