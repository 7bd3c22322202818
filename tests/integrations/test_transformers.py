"""attn_implementation="span": tiny models of transformers give the results of eager attention, or a clear error."""

import copy
import types
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

import flashspan.integrations.transformers as span
from flashspan.integrations.mask_functions import Grid, Translator
from flashspan.kernels import masks
from flashspan.masks import Band, Blocks, Rows

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
WINDOW = {"sliding_window": 7}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": TINY,
    "Mistral": {**TINY, **WINDOW},
    "Qwen2": {**TINY, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {**TINY, "head_dim": 16},
    "Phi3": {**TINY, **WINDOW},
    "Olmo2": TINY,
    "Starcoder2": {**TINY, **WINDOW, "num_key_value_heads": 1},
    "GPT2": {**GPT2, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0},
}
CHUNKS = {
    **TINY, "intermediate_size_mlp": 40, "attention_chunk_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2, "head_dim": 8, "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
LENGTH = 24


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    span.register()


def make(name: str, settings: dict[str, Any] | None = None, head: str = "ForCausalLM", seed: int = 0) -> Any:
    """A model with random weights, on eager attention, in eval mode."""
    torch.manual_seed(seed)
    config_name = f"{name.removesuffix('Text') if name != 'Llama4Text' else name}Config"
    config = getattr(transformers, config_name)(**(MODELS[name] if settings is None else settings))
    head = "LMHeadModel" if name == "GPT2" and head == "ForCausalLM" else head
    found = "Llama4" if name == "Llama4Text" else name
    return getattr(transformers, found + head)._from_config(config, attn_implementation="eager").eval()


def on_span(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.set_attn_implementation("span")
    return other


def tokens(num_batch: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(2, 61, (num_batch, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(kind: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a model, and which tokens to compare."""
    ids = tokens()
    seen = torch.ones_like(ids, dtype=torch.bool)
    if kind == "left":
        seen[0, :9] = False
    elif kind == "right":
        seen[1, 15:] = False
    elif kind == "packed":
        position = torch.cat([torch.arange(n) for n in (10, 1, 13)]).expand(2, -1)
        # With a cache, transformers does not look for packed sequences.
        return {"input_ids": ids, "position_ids": position, "use_cache": False}, seen
    if kind == "plain":
        return {"input_ids": ids}, seen
    return {"input_ids": ids, "attention_mask": seen.long()}, seen


def assert_near(found: Tensor, expected: Tensor, what: str, bound: float = 1e-5) -> None:
    assert not found.isnan().any(), what
    error = float((found - expected).detach().norm())
    assert error <= bound * float(expected.detach().norm()), f"{what}: {error} of {float(expected.detach().norm())}"


def assert_same(model: Any, inputs: dict[str, Tensor], seen: Tensor) -> None:
    """Compare logits and all gradients of a model on eager and on span attention."""
    other = on_span(model)
    logits, found = model(**inputs).logits, other(**inputs).logits
    assert_near(found[seen], logits[seen], "logits")
    assert not found.isnan().any()
    dout = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) * seen[..., None]
    for one, out in ((model, logits), (other, found)):
        out.backward(dout)
        assert one.config._attn_implementation == ("span" if one is other else "eager")
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_near(q.grad, p.grad, name)


@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_match_eager(name: str, kind: str) -> None:
    assert_same(make(name), *inputs_of(kind))


@pytest.mark.parametrize("kind", ["left", "packed"])
def test_chunked_layers_match_eager(kind: str) -> None:
    assert_same(make("Llama4Text", CHUNKS), *inputs_of(kind))


@pytest.mark.parametrize("name", MODELS)
def test_no_document_attends_to_another(name: str) -> None:
    model = on_span(make(name))
    inputs, _ = inputs_of("packed")
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, 3] = (other["input_ids"][:, 3] + 1) % 61
    with torch.no_grad():
        one, two = model(**inputs).logits, model(**other).logits
    assert torch.equal(one[:, 10:], two[:, 10:])
    assert not torch.equal(one[:, 3:10], two[:, 3:10])


def test_cumulative_lengths_bound_the_documents() -> None:
    """As from a collator for flash-attn. Even if positions do not restart, the lengths alone separate the documents."""
    model, ids = make("Llama"), tokens(1)
    ends = torch.tensor([0, 10, 11, LENGTH], dtype=torch.int32)
    position = torch.cat([torch.arange(n) for n in (10, 1, 13)])[None]
    expected = model(ids, position_ids=position, use_cache=False).logits
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 13, "max_length_k": 13, "use_cache": False}
    assert_near(on_span(model)(ids, position_ids=position, **lengths).logits, expected, "logits")
    # Rotary positions are relative: with ascending ones the documents are the same.
    assert_near(on_span(model)(ids, **lengths).logits, expected, "logits")


GENERATE: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
}


def assert_same_text(model: Any, new: int = 12, **how: Any) -> None:
    inputs, _ = inputs_of("left")
    how = {"max_new_tokens": new, "do_sample": False, **how}
    texts = [one.generate(**inputs, **how) for one in (model, on_span(model))]
    assert texts[0].shape[1] == LENGTH + new
    assert torch.equal(*texts)


@pytest.mark.parametrize("how", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generates_token_for_token(name: str, how: str) -> None:
    assert_same_text(make(name), **GENERATE[how])


@pytest.mark.parametrize("how", ["beams", "static beams"])
def test_generates_the_same_beams(how: str) -> None:
    assert_same_text(make("Mistral"), new=6, **GENERATE[how])


@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_chunked_layers_generate_token_for_token(how: str) -> None:
    if how == "static" and transformers.__version__ == "5.17.0":
        pytest.skip("transformers 5.17 itself cannot: create_chunked_causal_mask() has no block_sequence_ids")
    assert_same_text(make("Llama4Text", CHUNKS), **GENERATE[how])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generates_the_same_compiled(name: str) -> None:
    how = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    how._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_same_text(make(name), cache_implementation="static", compile_config=how)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # for both models, over 12 tokens


@pytest.mark.slow
def test_trains_compiled() -> None:
    model, (inputs, seen) = make("Mistral"), inputs_of("left")
    other = on_span(model)
    logits, found = model(**inputs).logits, torch.compile(other, backend="aot_eager")(**inputs).logits
    assert_near(found[seen], logits[seen], "logits")


def test_rows_that_see_nothing_are_no_nan() -> None:
    model = on_span(make("Llama"))
    ids, seen = tokens(), torch.ones(2, LENGTH)
    seen[0] = 0  # a sequence that is all padding
    seen[1, :5] = 0
    logits = model(ids, attention_mask=seen).logits
    logits.square().sum().backward()
    assert not logits.isnan().any()
    assert not any(p.grad.isnan().any() for p in model.parameters())


def test_dropout_is_passed_on_in_training_alone() -> None:
    model = on_span(make("Llama", {**TINY, "attention_dropout": 0.3}))
    ids = tokens()
    eager, whole = make("Llama", {**TINY, "attention_dropout": 0.3})(ids).logits, model(ids).logits
    assert_near(whole, eager, "evaluation")
    model.train()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(ids).logits)
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    assert not torch.allclose(outs[0], whole)


# Masks.


def closures(grid: Grid, seed: int) -> list[tuple[str, Any]]:
    """Mask functions, composed as in transformers, with random numbers."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    utils, num_batch, end = masking_utils, grid.num_batch, grid.kv_offset + grid.num_keys
    causal, window = utils.causal_mask_function, utils.sliding_window_causal_mask_function(number(1, 9))
    chunks = utils.chunked_causal_mask_function(number(1, 9), torch.randint(0, 6, (num_batch,), generator=random))
    image = torch.randint(-1, 4, (num_batch, end), generator=random).sort(-1).values
    found = [
        ("causal", causal),
        ("window", window),
        ("both ways", utils.sliding_window_bidirectional_mask_function(number(1, 9))),
        ("everything", utils.bidirectional_mask_function),
        ("chunks", chunks),
        ("image", utils.or_masks(causal, utils.blockwise_overlay(image))),
        ("window, image", utils.or_masks(window, utils.blockwise_overlay(image))),
    ]
    if grid.is_square and hasattr(utils, "packed_sequence_compatibility_function"):
        begins = torch.rand(num_batch, end, generator=random) < 0.2
        place = torch.arange(end)
        position = place - torch.where(begins, place, 0).cummax(-1).values
        whole = utils.chunked_causal_mask_function(number(1, 9), torch.zeros(num_batch, dtype=torch.long))
        packed = (position.diff(prepend=position[:, :1] - 1) != 1).cumsum(-1)
        found += [
            (f"packed {name}", utils.packed_sequence_compatibility_function(inner, position, packed))
            for name, inner in (("causal", causal), ("window", window), ("chunks", whole))
        ]
    return found


def assert_read(grid: Grid, function: Any, padding: Tensor | None, what: str) -> masks.Mask:
    """Check that a mask function's mask equals the one that transformers makes for PyTorch's attention."""
    offset = int(grid.q_offset)
    expected = masking_utils.sdpa_mask(
        grid.num_batch, grid.num_queries, grid.num_keys, q_offset=offset, kv_offset=grid.kv_offset,
        mask_function=function, attention_mask=padding, allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
    )  # fmt: skip
    sizes = grid.num_batch, grid.num_queries, grid.num_keys
    made = span.make_mask(*sizes, grid.q_offset, grid.kv_offset, function, padding)
    assert made.shape == (grid.num_batch, 1, grid.num_queries, grid.num_keys)
    assert torch.equal(made.to_dense().expand_as(expected), expected), what
    return made.mask


GRIDS = [
    Grid(2, 17, 17),
    Grid(1, 1, 30, 29),
    Grid(2, 1, 40, torch.tensor(21)),
    Grid(2, 9, 40, torch.tensor(0)),
    Grid(2, 5, 21, 16),
    Grid(3, 1, 12, 30, 19),
    Grid(2, 4, 15, 30, 19),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_masks_of_transformers_become_intervals(grid: Grid) -> None:
    length, end = grid.num_batch, int(grid.q_offset) + grid.num_queries
    for seed in range(3):
        for name, function in closures(grid, seed):
            left, right = torch.ones(2, length, end, dtype=torch.bool)
            left[0, :5] = False
            right[-1, -3:] = False
            for padding in (None, left, right):
                mask = assert_read(grid, function, padding, f"{name}, seed {seed}")
                # An image apart from the other visible keys leaves a gap.
                assert isinstance(mask, (Band, Rows)) or "image" in name, name
                plain = padding is None and isinstance(grid.q_offset, int)
                if plain and name in ("causal", "window", "both ways", "everything"):
                    assert isinstance(mask, Band), name


def read_random_masks(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    queries, past, hidden, room = (int(torch.randint(low, 40, (), generator=random)) for low in (1, 0, 0, 0))
    hidden = min(hidden, past)
    offset: int | Tensor = past if seed % 2 else torch.tensor(past)
    for grid in (Grid(2, queries, queries), Grid(2, queries, past - hidden + queries + room, offset, hidden)):
        padding = torch.rand(2, int(grid.q_offset) + queries, generator=random) < (0.9 if seed % 3 else 0.2)
        for name, function in closures(grid, seed):
            for shown in (None, padding, padding.sort(-1).values, padding.sort(-1, descending=True).values):
                assert_read(grid, function, shown, f"{name}, seed {seed}, {grid}")


def test_random_masks_of_transformers_are_read_exactly() -> None:
    for seed in range(2):
        read_random_masks(seed)


@pytest.mark.campaign
def test_any_mask_of_transformers_is_read_exactly() -> None:
    for seed in range(2, 500):
        read_random_masks(seed)


def test_padding_with_holes_is_a_block_map() -> None:
    padding = torch.ones(2, 17, dtype=torch.bool)
    padding[0, 5] = False
    assert isinstance(assert_read(GRIDS[0], masking_utils.causal_mask_function, padding, "holes"), Blocks)


def test_other_functions_are_block_maps_made_once() -> None:
    """A user's rule for single indices works too: transformers maps it over tensors with vmap."""
    calls = []
    allowed = torch.tensor([True, False, True, True])

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        calls.append(1)
        return torch.stack([allowed[query % 4], allowed[key % 4], query == key]).any()

    model, inputs = make("Llama"), inputs_of("left")[0]
    found = {}
    for one in (model, on_span(model)):
        common = {"config": one.config, "inputs_embeds": torch.zeros(2, LENGTH, 32), "past_key_values": None}
        calls.clear()
        made = masking_utils.create_causal_mask(
            **common, attention_mask=inputs["attention_mask"], and_mask_function=rule
        )
        assert len(calls) <= 2
        found[one] = one(inputs["input_ids"], attention_mask=made).logits
    assert isinstance(made, span.SpanMask)
    assert isinstance(made.mask, Blocks)
    seen = inputs["attention_mask"].bool()
    assert_near(found[one][seen], found[model][seen], "logits")


def test_a_closure_that_means_something_new_is_a_block_map() -> None:
    def sliding_window_overlay(sliding_window: int) -> Any:
        return lambda batch, head, query, key: key >= query - sliding_window  # one key more than in current releases

    later = types.SimpleNamespace(**vars(masking_utils))
    later.sliding_window_overlay = sliding_window_overlay
    with pytest.warns(RuntimeWarning, match="sliding_window_overlay"):
        translator = Translator(later)
    mask = translator.translate(sliding_window_overlay(3), Grid(1, 9, 9))
    assert isinstance(mask, Blocks)
    i = torch.arange(9)
    assert torch.equal(masks.dense(mask, 9, 9), i[None] >= i[:, None] - 3)
    assert isinstance(translator.translate(later.causal_mask_function, Grid(1, 9, 9)), Band)


def test_this_release_is_recognised_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Translator(masking_utils)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_finished_mask_is_read_once(dtype: torch.dtype) -> None:
    model = make("Llama")
    keep = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    keep = keep.tril() | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = model(tokens(), attention_mask=added).logits
    given = keep if dtype == torch.bool else added
    assert_near(on_span(model)(tokens(), attention_mask=given).logits, expected, "logits")
    query = torch.zeros(2, 4, LENGTH, 8)
    assert span.mask_of_tensor(given, query, LENGTH) is span.mask_of_tensor(given, query, LENGTH)


# Errors.


def call(**given: Any) -> Any:
    """Call a layer as a model does."""
    q, k, v = (torch.randn(1, 2, 6, given.pop(name, 8)) for name in ("size", "key_size", "value_size"))
    return span.attend(torch.nn.Identity(), q, k, v, given.pop("attention_mask", None), **given)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"s_aux": torch.zeros(2)}, "sinks.*s_aux"),
    ({"softcap": 30.0}, "softcap"),
    ({"cu_seq_lens_k": torch.tensor([0, 6])}, "need cu_seq_lens_q as a tensor"),
    ({"cu_seq_lens_q": [0, 6]}, "cu_seq_lens_q as a tensor: got list"),
    ({"position_bias": torch.zeros(1, 2, 6, 6)}, "position_bias"),
    ({"output_attentions": True}, "output_attentions"),
    ({"indices": torch.zeros(1, 6, 2)}, "indices"),
    ({"temperature_of_scores": 2.0}, "temperature_of_scores"),
    ({"value_size": 4}, "keys of 8 and values of 4"),
    ({"size": 264, "key_size": 264, "value_size": 264}, "up to 256: got 264"),
    ({"attention_mask": torch.randn(1, 1, 6, 6)}, "additive bias"),
    ({"attention_mask": torch.zeros(1, 1, 6, 6, requires_grad=True)}, "additive bias.*learned"),
    ({"attention_mask": torch.zeros(1, 1, 6, 6, dtype=torch.long)}, "additive bias"),
    ({"attention_mask": torch.ones(1, 6)}, r"\[B, 1, T, S\].*\(1, 6\)"),
    ({"sliding_window": 3}, r"sliding window\b.*\b3\b"),
    ({"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens_q"),
]


@pytest.mark.parametrize(("given", "names"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refuses_by_name(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names) as refusal:
        call(**given)
    assert "\n" not in str(refusal.value)
    assert "attn_implementation=" in str(refusal.value)


def test_serves_what_changes_nothing() -> None:
    harmless = {"position_ids": torch.arange(6), "logits_to_keep": 0}
    assert call(s_aux=None, softcap=None, output_attentions=False, **harmless)[0].shape == (1, 6, 2, 8)


def test_a_mask_that_was_moved_or_sliced_still_refuses_packed_chunks() -> None:
    mask = span.SpanMask(Band(None, 0), (1, 1, 9, 9), counts=True)
    for same in (mask, mask.to("cpu"), mask.to(torch.device("cpu")), mask[:, :, :8, :8]):
        with pytest.raises(ValueError, match=r"chunks.*cu_seq_lens_q needs position_ids"):
            same.within(torch.tensor([0, 5, same.shape[2]]), None)


@pytest.mark.parametrize(
    ("name", "settings", "names"),
    [
        ("Gemma2", {**TINY, "head_dim": 8}, "softcap"),
        ("GptOss", {**TINY, "head_dim": 8, "num_local_experts": 2}, "s_aux"),
        (
            "DeepseekV3",
            {**TINY, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
             "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 2},
            "keys of 8 and values of 4",
        ),
    ],
)  # fmt: skip
def test_refuses_models_it_does_not_support(name: str, settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        on_span(make(name, settings))(tokens())


def test_refuses_attention_weights_of_a_model() -> None:
    with pytest.raises(ValueError, match="output_attentions"):
        on_span(make("Llama"))(tokens(), output_attentions=True)


@pytest.mark.parametrize(
    "compute",
    [lambda m: torch.zeros(6, 6) + m, lambda m: m + 1.0, lambda m: torch.where(m, 0.0, -1.0), lambda m: ~m,
     lambda m: m == 0, lambda m: m[0], lambda m: m.dtype, lambda m: m.masked_fill(torch.ones(6, 6) > 0, 0)],
)  # fmt: skip
def test_refuses_models_that_compute_with_their_mask(compute: Any) -> None:
    with pytest.raises(ValueError, match="attention mask"):
        compute(span.make_mask(1, 6, 6))


@pytest.mark.parametrize("version", ["4.57.1", "5.16.9", "6.0.0"])
def test_names_the_releases_it_works_with(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ValueError, match=rf"transformers 5\.17 or later, below 6: found {version}"):
        span.register()
