"""The portable kernels on a GPU at full size: `pytest -m gpu`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashspan
from flashspan import attention, masks
from flashspan.kernels.masks import dense

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def inputs(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k and v that require gradients, and dout, for (B, H, K, T, S, D)."""
    B, H, K, T, S, D = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [(B, H, T, D), (B, K, S, D), (B, K, S, D), (B, H, T, D)]
    q, k, v, dout = (torch.randn(size, device="cuda", generator=generator).to(dtype) for size in sizes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def truth(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor | None) -> tuple[Tensor, ...]:
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*exact, attn_mask=visible, enable_gqa=True)
    return (out, *torch.autograd.grad(out, exact, dout.double()))


SHAPES = [
    (1, 4, 4, 2048, 2048, 64),
    (1, 8, 2, 1000, 1531, 128),
    (2, 2, 2, 777, 777, 256),
    (1, 6, 3, 511, 513, 96),
    (1, 2, 2, 1500, 1500, 16),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sixteen_bit_error_is_no_worse_than_sdpa(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, dout = inputs(shape, dtype)
    visible = torch.ones(shape[3], shape[4], dtype=torch.bool, device="cuda").tril()
    right = truth(q, k, v, dout, visible)
    ours = attention(q, k, v, causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    mine = (ours, *torch.autograd.grad(ours, (q, k, v), dout))
    other = (theirs, *torch.autograd.grad(theirs, (q, k, v), dout))
    for a, b, c in zip(mine, other, right, strict=True):
        assert relative(a, c) <= 1.1 * relative(b, c)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_float32_is_float32(shape: tuple[int, ...], window: int | None) -> None:
    q, k, v, dout = inputs(shape, torch.float32)
    i, j = torch.arange(shape[3], device="cuda")[:, None], torch.arange(shape[4], device="cuda")
    right = truth(q, k, v, dout, (j <= i) & (j > i - (window or shape[4] + shape[3])))
    out = attention(q, k, v, causal=True, window=window)
    assert relative(out, right[0]) <= 1e-6
    for mine, exact in zip(torch.autograd.grad(out, (q, k, v), dout), right[1:], strict=True):
        assert relative(mine, exact) <= 1e-5


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256])
def test_documents_at_every_head_size(head_dim: int) -> None:
    mask = masks.documents([100, 0, 1, 399, 500]) & masks.causal()
    q, k, v, dout = inputs((1, 4, 2, 1000, 1000, head_dim), torch.bfloat16)
    right = truth(q, k, v, dout, dense(mask, 1000, 1000).cuda())
    out = attention(q, k, v, mask=mask)
    for mine, exact in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), right, strict=True):
        assert relative(mine, exact) <= 4e-3


def test_auto_chooses_a_kernel() -> None:
    q, k, v, _ = inputs((1, 2, 2, 64, 64, 64), torch.bfloat16)
    assert flashspan.explain(q, k, v, causal=True).name not in ("tiled", "reference", "cpu")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("asked", [{"backend": "portable"}, {"deterministic": True}], ids=str)
