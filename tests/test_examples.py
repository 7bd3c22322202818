"""Each example runs with the command in its first lines, and ends without an error: it checks its own result.

They run in processes forked after the import of torch: those of `python FILE` in one, those of `torchrun` in the ranks
of torchrun's launcher.
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
TOGETHER = [  # run one after another, in parallel with the other list
    ["ring_attention", "hybrid_block", "custom_mask", "drop_in", "packed_documents", "custom_schedule"],
    ["fine_tune", "transformers_drop_in"],
]
NAMES = [name for names in TOGETHER for name in names]
RUN = """
import os, runpy, sys
import torch

def run(file):
    sys.argv, sys.path[0] = [file], os.path.dirname(file)
    runpy.run_path(file, run_name="__main__")

folder, *files = sys.argv[1:]
for text in files:
    num_ranks, _, file = text.partition(" ")
    name = os.path.basename(file)
    if os.fork() == 0:
        for kind, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(os.path.join(folder, name + "." + kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        if int(num_ranks):
            from torch.distributed.launcher.api import LaunchConfig, elastic_launch
            rendezvous = {"run_id": name, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
            config = LaunchConfig(1, 1, int(num_ranks), **rendezvous, max_restarts=0, start_method="fork")
            elastic_launch(config, run)(file)
        else:
            run(file)
        sys.exit()
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Run files, each given after its number of ranks (0: without torchrun). Print the name and the exit code of each, and
write its output to a folder."""


def ranks_of(name: str) -> int:
    """The number of ranks in the command of an example's docstring; 0 if Python runs it."""
    words = re.findall(r"^(?:python|torchrun) .*$", (FOLDER / f"{name}.py").read_text(encoding="utf-8"), re.MULTILINE)
    command = words[0].split()
    assert command[-1] == f"examples/{name}.py"
    if command[0] == "python":
        assert len(command) == 2
        return 0
    assert command[:2] == ["torchrun", "--nproc-per-node"]
    assert len(command) == 4
    return int(command[2])


def start(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def run_together(names: list[str], folder: Path) -> dict[str, tuple[int, str, str]]:
    """The exit code, stdout and stderr of each example."""
    done = start([sys.executable, "-c", RUN, str(folder), *(f"{ranks_of(x)} {FOLDER / x}.py" for x in names)])
    assert done.returncode == 0, done.stderr
    codes = dict(line.split() for line in done.stdout.splitlines())
    texts = [[(folder / f"{name}.py.{kind}").read_text(encoding="utf-8") for kind in ("out", "err")] for name in names]
    return {name: (int(codes[f"{name}.py"]), out, error) for name, (out, error) in zip(names, texts, strict=True)}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """All examples, two at a time."""
    folder = tmp_path_factory.mktemp("examples")
    with ThreadPoolExecutor(2) as pool:
        running = [(names, pool.submit(run_together, names, folder)) for names in TOGETHER]
        yield {name: future for names, future in running for name in names}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(200)
def test_an_example_runs(name: str, running: dict[str, Future[Any]]) -> None:
    code, out, error = running[name].result()[name]
    assert code == 0, error
    assert out.strip()
    # Not at the start of a line: with PYTHONUNBUFFERED a rank writes a text and its newline apart, so lines can join.
    assert sorted(re.findall(r"rank (\d+):", out)) == [str(rank) for rank in range(ranks_of(name))]


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
