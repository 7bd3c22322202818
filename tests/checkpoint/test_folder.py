"""A folder of checkpoints: which ones are kept, which one readers find, and what a full disk or a kill leaves
behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors import SafetensorError

from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint.writer import Writer
from flashspan.model import Llama, preset


def tiny_state(step: int) -> checkpoint.State:
    config = preset("tiny", num_layers=1)
    return checkpoint.State(step, config, Llama(config, attention=lambda *_: None).state_dict(), {}, {}, {})


def test_a_new_run_in_an_old_folder_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    for step in (80, 120, 20, 40):
        checkpoint.write(tmp_path, tiny_state(step), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000020", "step-00000040"]


def test_the_first_checkpoint_of_a_new_run_replaces_all_older_ones(tmp_path: Path) -> None:
    for step in (20, 40):
        checkpoint.write(tmp_path, tiny_state(step))
    writer = Writer(tmp_path, keep=2, anew=True)
    for step, want in ((40, [40]), (60, [40, 60])):  # 20 belongs to the previous run
        writer.submit(tiny_state(step))
        assert writer.wait()
        assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [f"step-{step:08}" for step in want]


def test_a_reader_finds_the_newest_checkpoint_of_a_run_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that a run removes while it is read is not reported as damaged: there is a newer one."""
    checkpoint.write(tmp_path, tiny_state(2), keep=1)
    real, steps, said = checkpoint.damage, iter([4, 6]), list[str]()

    def read_slowly(path: Path) -> str | None:
        for step in steps:
            checkpoint.write(tmp_path, tiny_state(step), keep=1)
            break
        return real(path)

    monkeypatch.setattr(checkpoint, "damage", read_slowly)
    assert checkpoint.newest(tmp_path, say=said.append) == tmp_path / "step-00000006"
    assert said == []


def test_a_checkpoint_is_removed_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-removed checkpoint would look damaged to a reader."""
    old, seen = checkpoint.write(tmp_path, tiny_state(2), keep=1), list[bool]()
    real = checkpoint._remove
    monkeypatch.setattr(checkpoint, "_remove", lambda path: (seen.append(old.exists()), real(path)))
    checkpoint.write(tmp_path, tiny_state(4), keep=1)
    assert seen[-1] is False
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_reader_does_not_touch_an_unfinished_checkpoint(tmp_path: Path) -> None:
    whole, half = checkpoint.write(tmp_path, tiny_state(2)), tmp_path / ".writing-step-00000004"
    half.mkdir()
    assert checkpoint.newest(tmp_path) == whole
    assert half.exists()
    checkpoint.clear_unfinished(tmp_path)
    assert not half.exists()
    (tmp_path / "new").touch()  # checkpoints have the permissions of any new file
    assert {path.stat().st_mode for path in whole.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    said: list[str] = []
    writer = Writer(tmp_path, keep=1, say=said.append)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    writer.submit(tiny_state(3))
    assert not writer.wait()
    assert "No space left on device" in said[0]
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, tiny_state(2))
    assert checkpoint.read(path).step == 2
    file = path / "state.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"a checkpoint of format 2, and this flashspan reads 1: use the version"):
        checkpoint.read(path)


def test_a_checkpoint_stays_until_its_replacement_is_complete(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, tiny_state(2))
    before = (path / "manifest.json").read_text()
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if target == path:
            raise KeyboardInterrupt
        return rename(self, target)

    def refused(self: Path, target: Path) -> Path:
        if target == path and not self.name.endswith(checkpoint.BEFORE):
            raise PermissionError
        return rename(self, target)

    with mock.patch.object(Path, "rename", refused), pytest.raises(PermissionError):
        checkpoint.write(tmp_path, tiny_state(2))
    assert checkpoint.newest(tmp_path) == path
    with (
        mock.patch.object(Path, "rename", killed),
        mock.patch.object(shutil, "rmtree"),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpoint.write(tmp_path, tiny_state(2))
    assert checkpoint.checkpoints(tmp_path) == []
    checkpoint.clear_unfinished(tmp_path)
    assert checkpoint.newest(tmp_path) == path
    assert (path / "manifest.json").read_text() == before
    checkpoint.write(tmp_path, tiny_state(2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
