"""The README's first command: it prints facts before the first step, and trains a model that writes tales."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashspan.data.prepare import corpus, corpus_tokens
from flashspan.data.tokenizer import CORPUS, load_tokenizer
from flashspan.model import preset
from flashspan.stdout import waiting
from flashspan.train import parse, train
from flashspan.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
"""Characters other than text and line breaks."""


def share_of_words(text: str) -> tuple[float, int]:
    """The share of a text's words that occur in the tales, and its number of words. Case matters."""
    known, words = set(find_words("\n".join(corpus()))), find_words(text)
    return sum(word in known for word in words) / max(1, len(words)), len(words)


def find_words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def test_a_word_that_is_not_in_the_tales_counts_against_a_text() -> None:
    assert share_of_words("The miller and the silver xqzzt.") == (5 / 6, 6)
    assert share_of_words("MILLER mil ler") == (0, 3)
    assert share_of_words('"..."') == (0, 0)
    assert share_of_words(next(corpus()))[0] == 1


def test_the_tokenizer_is_what_its_command_prints() -> None:
    command = [sys.executable, "examples/tales_tokenizer.py", str(CORPUS / "tales.txt")]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(made) == json.loads((CORPUS / "tokenizer.json").read_text(encoding="utf-8"))


def test_the_tokenizer_fits_the_first_model_and_loses_nothing() -> None:
    coder = load_tokenizer("tales")
    assert coder.name == "tales"
    assert coder.vocab_size == preset("tiny").vocab_size
    for text in (next(corpus()), "", "Größe: 3 µm, 龍\n\tend"):
        tokens = coder.encode(text)
        assert coder.decode(tokens) == text
        assert coder.end not in tokens
        assert tokens[0] == coder.encode("")[0]  # a prompt begins like a tale
    tokens = corpus_tokens()[0].tokens
    assert tokens[0] == coder.encode("")[0]
    assert (tokens == coder.end).sum() == pytest.approx(0.9 * len(list(corpus())), abs=10)


@pytest.mark.slow
def test_training_runs_without_stdout(tmp_path: Path) -> None:
    """As with `>&-`, also as `python -m flashspan.train`, which torchrun starts."""
    options = ["--train.steps=1", "--parallel.ranks=1", "--parallel.device=cpu", f"--checkpoint.folder={tmp_path}"]
    command = [sys.executable, "-m", "flashspan.train", *options]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], cwd=ROOT, stderr=subprocess.PIPE, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "step-00000001").is_dir()


def test_the_first_command_prints_the_facts_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flashspan.train.run._start", lambda *_: "done")
    folder = tmp_path / "run"
    config = parse([f"--checkpoint.folder={folder}", "--parallel.device=cpu"])
    assert train(config) == 0
    said = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in said.splitlines()[:8])
    assert facts.keys() == {"model", "devices", "mesh", "context", "data", "steps", "saved", "eval"}
    shape, tokens = config.model.resolve(), corpus_tokens()[0].tokens
    assert facts["model"].startswith(f"{shape.num_parameters / 1e6:.2f} M parameters")
    assert facts["devices"].startswith("4 CPU")
    assert facts["mesh"] == "data 1 x shard 1 x context 4 x tensor 1 = 4 ranks"
    assert {"ring", "zigzag"} <= set(find_words(facts["context"]))
    assert f"{len(tokens):,} tokens" in facts["data"]
    assert "tales" in facts["data"]
    assert facts["steps"].startswith(f"{config.train.steps}, ")
    assert str(folder) in facts["saved"]
    assert not CONTROL.search(said)


def test_waiting_moves_on_a_terminal_and_is_a_plain_line_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for screen, seconds in ((io.StringIO(), 0.0), (Terminal(), 0.5)):
        monkeypatch.setattr(sys, "stdout", screen)
        with waiting("starting"):
            time.sleep(seconds)
        if screen.isatty():
            assert screen.getvalue().count("starting") > 2
        else:
            assert screen.getvalue() == "starting\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_run_gives_a_model_that_writes_tales(tmp_path: Path) -> None:
    """With the README's two commands: at least 95% real words, over seeds 0 to 4."""

    def flashspan(words: list[str]) -> str:
        command = [sys.executable, "-m", "flashspan.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=800)
        assert not CONTROL.search(done.stdout)
        return done.stdout

    said = flashspan(["train", "--parallel.device=cpu"])
    rows = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(held_out) >= 3
    assert held_out == sorted(held_out, reverse=True)
    suggested = re.search(r"flashspan (generate .*)", said)
    assert suggested is not None
    texts = [flashspan([*shlex.split(suggested[1]), f"--seed={seed}"]).rpartition("\n[")[0] for seed in range(5)]
    share, count = share_of_words("\n".join(texts))
    print(f"validation loss {held_out}, {share:.1%} of {count} words")
    assert count > 300
    assert share >= 0.95
