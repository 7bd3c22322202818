"""Block maps on a GPU: 300 random masks, the error in 16 bits, patterns, and the cost of maps: `pytest -m gpu`."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention, explain, masks
from flashspan.kernels.masks import Blocks, dense
from tests.kernels.cases import FORWARD_BOUND, GRADIENT_BOUND
from tests.kernels.masks.cases import lift, random_mask
from tests.kernels.masks.test_blocks import softmax_attention
from tests.kernels.test_gpu import inputs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def relative(a: Tensor, b: Tensor, beside: Tensor) -> float:
    a, b, beside = (x.detach().double() for x in (a, b, beside))
    return float((a - b).norm() / torch.maximum(b.norm(), beside.norm()).clamp(min=1e-30))


@pytest.mark.parametrize(("head_dim", "first"), [(16, 0), (64, 100), (128, 200)])
def test_300_random_masks_in_float32(head_dim: int, first: int) -> None:
    for number in range(first, first + 100):
        visible = random_mask(number).cuda()
        K = 1 + number % 2
        q, k, v, dout = inputs((2, 2, K, *visible.shape[-2:], head_dim), torch.float32, seed=number)
        out = attention(q, k, v, mask=Blocks.from_dense(visible, block=(64, 128)[number % 2]))
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want, _ = softmax_attention(*exact, lift(visible))
        right = torch.autograd.grad(want, exact, dout.double())
        assert relative(out, want, want) <= FORWARD_BOUND, number
        for grad, wanted in zip(torch.autograd.grad(out, (q, k, v), dout), right, strict=True):
            assert relative(grad, wanted, right[2]) <= GRADIENT_BOUND, number


MASKS = {
    "longformer": lambda n: masks.longformer(n, window=200, num_global=30, device="cuda"),
    "bigbird": lambda n: masks.bigbird(n, window=200, num_global=30, num_random=2, device="cuda"),
    "dilated": lambda n: masks.dilated(100, 7, n, device="cuda"),
    "by head": lambda n: masks.random_blocks(n, 0.3, num_heads=4, device="cuda"),
    "streaming": lambda n: masks.streaming(4, 300, n, device="cuda"),
}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_sixteen_bit_error_is_no_worse_than_sdpa(name: str, head_dim: int) -> None:
    n = 1999
    mask = MASKS[name](n)
    visible = lift(dense(mask, n, n))
    q, k, v, dout = inputs((1, 4, 2, n, n, head_dim), torch.bfloat16)
    ours = attention(q, k, v, mask=mask)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, _ = softmax_attention(*exact, visible)
    mine, other = ((x, *torch.autograd.grad(x, (q, k, v), dout)) for x in (ours, theirs))
    right = (want, *torch.autograd.grad(want, exact, dout.double()))
    for a, b, c in zip(mine, other, right, strict=True):
        assert relative(a, c, c) <= 1.1 * relative(b, c, c)


def test_gradients_repeat_bit_for_bit() -> None:
    mask = masks.longformer(4096, window=300, num_global=64, device="cuda")
    q, k, v, dout = inputs((1, 8, 2, 4096, 4096, 128), torch.bfloat16)
    runs = [torch.autograd.grad(attention(q, k, v, mask=mask, deterministic=True), (q, k, v), dout) for _ in range(5)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_window_as_blocks_is_the_window() -> None:
    q, k, v, _ = inputs((1, 4, 4, 8192, 8192, 128), torch.bfloat16)
    mask = masks.window(1023, 0)
    as_blocks = attention(q, k, v, mask=Blocks.of(mask, 8192, 8192, device="cuda"))
    as_band = attention(q, k, v, mask=mask)
    assert relative(as_blocks, as_band, as_band) < 3e-3
    print(explain(q, k, v, mask=Blocks.of(mask, 8192, 8192)))


def test_a_rule_at_64k_takes_a_second_and_no_square() -> None:
    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i - j < 4096) | (j < 64))

    Blocks.from_rule(rule, 4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    mask = Blocks.from_rule(rule, 65536, 65536, device="cuda")
    torch.cuda.synchronize()
    assert time.perf_counter() - start <= 1.0
    assert torch.cuda.max_memory_allocated() - before < 65536**2 / 4
    assert mask == masks.streaming(64, 4096, 65536, device="cuda")


def test_it_compiles_whole() -> None:
    mask = masks.streaming(4, 300, 2000, device="cuda")
    q, k, v, dout = inputs((1, 4, 2, 2000, 2000, 64), torch.bfloat16)
    compiled = torch.compile(attention, fullgraph=True)
    for deterministic in (True, False):
        a, b = (
            torch.autograd.grad(f(q, k, v, mask=mask, deterministic=deterministic), (q, k, v), dout)
            for f in (compiled, attention)
        )
        # Without deterministic=True, dq's last bits depend on the order in which programs add to it.
        if deterministic:
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert all(relative(x, y, y) < 1e-3 for x, y in zip(a, b, strict=True))
