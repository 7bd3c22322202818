"""Decoding with a cache that is split over ranks of one GPU: the tokens of one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flashspan.attention import attention
from flashspan.context import context_parallel
from flashspan.generate import Sampling, Split, decode
from flashspan.launch import Ranks
from flashspan.model import Llama, LlamaConfig


def tokens_of(split: bool) -> list[list[int]]:
    """On a rank: the tokens with which a small random model continues two prompts."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, width=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_width=160)
    prompt = torch.randint(97, (2, 45), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.device("cuda"):
        model = Llama(config, attention=attention)
    context = Split(context_parallel(dist.group.WORLD)) if split else None
    return [token.tolist() for token in decode(model, prompt, 20, sampling=Sampling(0), context=context)]


@pytest.mark.gpu
def test_a_split_cache_gives_the_tokens_of_one_device() -> None:
    with Ranks(4, threads=1, timeout=60, share_gpu=True) as ranks:
        alone = ranks.run(tokens_of, False)
        assert ranks.run(tokens_of, True) == alone
