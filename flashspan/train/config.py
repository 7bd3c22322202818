"""What a training run is told: sections of a TOML file, every key also an option `--section.key value`.

    config = parse(["run.toml", "--model.preset", "tiny", "--train.steps=50"])

Sections are frozen dataclasses; a key that is not in one is an error that names the nearest that is.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flashspan.data.samples import DEFAULT_PRESET, DEFAULT_SEQUENCE
from flashspan.files import parse_toml, read_bytes
from flashspan.launch import LONGEST
from flashspan.model import LlamaConfig, preset, read_config
from flashspan.parallel.mesh import resolve_degrees


def option(default: Any, text: str) -> Any:
    """A field with a default and a line of help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ModelSection:
    preset: str = option(DEFAULT_PRESET, "a model by name: tiny, small, ..., llama-3.2-1b")
    load: str = option("", "a Hugging Face folder to take the shape and first weights from, in place of a preset")
    vocab_size: int = option(0, "0: the preset's")
    width: int = option(0, "0: the preset's")
    num_layers: int = option(0, "0: the preset's")
    num_heads: int = option(0, "0: the preset's")
    num_kv_heads: int = option(0, "0: the preset's")
    ffn_width: int = option(0, "0: the preset's")

    def resolve(self) -> LlamaConfig:
        """The model's own config."""
        names = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name)}
        if not self.load:
            return preset(self.preset, **sizes)
        if not (Path(self.load) / "config.json").exists():
            raise ValueError(
                f"model.load must be a Hugging Face folder: {Path(self.load) / 'config.json'} is missing; of a run of "
                "ours give a checkpoint (runs/tiny/step-00000240), or leave it out for model.preset"
            )
        found = read_config(self.load)
        others = [f"model.{name} is {getattr(found, name)}, got {x}" for name, x in sizes.items()
                  if getattr(found, name) != x]  # fmt: skip
        if others:
            raise ValueError(f"model.load takes every size from {self.load}: there {', '.join(others)}; leave that out")
        return found


@dataclass(frozen=True)
class DataSection:
    train: str = option("", "a token file (train.bin), or the folder that holds it; empty: the text in the package")
    validation: str = option(
        "", "a token file, or the folder that holds a val.bin; empty: val.bin beside the training file, if it is there"
    )
    sequence: int = option(DEFAULT_SEQUENCE, "tokens in a sample")
    documents: bool = option(False, "attention stays inside a document, and no token predicts the next document")


PATTERNS: dict[str, tuple[str, ...]] = {
    "causal": (),
    "window": ("window",),
    "dilated": ("width", "step"),
    "streaming": ("num_sinks", "window"),
    "longformer": ("window", "num_global"),
    "random_blocks": ("share", "size", "seed"),
    "bigbird": ("window", "num_global", "num_random", "size", "seed"),
}
"""The keys of [attention] that each pattern takes."""


@dataclass(frozen=True)
class AttentionSection:
    pattern: Literal["causal", "window", "dilated", "streaming", "longformer", "random_blocks", "bigbird"] = option(
        "causal", "which tokens behind it a token sees"
    )
    window: int = option(0, "how many tokens back (window, longformer, bigbird); with its own, streaming")
    num_global: int = option(0, "first tokens that everyone sees (longformer, bigbird)")
    num_sinks: int = option(0, "first tokens that everyone sees (streaming)")
    num_random: int = option(0, "up to so many blocks more for each block of queries (bigbird)")
    width: int = option(0, "how many tokens, `step` apart (dilated)")
    step: int = option(0, "from one to the next (dilated)")
    share: float = option(0.0, "of the blocks, for each block of queries (random_blocks)")
    size: int = option(128, "tokens in a block (random_blocks, bigbird)")
    seed: int = option(0, "of the random blocks (random_blocks, bigbird)")

    def __post_init__(self) -> None:
        taken = PATTERNS[self.pattern]
        for entry in dataclasses.fields(self)[1:]:
            key, value = f"attention.{entry.name}", getattr(self, entry.name)
            if entry.name not in taken and value != entry.default:
                takes = f"it takes {', '.join(taken)}" if taken else "it takes nothing"
                raise ValueError(f"{key} does not go with attention.pattern {self.pattern}, {takes}: got {value}")
            if entry.name in taken and entry.name != "seed" and not value > 0:
                raise ValueError(f"attention.pattern {self.pattern} needs {key} greater than 0: got {value}")
        if self.share > 1:
            raise ValueError(f"attention.share is a part of the blocks, at most 1: got {self.share}")

    def __str__(self) -> str:
        """The pattern and what it takes: streaming(num_sinks=4, window=512)."""
        taken = ", ".join(f"{name}={getattr(self, name)}" for name in PATTERNS[self.pattern])
        return f"{self.pattern}({taken})" if taken else self.pattern


