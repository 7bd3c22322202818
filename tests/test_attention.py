"""Attention as a drop-in for SDPA: any length, head size, mask, scale and dropout, with all gradients."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention, masks
from flashspan.arguments import dense_rows, mask_of
from flashspan.masks import patterns
from tests.cases import gradients, inputs
from tests.kernels.cases import relative


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


def test_expanded_dims_are_copied_once() -> None:
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


@pytest.mark.parametrize(("T", "S"), [(0, 4), (4, 0), (0, 0), (1, 1)])
def test_lengths_of_0_and_1(T: int, S: int) -> None:
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
    """As for padding: its rows are 0 and -inf, and it does not affect any gradient."""
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


def test_numbers_may_be_numpy_scalars() -> None:
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)
    for p, seed in ((0.25, 2**63 - 1), (0.5, 7)):
        mine = attention(q, k, v, dropout=np.float32(p), seed=np.int64(seed))
        assert torch.equal(mine, attention(q, k, v, dropout=p, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_too_small_for_float32_acts_as_0(dtype: torch.dtype) -> None:
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
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(want, exact, strict=True))  # with the same pairs kept


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


def test_memory_is_linear_in_tokens() -> None:
    """With a window over 16384 tokens; a [T, S] float matrix would take a GiB."""
    import resource

    q, k, v = (torch.randn(1, 1, 16384, 16) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attention(q, k, v, causal=True, window=256)
    attention(q, k, v, causal=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 200


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


def test_one_mask_for_all_sequences_stays_one() -> None:
    q = torch.empty(16, 2, 9, 8, device="meta")
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    for given in (visible, visible.expand(16, 1, 9, 9), visible.expand(16, 2, 9, 9)):
        found = mask_of(given, q, 9, 9)
        assert isinstance(found, masks.Rows)
        assert found.start.shape == (9,)
