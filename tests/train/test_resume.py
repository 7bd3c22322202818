"""A resumed run ends with the bits of a run that was not stopped. A checkpoint of another run is refused."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashspan.checkpoint import format as checkpoint
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.data.tokens import write_tokens
from flashspan.launch import RankError
from flashspan.manifest import write_manifest
from flashspan.train import TrainConfig, loop, train
from flashspan.train.config import AttentionSection
from flashspan.train.loop import DONE, Trainer
from flashspan.train.metrics import read_metrics
from flashspan.train.resume import refuse_folder
from flashspan.train.run import run_rank
from tests.train.cases import ConfigOf, OnRanks, assert_same_bits, final_state

LAYOUTS = {
    "2 context": (2, ["--parallel.context=2"]),
    "2 data x 2 context": (4, ["--parallel.data=2", "--parallel.context=2", "--optimizer.sharded=true"]),
    "2 fully sharded": (2, ["--parallel.shard=2", "--parallel.context=1"]),
    "2 context, 16-bit weights": (
        2,
        ["--parallel.context=2", "--train.precision=bfloat16", "--train.weights=bfloat16"],
    ),
    "2 tensor": (2, ["--parallel.tensor=2", "--parallel.context=1"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_ends_with_the_same_bits(on_ranks: OnRanks, config_of: ConfigOf, name: str) -> None:
    num_ranks, options = LAYOUTS[name]
    config = config_of("--train.steps=4", "--checkpoint.every=2", "--checkpoint.keep=9", *options)
    assert on_ranks(num_ranks, run_rank, config) == [DONE] * num_ranks
    want = final_state(config)
    shutil.rmtree(checkpoint.checkpoints(config.checkpoint.folder)[-1])
    on_ranks(num_ranks, run_rank, config)
    assert_same_bits(final_state(config), want)
    steps = [row["step"] for row in read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]


CONFIGS = [(1, []), *(layout for name, layout in LAYOUTS.items() if "16-bit" not in name)]
BOTH = (4, ["--parallel.shard=2", "--parallel.tensor=2", "--parallel.context=1"])


@pytest.mark.parametrize("configs", [CONFIGS, pytest.param([BOTH], marks=pytest.mark.slow)], ids=["each", "two axes"])
def test_a_run_resumes_under_another_parallelism_config(
    on_ranks: OnRanks, config_of: ConfigOf, configs: list[tuple[int, list[str]]]
) -> None:
    steps = ["--train.steps=4", "--checkpoint.every=2", "--checkpoint.keep=9"]
    config = config_of(*steps, "--parallel.context=2")
    on_ranks(2, run_rank, config)
    want = final_state(config)
    folder = Path(config.checkpoint.folder)
    for num_ranks, options in configs:
        shutil.rmtree(checkpoint.checkpoints(folder)[-1])
        on_ranks(num_ranks, run_rank, config_of(*steps, *options))
        got = final_state(config)
        for key, value in want.items():
            assert (got[key] - value).norm() <= 2e-4 * value.norm().clamp(min=1e-6), (key, options)


def resume(config: TrainConfig) -> tuple[int, list[str]]:
    """The step at which a rank resumes, and the memory maps of the checkpoint's files that remain."""
    trainer = Trainer(config)
    with contextlib.ExitStack() as held:
        trainer._resume([], held)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return trainer.step, [line for line in maps if config.checkpoint.folder in line]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resumed_run_keeps_no_file_of_the_checkpoint_open(
    on_ranks: OnRanks, config_of: ConfigOf, num_ranks: int
) -> None:
    """Otherwise the disk space is not freed when the checkpoint is removed."""
    config = config_of("--train.steps=1", f"--parallel.shard={num_ranks}", "--parallel.context=1")
    on_ranks(num_ranks, run_rank, config)
    assert on_ranks(num_ranks, resume, config) == [(1, [])] * num_ranks


