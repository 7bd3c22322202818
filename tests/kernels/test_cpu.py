"""The fused CPU implementation, beyond the contract: how it cuts masks, what it never rounds, and its speed.

pytest -m slow -s tests/kernels/test_cpu.py     # the speed compared with F.scaled_dot_product_attention
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from flashspan import attention
from flashspan.kernels import cpu, reference, tiled
from flashspan.kernels.contract import LocalAttention, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Mask, dense
from flashspan.masks.patterns import causal, documents, window
from tests.kernels.cases import Shape, examples, make_inputs, masks, relative, shapes, solve


@examples(80)
@given(st.data())
def test_strips_say_exactly_what_the_mask_says(data: st.DataObject) -> None:
    shape = data.draw(shapes((1, 2, 63, 200, 600)))
    T, S = shape.num_queries, shape.num_keys
    mask = data.draw(masks(shape.num_batch, T, S))
    seen = torch.zeros(shape.num_batch, T, S, dtype=torch.int32)
    for sequence, rows, parts in cpu._cut(mask, torch.zeros(shape.num_batch, 1, T, 1), torch.zeros(1, 1, S, 1)):
        for part in parts:
            tile = seen[sequence, rows, part.keys.start : part.keys.stop]
            drawn = part.bias(torch.float32)
            if drawn is not None:
                tile += drawn == 0
            else:
                tile += torch.ones(tile.shape[1:]).tril().int() if part.causal else 1
    assert torch.equal(seen, dense(mask, T, S).int().expand_as(seen))


ZIGZAG = [range(512), range(3584, 4096)]


@pytest.mark.parametrize(
    "mask",
    [
        EVERYTHING,
        CAUSAL,
        causal(700),
        causal(-700),
        documents([300, 64, 660]),
        documents([300, 64, 660]) & causal(),
        CAUSAL.slice(ZIGZAG, ZIGZAG),
        CAUSAL.slice(ZIGZAG, [range(512, 1024), range(3072, 3584)]),
        CAUSAL.slice(range(1, 4096, 4), range(2, 4096, 4)),
    ],
    ids=str,
)
def test_the_tiles_of_a_ring_need_no_drawn_mask(mask: Mask) -> None:
    q = torch.zeros(1, 1, 1024, 1)
    parts = [part for strip in cpu._cut(mask, q, q) for part in strip.parts]
    assert 1 <= len(parts) <= 6
    assert all(part.start is None for part in parts)


def test_a_window_is_drawn_a_little_at_a_time() -> None:
    q = torch.zeros(1, 1, 8192, 1)
    parts = [part for strip in cpu._cut(window(512, 0), q, q) for part in strip.parts]
    assert len(parts) < 8192 // cpu.CHUNK + 4
    assert all(len(part.keys) <= cpu.CHUNK + 512 for part in parts)


@pytest.mark.parametrize("mask", [EVERYTHING, CAUSAL, causal(100), window(100, 3), documents([400, 1, 99])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_only_the_result_is_rounded_to_sixteen_bits(mask: Mask, dtype: torch.dtype) -> None:
    """Partial outputs and sums of gradients are float32, for any number of calls."""
    x = make_inputs(Shape(1, 4, 2, 500, 500, 32), seed=1, dtype=dtype)
    answer = solve(x, mask, 0.2)
    assert relative(cpu.forward(x.q, x.k, x.v, Problem(mask, 0.2)).out, answer.out) <= 1e-6
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (x.q, x.k, x.v))
    lse, delta = answer.lse.float(), answer.delta.float()
    cpu.backward(x.dout, x.q, x.k, x.v, lse, delta, Problem(mask, 0.2), dq=dq, dk=dk, dv=dv, accumulate=False)
    for got, want in ((dq, answer.dq), (dk, answer.dk), (dv, answer.dv)):
        assert relative(got, want) <= 1.01 * relative(want.to(dtype), want)


def test_a_few_heads_at_a_time_are_copied_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(Shape(1, 8, 8, 1024, 1024, 64), seed=1, dtype=torch.bfloat16)
    called, attend = [], cpu._attend
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "_attend", lambda q, *rest, **named: called.append(q.numel()) or attend(q, *rest, **named))
    cpu.forward(x.q, x.k, x.v, Problem(CAUSAL, 0.125), out_dtype=torch.bfloat16)
    assert len(called) > 1
    assert max(called) <= cpu.TEMPORARY


@examples(60)
@given(st.integers(-36, 30), st.integers(-36, 30), st.integers(0, 2**32))
def test_the_stand_in_output_recovers_delta(dout_power: int, delta_power: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    dout = torch.randn(1, 2, 10, 64, generator=random) * 10.0**dout_power
    dout[:, :, 3] = 0.0
    delta = torch.randn(1, 2, 10, generator=random) * 10.0**delta_power
    delta[:, 1, 3:6] = 0.0
    changed, out = cpu._stand_in(dout, delta)
    got = (changed.double() * out).sum(-1)
    assert relative(got, delta, dout * 1e-10) <= 1e-6  # a delta much smaller than dout may be lost
    assert bool(((changed - dout).abs() <= 1e-17 * delta.abs()[..., None] + 1e-37).all())


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0])
@pytest.mark.parametrize("mask", [CAUSAL, EVERYTHING, documents([7, 20, 13])])
def test_values_have_no_part_in_a_gradient_of_lse(mask: Mask, size: float) -> None:
    """For a gradient of lse of any size. Rows with a dout too small for it use another one for dq and dk."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(4))
    dout *= size
    dout[:, :, ::3] = 0.0
    dlse = torch.randn(1, 2, 40, generator=generator) * 1e15
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, wanted = (
        torch.autograd.grad(attention(*leaves, mask=mask, return_lse=True, backend=name), leaves, (dout, dlse))
        for name in ("cpu", "reference")
    )
    assert relative(found[2], wanted[2]) <= 1e-5 if size else not found[2].any()
    assert relative(found[0], wanted[0]) <= 1e-5
    assert relative(found[1], wanted[1]) <= 1e-5


