"""The config of a training run: sections, each a frozen dataclass that checks its values.

options.py reads it from a TOML file and the command line. This file and options.py import no torch, whose import takes
seconds, so that `flashspan train --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from flashspan.data.defaults import DEFAULT_PRESET, DEFAULT_SEQUENCE
from flashspan.process import LONGEST

if TYPE_CHECKING:
    from flashspan.model import LlamaConfig


def option(default: Any, text: str) -> Any:
    """A field with a default and its help, a noun phrase."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ModelSection:
    preset: str = option("", f"Name of a model: tiny, small, ..., llama-3.2-1b; empty: {DEFAULT_PRESET}, or model.load")
    load: str = option(
        "", "Hugging Face folder, or name on the Hub (ORG/NAME), with the model's config and its initial weights"
    )
    vocab_size: int = option(0, "Vocabulary size; 0: the preset's")
    width: int = option(0, "Hidden size; 0: the preset's")
    num_layers: int = option(0, "Number of layers; 0: the preset's")
    num_heads: int = option(0, "Number of query heads; 0: the preset's")
    num_kv_heads: int = option(0, "Number of key and value heads; 0: the preset's")
    ffn_width: int = option(0, "Hidden size of the feed-forward layers; 0: the preset's")

    def resolve(self) -> LlamaConfig:
        """The config of the model."""
        from flashspan.model import preset, read_config

        names = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name)}
        if not self.load:
            return preset(self.preset or DEFAULT_PRESET, **sizes)
        if not (Path(self.load) / "config.json").exists():
            raise ValueError(
                f"model.load must be a Hugging Face folder: {Path(self.load) / 'config.json'} is missing; give a "
                "checkpoint of a run (runs/tiny/step-00000240) or a name on the Hub (ORG/NAME), or leave it out and "
                "give model.preset"
            )
        found = read_config(self.load)
        if self.preset:
            named = preset(self.preset)
            sizes = {name: getattr(named, name) for name in names} | sizes
        others = [f"model.{name} is {getattr(found, name)} there, got {x}" for name, x in sizes.items()
                  if getattr(found, name) != x]  # fmt: skip
        if others:
            given = f" (model.preset {self.preset})" if self.preset else ""
            raise ValueError(
                f"model.load takes every size from {self.load}: {', '.join(others)}{given}; leave these options out"
            )
        return found


@dataclass(frozen=True)
class DataSection:
    train: str = option("", "Token file (train.bin) or its folder; empty: the text in the package")
    validation: str = option("", "Token file (val.bin) or its folder; empty: val.bin in the training file's folder")
    sequence: int = option(DEFAULT_SEQUENCE, "Tokens per sample")
    documents: bool = option(False, "Attention within documents only, and no loss across their boundaries")


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
        "causal", "Pattern of the attention mask; all patterns are causal"
    )
    window: int = option(
        0,
        "Number of earlier tokens that a token sees (window, longformer, bigbird); in streaming, with the token itself",
    )
    num_global: int = option(0, "Number of first tokens that every query sees (longformer, bigbird)")
    num_sinks: int = option(0, "Number of first tokens that every query sees (streaming)")
    num_random: int = option(0, "Maximum number of random key blocks per query block (bigbird)")
    width: int = option(0, "Number of keys per query, `step` tokens apart (dilated)")
    step: int = option(0, "Distance between keys in tokens (dilated)")
    share: float = option(0.0, "Share of key blocks per query block, at most 1 (random_blocks)")
    size: int = option(128, "Tokens per block (random_blocks, bigbird)")
    seed: int = option(0, "Random seed for the choice of blocks (random_blocks, bigbird)")

    def __post_init__(self) -> None:
        taken = PATTERNS[self.pattern]
        for entry in dataclasses.fields(self)[1:]:
            key, value = f"attention.{entry.name}", getattr(self, entry.name)
            if entry.name not in taken and value != entry.default:
                takes = f"takes {', '.join(taken)}" if taken else "takes no other key"
                raise ValueError(f"attention.pattern {self.pattern} {takes}: got {key} {value}; leave it out")
            if entry.name in taken and entry.name != "seed" and not value > 0:
                raise ValueError(f"attention.pattern {self.pattern} needs {key} greater than 0: got {value}")
        if self.share > 1:
            raise ValueError(f"attention.share is a share of the blocks, more than 0 and at most 1: got {self.share}")

    def __str__(self) -> str:
        """The pattern and its keys: streaming(num_sinks=4, window=512)."""
        taken = ", ".join(f"{name}={getattr(self, name)}" for name in PATTERNS[self.pattern])
        return f"{self.pattern}({taken})" if taken else self.pattern