@dataclass(frozen=True)
class TrainSection:
    steps: int = option(240, "optimizer steps in all")
    batch: int = option(12, "samples per step, over all ranks")
    accumulate: int = option(1, "backward passes per step, each on its part of the batch")
    seed: int = option(0, "of the first weights and of the order of the samples")
    precision: Literal["float32", "bfloat16", "float16"] = option("float32", "of the products")
    weights: Literal["float32", "bfloat16"] = option(
        "float32", "of weights, gradients and moments; bfloat16 halves them, and small updates round to nothing"
    )
    recompute: Literal["none", "full", "attention", "elementwise"] = option(
        "none", "in backward: nothing, whole layers, all but attention, or only norms, rotations and SwiGLU"
    )
    offload: bool = option(False, "what recomputing keeps of each layer's input waits in the host's memory")
    compile: bool = option(False, "torch.compile layers, in one piece where nothing is exchanged inside, and the loss")
    tf32: bool = option(False, "float32 products of a GPU with numbers cut to 10 bits behind the point: faster")
    evaluate_every: int = option(80, "steps between losses on the validation file; 0: never")
    evaluate_samples: int = option(32, "samples in such a loss")
    tensorboard: bool = option(False, "write TensorBoard events too")
    max_restarts: int = option(3, "restarts after the failure of a rank, in one command; under torchrun its own option")


@dataclass(frozen=True)
class OptimizerSection:
    lr: float = option(7e-3, "the highest learning rate")
    final_lr: float = option(0.1, "the last learning rate, as a part of the highest")
    warmup: int = option(10, "steps in which the rate rises from 0")
    weight_decay: float = option(0.1, "of matrices; norms have none")
    beta1: float = option(0.9, "")
    beta2: float = option(0.95, "")
    eps: float = option(1e-8, "")
    clip: float = option(1.0, "the largest gradient norm; 0: no clipping")
    sharded: bool = option(
        False, "split the optimizer's state over ranks (ZeRO-1), which parallel.shard does in any case"
    )


