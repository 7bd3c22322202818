"""Restarts after ranks failed: whether the command restarts the run, and from which step."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from flashspan.checkpoint import format as checkpoint

from .config import TrainConfig
from .metrics import read_metrics


class Attempts:
    """The attempts of a command to finish a run. After a failure, the next resumes from the newest good checkpoint.

    There are at most `train.max_restarts` restarts. A step at which two attempts in a row have failed is not tried a
    third time.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        """The config of the next attempt."""
        self.restarts = 0
        self.failed_at = 0
        """The step at which the last attempt failed, 1 or more; 0 before the first failure."""
        self._folder = Path(config.checkpoint.folder)
        self._found = _stamps(self._folder)
        self._start = checkpoint.last_step(self._folder) if config.checkpoint.resume else 0
        self._began = time.time()

    def restart(self) -> str | None:
        """Count a failure. Returns None if another attempt follows, else the reason why none does."""
        steps, most = self.config.train.steps, self.config.train.max_restarts
        rows = read_metrics(self._folder / "metrics.jsonl")
        done = [row["step"] for row in rows if row.get("time", 0.0) >= self._began]
        failed_at = min(steps, max(done, default=self._start) + 1)
        before, self.failed_at = self.failed_at, failed_at
        if self.restarts == most:
            return f"after {most} restarts, no more are allowed (train.max_restarts)" if most else "not restarted"
        if failed_at == before:
            return f"not restarted: the previous attempt failed at step {failed_at} too"
        self.restarts += 1
        self._began = time.time()
        # With resume = false, a restart resumes only from checkpoints that this command has written.
        if _stamps(self._folder) - self._found:
            self.config = dataclasses.replace(
                self.config, checkpoint=dataclasses.replace(self.config.checkpoint, resume=True)
            )
        path = checkpoint.newest(self._folder, say=lambda _: None) if self.config.checkpoint.resume else None
        self._start = checkpoint.step_of(path) if path else 0
        return None

    def describe(self) -> str:
        """The next restart, as text."""
        return f"restart {self.restarts} of {self.config.train.max_restarts} resumes from step {self._start}"


def _stamps(folder: Path) -> set[tuple[str, int]]:
    """The checkpoints in a folder, each with a value that differs between two of the same step."""
    return {(path.name, path.stat().st_mtime_ns) for path in checkpoint.checkpoints(folder)}