def test_moments_of_another_step_are_refused(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--checkpoint.every=2", "--train.steps=4", "--parallel.context=1")
    on_ranks(1, run_rank, config)
    older, newer = checkpoint.checkpoints(config.checkpoint.folder)
    shutil.copy(older / "optimizer.safetensors", newer)
    write_manifest(newer, [path.name for path in newer.iterdir() if path.name != "manifest.json"])
    with pytest.raises(RankError, match=r"has made 2 steps and its state\.json says 4"):
        on_ranks(1, resume, config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--train.seed=5", "other samples or another attention .seed was 0, is 5"),
        ("--data.sequence=31", "sequence was 63, is 31"),
        (
            "--model.num_layers=1",
            r"a checkpoint of another model \(num_layers was 2, is 1\): restore its sizes, choose",
        ),
        ("--attention.pattern=window --attention.window=9", r"attention was causal, is window\(window=9\)"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(on_ranks: OnRanks, config_of: ConfigOf, change: str, says: str) -> None:
    on_ranks(1, run_rank, config_of("--train.steps=1", "--parallel.context=1"))
    with pytest.raises(RankError, match=says):
        on_ranks(1, run_rank, config_of("--train.steps=1", "--parallel.context=1", *change.split()))


def test_a_folder_without_a_readable_checkpoint_is_refused_before_ranks_start(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("--parallel.context=1", "--train.steps=1")
    folder = Path(config.checkpoint.folder)
    (folder / "step-00000009").mkdir(parents=True)
    (folder / "step-00000002").write_text("no folder at all")
    monkeypatch.setattr("flashspan.train.run._start", lambda *args: pytest.fail("ranks were started"))
    says = r"every checkpoint in .* \(step-00000002: .*; step-00000009: .*manifest\.json is missing\): restore"
    with pytest.raises(ValueError, match=says):
        train(config)
    assert sorted(path.name for path in folder.rglob("*")) == ["step-00000002", "step-00000009"]


def test_a_checkpoint_before_a_damaged_one_is_refused_or_left_to_the_ranks(
    on_ranks: OnRanks, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--train.steps=1", "--parallel.context=1"]
    on_ranks(1, run_rank, config_of(*options))
    (Path(config_of(*options).checkpoint.folder) / "step-00000009").mkdir()
    with pytest.raises(ValueError, match=r"step-00000001 is of a run with other samples .* \(seed was 0, is 5\)"):
        refuse_folder(config_of(*options, "--train.seed=5"))
    hashed: list[Path] = []
    monkeypatch.setattr("flashspan.manifest.hash_file", hashed.append)
    refuse_folder(config_of(*options))
    assert not hashed


def notes_of_resuming(config: TrainConfig) -> list[str]:
    notes: list[str] = []
    with contextlib.ExitStack() as held:
        Trainer(config)._resume(notes, held)
    return notes


def test_a_longer_run_reports_how_its_learning_rate_changes(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--train.steps=2", "--parallel.context=1", "--optimizer.warmup=0"]
    config = config_of(*options)
    on_ranks(1, run_rank, config)
    longer = config_of(*options, "--train.steps=5", "--optimizer.lr=1e-3")
    (notes,) = on_ranks(1, notes_of_resuming, longer)
    assert notes[1:] == ["train.steps changed from 2 to 5, and so the learning rate from 1.0e-04 to 5.5e-04"]
    rising = config_of(*options, "--train.steps=5", "--optimizer.warmup=4")  # the rate depends only on the step
    (notes,) = on_ranks(1, notes_of_resuming, rising)
    assert len(notes) == 1
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    state = checkpoint.read(path)
    shutil.rmtree(path)
    moments = {name: torch.ones_like(x) if name.startswith("step/") else x for name, x in state.optimizer.items()}
    checkpoint.write(config.checkpoint.folder, replace(state, step=1, optimizer=moments))
    (notes,) = on_ranks(1, notes_of_resuming, config)
    assert len(notes) == 1  # the run has its original length


def test_a_checkpoint_without_an_attention_pattern_is_causal(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--train.steps=1", "--parallel.context=1")
    on_ranks(1, run_rank, config)
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    state = checkpoint.read(path)
    order = {key: value for key, value in state.order.items() if key != "attention"}
    checkpoint.write(config.checkpoint.folder, replace(state, order=order))
    assert on_ranks(1, run_rank, config) == [DONE]
    with pytest.raises(RankError, match="attention was causal, is window"):
        on_ranks(1, run_rank, replace(config, attention=AttentionSection("window", window=9)))


def test_an_evaluation_lost_to_a_kill_is_made_after_resuming(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--parallel.context=1", "--train.steps=2", "--train.evaluate_every=9")
    on_ranks(1, run_rank, config)
    file = Path(config.checkpoint.folder) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert "validation_loss" in lines[-1]
    file.write_text("".join(lines[:-1]))
    on_ranks(1, run_rank, config)
    assert file.read_text().splitlines(keepends=True) == lines
    on_ranks(1, run_rank, config)
    assert file.read_text().splitlines(keepends=True) == lines


@pytest.mark.parametrize(("before", "after"), [("float16", "float32"), ("float32", "float16")])
def test_a_run_resumes_in_another_precision(on_ranks: OnRanks, config_of: ConfigOf, before: str, after: str) -> None:
    on_ranks(1, run_rank, config_of("--parallel.context=1", "--train.steps=1", f"--train.precision={before}"))
    config = config_of("--parallel.context=1", "--train.steps=2", f"--train.precision={after}")
    assert on_ranks(1, run_rank, config) == [DONE]
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).extra["scale"] == (loop.FIRST_SCALE if after == "float16" else 1.0)


def test_other_data_of_the_same_length_is_refused(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path) -> None:
    def data(name: str, shift: int) -> str:
        with write_tokens(tmp_path / name / "train.bin", ByteTokenizer()) as writer:
            writer.add([(i * i + shift) % 251 for i in range(5000)])
        return f"--data.train={tmp_path / name}"

    one, other = data("one", 0), data("other", 1)
    options = ["--parallel.context=1", "--train.steps=1"]
    on_ranks(1, run_rank, config_of(*options, one))
    with pytest.raises(RankError, match=r"other samples or another attention \(data was"):
        on_ranks(1, run_rank, config_of(*options, other))
    shutil.move(tmp_path / "one", tmp_path / "moved")
    config = config_of(*options, f"--data.train={tmp_path / 'moved'}")
    assert on_ranks(1, run_rank, config) == [DONE]
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    state = checkpoint.read(path)
    order = {key: value for key, value in state.order.items() if key not in ("data", "tokenizer")}
    checkpoint.write(config.checkpoint.folder, replace(state, order=order))
    assert on_ranks(1, run_rank, config) == [DONE]  # a checkpoint of a version without fingerprints
