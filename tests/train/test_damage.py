"""Damaged checkpoints and data are reported by name, and a run loses no state because of them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint.writer import Writer
from flashspan.data.samples import Samples
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.data.tokens import HEADER_BYTES, open_tokens, write_tokens
from flashspan.launch import RankError, raise_user_error
from flashspan.train import TrainConfig
from flashspan.train.dataset import open_samples
from flashspan.train.loop import DONE
from flashspan.train.metrics import read_metrics
from flashspan.train.run import check, run_rank
from tests.train.cases import ConfigOf, OnRanks, damage_one

TWO_CHECKPOINTS = ("--checkpoint.every=2", "--train.steps=4", "--parallel.context=1")


@pytest.fixture(scope="module")
def finished() -> list[Path]:
    """The folder of a finished run with two checkpoints, filled by the first test that needs it."""
    return []


def copy_run(on_ranks: OnRanks, config: TrainConfig, finished: list[Path]) -> list[Path]:
    """Copy the finished run to the config's folder, and return its checkpoints."""
    folder = Path(config.checkpoint.folder)
    if not finished:
        on_ranks(1, run_rank, config)
        finished.append(Path(shutil.copytree(folder, folder.with_name("finished"))))
    else:
        shutil.copytree(finished[0], folder)
    return checkpoint.checkpoints(folder)


@pytest.mark.parametrize("how", ["flipped", "torn", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    on_ranks: OnRanks, config_of: ConfigOf, finished: list[Path], how: str
) -> None:
    config = config_of(*TWO_CHECKPOINTS)
    older, newer = copy_run(on_ranks, config, finished)
    damage_one(newer, how)
    said: list[str] = []
    assert checkpoint.newest(config.checkpoint.folder, say=said.append) == older
    assert len(said) == 1
    assert f"{newer} is damaged" in said[0]
    assert "using the one before it" in said[0]
    shutil.rmtree(older)
    assert checkpoint.newest(config.checkpoint.folder, say=said.append) is None
    assert "there is none before it" in said[1]


def test_a_checkpoint_that_cannot_be_written_leaves_the_others(
    tmp_path: Path, on_ranks: OnRanks, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("--train.steps=2", "--parallel.context=1")
    on_ranks(1, run_rank, config)
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    state = checkpoint.read(path)
    later = checkpoint.State(3, state.config, state.model, state.optimizer, state.order, state.extra)
    said: list[str] = []
    writer = Writer(config.checkpoint.folder, keep=1, say=said.append)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        writer.submit(later)
        assert not writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        writer.submit(later)
        assert not writer.wait()
    assert "No space left on device" in said[0]
    assert re.search(r"a checkpoint takes [1-9][\d.]* MB and .* has 0\.0 MB", said[1])
    assert [p.name for p in Path(config.checkpoint.folder).glob("*step*")] == ["step-00000002"]
    writer.submit(later)
    assert writer.wait()
    assert [p.name for p in Path(config.checkpoint.folder).glob("*step*")] == ["step-00000003"]


def spoil(file: Path, where: int) -> None:
    """Write a number that is not a token into a token file."""
    with file.open("r+b") as stream:
        stream.seek(HEADER_BYTES + 2 * where)
        stream.write((60000).to_bytes(2, "little"))


def test_damaged_training_data_ends_a_run_with_its_state_saved(
    on_ranks: OnRanks, config_of: ConfigOf, corpus: Path, tmp_path: Path
) -> None:
    file = tmp_path / "data" / "train.bin"
    file.parent.mkdir()
    shutil.copy(corpus, file)
    config = config_of("--parallel.data=2", "--parallel.context=1", f"--data.train={file}", "--checkpoint.every=0")
    spoil(file, Samples(open_tokens(file), 63, config.train.seed).window(3 * 4 + 2))  # of the fourth step, on one rank
    with pytest.raises(RankError) as told:
        on_ranks(2, run_rank, config)
    assert "rank 0" in str(told.value)  # a rank that reads the others' tokens gets the same error
    with pytest.raises(ValueError, match=r"holds number 60000; .* ended before step 4, with its state saved"):
        raise_user_error(told.value)
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).step == 3


def test_damaged_validation_data_is_refused_before_the_first_step(
    config_of: ConfigOf, corpus: Path, tmp_path: Path
) -> None:
    file = tmp_path / "val.bin"
    shutil.copy(corpus.with_name("val.bin"), file)
    spoil(file, Samples(open_tokens(file), 63, TrainConfig().train.seed).window(5))
    with pytest.raises(ValueError, match=r"val\.bin is damaged: .* holds number 60000"):
        check(config_of(f"--data.validation={file}", "--train.evaluate_every=2", "--parallel.context=1"), 1)


def test_validation_data_of_another_tokenizer_is_refused(config_of: ConfigOf, tmp_path: Path) -> None:
    coder = ByteTokenizer()
    coder.name, coder.vocab_size = "words/tokenizer.json", 300
    with write_tokens(tmp_path / "val.bin", coder) as writer:
        writer.add(range(200))
    options = (f"--data.validation={tmp_path / 'val.bin'}", "--model.vocab_size=300")
    with pytest.raises(ValueError, match=r"one tokenizer: .*257 tokens \(bytes\), .* 300 \(words/tokenizer\.json\)"):
        open_samples(config_of(*options))


def test_steps_without_targets_have_loss_0(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        with write_tokens(tmp_path / name, ByteTokenizer()) as writer:
            writer.add([ByteTokenizer.end] * 500)
    config = config_of(f"--data.train={tmp_path}", "--data.documents", "--train.steps=1", "--train.evaluate_every=1")
    assert on_ranks(1, run_rank, config) == [DONE]
    rows = read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")
    assert [rows[0]["loss"], rows[1]["validation_loss"]] == [0.0, 0.0]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(
    on_ranks: OnRanks, config_of: ConfigOf, finished: list[Path]
) -> None:
    config = config_of(*TWO_CHECKPOINTS)
    older, newer = copy_run(on_ranks, config, finished)
    damage_one(older, "flipped")
    damage_one(newer, "gone")
    metrics = (Path(config.checkpoint.folder) / "metrics.jsonl").read_bytes()
    with pytest.raises(RankError) as caught:
        on_ranks(1, run_rank, config)
    for words in (
        "every checkpoint in",
        "step-00000002: the hash of optimizer.safetensors does not match",
        "step-00000004: optimizer.safetensors is missing",
        "--checkpoint.resume false",
    ):
        assert words in str(caught.value)
    assert (Path(config.checkpoint.folder) / "metrics.jsonl").read_bytes() == metrics
    assert checkpoint.checkpoints(config.checkpoint.folder) == [older, newer]
    shutil.rmtree(newer)
    newer.write_text("no folder at all")
    anew = replace(config, checkpoint=replace(config.checkpoint, resume=False))
    assert on_ranks(1, run_rank, anew) == [DONE]
    assert newer.is_dir()
