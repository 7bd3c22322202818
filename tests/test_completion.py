"""Completion with the Tab key: what each shell offers at the end of a line."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flashspan.cli import BENCHES, COMMANDS, main
from flashspan.context.strategy import STRATEGIES

BASH = """
source {script}
COMP_WORDS=({line}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
_flashspan
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ :; }}
compadd() {{ shift; print -rl -- ${{(M)@:#${{words[CURRENT]}}*}} }}
_files() {{ :; }}
source {script}
words=({line}) CURRENT=${{#words}}
_flashspan
"""
FISH = """
source {script}
cd {empty}
complete -C (string join -- ' ' {line}) | string replace -r "\\t.*" ""
"""
SHELLS = {"bash": ["bash", "--norc", "-c", BASH], "zsh": ["zsh", "-f", "-c", ZSH], "fish": ["fish", "-c", FISH]}
LINES = {
    "": set(COMMANDS),
    "pl": {"plan"},
    "--vers": {"--version"},
    "--completion ": {"bash", "zsh", "fish", "tcsh"},
    "bench ": set(BENCHES),
    "bench con": {"console", "context"},
    "bench context --qui": {"--quick"},
    "plan dr": {"draw"},
    "plan draw --lay": {"--layout"},
    "check --ranks 4 --strategy ": set(STRATEGIES),
    "check --pre": {"--preflight"},
    "train --parallel.strategy h": {"helper", "hybrid"},
    "train --dry": {"--dry-run"},
    "generate ": set(),  # the shell offers files
    "generate runs/ti": set(),
    "prepare --folder ": set(),
}


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def test_a_shell_offers_what_may_come_next(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", shell]) == 0
    script, empty = tmp_path / "script", tmp_path / "empty"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    empty.mkdir()
    *command, code = SHELLS[shell]
    for line, expected in LINES.items():
        words = " ".join(f"'{word}'" for word in f"flashspan {line}".split(" "))
        run = [*command, code.format(script=script, line=words, empty=empty)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=20, check=False)
        assert not done.stderr
        assert set(done.stdout.split()) == expected, line


def test_tcsh_has_a_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("complete flashspan ")
    assert all(f" {name} " in f" {text.partition('p/1/(')[2].replace(')', ' ')} " for name in COMMANDS)
