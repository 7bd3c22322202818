"""The documentation site: its pages exist, their links resolve, the code in tutorials runs, and it builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def test_pages_in_the_navigation_exist() -> None:
    pages = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(pages) > 12
    assert not [page for page in pages if not (DOCS / page).is_file()]


def test_every_link_of_every_page_resolves() -> None:
    missing = []
    for page in PAGES:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s#]+)", text):
            if "://" not in target and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing


def test_every_documented_name_exists_and_every_public_one_is_documented() -> None:
    import importlib

    import flashspan

    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = [name.split(".") for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    for *module, attribute in names:
        assert hasattr(importlib.import_module(".".join(module)), attribute), attribute
    assert {name for *_, name in names} >= set(flashspan.__all__)
    patterns = re.findall(r"members: \[(full, .*)\]", text)[0].split(", ")
    assert {*patterns, "Band", "Rows", "Blocks"} == set(flashspan.masks.__all__)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_runs(page: Path) -> None:
    """All Python blocks of a page, one after another, in one namespace."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_commands_in_tutorials_exist() -> None:
    from flashspan.cli import COMMANDS

    for page in [*TUTORIALS, DOCS / "index.md"]:
        commands = re.findall(
            r"^flashspan (\w+)|&& flashspan (\w+)",
            "".join(CODE.findall(page.read_text(encoding="utf-8"))),
            re.MULTILINE,
        )
        assert {first or second for first, second in commands} <= set(COMMANDS), page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("attention", "context_parallel", "train", "generate", "streaming"):
        assert f">{name}<" in reference or f'.{name}"' in reference, name
    assert "https://" not in re.sub(r'href="[^"]*"|xmlns="[^"]*"', "", reference), "a page fetches from another host"
