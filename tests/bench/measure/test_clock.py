"""Samples of several calls are taken in turn, each in its own context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from flashspan.bench.measure.clock import cold_samples


def test_calls_take_turns_each_in_its_own_context() -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        said.append(f"{name} begins")
        yield
        said.append(f"{name} ends")

    calls = {name: lambda name=name: said.append(name) for name in "ab"}
    contexts = {name: lambda name=name: context(name) for name in "ab"}
    times = cold_samples(calls, 3, torch.device("cpu"), contexts)
    assert said == 3 * [word for name in "ab" for word in (f"{name} begins", name, f"{name} ends")]
    assert {name: [len(samples) for samples in both] for name, both in times.items()} == {"a": [3, 3], "b": [3, 3]}
    assert all(device >= host >= 0 for both in times.values() for device, host in zip(*both, strict=True))
