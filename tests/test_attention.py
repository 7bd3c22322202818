"""The public face: a drop-in for SDPA, its errors, and how it lives with compile, autocast and checkpointing."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashspan
from flashspan import attention, explain, masks
from flashspan.arguments import dense_rows, mask_of
from flashspan.context import context_parallel
from flashspan.kernels import backends, cpu
from flashspan.kernels.failure import KernelFailed
from flashspan.kernels.masks import patterns


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad(out, of, dout)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), [(63, 63), (1, 5), (100, 40), (40, 100)])
def test_equals_sdpa(causal: bool, T: int, S: int) -> None:
    q, k, v = inputs((2, 6, T, 32), (2, 2, S, 32), (2, 2, S, 32))
    ours = attention(q, k, v, causal=causal)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert relative(ours, theirs) < 1e-6
    for mine, other in zip(gradients(ours, q, k, v), gradients(theirs, q, k, v), strict=True):
        assert float((mine - other).norm()) < 1e-5 * (1 + float(other.norm()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_error_is_no_worse_than_sdpa(dtype: torch.dtype) -> None:
    q, k, v = inputs((1, 4, 257, 64), (1, 4, 257, 64), (1, 4, 257, 64), dtype=dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*exact_inputs, is_causal=True)
    truth = (exact, *gradients(exact, *exact_inputs))
    ours = attention(q, k, v, causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    pairs = zip((ours, *gradients(ours, q, k, v)), (theirs, *gradients(theirs, q, k, v)), truth, strict=True)
    for mine, other, right in pairs:
        assert relative(mine, right) <= 1.1 * relative(other, right)


def test_window_counts_the_query_itself() -> None:
    q, k, v = inputs(*[(1, 1, 50, 8)] * 3)
    i, j = torch.arange(50)[:, None], torch.arange(50)
    seen = {
        "causal": (attention(q, k, v, causal=True, window=4), (j <= i) & (j > i - 4)),
        "both ways": (attention(q, k, v, window=4), (j - i).abs() < 4),
        "pair": (attention(q, k, v, window=(2, 7)), (j >= i - 2) & (j <= i + 7)),
    }
    for out, visible in seen.values():
        assert relative(out, F.scaled_dot_product_attention(q, k, v, attn_mask=visible)) < 1e-6


def test_causal_offset_aligns_the_ends() -> None:
    q, k, v = inputs((1, 2, 3, 16), (1, 2, 10, 16), (1, 2, 10, 16))
    whole = torch.cat([torch.randn(1, 2, 7, 16), q], 2)
    out = attention(q, k, v, mask=masks.causal(offset=7))
    assert relative(out, attention(whole, k, v, causal=True)[:, :, 7:]) < 1e-6


def test_strided_views_need_no_copy_and_are_right() -> None:
    fused = torch.randn(2, 37, 3, 4, 16)
    q, k, v = fused.unbind(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(attention(q, k, v), attention(q.contiguous(), k.contiguous(), v.contiguous()))
    swapped = [x.mT.contiguous().mT for x in (q, k, v)]  # the last dimension is not contiguous here
    assert relative(attention(*swapped), attention(q, k, v)) < 1e-6


def test_what_repeats_is_copied_once() -> None:
    one = dense_rows(torch.ones(()).expand(2, 3, 4, 8))  # the gradient of a sum
    assert (one == 1).all()
    assert one.shape == (2, 3, 4, 8)
    assert one.untyped_storage().nbytes() == 4 * 8 * 4
    shared = torch.randn(2, 1, 8, 5).mT.expand(2, 3, 5, 8)
    assert torch.equal(dense_rows(shared), shared)
    assert dense_rows(shared).stride() == (40, 0, 8, 1)
    q, k, v = inputs((2, 4, 9, 16), (2, 1, 9, 16), (2, 1, 9, 16))
    wide = [x.expand(2, 4, 9, 16) for x in (k, v)]
    out = attention(q, *wide, causal=True)
    assert relative(out, attention(q, k, v, causal=True)) < 1e-6
    got = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    want = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(relative(a, b) < 1e-6 for a, b in zip(got, want, strict=True))


def test_merging_heads_is_a_view() -> None:
    out = attention(*inputs(*[(2, 4, 9, 16)] * 3))
    assert out.transpose(1, 2).reshape(2, 9, 64).data_ptr() == out.data_ptr()


@pytest.mark.parametrize(("T", "S"), [(0, 4), (4, 0), (0, 0), (1, 1)])
def test_any_length_including_zero(T: int, S: int) -> None:
    q, k, v = inputs((2, 2, T, 8), (2, 2, S, 8), (2, 2, S, 8))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    if S == 0:
        assert not out.any()
        assert (lse == -torch.inf).all()
    out.backward(torch.randn_like(out))
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_no_heads_and_a_mask_for_each() -> None:
    q = torch.zeros(1, 0, 5, 4)
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    for mask in (seen.expand(1, 0, 5, 5), seen.expand(1, 0, 5, 5).clone()):
        assert attention(q, q, q, mask=mask).shape == q.shape


@pytest.mark.parametrize("head_dim", [1, 64, 80, 96, 112, 128, 160, 192, 256])
def test_every_head_size(head_dim: int) -> None:
    q, k, v = inputs(*[(1, 2, 33, head_dim)] * 3)
    ours, theirs = attention(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative(ours, theirs) < 1e-6
    for mine, other in zip(gradients(ours, q, k, v), gradients(theirs, q, k, v), strict=True):
        assert relative(mine, other) < 1e-5


def test_rows_that_see_nothing_give_zero_and_no_gradient() -> None:
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)
    out, lse = attention(q, k, v, mask=masks.causal(offset=-5), return_lse=True)
    assert not out[:, :, :5].any()
    assert (lse[:, :, :5] == -torch.inf).all()
    (dq,) = gradients(out, q)
    assert not dq[:, :, :5].any()
    assert dq.isfinite().all()


def test_nan_in_a_masked_key_reaches_no_result() -> None:
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)
    mask = masks.ragged([12], 20, 20)
    clean = attention(q, k, v, mask=mask)
    with torch.no_grad():
        dirty_k, dirty_v = (x.clone() for x in (k, v))
        dirty_k[:, :, 12:], dirty_v[:, :, 12:] = torch.nan, torch.inf
    dirty_k.requires_grad_(), dirty_v.requires_grad_()
    out = attention(q, dirty_k, dirty_v, mask=mask)
    assert relative(out, clean) < 1e-6
    for mine, other in zip(gradients(out, q, dirty_k, dirty_v), gradients(clean, q, k, v), strict=True):
        assert relative(mine, other) < 1e-5


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_nan_in_a_query_that_sees_nothing_reaches_no_result(backend: str) -> None:
    """Padding: its rows are 0 and -inf, and it affects no gradient."""
    clean = inputs(*[(2, 2, 40, 8)] * 3)
    dout = torch.randn(2, 2, 40, 8)
    exists = torch.arange(40) < torch.tensor([[25], [40]])  # [B, T]
    dirty = [x.detach().clone() for x in clean]
    for x in (dirty[0], dout):
        x.masked_fill_(~exists[:, None, :, None], torch.nan)
    leaves = [x.requires_grad_() for x in dirty]
    mask = masks.ragged([30, 20], 40, 40, query_lengths=[25, 40]) & masks.window(9)
    out, lse = attention(*leaves, mask=mask, backend=backend, return_lse=True)
    wanted = attention(*clean, mask=mask, backend=backend)
    assert torch.equal(out, wanted)
    assert not out.movedim(1, 2)[~exists].any()
    assert (lse.movedim(1, 2)[~exists] == -torch.inf).all()
    out.backward(dout)
    wanted.backward(dout.nan_to_num(0.0))
    for mine, other in zip(leaves, clean, strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_numpy_numbers_are_accepted() -> None:
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)
    for p, seed in ((0.25, 2**63 - 1), (0.5, 7)):
        mine = attention(q, k, v, dropout=np.float32(p), seed=np.int64(seed))
        assert torch.equal(mine, attention(q, k, v, dropout=p, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_too_small_for_float32_is_as_good_as_none(dtype: torch.dtype) -> None:
    x = inputs(*[(1, 2, 40, 8)] * 3, dtype=dtype)
    wanted = attention(*x, causal=True, scale=0.0)
    (last,) = gradients(wanted, *x)[2:]
    for scale in (1e-300, 1e-46):
        out = attention(*x, causal=True, scale=scale)
        assert torch.equal(out, wanted)
        assert torch.equal(gradients(out, *x)[2], last)


def test_lse_is_returned_and_differentiable() -> None:
    q, k, v = (x.detach().double().requires_grad_() for x in inputs(*[(1, 2, 7, 4)] * 3))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="reference")
    scores = (q @ k.mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    assert relative(lse, scores.logsumexp(-1)) < 1e-6
    wanted = torch.autograd.grad((scores.logsumexp(-1).sin().sum() + (scores.softmax(-1) @ v).cos().sum()), (q, k, v))
    got = torch.autograd.grad(lse.double().sin().sum() + out.cos().sum(), (q, k, v))
    assert all(relative(a, b) < 1e-6 for a, b in zip(got, wanted, strict=True))
    fast = [x.detach().float().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*fast, causal=True, return_lse=True)
    got = torch.autograd.grad(lse.sin().sum() + out.cos().sum(), fast)
    assert all(relative(a, b) < 1e-5 for a, b in zip(got, wanted, strict=True))


def test_float64_passes_gradcheck() -> None:
    q, k, v = (x.detach().double().requires_grad_() for x in inputs((1, 4, 5, 3), (1, 2, 6, 3), (1, 2, 6, 3)))
    for backend in ("reference", "tiled"):
        assert torch.autograd.gradcheck(lambda q, k, v, b=backend: attention(q, k, v, window=3, backend=b), (q, k, v))


def test_bool_masks() -> None:
    q, k, v = inputs(*[(2, 2, 12, 8)] * 3)
    lengths = torch.tensor([12, 5])
    visible = torch.arange(12) < lengths[:, None, None, None]
    visible = visible.expand(2, 1, 12, 12) & torch.ones(12, 12, dtype=torch.bool).tril()
    ours = attention(q, k, v, mask=visible)
    assert relative(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=visible)) < 1e-6
    assert relative(attention(q, k, v, mask=visible[0, 0], causal=True), attention(q, k, v, causal=True)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_dropout_does_not_ask_for_the_default_dtype(dtype: torch.dtype, backend: str) -> None:
    *inputs, dout = (torch.randn(2, heads, 37, 8) for heads in (4, 2, 2, 4))

    def run(work: torch.dtype) -> list[Tensor]:
        leaves = [x.to(work).requires_grad_() for x in inputs]
        out = attention(*leaves, dropout=0.3, seed=3, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(work))]

    want, exact = run(torch.float32), run(torch.float64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got, got_exact = run(torch.float32), run(torch.float64)
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, got_exact, exact))
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(want, exact, strict=True))  # of the same survivors


def test_dropout_is_repeatable_and_keeps_the_mean() -> None:
    q, k, _ = inputs(*[(1, 4, 64, 16)] * 3)
    ones = torch.ones(1, 4, 64, 16)
    first = attention(q, k, ones, dropout=0.25, seed=7)
    assert torch.equal(first, attention(q, k, ones, dropout=0.25, seed=7))
    assert not torch.equal(first, attention(q, k, ones, dropout=0.25, seed=8))
    # A query's output is its surviving probability mass over 1 - p: 1 on average.
    assert abs(float(first.detach().mean()) - 1.0) < 0.02
    torch.manual_seed(3)
    drawn = attention(q, k, ones, dropout=0.25)
    torch.manual_seed(3)
    assert torch.equal(drawn, attention(q, k, ones, dropout=0.25))
    made = [attention(q, k, ones, dropout=0.25, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*made)


@pytest.mark.parametrize("mask", [None, masks.documents([10, 0, 23])])
def test_compiles_whole(mask: object) -> None:
    q, k, v = inputs((1, 4, 33, 16), (1, 2, 33, 16), (1, 2, 33, 16))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    ours, eager = (f(q, k, v, causal=True, mask=mask, dropout=0.1, seed=3) for f in (compiled, attention))
    assert torch.equal(ours, eager)
    for mine, other in zip(gradients(ours, q, k, v), gradients(eager, q, k, v), strict=True):
        assert torch.equal(mine, other)


def test_operator_passes_opcheck() -> None:
    q, k, v = inputs(*[(1, 2, 9, 8)] * 3)
    torch.library.opcheck(
        torch.ops.flashspan.attend.default, (q, k, v, "band", [-3, 0], [], 0.3, 0.0, None, False, "auto")
    )


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = inputs(*[(1, 2, 33, 16)] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True))
    assert all(grad.dtype == torch.float32 for grad in gradients(out, q, k, v))
    inputs16 = [x.detach().bfloat16() for x in (q, k, v)]
    for backend in ("tiled", "reference"):  # written in plain PyTorch, which autocast would reach into
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = attention(q, k, v, causal=True, backend=backend)
        assert torch.equal(inside, attention(*inputs16, causal=True, backend=backend))


def test_activation_checkpointing_changes_nothing() -> None:
    q, k, v = inputs(*[(1, 2, 33, 16)] * 3)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, causal=True, dropout=0.2)

    torch.manual_seed(0)
    plain = layer(q, k, v)
    torch.manual_seed(0)
    saved = checkpoint(layer, q, k, v, use_reentrant=False)
    for mine, other in zip(gradients(saved, q, k, v), gradients(plain, q, k, v), strict=True):
        assert torch.equal(mine, other)


def test_memory_is_linear_in_tokens() -> None:
    """A window over 16384 tokens: a [T, S] float matrix would take a gibibyte."""
    import resource

    q, k, v = (torch.randn(1, 1, 16384, 16) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attention(q, k, v, causal=True, window=256)
    attention(q, k, v, causal=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 200


def test_a_mask_first_used_in_inference_mode_still_trains() -> None:
    q, k, v = inputs(*[(1, 2, 40, 8)] * 3)
    kept = masks.documents([20, 20])
    with torch.inference_mode():
        made = masks.documents([20, 20])
        attention(q, k, v, mask=kept, causal=True)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(attention(q, k, v, mask=masks.documents([20, 20]), causal=True), (q, k, v), dout)
    for mask in (kept, made):
        grads = torch.autograd.grad(attention(q, k, v, mask=mask, causal=True), (q, k, v), dout)
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_copies_of_a_mask_have_no_cached_results() -> None:
    import copy
    import pickle

    a, b = masks.documents([20, 20]), masks.prefix(5, 40)
    size = len(pickle.dumps(a))
    assert a & b == b & a
    for shift in range(40):
        a & masks.causal(shift)
    assert copy.deepcopy(a) == a == pickle.loads(pickle.dumps(a))
    assert len(pickle.dumps(a)) == size
    assert len(a._derived) <= 16


def test_windows_may_change_under_compile() -> None:
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)
    compiled = torch.compile(
        lambda q, k, v, w: attention(q, k, v, causal=True, window=w), fullgraph=True, backend="aot_eager"
    )
    for window in (3, 5, 7):
        assert torch.equal(compiled(q, k, v, window), attention(q, k, v, causal=True, window=window))


def test_scales_may_change_under_compile() -> None:
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)
    compiled = torch.compile(lambda q, k, v, s: attention(q, k, v, scale=s), fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.5, -0.7):
        assert torch.equal(compiled(q, k, v, scale), attention(q, k, v, scale=scale))


def test_a_default_device_does_not_reach_masks() -> None:
    q, k, v = (x.detach() for x in inputs(*[(2, 2, 16, 8)] * 3))
    expected = attention(q, k, v, mask=masks.ragged([3, 9], 16, 16) & masks.causal())
    with torch.device("meta"):
        mask = masks.ragged([3, 9], 16, 16) & masks.causal()
        zigzag = masks.causal().slice([range(4), range(8, 12)], range(16))
        assert torch.equal(attention(q, k, v, mask=mask), expected)
        assert zigzag.intervals(8, 16)[0].device.type == "cpu"


def test_meta_tensors_give_shapes() -> None:
    q = torch.empty(1, 2, 16, 8, device="meta")
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == (q.shape, (1, 2, 16), "meta")


def test_autocast_brings_mixed_inputs_together() -> None:
    q, k, v = inputs(*[(1, 2, 9, 8)] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v.bfloat16()).dtype == torch.bfloat16


def test_float64_gradients_are_float64() -> None:
    q, k, v = (3 * x.detach().double() for x in inputs(*[(1, 2, 9, 8)] * 3))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    ours, theirs = attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    for mine, other in zip(gradients(ours, *tensors), gradients(theirs, *tensors), strict=True):
        assert relative(mine, other) < 1e-12


def test_seeds_that_differ_anywhere_drop_other_pairs() -> None:
    q, k, v = inputs(*[(1, 1, 64, 8)] * 3)
    drop = [attention(q, k, v, dropout=0.5, seed=s) for s in (1, 1 + 2**32, 1 + 2**63, -1, 2**64 + 5)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drop) for b in drop[:i])


q4 = torch.zeros(1, 4, 8, 16)
BAD = {
    "wrong rank": (lambda: attention(q4[0], q4[0], q4[0]), "must be .batch, heads, tokens, head size.*unsqueeze"),
    "dtype mix": (lambda: attention(q4, q4.half(), q4), "share a dtype.*float32, torch.float16"),
    "not floating": (lambda: attention(q4.int(), q4.int(), q4.int()), "works on float16"),
    "device mix": (lambda: attention(q4, q4.to("meta"), q4), "on one device.*cpu, meta, cpu"),
    "k and v differ": (lambda: attention(q4, q4, q4[:, :, :3]), "k and v must have one shape"),
    "batch differs": (lambda: attention(q4, q4.expand(2, 4, 8, 16), q4.expand(2, 4, 8, 16)), "same batch"),
    "head size differs": (lambda: attention(q4, q4[..., :8], q4[..., :8]), "same head size"),
    "heads do not divide": (lambda: attention(q4, q4[:, :3], q4[:, :3]), "4 query heads and 3 key heads"),
    "head size 0": (lambda: attention(*[q4[..., :0]] * 3), "head size must be 1 to 256.*heads of size 0 have nothing"),
    "head size 300": (lambda: attention(*[torch.zeros(1, 1, 2, 300)] * 3), "head size must be 1 to 256.*split larger"),
    "scale that is no number": (lambda: attention(q4, q4, q4, scale=math.nan), "must be a finite number: got nan"),
    "scale without end": (lambda: attention(q4, q4, q4, scale=-math.inf), "finite number: got -inf; use None"),
    "scale of a word": (lambda: attention(q4, q4, q4, scale="x"), "finite number: got 'x'"),  # type: ignore[call-overload]
    "scale that wants a gradient": (
        lambda: attention(q4, q4, q4, scale=torch.ones((), requires_grad=True)),  # type: ignore[call-overload]
        "finite number: got tensor.*multiply q",
    ),
    "scale beyond NumPy's floats": (
        lambda: attention(q4, q4, q4, scale=np.float32("inf")),  # type: ignore[call-overload]
        "finite number",
    ),
    "scale beyond all floats": (lambda: attention(q4, q4, q4, scale=10**400), "finite number"),
    "mask of the wrong shape": (lambda: attention(q4, q4, q4, mask=masks.documents([5])), "5 queries and 5 keys"),
    "mask tensor of the wrong shape": (
        lambda: attention(q4, q4, q4, mask=torch.ones(3, 3, dtype=torch.bool)),
        "3 queries and 3 keys",
    ),
    "additive mask": (lambda: attention(q4, q4, q4, mask=torch.zeros(8, 8)), "must be bool"),
    "mask tensor that does not broadcast": (
        lambda: attention(q4, q4, q4, mask=torch.ones(3, 5, 8, 8, dtype=torch.bool)),
        "broadcast to q's batch and heads",
    ),
    "mask tensor of sequences or of heads": (
        lambda: attention(*[torch.ones(3, 3, 8, 4)] * 3, mask=torch.ones(3, 8, 8, dtype=torch.bool)),
        r"as many of the one as of the other, 3: got \(3, 8, 8\); say which by mask\[:, None\]",
    ),
    "mask tensor on another device": (
        lambda: attention(q4, q4, q4, mask=torch.ones(8, 8, dtype=torch.bool, device="meta")),
        "on q's device",
    ),
    "not a mask": (lambda: attention(q4, q4, q4, mask="causal"), "made by flashspan.masks"),  # type: ignore[arg-type]
    "negative window": (lambda: attention(q4, q4, q4, window=-1), "window is an int >= 1"),
    "window of a float": (lambda: attention(q4, q4, q4, window=2.5), "got 2.5"),  # type: ignore[call-overload]
    "window of a bool": (lambda: attention(q4, q4, q4, window=True), "got True"),
    "seed of a text": (lambda: attention(q4, q4, q4, seed="x"), "whole number: got 'x'"),  # type: ignore[call-overload]
    "window of three": (lambda: attention(q4, q4, q4, window=(1, 2, 3)), "pair"),  # type: ignore[call-overload]
    "seed of a float": (
        lambda: attention(q4, q4, q4, dropout=0.1, seed=1.5),  # type: ignore[call-overload]
        "seed is a whole number",
    ),
    "dropout of nothing": (lambda: attention(q4, q4, q4, dropout=None), "probability"),  # type: ignore[call-overload]
    "nested": (lambda: attention(torch.nested.nested_tensor([q4[0]]), q4, q4), "dense tensors: got nested"),
    "not a tensor": (lambda: attention(q4.numpy(), q4, q4), "dense tensors: got ndarray"),  # type: ignore[call-overload]
    "sparse": (lambda: attention(q4.to_sparse(), q4, q4), "to_dense"),
    "documents of half tokens": (lambda: masks.documents([1.5, 2.7]), "whole numbers"),  # type: ignore[list-item]
    "more keys than there are": (lambda: masks.ragged([-1, 50], 40, 40), "0 to 40 keys"),
    "a slice that runs backwards": (lambda: masks.causal().slice(range(5, 0, -1), range(5, 0, -1)), "ascending"),
    "a slice by a slice": (lambda: masks.causal().slice(slice(3), range(5)), "several of them"),  # type: ignore[arg-type]
    "an implementation without this dtype": (
        lambda: attention(*[q4.double()] * 3, backend="portable"),
        "portable' cannot serve this call: it (has no torch.float64 kernels|needs a GPU)",
    ),
    "a list of heads": (
        lambda: masks.Blocks.from_dense(torch.eye(3, dtype=torch.bool).expand(4, 3, 3).clone()).heads([1]),  # type: ignore[arg-type]
        r"a range of neighbours.*got \[1\]",
    ),
    "dropout of 1": (lambda: attention(q4, q4, q4, dropout=1.0), r"in \[0, 1\): got 1.0"),
    "negative dropout": (lambda: attention(q4, q4, q4, dropout=-0.1), r"in \[0, 1\)"),
    "seed and generator": (
        lambda: attention(q4, q4, q4, dropout=0.1, seed=1, generator=torch.Generator()),
        "a seed or a generator",
    ),
    "generator of a number": (
        lambda: attention(q4, q4, q4, dropout=0.1, generator=3),  # type: ignore[call-overload]
        "a torch.Generator: got 3; use seed=",
    ),
    "backend of nothing": (lambda: attention(q4, q4, q4, backend=None), "one of auto.*'None'"),  # type: ignore[call-overload]
    "backend to explain": (lambda: explain(q4, q4, q4, backend=5), "one of auto.*'5'"),  # type: ignore[arg-type]
    "unknown backend": (lambda: attention(q4, q4, q4, backend="cuda"), "would serve this call: cpu"),
    "backend that cannot serve": (
        lambda: attention(q4, q4, q4, backend="cpu", dropout=0.5),
        "cannot serve this call.*use one of.*tiled",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("attend", [attention, context_parallel(None)], ids=["attention", "context"])
def test_transforms_and_forward_derivatives_are_refused_by_name(attend: Callable[..., Tensor]) -> None:
    x = torch.randn(1, 2, 5, 4)

    def loss(x: Tensor) -> Tensor:
        return attend(x, x, x, causal=True).sum()

    for call in (lambda: torch.func.grad(loss)(x), lambda: torch.func.vmap(loss)(x[None])):
        with pytest.raises(RuntimeError, match=r"no rules for the transforms of torch.func.*use torch.autograd.grad"):
            call()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward derivative: got a dual tensor"):
        attend(forward_ad.make_dual(x, x), x, x)


def test_explain_names_the_implementation_and_why_others_do_not_run() -> None:
    text = str(flashspan.explain(*inputs(*[(1, 2, 9, 8)] * 3), causal=True, dropout=0.1))
    assert "serves float32 on cpu, head size 8, Band mask, dropout" in text
    assert "no counter-based dropout" in text


def test_explain_takes_what_attention_takes() -> None:
    wanted, found = (list(inspect.signature(f).parameters) for f in (attention, flashspan.explain))
    assert found == wanted


def test_masks_can_be_imported_by_name() -> None:
    from flashspan.masks import Band, Rows, causal

    assert causal() == Band(None, 0)
    assert isinstance(masks.documents([3]), Rows)
    made = inspect.getmembers(patterns, inspect.isfunction)
    ready = {name for name, one in made if one.__module__ == patterns.__name__ and not name.startswith("_")}
    assert set(masks.__all__) == {*ready, "Band", "Rows", "Blocks"}


def test_a_window_is_any_whole_number() -> None:
    q, k, v = inputs(*[(1, 2, 9, 8)] * 3)
    wanted = attention(q, k, v, window=3)
    assert torch.equal(attention(q, k, v, window=np.int64(3)), wanted)  # type: ignore[call-overload]
    assert torch.equal(attention(q, k, v, window=(np.int32(2), 2)), wanted)  # type: ignore[call-overload]


def test_deterministic_is_a_field_of_the_call() -> None:
    q, k, v = torch.randn(3, 1, 2, 37, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    dout = torch.randn(1, 2, 37, 16, generator=torch.Generator().manual_seed(1))
    choice = flashspan.explain(q, k, v, causal=True, deterministic=True)
    assert choice.call.deterministic
    assert "deterministic gradients" in str(choice)
    assert "Hopper" in choice.reasons["hopper"]
    plain, asked = (attention(q, k, v, causal=True, deterministic=flag) for flag in (False, True))
    for a, b in zip(
        torch.autograd.grad(plain, (q, k, v), dout), torch.autograd.grad(asked, (q, k, v), dout), strict=True
    ):
        assert torch.equal(a, b)
    named = attention(q, k, v, causal=True, backend="reference", deterministic=True)
    assert torch.allclose(named, plain, atol=1e-6)
    with pytest.raises(ValueError, match="cannot serve this call"):
        attention(q, k, v, causal=True, backend="hopper", deterministic=True)


@contextmanager
def input_on(capability: tuple[int, int]) -> Iterator[Any]:
    """What looks like a tensor on an NVIDIA GPU that is not here; whatever is chosen for it is forgotten again."""
    backends._choose.cache_clear()
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            mock.patch.object(torch.version, "hip", None),
        ):
            yield SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 2, 37, 64))
    finally:
        backends._choose.cache_clear()


def test_repeatable_gradients_stay_on_hopper(request: pytest.FixtureRequest) -> None:
    """What is asked for decides, by argument or for the whole process."""
    pytest.importorskip("flashspan.kernels.hopper")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    with input_on((9, 0)) as x:
        asked = backends.choose(x, masks.causal(), deterministic=True)
        assert (asked.name, asked.call.deterministic) == ("hopper", True)
        blocks = masks.random_blocks(37, 0.5)
        assert backends.choose(x, blocks).name == "hopper"
        asked = backends.choose(x, blocks, deterministic=True)
        assert (asked.name, asked.reasons["hopper"]) == ("portable", "adds dq of block maps in no fixed order")
        torch.use_deterministic_algorithms(True)
        assert backends.choose(x, blocks).name == "portable"
        assert backends.choose(x, masks.causal(), dropout=True).name == "portable"


def test_one_mask_for_all_sequences_stays_one() -> None:
    q = torch.empty(16, 2, 9, 8, device="meta")
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    for given in (visible, visible.expand(16, 1, 9, 9), visible.expand(16, 2, 9, 9)):
        found = mask_of(given, q, 9, 9)
        assert isinstance(found, masks.Rows)
        assert found.start.shape == (9,)


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "tiled"), ((8, 9), "portable"), ((12, 0), "portable")])
def test_a_gpu_that_triton_does_not_serve_gets_plain_pytorch(capability: tuple[int, int], name: str) -> None:
    with input_on(capability) as x:
        choice = backends.choose(x, masks.causal())
    assert choice.name == name
    assert name == "portable" or "sm_80 and later, not sm_75" in choice.reasons["portable"]


@pytest.mark.parametrize("missing", [("barrier", "thread_barrier"), ("NVMMASharedLayout",)])
def test_a_release_of_triton_with_other_names_is_left_to_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    pytest.importorskip("flashspan.kernels.hopper")
    from triton.experimental.gluon import language

    for name in [name for name in sys.modules if name.startswith("flashspan.kernels.hopper")]:
        monkeypatch.delitem(sys.modules, name)
    for name in missing:
        monkeypatch.delattr(language, name, raising=False)
    with input_on((9, 0)) as x:
        choice = backends.choose(x, masks.causal())
    assert choice.name == "portable"
    assert missing[-1] in choice.reasons["hopper"]


def test_tiles_that_were_never_measured_on_a_gpu_are_reported() -> None:
    for name, told in (("NVIDIA H200", False), ("NVIDIA L4", True)):
        with input_on((8, 9)) as x, mock.patch.object(torch.cuda, "get_device_name", return_value=name):
            choice = backends.choose(x, masks.causal())
            assert (name in str(choice.note), "never on this GPU" in str(choice)) == (told, told)


def test_a_kernel_that_fails_to_compile_retires_its_backend_for_that_kind_of_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KernelFailed("could not be compiled here: no such instruction")

    def device_fails(*_: object, **__: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    q, k, v = inputs(*[(1, 2, 9, 8)] * 3)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    want = attention(q, k, v, causal=True)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(want, (q, k, v), dout, retain_graph=True)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "backward", device_fails)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            torch.autograd.grad(want, (q, k, v), dout)
    assert not backends.RETIRED
    for name in ("forward", "backward"):
        try:
            with monkeypatch.context() as patch:
                patch.setattr(cpu, name, fails)
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    out = attention(q, k, v, causal=True, backend="cpu")
                    grads = torch.autograd.grad(out, (q, k, v), dout)
                    assert torch.allclose(attention(q, k, v, causal=True), want, atol=1e-6)
            (warning,) = warned
            assert "'cpu' is off" in str(warning.message)
            assert "no such instruction" in str(warning.message)
            assert torch.allclose(out, want, atol=1e-6)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))
            assert "no such instruction" in flashspan.explain(q, k, v, causal=True).reasons["cpu"]
            with pytest.raises(ValueError, match="no such instruction"):
                attention(q, k, v, causal=True, backend="cpu")
            assert flashspan.explain(q, k, v, mask=masks.documents([4, 5])).name == "cpu", "another kind of call"
        finally:
            backends.RETIRED.clear()
            backends._choose.cache_clear()
