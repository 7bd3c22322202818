"""Every implementation keeps the contract: the same tests for all, each compared with float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashspan.kernels import cpu, portable, reference, tiled
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import CAUSAL, EVERYTHING, NOTHING, Band, Mask, dense
from flashspan.masks.patterns import causal, documents, ragged, window
from tests.kernels.cases import (
    FORWARD_BOUND,
    GRADIENT_BOUND,
    LENGTHS,
    Answer,
    Inputs,
    Shape,
    bands,
    check_lse,
    examples,
    make_inputs,
    masks,
    relative,
    shapes,
    solve,
    split_lengths,
)


@dataclass(frozen=True)
class Subject:
    """An implementation, and the calls that it supports."""

    module: ModuleType
    lengths: tuple[int, ...] = LENGTHS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    device: str = "cpu"
    long: int = 1000


SUBJECTS = {"reference": Subject(reference), "tiled": Subject(tiled), "cpu": Subject(cpu)}
PARAMETERS = [pytest.param(subject, id=name) for name, subject in SUBJECTS.items()]
if torch.cuda.is_available():  # without a GPU, test_portable.py has cases small enough for the interpreter
    kernels = Subject(portable, dtypes=(torch.float32, torch.float16, torch.bfloat16), device="cuda")
    marks = [pytest.mark.gpu, pytest.mark.timeout(900)]  # every shape and kind of mask compiles its own kernels
    PARAMETERS.append(pytest.param(kernels, id="portable", marks=marks))


@pytest.fixture(params=PARAMETERS, scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles so small that a hundred tokens are several tiles, and one thread, because they are too little work for
    two."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "BLOCK_Q", 32)
        patch.setattr(tiled, "BLOCK_K", 48)
        patch.setattr(cpu, "CHUNK", 40)
        patch.setattr(cpu, "SHORT", 12)
        cpu._cut_band.cache_clear()
        yield
    cpu._cut_band.cache_clear()
    torch.set_num_threads(num_threads)


def attend(
    subject: Subject, x: Inputs, mask: Mask, scale: float, dropout: Dropout | None = None, **options: Any
) -> Carry:
    return subject.module.forward(x.q, x.k, x.v, Problem(mask, scale, dropout), **options)


def pull(
    subject: Subject,
    x: Inputs,
    mask: Mask,
    scale: float,
    answer: Answer,
    *,
    into: tuple[Tensor, Tensor, Tensor],
    accumulate: bool,
    dropout: Dropout | None = None,
) -> None:
    """Run backward with the correct lse and delta, so that errors come from backward alone."""
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    subject.module.backward(
        x.dout,
        x.q,
        x.k,
        x.v,
        answer.lse.to(dtype),
        answer.delta.to(dtype),
        Problem(mask, scale, dropout),
        dq=into[0],
        dk=into[1],
        dv=into[2],
        accumulate=accumulate,
    )


def empty_like(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Buffers of NaN, so that elements that are not written are detected."""
    return tuple(torch.full_like(x, torch.nan, dtype=dtype or x.dtype) for x in tensors)


def check_gradients(got: tuple[Tensor, ...], answer: Answer, bound: float = GRADIENT_BOUND) -> None:
    wanted = (answer.dq, answer.dk, answer.dv)
    for name, mine, want in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert relative(mine, want, *wanted) <= bound, name


def check_everything(subject: Subject, x: Inputs, mask: Mask, scale: float) -> None:
    """Compare forward, overwriting backward and accumulating backward with float64."""
    answer = solve(x, mask, scale)
    out, lse = attend(subject, x, mask, scale)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == x.q.shape
    assert relative(out, answer.out, answer.spread) <= FORWARD_BOUND
    check_lse(lse, answer.lse)
    assert not bool(out[lse == -torch.inf].any())

    fresh = empty_like(x.q, x.k, x.v)
    pull(subject, x, mask, scale, answer, into=fresh, accumulate=False)
    check_gradients(fresh, answer)
    assert not bool(fresh[0][lse == -torch.inf].any())

    before = tuple(torch.randn_like(grad) * grad.norm() / max(grad.numel(), 1) ** 0.5 for grad in fresh)
    sums = tuple(start.clone() for start in before)
    pull(subject, x, mask, scale, answer, into=sums, accumulate=True)
    check_gradients(tuple(s.double() - b.double() for s, b in zip(sums, before, strict=True)), answer)


