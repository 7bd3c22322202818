"""With `keep_attention`, a checkpointed ring runs once forward and once backward, never twice forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashspan import attention
from flashspan.context import context_parallel, keep_attention
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.passes import BackwardPass, ForwardPass
from flashspan.context.schedule import Shape, bytes_sent, reverse
from flashspan.context.strategy import ContextAttention
from flashspan.context.visibility import Visibility
from flashspan.kernels.backends import Chosen
from flashspan.kernels.masks import CAUSAL
from flashspan.masks.patterns import documents
from flashspan.model import LlamaConfig
from flashspan.plan import ParallelConfig, Run
from flashspan.plan.devices import DEVICES, Cluster, Link
from flashspan.plan.step import attention_time
from tests.context.cases import Case, attention_of

OnRanks = Callable[..., list[Any]]
T, H, D, LAYERS = 40, 4, 8, 3


def network(attend: ContextAttention, x: Tensor, mode: str) -> Tensor:
    """A small residual network. `mode` chooses how each layer is checkpointed."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (torch.tanh(x @ weight[i]) for i in range(3))
        return x + attend(q, k, v, causal=True)

    weights = torch.randn(LAYERS, 3, D, D, generator=torch.Generator().manual_seed(1)) / D**0.5
    for weight in weights:
        if mode == "none":
            x = layer(x, weight)
        elif mode == "plain":
            x = checkpoint(layer, x, weight, use_reentrant=False)
        else:
            x = checkpoint(layer, x, weight, use_reentrant=False, context_fn=keep_attention)
    return x


def count(strategy: str, mode: str) -> tuple[int, int, int, Any] | None:
    """On a rank: forward passes, backward passes, bytes sent, and the gradient of one training step."""
    attend = attention_of(Case(4, strategy), num_tokens=T)
    if attend is None:
        return None
    passes = {"forward": 0, "backward": 0}

    def counted(kind: type, name: str) -> Callable[..., Any]:
        original = kind.steps  # type: ignore[attr-defined]

        def steps(self: Any) -> Any:
            passes[name] += 1
            return original(self)

        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardPass, "steps", counted(ForwardPass, "forward"))
        patch.setattr(BackwardPass, "steps", counted(BackwardPass, "backward"))
        x = attend.shard(torch.randn(1, H, T, D, generator=torch.Generator().manual_seed(2)), 2).requires_grad_()
        y = network(attend, x, mode)
        y.backward(attend.shard(torch.randn(1, H, T, D, generator=torch.Generator().manual_seed(3)), 2))
    assert x.grad is not None
    return passes["forward"], passes["backward"], attend.bytes_sent, x.grad.numpy()


@pytest.mark.parametrize("strategy", ["ring", "helper", "hybrid"])
def test_attention_is_not_run_twice(on_ranks: OnRanks, strategy: str) -> None:
    results = {mode: on_ranks(count, strategy, mode)[4:] for mode in ("none", "plain", "kept")}
    for rank in range(4):
        none, plain, kept = (results[mode][rank] for mode in ("none", "plain", "kept"))
        assert none[:2] == kept[:2] == (LAYERS, LAYERS)
        assert plain[:2] == (2 * LAYERS, LAYERS)
        assert torch.equal(torch.from_numpy(none[3]), torch.from_numpy(kept[3]))
        if strategy != "hybrid":
            assert kept[2] == none[2] < plain[2]
        else:  # the all-to-all of q, k and v is repeated; those of out and the ring are not
            assert none[2] < kept[2] < plain[2]


def write_into_what_is_kept(mode: str) -> str:
    attend = attention_of(Case(4, "ring"), num_tokens=T)
    if attend is None:
        return ""
    q, k, v = (attend.shard(torch.randn(1, H, T, D), 2) for _ in range(3))  # of frozen layers
    weight = torch.ones(D, requires_grad=True)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True).mul_(3) * weight

    options: dict[str, Any] = {"context_fn": keep_attention} if mode == "kept" else {}
    y = checkpoint(block, q, k, v, use_reentrant=False, **options)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    assert weight.grad is not None
    return "right" if torch.allclose(weight.grad, y.detach().sum((0, 1, 2)), atol=1e-4) else "wrong"


def test_a_kept_result_that_was_changed_is_refused(on_ranks: OnRanks) -> None:
    assert set(on_ranks(write_into_what_is_kept, "plain")[4:]) == {"right"}
    assert all("changed in place" in said for said in on_ranks(write_into_what_is_kept, "kept")[4:])


