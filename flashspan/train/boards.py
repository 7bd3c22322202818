"""TensorBoard and Weights & Biases: the metrics of a run, for programs that draw curves. The first rank writes them.

flashspan train --log.tensorboard
flashspan train --log.wandb             # WANDB_MODE=offline records without a network; `wandb sync` uploads later
"""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flashspan.files import read_bytes

from .config import LogSection, TrainConfig

WANDB_ID = "wandb-id"
"""File in a run's folder with the id of the run at Weights & Biases."""


class Board(Protocol):
    """A program that draws the metrics of a run."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step; OSError if they cannot be written."""

    def close(self, status: str) -> None:
        """End the run, with its status: done, stopped, failed, ..."""


def check_boards(log: LogSection) -> None:
    """ValueError for a board whose package is not installed. Imports no package, because that takes a second."""
    for name in ("tensorboard", "wandb"):
        if getattr(log, name) and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.{name} needs the package {name}, which is not installed: pip install 'flashspan[{name}]'"
            )


def open_boards(config: TrainConfig, start: int) -> list[Board]:
    """The boards that the config switches on, for a run that begins after step `start`."""
    folder = Path(config.checkpoint.folder)
    boards: list[Board] = []
    if config.log.tensorboard:
        boards.append(TensorBoard(folder, start))
    if config.log.wandb:
        boards.append(WandB(config, folder, start))
    return boards


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # As in metrics.jsonl, a repeated step replaces the earlier one.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases with our config. A run that resumes in a folder continues the run of that folder."""

    def __init__(self, config: TrainConfig, folder: Path, start: int) -> None:
        alone = "wandb" not in sys.modules  # otherwise other runs of this process may use the service
        import wandb

        self._stop_service = wandb.teardown if alone else lambda: None
        self._errors: type[Exception] = wandb.Error
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "flashspan"),
                name=os.environ.get("WANDB_NAME", folder.resolve().name),
                id=_run_id(folder, start),
                resume="allow",
                dir=str(folder),
                config=config.as_dict(),
                settings=wandb.Settings(console="off"),  # W&B must not capture our output
            )
        except wandb.Error as error:  # no API key, no network
            raise ValueError(
                f"log.wandb could not start a run of Weights & Biases: {str(error).strip()}; run `wandb login`, or set "
                "WANDB_MODE=offline and upload later with `wandb sync`"
            ) from error

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._run.step:  # repeated after a restart, with the same values: W&B takes steps in order only
            return
        try:
            self._run.log(dict(values), step=step)
        except self._errors as error:
            raise OSError(str(error)) from error

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("done", "stopped") else 1)
        self._stop_service()  # writes the last lines to the file: atexit handlers do not run in a rank


def _run_id(folder: Path, start: int) -> str:
    """The id of the run in a folder: the saved one if training resumes, otherwise a new one, which is saved."""
    file = folder / WANDB_ID
    if start and file.is_file():
        return read_bytes(file, limit=100).decode().strip()
    name = uuid.uuid4().hex[:12]
    file.write_text(f"{name}\n", encoding="utf-8")
    return name
