"""`flashspan train` as a command with a temporary folder of its own: its processes, and the files it leaves. For
Linux."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flashspan.train import TrainConfig

PARENT, RANK, SERVER = "parent", "rank", "fork server"


class Command:
    """A running command. Its output goes to a file."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(config.describe())
        self.output = folder / "output"
        # A short name, because names of sockets have at most 107 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="fs", ignore_cleanup_errors=True)
        self.temporary = Path(self._temporary.name)
        self._mark = f"TMPDIR={self.temporary}".encode()
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flashspan.train", str(folder / "run.toml")],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **caches, "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    def last_step(self) -> int:
        """The last step that the command has printed."""
        steps = re.findall(r"^step +(\d+)/\d+ loss", self.output.read_text(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def find(self, kind: str) -> list[int]:
        """The live processes of a kind, with ranks in order."""
        if kind == PARENT:
            return [self.process.pid] if self.process.poll() is None else []
        servers = [pid for pid in self.processes() if _parent_of(pid) == self.process.pid and _is_server(pid)]
        if kind == SERVER:
            return servers
        return sorted(pid for pid in self.processes() if _parent_of(pid) in servers)

    def processes(self) -> list[int]:
        """All live processes of the command, found by the name of the temporary folder, which they inherit."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._mark in _read(path / "environ")]

    def left(self, seconds: float = 10.0) -> list[str]:
        """Processes and files that remain after this many seconds; returns at once if there are none."""
        end = time.monotonic() + seconds
        while True:
            left = [f"process {pid}: {_read(Path(f'/proc/{pid}/cmdline'))[:150]!r}" for pid in self.processes()]
            left += [str(path) for path in self.temporary.rglob("*")]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def close(self) -> None:
        """End all of its processes."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        self._temporary.cleanup()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended in the meantime
        return b""


def _parent_of(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _is_server(pid: int) -> bool:
    return b"multiprocessing.forkserver" in _read(Path(f"/proc/{pid}/cmdline"))
