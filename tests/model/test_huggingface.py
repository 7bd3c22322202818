"""Checkpoints in Hugging Face's format: written files are read back, and untrusted files are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashspan import attention
from flashspan.checkpoint.sharded import full_state_dict
from flashspan.launch import Ranks
from flashspan.model import (
    Llama,
    LlamaConfig,
    RopeScaling,
    huggingface,
    load_llama,
    preset,
    read_config,
    read_weights,
    save_llama,
    save_state,
)
from flashspan.parallel import apply_fully_sharded, apply_tensor_parallel, build_mesh
from flashspan.train.build import TENSOR_PLAN, load_into

CONFIG = LlamaConfig(
    61, 32, 3, 4, 2, 48, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), norm_eps=1e-6, max_tokens=99
)


@pytest.fixture
def model() -> Llama:
    model = Llama(CONFIG, attention=attention)
    model.initialize(3)
    return model


@pytest.mark.parametrize("shard_bytes", [2**30, 9000])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    config = preset("tiny", num_layers=2, tie_embeddings=tied)
    model = Llama(config, attention=attention)
    model.initialize(3)
    files = save_llama(model, tmp_path, shard_bytes=shard_bytes)
    assert ("model.safetensors.index.json" in files) == (shard_bytes == 9000)
    again = load_llama(tmp_path, attention=attention)
    assert again.config == config
    assert (again.head.weight is again.embed.weight) == tied
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_writes_is_read(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            tie_word_embeddings=tied,
            rope_parameters={**rope, "original_max_position_embeddings": 64},
        )
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    ours = load_llama(tmp_path, attention=attention)
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, got = theirs(tokens).logits, ours.logits(ours(tokens))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_only_the_slices_asked_for_are_read(model: Llama, tmp_path: Path) -> None:
    save_llama(model, tmp_path)
    parts = dict(read_weights(tmp_path, CONFIG, part=lambda name, shape: (slice(1, 5),)))
    for name, value in model.state_dict().items():
        assert torch.equal(parts[name], value[1:5])


def write_strange(model: Llama, folder: Path, **options: Any) -> list[str]:
    """A folder without a manifest, as other programs write one."""
    return save_state(model.state_dict(), model.config, folder, **options)


def _edit(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw |= changes
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "must describe a llama: got model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act .*'gelu'"),
        ({"attention_bias": True}, "attention_bias .*True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "of type llama3 are incomplete: 'factor'"),
        ({"hidden_size": "32"}, "width cannot be '32'"),
        ({"num_key_value_heads": 3}, "the key heads must divide the query heads"),
        ({"num_hidden_layers": 4}, "config.json says 4 layers and the weights have 3"),
        ({"num_hidden_layers": 2}, "config.json says 2 layers and the weights have 3"),
        ({"rope_scaling": "llama3"}, r"config\.json: rope_scaling .*'llama3'"),
        ({"rope_scaling": [8.0]}, r"config\.json: rope_scaling .*\[8\.0\]"),
        ({"rope_theta": "abc"}, r"config\.json: rope_theta must be a number, got 'abc'"),
        ({"rope_theta": float("inf")}, r"config\.json .*Infinity"),
        ({"rope_theta": 10**400}, r"config\.json: int too large"),
        ({"rms_norm_eps": float("inf")}, r"config\.json .*Infinity"),
        ({"intermediate_size": 2**62}, r"config\.json: ffn_width must be 1 to 268,435,456: got 4611686018427387904"),
        ({"vocab_size": 2**70}, r"config\.json: vocab_size must be 1 to 268,435,456"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": None, "num_hidden_layers": None}, "vocab_size, num_hidden_layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .*0.5"),
        ({"sliding_window": 4096}, "sliding_window .*4096"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_type .*default.* and .*llama3"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": None}, "rope_theta .*10000.* and 500000"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "two types"),
        ({"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.25}}, "part of each head"),
        ({"rope_scaling": {"rope_type": "default", "mscale": 0.7}}, "mscale"),
        ({"intermediate_size": 47}, "weights and config are of different models"),
    ],
)
def test_a_config_we_cannot_honour_is_refused(model: Llama, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write_strange(model, tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=says):
        load_llama(tmp_path, attention=attention)


@pytest.mark.parametrize("shard_bytes", [2**30, 9000])
def test_a_claim_of_many_layers_builds_none(
    model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    write_strange(model, tmp_path, shard_bytes=shard_bytes)
    _edit(tmp_path, num_hidden_layers=10**8)
    monkeypatch.setattr(huggingface, "Llama", lambda *args, **rest: pytest.fail("it was built"))
    monkeypatch.setattr(huggingface, "names", lambda config: pytest.fail("its layers were named"))
    claimed = read_config(tmp_path)
    for load in (
        lambda: load_llama(tmp_path, attention=attention),
        lambda: list(read_weights(tmp_path, claimed)),
        lambda: huggingface.check_config(tmp_path, claimed),
    ):
        with pytest.raises(ValueError, match=r"config\.json says 100000000 layers and the weights have 3"):
            load()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floating_point_numbers_are_refused(
    model: Llama, tmp_path: Path, dtype: torch.dtype
) -> None:
    write_strange(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"holds numbers of type \w+: weights are F64, F32, F16, BF16; fetch"):
        load_llama(tmp_path, attention=attention)


def test_a_folder_in_place_of_a_config_is_named(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is a folder"):
        load_llama(tmp_path, attention=attention)


def test_a_tensor_that_is_missing_is_named(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path, shard_bytes=9000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj"):
        load_llama(tmp_path, attention=attention)


def test_older_and_newer_rope_fields_mean_the_same(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    _edit(
        tmp_path,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={"rope_theta": 5e5, **raw["rope_scaling"]},
        auto_map={"AutoModel": "evil.Model"},
    )
    assert read_config(tmp_path) == CONFIG


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ".safetensors"]
)
def test_an_index_that_points_elsewhere_is_refused(model: Llama, tmp_path: Path, name: str) -> None:
    write_strange(model, tmp_path, shard_bytes=9000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lm_head.weight"] = name
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        load_llama(tmp_path, attention=attention)


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 1.0},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
        {"mlp_bias": None, "attention_dropout": 0.0, "use_cache": True, "pretraining_tp": 1},
        {"rope_parameters": {"rope_theta": 5e5}},
    ],
    ids=str,
)
def test_a_field_that_says_nothing_is_accepted(model: Llama, tmp_path: Path, changes: dict[str, Any]) -> None:
    write_strange(model, tmp_path)
    if "rope_parameters" in changes:  # the new field has the values of the older ones
        old = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
        changes = {"rope_parameters": {**changes["rope_parameters"], **old}}
    _edit(tmp_path, **changes)
    assert read_config(tmp_path) == CONFIG


def _rewrite(folder: Path, **tensors: Tensor) -> None:
    """Add or replace tensors in a folder's only weight file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name.replace("__", "."): value for name, value in tensors.items()}}, file)


