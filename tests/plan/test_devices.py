"""Free memory of a GPU, tested without a GPU."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashspan.bench.measure.memory import refuse_shared_gpu
from flashspan.plan.devices import free_gpu_bytes

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 141 GiB with 10 GiB free."""
    properties = SimpleNamespace(uuid="1a2b", total_memory=141 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(subprocess, "run", answer)


def answer(command: list[str], **options: Any) -> SimpleNamespace:
    assert "--id=GPU-1a2b" in command
    return SimpleNamespace(stdout=f"{10 * 1024}\n")


def test_ranks_share_what_is_free_on_a_gpu(gpu: None) -> None:
    assert free_gpu_bytes() == 10 * GIB
    refuse_shared_gpu(4, GIB, "lower --ranks")
    with pytest.raises(ValueError, match=r"8 ranks that share a GPU need about 12.7 GiB: 10.0 GiB are free; lower"):
        refuse_shared_gpu(8, GIB, "lower --ranks")


def test_without_nvidia_smi_the_total_counts(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert free_gpu_bytes() == 141 * GIB
