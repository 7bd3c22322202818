"""The benchmark of the model runs on the CPU with a tiny model, and compares what its rows state."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from flashspan.bench.measure import record
from flashspan.bench.report import training as trainer
from flashspan.bench.suites.plain_llama import PlainLlama, load_baseline
from flashspan.bench.suites.training import TINY, bench_training, random_weights
from flashspan.model import save_state


@pytest.mark.slow
def test_every_part_is_measured_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # C++ would take minutes
    assert bench_training(("train8k", "generate"), file=tmp_path / "trainer.csv", tiny=True) == 0
    rows = {(row.kind, row.impl): row for row in record.read(tmp_path / "trainer.csv")}
    theirs = next(impl for _, impl in rows if "SDPA" in impl)
    ours = "flashspan"
    assert set(rows) == {
        *(("step", name) for name in (theirs, ours, "flashspan, mixed")),
        *((kind, name) for kind in ("prefill", "decode") for name in (theirs, ours)),
    }
    assert all(row.p50_ms > 0 for row in rows.values())
    # The same loss and the same logits, as near as bfloat16 comes.
    assert rows["step", ours].error < 1e-3
    assert rows["prefill", ours].error < 3e-2
    said = capsys.readouterr().out
    assert "x as fast (target 1.25:" in said
    assert "decode" in said


def test_what_is_tiny_stays_out_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "PATH", tmp_path / "trainer.csv")
    assert bench_training(("generate",), tiny=True) == 0
    assert not list(tmp_path.iterdir())


def test_the_page_is_made_of_the_rows() -> None:
    path = Path(__file__).parents[3] / trainer.PATH
    page = path.with_suffix(".md").read_text()
    assert page == trainer.markdown(record.read(path))
    assert page.count("| a training step |") >= 5  # two of 32k, three of 8k


def test_the_plain_baseline_is_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_state(random_weights(TINY.shape, torch.device("cpu")), TINY.shape, tmp_path)
    theirs, plain = load_baseline(tmp_path, torch.device("cpu")), PlainLlama(tmp_path)
    tokens = torch.randint(TINY.shape.vocab_size, (1, 21), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        (want, their_cache), (got, our_cache) = theirs.extend(tokens, None), plain.extend(tokens, None)
        assert (got - want).norm() <= 2e-2 * want.norm()
        want, got = theirs.extend(tokens[:, :1], their_cache)[0], plain.extend(tokens[:, :1], our_cache)[0]
    assert (got - want).norm() <= 2e-2 * want.norm()
