"""Reads and writes Hugging Face checkpoints: safetensors and JSON, with our own checks of both.

    model = load_llama("path/to/Llama-3.2-1B", attention=flashspan.attention)
    save_llama(model, "out")

An untrusted folder cannot run code: no pickle is opened, config.json is read field by field, an index may name only
files in its own folder, and sizes are bounded before they are used. The weights must be exactly those of the config.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashspan.files import read_json, require_file
from flashspan.manifest import MANIFEST, find_damage, write_manifest

from .config import LlamaConfig
from .huggingface_config import describe_config, read_config
from .llama import Attend, Llama

# Our parameter name -> Hugging Face's name; {} is a layer's number. The table is used to read and to write.
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
IGNORED = (".rotary_emb.inv_freq",)
"""Endings of the names of stored tensors that are not weights: old versions of transformers wrote them, none reads
them."""
MAX_HEADER_BYTES = 100 * 2**20
MAX_TENSORS = 100_000
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that weights may have, by their names in safetensors."""
SHARD_BYTES = 5 * 2**30
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
ROWS = 4096
"""The number of rows of two matrices that are compared at a time."""

Part = Callable[[str, torch.Size], tuple[slice, ...] | None]
"""part(name, whole shape) -> the slices of this parameter to read; None for all of it."""


