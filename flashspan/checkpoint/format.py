"""The files of a checkpoint. The folder appears whole or not at all; it has a hash of each file, and no pickle.

    step-00000100/
        config.json, model.safetensors     a Hugging Face checkpoint, which transformers can load
        optimizer.safetensors              whole tensors, as in model.safetensors: any parallelism config can load them
        state.json                         the step, and the settings that determine the order of samples
        manifest.json                      the size and hash of every file above, written last

A folder is written under a temporary name, flushed to disk, and renamed. Training and generation use the newest
checkpoint whose hashes match.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashspan.files import read_json
from flashspan.manifest import find_damage, write_manifest
from flashspan.model import LlamaConfig, read_config, read_weights, save_state
from flashspan.model.huggingface import files_to_read, read_header, refuse_damaged_weights

PREFIX, WRITING, BEFORE = "step-", ".writing-", ".before"
NAME = re.compile(rf"{PREFIX}([0-9]+)")
FORMAT = 1
"""The version of state.json and of the tensors' names; other versions are refused."""


@dataclass(frozen=True)
class State:
    """Everything that a run needs to resume at `step`. Tensors are whole and on the CPU."""

    step: int
    config: LlamaConfig
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    order: Mapping[str, Any]  # the settings that a resumed run must not change: seed, batch, sequence, data
    extra: Mapping[str, Any] = field(default_factory=dict)


def write(folder: str | Path, state: State, *, keep: int = 2) -> Path:
    """Write a checkpoint to `folder`, and remove all others except the `keep` - 1 before it. (Checkpoints of later
    steps are damaged, or are those of an earlier run.) Returns its path when it is on disk; OSError if it cannot be
    written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    needed = needed_bytes(sum(value.nbytes for value in (*state.model.values(), *state.optimizer.values())))
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(f"no space left: a checkpoint takes {needed / 1e6:,.1f} MB and {folder} has {free / 1e6:,.1f} MB")
    final = folder / f"{PREFIX}{state.step:08}"
    half, aside = folder / f"{WRITING}{final.name}", folder / f"{WRITING}{final.name}{BEFORE}"
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir()
        save_state(state.model, state.config, half)
        save_file({name: value.contiguous() for name, value in state.optimizer.items()}, half / "optimizer.safetensors")
        about = {"format": FORMAT, "step": state.step, "order": dict(state.order), "extra": dict(state.extra)}
        (half / "state.json").write_text(json.dumps(about, indent=2))
        shutil.copymode(half / "state.json", half / "optimizer.safetensors")  # otherwise only the owner can read it
        write_manifest(half, sorted(path.name for path in half.iterdir()))
        for path in [*half.iterdir(), half]:
            _flush(path)
        _remove(aside)
        if os.path.lexists(final):
            final.rename(aside)  # kept until the new one has its name
        half.rename(final)
        _flush(folder)
    except BaseException as error:
        shutil.rmtree(half, ignore_errors=True)
        if os.path.lexists(aside) and not os.path.lexists(final):
            aside.rename(final)
        if isinstance(error, SafetensorError):  # the disk became full while tensors were written
            raise OSError(str(error)) from error
        raise
    kept = [path for path in checkpoints(folder) if path == final or step_of(path) < state.step][-keep:]
    with contextlib.suppress(OSError):
        _remove(aside)
    for path in set(checkpoints(folder)) - set(kept):
        with contextlib.suppress(OSError):  # renamed first: a half-removed one would look damaged
            _remove(path.rename(folder / f"{WRITING}{path.name}"))
    return final


def needed_bytes(tensors: float) -> float:
    """The disk space of a checkpoint, from the bytes of its tensors."""
    return 1.02 * tensors + 2**20


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones included, sorted by the step in their names."""
    found = (path for path in Path(folder).glob(f"{PREFIX}*") if NAME.fullmatch(path.name))
    return sorted(found, key=lambda path: (step_of(path), path.name))


def last_step(folder: str | Path) -> int:
    """The step in the name of a folder's last checkpoint, damaged or not; 0 if there is none."""
    return max(map(step_of, checkpoints(folder)), default=0)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix(PREFIX))


