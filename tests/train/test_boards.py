"""TensorBoard and Weights & Biases receive the metrics of a run, only from its first rank."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashspan.train import TrainConfig, parse, run
from flashspan.train.boards import TensorBoard, WandB, check_boards
from flashspan.train.config import LogSection, toml_value
from flashspan.train.metrics import Display, read_metrics

FAKE = """
import json, os
from pathlib import Path
from types import SimpleNamespace

class Error(Exception): pass
class Summary(dict):
    def __setitem__(self, key, value): note(summary={key: value})

def note(**call):
    with (Path(__file__).parent / "calls").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **call}) + "\\n")

def teardown(): note(teardown=True)

def Settings(**given): return given

def init(**given):
    if (Path(__file__).parent / "refuse").exists():
        raise Error("No API key configured.")
    note(init=given)
    run = SimpleNamespace(step=0, summary=Summary())
    def log(values, step):
        run.step = step
        note(log=values, step=step)
    run.log, run.finish = log, lambda exit_code: note(finish=exit_code)
    return run
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Install a fake module wandb that records its calls; the fixture returns the recorded calls."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(FAKE)
    real = sys.modules.pop("wandb", None)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "modules" / "calls").read_text().splitlines()]
    sys.modules.pop("wandb", None)
    if real is not None:
        sys.modules["wandb"] = real


@pytest.mark.timeout(120)
def test_one_rank_of_two_logs_config_metrics_and_the_end(
    config_of: Callable[..., TrainConfig], fake: Callable[[], list[dict[str, Any]]]
) -> None:
    options = ("--log.wandb", "--parallel.ranks=2", "--train.evaluate_every=2", "--train.evaluate_samples=2")
    config = config_of("--train.steps=2", *options)
    assert run.run(config) == "done"
    calls, folder = fake(), Path(config.checkpoint.folder)
    assert len({call["pid"] for call in calls}) == 1
    given = calls[0]["init"]
    assert given["config"] == json.loads(json.dumps(config.as_dict()))
    assert (given["project"], given["name"], given["dir"]) == ("flashspan", folder.name, str(folder))
    logged = [(call["step"], call["log"]) for call in calls if "log" in call]
    written = [(row.pop("step"), row) for row in read_metrics(folder / "metrics.jsonl")]
    assert logged == [(step, {key: x for key, x in row.items() if key != "time"}) for step, row in written]
    assert [step for step, _ in logged] == [1, 2, 2]
    assert "loss" in logged[1][1]
    assert "validation_loss" in logged[2][1]
    ends = [{key: value for key, value in call.items() if key != "pid"} for call in calls[-3:]]
    assert ends == [{"summary": {"status": "done"}}, {"finish": 0}, {"teardown": True}]
    assert run.run(config_of("--train.steps=3", *options)) == "done"  # the run resumes with the same curve
    resumed = fake()[len(calls) :]
    assert resumed[0]["init"]["id"] == given["id"]
    assert [call["step"] for call in resumed if "log" in call] == [3, 3]
    assert run.run(config_of("--train.steps=1", "--checkpoint.resume=false", *options)) == "done"
    assert fake()[len(calls) + len(resumed)]["init"]["id"] != given["id"]


@pytest.mark.timeout(120)
def test_a_refused_login_is_one_error_with_the_remedy(
    config_of: Callable[..., TrainConfig], fake: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "modules" / "refuse").touch()
    with pytest.raises(ValueError, match=r"No API key configured.*WANDB_MODE=offline"):
        run.run(config_of("--log.wandb", "--parallel.ranks=1", "--train.steps=1"))


def test_a_run_that_fails_is_marked_as_failed(
    config_of: Callable[..., TrainConfig], fake: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    board = WandB(config_of("--log.wandb"), tmp_path, 0)
    with pytest.raises(RuntimeError), Display(tmp_path, 9, active=True, boards=[board]):
        raise RuntimeError
    assert [call["finish"] for call in fake() if "finish" in call] == [1]


def test_a_repeated_step_is_not_logged_twice(
    config_of: Callable[..., TrainConfig], fake: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    board = WandB(config_of("--log.wandb"), tmp_path, 0)
    for step in (1, 2, 3, 2, 3, 4):
        board.record(step, {"loss": 1.0})
    assert [call["step"] for call in fake() if "log" in call] == [1, 2, 3, 3, 4]  # the last step may log more values


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_missing_package_is_refused_before_the_start(
    config_of: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, dry_run: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(ValueError, match=rf"log\.{name}.*pip install 'flashspan\[{name}\]'"):
        run.run(config_of(f"--log.{name}"), dry_run=dry_run)
    assert not (tmp_path / "run").exists()
    check_boards(LogSection())


def test_the_options_are_off_by_default_and_an_old_name_is_corrected() -> None:
    assert parse().log == LogSection(tensorboard=False, wandb=False)
    assert parse(["--log.wandb"]).log.wandb
    with pytest.raises(ValueError, match=r"--log\.tensorboard"):
        parse(["--train.tensorboard"])
    with pytest.raises(ValueError, match=r"--log\.wandb"):
        parse(["--wandb_log"])


def test_tensorboard_forgets_the_steps_that_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    writer = SimpleNamespace(SummaryWriter=lambda *args, **kwargs: made.append(kwargs))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    TensorBoard(tmp_path, 4)
    assert made == [{"purge_step": 5}]


@pytest.mark.timeout(120)
def test_the_real_package_records_without_a_network(
    config_of: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = config_of("--log.wandb", "--parallel.ranks=1", "--train.steps=2", "--train.evaluate_every=2")
    command = [sys.executable, "-m", "flashspan.train", *_options(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (recorded,) = Path(config.checkpoint.folder, "wandb").glob("offline-run-*/*.wandb")
    data = recorded.read_bytes()
    assert all(name in data for name in (b"validation_loss", b"tokens_per_second", b"ffn_width"))


def _options(config: TrainConfig) -> list[str]:
    return [
        f"--{section}.{key}={toml_value(x).strip(chr(34))}"
        for section, keys in config.as_dict().items()
        for key, x in keys.items()
    ]
