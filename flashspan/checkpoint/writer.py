"""Writes checkpoints on a thread, while training runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .format import State, write


class Writer:
    """Writes checkpoints on a thread of its own, one at a time; a failure is told, and nothing older is touched."""

    def __init__(
        self, folder: str | Path, *, keep: int, anew: bool = False, say: Callable[[str], None] = print
    ) -> None:
        """`anew`: what is in the folder is of another run, and goes when the first state is on the disk."""
        self.folder, self.keep, self.anew, self.say = Path(folder), keep, anew, say
        self._lane = ThreadPoolExecutor(1, "flashspan-checkpoint")
        self._job: Future[Path] | None = None

    def submit(self, state: State) -> None:
        """Write this state, after the one before it."""
        self.wait()
        self._job = self._lane.submit(write, self.folder, state, keep=1 if self.anew else self.keep)

    def wait(self) -> bool:
        """Wait for the last state; whether it is on the disk."""
        if self._job is None:
            return True
        try:
            self._job.result()
        except OSError as error:
            self.say(f"the checkpoint was not written: {error}; earlier ones are as they were")
            return False
        finally:
            self._job = None
        self.anew = False
        return True