@dataclass(frozen=True)
class TrainSection:
    steps: int = option(240, "Number of optimizer steps")
    batch: int = option(12, "Samples per step, over all ranks")
    accumulate: int = option(1, "Number of backward passes per step, each on a part of the batch")
    seed: int = option(0, "Random seed for weight initialisation and data order")
    precision: Literal["float32", "bfloat16", "float16"] = option("float32", "Dtype of matmuls")
    weights: Literal["float32", "bfloat16"] = option(
        "float32", "Dtype of weights, gradients and optimizer moments; in bfloat16, small updates round to zero"
    )
    recompute: Literal["none", "full", "attention", "elementwise"] = option(
        "none",
        "Activations recomputed in backward; full: whole layers; attention: all of a layer but attention, whose output "
        "is kept; elementwise: norms, RoPE and SwiGLU",
    )
    offload: bool = option(False, "CPU memory instead of GPU memory for the layer inputs that recomputation needs")
    compile: bool = option(False, "torch.compile for the layers and the loss")
    tf32: bool = option(False, "TF32 tensor cores for float32 matmuls on GPUs: faster, with 10 bits of mantissa")
    evaluate_every: int = option(80, "Steps between evaluations on the validation file; 0: no evaluation")
    evaluate_samples: int = option(32, "Number of samples per evaluation")
    max_restarts: int = option(3, "Maximum number of restarts after the failure of a rank; torchrun has its own option")


@dataclass(frozen=True)
class OptimizerSection:
    lr: float = option(7e-3, "Peak learning rate")
    final_lr: float = option(0.1, "Final learning rate, relative to the peak")
    warmup: int = option(10, "Number of warm-up steps, in which the learning rate rises from 0")
    weight_decay: float = option(0.1, "Weight decay of matrices; norms have none")
    beta1: float = option(0.9, "AdamW's decay rate of the first moment")
    beta2: float = option(0.95, "AdamW's decay rate of the second moment")
    eps: float = option(1e-8, "AdamW's epsilon")
    clip: float = option(1.0, "Largest gradient norm; 0: no clipping")
    sharded: bool = option(False, "Optimizer state sharded over ranks (ZeRO-1); parallel.shard always shards it")