def load_llama(
    folder: str | Path,
    *,
    attention: Attend,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    verify: bool = True,
) -> Llama:
    """The model of a checkpoint folder, with its weights, in `dtype` (None: as stored).

    `verify`: if the folder has a manifest.json, first compare the files with its hashes, which reads them once more.
    """
    if verify:
        refuse_damaged_weights(folder)
    config = read_config(folder)
    # Read the weights before building the model, even on the meta device: they confirm the sizes in config.json.
    weights = {name: value.to(device, dtype or value.dtype) for name, value in read_weights(folder, config)}
    with torch.device("meta"):
        model = Llama(config, attention=attention)
    model.load_state_dict(weights, strict=not config.tie_embeddings, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model


def check_config(folder: str | Path, config: LlamaConfig) -> None:
    """ValueError if a checkpoint's config.json describes another model than `config`, or than its weights.

    It reads only the headers of the weights. max_tokens may differ, since no code uses it.
    """
    theirs, ours = ({**dataclasses.asdict(x), "max_tokens": 0} for x in (read_config(folder), config))
    if differ := [f"{name} is {theirs[name]}, not {value}" for name, value in ours.items() if theirs[name] != value]:
        raise ValueError(
            f"{folder} is a checkpoint of another model than the one to load it into: {'; '.join(differ)}; "
            "make the model from read_config(folder), or choose another folder"
        )
    check_weights(folder, config)


def save_llama(model: Llama, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write config.json, the model's weights in shards, and a manifest of their hashes; return the files' names."""
    files = save_state(model.state_dict(), model.config, folder, shard_bytes=shard_bytes)
    write_manifest(Path(folder), files)
    return [*files, MANIFEST]


def save_state(
    state: Mapping[str, Tensor], config: LlamaConfig, folder: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """`save_llama` for whole tensors under our names, instead of a model; writes no manifest."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in weight_files(folder):  # of a model saved here earlier, perhaps in more files
        (folder / stale).unlink()
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
        SINGLE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(value.nbytes for shard in shards for value in shard.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2))
        files.append(INDEX)
    dtype = str(next(iter(shards[0].values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(describe_config(config, dtype), indent=2))
    for file in files:  # safetensors makes files that only the owner can read
        shutil.copymode(folder / "config.json", folder / file)
    return [*files, "config.json"]


def names(config: LlamaConfig) -> dict[str, str]:
    """Every stored parameter of a model: our name -> Hugging Face's. A tied head is not stored."""
    found: dict[str, str] = {}
    for ours, theirs in NAMES.items():
        if "{}" in ours:
            found |= {ours.format(i): theirs.format(i) for i in range(config.num_layers)}
        elif ours != "head.weight" or not config.tie_embeddings:
            found[ours] = theirs
    return found


def read_weights(folder: str | Path, config: LlamaConfig, *, part: Part | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) for every parameter; with `part`, only its slices are read from disk."""
    # Check all before reading the first: an error must not leave a model with half of another model's weights.
    shapes, by_file = check_weights(folder, config)
    wanted = names(config)
    for file, ours_here in by_file.items():
        with safe_open(file, framework="pt") as stored:
            for ours in ours_here:
                view, slices = stored.get_slice(wanted[ours]), None if part is None else part(ours, shapes[ours])
                yield ours, view[slices] if slices is not None else view[:]


def check_weights(folder: str | Path, config: LlamaConfig) -> tuple[dict[str, torch.Size], dict[Path, list[str]]]:
    """ValueError unless a folder has the weights of this model, with the right shapes and dtypes. Reads headers only.

    Returns the shape of each parameter, and the parameters that each file holds, by our names.
    """
    by_file: dict[Path, list[str]] = {}
    for ours, file in locate(folder, config).items():
        by_file.setdefault(file, []).append(ours)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Llama(config, attention=lambda *_: None).state_dict().items()}
    wanted = names(config)
    for file, ours_here in by_file.items():
        with safe_open(file, framework="pt") as stored:
            for ours in ours_here:
                _check_tensor(stored.get_slice(wanted[ours]), shapes[ours], f"{wanted[ours]} in {file}")
    return shapes, by_file


def _check_tensor(stored: Any, shape: torch.Size, name: str) -> None:
    """ValueError unless a stored tensor has this shape and holds floating-point numbers."""
    if (found := torch.Size(stored.get_shape())) != shape:
        raise ValueError(
            f"{name} is {tuple(found)}, not the {tuple(shape)} that config.json implies: weights and config are of "
            "different models"
        )
    if (kind := stored.get_dtype()) not in FLOATS:
        raise ValueError(
            f"{name} holds numbers of type {kind}: weights are {', '.join(FLOATS)}; "
            "fetch the checkpoint that was not quantized"
        )


def locate(folder: str | Path, config: LlamaConfig) -> dict[str, Path]:
    """The file that holds each parameter of a model, by our names. ValueError if a parameter is missing, or if there is
    a tensor that the model does not have, such as a bias: without it, the model would compute something else.

    Must be called before a model is built: otherwise a number in config.json could request any amount of memory. Reads
    only names, and the values of a stored tied head.
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
        raise ValueError(f"{folder} lacks {len(missing)} tensors that its config implies: {_listed(missing)}")
    extra = set(held) - set(wanted.values())
    if config.tie_embeddings and NAMES["head.weight"] in extra:
        _require_tied(held)
        extra.remove(NAMES["head.weight"])
    if extra := {name for name in extra if not name.endswith(IGNORED)}:
        raise ValueError(
            f"{folder} holds {len(extra)} tensors that a LLaMA of its config.json does not have: "
            f"{_listed(sorted(extra))}; without them the results would differ; check model_type in config.json"
        )
    return {ours: held[theirs] for ours, theirs in wanted.items()}


def _listed(tensors: list[str]) -> str:
    return ", ".join(tensors[:5]) + (", ..." if len(tensors) > 5 else "")


def _require_tied(held: Mapping[str, Path]) -> None:
    """ValueError if a stored head differs from the embedding, to which config.json ties it."""
    embed, head = NAMES["embed.weight"], NAMES["head.weight"]
    with safe_open(held[embed], framework="pt") as first, safe_open(held[head], framework="pt") as second:
        left, right = first.get_slice(embed), second.get_slice(head)
        same = (left.get_shape(), left.get_dtype()) == (right.get_shape(), right.get_dtype())
        rows = left.get_shape()[0] if same else 0
        same = same and all(torch.equal(left[i : i + ROWS], right[i : i + ROWS]) for i in range(0, rows, ROWS))
    if not same:
        raise ValueError(
            f"{held[head].parent}: config.json says that the head is the embedding (tie_word_embeddings), and the "
            f"weights hold another {head}; set tie_word_embeddings to false to use it, or remove the tensor"
        )


def find_tensors(folder: str | Path) -> dict[str, Path]:
    """The file of a checkpoint folder that holds each tensor, by Hugging Face's names. Checks every header."""
    folder = Path(folder)
    index, single = folder / INDEX, folder / SINGLE
    if os.path.lexists(index):
        listed = read_index(index)
        if os.path.lexists(single):
            raise ValueError(f"{folder} holds two sets of weights, {SINGLE} and {INDEX}: remove the wrong one")
        found: dict[str, Path] = {}
        for file in sorted(set(listed.values())):
            for name in read_header(folder / file):
                if listed.get(name) != file:
                    raise ValueError(
                        f"{index} and the files do not agree on which of them holds {name}; fetch all again"
                    )
                found[name] = folder / file
        return found
    if os.path.lexists(single):
        return dict.fromkeys(read_header(single), single)
    pickles = [path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code when opened: "
            "it is refused; get the safetensors files, or convert the pickle to safetensors if you trust its origin"
        )
    raise ValueError(f"no checkpoint in {folder}: expected {SINGLE} or {INDEX}")


def read_index(file: Path) -> dict[str, str]:
    """The name of the file that holds each tensor, according to an index."""
    found = read_json(file).get("weight_map")
    if not isinstance(found, dict) or not 0 < len(found) <= MAX_TENSORS:
        raise ValueError(f"{file} needs a weight_map of 1 to {MAX_TENSORS} tensors")
    for name in set(map(str, found.values())):
        if Path(name).name != name or not name.endswith(".safetensors") or "\\" in name or name.startswith("."):
            raise ValueError(
                f"{file} may name only .safetensors files in its own folder: got {name!r}; do not trust this checkpoint"
            )
    return found


def weight_files(folder: Path) -> list[str]:
    """The names of the weight files and of the weight index in a folder, as `find_tensors` reads them."""
    return sorted(path.name for path in folder.iterdir() if WEIGHTS.fullmatch(path.name))


def files_to_read(folder: Path) -> set[str]:
    """The names of the files that a folder's model is read from."""
    files = {"config.json", *weight_files(folder)}
    return files | (set(read_index(folder / INDEX).values()) if INDEX in files else {SINGLE})


def refuse_damaged_weights(folder: str | Path) -> None:
    """ValueError if a folder's files differ from its manifest.json, or the manifest does not list the model's files.

    A folder without a manifest, which another program wrote, passes."""
    folder = Path(folder)
    if not os.path.lexists(folder / MANIFEST):
        return
    try:
        fault = find_damage(folder, files_to_read(folder))
    except (ValueError, OSError) as error:
        fault = str(error)
    if fault:
        raise ValueError(
            f"{folder} is damaged ({fault}): restore it, or remove {MANIFEST} if the files were changed on purpose"
        )


def read_header(file: Path) -> set[str]:
    """The names of the tensors in a safetensors file. ValueError if its header or its length is wrong."""
    size = require_file(file, "the checkpoint is incomplete; fetch it again").stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, max(0, size - 8)):
        raise ValueError(
            f"{file} is not a safetensors file, or is truncated: it has {size} bytes and claims a header of {length} "
            f"(at most {MAX_HEADER_BYTES} are allowed)"
        )
    try:
        with safe_open(file, framework="pt") as stored:
            found = set(stored.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or truncated: {error}; fetch it again") from error
    if len(found) > MAX_TENSORS:
        raise ValueError(f"{file} holds {len(found)} tensors: at most {MAX_TENSORS} are read")
    return found