def test_gradients_repeat_bit_for_bit(asked: dict[str, Any], head_dim: int) -> None:
    q, k, v, dout = inputs((2, 8, 2, 1111, 1111, head_dim), torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        out = attention(q, k, v, causal=True, **asked)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_offsets_past_two_to_the_31() -> None:
    """K, V and their gradients of one head are past 2^31 elements; only the last tokens are compared."""
    T, D = 1024, 128
    long = 2**31 // D + 4096
    k, v = (torch.zeros(1, 1, long, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tail = [torch.randn(1, 1, T, D, device="cuda").bfloat16() for _ in range(4)]
    k[:, :, -T:], v[:, :, -T:] = tail[0], tail[1]
    q, dout = tail[2].requires_grad_(), tail[3]
    k.requires_grad_(), v.requires_grad_()
    # Each query sees only keys from the tail: the last query's window ends at the last key.
    mask = masks.window(300, 0, offset=long - T)
    out = attention(q, k, v, mask=mask)
    short = [x.detach()[:, :, -T:].clone().requires_grad_() for x in (k, v)]
    near = attention(q, *short, mask=masks.window(300, 0))
    assert relative(out[:, :, 300:], near[:, :, 300:]) < 1e-6
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    _, near_dk, near_dv = torch.autograd.grad(near, (q, *short), dout)
    assert dq.isfinite().all()
    # In both calls, the same queries see the last keys.
    assert relative(dk[:, :, -300:], near_dk[:, :, -300:]) < 1e-2
    assert relative(dv[:, :, -300:], near_dv[:, :, -300:]) < 1e-2
    assert not dk[:, :, : long - 2 * T].any()


def test_memory_beyond_inputs_outputs_and_gradients() -> None:
    q, k, v, dout = inputs((1, 16, 16, 8192, 8192, 128), torch.bfloat16)
    attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    held = sum(x.numel() * x.element_size() for x in (out, *grads))
    extra = torch.cuda.max_memory_allocated() - before - held
    assert extra <= 2 * q.numel() * 4


def test_compiles_whole_with_inductor() -> None:
    q, k, v, dout = inputs((1, 4, 2, 300, 300, 64), torch.bfloat16)
    mask = masks.documents([120, 180], device="cuda")
    compiled = torch.compile(attention, fullgraph=True)
    ours, eager = (f(q, k, v, causal=True, mask=mask, dropout=0.1, seed=5) for f in (compiled, attention))
    assert torch.equal(ours, eager)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), dout), torch.autograd.grad(eager, (q, k, v), dout), strict=True
    ):
        assert torch.equal(a, b)


def test_dropout_equals_the_plain_implementation() -> None:
    q, k, v, dout = inputs((2, 4, 2, 333, 333, 64), torch.float32)
    ours, plain = (attention(q, k, v, causal=True, dropout=0.3, seed=9, backend=b) for b in ("portable", "tiled"))
    assert relative(ours, plain) < 1e-6
    pairs = zip(torch.autograd.grad(ours, (q, k, v), dout), torch.autograd.grad(plain, (q, k, v), dout), strict=True)
    assert all(relative(a, b) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("window", [None, 300])
def test_tf32_on_request(head_dim: int, window: int | None) -> None:
    """tf32 has its own tiles. A tf32 matmul has about as many bits as one in float16."""
    q, k, v, dout = inputs((1, 4, 2, 777, 777, head_dim), torch.float32)

    def found(*qkv: Tensor) -> list[Tensor]:
        out = attention(*qkv, causal=True, window=window)
        return [out, *torch.autograd.grad(out, qkv, dout.to(out.dtype))]

    exact = found(*(x.double() for x in (q, k, v)))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        loose = found(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(1e-4 < relative(a, b) < 5e-3 for a, b in zip(loose, exact, strict=True))
    assert all(relative(a, b) < 1e-5 for a, b in zip(found(q, k, v), exact, strict=True))


def test_graph_capture() -> None:
    q, k, v, _ = inputs((1, 2, 2, 256, 256, 64), torch.bfloat16)
    expected = attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 1)])
def test_repeated_calls_compute_what_the_first_does(mask: str, heads: tuple[int, int]) -> None:
    """The first call of a layout prepares launches, and later ones fill in addresses, for any layout of dout."""
    q, k, v, dout = inputs((2, *heads, 700, 700, 128), torch.bfloat16)
    seen = masks.causal() if mask == "causal" else masks.documents([300, 400]) & masks.causal()
    flat = dout.transpose(1, 2).contiguous().transpose(1, 2)  # the same numbers, stored as [B, T, H, D]
    wanted = None
    for given in (dout, dout, flat, dout, flat, flat):
        out = attention(q, k, v, mask=seen, deterministic=True)
        found = (out, *torch.autograd.grad(out, (q, k, v), given))
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))  # at other addresses
