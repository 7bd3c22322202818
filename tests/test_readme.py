"""The README is a promise: its examples run, its commands are the ones that CI and the command line have."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashspan import attention

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), names)
    assert all(names[x].grad is not None for x in "qkv"), "it shows a backward"
    assert "serves float32 on cpu" in capsys.readouterr().out


def test_two_commands_open_the_readme_and_ci_runs_the_second() -> None:
    first, second = blocks("bash")[:2]
    assert first.startswith("pip install -e . && flashspan ")
    assert second == "pip install -e '.[test]' && pytest -n 2 --dist loadfile\n"
    assert "the test command" in TEXT.split(second)[0].splitlines()[-2]
    assert "the test command" in (ROOT / ".ci" / "run").read_text()


def test_every_command_named_exists() -> None:
    from flashspan.cli import COMMANDS

    named = set(re.findall(r"`flashspan (\w+)", TEXT)) | set(re.findall(r"&& flashspan (\w+)", TEXT))
    assert named <= set(COMMANDS)


def test_every_link_leads_somewhere() -> None:
    missing = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not (ROOT / link).exists()]
    assert not missing


def test_the_names_of_sdpa_are_translated() -> None:
    names = dict(re.findall(r"(\w+) -> (\w+)", blocks("python")[0]))
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    given = [{"is_causal": True}, {"attn_mask": torch.ones(9, 9).tril(2) > 0}, {"dropout_p": 0.0}]
    assert set(names) == {name for options in given for name in options}
    for theirs in given:
        ours = {names[name]: value for name, value in theirs.items()}
        torch.testing.assert_close(attention(q, k, v, **ours), F.scaled_dot_product_attention(q, k, v, **theirs))


def tables_of(page: Path) -> list[list[dict[str, str]]]:
    """Of each table its rows, by heading."""
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in tables]
    assert all(len(lines) > 7 for lines in cells)
    return [[dict(zip(heading, line, strict=True)) for line in lines] for heading, _, *lines in cells]


def test_16_bit_errors_are_as_large_as_it_says() -> None:
    assert "16-bit errors are PyTorch's own, or smaller" in TEXT
    assert "a long sequence's output has three quarters of cuDNN's error" in " ".join(TEXT.split())
    rows = tables_of(ROOT / "docs" / "benchmarks" / "attention.md")[1]
    timed = [row for row in rows if row["shape"].endswith(("full", "causal"))]  # by cuDNN too
    errors = {row["shape"]: float(row["flashspan"]) / float(row["sdpa-cudnn"]) for row in timed}
    assert len(errors) >= 8
    assert all(error <= 1.0 for error in errors.values())
    long = [error for shape, error in errors.items() if "x2048x" not in shape and "x256 " not in shape]
    assert max(long) <= 0.77


def test_what_is_called_fast_has_a_time_that_says_so() -> None:
    """FlexAttention on every row; cuDNN and FlashAttention-2 on the full and causal ones, and on no other."""
    for row in tables_of(ROOT / "docs" / "benchmarks" / "attention.md")[0]:
        rivals = ["vs flex"]
        if row["shape"].endswith(("full", "causal")):
            rivals += ["vs sdpa-cudnn", "vs sdpa-flash"]
        else:
            assert row["vs sdpa-cudnn"] == row["vs sdpa-flash"] == "-", "say in the README what is timed"
        assert all(float(row[rival].removesuffix("x")) > 1 for rival in rivals), row["shape"]
