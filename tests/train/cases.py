"""Shared by the tests of runs that stop and resume: final states, damage, and the command in a process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashspan.checkpoint import format as checkpoint
from flashspan.train import TrainConfig

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]


def final_state(config: TrainConfig) -> dict[str, Tensor]:
    """The weights and the optimizer's state of the newest checkpoint."""
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    state = checkpoint.read(path)
    assert state.step == config.train.steps
    return {**state.model, **state.optimizer}


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def damage_one(path: Path, how: str) -> None:
    file = path / ("optimizer.safetensors" if how != "no manifest" else "manifest.json")
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "torn":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()


def start(config: TrainConfig, file: Path) -> subprocess.Popen[str]:
    """Start the command in a process group of its own."""
    file.write_text(config.describe())
    command = [sys.executable, "-m", "flashspan.train", str(file)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for(process: subprocess.Popen[str], step: int) -> None:
    """Wait until the run prints that it has taken this step."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(rf"step +{step}/", line):
            return
    raise AssertionError(f"step {step} was not taken: {''.join(lines)}")
