"""The options of a training run: a TOML file of sections, and every key as `--section.key value`, read by tyro.

    config = parse(["run.toml", "--model.preset", "tiny", "--train.steps=50"])

The command line overrides the file. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from flashspan.completion import choices_of
from flashspan.files import parse_toml, read_bytes

from .config import SECTIONS, TrainConfig, toml_value

HELP = """usage: flashspan train [CONFIG.toml] [--SECTION.KEY VALUE ...] [--dry-run]

Without arguments: trains a tiny LLaMA on the text in the package, on 4 CPU ranks with ring attention, or on the GPUs.
--dry-run prints the config, the mesh and an estimate of the memory, and starts nothing.

options, with their defaults:
"""
KEYS = {f"{section}.{entry.name}": entry for section, cls in SECTIONS.items() for entry in dataclasses.fields(cls)}
"""Every key, `section.key`, with its field."""
KINDS = {f"{section}.{name}": kind for section, cls in SECTIONS.items() for name, kind in get_type_hints(cls).items()}
"""The type of each key."""
METAVARS = {
    "model.preset": "MODEL",
    "model.load": "FOLDER|NAME",
    "data.train": "FILE",
    "data.validation": "FILE",
    "checkpoint.folder": "FOLDER",
}
OF_TYPE = {int: "N", float: "X", str: "TEXT", bool: "[true|false]"}
SYNONYMS = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "batch_size": "train.batch",
    "block_size": "data.sequence",
    "bf16": "train.precision",
    "context_length": "data.sequence",
    "cp": "parallel.context",
    "dataset": "data.train",
    "dp": "parallel.data",
    "dtype": "train.precision",
    "eval_every": "train.evaluate_every",
    "eval_interval": "train.evaluate_every",
    "eval_steps": "train.evaluate_every",
    "fsdp": "parallel.shard",
    "grad_accum": "train.accumulate",
    "grad_clip": "optimizer.clip",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_checkpointing": "train.recompute",
    "hidden_size": "model.width",
    "iterations": "train.steps",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.clip",
    "max_iters": "train.steps",
    "max_length": "data.sequence",
    "max_steps": "train.steps",
    "min_lr": "optimizer.final_lr",
    "model": "model.preset",
    "model_name": "model.preset",
    "model_name_or_path": "model.load",
    "nproc": "parallel.ranks",
    "num_steps": "train.steps",
    "out_dir": "checkpoint.folder",
    "output_dir": "checkpoint.folder",
    "per_device_train_batch_size": "train.batch",
    "save_steps": "checkpoint.every",
    "seq_len": "data.sequence",
    "seq_length": "data.sequence",
    "tp": "parallel.tensor",
    "warmup_steps": "optimizer.warmup",
    "wd": "optimizer.weight_decay",
    "report_to": "log.wandb",
    "wandb_log": "log.wandb",
    "world_size": "parallel.ranks",
}
"""Names that other trainers use -> our keys."""
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Typed(str):
    """A value from the command line: text to be converted to its key's type."""


def parse(arguments: Sequence[str] = ()) -> TrainConfig:
    """A config from a command line: at most one TOML file, then `--section.key value` or `--section.key=value`."""
    words = list(arguments)
    if words and words[0].partition("=")[0] in KEYS:
        raise ValueError(f"expected a TOML file or an option: got {words[0]}; did you mean --{words[0]}?")
    raw = read_toml(words.pop(0)) if words and not words[0].startswith("--") else {}
    given, unknown = tyro.cli(
        reader(), args=words, prog="flashspan train", add_help=False, return_unknown_args=True, console_outputs=False
    )
    if unknown:
        word = unknown[0]
        if not word.startswith("--"):
            raise not_an_option(word)
        raise unknown_key(word[2:].partition("=")[0].replace("-", "_"), "--", ("dry-run",))
    for section in SECTIONS:
        for name, values in vars(getattr(given, section)).items():
            if values is None:
                continue
            key = f"{section}.{name}"
            if len(values) > 1:
                raise not_an_option(values[1])
            if not values and KINDS[key] is not bool:
                raise ValueError(f"--{key} needs a value: got none; write --{key}=VALUE")
            raw.setdefault(section, {})[name] = Typed(values[0]) if values else True  # a bare switch means true
    return build(raw)


def not_an_option(word: str) -> ValueError:
    return ValueError(f"expected an option like --train.steps 100: got {word!r}; a TOML file comes before the options")


@cache
def reader() -> Any:
    """The class that tyro makes from a command line. It has the words after each key; None if the key is not given."""
    sections = []
    for section, cls in SECTIONS.items():
        fields = []
        for entry in dataclasses.fields(cls):
            key = f"{section}.{entry.name}"
            words = PrimitiveConstructorSpec(
                nargs="*",
                metavar=metavar_of(key),
                instance_from_str=lambda words: words,
                is_instance=lambda words: True,
                str_from_instance=lambda words, default=entry.default: [toml_value(default)],  # type: ignore[misc]
            )
            fields.append((entry.name, Annotated[Any, words, tyro.conf.arg(help=entry.metadata["help"])], None))
        made = dataclasses.make_dataclass(cls.__name__, fields)
        # With help of its own: otherwise tyro parses source files to find it, which takes 0.1 s for all sections.
        described = Annotated[made, tyro.conf.arg(help=f"section {section}")]  # type: ignore[valid-type]
        sections.append((section, described, dataclasses.field(default_factory=made)))
    return dataclasses.make_dataclass("Options", sections)


