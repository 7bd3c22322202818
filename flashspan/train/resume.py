"""The checkpoint that a run resumes from, and whether it belongs to the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashspan.checkpoint import format as checkpoint
from flashspan.data.tokens import TokenFile
from flashspan.lock import refuse_locked

from .config import AttentionSection, TrainConfig
from .dataset import open_samples, order_of


def choose(config: TrainConfig, file: TokenFile, *, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint in the run's folder, or None to begin at step 0. Writes nothing.

    ValueError if all checkpoints are damaged, or if the newest undamaged one is of another run.
    """
    folder = Path(config.checkpoint.folder)
    if not config.checkpoint.resume:
        if checkpoint.checkpoints(folder):
            say(f"starting over: the first checkpoint will replace those of the earlier run in {folder}")
        return None
    path = checkpoint.newest(folder, say=say)
    if path is not None:
        if (fault := misfit(path, config, file)) is not None:
            raise ValueError(fault)
    elif lost := checkpoint.checkpoints(folder):
        raise _all_damaged(folder, [f"{each.name}: {checkpoint.damage(each)}" for each in lost])
    return path


def refuse_folder(config: TrainConfig) -> None:
    """ValueError if another run is at work in the folder, if its newest undamaged checkpoint is of another run, or if
    no checkpoint can be read. Writes nothing.

    The hashes of a checkpoint are compared only if it cannot be read or does not fit: `choose` reads all of it.
    """
    folder = Path(config.checkpoint.folder)
    refuse_locked(folder)
    found = checkpoint.checkpoints(folder) if config.checkpoint.resume else []
    if not found:
        return
    file, faults = open_samples(config)[0].file, list[str]()
    for path in reversed(found):
        try:
            fault = misfit(path, config, file)
        except (ValueError, OSError) as error:
            fault = str(error)
        if fault is None:
            return
        if (damage := checkpoint.damage(path)) is None:
            raise ValueError(fault)
        faults.insert(0, f"{path.name}: {damage}")
    raise _all_damaged(folder, faults)


def _all_damaged(folder: Path, faults: list[str]) -> ValueError:
    return ValueError(
        f"every checkpoint in {folder} is damaged ({'; '.join(faults)}): restore one, choose another "
        "checkpoint.folder, or start over and replace them with --checkpoint.resume false"
    )


def misfit(path: Path, config: TrainConfig, file: TokenFile) -> str | None:
    """The reason why a checkpoint does not belong to a run with this config and data; None if it does."""
    state, shape = checkpoint.read(path, model=False, optimizer=False), config.model.resolve()
    if (fault := _fault_of_extra(state.extra)) is not None:
        return f"{path} was not written by `flashspan train`: {fault}; choose another checkpoint.folder"
    if state.config != shape:
        both = [
            (entry.name, getattr(state.config, entry.name), getattr(shape, entry.name))
            for entry in dataclasses.fields(shape)
        ]
        changed = [f"{name} was {theirs}, is {ours}" for name, theirs, ours in both if theirs != ours]
        return (
            f"{path} is a checkpoint of another model ({', '.join(changed)}): restore its sizes, choose another "
            "checkpoint.folder, or start over with --checkpoint.resume false"
        )
    ours = order_of(config, file)
    # Early checkpoints have no pattern (all runs were causal) and no fingerprint of the data.
    unsaid = {"attention": str(AttentionSection()), "data": ours["data"], "tokenizer": ours["tokenizer"]}
    theirs = {**unsaid, **state.order}
    changed = [f"{key} was {theirs.get(key)}, is {ours[key]}" for key in ours if ours[key] != theirs.get(key)]
    if changed:
        return (
            f"{path} is of a run with other samples or another attention ({', '.join(changed)}): restore them, "
            "choose another checkpoint.folder (--model.load loads the weights), or start over with "
            "--checkpoint.resume false"
        )
    return None


def _fault_of_extra(extra: Mapping[str, Any]) -> str | None:
    """The entries of `extra` that a run needs and that are missing or of the wrong type, as text."""
    needed: dict[str, Any] = {"scale": (int, float), "steady": int, "config": dict}
    found: dict[str, Any] = dict(extra)
    config = extra.get("config")
    if isinstance(config, dict) and isinstance(config.get("train"), dict):
        needed |= {"steps": int, "precision": str}
        found |= config["train"]
    else:
        found["config"] = None
    wrong = [name for name, kind in needed.items() if not isinstance(found.get(name), kind)]
    return f"state.json has no valid {', '.join(wrong)}" if wrong else None
