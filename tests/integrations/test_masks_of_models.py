"""Less common masks of models and users: changed in place, of one key, or with packed chunks."""

from __future__ import annotations

import pytest
import torch

from flashspan.integrations import transformers as span
from tests.integrations.test_transformers import CHUNKS, LENGTH, assert_near, make, on_span, tokens

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    span.register()


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_finished_mask_may_change_between_forward_passes_of_inference(made_inside: bool) -> None:
    model = make("Llama")
    ours = on_span(model)
    with torch.inference_mode(made_inside):
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.inference_mode():
        for _ in range(2):
            added = torch.zeros(mask.shape).masked_fill(~mask, -3e38)
            expected = model(tokens(), attention_mask=added).logits
            assert_near(ours(tokens(), attention_mask=mask).logits, expected, "logits")
            mask[..., : LENGTH // 2] &= torch.eye(LENGTH, dtype=torch.bool)[:, : LENGTH // 2]


def test_a_mask_of_one_key_that_hides_nothing_serves_any_number_of_keys() -> None:
    """BERT without `is_decoder` asks for such a mask in `generate`."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=61, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel._from_config(config, attn_implementation="eager").eval()
    texts = [each.generate(tokens(), max_new_tokens=4, do_sample=False) for each in (model, on_span(model))]
    assert torch.equal(*texts)


def test_chunks_of_packed_sequences_are_counted_in_each_or_refused() -> None:
    model, ids = make("Llama4Text", CHUNKS), tokens(1)
    ours, ends = on_span(model), torch.tensor([0, 10, 11, LENGTH], dtype=torch.int32)
    position = torch.cat([torch.arange(n) for n in (10, 1, 13)])[None]
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    expected = model(ids, position_ids=position, use_cache=False).logits
    assert_near(ours(ids, position_ids=position, use_cache=False, **lengths).logits, expected, "logits")
    with pytest.raises(ValueError, match="needs position_ids that restart in each sequence and use_cache=False"):
        ours(ids, position_ids=position, **lengths)


@pytest.mark.parametrize("ends", [[10, 11, LENGTH], [0, 11, 10, LENGTH], [[0, LENGTH]]], ids=str)
def test_ends_of_sequences_that_are_none_are_refused(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seq_lens_q must be the ends of the sequences, ascending from 0"):
        on_span(make("Llama"))(tokens(1), cu_seq_lens_q=torch.tensor(ends), use_cache=False)


def test_padding_for_more_tokens_than_there_are_is_refused() -> None:
    given = {"attention_mask": torch.ones(2, LENGTH + 1, dtype=torch.long), "use_cache": False}
    with pytest.raises(ValueError, match=f"got {LENGTH} x {LENGTH + 1} for a layer of {LENGTH} x {LENGTH}"):
        on_span(make("Llama"))(tokens(), **given)
