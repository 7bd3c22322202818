"""Programs that compile kernels. Each runs in a process of its own, because this process runs Triton's interpreter, and
the compiler may abort. They are forked from a process that has imported PyTorch and Triton, which takes seconds."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVER = """
import json, os, sys, traceback
import benchmarks.compile_kernels

for line in sys.stdin:
    program, words, output = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        sys.argv = ["-c", *words]
        code = 1
        try:
            exec(program, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ROOT = Path(__file__).parents[2]  # the programs import flashspan and benchmarks from here
SECONDS = 110


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SERVER]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)


def run_apart(program: str, *words: str) -> list[Any]:
    """Run a program with these arguments, and return the lines that it prints, parsed as JSON."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        try:
            print(json.dumps([program, words, str(output)]), file=server.stdin, flush=True)
            ready, _, _ = select.select([server.stdout], [], [], SECONDS)
            code = server.stdout.readline().strip() if ready else f"nothing in {SECONDS} s"
        except BaseException:  # otherwise the server's next answer would be that of this program
            _end()
            raise
        text = output.read_text() if output.exists() else ""
    if code != "0":
        if not ready:
            _end()
        raise AssertionError(f"exit code {code}: {text[-2000:]}")
    return [json.loads(line) for line in text.splitlines()]


def compile_apart(program: str, kernels: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The line that a program prints for each of these kernels, parsed as JSON."""
    return run_apart(program, json.dumps(kernels))


def _end() -> None:
    with contextlib.suppress(OSError):
        _server().kill()
    _server.cache_clear()
