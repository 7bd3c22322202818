"""Attention under compile, autocast, checkpointing, inference mode, default devices and torch.func."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flashspan import attention, masks
from flashspan.context import context_parallel
from tests.cases import gradients, inputs


def test_merging_heads_is_a_view() -> None:
    out = attention(*inputs(*[(2, 4, 9, 16)] * 3))
    assert out.transpose(1, 2).reshape(2, 9, 64).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("mask", [None, masks.documents([10, 0, 23])])
def test_compiles_into_one_graph(mask: object) -> None:
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
    for backend in ("tiled", "reference"):  # written in plain PyTorch, which autocast would change
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


def test_masks_copy_and_travel_without_what_was_made_of_them() -> None:
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


def test_autocast_casts_mixed_inputs_to_one_dtype() -> None:
    q, k, v = inputs(*[(1, 2, 9, 8)] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("attend", [attention, context_parallel(None)], ids=["attention", "context"])
def test_transforms_and_forward_derivatives_are_refused_by_name(attend: Callable[..., Tensor]) -> None:
    x = torch.randn(1, 2, 5, 4)

    def loss(x: Tensor) -> Tensor:
        return attend(x, x, x, causal=True).sum()

    for call in (lambda: torch.func.grad(loss)(x), lambda: torch.func.vmap(loss)(x[None])):
        with pytest.raises(RuntimeError, match=r"no rules for the transforms of torch.func.*use torch.autograd.grad"):
            call()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative: got a dual tensor"):
        attend(forward_ad.make_dual(x, x), x, x)


@pytest.mark.parametrize("attend", [attention, context_parallel(None)], ids=["attention", "context"])
def test_batched_gradients_are_refused(attend: Callable[..., Tensor]) -> None:
    x = torch.randn(1, 2, 9, 8, requires_grad=True)
    out = attend(x, x, x)
    with pytest.raises(RuntimeError, match="no rule for batched gradients"):
        torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)
