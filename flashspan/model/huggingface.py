"""Hugging Face checkpoints, read and written: safetensors and JSON, by our own reading of both.

    model = load_llama("path/to/Llama-3.2-1B", attention=flashspan.attention)
    save_llama(model, "out")

A folder from a stranger runs nothing here: no pickle is opened, config.json is read field by field, an index may name
only files beside it, and sizes are bounded before they are believed.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import LlamaConfig, RopeScaling
from .llama import Attend, Llama

# Ours -> theirs; {} is a layer's number. One table serves reading and writing.
NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.query.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.key.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.value.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.ffn.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.ffn.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.ffn.down.weight": "model.layers.{}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# config.json field -> ours. Fields not named here or below are not read.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_width",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_tokens",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
OPTIONAL = {"num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"}
# Fields that would change what is computed: they may be absent or say this.
REQUIRED_VALUES = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
LLAMA_3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

MAX_JSON_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
MAX_TENSORS = 100_000
FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights may be, as safetensors calls it."""
SHARD_BYTES = 5 * 2**30

Part = Callable[[str, torch.Size], tuple[slice, ...] | None]
"""part(name, whole shape) -> the slices of this parameter to read; None for all of it."""


def load_llama(
    folder: str | Path,
    *,
    attention: Attend,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> Llama:
    """The model of a checkpoint folder, with its weights, in `dtype` (None: as stored)."""
    config = read_config(folder)
    locate(folder, config)
    with torch.device("meta"):
        model = Llama(config, attention=attention)
    weights = {name: value.to(device, dtype or value.dtype) for name, value in read_weights(folder, config)}
    model.load_state_dict(weights, strict=not config.tie_embeddings, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model


def check_config(folder: str | Path, config: LlamaConfig) -> None:
    """Refuse a checkpoint whose config.json describes another model than this one, or than its weights.

    max_tokens may differ: nothing reads it.
    """
    theirs, ours = ({**dataclasses.asdict(x), "max_tokens": 0} for x in (read_config(folder), config))
    if differ := [f"{name} is {theirs[name]}, not {value}" for name, value in ours.items() if theirs[name] != value]:
        raise ValueError(
            f"{folder} is a checkpoint of another model than the one it is to fill: {'; '.join(differ)}; "
            "make the model from read_config(folder), or choose another folder"
        )
    locate(folder, config)


def save_llama(model: Llama, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write config.json and the model's weights, in shards; the names of the files."""
    return save_state(model.state_dict(), model.config, folder, shard_bytes=shard_bytes)


def save_state(
    state: Mapping[str, Tensor], config: LlamaConfig, folder: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """`save_llama` of whole tensors under our names, without a model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, theirs in names(config).items():
        value = state[name].detach().cpu().contiguous()
        if shards[-1] and used + value.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][theirs] = value
        used += value.nbytes
    files = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for i in range(len(shards))
    ]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(value.nbytes for shard in shards for value in shard.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        files.append("model.safetensors.index.json")
    dtype = str(next(iter(shards[0].values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(describe_config(config, dtype), indent=2))
    for file in files:  # the library lets nobody but the owner read what it writes
        shutil.copymode(folder / "config.json", folder / file)
    return [*files, "config.json"]


def names(config: LlamaConfig) -> dict[str, str]:
    """Every stored parameter of a model: our name -> theirs. A tied head is not stored."""
    found: dict[str, str] = {}
    for ours, theirs in NAMES.items():
        if "{}" in ours:
            found |= {ours.format(i): theirs.format(i) for i in range(config.num_layers)}
        elif ours != "head.weight" or not config.tie_embeddings:
            found[ours] = theirs
    return found


def read_weights(folder: str | Path, config: LlamaConfig, *, part: Part | None = None) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of every parameter, one at a time; with `part`, only those slices leave the disk."""
    where = locate(folder, config)
    wanted = names(config)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Llama(config, attention=lambda *_: None).state_dict().items()}
    by_file: dict[Path, list[str]] = {}
    for ours, file in where.items():
        by_file.setdefault(file, []).append(ours)
    # All shapes before the first tensor: a model must not be left with half of another's weights.
    for file, ours_here in by_file.items():
        with safe_open(file, framework="pt") as stored:
            for ours in ours_here:
                shape = torch.Size(stored.get_slice(wanted[ours]).get_shape())
                if shape != shapes[ours]:
                    raise ValueError(
                        f"{wanted[ours]} in {file} is {tuple(shape)}, not the {tuple(shapes[ours])} that config.json "
                        "implies: weights and config are of different models"
                    )
                if (kind := stored.get_slice(wanted[ours]).get_dtype()) not in FLOATS:
                    raise ValueError(
                        f"{wanted[ours]} in {file} holds numbers of type {kind}: weights are {', '.join(FLOATS)}; "
                        "fetch the checkpoint that was not quantized"
                    )
    for file, ours_here in by_file.items():
        with safe_open(file, framework="pt") as stored:
            for ours in ours_here:
                view, slices = stored.get_slice(wanted[ours]), None if part is None else part(ours, shapes[ours])
                yield ours, view[slices] if slices is not None else view[:]


def locate(folder: str | Path, config: LlamaConfig) -> dict[str, Path]:
    """Which file holds each parameter of a model, by our names. Weights of more or fewer layers are refused.

    This reads names only, and comes before a model is built: else a number in config.json could ask for any memory.
    """
    held = find_tensors(folder)
    num_layers = len({name.split(".")[2] for name in held if name.startswith("model.layers.")})
    if num_layers != config.num_layers:
        raise ValueError(
            f"{folder}: config.json says {config.num_layers} layers and the weights have {num_layers}: they are of "
            "different models, or a file is missing; fetch both again"
        )
    wanted = names(config)
    if missing := [theirs for theirs in wanted.values() if theirs not in held]:
        raise ValueError(f"{folder} lacks {len(missing)} tensors that its config implies: {', '.join(missing[:5])}")
    return {ours: held[theirs] for ours, theirs in wanted.items()}


def find_tensors(folder: str | Path) -> dict[str, Path]:
    """Which file of a checkpoint folder holds each tensor, by their names; every header is checked."""
    folder = Path(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not 0 < len(files) <= MAX_TENSORS:
            raise ValueError(f"{index} needs a weight_map of 1 to {MAX_TENSORS} tensors")
        for file in set(map(str, files.values())):
            if Path(file).name != file or not file.endswith(".safetensors") or "\\" in file or file.startswith("."):
                raise ValueError(
                    f"{index} may name only .safetensors files beside it: got {file!r}; do not trust this checkpoint"
                )
        found: dict[str, Path] = {}
        for file in sorted(set(files.values())):
            held = read_header(folder / file)
            found |= {name: folder / file for name, named in files.items() if named == file and name in held}
        return found
    if single.exists():
        return dict.fromkeys(read_header(single), single)
    pickles = [path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code when opened: "
            "it is refused; get the safetensors files, or convert them where you trust their origin"
        )
    raise ValueError(f"no checkpoint in {folder}: expected model.safetensors or model.safetensors.index.json")


def read_header(file: Path) -> set[str]:
    """The names of the tensors in a safetensors file, once its header is known to be sane and its length right."""
    if not file.exists():
        raise ValueError(f"{file} is missing: the checkpoint is incomplete; fetch it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, max(0, size - 8)):
        raise ValueError(
            f"{file} is not a safetensors file, or is truncated: its header claims {length} of {size} bytes "
            f"(at most {MAX_HEADER_BYTES} are read)"
        )
    try:
        with safe_open(file, framework="pt") as stored:
            found = set(stored.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or truncated: {error}; fetch it again") from error
    if len(found) > MAX_TENSORS:
        raise ValueError(f"{file} holds {len(found)} tensors: at most {MAX_TENSORS} are read")
    return found


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    if not file.is_file():
        raise ValueError(f"{file} is {'no file' if file.exists() else 'missing'}")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file} is {file.stat().st_size} bytes: at most {MAX_JSON_BYTES} are read")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object: got a {type(found).__name__}")
    return found


def read_config(folder: str | Path) -> LlamaConfig:
    """The config of a checkpoint folder: the fields we know, and a refusal of any that would change the model."""
    file = Path(folder) / "config.json"
    raw = read_json(file)
    if raw.get("model_type") != "llama":
        raise ValueError(f"{file} must describe a llama: got model_type {raw.get('model_type')!r}")
    for field, needed in REQUIRED_VALUES.items():
        if raw.get(field, needed) != needed:
            raise ValueError(f"{file} asks for {field}={raw[field]!r}: only {needed!r} is supported")
    if missing := [field for field in FIELDS if field not in OPTIONAL and field not in raw]:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    values: dict[str, Any] = {ours: raw[theirs] for theirs, ours in FIELDS.items() if raw.get(theirs) is not None}
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("norm_eps", 1e-6)  # what transformers reads into a file that does not say
    for name, value in values.items():
        kind: Any = bool if name == "tie_embeddings" else (int, float) if name == "norm_eps" else int
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{file}: {name} cannot be {value!r}")
    # One dictionary in newer files; a number and a dictionary in older ones.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{file}: the rope settings must be an object, got {rope!r}")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    rope = {**rope, "rope_theta": 10000.0 if theta is None else theta}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{file} asks for rope type {kind!r}: default and llama3 are supported")
    needed = ("rope_theta", *(LLAMA_3_ROPE if kind == "llama3" else ()))
    if missing := [repr(key) for key in needed if key not in rope]:
        raise ValueError(f"{file}: rope settings of type {kind} are incomplete: {', '.join(missing)} is missing")
    for key in needed:
        if not isinstance(rope[key], (int, float)) or isinstance(rope[key], bool):
            raise ValueError(f"{file}: {key} must be a number, got {rope[key]!r}")
    try:
        values |= {"rope_theta": float(rope["rope_theta"]), "norm_eps": float(values["norm_eps"])}
        if kind == "llama3":
            factor, low, high, original = (rope[key] for key in LLAMA_3_ROPE)
            values["rope_scaling"] = RopeScaling(float(factor), float(low), float(high), int(original))
        return LlamaConfig(**values)
    except (ValueError, OverflowError) as error:  # OverflowError: an integer beyond any float
        raise ValueError(f"{file}: {error}") from error


def describe_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    """The config.json that `transformers` (any version) and `read_config` understand."""
    raw: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    raw |= {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    raw |= {"attention_bias": False, "mlp_bias": False, "torch_dtype": dtype, "rope_theta": config.rope_theta}
    raw["rope_scaling"] = None
    if config.rope_scaling is not None:
        values = (
            config.rope_scaling.factor,
            config.rope_scaling.low_freq_factor,
            config.rope_scaling.high_freq_factor,
            config.rope_scaling.original_max_tokens,
        )
        raw["rope_scaling"] = {"rope_type": "llama3", **dict(zip(LLAMA_3_ROPE, values, strict=True))}
    return raw