@examples(60)
@given(data=st.data())
def test_forward_and_backward_match_float64(subject: Subject, data: st.DataObject) -> None:
    shape = data.draw(shapes(subject.lengths))
    mask = data.draw(masks(shape.num_batch, shape.num_queries, shape.num_keys))
    layout = data.draw(st.sampled_from(("BHTD", "BTHD", "fused")))
    scale = data.draw(st.sampled_from((1.0, 1.0, -1.5, 0.3, 0.0))) * shape.head_dim**-0.5
    x = make_inputs(shape, data.draw(st.integers(0, 2**32)), device=subject.device, layout=layout)
    x.dlse *= data.draw(st.sampled_from((0.0, 1.0)))
    x.dout *= data.draw(st.sampled_from((1.0, 1.0, 0.0, 1e-20)))
    check_everything(subject, x, mask, scale)


@pytest.mark.parametrize("mask", [CAUSAL, window(100, 3), documents([63, 1, 936]) & causal()], ids=str)
def test_a_thousand_tokens_with_shared_heads(subject: Subject, mask: Mask) -> None:
    if subject.long < 1000:
        pytest.skip("too slow there")
    x = make_inputs(Shape(1, 2, 1, 1000, 1000, 64), seed=1, device=subject.device)
    check_everything(subject, x, mask, 0.125)


@examples(40)
@given(data=st.data())
def test_a_carry_makes_any_split_of_the_keys_one_softmax(subject: Subject, data: st.DataObject) -> None:
    """As in a ring: chunks of any length, 0 included, in any order, with gradients accumulated chunk by chunk."""
    shape = data.draw(shapes(subject.lengths))
    mask = data.draw(masks(shape.num_batch, shape.num_queries, shape.num_keys))
    dtype = data.draw(st.sampled_from([d for d in subject.dtypes if d != torch.float64]))
    x = make_inputs(shape, data.draw(st.integers(0, 2**32)), dtype=dtype, device=subject.device)
    scale = shape.head_dim**-0.5
    answer = solve(x, mask, scale)

    lengths = data.draw(split_lengths(shape.num_keys, 4))
    stops = torch.tensor(lengths).cumsum(0).tolist()
    chunks = data.draw(st.permutations([range(b - n, b) for n, b in zip(lengths, stops, strict=True)]))
    carry = None
    sums = tuple(torch.zeros_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v))
    for chunk in chunks:
        keys = slice(chunk.start, chunk.stop)
        part = Inputs(x.q, x.k[:, :, keys], x.v[:, :, keys], x.dout, x.dlse)
        tile = mask.slice(range(shape.num_queries), chunk)
        carry = attend(subject, part, tile, scale, carry=carry)
        into = (sums[0], sums[1][:, :, keys], sums[2][:, :, keys])
        pull(subject, part, tile, scale, answer, into=into, accumulate=True)
    assert carry is not None
    assert carry.out.dtype == torch.float32
    sixteen = dtype != torch.float32  # in 16 bits a kernel may round the operands of matmuls, but nothing else
    assert relative(carry.out, answer.out, answer.spread) <= (4 * torch.finfo(dtype).eps if sixteen else FORWARD_BOUND)
    check_lse(carry.lse, answer.lse)
    check_gradients(sums, answer, 4 * torch.finfo(dtype).eps if sixteen else GRADIENT_BOUND)


