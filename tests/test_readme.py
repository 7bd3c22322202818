"""The README is a promise: its examples run, its commands are the ones that CI and the command line have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert "serves float32 on cpu" in capsys.readouterr().out


def test_two_commands_open_the_readme_and_ci_runs_the_second() -> None:
    first, second = blocks("bash")[:2]
    assert first.startswith("pip install -e . && flashspan ")
    assert second == "pip install -e '.[test]' && pytest -n 2 --dist loadfile\n"
    assert "the test command" in TEXT.split(second)[0].splitlines()[-2]
    assert "the test command" in (ROOT / ".ci" / "run").read_text()


def test_every_command_named_exists() -> None:
    from flashspan.cli import commands

    named = set(re.findall(r"`flashspan (\w+)", TEXT)) | set(re.findall(r"&& flashspan (\w+)", TEXT))
    assert named <= set(commands())


def test_every_link_leads_somewhere() -> None:
    missing = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not (ROOT / link).exists()]
    assert not missing
