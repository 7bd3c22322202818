"""The README: its examples run, and its commands are those of CI and of the command line."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashspan import attention
from flashspan.bench.measure import record
from flashspan.bench.report import random_page

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), names)
    assert names["q"].grad is not None, "it shows a backward"
    assert "computes float32 on cpu" in capsys.readouterr().out


def test_the_page_has_two_commands_and_ci_runs_the_second() -> None:
    second = "pip install -e '.[test]' && pytest -n 2 --dist loadfile\n"
    commands = blocks("bash")
    assert "pip install -e . && flashspan train\n" in commands
    assert second in commands
    assert "the test command" in TEXT.split(second)[0].splitlines()[-2]
    assert "the test command" in (ROOT / ".ci" / "run").read_text()


def test_the_ring_is_the_example_that_runs() -> None:
    """tests/test_examples.py runs the file with torchrun's launcher."""
    assert blocks("python")[1] in (ROOT / "examples" / "ring_attention.py").read_text(encoding="utf-8")


def test_every_command_named_exists() -> None:
    from flashspan.cli import COMMANDS

    named = set(re.findall(r"(?:`|&& )flashspan ([a-z]+)", TEXT))
    assert named <= set(COMMANDS)


def test_every_link_resolves() -> None:
    missing = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not (ROOT / link).exists()]
    assert not missing


def test_the_names_of_sdpa_are_translated() -> None:
    names = dict(re.findall(r"(\w+) -> (\w+)", TEXT))
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    given = [{"is_causal": True}, {"attn_mask": torch.ones(9, 9).tril(2) > 0}, {"dropout_p": 0.0}]
    assert set(names) == {name for options in given for name in options}
    for theirs in given:
        ours = {names[name]: value for name, value in theirs.items()}
        torch.testing.assert_close(attention(q, k, v, **ours), F.scaled_dot_product_attention(q, k, v, **theirs))
        with pytest.raises(TypeError, match=rf"no argument {next(iter(theirs))}: use {next(iter(ours))}="):
            attention(q, k, v, **theirs)


def tables_of(page: Path) -> list[list[dict[str, str]]]:
    """The rows of each table, by heading."""
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in tables]
    assert all(len(lines) > 7 for lines in cells)
    return [[dict(zip(heading, line, strict=True)) for line in lines] for heading, _, *lines in cells]


def test_16_bit_errors_are_as_large_as_it_says() -> None:
    share = float(re.findall(r"For long sequences .*? about ([\d.]+) of cuDNN's", " ".join(TEXT.split()))[0])
    rows = tables_of(ROOT / "docs" / "benchmarks" / "attention.md")[1]
    timed = [row for row in rows if row["shape"].endswith(("full", "causal"))]  # also measured with cuDNN
    errors = {row["shape"]: float(row["flashspan"]) / float(row["sdpa-cudnn"]) for row in timed}
    assert len(errors) >= 8
    assert all(error <= 1.0 for error in errors.values())
    long = [error for shape, error in errors.items() if "x2048x" not in shape and "x256 " not in shape]
    assert max(long) <= share + 0.02


def test_claimed_speeds_have_recorded_times() -> None:
    """For FlexAttention on every row; for cuDNN and FlashAttention-2 only on the full and causal rows."""
    rows = tables_of(ROOT / "docs" / "benchmarks" / "attention.md")[0]
    text = " ".join(TEXT.split())
    for rival, name in (
        ("sdpa-cudnn", "cuDNN"),
        ("sdpa-flash", "FlashAttention-2"),
        ("flex", "compiled FlexAttention"),
    ):
        cells = {row["shape"]: row[f"vs {rival}"] for row in rows}
        missing = {shape for shape, cell in cells.items() if cell == "-"}
        expected = {shape for shape in cells if not shape.endswith(("full", "causal"))} if rival != "flex" else set()
        assert missing == expected, "say in the README what is timed"
        speeds = [float(cell.removesuffix("x")) for cell in cells.values() if cell != "-"]
        assert f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as {name}" in text


def test_random_shapes_are_as_fast_and_exact_as_it_says() -> None:
    text = " ".join(TEXT.split())
    sentence = (
        r"on \[random shapes\].*? is ([\d.]+) for forward and backward together \((\d+) .*? ([\d.]+) for .*?\((\d+) "
    )
    both, num_both, forward, num_forward = re.findall(sentence, text[text.index("median speedup") :])[0]
    page = (ROOT / "docs" / "benchmarks" / "random.md").read_text(encoding="utf-8")
    medians = re.findall(r"^- ([a-z ]+), (\d+) shapes: the median ratio is ([\d.]+);", page, re.MULTILINE)
    assert medians == [("forward", num_forward, forward), ("forward and backward", num_both, both)]
    rows = [
        row
        for row in random_page.latest(record.read(ROOT / "docs" / "benchmarks" / "random.csv"))
        if row.kind == "forward" and row.error
    ]
    errors = {name: {row.shape: row.error for row in rows if row.impl == name} for name in ("flashspan", "sdpa-cudnn")}
    dense = [shape for shape in errors["sdpa-cudnn"] if shape in errors["flashspan"] and "window" not in shape]
    ratios = [errors["flashspan"][shape] / errors["sdpa-cudnn"][shape] for shape in dense]
    assert len(ratios) > 50
    assert max(ratios) <= float(re.findall(r"at most ([\d.]+) times cuDNN's", text)[0])


def test_training_is_as_fast_and_small_as_it_says() -> None:
    lines = (ROOT / "docs" / "benchmarks" / "trainer.md").read_text(encoding="utf-8").splitlines()
    step = next(line for line in lines if line.startswith("| a training step | 8192 | flashspan |"))
    *_, faster, memory = [cell.strip() for cell in step.strip("|").split("|")]
    text = " ".join(TEXT.split())
    time, share = re.findall(r"takes ([\d.]+) of the time and ([\d.]+) of the memory", text)[0]
    assert float(time) == round(1 / float(faster), 2)
    assert share == memory
    liger = next(line for line in lines if line.startswith("| a training step | 8192 | transformers + Liger + cuDNN |"))
    ours, theirs = (float(line.split("|")[4]) for line in (step, liger))
    assert float(re.findall(r"and ([\d.]+) of the time of transformers with Liger", text)[0]) == round(ours / theirs, 2)
