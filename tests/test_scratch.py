"""The scratch folder of a command's processes exists while they run, and is removed if any of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from flashspan import scratch

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
PROGRAM = """if __name__ == "__main__":
    import os, time
    from flashspan.launch import Ranks
    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid)
        print(os.getppid(), *pids, flush=True)
        ranks.run(time.sleep, 50, timeout=60)"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a short name: names of sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fs") as name:
        yield Path(name)


def start_command(temporary: Path) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Start a command with two ranks. Returns it, and its processes by role."""
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary.parent)}
    command = [sys.executable, "-c", PROGRAM]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    _, *ranks = map(int, parent.stdout.readline().split())
    server = int(Path(f"/proc/{ranks[0]}/stat").read_text().split()[3])
    return parent, {"parent": parent.pid, "fork server": server, "rank": ranks[1]}


def wait_until_empty(folder: Path, seconds: float = 10.0) -> list[str]:
    """The entries of a folder after this many seconds, or an empty list as soon as it is empty."""
    end = time.monotonic() + seconds
    while (left := [path.name for path in folder.rglob("*")]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def assert_nothing_left(temporary: Path, kind: signal.Signals, names: list[str]) -> None:
    """Start a command, send a signal to some of its processes, and compare what is left with nothing."""
    parent, processes = start_command(temporary)
    try:
        (folder,) = temporary.iterdir()
        assert folder.name.startswith(scratch.PREFIX)
        for name in names:
            os.kill(processes[name], kind)
        parent.communicate(timeout=30)
        assert wait_until_empty(temporary) == []
    finally:
        parent.kill()
        parent.communicate()


@LINUX
@pytest.mark.parametrize(
    "victim", ["parent", *(pytest.param(w, marks=pytest.mark.slow) for w in ("rank", "fork server"))]
)
def test_a_killed_process_leaves_nothing_in_the_temporary_folder(temporary: Path, victim: str) -> None:
    assert_nothing_left(temporary, signal.SIGKILL, [victim])


@LINUX
@pytest.mark.timeout(100)
def test_a_closed_terminal_leaves_nothing_in_the_temporary_folder(temporary: Path) -> None:
    assert_nothing_left(temporary, signal.SIGHUP, ["fork server", "rank", "parent"])  # all processes of the terminal


@LINUX
@pytest.mark.slow
def test_what_is_left_when_all_are_killed_is_removed_by_the_next_command(temporary: Path) -> None:
    first, processes = start_command(temporary)
    (left,) = temporary.iterdir()
    for pid in (processes["fork server"], processes["parent"]):
        os.kill(pid, signal.SIGSTOP)  # or one would remove the folder before the other is killed
    for pid in (processes["fork server"], processes["parent"]):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=30)
    assert left.exists()
    second, _ = start_command(temporary)
    assert not left.exists()
    second.terminate()
    second.communicate(timeout=30)


def test_stale_folders_are_removed_and_those_in_use_kept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    names = ("in use", "killed", "half made", "being made", "other")
    folders = {name: temporary / f"{scratch.PREFIX}{name}" for name in names[:4]}
    folders["other"] = temporary / "flashspan-bench-1"
    for folder in folders.values():
        folder.mkdir()
    for name in ("in use", "killed"):
        (folders[name] / scratch.LOCK).touch()
    os.utime(folders["half made"], (0, 0))
    os.utime(folders["in use"], (0, 0))
    (temporary / f"{scratch.PREFIX}link").symlink_to(tmp_path)
    holder = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", holder, str(folders["in use"] / scratch.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        scratch.clear_stale()
        left = {name for name, folder in folders.items() if folder.exists()}
        process.communicate("\n", timeout=10)
    assert left == {"in use", "being made", "other"}
    assert tmp_path.exists()


def test_multiprocessing_keeps_its_sockets_in_the_scratch_folder() -> None:
    """A canary for a private name of multiprocessing: `_config["tempdir"]`."""
    folder = scratch.folder()
    assert get_temp_dir() == str(folder)


def test_a_long_temporary_folder_leaves_room_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path may have at most 107 characters, for any name of the temporary folder."""
    for length in (10, 66, 67, 68, 100, 200):
        place = Path("/" + "x" * (length - 1))
        monkeypatch.setattr(scratch.tempfile, "tempdir", str(place))
        *_, chosen = scratch._places()
        assert len(str(chosen / f"{scratch.PREFIX}12345678" / "listener-12345678")) <= 107