def metavar_of(key: str) -> str:
    kind = KINDS[key]
    choices = f"{{{','.join(get_args(kind))}}}" if get_origin(kind) is Literal else ""
    return METAVARS.get(key) or choices or OF_TYPE[kind]


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, each with its keys and values."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"a config is a TOML file: got the folder {path}; to resume the run in it, "
            f"use --checkpoint.folder {shlex.quote(str(path))}"
        )
    data = read_bytes(path, "give a TOML file, or options only")
    try:
        raw = parse_toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path} is not TOML: line {line} is not UTF-8 text; save the file as UTF-8") from error
    except ValueError as error:  # not TOML, a number or a nesting beyond Python's
        raise ValueError(f"{path} is not TOML: {error}") from error
    for name, value in raw.items():
        if not isinstance(value, dict):
            rule = (
                f"[{name}] is a section of keys" if name in SECTIONS else f"{name} must be in a section, like [train]"
            )
            raise ValueError(f"{path}: {rule}: got {name} = {value!r}")
    return raw


def build(raw: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """A config from a dictionary of sections."""
    made = {}
    for section, values in raw.items():
        if section not in SECTIONS:
            close = difflib.get_close_matches(section, SECTIONS, 1)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(SECTIONS)}"
            raise ValueError(f"unknown section {section}: {hint}")
        for name in values:
            if f"{section}.{name}" not in KEYS:
                raise unknown_key(f"{section}.{name}")
        made[section] = SECTIONS[section](**{name: convert(f"{section}.{name}", x) for name, x in values.items()})
    return TrainConfig(**made)


def unknown_key(key: str, prefix: str = "", others: Sequence[str] = ()) -> ValueError:
    """The error for an unknown key. It names a similar key of the section, the key of that name in other trainers, all
    keys with this last part, or the most similar key, in this order."""
    section, _, last = key.rpartition(".")
    names = {other.replace("-", "_"): other for other in (*KEYS, *others)}
    here = [name.rpartition(".")[2] for name in KEYS if name.startswith(f"{section}.")]
    found = [f"{section}.{name}" for name in difflib.get_close_matches(last, here, 1, 0.8)]
    found = found or [SYNONYMS[name] for name in [last] if name in SYNONYMS]
    found = found or [name for name in KEYS if name.endswith(f".{last}")]
    if not found:
        found = difflib.get_close_matches(key, names, 1)
    if not found:
        parts = {name.rpartition(".")[2]: name for name in names}
        found = [parts[part] for part in difflib.get_close_matches(last, parts, 1)]
    meant = " or ".join(f"{prefix}{names[name]}" for name in found)
    hint = f"did you mean {meant}?" if found else "flashspan train --help lists the keys"
    return ValueError(f"unknown key {prefix}{key}: {hint}")


def convert(key: str, value: Any) -> Any:
    """A value in its key's type: text from the command line is converted, any other value must have that type."""
    kind = KINDS[key]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            close = difflib.get_close_matches(str(value), get_args(kind), 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{key} must be one of {', '.join(get_args(kind))}: got {str(value)!r}{hint}")
        return str(value)
    try:
        if isinstance(value, Typed) and kind is not str:
            words = {"true": True, "false": False}
            return words[value.lower()] if kind is bool else kind(value)
        if kind is str and isinstance(value, str | Path):
            return str(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if type(value) is kind:
            return value
    except (KeyError, ValueError, OverflowError):  # OverflowError: an integer beyond any float
        pass
    raise ValueError(f"{key} must be {TYPES[kind]}: got {value!r}")


def option_choices() -> dict[str, tuple[str, ...]]:
    """Every option, each with its choices: for completion in a shell."""
    choices = {f"--{key}": ("true", "false") if kind is bool else choices_of(kind) for key, kind in KINDS.items()}
    return {"-h": (), "--help": (), "--dry-run": (), **choices}


def show_help() -> int:
    print(HELP + describe_options(), end="")
    return 0


def describe_options() -> str:
    """Every option with its default and its help, wrapped at the width of the terminal."""
    lines, indent = [], " " * 41
    width = max(60, shutil.get_terminal_size().columns)
    for section, cls in SECTIONS.items():
        for entry in dataclasses.fields(cls):
            key = f"{section}.{entry.name}"
            choices = " ".join(get_args(KINDS[key]))
            text = " ".join(filter(None, (entry.metadata["help"], f"({choices})" if choices else "")))
            name = f"--{key}" if choices or KINDS[key] is bool else f"--{key} {metavar_of(key)}"
            head = f"  {name:<26} {toml_value(entry.default):<12}"
            lines.append(textwrap.fill(f"{head} {text}", width, subsequent_indent=indent, break_on_hyphens=False))
        lines.append("")
    return "\n".join(lines)
