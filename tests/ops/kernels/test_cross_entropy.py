"""The loss kernel compared with the model's own loss, in the interpreter and with a full vocabulary on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashspan.model.loss import IGNORE, losses_and_gradients_at_once
from flashspan.ops.kernels.cross_entropy import losses_and_gradients

CUDA = torch.cuda.is_available()


def check(num_rows: int, vocabulary: int, dtype: torch.dtype, *, spread: float = 3.0) -> None:
    generator = torch.Generator().manual_seed(num_rows + vocabulary)
    device = "cuda" if CUDA else "cpu"
    logits = (torch.randn(num_rows, vocabulary, generator=generator) * spread).to(device, dtype)
    targets = torch.randint(0, vocabulary, (num_rows,), generator=generator).to(device)
    targets[::3] = IGNORE
    logits[-1, : vocabulary // 2] = float("-inf")
    targets[-1] = vocabulary - 1
    want, right = losses_and_gradients_at_once(logits.double(), targets)
    losses, gradients = losses_and_gradients(logits, targets, ignored=IGNORE)
    assert gradients.data_ptr() == logits.data_ptr()
    assert gradients.dtype == dtype
    assert losses.dtype == torch.float32
    assert (losses.double() - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
    bound = max(1e-6, torch.finfo(dtype).eps)
    assert (gradients.double() - right).abs().max() <= bound
    assert not gradients[::3][:-1].any()
    assert not losses[::3][:-1].any()


@pytest.mark.skipif(CUDA, reason="the kernel is compiled here, not interpreted")
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(7, 1), (5, 31), (3, 9001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_in_one_kernel(num_rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check(num_rows, vocabulary, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(7, 1), (301, 32_001), (513, 128_256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_of_a_large_vocabulary(num_rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    check(num_rows, vocabulary, dtype)


@pytest.mark.parametrize("where", [0, 5])
def test_a_logit_that_is_not_a_number_reaches_its_row_and_no_other(where: int) -> None:
    logits = torch.zeros(3, 40, device="cuda" if CUDA else "cpu")
    logits[1, where] = float("nan")
    losses, gradients = losses_and_gradients(logits, torch.tensor([5, 5, IGNORE], device=logits.device), ignored=IGNORE)
    assert losses.isnan().tolist() == [False, True, False]
    assert gradients.isnan().all(1).tolist() == [False, True, False]


def test_no_rows() -> None:
    losses, gradients = losses_and_gradients(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), ignored=IGNORE)
    assert len(losses) == len(gradients) == 0
