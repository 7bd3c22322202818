"""Writes checkpoints on a thread, while training runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .format import State, write


class Writer:
    """Writes checkpoints on a separate thread, one at a time. A failure is reported; earlier checkpoints stay."""

    def __init__(
        self, folder: str | Path, *, keep: int, anew: bool = False, say: Callable[[str], None] = print
    ) -> None:
        """`anew`: the folder's checkpoints are of another run; remove them when the first state is on disk."""
        self.folder, self.keep, self.anew, self.say = Path(folder), keep, anew, say
        self._lane = ThreadPoolExecutor(1, "flashspan-checkpoint")
        self._job: Future[Path] | None = None

    def submit(self, state: State) -> None:
        """Write this state, after the previous one is written."""
        self.wait()
        self._job = self._lane.submit(write, self.folder, state, keep=1 if self.anew else self.keep)

    def wait(self) -> bool:
        """Wait for the last state to be written; returns whether it is on disk."""
        if self._job is None:
            return True
        try:
            self._job.result()
        except OSError as error:
            self.say(f"the checkpoint was not written: {error}; earlier ones are unchanged")
            return False
        finally:
            self._job = None
        self.anew = False
        return True
