"""Reads and writes the config.json of a Hugging Face folder, with our own list of fields.

A field that would change the model and is not implemented here is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashspan.files import read_json

from .config import LlamaConfig, RopeScaling

# config.json field -> ours.
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


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


# Fields that change what a model of this family computes -> whether a value changes nothing. Absent and null values
# never change anything.
NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "hidden_act": _one_of("silu"),
    "hidden_activation": _one_of("silu"),
    "attention_bias": _one_of(False),
    "mlp_bias": _one_of(False),
    "qkv_bias": _one_of(False),
    "use_qk_norm": _one_of(False),
    "qk_norm": _one_of(False),
    "clip_qkv": _one_of(),
    "quantization_config": _one_of(),
    "sliding_window": _one_of(),
    "attention_chunk_size": _one_of(),
    "layer_types": lambda value: isinstance(value, list) and all(kind == "full_attention" for kind in value),
    "no_rope_layers": lambda value: isinstance(value, list) and all(kind == 1 for kind in value),
    "partial_rotary_factor": _one_of(1),
    "rope_interleaved": _one_of(False),
    "attn_logit_softcapping": _one_of(),
    "final_logit_softcapping": _one_of(),
    "logit_scale": _one_of(1),
    "logits_scaling": _one_of(1),
    "embedding_multiplier": _one_of(1),
    "residual_multiplier": _one_of(1),
    "attention_multiplier": _one_of(),
    "query_pre_attn_scalar": _one_of(),
    "num_experts": _one_of(0),
    "num_local_experts": _one_of(0),
    "is_encoder_decoder": _one_of(False),
}

LLAMA_3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *LLAMA_3_ROPE)


def read_config(folder: str | Path) -> LlamaConfig:
    """The config in a folder's config.json. ValueError if it asks for anything that is not implemented here."""
    file = Path(folder) / "config.json"
    raw = read_json(file)
    try:
        return _config_of(raw)
    except (ValueError, OverflowError) as error:  # OverflowError: an integer too large for a float
        raise ValueError(f"{file}: {error}") from error


def _config_of(raw: dict[str, Any]) -> LlamaConfig:
    if raw.get("model_type") != "llama":
        raise ValueError(f"it must describe a llama: got model_type {raw.get('model_type')!r}")
    for field, is_neutral in NEUTRAL.items():
        value = raw.get(field)
        unused = field == "sliding_window" and raw.get("use_sliding_window") is False
        if value is not None and not unused and not is_neutral(value):
            raise ValueError(f"{field} is {value!r}, which this LLaMA does not implement")
    if missing := [field for field in FIELDS if field not in OPTIONAL and raw.get(field) is None]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    values: dict[str, Any] = {ours: raw[theirs] for theirs, ours in FIELDS.items() if raw.get(theirs) is not None}
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("norm_eps", 1e-6)  # the default of transformers
    for name, value in values.items():
        kind: Any = bool if name == "tie_embeddings" else (int, float) if name == "norm_eps" else int
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"{name} cannot be {value!r}")
    return LlamaConfig(**{**values, "norm_eps": float(values["norm_eps"]), **_rope(raw)})


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings, as fields of LlamaConfig.

    transformers 5 writes one object, `rope_parameters`; older files have a number `rope_theta` and an object
    `rope_scaling`. If a file has both, they must agree.
    """
    rope: dict[str, Any] = {}
    theta = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    for source in (_rope_object(raw, "rope_parameters"), _rope_object(raw, "rope_scaling"), theta):
        for key, value in source.items():
            if rope.setdefault(key, value) != value:
                raise ValueError(
                    f"{key} is set twice, to {rope[key]!r} and {value!r}, by two of rope_parameters, rope_scaling and "
                    "rope_theta: remove the wrong one"
                )
    rope.setdefault("rope_theta", 10000.0)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope type {kind!r} is not implemented: default and llama3 are")
    needed = ("rope_theta", *(LLAMA_3_ROPE if kind == "llama3" else ()))
    if missing := [repr(key) for key in needed if key not in rope]:
        raise ValueError(f"rope settings of type {kind} are incomplete: {', '.join(missing)} is missing")
    for key in needed:
        if not isinstance(rope[key], (int, float)) or isinstance(rope[key], bool):
            raise ValueError(f"{key} must be a number, got {rope[key]!r}")
    values: dict[str, Any] = {"rope_theta": float(rope["rope_theta"])}
    if kind == "llama3":
        factor, low, high, original = (rope[key] for key in LLAMA_3_ROPE)
        values["rope_scaling"] = RopeScaling(float(factor), float(low), float(high), int(original))
    return values


def _rope_object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The object `name` of rotary settings, with a `rope_type`; empty if the file has no such object."""
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be an object, got {found!r}")
    found = {key: value for key, value in found.items() if value is not None}
    if unknown := [key for key in found if key not in ROPE_FIELDS]:
        raise ValueError(f"{name} sets {', '.join(unknown)}, which this LLaMA does not implement")
    if found.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{name} rotates only a part of each head, which this LLaMA does not implement")
    kinds = [found.pop(key) for key in ("rope_type", "type") if key in found]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ValueError(f"{name} has two types, {kinds[0]!r} and {kinds[1]!r}: remove the wrong one")
    return {"rope_type": kinds[0] if kinds else "default", **found} if kinds or found else {}


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
