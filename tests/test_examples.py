"""Each example runs as its first lines say, and ends without an error: it checks its own result.

Those of one process, which `python FILE` runs, run one after another in processes forked after the import of torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"
WITH_RANKS = ["ring_attention", "fine_tune", "hybrid_block"]  # under torchrun, or started by the example
OF_ONE_PROCESS = ["custom_mask", "drop_in", "packed_documents", "custom_schedule", "transformers_drop_in"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
IN_TURN = """
import os, runpy, sys
import torch

folder, *files = sys.argv[1:]
for file in files:
    if os.fork() == 0:
        for kind, stream in (("out", 1), ("err", 2)):
            path = os.path.join(folder, os.path.basename(file) + "." + kind)
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        sys.argv, sys.path[0] = [file], os.path.dirname(file)
        runpy.run_path(file, run_name="__main__")
        sys.exit()
    print(os.path.basename(file), os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Runs files; prints the name and the exit code of each, and keeps what it prints in a folder."""


def command_of(path: Path) -> list[str]:
    """The command in an example's docstring."""
    words = re.findall(r"^(?:python|torchrun) .*$", path.read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    return [*([sys.executable] if words[0] == "python" else TORCHRUN), *words[1:]]


def start(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def start_in_turn(names: list[str], folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    files = [str(FOLDER / f"{name}.py") for name in names]
    done = start([sys.executable, "-c", IN_TURN, str(folder), *files])
    assert done.returncode == 0, done.stderr
    codes = dict(line.split() for line in done.stdout.splitlines())
    found = {}
    for name in names:
        out, error = ((folder / f"{name}.py.{kind}").read_text(encoding="utf-8") for kind in ("out", "err"))
        found[name] = subprocess.CompletedProcess(
            command_of(FOLDER / f"{name}.py"), int(codes[f"{name}.py"]), out, error
        )
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """All examples, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        in_turn = pool.submit(start_in_turn, OF_ONE_PROCESS, tmp_path_factory.mktemp("examples"))
        yield {
            **{name: pool.submit(start, command_of(FOLDER / f"{name}.py")) for name in WITH_RANKS},
            **dict.fromkeys(OF_ONE_PROCESS, in_turn),
        }


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
@pytest.mark.timeout(200)
def test_an_example_runs(name: str, running: dict[str, Future[Any]]) -> None:
    assert command_of(FOLDER / f"{name}.py") == [sys.executable, f"examples/{name}.py"]
    check(running[name].result()[name])


@pytest.mark.parametrize("name", WITH_RANKS)
@pytest.mark.timeout(200)
def test_an_example_with_ranks_runs(name: str, running: dict[str, Future[Any]]) -> None:
    check(running[name].result())


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for path in FOLDER.glob("*.py"):
        if "import flashspan" in (text := path.read_text(encoding="utf-8")) or "from flashspan" in text:
            assert path.stem in tests, f"{path} is run by no test"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((FOLDER / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    (tmp_path / "tour.py").write_text("\n".join(code), encoding="utf-8")
    done = start([sys.executable, "tour.py"], tmp_path)
    assert done.returncode == 0, done.stderr
