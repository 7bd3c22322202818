"""The Hopper kernels on a Hopper GPU: `pytest -m gpu tests/kernels/test_hopper.py`. test_compile.py needs no GPU."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashspan
from flashspan import attention, masks
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, Rows, dense
from flashspan.masks.patterns import random_blocks
from tests.kernels.cases import relative
from tests.kernels.hopper_cases import FORWARD_BOUND, GRADIENT_BOUND, ON_HOPPER, UNIT, WAYS, check, tensors

pytestmark = ON_HOPPER


def some_mask(choice: random.Random, num_queries: int, num_keys: int) -> Mask:
    kind = choice.choice(("full", "causal", "band", "rows", "ragged"))
    if kind == "full":
        return EVERYTHING
    if kind == "causal":
        return CAUSAL
    if kind == "band":
        lo = choice.randint(-num_queries, num_keys)
        return Band(lo, lo + choice.randint(0, num_keys))
    if kind == "rows":  # documents: ascending intervals, some empty
        cuts = sorted(choice.randint(0, num_keys) for _ in range(choice.randint(0, 6)))
        edges = torch.tensor([0, *cuts, num_keys])
        place = torch.linspace(0, num_keys, num_queries).long()
        start = edges[torch.searchsorted(edges, place, right=True).clamp(1, len(edges) - 1) - 1]
        end = edges[torch.searchsorted(edges, place, right=True).clamp(1, len(edges) - 1)]
        return Rows(start.int(), end.int(), num_keys)
    generator = torch.Generator().manual_seed(choice.randint(0, 2**31))
    start, end = torch.randint(0, num_keys + 1, (2, num_queries), generator=generator)
    return Rows(start.int(), end.int(), num_keys)


@pytest.mark.parametrize(
    ("head_dim", "number", "repeatable"),
    [(64, 500, False), (128, 500, False), (64, 100, True), (128, 100, True), (160, 200, True), (256, 200, True)],
)
def test_random_shapes(head_dim: int, number: int, repeatable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashspan.kernels.hopper.tensors import forward_dim
    from flashspan.kernels.hopper.tiles import FLOAT16_FROM, THREE_FROM

    choice, by_three = random.Random(head_dim), dict(THREE_FROM)
    for _ in range(number):
        least = choice.choice(list(WAYS.values())) if head_dim <= 192 else 2**62
        monkeypatch.setitem(FLOAT16_FROM, forward_dim(head_dim), least)
        for least in THREE_FROM:
            monkeypatch.setitem(THREE_FROM, least, choice.choice((0, by_three[least])))
        T, S = (int(5000 ** choice.random()) for _ in range(2))
        K, group, B = choice.choice((1, 2, 3)), choice.choice((1, 1, 2, 4)), choice.choice((1, 1, 2, 3))
        x, scale = tensors(choice, B, K * group, K, T, S, head_dim), head_dim**-0.5
        if head_dim == 64 and choice.random() < 0.3:
            x[0], scale = x[0] * (scale / UNIT), UNIT
        mask = some_mask(choice, T, S)
        pieces = choice.choice((1, 1, 2)) if S > 1 else 1
        try:
            check(x, mask, scale, pieces, repeatable)
        except AssertionError as error:
            raise AssertionError(f"B {B}, K {K} x {group}, T {T}, S {S}, {mask}, {pieces} pieces") from error


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("head_dim", [8, 80, 96, 136, 160, 184, 192, 256])
def test_other_head_sizes_are_padded(head_dim: int) -> None:
    choice = random.Random(head_dim)
    for mask in (CAUSAL, EVERYTHING):
        check(tensors(choice, 2, 4, 2, 333, 517, head_dim), mask, head_dim**-0.5, 1)


def test_float16() -> None:
    check(tensors(random.Random(0), 1, 4, 2, 700, 700, 128, torch.float16), CAUSAL, 128**-0.5, 1)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_gradient_of_nan_for_the_lse_of_nothing(head_dim: int) -> None:
    """Row 0 sees no key, so its gradient of lse affects no result, even if it is NaN."""
    q, k, v, dout = tensors(random.Random(2), 1, 2, 2, 300, 300, head_dim)
    inputs = [x.contiguous().requires_grad_() for x in (q, k, v)]
    for deterministic in (False, True):
        out, lse = attention(*inputs, mask=Band(None, -1), return_lse=True, deterministic=deterministic)
        dlse = torch.zeros_like(lse)
        dlse[..., 0] = torch.nan
        dq, dk, dv = torch.autograd.grad((out, lse), inputs, (dout, dlse))
        assert not dq[:, :, 0].any()
        assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_rows_past_the_end_are_not_repaired() -> None:
    """These rows see nothing, so their results must not mark the other rows."""
    from flashspan.kernels.hopper.launch import forward_launch

    q, k, v, _ = (x.contiguous() for x in tensors(random.Random(4), 1, 2, 2, 1000, 1024, 128))
    start = torch.zeros(1000, dtype=torch.int32, device="cuda")
    mask = Rows(start, start + 1024, 1024)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 1000, device="cuda")
    bad = torch.ones(1, 2, 16, dtype=torch.int32, device="cuda")
    forward_launch(q, k, v, out, lse, bad, mask, 128**-0.5, False)()
    assert not bad.any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_nan_in_a_key_reaches_only_the_queries_that_see_it(head_dim: int, repeatable: bool) -> None:
    q, k, v, dout = tensors(random.Random(1), 1, 2, 2, 500, 500, head_dim)
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    for hidden in (k, v):
        for value in (torch.nan, torch.inf):
            with torch.no_grad():
                before = hidden[0, 0, 300].clone()
                hidden[0, 0, 300] = value
            mask = Band(-150, 20)
            out = attention(q, k, v, mask=mask, backend="hopper", deterministic=repeatable)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
            visible = dense(mask, 500, 500).cuda()
            sees = visible[:, 300]
            beside = visible[sees].any(0)  # keys that a query with NaN sees
            assert all(x[0, 0, ~beside].isfinite().all() for x in (dk, dv))
            assert out[0, 0, ~sees].isfinite().all()
            assert not out[0, 0, sees].isfinite().any()
            assert out[0, 1].isfinite().all()
            assert dq[0, 1].isfinite().all()
            assert dq[0, 0, ~sees].isfinite().all()
            assert all(x[0, 1].isfinite().all() for x in (dq, dk, dv))
            with torch.no_grad():
                hidden[0, 0, 300] = before


@pytest.mark.parametrize("head_dim", [40, 64, 128, 160, 256])
@pytest.mark.parametrize("batch", [2, 60])  # few tiles: the kernel computes rows again; many: a launch does
def test_rows_that_do_not_see_nan_are_exact(batch: int, head_dim: int) -> None:
    q, k, v, _ = tensors(random.Random(head_dim), batch, 4, 2, 333, 333, head_dim)
    odd = torch.zeros(batch, 2, 333, dtype=torch.bool, device="cuda")
    odd[0, 0, 200], odd[1, 0, 5], odd[1, 1, 320], odd[-1, 1, 64:70] = True, True, True, True
    bad = torch.where(odd[..., None], torch.tensor([torch.nan, torch.inf] * (head_dim // 2), device="cuda"), v.float())
    exact = [x.float() for x in (q, k, v)]
    for mask in (CAUSAL, masks.documents([100, 150, 83]) & CAUSAL, Band(-60, 60), masks.documents([150, 183])):
        seen = (dense(mask, 333, 333).cuda()[None, None] & odd[:, :, None]).any(-1).repeat_interleave(2, 1)
        out, lse = attention(q, k, bad.bfloat16(), mask=mask, return_lse=True, backend="hopper")
        right, right_lse = attention(*exact, mask=mask, return_lse=True, backend="reference")
        assert not out[seen].isfinite().any()
        assert relative(out[~seen], right[~seen]) <= FORWARD_BOUND
        assert (lse - right_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_nan_and_infinity_in_keys_that_all_queries_see(head_dim: int, dtype: torch.dtype) -> None:
    """No launch repairs rows of such a call, so the results of the kernel itself must be correct."""
    q, k, v = (torch.randn(16, 12, n, head_dim, device="cuda", dtype=dtype) for n in (300, 197, 197))
    v[0, 0, 5, 3], v[0, 1, 196, 7], k[0, 2, 100, 0] = torch.nan, torch.inf, torch.nan
    out = attention(q, k, v, backend="hopper")
    odd = torch.zeros_like(out, dtype=torch.bool)
    odd[0, 0, :, 3], odd[0, 1, :, 7], odd[0, 2] = True, True, True
    assert torch.equal(~out.isfinite(), odd)
    assert (out[0, 1, :, 7] == torch.inf).all()
    assert relative(out[1:], F.scaled_dot_product_attention(q[1:].float(), k[1:].float(), v[1:].float())) < 5e-3


@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
@pytest.mark.usefixtures("way")
def test_repeated_calls_are_as_exact_as_the_first(head_dim: int) -> None:
    documents = masks.documents([100, 157]) & CAUSAL
    given = [EVERYTHING, CAUSAL, Band(-30, 5), documents, documents.to("cuda")]
    for mask in given if head_dim > 128 else [*given, random_blocks(257, 0.5)]:
        for call in range(4):
            generator = torch.Generator("cuda").manual_seed(call)
            heads = [torch.randn(1, n, 257, head_dim, device="cuda", generator=generator) for n in (4, 2, 2, 4)]
            q, k, v, dout = (x.bfloat16() for x in heads)
            if call == 2:  # the same strides, but not 16-byte aligned
                q = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, lse = attention(*leaves, mask=mask, return_lse=True)
            with torch.no_grad():
                assert torch.equal(attention(*leaves, mask=mask), out)
            exact = [x.detach().float().requires_grad_() for x in leaves]
            right, right_lse = attention(*exact, mask=mask, return_lse=True, backend="reference")
            assert relative(out, right) <= FORWARD_BOUND
            assert (lse - right_lse).abs().max() <= 1e-5
            of_both = call == 3  # with a gradient of lse too
            losses = [(a, b) if of_both else (a,) for a, b in ((out, lse), (right, right_lse))]
            slopes = (dout, lse.detach()) if of_both else (dout,)
            grads = torch.autograd.grad(losses[0], leaves, slopes)
            wanted = torch.autograd.grad(losses[1], exact, [x.float() for x in slopes])
            for name, got, want in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
                assert relative(got, want, *wanted) <= GRADIENT_BOUND, name


def test_forward_repeats_bit_for_bit_and_gradients_where_asked() -> None:
    q, k, v, dout = tensors(random.Random(2), 2, 8, 2, 1111, 1111, 128)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    first = attention(q, k, v, causal=True, backend="hopper")
    for _ in range(200):
        assert torch.equal(first, attention(q, k, v, causal=True, backend="hopper"))
    grads = None
    for _ in range(20):
        out = attention(q, k, v, causal=True, deterministic=True)
        again = torch.autograd.grad(out, (q, k, v), dout)
        grads = again if grads is None else grads
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert flashspan.explain(q, k, v, causal=True).name == "hopper"
    assert flashspan.explain(q, k, v, causal=True, deterministic=True).name == "hopper"


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_heads_than_a_grid_has_lines(deterministic: bool) -> None:
    """65,600 heads, in 4,100 short sequences: CUDA grids have at most 65,535 in all dimensions but the first."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(4100, 16, 16, 64, device="cuda", generator=generator).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, causal=True, backend="hopper", deterministic=deterministic)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    right = F.scaled_dot_product_attention(*wide, is_causal=True)
    wanted = [right, *torch.autograd.grad(right, wide, dout.float())]
    for a, b in zip(found, wanted, strict=True):
        assert relative(a[-1], b[-1]) <= 1e-2
        assert relative(a, b) <= 1e-2


