"""The private names of PyTorch that attention uses work as in the checked releases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashspan.kernels import torch_private


def test_a_dispatch_mode_is_seen() -> None:
    assert not torch_private.is_in_torch_dispatch_mode()
    with TorchDispatchMode():
        assert torch_private.is_in_torch_dispatch_mode()


def test_a_transform_is_seen() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch_private.is_transformed())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_a_batched_gradient_is_seen() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda gradient: seen.append(torch_private.is_batched(gradient)))
    y.backward(torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen == [False, True]


def test_a_level_of_forward_derivatives_is_seen() -> None:
    assert not torch_private.has_tangents()
    with forward_ad.dual_level():
        assert torch_private.has_tangents()


def devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    return [*found, torch.device("cuda", 0)] if torch.cuda.is_available() else found


@pytest.mark.parametrize("inference", [False, True])
def test_an_empty_tensor_has_the_strides_asked_for(inference: bool) -> None:
    for device in devices():
        with torch.inference_mode(inference):
            x = torch_private.empty_strided(device)((2, 3, 5), (30, 1, 3), torch.bfloat16)
        want = (torch.Size((2, 3, 5)), (30, 1, 3), torch.bfloat16, device, inference)
        assert (x.shape, x.stride(), x.dtype, x.device, x.is_inference()) == want
        assert hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"), "where there is no GPU too"


def test_the_current_device_is_found() -> None:
    for device in devices():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        assert torch_private.current_index(device)() == device.index


@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_of_cpus_take_and_give_what_they_did(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, 9, 16, generator=generator) for heads in (4, 2, 2, 4))
    out, lse = torch_private.flash_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=0.3)
    grads = torch_private.flash_cpu_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=0.3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    want = F.scaled_dot_product_attention(leaves[0], *wide, is_causal=causal, scale=0.3)
    scores = (q @ wide[0].mT * 0.3).masked_fill(
        ~torch.ones(9, 9).tril().bool() if causal else torch.tensor(False), -torch.inf
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    for one, other in zip(grads, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(one, other)


def test_a_function_applied_eagerly_is_the_function() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, y: Tensor, factor: float) -> Tensor:
            ctx.save_for_backward(x, y)
            ctx.factor = factor
            return x * y * factor

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
            x, y = ctx.saved_tensors
            return gradient * y * ctx.factor, gradient * x * ctx.factor, None

    x, y, dout = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    y.requires_grad_()
    results = []
    for apply in (Product.apply, torch_private.apply_eagerly(Product)):
        out = apply(x, y, 0.3)
        results.append((out, *torch.autograd.grad(out, (x, y), dout)))
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        assert not torch_private.apply_eagerly(Product)(x, y, 0.3).requires_grad