@pytest.mark.parametrize("strategy", ["ring", "gather", "helper", "double_ring"])
def test_the_transport_sends_the_bytes_of_the_schedule(on_ranks: OnRanks, strategy: str) -> None:
    visibility = Visibility(place("zigzag", T, 4), CAUSAL)
    sizes = {"sizes": (2, 2)} if strategy == "double_ring" else {}
    schedule = GENERATORS[strategy](visibility, **sizes)
    shape = Shape(num_batch=1, num_heads=H, num_kv_heads=H, head_dim=D, itemsize=4)
    expected = zip(bytes_sent(schedule, shape), bytes_sent(reverse(schedule), shape), strict=True)
    sent = [answer[2] for answer in on_ranks(count, strategy, "none")[4:]]
    assert sent == [LAYERS * (forward + backward) for forward, backward in expected]


def ulysses_bytes(kv_heads: int, dtype: torch.dtype) -> tuple[int, int] | None:
    """On a rank: the bytes sent in forward and in backward."""
    attend = attention_of(Case(4, "ulysses"), num_tokens=T)
    if attend is None:
        return None
    q, k, v = (attend.shard(torch.randn(2, h, T, D).to(dtype), 2) for h in (8, kv_heads, kv_heads))
    out = attend(q.requires_grad_(), k, v, causal=True)
    forward = attend.bytes_sent
    out.backward(torch.randn_like(out))
    return forward, attend.bytes_sent - forward


@pytest.mark.parametrize(("kv_heads", "replicas"), [(8, 8), (4, 4), (2, 4), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ulysses_sends_the_documented_and_planned_bytes(
    on_ranks: OnRanks, kv_heads: int, replicas: int, dtype: torch.dtype
) -> None:
    answers = on_ranks(ulysses_bytes, kv_heads, dtype)[4:]
    sent = [sum(there_or_back) for there_or_back in zip(*answers, strict=True)]
    E, rows = dtype.itemsize, T * 2 * 3 // 4  # T B (U - 1) / U
    summed = 4 if replicas > kv_heads else E
    assert sent[0] == rows * ((2 * 8 + 2 * replicas) * D * E + 4 * 8)
    assert sent[1] == rows * (2 * 8 * D * E + 4 * 8 + 2 * replicas * D * summed)
    # In the plan, ranks wait only for the link, which here sends a byte per second.
    run = Run(LlamaConfig(64, 8 * D, 1, 8, kv_heads, 64), batch=2, tokens=T, precision=str(dtype).split(".")[1])
    link = Link("slow", latency=0.0, bandwidth=1.0)
    cluster = Cluster(DEVICES["H100"], 4, 4, link, link)
    planned = attention_time(run, ParallelConfig(context=4, strategy="ulysses", layout="contiguous"), cluster)
    assert [4 * max(one.waiting) for one in planned] == pytest.approx(sent)


def test_one_rank_does_not_run_attention_twice_either(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, forward = [], Chosen.forward

    def count_runs(*given: Any, **named: Any) -> Any:
        runs.append(1)
        return forward(*given, **named)

    monkeypatch.setattr(Chosen, "forward", count_runs)
    attend, x = context_parallel(None), torch.randn(1, 2, 9, 8, requires_grad=True)
    out = checkpoint(lambda x: attend(x, x, x, causal=True), x, use_reentrant=False, context_fn=keep_attention)
    out.sum().backward()
    assert len(runs) == 1


def test_one_rank_takes_the_mask_of_each_call_in_a_kept_block_and_outside() -> None:
    attend, generator = context_parallel(None), torch.Generator().manual_seed(5)
    x = torch.randn(1, 2, 9, 8, generator=generator).requires_grad_()
    dout = torch.randn(1, 2, 9, 8, generator=generator)
    for lengths in ([4, 5], [3, 6]):
        mask = documents(lengths)
        outside = attend(x, x, x, mask=mask)
        kept = checkpoint(
            lambda x, mask=mask: attend(x, x, x, mask=mask), x, use_reentrant=False, context_fn=keep_attention
        )
        expected = attention(x, x, x, mask=mask)
        (wanted,) = torch.autograd.grad(expected, x, dout)
        for out in (outside, kept):
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out, x, dout)[0], wanted)