@pytest.mark.usefixtures("way")
def test_a_cuda_graph_replays_forward_and_backward() -> None:
    q, k, v, dout = tensors(random.Random(3), 1, 4, 4, 700, 700, 64)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, causal=True, backend="hopper")
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wanted = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    for _ in range(3):
        graph.replay()
        assert all(relative(a, b) <= 1e-4 for a, b in zip(kept, wanted, strict=True))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_expanded_keys_are_not_copied(head_dim: int) -> None:
    q, k, v, _ = tensors(random.Random(5), 2, 8, 1, 2000, 2000, head_dim)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    everywhere = [x.expand(2, 8, 2000, head_dim) for x in (k, v)]
    apart = [x.detach().contiguous() for x in everywhere]
    with torch.no_grad():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attention(q, *everywhere, causal=True, backend="hopper")
        assert torch.cuda.max_memory_allocated() - before < 1.5 * q.numel() * 2  # room for the output, not for K or V
        assert torch.equal(out, attention(q, *apart, causal=True, backend="hopper"))
    out = attention(q, k, v, causal=True, deterministic=True)
    of_sum = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    of_ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(of_sum, of_ones, strict=True))


@pytest.mark.usefixtures("way")  # there are two kernels, chosen by the amount of work
def test_a_new_length_compiles_nothing() -> None:
    from flashspan.kernels.hopper.forward import forward_kernel

    def run(T: int) -> None:
        q, k, v, _ = tensors(random.Random(4), 1, 2, 2, T, T, 64)
        attention(q, k, v, causal=True, backend="hopper")

    run(640)
    caches = forward_kernel.device_caches
    count = sum(len(cache[0]) for cache in caches.values())
    for T in (2, 17, 641, 1000, 4096):
        run(T)
    assert sum(len(cache[0]) for cache in caches.values()) == count


def test_a_kernel_that_does_not_compile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashspan.kernels import backends, hopper
    from flashspan.kernels.failure import KernelFailed

    def fail(*_: object, **__: object) -> None:
        raise KernelFailed("no such instruction")

    monkeypatch.setattr(hopper, "forward", fail)
    q, k, v, _ = tensors(random.Random(5), 1, 2, 2, 100, 100, 64)
    try:
        out = attention(q, k, v, causal=True)
        right = reference.forward(q.float(), k.float(), v.float(), Problem(CAUSAL, 0.125))
        assert relative(out, right.out) <= FORWARD_BOUND
        choice = flashspan.explain(q, k, v, causal=True)
        assert choice.name == "portable"
        assert "no such instruction" in choice.reasons["hopper"]
    finally:
        backends.RETIRED.clear()
        backends._choose.cache_clear()