def test_a_stored_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    tied = replace(CONFIG, tie_embeddings=True)
    tied_model = Llama(tied, attention=attention)
    tied_model.initialize(3)
    write_strange(tied_model, tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite(tmp_path, lm_head__weight=embedding.clone())
    same = load_llama(tmp_path, attention=attention)
    assert torch.equal(same.head.weight, embedding)
    other = embedding.clone()
    other[-1, -1] += 1.0
    _rewrite(tmp_path, lm_head__weight=other)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_llama(tmp_path, attention=attention)
    _edit(tmp_path, tie_word_embeddings=False)  # the remedy in the message
    assert torch.equal(load_llama(tmp_path, attention=attention).head.weight, other)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight", "x"]
)
def test_a_tensor_that_the_model_does_not_have_is_refused(model: Llama, tmp_path: Path, name: str) -> None:
    write_strange(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=re.escape(name)):
        load_llama(tmp_path, attention=attention)


def test_frequencies_that_old_files_store_are_passed_over(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    assert torch.equal(load_llama(tmp_path, attention=attention).head.weight, model.head.weight)


def test_a_model_saved_over_another_leaves_none_of_its_files(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path, shard_bytes=9000)
    with torch.no_grad():
        model.head.weight += 1.0
    written = write_strange(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    assert torch.equal(load_llama(tmp_path, attention=attention).head.weight, model.head.weight)


def test_two_sets_of_weights_in_one_folder_are_refused(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path / "one")
    write_strange(model, tmp_path / "many", shard_bytes=9000)
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "many")
    with pytest.raises(ValueError, match="two sets of weights"):
        load_llama(tmp_path / "many", attention=attention)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_in_place_of_a_file_is_refused(model: Llama, tmp_path: Path, name: str) -> None:
    write_strange(model, tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        load_llama(tmp_path, attention=attention)


@pytest.mark.parametrize("shard_bytes", [2**30, 9000])
def test_a_flipped_byte_of_a_folder_of_ours_is_noticed(model: Llama, tmp_path: Path, shard_bytes: int) -> None:
    files = save_llama(model, tmp_path, shard_bytes=shard_bytes)
    assert len(files) >= (3 if shard_bytes == 2**30 else 5)
    for name in set(files) - {"manifest.json"}:
        data = bytearray((tmp_path / name).read_bytes())
        for at in (len(data) - 2, len(data) // 2):
            (tmp_path / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(ValueError, match=rf"is damaged \(.*{name} "):
                load_llama(tmp_path, attention=attention)
        (tmp_path / name).write_bytes(data)
    assert load_llama(tmp_path, attention=attention).config == model.config


def test_a_field_that_is_set_twice_is_refused(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path)
    file = tmp_path / "config.json"
    file.write_text('{"rms_norm_eps": 0.5, ' + file.read_text()[1:])
    with pytest.raises(ValueError, match=r"rms_norm_eps.* is set twice"):
        load_llama(tmp_path, attention=attention)


def test_a_pickle_is_never_opened(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=r"a pickle \(pytorch_model.bin\), which can run any code when opened"):
        load_llama(tmp_path, attention=attention)


@pytest.mark.parametrize("damage", ["truncated", "huge header", "garbage", "empty"])
def test_a_damaged_file_is_named(model: Llama, tmp_path: Path, damage: str) -> None:
    write_strange(model, tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    damaged = {
        "truncated": data[: len(data) // 2],
        "huge header": (2**40).to_bytes(8, "little") + data[8:],
        "garbage": data[:8] + b"?" * 64 + data[72:],
        "empty": b"",
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors is (damaged|not a safetensors file)"):
        load_llama(tmp_path, attention=attention)


def test_a_missing_shard_is_named(model: Llama, tmp_path: Path) -> None:
    files = write_strange(model, tmp_path, shard_bytes=9000)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"{files[1]} is missing"):
        load_llama(tmp_path, attention=attention)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": 2}, "num_layers is 2, not 3"),
        ({"num_layers": 4}, "num_layers is 4, not 3"),
        ({"num_heads": 2, "head_dim": 16}, "num_heads is 2, not 4; head_dim is 16, not 8"),
        ({"ffn_width": 40, "norm_eps": 1e-5}, "ffn_width is 40, not 48; norm_eps is 1e-05, not 1e-06"),
        ({"tie_embeddings": True}, "tie_embeddings is True, not False"),
        ({"rope_theta": 1e4, "rope_scaling": None}, "rope_theta is 10000.0, not 500000.0; rope_scaling is None, not"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(
    model: Llama, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    other = Llama(replace(CONFIG, **changes), attention=attention)
    other.initialize(4)
    write_strange(other, tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"checkpoint of another model than the one to load it into: {says}"):
        load_into(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_another_shape_than_their_config_change_nothing(model: Llama, tmp_path: Path) -> None:
    other = Llama(replace(CONFIG, ffn_width=40), attention=attention)
    other.initialize(4)
    write_strange(other, tmp_path, shard_bytes=9000)
    _edit(tmp_path, intermediate_size=48)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="weights and config are of different models"):
        load_into(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_for_longer_contexts_takes_the_same_weights(model: Llama, tmp_path: Path) -> None:
    write_strange(model, tmp_path)
    longer = Llama(replace(CONFIG, max_tokens=10 * CONFIG.max_tokens), attention=attention)
    longer.initialize(4)
    load_into(longer, tmp_path)
    assert all(torch.equal(value, longer.state_dict()[name]) for name, value in model.state_dict().items())


def load_split(folder: Path, degrees: dict[str, int], tokens: torch.Tensor) -> dict[str, Any]:
    """On a rank: load a split model. Returns what was read, what all ranks hold, and what the model computes."""
    mesh, config = build_mesh(**degrees), read_config(folder)
    with torch.device("meta"):
        model = Llama(config, attention=attention)
    if degrees.get("tensor", 1) > 1:
        apply_tensor_parallel(model, mesh["tensor"], TENSOR_PLAN)
    if degrees.get("shard", 1) > 1:
        apply_fully_sharded(model, mesh, model.layers)
    model.to_empty(device="cpu")
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    read = {"bytes": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "safe_open", lambda *args, **rest: CountedFile(read, *args, **rest))
        load_into(model, folder)
    held = sum(DTensor.to_local(p).nbytes for p in model.parameters())  # every parameter is split or copied
    with torch.no_grad():
        hidden = model(tokens)
    return {"read": read["bytes"], "held": held, "state": full_state_dict(model), "hidden": hidden}


class CountedFile:
    """A safetensors file that counts the bytes read from it."""

    def __init__(self, read: dict[str, int], *args: Any, **rest: Any) -> None:
        self.read, self.file = read, safe_open(*args, **rest)

    def __enter__(self) -> CountedFile:
        self.stored = self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return self.stored.keys()

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self.read, self.stored.get_slice(name))


class CountedSlice:
    def __init__(self, read: dict[str, int], view: Any) -> None:
        self.read, self.view = read, view

    def get_shape(self) -> list[int]:
        return self.view.get_shape()

    def get_dtype(self) -> str:
        return self.view.get_dtype()

    def __getitem__(self, part: Any) -> torch.Tensor:
        value: torch.Tensor = self.view[part]
        self.read["bytes"] += value.nbytes
        return value


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("degrees", "tied"),
    [
        ({"shard": 2}, False),
        ({"tensor": 2}, False),
        ({"shard": 2, "tensor": 2}, False),
        ({"shard": 2, "tensor": 2}, True),
    ],
    ids=["fully sharded", "tensor", "both", "both, tied"],
)
def test_each_rank_reads_the_slices_it_holds(tmp_path: Path, degrees: dict[str, int], tied: bool) -> None:
    model = Llama(replace(CONFIG, tie_embeddings=tied), attention=attention)  # 61 words: an odd row
    model.initialize(3)
    write_strange(model, tmp_path, shard_bytes=9000)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model(tokens)
    num_ranks = degrees.get("shard", 1) * degrees.get("tensor", 1)
    with Ranks(num_ranks, threads=1) as ranks:
        results = ranks.run(load_split, tmp_path, degrees, tokens)
    whole = sum(p.nbytes for p in model.parameters())
    norms = sum(p.nbytes for p in model.parameters() if p.dim() == 1)  # every tensor rank has them whole
    for got in results:
        assert got["read"] == got["held"]
        assert got["read"] <= 0.52 * whole / (num_ranks / 2) + norms
        assert all(torch.equal(value, got["state"][name]) for name, value in model.state_dict().items())
        assert torch.allclose(got["hidden"], hidden, rtol=0, atol=1e-5)
    copies = degrees.get("tensor", 1)
    assert sum(got["read"] for got in results) == whole + (copies - 1) * norms
