"""Complete checkpoints: the files that a manifest must list, and the files that belong together."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint.format import State, damage
from flashspan.manifest import write_manifest
from flashspan.model import Llama, preset
from flashspan.model.huggingface import weight_files


def write(folder: Path, step: int, shard_bytes: int = 2**30) -> Path:
    config = preset("tiny", num_layers=1)
    model = Llama(config, attention=lambda *_: None)
    model.initialize(step)
    path = checkpoint.write(folder, State(step, config, model.state_dict(), {}, {}, {}), keep=9)
    if shard_bytes < 2**30:  # as for a larger model
        for name in weight_files(path):
            (path / name).unlink()
        checkpoint.save_state(model.state_dict(), config, path, shard_bytes=shard_bytes)
        sign(path)
    return path


def sign(path: Path, *left_out: str) -> None:
    """Write a manifest that matches the files, without some of them."""
    write_manifest(path, (file.name for file in path.iterdir() if file.name not in ("manifest.json", *left_out)))


@pytest.mark.parametrize("shard_bytes", [2**30, 100_000])
def test_a_manifest_must_list_every_file_that_is_read(tmp_path: Path, shard_bytes: int) -> None:
    path = write(tmp_path, 3, shard_bytes)
    assert damage(path) is None
    files = [file.name for file in path.iterdir() if file.name != "manifest.json"]
    assert len(files) > (4 if shard_bytes == 2**30 else 6) - 1
    for name in files:
        sign(path, name)
        fault = damage(path)
        assert fault is not None
        assert name in fault


def test_a_flipped_byte_that_no_manifest_lists_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    sign(path, "model.safetensors")
    assert checkpoint.newest(tmp_path, say=lambda text: None) is None
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        checkpoint.refuse_damaged(path)


def test_weights_that_the_manifest_does_not_list_are_no_second_choice(tmp_path: Path) -> None:
    path = write(tmp_path / "one", 3)
    for name in weight_files(many := write(tmp_path / "many", 3, 100_000)):
        shutil.copy(many / name, path)
    assert damage(path) is not None


def edit_state(path: Path, **changes: object) -> None:
    about = {**json.loads((path / "state.json").read_text()), **changes}
    (path / "state.json").write_text(json.dumps(about))
    sign(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda path: ((path / "model.safetensors").unlink(), os.mkfifo(path / "model.safetensors")),
    "a folder": lambda path: ((path / "state.json").unlink(), (path / "state.json").mkdir()),
    "a step of another type": lambda path: edit_state(path, step="3"),
    "another step than its name": lambda path: edit_state(path, step=4),
    "an order that is a list": lambda path: edit_state(path, order=[]),
    "no extra": lambda path: edit_state(path, extra=None),
    "a manifest of nothing": lambda path: (path / "manifest.json").write_text("{}"),
    "a manifest of brackets": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "a manifest without sizes": lambda path: (path / "manifest.json").write_text(
        json.dumps({file.name: {} for file in path.iterdir()})
    ),
    "a manifest with a name twice": lambda path: (path / "manifest.json").write_text(
        '{"state.json": 1, ' + (path / "manifest.json").read_text()[1:]
    ),
    "a manifest of words": lambda path: (path / "manifest.json").write_text('{"state.json": "fine"}'),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_every_kind_is_noticed(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, 3)
    DAMAGE[kind](path)
    assert damage(path) is not None


def test_a_checkpoint_may_be_copied_under_another_name(tmp_path: Path) -> None:
    path = shutil.copytree(write(tmp_path, 3), tmp_path / "best")
    assert damage(path) is None


def test_a_file_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    first, second = write(tmp_path, 3), write(tmp_path, 4)
    for name in ("model.safetensors", "state.json", "manifest.json"):
        kept = (first / name).read_bytes()
        shutil.copy(second / name, first)
        assert damage(first) is not None, name
        (first / name).write_bytes(kept)
    assert damage(first) is None


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """For names of any length: a folder that was renamed by hand, or a step of nine digits."""
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        write(tmp_path, step)
    (tmp_path / "step-99999998").rename(tmp_path / "step-099999998")
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [*range(99_999_998, 100_000_002)]
    assert checkpoint.newest(tmp_path) == tmp_path / "step-100000001"


def test_a_folder_of_another_name_is_reported_and_ignored(tmp_path: Path) -> None:
    path, said = write(tmp_path, 3), list[str]()
    for name in ("step-\u00b2", "step-3 (copy)"):  # Python counts the first as a digit, but it is not a number
        shutil.copytree(path, tmp_path / name)
    assert checkpoint.newest(tmp_path, say=said.append) == path
    assert len(said) == 2
    assert all("is ignored" in text for text in said)
