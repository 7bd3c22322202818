"""`flashspan.train(...)`: the trainer as a function.

result = flashspan.train(preset="tiny", steps=20, context=2)
print(result.losses[-1], result.checkpoint)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashspan.checkpoint.format import checkpoints

from . import run
from .config import SECTIONS, TrainConfig
from .metrics import StepMetrics, read_metrics
from .options import KEYS, build, read_toml, unknown_key


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        status: "done", or why it ended earlier: "stopped" (by SIGTERM or SIGHUP) or "interrupted" (by Ctrl-C), with
            the state saved; "not finite" (the loss or the gradients); "not saved" (the last checkpoint could not be
            written).
        folder: The folder of checkpoints and metrics.
        checkpoint: The last checkpoint, a folder in the Hugging Face layout; None if there is none.
        steps: The metrics of each step, including those before a resumed checkpoint.
        validation: The validation loss by step.
    """

    status: str
    folder: Path
    checkpoint: Path | None
    steps: list[StepMetrics]
    validation: dict[int, float]

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [step.loss for step in self.steps]


def train(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    callbacks: Iterable[Callable[[StepMetrics], object]] = (),
    **overrides: Any,
) -> TrainResult:
    """Train a LLaMA on any number of devices, and return its metrics and the path of its checkpoint.

    This call starts the ranks (one process each) and ends them; under torchrun this process is one of the ranks. It
    runs in a plain script, with or without `if __name__ == "__main__":`, and in a notebook. The first rank prints a
    line per step on standard output, which a notebook does not show: use a callback there.

    Args:
        config: A `TrainConfig`, the path of a TOML file, or a dictionary: of sections, as in a TOML file, or of
            dotted keys, `{"optimizer.lr": 1e-3}`. By default the values of `flashspan train --help`.
        callbacks: Functions called after each step with its `StepMetrics` (`step`, `loss`, `grad_norm`, `lr`,
            `tokens_per_second`, `mfu`, `memory_gib`, `seconds`). They run in the calling process, in order, while the
            next step runs; under torchrun on rank 0. An exception in a callback ends the run at once and is raised
            here; the checkpoints saved so far remain.
        **overrides: Config keys: `steps=20` where one section has the key, `train__seed=1` (section, two underscores,
            key) where several have it. They take precedence over `config`.

    Returns:
        The result of the run.

    Raises:
        ValueError: For a config that cannot run, with the rule, the value and the remedy.
        RuntimeError: If a rank failed, after `train.max_restarts` restarts.

    Example:
        ```python
        import flashspan

        result = flashspan.train(
            preset="tiny", steps=20, context=2, callbacks=[lambda metrics: print(metrics.step, metrics.loss)]
        )
        print(result.losses[-1], result.checkpoint)
        ```
    """
    whole = configure(config, overrides)
    called = tuple(callbacks) if isinstance(callbacks, Iterable) else (None,)
    if not all(map(callable, called)):
        raise ValueError(f"callbacks must be a list of functions: got {callbacks!r}")

    def report(metrics: StepMetrics) -> None:
        for callback in called:
            callback(metrics)

    folder = Path(whole.checkpoint.folder)
    status = run.run(whole, report=report if called else None)
    if status in (run.FAILED, run.LATE):
        raise RuntimeError(
            f"training in {folder} ended early ({status}): the reason is on stderr; call again to resume"
        )
    saved = checkpoints(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    names = {entry.name for entry in dataclasses.fields(StepMetrics)}
    steps = [
        StepMetrics(**{"mfu": float("nan"), **{name: value for name, value in row.items() if name in names}})
        for row in rows
        if "loss" in row
    ]
    validation = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    return TrainResult(status, folder, saved[-1] if saved else None, steps, validation)


def configure(config: TrainConfig | Mapping[str, Any] | str | Path | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """The config from the arguments of `train`."""
    if isinstance(config, TrainConfig):
        raw = config.as_dict()
    elif isinstance(config, Mapping):
        raw = _sections(config)
    elif config is None or isinstance(config, str | Path):
        raw = {} if config is None else read_toml(config)
    else:
        raise ValueError(f"config must be a TrainConfig, a dictionary or the path of a TOML file: got {type(config)}")
    given: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        if callable(value):
            raise ValueError(f"functions are given as callbacks=[...]: got {name}= with a function")
        if isinstance(value, Mapping):
            raise ValueError(
                f"a section is given in config=: got {name}= with a dictionary; write train({{{name!r}: ...}})"
            )
        section, _, key = _whole(name).partition(".")
        if key in given.setdefault(section, {}):
            raise ValueError(f"{section}.{key} is given twice: as {name}= and as another keyword; give it once")
        given[section][key] = value
    for section, values in given.items():
        raw[section] = {**raw.get(section, {}), **values}
    return build(raw)


def _sections(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a dictionary of sections and dotted keys."""
    raw: dict[str, dict[str, Any]] = {}
    for name, value in config.items():
        section, dot, key = str(name).partition(".")
        if not dot and not isinstance(value, Mapping):
            if section in SECTIONS:
                raise ValueError(f"[{section}] is a section of keys: got {value!r}; give it a dictionary")
            raise ValueError(
                f"a config dictionary has sections or dotted keys: got {name!r}; write {_whole(section)!r}, or pass "
                f"{name}= as a keyword"
            )
        values, found = {key: value} if dot else value, raw.setdefault(section, {})
        if twice := sorted(set(values) & set(found)):
            raise ValueError(f"{section}.{twice[0]} is given twice in the dictionary; give it once")
        found.update(values)
    return raw


def _whole(name: str) -> str:
    """A keyword as a dotted key: train__seed -> train.seed, steps -> train.steps."""
    if "__" in name:
        section, _, key = name.partition("__")
        return f"{section}.{key}"
    keys = [key for key in KEYS if key.endswith(f".{name}")]
    if len(keys) > 1:
        written = " or ".join(key.replace(".", "__") for key in keys)
        raise ValueError(f"{name} is a key of {len(keys)} sections: write {written}")
    if not keys:
        raise unknown_key(name)
    return keys[0]
