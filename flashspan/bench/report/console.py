"""Real output in the documentation: a ```console block has `$ flashspan ...` lines, each followed by its output.

flashspan bench console docs/measuring.md docs/origins/*.md     # run the commands again and write what they print
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
WIDTH = "110"


def commands(text: str) -> list[str]:
    """The commands of a page, in order."""
    return [line[2:] for block in BLOCK.findall(text) for line in block.splitlines() if line.startswith("$ ")]


def run(command: str) -> str:
    """The output of a `flashspan` command; RuntimeError if it fails."""
    words = shlex.split(command)
    if words[0] != "flashspan":
        raise ValueError(f"a console block runs flashspan commands only: got {command!r}")
    env = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"}
    code = [sys.executable, "-m", "flashspan.cli", *words[1:]]
    done = subprocess.run(code, capture_output=True, text=True, env=env, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def refresh(text: str) -> str:
    """The page with the output of every block's commands, run now."""

    def rerun(match: re.Match[str]) -> str:
        lines = [line for line in match[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{line}\n{run(line[2:])}\n" for line in lines) + "```"

    return BLOCK.sub(rerun, text)


def bench_console(pages: Sequence[Path]) -> int:
    """Run the commands in documentation pages again and write what they print.

    Args:
        pages: Markdown files with ```console blocks.
    """
    for page in pages:
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"refreshed {page}")
    return 0
