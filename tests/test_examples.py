"""Each example runs as its first lines say, and ends without an error: it checks its own result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"
NAMES = [
    "ring_attention",
    "fine_tune",
    "hybrid_block",
    "custom_mask",
    "drop_in",
    "packed_documents",
    "custom_schedule",
    "transformers_drop_in",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def command_of(path: Path) -> list[str]:
    """The command in an example's docstring."""
    words = re.findall(r"^(?:python|torchrun) .*$", path.read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    return [*([sys.executable] if words[0] == "python" else TORCHRUN), *words[1:]]


def start(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All examples, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(start, command_of(FOLDER / f"{name}.py")) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(200)
def test_an_example_runs(name: str, running: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    done = running[name].result()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


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
