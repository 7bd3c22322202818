"""A run that was stopped, killed or damaged goes on, and ends with the bits of one that was not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from flashspan import agreement
from flashspan.attention import attention
from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint import writer as checkpoint_writer
from flashspan.checkpoint.writer import Writer
from flashspan.data.samples import Samples
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.data.tokens import HEADER_BYTES, open_tokens, write_tokens
from flashspan.launch import RankError, Ranks, raise_user_error
from flashspan.lock import LOCK, locked_folder
from flashspan.manifest import write_manifest
from flashspan.model import Llama, preset, save_llama
from flashspan.train import TrainConfig, loop, silent_ranks
from flashspan.train.config import AttentionSection
from flashspan.train.dataset import open_samples
from flashspan.train.loop import DONE, NOT_FINITE, NOT_SAVED, STOPPED, Trainer
from flashspan.train.metrics import read_metrics
from flashspan.train.run import check, run_rank

OnRanks = Callable[..., list[Any]]
ConfigOf = Callable[..., TrainConfig]
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


def weights(config: TrainConfig) -> dict[str, Tensor]:
    """The weights and the optimizer's state of the newest checkpoint."""
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    state = checkpoint.read(path)
    assert state.step == config.train.steps
    return {**state.model, **state.optimizer}


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_ends_with_the_same_bits(on_ranks: OnRanks, config_of: ConfigOf, name: str) -> None:
    num_ranks, options = LAYOUTS[name]
    config = config_of("--checkpoint.every=3", "--checkpoint.keep=9", *options)
    assert on_ranks(num_ranks, run_rank, config) == [DONE] * num_ranks
    want = weights(config)
    shutil.rmtree(checkpoint.checkpoints(config.checkpoint.folder)[-1])
    on_ranks(num_ranks, run_rank, config)
    assert_same_bits(weights(config), want)
    steps = [row["step"] for row in read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


MIXTURES = [(1, []), *(layout for name, layout in LAYOUTS.items() if "16-bit" not in name)]
BOTH = (4, ["--parallel.shard=2", "--parallel.tensor=2", "--parallel.context=1"])


@pytest.mark.parametrize("mixtures", [MIXTURES, pytest.param([BOTH], marks=pytest.mark.slow)], ids=["each", "two axes"])
def test_a_run_resumes_on_another_mixture_with_the_same_data(
    on_ranks: OnRanks, config_of: ConfigOf, mixtures: list[tuple[int, list[str]]]
) -> None:
    config = config_of("--checkpoint.every=3", "--checkpoint.keep=9", "--parallel.context=2")
    on_ranks(2, run_rank, config)
    want = weights(config)
    folder = Path(config.checkpoint.folder)
    for num_ranks, options in mixtures:
        shutil.rmtree(checkpoint.checkpoints(folder)[-1])
        on_ranks(num_ranks, run_rank, config_of("--checkpoint.every=3", "--checkpoint.keep=9", *options))
        got = weights(config)
        for key, value in want.items():
            assert (got[key] - value).norm() <= 2e-4 * value.norm().clamp(min=1e-6), (key, options)


def resume(config: TrainConfig) -> tuple[int, list[str]]:
    """The step at which a rank goes on, and what it holds of the checkpoint's files."""
    trainer = Trainer(config)
    with contextlib.ExitStack() as held:
        trainer._resume([], held)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return trainer.step, [line for line in maps if config.checkpoint.folder in line]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resumed_run_lets_go_of_the_checkpoint(on_ranks: OnRanks, config_of: ConfigOf, num_ranks: int) -> None:
    """Or the disk would not get its space back when that is dropped."""
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


def damage_one(path: Path, how: str) -> None:
    file = path / ("optimizer.safetensors" if how != "no manifest" else "manifest.json")
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "torn":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["flipped", "torn", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    on_ranks: OnRanks, config_of: ConfigOf, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of("--checkpoint.every=2", "--train.steps=4", "--parallel.context=1")
    on_ranks(1, run_rank, config)
    older, newer = checkpoint.checkpoints(config.checkpoint.folder)
    damage_one(newer, how)
    said: list[str] = []
    assert checkpoint.newest(config.checkpoint.folder, say=said.append) == older
    assert len(said) == 1
    assert f"{newer} is damaged" in said[0]
    assert "using the one before it" in said[0]
    shutil.rmtree(older)
    assert checkpoint.newest(config.checkpoint.folder, say=said.append) is None
    assert "there is none before it" in said[1]


def tiny_state(step: int) -> checkpoint.State:
    config = preset("tiny", num_layers=1)
    return checkpoint.State(step, config, Llama(config, attention=lambda *_: None).state_dict(), {}, {}, {})


def test_a_run_started_anew_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    for step in (80, 120, 20, 40):
        checkpoint.write(tmp_path, tiny_state(step), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000020", "step-00000040"]


def test_the_first_checkpoint_of_a_run_started_anew_replaces_all_before_it(tmp_path: Path) -> None:
    for step in (20, 40):
        checkpoint.write(tmp_path, tiny_state(step))
    writer = Writer(tmp_path, keep=2, anew=True)
    for step, want in ((40, [40]), (60, [40, 60])):  # 20 is of the run before
        writer.submit(tiny_state(step))
        assert writer.wait()
        assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [f"step-{step:08}" for step in want]


def test_a_reader_of_a_run_that_goes_on_finds_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run drops while it is read is not damaged: there is a newer one."""
    checkpoint.write(tmp_path, tiny_state(2), keep=1)
    real, steps, said = checkpoint.damage, iter([4, 6]), list[str]()

    def read_slowly(path: Path) -> str | None:
        for step in steps:
            checkpoint.write(tmp_path, tiny_state(step), keep=1)
            break
        return real(path)

    monkeypatch.setattr(checkpoint, "damage", read_slowly)
    assert checkpoint.newest(tmp_path, say=said.append) == tmp_path / "step-00000006"
    assert said == []


def test_a_checkpoint_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of one would look damaged to a reader."""
    old, seen = checkpoint.write(tmp_path, tiny_state(2), keep=1), list[bool]()
    real = checkpoint._remove
    monkeypatch.setattr(checkpoint, "_remove", lambda path: (seen.append(old.exists()), real(path)))
    checkpoint.write(tmp_path, tiny_state(4), keep=1)
    assert seen[-1] is False
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_reader_leaves_what_is_being_written(tmp_path: Path) -> None:
    whole, half = checkpoint.write(tmp_path, tiny_state(2)), tmp_path / ".writing-step-00000004"
    half.mkdir()
    assert checkpoint.newest(tmp_path) == whole
    assert half.exists()
    checkpoint.clear_unfinished(tmp_path)
    assert not half.exists()
    (tmp_path / "new").touch()  # who may read this may read a checkpoint
    assert {path.stat().st_mode for path in whole.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_a_disk_that_fills_while_tensors_are_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    said: list[str] = []
    writer = Writer(tmp_path, keep=1, say=said.append)
    monkeypatch.setattr(checkpoint, "save_file", fail)
    writer.submit(tiny_state(3))
    assert not writer.wait()
    assert "No space left on device" in said[0]
    assert not list(tmp_path.iterdir())


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


def test_a_loss_that_is_not_finite_stops_all_ranks_with_the_state_before_it(
    on_ranks: OnRanks, config_of: ConfigOf
) -> None:
    config = config_of("--optimizer.lr=1e30", "--optimizer.warmup=0", "--parallel.data=2", "--parallel.context=1")
    assert on_ranks(2, run_rank, config) == [NOT_FINITE] * 2
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).step == 1
    assert len(read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")) == 1


def run_poisoned(config: TrainConfig) -> tuple[str, list[float]]:
    """How a float16 run ends whose weights are not finite, and the loss scales that it tried."""
    trainer, tried = Trainer(config), []
    trainer.scale = 4.0
    trainer.parts.model.norm.weight.data.fill_(float("nan"))
    take_step = trainer.take_step

    def count(asked: list[int]) -> Any:
        tried.append(trainer.scale)
        return take_step(asked)

    trainer.take_step = count  # type: ignore[method-assign]
    return trainer.run(), tried


def test_a_loss_that_no_scale_makes_finite_leaves_the_scale_as_it_was(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--train.precision=float16", "--train.batch=1", "--data.sequence=15", "--parallel.context=1")
    assert on_ranks(1, run_poisoned, config) == [(NOT_FINITE, [4.0, 2.0, 1.0])]
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    assert checkpoint.read(path).extra["scale"] == 4.0


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


def notes_of_resuming(config: TrainConfig) -> list[str]:
    notes: list[str] = []
    with contextlib.ExitStack() as held:
        Trainer(config)._resume(notes, held)
    return notes


def test_a_run_of_more_steps_than_before_says_what_becomes_of_the_learning_rate(
    on_ranks: OnRanks, config_of: ConfigOf
) -> None:
    options = ["--train.steps=2", "--parallel.context=1", "--optimizer.warmup=0"]
    config = config_of(*options)
    on_ranks(1, run_rank, config)
    longer = config_of(*options, "--train.steps=5", "--optimizer.lr=1e-3")
    (notes,) = on_ranks(1, notes_of_resuming, longer)
    assert notes[1:] == ["the learning rate follows the new 5 steps (there were 2): 1.0e-04 -> 5.5e-04"]
    rising = config_of(*options, "--train.steps=5", "--optimizer.warmup=4")  # by the step alone
    (notes,) = on_ranks(1, notes_of_resuming, rising)
    assert len(notes) == 1
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    state = checkpoint.read(path)
    shutil.rmtree(path)
    moments = {name: torch.ones_like(x) if name.startswith("step/") else x for name, x in state.optimizer.items()}
    checkpoint.write(config.checkpoint.folder, replace(state, step=1, optimizer=moments))
    (notes,) = on_ranks(1, notes_of_resuming, config)
    assert len(notes) == 1  # as long as it was


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, tiny_state(2))
    assert checkpoint.read(path).step == 2
    file = path / "state.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"a checkpoint of format 2, and this flashspan reads 1: use the version"):
        checkpoint.read(path)


def test_a_checkpoint_from_before_there_were_patterns_is_causal(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--train.steps=1", "--parallel.context=1")
    on_ranks(1, run_rank, config)
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    state = checkpoint.read(path)
    order = {key: value for key, value in state.order.items() if key != "attention"}
    checkpoint.write(config.checkpoint.folder, replace(state, order=order))
    assert on_ranks(1, run_rank, config) == [DONE]
    with pytest.raises(RankError, match="attention was causal, is window"):
        on_ranks(1, run_rank, replace(config, attention=AttentionSection("window", window=9)))


def stall(config: TrainConfig, rank: int, call: str) -> None:
    """A run in which one rank sleeps in this call after its second step, and the other does not wait long for it."""
    silent_ranks.PATIENCE = 1.0
    trainer = Trainer(config)
    real = getattr(trainer, call)

    def sleepy(*args: Any) -> Any:
        if trainer.step == 2 and dist.get_rank() == rank:
            time.sleep(60)
        return real(*args)

    setattr(trainer, call, sleepy)
    trainer.run()


@pytest.mark.parametrize(
    ("option", "call", "when"),
    [
        ("--parallel.context=2", "take_step", "step 3"),
        pytest.param("--parallel.data=2", "take_step", "step 3", marks=pytest.mark.slow),
        pytest.param("--parallel.data=2", "evaluate", "the evaluation after step 2", marks=pytest.mark.slow),
    ],
)
def test_a_stalled_rank_is_named(config_of: ConfigOf, option: str, call: str, when: str) -> None:
    config = config_of("--parallel.context=1", option, "--parallel.timeout=3", "--train.evaluate_every=2")
    with (
        Ranks(2, threads=1, timeout=3) as ranks,
        pytest.raises(RankError, match=f"rank 1 did not answer in {when} and is stalled or dead"),
    ):
        ranks.run(stall, config, 1, call, timeout=60)


def stall_at_the_start(config: TrainConfig) -> str:
    silent_ranks.PATIENCE = 1.0
    real = loop.build

    def late(*args: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(60)
        return real(*args)

    with mock.patch.object(loop, "build", late):
        return run_rank(config)


@pytest.mark.slow
def test_a_rank_that_stalls_before_the_first_step_is_named(config_of: ConfigOf) -> None:
    with (
        Ranks(2, threads=1, timeout=3) as ranks,
        pytest.raises(RankError, match="rank 1 did not answer in the making of the model and is stalled or dead"),
    ):
        ranks.run(stall_at_the_start, config_of("--parallel.context=2", "--parallel.timeout=3"), timeout=60)


def kill_one(config: TrainConfig, rank: int, wait: Callable[[], None]) -> bool:
    """Run on 2 ranks and kill one when `wait` returns; whether the run was cut short."""
    with Ranks(2, threads=1, timeout=20) as ranks:
        pid = ranks.pids[rank]
        over = threading.Event()

        def kill() -> None:
            wait()
            if not over.is_set():
                os.kill(pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        try:
            ranks.run(run_rank, config, timeout=60)
        except RankError as error:
            return f"the process of rank {rank} died" in str(error)
        finally:
            over.set()
    return False


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_costs_no_bits(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path, rank: int) -> None:
    options = ["--checkpoint.every=1", "--parallel.context=2", "--train.steps=12"]
    config = config_of(*options, f"--checkpoint.folder={tmp_path / 'whole'}")
    on_ranks(2, run_rank, config)
    killed = config_of(*options)

    def first_checkpoint() -> None:
        while not checkpoint.checkpoints(killed.checkpoint.folder):
            time.sleep(0.005)

    assert kill_one(killed, rank, first_checkpoint)
    path = checkpoint.newest(killed.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).step < 12
    on_ranks(2, run_rank, killed)
    assert_same_bits(weights(killed), weights(config))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_cost_no_bits(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path) -> None:
    options = ["--checkpoint.every=1", "--parallel.context=2", "--train.steps=12"]
    config = config_of(*options, f"--checkpoint.folder={tmp_path / 'whole'}")
    on_ranks(2, run_rank, config)
    want, chance, kills = weights(config), random.Random(0), 0
    while kills < 20:
        killed = config_of(*options, f"--checkpoint.folder={tmp_path / str(kills)}")
        while kill_one(killed, chance.randrange(2), lambda: time.sleep(chance.uniform(0.2, 2.5))):
            kills += 1
        assert_same_bits(weights(killed), want)


def start(config: TrainConfig, file: Path) -> subprocess.Popen[str]:
    """The command, in a process group of its own."""
    file.write_text(config.describe())
    command = [sys.executable, "-m", "flashspan.train", str(file)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for(process: subprocess.Popen[str], step: int) -> None:
    """Until the run says that it took this step."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(rf"step +{step}/", line):
            return
    raise AssertionError(f"step {step} was not taken: {''.join(lines)}")


@pytest.mark.parametrize(
    ("kind", "whom"),
    [
        (signal.SIGTERM, "its group"),
        pytest.param(signal.SIGINT, "the parent", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "the parent", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "its group", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_exits(config_of: ConfigOf, tmp_path: Path, kind: signal.Signals, whom: str) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    process = start(config, tmp_path / "run.toml")
    wait_for(process, 3)
    os.kill(process.pid, kind) if whom == "the parent" else os.killpg(process.pid, kind)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + kind, rest
    assert "stopped as asked, state saved" in rest
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert 3 <= checkpoint.read(path).step < 500


@pytest.mark.slow
def test_a_signal_while_the_ranks_begin_is_kept_for_them(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    process = start(config, tmp_path / "run.toml")
    while not Path(config.checkpoint.folder).exists():  # made before the ranks are
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, rest
    (path,) = checkpoint.checkpoints(config.checkpoint.folder)
    assert checkpoint.read(path).step == 1


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_second_signal_ends_the_run_at_once(config_of: ConfigOf, tmp_path: Path) -> None:
    process = start(config_of("--parallel.context=2", "--train.steps=500"), tmp_path / "run.toml")
    wait_for(process, 3)
    ranks = [pid for server in children(process.pid) for pid in children(server)]
    assert len(ranks) == 2
    for pid in ranks:  # in a step that does not end
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow  # its halves are not: a signal saves, and a resumed run ends with the same bits
def test_a_stopped_run_ends_with_the_same_bits(config_of: ConfigOf, on_ranks: OnRanks, tmp_path: Path) -> None:
    options = ["--parallel.context=2", "--train.steps=30", "--checkpoint.every=0"]
    whole = config_of(*options, f"--checkpoint.folder={tmp_path / 'whole'}")
    on_ranks(2, run_rank, whole)
    config = config_of(*options)
    process = start(config, tmp_path / "run.toml")
    wait_for(process, 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert 1 <= checkpoint.read(path).step < 30
    on_ranks(2, run_rank, config)
    assert_same_bits(weights(config), weights(whole))


def spoil(file: Path, where: int) -> None:
    """Put a number that is no token into a file of them."""
    with file.open("r+b") as stream:
        stream.seek(HEADER_BYTES + 2 * where)
        stream.write((60000).to_bytes(2, "little"))


def test_damage_that_a_run_comes_upon_ends_it_with_its_state_saved(
    on_ranks: OnRanks, config_of: ConfigOf, corpus: Path, tmp_path: Path
) -> None:
    file = tmp_path / "data" / "train.bin"
    file.parent.mkdir()
    shutil.copy(corpus, file)
    config = config_of("--parallel.data=2", "--parallel.context=1", f"--data.train={file}", "--checkpoint.every=0")
    spoil(file, Samples(open_tokens(file), 63, config.train.seed).window(3 * 4 + 2))  # of the fourth step, on one rank
    with pytest.raises(RankError) as told:
        on_ranks(2, run_rank, config)
    assert "rank 0" in str(told.value)  # who read the others' tokens ends as they do
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


def test_the_evaluation_that_a_kill_cut_off_is_made_up_for(on_ranks: OnRanks, config_of: ConfigOf) -> None:
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


def test_a_checkpoint_replaced_by_one_of_the_same_step_is_there_until_then(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, tiny_state(2))
    before = (path / "manifest.json").read_text()
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if target == path:
            raise KeyboardInterrupt
        return rename(self, target)

    def refused(self: Path, target: Path) -> Path:
        if target == path and not self.name.endswith(checkpoint.BEFORE):
            raise PermissionError
        return rename(self, target)

    with mock.patch.object(Path, "rename", refused), pytest.raises(PermissionError):
        checkpoint.write(tmp_path, tiny_state(2))
    assert checkpoint.newest(tmp_path) == path
    with (
        mock.patch.object(Path, "rename", killed),
        mock.patch.object(shutil, "rmtree"),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpoint.write(tmp_path, tiny_state(2))
    assert checkpoint.checkpoints(tmp_path) == []
    checkpoint.clear_unfinished(tmp_path)
    assert checkpoint.newest(tmp_path) == path
    assert (path / "manifest.json").read_text() == before
    checkpoint.write(tmp_path, tiny_state(2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("before", "after"), [("float16", "float32"), ("float32", "float16")])
def test_a_run_goes_on_in_another_precision(on_ranks: OnRanks, config_of: ConfigOf, before: str, after: str) -> None:
    on_ranks(1, run_rank, config_of("--parallel.context=1", "--train.steps=1", f"--train.precision={before}"))
    config = config_of("--parallel.context=1", "--train.steps=2", f"--train.precision={after}")
    assert on_ranks(1, run_rank, config) == [DONE]
    path = checkpoint.newest(config.checkpoint.folder)
    assert path is not None
    assert checkpoint.read(path).extra["scale"] == (loop.FIRST_SCALE if after == "float16" else 1.0)


def overflow_and_ask(config: TrainConfig) -> tuple[str, int]:
    """A float16 run whose every step overflows, and which is asked to stop in the first."""
    trainer, asked = Trainer(config), []
    trainer.scale = 2.0**60
    take_step = trainer.take_step

    def ask(asked: list[int]) -> Any:
        asked.append(1)
        return take_step(asked)

    trainer.take_step = ask  # type: ignore[method-assign]
    return trainer.run(asked), len(asked)


def ask_in(config: TrainConfig, step: int) -> tuple[str, int]:
    """A run that is asked to stop while it takes this step: how it ends, and after how many."""
    trainer, asked = Trainer(config), []
    take_step = trainer.take_step

    def ask(asked: list[int]) -> Any:
        if trainer.step + 1 == step:
            asked.append(1)
        return take_step(asked)

    trainer.take_step = ask  # type: ignore[method-assign]
    return trainer.run(asked), trainer.step


@pytest.mark.parametrize(("step", "how"), [(2, STOPPED), (6, DONE)])
def test_a_run_stops_after_the_step_in_which_it_was_asked(
    on_ranks: OnRanks, config_of: ConfigOf, step: int, how: str
) -> None:
    assert on_ranks(1, ask_in, config_of("--parallel.context=1"), step) == [(how, step)]


def stop_on_a_full_disk(config: TrainConfig) -> tuple[str, int]:
    with mock.patch.object(checkpoint_writer, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        return ask_in(config, 2)


def test_a_run_that_stops_and_cannot_save_does_not_say_that_it_did(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    assert on_ranks(1, stop_on_a_full_disk, config_of("--parallel.context=1")) == [(NOT_SAVED, 2)]


def test_steps_with_nothing_to_predict_are_taken(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        with write_tokens(tmp_path / name, ByteTokenizer()) as writer:
            writer.add([ByteTokenizer.end] * 500)
    config = config_of(f"--data.train={tmp_path}", "--data.documents", "--train.steps=1", "--train.evaluate_every=1")
    assert on_ranks(1, run_rank, config) == [DONE]
    rows = read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")
    assert [rows[0]["loss"], rows[1]["validation_loss"]] == [0.0, 0.0]


def test_a_run_that_overflows_stops_when_asked(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--parallel.context=1", "--train.precision=float16")
    assert on_ranks(1, overflow_and_ask, config) == [(STOPPED, 1)]


def run_until_asked(config: TrainConfig) -> str:
    return Trainer(config).run([signal.SIGTERM])


def test_a_stop_costs_no_evaluation(on_ranks: OnRanks, config_of: ConfigOf, corpus: Path) -> None:
    """One that is due when the run is asked to stop is made up for when it goes on."""
    validation = f"--data.validation={corpus.parent}"
    config = config_of("--parallel.context=1", "--train.steps=3", "--train.evaluate_every=1", validation)
    assert on_ranks(1, run_until_asked, config) == [STOPPED]
    file = Path(config.checkpoint.folder) / "metrics.jsonl"
    assert [row["step"] for row in read_metrics(file) if "validation_loss" in row] == []
    assert on_ranks(1, run_rank, config) == [DONE]
    assert [row["step"] for row in read_metrics(file) if "validation_loss" in row] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(file) if "loss" in row] == [1, 2, 3]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--checkpoint.every=2", "--train.steps=4", "--parallel.context=1")
    on_ranks(1, run_rank, config)
    older, newer = checkpoint.checkpoints(config.checkpoint.folder)
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


def run_on_a_slow_disk(config: TrainConfig, call: str) -> tuple[str, int]:
    """A run in which this call takes until the ranks have met three times more; and the number of such calls."""
    meetings, calls = threading.Semaphore(0), []
    meet, real = dist.all_gather_object, pkgutil.resolve_name(call)

    def count(*args: Any, **options: Any) -> None:
        meet(*args, **options)
        meetings.release()

    def slow(*args: Any, **options: Any) -> Any:
        while meetings.acquire(blocking=False):
            pass
        calls.append(call)
        assert all(meetings.acquire(timeout=20) for _ in range(3)), "ranks wait for the disk"
        return real(*args, **options)

    with (
        mock.patch.object(agreement, "MEET", 0.01),
        mock.patch.object(dist, "all_gather_object", count),
        mock.patch(call, slow),
    ):
        return run_rank(config), len(calls)


def slow_calls(found: list[tuple[str, int]]) -> int:
    assert [how for how, _ in found] == [DONE] * len(found)
    return sum(calls for _, calls in found)


def test_a_disk_slower_than_an_exchange_may_be_costs_no_run(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    options = ["--parallel.context=2", "--checkpoint.every=1"]
    for num_steps, call in ((2, "flashspan.checkpoint.writer.write"), (3, "flashspan.checkpoint.format.damage")):
        config = config_of(*options, f"--train.steps={num_steps}")
        assert slow_calls(on_ranks(2, run_on_a_slow_disk, config, call)) > 0


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_slow_load_costs_no_run(on_ranks: OnRanks, config_of: ConfigOf, tmp_path: Path, axis: str) -> None:
    """Of data ranks the first reads alone; tensor ranks each read their part."""
    model = Llama(config_of().model.resolve(), attention=attention)
    model.initialize(9)
    save_llama(model, tmp_path / "model")
    config = config_of(f"--model.load={tmp_path / 'model'}", f"--parallel.{axis}=2", "--train.steps=1")
    assert slow_calls(on_ranks(2, run_on_a_slow_disk, config, "flashspan.train.build.read_weights")) > 0


def test_two_runs_in_one_folder_are_refused(on_ranks: OnRanks, config_of: ConfigOf) -> None:
    config = config_of("--parallel.context=1", "--train.steps=2")
    with locked_folder(config.checkpoint.folder), pytest.raises(RankError) as caught:
        on_ranks(1, run_rank, config)
    assert f"another is at work in {config.checkpoint.folder}" in str(caught.value)
    assert "--checkpoint.folder" in str(caught.value)
    assert on_ranks(1, run_rank, config) == [DONE]


@pytest.mark.slow
def test_a_killed_run_holds_its_folder_no_longer(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of("--parallel.context=2", "--train.steps=500", "--checkpoint.every=0")
    process = start(config, tmp_path / "run.toml")
    wait_for(process, 1)
    with pytest.raises(ValueError, match="another is at work"), locked_folder(config.checkpoint.folder):
        pass
    process.kill()
    process.wait(20)
    process.communicate(timeout=20)  # the ranks, which look every second whether their parent is there, have ended too
    with locked_folder(config.checkpoint.folder):
        pass


def test_a_file_system_without_locks_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with locked_folder(tmp_path / "run"):
        pass
    (tmp_path / "other" / LOCK).mkdir(parents=True)  # what cannot be opened is another matter
    with pytest.raises(ValueError, match="Is a directory"), locked_folder(tmp_path / "other"):
        pass


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
    assert on_ranks(1, run_rank, config) == [DONE]  # a checkpoint from before there were fingerprints
