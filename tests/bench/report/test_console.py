"""Pages that show real output: their commands exist, and each has its output below it."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan import attention, parallel
from flashspan.bench.measure import record
from flashspan.bench.report import console
from flashspan.cli import BENCHES, COMMANDS, main
from flashspan.model import Llama

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / "measuring.md", *sorted((DOCS / "origins").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_named_exists_and_shown_ones_have_output(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    named = re.findall(r"flashspan (\w+)(?: ([a-z-]+))?", code)
    assert named
    for first, second in named:
        assert first in COMMANDS
        if first == "bench" and second:
            assert second in BENCHES
    assert console.commands(text)
    for block in console.BLOCK.findall(text):
        parts = re.split(r"^\$ .*\n", block, flags=re.MULTILINE)
        assert not parts[0]
        assert all(part.strip() for part in parts[1:]), f"{page}: run flashspan bench console {page}"
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
    assert said == shown, f"run flashspan bench console {page}"


def test_every_page_of_what_was_asked_can_be_found() -> None:
    text = (DOCS / "measuring.md").read_text(encoding="utf-8")
    assert all(f"](origins/{page.name})" in text for page in (DOCS / "origins").glob("*.md"))


def run_the_model_of(code: str) -> float:
    """The difference between the logits that a block of Python computes on this rank and those of one device."""
    tokens = torch.arange(50).unsqueeze(0)
    names: dict[str, Any] = {"group": dist.group.WORLD, "tokens": tokens}
    with torch.no_grad():
        exec(code, names)
        one = Llama(names["model"].config, attention=attention)
        one.load_state_dict(names["model"].state_dict())
        wanted = names["attend"].shard(one.logits(one(tokens)), 1)
    assert names["logits"].shape == wanted.shape
    return float((names["logits"] - wanted).abs().max())


def test_the_model_of_a_page_is_that_of_one_device(on_ranks: Callable[..., list[Any]]) -> None:
    text = (DOCS / "origins" / "ring-attention-llama3.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The same weights on both ranks: the page does not initialise them.
    code = code.replace("hidden = ", "model.initialize(0)\nhidden = ", 1)
    assert max(on_ranks(2, run_the_model_of, code)) <= 1e-5


def test_blocks_of_the_parallel_page_import_what_they_use() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "parallel.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        nodes = list(ast.walk(ast.parse(block)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)} & {*parallel.__all__, "torch"}
        named = [alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        assert used == set(named)


def test_the_sparse_page_names_the_rows_there_are() -> None:
    rows = (DOCS / "benchmarks" / "sparse.md").read_text(encoding="utf-8")
    text = (DOCS / "sparse.md").read_text(encoding="utf-8").split("## Measured")[1]
    for name, pattern in (("window", r"x(\d+)x128 window 1024 "), ("sweep", r"x(\d+)x128 (?:full|random) ")):
        lengths = sorted(map(int, re.findall(pattern, rows)))
        said = re.search(rf"^- .*`{name}`.*?(\d+) to (\d+) tokens", text, re.MULTILINE)
        assert said is not None
        assert (int(said[1]), int(said[2])) == (lengths[0], lengths[-1])


def test_the_compare_mode_is_shown_as_it_was_measured() -> None:
    text = (DOCS / "origins" / "ring-attention-llama3.md").read_text(encoding="utf-8")
    measured = record.newest(record.read(DOCS / "benchmarks" / "context.jsonl"))
    rows = [row for row in measured if row.kind == "forward+backward" and row.more["scaling"] == "strong"]
    (one,) = (row for row in rows if row.ranks == 1)
    assert len(rows) == 7
    for row in rows:
        more = row.more
        cells = [row.impl, f"{row.ranks}", f"{row.p50_ms:,.0f}", f"{more['tokens_per_second']:,.0f}"]
        cells += [f"{one.p50_ms / row.p50_ms:.2f}x", f"{more['mfu']:.0%}", f"{more['product_share']:.0%}"]
        cells += [f"{more['wire_to_computing']:.2f}", f"{row.peak_mib:,.0f}"]
        assert f"| {' | '.join(cells)} |" in text


def test_a_block_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="flashspan commands only"):
        console.run("rm -r x")
    monkeypatch.setattr(console, "run", lambda command: f"<{command}>")
    old = "a\n```console\n$ flashspan plan tiny\nold\n$ flashspan report\nold\n```\nb\n"
    new = (
        "a\n```console\n$ flashspan plan tiny\n<flashspan plan tiny>\n$ flashspan report\n<flashspan report>\n```\nb\n"
    )
    assert console.refresh(old) == new
