"""Pages that show real output: their commands exist, and each has its output below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashspan.bench import console
from flashspan.cli import bench_commands, commands

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


def test_a_block_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="flashspan commands only"):
        console.run("rm -r x")
    monkeypatch.setattr(console, "run", lambda command: f"<{command}>")
    old = "a\n```console\n$ flashspan plan tiny\nold\n$ flashspan report\nold\n```\nb\n"
    new = (
        "a\n```console\n$ flashspan plan tiny\n<flashspan plan tiny>\n$ flashspan report\n<flashspan report>\n```\nb\n"
    )
    assert console.refresh(old) == new
