"""Pages that show real output: their commands exist, and each has its output below it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flashspan.bench import console
from flashspan.cli import bench_commands, commands, main

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = [DOCS / "measuring.md", *sorted((DOCS / "asked").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_named_exists_and_shown_ones_have_output(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for first, second in re.findall(r"flashspan (\w+)(?: ([a-z]+))?", text):
        assert first in commands()
        if first == "bench" and second:
            assert second in bench_commands()
    assert console.commands(text)
    for block in console.BLOCK.findall(text):
        parts = re.split(r"^\$ .*\n", block, flags=re.MULTILINE)
        assert not parts[0]
        assert all(part.strip() for part in parts[1:]), f"{page}: run python -m flashspan.bench.console {page}"
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / link).exists(), link


PLANS = [
    (page, *found)
    for page in PAGES
    for block in console.BLOCK.findall(page.read_text(encoding="utf-8"))
    for found in re.findall(r"^\$ (flashspan plan .*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.mark.parametrize(("page", "command", "shown"), PLANS, ids=[page.stem for page, *_ in PLANS])
def test_plans_are_what_the_planner_says_today(
    page: Path, command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", console.WIDTH)
    assert main(shlex.split(command)[1:]) == 0
    said = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert said == shown, f"run python -m flashspan.bench.console {page}"


def test_a_block_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="flashspan commands only"):
        console.run("rm -r x")
    monkeypatch.setattr(console, "run", lambda command: f"<{command}>")
    old = "a\n```console\n$ flashspan plan tiny\nold\n$ flashspan report\nold\n```\nb\n"
    new = (
        "a\n```console\n$ flashspan plan tiny\n<flashspan plan tiny>\n$ flashspan report\n<flashspan report>\n```\nb\n"
    )
    assert console.refresh(old) == new
