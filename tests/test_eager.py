"""A plain eager call takes a shorter path, but autograd and dispatch modes still see the operator."""

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashspan import attention, masks
from flashspan.kernels.masks import Mask


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 9, 8, generator=generator) for _ in range(3)]


def test_the_ways_in_agree() -> None:
    q, k, v = inputs()
    straight = attention(q, k, v, causal=True)
    assert not straight.requires_grad
    for x in (q, k, v):  # one tensor that requires a gradient is enough
        out, lse = attention(*(y.detach().requires_grad_(y is x) for y in (q, k, v)), causal=True, return_lse=True)
        assert out.requires_grad
        assert lse.requires_grad
        assert torch.equal(out, straight)
    with torch.no_grad():
        assert not attention(q.requires_grad_(), k, v, causal=True).requires_grad
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v, causal=True), straight)


def test_a_forward_derivative_is_refused_and_not_forgotten() -> None:
    q, k, v = inputs()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))


def test_a_second_derivative_is_refused_and_not_forgotten() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    plain = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    first = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v), create_graph=True)
    for a, b in zip(first, plain, strict=True):
        assert torch.equal(a, b)
    # This loss has another path to q, which must not hide the missing second derivative.
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(q.sum() + first[0].square().sum(), q)


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("way", ["eager", "graph of gradients", "compiled"])
@functorch_config.patch(donated_buffer=False)  # otherwise a compiled graph allows only one backward
def test_a_mask_changed_between_forward_and_backward_is_refused(kind: str, way: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if way == "compiled" else attention
    graph = way == "graph of gradients"
    says = "modified by an inplace operation" if way == "compiled" else "a mask must not change.*make a new mask"

    def make() -> Mask:
        rows = masks.documents([4, 5])
        return rows if kind == "rows" else masks.Blocks.of(rows, 9, 9)

    for number in range(len(make().pack()[2])):
        mask = make()
        out = run(q, k, v, mask=mask)
        before = torch.autograd.grad(out.square().sum(), q, create_graph=graph, retain_graph=True)
        assert before[0].any()
        mask.pack()[2][number].add_(0)
        with pytest.raises(RuntimeError, match=says):
            torch.autograd.grad(out.square().sum(), q, create_graph=graph)


def test_a_mask_changed_before_forward_or_after_backward_is_not_noticed() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    mask = masks.documents([4, 5])
    (wanted,) = torch.autograd.grad(attention(q, k, v, mask=masks.documents([4, 5])).square().sum(), q)
    for _ in range(2):
        mask.start.add_(0)
        (found,) = torch.autograd.grad(attention(q, k, v, mask=mask).square().sum(), q)
        assert torch.equal(found, wanted)
    with torch.inference_mode():  # inference tensors have no versions
        made = masks.documents([4, 5])
    (found,) = torch.autograd.grad(attention(q, k, v, mask=made).square().sum(), q)
    assert torch.equal(found, wanted)


def test_a_dispatch_mode_sees_the_operator() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        attention(*inputs())
    assert "flashspan.attend.default" in names
