"""When a run whose ranks failed is started again, by the command that started it, and from where."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from flashspan.checkpoint import format as checkpoint

from .config import TrainConfig
from .metrics import read_metrics


class Attempts:
    """The attempts of one command at one run: after a failure, the next resumes from the newest whole checkpoint.

    There are at most `train.max_restarts`, and no third attempt at a step at which two in a row have failed: what is
    wrong there is not chance.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        """For the next attempt."""
        self.restarts = 0
        self.failed_at = 0
        """The step at which the last attempt failed, 1 or more; 0 before any did."""
        self._folder = Path(config.checkpoint.folder)
        self._found = _stamps(self._folder)
        self._start = checkpoint.last_step(self._folder) if config.checkpoint.resume else 0
        self._began = time.time()

    def restart(self) -> str | None:
        """Count a failure; None where another attempt follows, else why none does."""
        steps, most = self.config.train.steps, self.config.train.max_restarts
        rows = read_metrics(self._folder / "metrics.jsonl")
        done = [row["step"] for row in rows if row.get("time", 0.0) >= self._began]
        failed_at = min(steps, max(done, default=self._start) + 1)
        before, self.failed_at = self.failed_at, failed_at
        if self.restarts == most:
            return f"after {most} restarts, the most that train.max_restarts allows" if most else "not restarted"
        if failed_at == before:
            return f"not restarted: the attempt before failed at step {failed_at} too"
        self.restarts += 1
        self._began = time.time()
        # A run that was to start from step 0 resumes from what it has saved itself, not from what it found.
        if _stamps(self._folder) - self._found:
            self.config = dataclasses.replace(
                self.config, checkpoint=dataclasses.replace(self.config.checkpoint, resume=True)
            )
        path = checkpoint.newest(self._folder, say=lambda _: None) if self.config.checkpoint.resume else None
        self._start = checkpoint.step_of(path) if path else 0
        return None

    def describe(self) -> str:
        """The restart that follows, in words."""
        return f"restart {self.restarts} of {self.config.train.max_restarts} resumes from step {self._start}"


def _stamps(folder: Path) -> set[tuple[str, int]]:
    """The checkpoints in a folder, with what differs between two of the same step."""
    return {(path.name, path.stat().st_mtime_ns) for path in checkpoint.checkpoints(folder)}