@functools.cache  # on a CPU without 16-bit matmuls, PyTorch's attention takes seconds
def beside_sdpa(mask: Band, length: int, scale: float, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Inputs, the correct answer, and PyTorch's output and gradients."""
    x = make_inputs(Shape(2, 4, 2, length, length, 64), seed=3, dtype=dtype, device=device)
    x.dlse *= 0.0
    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=mask == CAUSAL, scale=scale, enable_gqa=True)
    grads = torch.autograd.grad(peer, (q, k, v), x.dout)
    return x, solve(x, mask, scale), peer.detach(), *grads


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 16])
@pytest.mark.parametrize("length", [208, pytest.param(320, marks=pytest.mark.slow)])
def test_sixteen_bits_are_no_worse_than_sdpa(
    subject: Subject, dtype: torch.dtype, is_causal: bool, num_chunks: int, length: int
) -> None:
    """In one call and in sixteen: the error of a ring does not grow with the number of calls."""
    if dtype not in subject.dtypes:
        pytest.skip(f"no {dtype} there")
    scale = 0.125
    mask = CAUSAL if is_causal else EVERYTHING
    x, answer, peer, *peer_grads = beside_sdpa(mask, length, scale, dtype, subject.device)
    chunks = [range(i * length // num_chunks, (i + 1) * length // num_chunks) for i in range(num_chunks)]
    parts = [(slice(c.start, c.stop), mask.slice(range(length), c)) for c in chunks]
    carry = None
    for keys, tile in parts:
        part = Inputs(x.q, x.k[:, :, keys], x.v[:, :, keys], x.dout, x.dlse)
        carry = attend(subject, part, tile, scale, carry=carry, out_dtype=torch.float32 if num_chunks > 1 else dtype)
    assert carry is not None
    out = carry.out.to(dtype)
    assert relative(out, answer.out) <= 1.1 * relative(peer, answer.out)

    if num_chunks == 1:
        grads = empty_like(x.q, x.k, x.v)
    else:
        grads = tuple(torch.zeros_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v))
    delta = row_delta(x.dout, out)
    for keys, tile in parts:
        subject.module.backward(
            x.dout,
            x.q,
            x.k[:, :, keys],
            x.v[:, :, keys],
            carry.lse,
            delta,
            Problem(tile, scale),
            dq=grads[0],
            dk=grads[1][:, :, keys],
            dv=grads[2][:, :, keys],
            accumulate=num_chunks > 1,
        )
    for mine, theirs, want in zip(grads, peer_grads, (answer.dq, answer.dk, answer.dv), strict=True):
        assert relative(mine.to(dtype), want) <= 1.1 * relative(theirs, want)


@pytest.mark.parametrize("mask", [CAUSAL, window(30, 7), EVERYTHING, documents([50, 51])], ids=str)
def test_float64_stays_float64(subject: Subject, mask: Mask) -> None:
    if torch.float64 not in subject.dtypes:
        pytest.skip("no float64 there")
    x = make_inputs(Shape(1, 2, 1, 101, 101, 16), seed=4, dtype=torch.float64)
    answer = solve(x, mask, 0.25)
    out, lse = attend(subject, x, mask, 0.25, out_dtype=torch.float64)
    assert relative(out, answer.out) <= 1e-13
    check_lse(lse, answer.lse, 1e-13)
    grads = empty_like(x.q, x.k, x.v)
    pull(subject, x, mask, 0.25, answer, into=grads, accumulate=False)
    check_gradients(grads, answer, 1e-12)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
def test_the_output_has_the_dtype_asked_for(subject: Subject, out_dtype: torch.dtype) -> None:
    for mask in (CAUSAL, Band(None, 5), NOTHING, window(9, 0), documents([20, 13])):
        x = make_inputs(Shape(1, 2, 2, 33, 33, 16), seed=5, dtype=torch.float16, device=subject.device)
        out, lse = attend(subject, x, mask, 0.25, out_dtype=out_dtype)
        assert (out.dtype, lse.dtype) == (out_dtype, torch.float32)
        assert relative(out, solve(x, mask, 0.25).out) <= 4 * torch.finfo(torch.float16).eps


@examples(40)
@given(data=st.data())
def test_nan_in_a_masked_key_reaches_no_result(subject: Subject, data: st.DataObject) -> None:
    """Put NaN or inf into keys that no row sees, then into a key that some rows see: only these rows may change."""
    shape = data.draw(shapes(subject.lengths))
    mask = data.draw(masks(shape.num_batch, shape.num_queries, shape.num_keys))
    poison = data.draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)))
    x = make_inputs(shape, data.draw(st.integers(0, 2**32)), device=subject.device)
    scale = shape.head_dim**-0.5
    answer = solve(x, mask, scale)
    drawn = dense(mask, shape.num_queries, shape.num_keys).expand(shape.num_batch, -1, -1)
    hidden = ~drawn.any(1)  # [B, S]
    extra = data.draw(st.integers(0, shape.num_keys - 1))
    for name in data.draw(st.sampled_from(("k", "v", "kv"))):
        setattr(x, name, getattr(x, name).masked_fill(hidden[:, None, :, None].to(subject.device), poison))
    out, lse = attend(subject, x, mask, scale)
    assert relative(out, answer.out, answer.spread) <= FORWARD_BOUND
    check_lse(lse, answer.lse)
    grads = empty_like(x.q, x.k, x.v)
    pull(subject, x, mask, scale, answer, into=grads, accumulate=False)
    check_gradients(grads, answer)

    x.v[:, :, extra] = poison
    out, _ = attend(subject, x, mask, scale)
    touched = drawn[:, None, :, extra].expand(out.shape[:-1]).to(out.device)  # [B, H, T]
    assert not bool(out[touched].isfinite().any())
    clean = torch.where(touched, 0.0, 1.0)[..., None]
    assert relative(torch.where(clean > 0, out, 0.0), answer.out.to(out.device) * clean, answer.spread) <= FORWARD_BOUND


