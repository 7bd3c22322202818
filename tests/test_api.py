"""`flashspan.train` and `flashspan.generate`: the trainer and the model as functions of a script."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import flashspan
from flashspan.launch import Ranks, send_to_parent
from flashspan.train import TrainConfig
from flashspan.train.api import configure

SMALL = "model__width=16, ffn_width=32, num_layers=1, num_heads=2, num_kv_heads=1, sequence=16, batch=2"
SCRIPT = f"""
import json
import flashspan

print("imported")
seen = []
result = flashspan.train(
    {SMALL}, steps=3, context=2, device="cpu", evaluate_every=3, evaluate_samples=2, folder="run",
    callbacks=[lambda metrics: seen.append(metrics.loss)],
)
text = flashspan.generate(result.checkpoint, "Once", tokens=5, temperature=0.0)
print(json.dumps([result.status, result.losses, seen, result.validation, str(result.checkpoint), text]))
"""
"""A simple script: without `if __name__ == "__main__":`, and with a closure as a callback."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the script."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_a_script_without_a_main_guard_trains_once(output: str) -> None:
    assert output.splitlines().count("imported") == 1


def test_callbacks_run_in_the_calling_process_and_metrics_are_returned(output: str) -> None:
    status, losses, seen, validation, checkpoint, text = json.loads(output.splitlines()[-1])
    assert status == "done"
    assert len(losses) == 3
    assert seen == losses
    assert list(validation) == ["3"]
    assert Path(checkpoint).name == "step-00000003"
    assert text.startswith("Once")


def _send(values: list[int]) -> None:
    for value in values:
        send_to_parent(value)


@pytest.mark.timeout(60)
def test_an_exception_in_a_callback_ends_the_ranks() -> None:
    def stop_at_two(value: int) -> None:
        if value == 2:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"), Ranks(1, threads=1) as ranks:
        ranks.run(_send, [1, 2, 3], on_message=stop_at_two)
    assert not ranks.pids


def test_every_config_key_can_be_a_keyword() -> None:
    sections = TrainConfig().as_dict()
    for section, values in sections.items():
        for key, value in values.items():
            assert configure(None, {f"{section}__{key}": value}) == TrainConfig(), f"{section}.{key}"
    names = [key for values in sections.values() for key in values]
    for section, values in sections.items():
        for key, value in values.items():
            if names.count(key) == 1:
                assert configure(None, {key: value}) == TrainConfig(), key
            else:
                with pytest.raises(ValueError, match=f"write .*{section}__{key}"):
                    configure(None, {key: value})


def test_keywords_take_precedence_over_a_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 5\nbatch = 4\n")
    for config in (tmp_path / "run.toml", {"train": {"steps": 5, "batch": 4}}, {"train.steps": 5, "train.batch": 4}):
        found = configure(config, {"steps": 7})
        assert (found.train.steps, found.train.batch) == (7, 4)
    assert configure(found, {"lr": 1e-4}).optimizer.lr == 1e-4
    assert configure(found, {"lr": 1e-4}).train == found.train


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (None, {"warmups": 3}, "unknown key warmups: did you mean optimizer.warmup"),
        (None, {"train__stepz": 3}, "unknown key train.stepz"),
        (None, {"steps": "many"}, "train.steps must be a whole number: got 'many'"),
        ({"steps": 3}, {}, "write 'train.steps'"),
        (3, {}, "config must be"),
        ({"train": None}, {}, r"\[train\] is a section of keys: got None"),
        ({5: {}}, {}, "unknown section 5: choose one of"),
        ({"train": {"steps": 1}, "train.steps": 2}, {}, "train.steps is given twice in the dictionary"),
        (None, {"train__steps": 1, "steps": 2}, "train.steps is given twice"),
    ],
)
def test_bad_configs_are_refused(config: object, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(config, overrides)  # type: ignore[arg-type]


def test_packages_are_functions_too() -> None:
    import flashspan.generate
    import flashspan.train.config

    assert flashspan.train.config.TrainConfig is TrainConfig
    assert "callbacks" in inspect.signature(flashspan.train).parameters
    assert "prompt" in inspect.signature(flashspan.generate).parameters
    assert set(flashspan.__all__) <= set(dir(flashspan))


def test_generate_takes_a_model_in_memory() -> None:
    from flashspan.model import Llama, preset

    shape = preset("tiny", width=16, ffn_width=32, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=257)
    model = Llama(shape, attention=flashspan.attention)
    model.initialize(0)
    first = flashspan.generate(model, "Once", tokens=5, seed=1)
    assert first.startswith("Once")
    assert first == flashspan.generate(model, "Once", tokens=5, seed=1)
    for name, value in (("tokens", 0), ("seed", 1.5), ("seed", True), ("dtype", "float32"), ("dtype", torch.int32),
                        ("tokenizer", 5), ("device", "nope"), ("prompt", "\udcc3")):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be") as error:
            flashspan.generate(model, **{name: value})
        assert repr(value) in str(error.value)


@pytest.mark.timeout(60)
def test_training_runs_in_a_thread(tmp_path: Path) -> None:
    """Only the main thread may handle signals."""
    sizes = {"width": 16, "ffn_width": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    small = {"model": sizes, "data.sequence": 16, "train.batch": 2, "checkpoint": {"folder": tmp_path / "run"}}
    results = []
    thread = Thread(target=lambda: results.append(flashspan.train(small, steps=1, context=1, device="cpu")))
    thread.start()
    thread.join()
    assert [result.status for result in results] == ["done"]


@pytest.mark.parametrize("callbacks", [None, print, [3]])
def test_callbacks_are_checked_before_the_run(callbacks: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="callbacks must be a list of functions: got"):
        flashspan.train(folder=tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_a_failed_run_is_an_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashspan.train import run

    monkeypatch.setattr(run, "run", lambda *args, **options: run.FAILED)
    with pytest.raises(RuntimeError, match="failed"):
        flashspan.train(folder=tmp_path / "run")
