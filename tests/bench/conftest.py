"""Start the processes of sweeps without repeating their imports."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from flashspan import launch
from flashspan.bench.measure import sweep


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork a sweep's processes from a server that has imported torch. No device is used in these tests."""
    forkserver.set_forkserver_preload(launch.PRELOAD)
    monkeypatch.setattr(sweep, "START", "forkserver")