def test_heads_are_served_a_few_at_a_time() -> None:
    """So that temporaries are small compared with the tensors. Every thread has a head; small heads share calls."""
    num_threads = torch.get_num_threads()
    try:
        for threads, length, groups in ((1, 2048, 8), (2, 2048, 8), (4, 2048, 4), (8, 2048, 2), (1, 64, 1)):
            torch.set_num_threads(threads)
            q, k = torch.empty(1, 16, length, 64), torch.empty(1, 8, length, 64)
            found = cpu._head_groups(q, k)
            assert len(found) == groups
            assert [h for heads, _ in found for h in range(16)[heads]] == list(range(16))
            assert [len(range(16)[heads]) for heads, _ in found] == [2 * len(range(8)[kv]) for _, kv in found]
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("local", [cpu, tiled, reference], ids=["cpu", "tiled", "reference"])
def test_a_float64_lse_is_carried_on_unrounded(local: LocalAttention) -> None:
    """By every implementation for CPUs; out stays float32. In float32, the rounding errors of a ring's steps would add
    up.

    In 30 steps, rounding lse in each step gives twice the error of one call.
    """
    x = make_inputs(Shape(1, 2, 2, 300, 300, 32), seed=3)
    answer = solve(x, EVERYTHING, 0.2)
    parts = [slice(i, i + 10) for i in range(0, 300, 10)]
    carry = local.forward(x.q, x.k[:, :, parts[0]], x.v[:, :, parts[0]], Problem(EVERYTHING, 0.2))
    carry = carry._replace(lse=carry.lse.double())
    for part in parts[1:]:
        carry = local.forward(x.q, x.k[:, :, part], x.v[:, :, part], Problem(EVERYTHING, 0.2), carry=carry)
    assert (carry.out.dtype, carry.lse.dtype) == (torch.float32, torch.float64)
    whole = local.forward(x.q, x.k, x.v, Problem(EVERYTHING, 0.2))
    for split, one, exact in zip(carry, whole, (answer.out, answer.lse), strict=True):
        assert relative(split, exact) <= 1.1 * relative(one, exact)


def _milliseconds(call: Callable[[], object]) -> float:
    """The processor time of a call, which other work of the machine hardly affects."""
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1e3


@pytest.mark.slow
@pytest.mark.parametrize("mask", [CAUSAL, EVERYTHING], ids=["causal", "full"])
def test_within_a_tenth_of_sdpa(mask: Band) -> None:
    """[1, 8, 2048, 64] in float32 on one thread, in turn with SDPA in one run; the fastest calls are compared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the waiting time of a second thread would count
    x = make_inputs(Shape(1, 8, 8, 2048, 2048, 64), seed=2)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
    out, lse = cpu.forward(x.q, x.k, x.v, Problem(mask, 0.125))
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=mask == CAUSAL)

    def backward() -> None:
        delta = row_delta(x.dout, out)
        cpu.backward(x.dout, x.q, x.k, x.v, lse, delta, Problem(mask, 0.125), dq=dq, dk=dk, dv=dv, accumulate=False)

    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: cpu.forward(x.q, x.k, x.v, Problem(mask, 0.125)),
        "sdpa forward": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=mask == CAUSAL),
        "backward": backward,
        "sdpa backward": lambda: torch.autograd.grad(peer, (q, k, v), x.dout, retain_graph=True),
    }
    best = dict.fromkeys(calls, float("inf"))
    names = list(calls)
    for _ in range(40):
        names.reverse()  # the second one finds warm caches
        for name in names:
            best[name] = min(best[name], _milliseconds(calls[name]))
    torch.set_num_threads(num_threads)
    print("\n" + ", ".join(f"{name} {ms:.1f} ms" for name, ms in best.items()))
    assert best["forward"] <= 1.1 * best["sdpa forward"]
    assert best["backward"] <= 1.1 * best["sdpa backward"]


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("num_keys", [1, 4, 15, 16, 40])
def test_a_visible_nan_is_seen_however_few_the_keys(backend: str, num_keys: int) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    q, k, v = (torch.randn(1, heads, num_keys, 8, generator=generator) for heads in (4, 2, 2))
    q[0, 1, 0] = math.nan
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    expected = torch.zeros(1, 4, num_keys, dtype=torch.bool)
    expected[0, 1, 0] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected)
    k[0, 1] = math.nan
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    expected[0, 2:] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected)