@examples(25)
@given(data=st.data())
def test_dropout_drops_the_same_pairs_however_the_work_is_split(subject: Subject, data: st.DataObject) -> None:
    """Split over keys, queries and heads at once. Each part has its tokens' positions and its first head."""
    shape = data.draw(shapes(subject.lengths))
    T, S, H, K = shape.num_queries, shape.num_keys, shape.num_heads, shape.num_kv_heads
    mask = data.draw(bands(T, S))
    x = make_inputs(shape, data.draw(st.integers(0, 2**32)), device=subject.device)
    scale = shape.head_dim**-0.5
    seed = torch.tensor([data.draw(st.integers(-(2**63), 2**63 - 1))], device=subject.device)
    p = data.draw(st.sampled_from((0.1, 0.5)))
    answer = solve(x, mask, scale, Dropout(p, seed))
    whole = attend(subject, x, mask, scale, dropout=Dropout(p, seed))
    assert relative(whole.out, answer.out, answer.spread) <= FORWARD_BOUND
    check_lse(whole.lse, answer.lse)

    out = torch.full_like(x.q, torch.nan)
    sums = tuple(torch.zeros_like(t) for t in (x.q, x.k, x.v))
    q_cut, k_cut = data.draw(st.integers(0, T)), data.draw(st.integers(0, S))
    places = torch.arange(max(T, S), dtype=torch.int32, device=subject.device)
    for kv_head in range(K):
        heads, kv = slice(kv_head * H // K, (kv_head + 1) * H // K), slice(kv_head, kv_head + 1)
        for rows in (range(q_cut), range(q_cut, T)):
            mine = slice(rows.start, rows.stop)
            carry = None
            for chunk in (range(k_cut), range(k_cut, S)):
                keys = slice(chunk.start, chunk.stop)
                q, dout, dlse = (t[:, heads, mine] for t in (x.q, x.dout, x.dlse))
                part = Inputs(q, x.k[:, kv, keys], x.v[:, kv, keys], dout, dlse)
                dropout = Dropout(p, seed, places[mine], places[keys], first=heads.start, batch_stride=H)
                tile = mask.slice(rows, chunk)
                carry = attend(subject, part, tile, scale, carry=carry, dropout=dropout)
                seen = Answer(
                    *(t[:, heads, mine] for t in (answer.out, answer.lse, answer.delta)), *sums, answer.spread
                )
                into = (sums[0][:, heads, mine], sums[1][:, kv, keys], sums[2][:, kv, keys])
                pull(subject, part, tile, scale, seen, into=into, accumulate=True, dropout=dropout)
            assert carry is not None
            out[:, heads, mine] = carry.out
    assert relative(out, answer.out, answer.spread) <= FORWARD_BOUND
    check_gradients(sums, answer)


def test_dropout_keeps_the_share_it_should() -> None:
    keep = Dropout(0.3, torch.tensor([7])).keep(2, 3, range(200), range(300)).double()
    assert abs(float(keep.mean()) - 0.7) < 0.003
    for axis in (0, 1, 2, 3):  # neighbours are independent: they agree as often as two independent draws
        pairs = keep.narrow(axis, 1, keep.shape[axis] - 1) * keep.narrow(axis, 0, keep.shape[axis] - 1)
        assert abs(float(pairs.mean()) - 0.49) < 0.01


@pytest.mark.parametrize("shape", [(1, 2, 1, 0, 5, 8), (1, 2, 1, 5, 0, 8), (0, 2, 1, 5, 5, 8), (1, 2, 2, 0, 0, 8)])
@pytest.mark.parametrize("mask", [EVERYTHING, CAUSAL, window(2), "rows"], ids=str)
def test_nothing_in_gives_nothing_out(subject: Subject, shape: tuple[int, ...], mask: Mask | str) -> None:
    x = make_inputs(Shape(*shape), seed=6, device=subject.device)
    if isinstance(mask, str):
        mask = ragged([shape[4]] * max(shape[0], 1), shape[3], shape[4])
    out, lse = attend(subject, x, mask, 0.5)
    assert out.shape == x.q.shape
    assert not bool(out.any())
    assert bool((lse == -torch.inf).all())
    grads = empty_like(x.q, x.k, x.v)
    pull(subject, x, mask, 0.5, Answer(out, lse, x.dlse, *grads, out), into=grads, accumulate=False)
    assert not any(bool(grad.any()) for grad in grads)
    sums = tuple(torch.ones_like(t) for t in (x.q, x.k, x.v))
    pull(subject, x, mask, 0.5, Answer(out, lse, x.dlse, *grads, out), into=sums, accumulate=True)
    assert all(bool((s == 1).all()) for s in sums)


def test_a_carry_passes_keys_it_cannot_see(subject: Subject) -> None:
    x = make_inputs(Shape(1, 2, 1, 50, 60, 8), seed=7, device=subject.device)
    carry = attend(subject, x, CAUSAL, 0.3)
    before = Carry(carry.out.clone(), carry.lse.clone())
    after = attend(subject, x, NOTHING, 0.3, carry=carry)
    assert relative(after.out, before.out) <= FORWARD_BOUND
    assert relative(after.lse, before.lse) <= FORWARD_BOUND


def test_the_reference_is_what_autograd_says() -> None:
    """Compare the reference itself with plain softmax attention, with gradients through out and lse."""
    x = make_inputs(Shape(2, 4, 2, 9, 11, 8), seed=8, dtype=torch.float64)
    mask, scale = window(3, 1), -0.4
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    visible = dense(mask, 9, 11)
    scores = (q @ k.repeat_interleave(2, 1).mT * scale).masked_fill(~visible, -torch.inf)
    out, lse = scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)
    wanted = torch.autograd.grad((out, lse), (q, k, v), (x.dout, x.dlse.double()))
    x = Inputs(*(t.detach() for t in vars(x).values()))
    answer = solve(x, mask, scale)
    assert relative(answer.out, out.detach()) <= 1e-14
    assert relative(answer.lse, lse.detach()) <= 1e-14
    check_gradients(wanted, answer, 1e-14)
