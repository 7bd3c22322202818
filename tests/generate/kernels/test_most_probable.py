"""The most probable token in one kernel equals that of PyTorch's operators, interpreted and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashspan.generate.kernels.most_probable import most_probable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(logits: Tensor, ended: Tensor, not_finite: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    not_finite = not_finite | ~(ended | logits.isfinite().all(-1))
    chosen = logits.nan_to_num(0.0, 0.0, 0.0).argmax(-1)
    return chosen, ended | torch.isin(chosen, ends), not_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 17, 1003, 40_000])
def test_the_most_probable_token_and_what_follows_from_it(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(7, vocabulary, generator=generator).to(DEVICE, dtype)
    logits[1] = -3.0  # all equal: the first one
    logits[2, vocabulary // 2] = torch.nan
    logits[3, vocabulary // 3] = -torch.inf
    logits[4, -1] = torch.inf
    logits[5] = -1.0
    logits[5, vocabulary // 2 :] = 2.0  # many equal: the first of them
    ended = torch.tensor([False, False, False, True, False, False, True], device=DEVICE)
    not_finite = torch.tensor([False, True, False, False, False, False, False], device=DEVICE)
    ends = logits[0].argmax().reshape(1).repeat(2)
    for end_tokens in (ends, ends[:0]):
        want = reference(logits, ended, not_finite, end_tokens)
        mine = ended.clone(), not_finite.clone()
        got = most_probable(logits, *mine, end_tokens)
        for one, other in zip((got, *mine), want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_vocabulary(dtype: torch.dtype) -> None:
    logits = torch.randn(16, 128_256, device="cuda").to(dtype)
    ended, not_finite = torch.zeros(2, 16, dtype=torch.bool, device="cuda")
    ends = torch.zeros(0, dtype=torch.int64, device="cuda")
    for _ in range(10):
        assert torch.equal(
            most_probable(logits, ended, not_finite, ends), reference(logits, ended, not_finite, ends)[0]
        )
    assert not ended.any()
    assert not not_finite.any()
