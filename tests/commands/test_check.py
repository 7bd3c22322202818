"""`flashspan check` prints a table of errors and a verdict, and returns a reliable exit code."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from flashspan.commands import check as program
from flashspan.commands.check import BOUNDS, LONG, Problem, Result, at_length, check, truth
from flashspan.context import LAYOUTS, STRATEGIES

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(90)
def test_every_strategy_and_layout_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(ranks=4, tokens=101, heads=4, kv_heads=2, head_dim=8) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^(\w+) +(\w+) +(?:\d\.\de-\d\d +){4}ok$", text, re.MULTILINE)
    assert set(rows) == {(strategy, layout) for strategy in STRATEGIES for layout in LAYOUTS}
    assert "parallel equals serial" in text


@pytest.mark.timeout(60)
def test_one_case_and_another_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"strategy": "ring", "layout": "zigzag", "dtype": "bfloat16", "causal": False}
    assert check(ranks=3, tokens=50, heads=4, kv_heads=1, head_dim=16, **options) == 0  # type: ignore[arg-type]
    assert len(re.findall(r"ok$", capsys.readouterr().out, re.MULTILINE)) == 1


@pytest.mark.timeout(90)
def test_a_single_token_has_nothing_to_fail() -> None:
    assert check(ranks=2, tokens=1, layout="zigzag") == 0


def test_usual_gradients_are_measured_by_their_own_size() -> None:
    for causal in (True, False):
        problem = Problem((), 300, 4, 2, 64, causal, "float32", 0)
        answer = truth(problem, problem.inputs(torch.device("cpu")))
        for name in ("out", "dq", "dk", "dv"):
            assert answer.size(name) < 1.5 * float(answer.results[name].norm())


@pytest.mark.timeout(60)
def test_a_failure_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "BOUNDS", {"float32": (1e-12, 1e-12)})
    assert check(ranks=2, tokens=20, heads=2, kv_heads=1, head_dim=8, strategy="ring", layout="zigzag") == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "1 of 1 FAILED" in text


def test_bounds_of_float32_are_those_of_the_readme() -> None:
    promise = re.search(r"In float32\b.*?(\d+e-\d+).*?(\d+e-\d+)", (ROOT / "README.md").read_text(), re.DOTALL)
    assert promise is not None
    assert BOUNDS["float32"] == (float(promise[1]), float(promise[2])) == (1e-6, 1e-5)


def test_very_long_sums_may_have_larger_errors_and_the_reason_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    case = Result("ring", "zigzag", 2e-6, 2e-5, 1e-7, 1e-7)
    assert not case.passes("float32")
    for tokens, passes in ((LONG, False), (LONG + 1, True)):
        assert case.passes("float32", tokens) == passes
        problem = Problem((), tokens, 8, 2, 64, True, "float32", 0)
        program.print_table(problem, 4, [case])
        text = capsys.readouterr().out
        assert (f"{LONG:,} tokens" in text) == passes
        assert ("allowed: out 1e-06, gradients 1e-05\n" in text) == (not passes)
    assert at_length((1.0, 2.0), "bfloat16", LONG + 1) == (1.0, 2.0)


def test_nan_does_not_pass() -> None:
    good = [1e-7, 1e-7, 1e-7, 1e-7]
    assert Result("ring", "zigzag", *good).passes("float32")
    for i in range(4):
        for bad in (math.nan, 1.1e-5):
            values = [*good[:i], bad, *good[i + 1 :]]
            assert not Result("ring", "zigzag", *values).passes("float32")


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_under_torchrun_it_joins_the_ranks(tmp_path: Path) -> None:
    arguments = "check(tokens=30, heads=2, kv_heads=1, head_dim=8, strategy='helper')"
    code = f"import sys\nfrom flashspan.commands.check import check\nsys.exit({arguments})\n"
    script = tmp_path / "check_under_torchrun.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks against one device") == 1
    assert len(re.findall(r"ok$", done.stdout, re.MULTILINE)) == 3


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"strategy must be one of ring, .* got 'spiral' and None"):
        check(strategy="spiral")
    with pytest.raises(ValueError, match="must divide the query heads: got 8 query heads and 3 kv heads"):
        check(kv_heads=3)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16: got 'int8'"):
        check(dtype="int8")
    with pytest.raises(ValueError, match="--ranks must be 1 or more: got 0"):
        check(ranks=0)
    with pytest.raises(ValueError, match=r"on 3 ranks need about [\d.]+ GiB.* [\d.]+ .*lower --tokens"):
        check(ranks=3, tokens=10**9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "after"), [(signal.SIGTERM, 0.2), pytest.param(signal.SIGINT, 5.0, marks=pytest.mark.slow)]
)
def test_stopping_it_says_so_and_leaves_nothing_behind(kind: signal.Signals, after: float) -> None:
    """While ranks start, and while they work. A terminal's Ctrl-C also reaches the ranks."""
    command = [sys.executable, "-m", "flashspan.cli", "check", "--ranks", "2", "--tokens", "20000"]
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(folder.glob("flashspan-run-*/ranks-*")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.1)
    time.sleep(after)
    os.killpg(process.pid, kind) if kind == signal.SIGINT else process.send_signal(kind)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said, said
    assert said.strip().splitlines()[-1] == "flashspan: stopped; what was written stays"
    assert not list(folder.iterdir())
    folder.rmdir()
