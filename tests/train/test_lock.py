"""Only one run at a time uses a folder."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from flashspan.launch import RankError
from flashspan.lock import LOCK, locked_folder
from flashspan.train.loop import DONE
from flashspan.train.run import run_rank
from tests.train.cases import ConfigOf, OnRanks, start, wait_for


def test_two_runs_in_one_folder_are_refused(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--parallel.context=1", "--train.steps=2")
    with locked_folder(config.checkpoint.folder), pytest.raises(RankError) as caught:
        on_ranks(1, run_rank, config)
    assert f"another is at work in {config.checkpoint.folder}" in str(caught.value)
    assert "--checkpoint.folder" in str(caught.value)
    assert on_ranks(1, run_rank, config) == [DONE]


@pytest.mark.slow
def test_a_killed_run_releases_its_folder(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    process = start(config, tmp_path / "run.toml")
    wait_for(process, 1)
    with pytest.raises(ValueError, match="another is at work"), locked_folder(config.checkpoint.folder):
        pass
    process.kill()
    process.wait(20)
    process.communicate(timeout=20)  # the ranks check every second whether their parent lives, so they have ended too
    with locked_folder(config.checkpoint.folder):
        pass


def test_a_run_may_use_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with locked_folder(tmp_path / "run"):
        pass
    (tmp_path / "other" / LOCK).mkdir(parents=True)  # a lock that cannot be opened is a different error
    with pytest.raises(ValueError, match="Is a directory"), locked_folder(tmp_path / "other"):
        pass