def newest(folder: str | Path, *, say: Callable[[str], None] = print) -> Path | None:
    """The newest undamaged checkpoint, or None. Damaged checkpoints and invalid names are reported with `say`.

    The run that writes the checkpoints may still be running. A checkpoint that it removes while it is read here does
    not count as damaged, because newer ones exist.
    """
    found, named = checkpoints(folder), set[Path]()
    for path in sorted(set(Path(folder).glob(f"{PREFIX}*")) - set(found)):
        say(f"{path} is ignored: the name of a checkpoint is {PREFIX} and a number")
    while found:
        path = found.pop()
        fault = damage(path)
        if fault is None:
            return path
        now = checkpoints(folder)
        if path not in now and now:
            found = [other for other in now if other not in named]
            continue
        named.add(path)
        say(f"{path} is damaged ({fault}); {'using the one before it' if found else 'there is none before it'}")
    return None


def clear_unfinished(folder: str | Path) -> None:
    """Remove what a killed run was writing, and restore what it was replacing. Only the run that writes to this folder
    may call this: another process would remove the files that the run is writing."""
    for path in Path(folder).glob(f"{WRITING}*{BEFORE}"):
        final = path.with_name(path.name.removeprefix(WRITING).removesuffix(BEFORE))
        if not os.path.lexists(final):
            path.rename(final)
    for path in Path(folder).glob(f"{WRITING}*"):
        with contextlib.suppress(OSError):
            _remove(path)


def refuse_damaged(path: str | Path) -> None:
    """ValueError if a folder of weights differs from its manifest. A folder of another program may have no manifest."""
    path = Path(path)
    if not os.path.lexists(path / "state.json"):
        refuse_damaged_weights(path)
    elif fault := damage(path):
        raise ValueError(f"{path} is damaged ({fault}): give another checkpoint, or the run's folder {path.parent}")


def damage(path: Path) -> str | None:
    """A description of the damage of a checkpoint folder; None if every file that `read` opens is in the manifest, and
    every hash in the manifest matches."""
    try:
        # The files that are read must not depend on what a manifest lists.
        if fault := find_damage(path, {"state.json", "optimizer.safetensors", *files_to_read(path)}):
            return fault
        about = read_json(path / "state.json")
        if about.get("format") == FORMAT and (fault := _fault_of_state(about, path)):
            return fault
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _fault_of_state(about: dict[str, Any], path: Path) -> str | None:
    """A description of the fault in the content of a state.json of this format; None if there is no fault."""
    for name, kind in (("step", int), ("order", dict), ("extra", dict)):
        if not isinstance(about.get(name), kind):
            return f"state.json says {name} is {about.get(name)!r}"
    if path in checkpoints(path.parent) and step_of(path) != about["step"]:
        return f"its name has step {step_of(path)}, its state.json has step {about['step']}"
    return None


def read(path: str | Path, *, model: bool = True, optimizer: bool = True) -> State:
    """Read a checkpoint's state. Weights have the names of `flashspan.model`; a tied head has both of its names.

    Tensors are views of the mapped files: only the parts that are used are read. If the checkpoint is removed, its disk
    space is freed with the last of these tensors.
    """
    path = Path(path)
    about = read_json(path / "state.json")
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a checkpoint of format {about.get('format')}, and this flashspan reads {FORMAT}: use the "
            "version that wrote it, or load its weights with --model.load and set another checkpoint.folder"
        )
    if (fault := _fault_of_state(about, path)) is not None:
        raise ValueError(f"{path} is damaged: {fault}")
    config = read_config(path)
    weights = dict(read_weights(path, config)) if model else {}
    if model and config.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    moments: dict[str, Tensor] = {}
    if optimizer:
        read_header(path / "optimizer.safetensors")
        moments = load_file(path / "optimizer.safetensors")
    return State(about["step"], config, weights, moments, about["order"], about["extra"])


def _flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        os.fsync(handle)
    os.close(handle)