@dataclass(frozen=True)
class ParallelSection:
    ranks: int = option(
        0,
        "Number of processes; 0: the product of the degrees if parallel.data and parallel.context are not 0, else the "
        "number of GPUs, or 4 on a CPU",
    )
    data: int = option(1, "Degree of data parallelism; 0: all remaining ranks")
    shard: int = option(1, "Degree of fully sharded data parallelism (FSDP2)")
    context: int = option(0, "Degree of context parallelism, which splits sequences; 0: all remaining ranks")
    tensor: int = option(1, "Degree of tensor parallelism, which splits layers")
    strategy: Literal["ring", "double_ring", "gather", "helper", "ulysses", "hybrid"] = option(
        "ring", "Strategy of context parallelism"
    )
    inner: int = option(
        0,
        "Number of context ranks on one node (double_ring), or of context ranks that exchange heads with each other "
        "(hybrid)",
    )
    layout: Literal["zigzag", "striped", "contiguous", "balanced"] = option(
        "zigzag",
        "Assignment of tokens to context ranks; balanced: blocks of 128 tokens, with equal work under the pattern",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device type; auto: GPUs if there are any")
    transport: Literal["auto", "symmetric", "group"] = option(
        "auto",
        "Transport of context parallelism: copies into the receiver's memory (symmetric), or the process group",
    )
    share_gpu: bool = option(False, "All ranks on the first GPU, for development and debugging")
    timeout: float = option(300.0, "Timeout of communication in seconds")

    def degrees(self, world_size: int) -> dict[str, int]:
        """All four degrees on this many ranks."""
        from flashspan.parallel.mesh import resolve_degrees

        if self.data == 0 and self.context == 0:
            raise ValueError(
                "only one of parallel.data and parallel.context can be 0 (all remaining ranks): got 0 for both; set one"
            )
        rest = {"shard": self.shard, "tensor": self.tensor}
        if self.context:
            return resolve_degrees(world_size, data=self.data or None, context=self.context, **rest)
        taken = self.data * self.shard * self.tensor
        return resolve_degrees(world_size, data=self.data, context=max(1, world_size // max(1, taken)), **rest)

    def default_ranks(self, num_gpus: int) -> int:
        """The number of processes to start without torchrun."""
        if self.ranks:
            return self.ranks
        if self.data and self.context:
            return self.data * self.shard * self.context * self.tensor
        taken = self.shard * self.tensor * max(1, self.data) * max(1, self.context)
        return num_gpus or taken * max(1, 4 // taken)


@dataclass(frozen=True)
class CheckpointSection:
    folder: str = option("runs/tiny", "Folder for checkpoints and metrics")
    every: int = option(80, "Steps between checkpoints; 0: only at the end and by checkpoint.minutes")
    minutes: float = option(0.0, "Maximum minutes between checkpoints; 0: no limit")
    grace: float = option(0.0, "Seconds to save and exit after SIGTERM, SIGHUP or Ctrl-C; 0: no limit")
    keep: int = option(2, "Number of checkpoints to keep")
    resume: bool = option(True, "Resuming from the newest valid checkpoint in the folder")


@dataclass(frozen=True)
class LogSection:
    tensorboard: bool = option(False, "TensorBoard events in the folder of the run")
    wandb: bool = option(False, "Metrics and config sent to Weights & Biases; WANDB_MODE=offline: kept in the folder")


@dataclass(frozen=True)
class TrainConfig:
    """The config of a run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    attention: AttentionSection = field(default_factory=AttentionSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

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
                "parallel.inner is needed by the strategies double_ring and hybrid, and only by them: got strategy "
                f"{parallel.strategy} and inner {parallel.inner}; "
                + (
                    "leave it out"
                    if parallel.inner
                    else "set it to the context ranks on a node (double_ring) or in an exchange of heads (hybrid)"
                )
            )
        if train.weights == "bfloat16" and train.precision != "bfloat16":
            raise ValueError(
                f"bfloat16 weights need bfloat16 matmuls: got train.precision {train.precision}; set it to bfloat16"
            )
        if train.offload and train.recompute not in ("full", "attention"):
            raise ValueError(
                "train.offload moves the layer inputs that recomputation needs: "
                f'got train.recompute {train.recompute}; set it to "full" or "attention"'
            )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """The config as TOML."""
        lines = []
        for section, values in self.as_dict().items():
            lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in values.items()), ""]
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
    "parallel.timeout": (f"at most {LONGEST:.0f} seconds", lambda x: x <= LONGEST),
    "checkpoint.minutes": ("finite and at least 0", lambda x: 0 <= x < math.inf),
    "checkpoint.grace": (f"at least 0 and at most {LONGEST:.0f} seconds", lambda x: 0 <= x <= LONGEST),
    "checkpoint.folder": ("the name of a folder", lambda x: bool(x.strip())),
}
"""Rules in addition to the minima: for each key, the rule as text, and a function that tests a value."""


SECTIONS: dict[str, Any] = {
    entry.name: get_type_hints(TrainConfig)[entry.name] for entry in dataclasses.fields(TrainConfig)
}


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