@dataclass(frozen=True)
class ParallelSection:
    ranks: int = option(0, "processes to start; 0: the product of the degrees, else the GPUs, else 4 on the CPU")
    data: int = option(1, "copies of the model, each with its own samples; 0: the ranks the others leave")
    shard: int = option(1, "ranks over which weights are split (FSDP2), each with its own samples")
    context: int = option(0, "ranks over which a sequence is split; 0: the ranks the others leave")
    tensor: int = option(1, "ranks over which each layer is split")
    strategy: Literal["ring", "double_ring", "gather", "helper", "ulysses", "hybrid"] = option(
        "ring", "how keys reach queries"
    )
    inner: int = option(0, "of the context ranks, those of one node (double_ring) or one exchange of heads (hybrid)")
    layout: Literal["zigzag", "striped", "contiguous", "balanced"] = option(
        "zigzag", "who holds which tokens; balanced: blocks of 128, by the work of the attention's pattern"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: the GPUs if there are any")
    transport: Literal["auto", "symmetric", "group"] = option(
        "auto",
        "how attention sends data between ranks: copies into the receiver's memory (symmetric), or the process group",
    )
    share_gpu: bool = option(False, "all ranks on the first GPU, to develop and debug parallel runs with one GPU")
    timeout: float = option(300.0, "seconds before a stalled exchange is an error")

    def degrees(self, world_size: int) -> dict[str, int]:
        """All four degrees on this many ranks."""
        if self.data == 0 and self.context == 0:
            raise ValueError("only one degree can take the ranks that are left: give parallel.data or parallel.context")
        rest = {"shard": self.shard, "tensor": self.tensor}
        if self.context:
            return resolve_degrees(world_size, data=self.data or None, context=self.context, **rest)
        taken = self.data * self.shard * self.tensor
        return resolve_degrees(world_size, data=self.data, context=max(1, world_size // max(1, taken)), **rest)

    def default_ranks(self, num_gpus: int) -> int:
        """How many processes to start when none are there."""
        if self.ranks:
            return self.ranks
        if self.data and self.context:
            return self.data * self.shard * self.context * self.tensor
        taken = self.shard * self.tensor * max(1, self.data) * max(1, self.context)
        return num_gpus or taken * max(1, 4 // taken)


@dataclass(frozen=True)
class CheckpointSection:
    folder: str = option("runs/tiny", "everything the run writes")
    every: int = option(80, "steps between checkpoints; 0: only the last, and those of checkpoint.minutes")
    minutes: float = option(0.0, "longest time between checkpoints, in minutes; 0: no limit")
    grace: float = option(0.0, "seconds to save and exit after SIGTERM or Ctrl-C; 0: no limit")
    keep: int = option(2, "how many to keep")
    resume: bool = option(True, "go on from the newest whole checkpoint in the folder")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    attention: AttentionSection = field(default_factory=AttentionSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def __post_init__(self) -> None:
        at_least = {
            "data.sequence": 1,
            "train.steps": 1,
            "train.batch": 1,
            "train.accumulate": 1,
            "train.evaluate_every": 0,
            "train.evaluate_samples": 1,
            "optimizer.warmup": 0,
            "optimizer.lr": 0,
            "optimizer.clip": 0,
            "parallel.ranks": 0,
            "parallel.data": 0,
            "parallel.shard": 1,
            "parallel.context": 0,
            "parallel.tensor": 1,
            "parallel.inner": 0,
            "parallel.timeout": 1,
            "train.max_restarts": 0,
            "checkpoint.every": 0,
            "checkpoint.keep": 1,
        }
        for key, least in at_least.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if not value >= least:
                raise ValueError(f"{key} must be at least {least}: got {value}")
            if isinstance(value, int) and value > MOST:
                raise ValueError(f"{key} must be at most {MOST:,}: got {value:,}")
        for key, (rule, holds) in RULES.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if not holds(value):
                usual = {entry.name: entry.default for entry in dataclasses.fields(SECTIONS[section])}[name]
                raise ValueError(f"{key} must be {rule}: got {value!r}; the default is {usual!r}")
        train, parallel = self.train, self.parallel
        if (parallel.strategy in ("double_ring", "hybrid")) != (parallel.inner > 0):
            raise ValueError(
                "parallel.inner is how many context ranks are near each other, for double_ring and hybrid and only for "
                f"them: got strategy {parallel.strategy} and inner {parallel.inner}"
            )
        if train.weights == "bfloat16" and train.precision != "bfloat16":
            raise ValueError(
                f"bfloat16 weights make bfloat16 products: got train.precision {train.precision}; set it to bfloat16"
            )
        if train.offload and train.recompute not in ("full", "attention"):
            raise ValueError(
                "train.offload moves the layer inputs that recomputing keeps: "
                f'got train.recompute {train.recompute}; set it to "full" or "attention"'
            )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """The config as TOML."""
        lines = []
        for section, values in self.as_dict().items():
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
        return "\n".join(lines)


def parse(arguments: Sequence[str] = ()) -> TrainConfig:
    """A config from a command line: at most one TOML file, then `--section.key value` or `--section.key=value`."""
    rest = list(arguments)
    raw: dict[str, dict[str, Any]] = {}
    if rest and not rest[0].startswith("--"):
        raw = read_toml(rest.pop(0))
    changes: dict[str, str | None] = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ValueError(
                f"expected an option like --train.steps 100: got {word!r}; a TOML file comes before the options"
            )
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        value: str | None = text
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else None
        changes[key] = value
    for key, given in changes.items():
        section, _, name = key.partition(".")
        _known(section, (*SECTIONS, "dry-run"), "section", "--")
        if given is None and get_type_hints(SECTIONS[section]).get(name, bool) is not bool:
            raise ValueError(f"--{key} needs a value: got none; write --{key}=VALUE")
        raw.setdefault(section, {})[name] = True if given is None else Typed(given)  # a bare switch means true
    return build(raw)


class Typed(str):
    """A value from the command line: text that takes its key's type."""


def read_toml(path: str | Path) -> dict[str, dict[str, Any]]:
    """A TOML file of sections."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"a config is a TOML file: got the folder {path}; to go on with a run that is in it, "
            f"use --checkpoint.folder {shlex.quote(str(path))}"
        )
    data = read_bytes(path, "give a TOML file, or options only")
    try:
        raw = parse_toml(data.decode("utf-8-sig"))
    except ValueError as error:  # not TOML, not UTF-8, a number or a nesting beyond Python's
        raise ValueError(f"{path} is not TOML: {error}") from error
    for name, value in raw.items():
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name} must be in a section, like [train]")
    return raw


def build(raw: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """A config from a dictionary of sections."""
    made = {}
    for section, values in raw.items():
        cls = SECTIONS[_known(section, SECTIONS, "section", "")]
        hints = get_type_hints(cls)
        for name in values:
            _known(name, hints, "key", f"{section}.")
        made[section] = cls(**{n: _convert(f"{section}.{n}", v, hints[n]) for n, v in values.items()})
    return TrainConfig(**made)


def describe_options() -> str:
    """Every option with its default and what it means."""
    lines = []
    for section, cls in SECTIONS.items():
        for entry in dataclasses.fields(cls):
            choices = "|".join(get_args(get_type_hints(cls)[entry.name]))
            text = " ".join(filter(None, (entry.metadata["help"], f"({choices})" if choices else "")))
            name = f"--{section}.{entry.name}"
            lines.append(f"  {name:<26} {_toml(entry.default):<12} {text}".rstrip())
        lines.append("")
    return "\n".join(lines)


MOST = 10**12
"""The largest count in a config: of steps, tokens, samples or ranks."""
SEED = ("a number of 64 bits, -2**63 to 2**64 - 1", lambda x: -(2**63) <= x < 2**64)
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "train.seed": SEED,
    "attention.seed": SEED,
    "optimizer.lr": ("finite", math.isfinite),
    "optimizer.final_lr": ("finite and at least 0", lambda x: 0 <= x < math.inf),
    "optimizer.weight_decay": ("finite and at least 0", lambda x: 0 <= x < math.inf),
    "optimizer.beta1": ("at least 0 and less than 1", lambda x: 0 <= x < 1),
    "optimizer.beta2": ("at least 0 and less than 1", lambda x: 0 <= x < 1),
    "optimizer.eps": ("finite and greater than 0", lambda x: 0 < x < math.inf),
    "parallel.timeout": (f"at most {LONGEST:.0f} seconds, or no timer holds it", lambda x: x <= LONGEST),
    "checkpoint.minutes": ("finite and at least 0", lambda x: 0 <= x < math.inf),
    "checkpoint.grace": (f"at least 0 and at most {LONGEST:.0f} seconds", lambda x: 0 <= x <= LONGEST),
    "checkpoint.folder": ("the name of a folder", lambda x: bool(x.strip())),
}
"""What a value must be beyond a least one."""


SECTIONS: dict[str, Any] = {
    entry.name: get_type_hints(TrainConfig)[entry.name] for entry in dataclasses.fields(TrainConfig)
}


def _known(name: str, names: Collection[str], what: str, prefix: str) -> str:
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {prefix}{close[0]}?" if close else f"choose one of {', '.join(names)}"
        raise ValueError(f"unknown {what} {prefix}{name}: {hint}")
    return name


def _convert(key: str, value: Any, kind: Any) -> Any:
    """A value as its key's type; text from a command line is read, anything else must fit."""
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
        if kind is str and isinstance(value, str):
            return str(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if type(value) is kind:
            return value
    except (KeyError, ValueError, OverflowError):  # OverflowError: an integer beyond any float
        pass
    raise ValueError(f"{key} must be {_KINDS[kind]}: got {value!r}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
