"""More of transformers on attn_implementation="span": other decoders, encoders, cross attention, images. All slow."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import flashspan.integrations.transformers as span

pytestmark = pytest.mark.slow

COMMON = {"vocab_size": 61, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LAYERS = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**COMMON, **LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
DECODERS: dict[str, dict[str, Any]] = {
    "Gemma": {**DECODER, "head_dim": 8},
    "Cohere": DECODER,
    "Cohere2": {**DECODER, "sliding_window": 7},
    "Granite": DECODER,
    "GPTNeoX": {**COMMON, **LAYERS, "max_position_embeddings": 128},
    "Qwen2Moe": {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {**DECODER, **EXPERTS, "head_dim": 8},
    "Olmo3": {**DECODER, "sliding_window": 7},
    "Exaone4": {**DECODER, "sliding_window": 7},
    "Glm4": {**DECODER, "head_dim": 8},
    "GPTBigCode": {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
COUPLED = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "init_std": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGE = {**LAYERS, "image_size": 32, "patch_size": 8, "initializer_range": 0.2}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    span.register()


def make(model: str, config: Any) -> tuple[Any, Any]:
    """A model with random weights on eager attention, and the same on span attention."""
    torch.manual_seed(0)
    one = getattr(transformers, model)._from_config(config, attn_implementation="eager").eval()
    other = copy.deepcopy(one)
    other.set_attn_implementation("span")
    return one, other


def config_of(name: str, **settings: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**settings)


def tokens(length: int = 20, *, left: int = 0, right: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    seen[0, :left] = 0
    seen[1, length - right :] = 0
    return {"input_ids": ids, "attention_mask": seen}


def assert_same(models: tuple[Any, Any], inputs: dict[str, Tensor], seen: Tensor | None = None) -> None:
    """Compare logits and gradients, those of all parameters as one vector."""
    outs, grads = [], []
    for model in models:
        logits = model(**inputs).logits
        logits = logits if seen is None else logits[seen.bool()]
        logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)))
        outs.append(logits.detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for one, two in (outs, grads):
        assert float((two - one).norm()) <= 1e-5 * float(one.norm())


def assert_same_text(models: tuple[Any, Any], inputs: dict[str, Tensor], **how: Any) -> None:
    how = {"max_new_tokens": 8, "do_sample": False, **how}
    assert torch.equal(*(model.generate(**inputs, **how) for model in models))


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    models, inputs = make(f"{name}ForCausalLM", config_of(name, **DECODERS[name])), tokens(left=5)
    assert_same(models, inputs, inputs["attention_mask"])
    assert_same_text(models, inputs)
    assert_same_text(models, inputs, cache_implementation="static")


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ModernBert"])
def test_encoders(name: str) -> None:
    settings = {**COMMON, **LAYERS}
    if name == "DistilBert":
        settings = {**COMMON, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}
    if name == "ModernBert":
        settings |= {"local_attention": 6, "global_attn_every_n_layers": 2}
    inputs = tokens(right=6)
    assert_same(make(f"{name}ForMaskedLM", config_of(name, **settings)), inputs, inputs["attention_mask"])


def test_cross_attention() -> None:
    models = make("BartForConditionalGeneration", config_of("Bart", **COUPLED, forced_eos_token_id=None))
    inputs, decoded = tokens(13, right=4), tokens(9, left=3)
    decoder = {f"decoder_{name}": value for name, value in decoded.items()}
    assert_same(models, {**inputs, **decoder}, decoded["attention_mask"])
    assert_same_text(models, inputs, num_beams=3)
    assert_same_text(models, inputs, cache_implementation="static")


def test_speech() -> None:
    settings = {**COUPLED, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 64}
    models = make("WhisperForConditionalGeneration", config_of("Whisper", **settings, suppress_tokens=None))
    sound = {"input_features": torch.randn(2, 8, 100)}
    assert_same(models, {**sound, "decoder_input_ids": tokens(9)["input_ids"]})
    assert_same_text(models, sound)


def test_images() -> None:
    assert_same(
        make("ViTForImageClassification", config_of("ViT", **IMAGE)), {"pixel_values": torch.randn(2, 3, 32, 32)}
    )


def test_text_with_images() -> None:
    """The tokens of an image see each other in both directions; other tokens are causal."""
    text, special = {**DECODER, "head_dim": 8, "sliding_window": 7}, {"boi_token_index": 51, "eoi_token_index": 52}
    config = config_of(
        "Gemma3", text_config=text, vision_config=IMAGE, mm_tokens_per_image=4, image_token_index=50, **special
    )
    models, inputs = make("Gemma3ForConditionalGeneration", config), tokens(left=3)
    inputs["input_ids"][:, 5:9] = 50
    inputs |= {"pixel_values": torch.randn(2, 3, 32, 32), "token_type_ids": (inputs["input_ids"] == 50).long()}
    assert_same(models, inputs, inputs["attention_mask"])
    assert_same_text(models, inputs)
    assert_same_text(models, inputs, cache_implementation="static")
