"""The Hopper kernels on a Hopper GPU: `pytest -m gpu tests/kernels/test_hopper.py`. test_compile.py needs none."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashspan
from flashspan import attention, masks
from flashspan.kernels import reference
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Band, Blocks, Mask, Rows, dense
from flashspan.kernels.masks.patterns import random_blocks
from tests.kernels.cases import relative

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
FORWARD_BOUND, GRADIENT_BOUND = 4e-3, 6e-3  # bfloat16 has eight bits; a float32 truth
UNIT = math.log(2)
"""The scale by which scores are exponents of 2 as they are (parts.py)."""


WAYS = {"finer": 0, "followed": 2**62}
"""How many queries must see a key for V to be made finer; else each maximum is followed (softmax.py)."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the two ways to round that heads up to 128 have, this one, whatever the shape."""
    from flashspan.kernels.hopper.tiles import FINER, THREE_FROM

    for head_dim in FINER:
        monkeypatch.setitem(FINER, head_dim, WAYS[request.param])
    for least in THREE_FROM:  # and by three warpgroups where there are such kernels
        monkeypatch.setitem(THREE_FROM, least, 0)
    return str(request.param)


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


def tensors(
    choice: random.Random, B: int, H: int, K: int, T: int, S: int, D: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v and dout in a random layout: [B, H, T, D], [B, T, H, D] or a view of fused projections."""
    generator = torch.Generator("cuda").manual_seed(choice.randint(0, 2**31))

    def make(heads: int, tokens: int) -> Tensor:
        layout = choice.choice(("BHTD", "BTHD", "fused"))
        if layout == "BHTD":
            return torch.randn(B, heads, tokens, D, device="cuda", generator=generator).to(dtype)
        wide = heads * D * (3 if layout == "fused" else 1)
        flat = torch.randn(B, tokens, wide, device="cuda", generator=generator).to(dtype)
        return flat[..., : heads * D].unflatten(-1, (heads, D)).transpose(1, 2)

    return [make(H, T), make(K, S), make(K, S), make(H, T)]


def check(
    x: list[Tensor], mask: Mask, scale: float, pieces: int, repeatable: bool = False, lse_bound: float = 1e-5
) -> None:
    """Forward in several calls that share a carry, and backward, overwriting and accumulating, against float32."""
    from flashspan.kernels import hopper

    q, k, v, dout = x
    mask = mask.to("cuda")
    full = [t.float() for t in x]
    right = reference.forward(*full[:3], Problem(mask, scale))
    wanted = tuple(torch.zeros_like(t) for t in full[:3])
    delta = row_delta(dout, right.out)
    reference.backward(
        full[3],
        *full[:3],
        right.lse,
        delta,
        Problem(mask, scale),
        dq=wanted[0],
        dk=wanted[1],
        dv=wanted[2],
        accumulate=True,
    )

    num_keys = k.shape[2]
    cuts = [num_keys * i // pieces for i in range(pieces + 1)]
    carry: Carry | None = None
    for a, b in itertools.pairwise(cuts):
        part = mask.slice(range(q.shape[2]), range(a, b)).to("cuda") if pieces > 1 else mask
        kind = torch.float32 if pieces > 1 else q.dtype
        carry = hopper.forward(q, k[:, :, a:b], v[:, :, a:b], Problem(part, scale), carry=carry, out_dtype=kind)
    assert carry is not None
    assert relative(carry.out, right.out) <= FORWARD_BOUND
    assert torch.equal(carry.lse.isinf(), right.lse.isinf())
    assert (carry.lse - right.lse).nan_to_num(0, 0, 0).abs().max() <= lse_bound
    assert not carry.out[right.lse.isinf()].any()

    fresh = tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    problem = Problem(mask, scale, deterministic=repeatable)
    hopper.backward(dout, q, k, v, right.lse, delta, problem, dq=fresh[0], dk=fresh[1], dv=fresh[2], accumulate=False)
    sums = tuple(torch.ones(t.shape, device="cuda") for t in (q, k, v))
    hopper.backward(dout, q, k, v, right.lse, delta, problem, dq=sums[0], dk=sums[1], dv=sums[2], accumulate=True)
    # Of an output in 16 bits, whose delta is another where one key has all the weight: the same as from that delta.
    out = right.out.to(q.dtype)
    again, same = ([torch.full_like(t, torch.nan) for t in (q, k, v)] for _ in range(2))
    hopper.backward_of_output(dout, q, k, v, out, right.lse, problem, dq=again[0], dk=again[1], dv=again[2])
    given = (dout, q, k, v, right.lse, row_delta(dout, out))
    hopper.backward(*given, problem, dq=same[0], dk=same[1], dv=same[2], accumulate=False)
    for name, a, b, want in zip(("dq", "dk", "dv"), fresh, sums, wanted, strict=True):
        assert relative(a, want, *wanted) <= GRADIENT_BOUND, name
        assert relative(b - 1, want, *wanted) <= GRADIENT_BOUND, name
    for name, a, b in zip(("dq", "dk", "dv"), again, same, strict=True):
        assert relative(a, b.float(), *wanted) <= 1e-3, f"{name} of the output"


@pytest.mark.parametrize(
    ("head_dim", "number", "repeatable"),
    [(64, 500, False), (128, 500, False), (64, 100, True), (128, 100, True), (256, 200, True)],
)
def test_random_shapes(head_dim: int, number: int, repeatable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashspan.kernels.hopper.tiles import FINER, THREE_FROM

    choice, by_three = random.Random(head_dim), dict(THREE_FROM)
    for _ in range(number):
        monkeypatch.setitem(FINER, head_dim, choice.choice(list(WAYS.values())) if head_dim <= 128 else 2**62)
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
@pytest.mark.parametrize("head_dim", [8, 80, 96, 192, 256])
def test_other_head_sizes_are_padded(head_dim: int) -> None:
    choice = random.Random(head_dim)
    for mask in (CAUSAL, EVERYTHING):
        check(tensors(choice, 2, 4, 2, 333, 517, head_dim), mask, head_dim**-0.5, 1)


def test_float16() -> None:
    check(tensors(random.Random(0), 1, 4, 2, 700, 700, 128, torch.float16), CAUSAL, 128**-0.5, 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_far_apart(head_dim: int, dtype: torch.dtype) -> None:
    """Maxima that grow by more than what the softmax lets pass: its sums are rescaled, in a call and over a carry; or
    by more than float32 holds: those rows are computed again."""
    for spread in (6, 100):
        for mask, pieces in ((CAUSAL, 1), (EVERYTHING, 1), (Band(-300, 200), 3)):
            x = tensors(random.Random(3), 1, 4, 2, 701, 903, head_dim, dtype)
            # Scores are that much larger, and so is what float32 loses of them.
            scale = spread * head_dim**-0.5
            check(x, mask, scale, pieces, lse_bound=1e-5 * spread)
            if head_dim == 64:
                check([x[0] * (scale / UNIT), *x[1:]], mask, UNIT, pieces, lse_bound=1e-5 * spread)


@pytest.mark.parametrize(("dtype", "size", "score"), [(torch.bfloat16, 8.0, -160.0), (torch.float16, 1.0, -20.0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_are_none_have_no_part_in_dq(head_dim: int, dtype: torch.dtype, size: float, score: float) -> None:
    """Past the last key K is 0, and a probability there would be exp(-lse): too large for 16 bits where every score is
    about this low."""
    q, k, v, dout = tensors(random.Random(5), 1, 2, 2, 257, 100, head_dim, dtype)
    mean = score / (size * head_dim)
    check([torch.full_like(q, size), mean * (1 + k), v, dout], EVERYTHING, 1.0, 1, lse_bound=1e-3)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_gradient_of_nan_for_the_lse_of_nothing(head_dim: int) -> None:
    """Row 0 sees no key: whatever its gradient, it has no part in anything."""
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
    """They see nothing; what comes out of them says nothing of the others."""
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
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_nan_behind_the_mask_reaches_nobody_and_before_it_those_who_see_it(head_dim: int, repeatable: bool) -> None:
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.usefixtures("way")
def test_a_call_like_one_before_is_as_right(head_dim: int) -> None:
    documents = masks.documents([100, 157]) & CAUSAL
    given = [EVERYTHING, CAUSAL, Band(-30, 5), documents, documents.to("cuda")]
    for mask in given if head_dim == 256 else [*given, random_blocks(257, 0.5)]:
        for call in range(4):
            generator = torch.Generator("cuda").manual_seed(call)
            heads = [torch.randn(1, n, 257, head_dim, device="cuda", generator=generator) for n in (4, 2, 2, 4)]
            q, k, v, dout = (x.bfloat16() for x in heads)
            if call == 2:  # the same steps, but not on 16 bytes
                q = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, lse = attention(*leaves, mask=mask, return_lse=True)
            with torch.no_grad():
                assert torch.equal(attention(*leaves, mask=mask), out)
            exact = [x.detach().float().requires_grad_() for x in leaves]
            right, right_lse = attention(*exact, mask=mask, return_lse=True, backend="reference")
            assert relative(out, right) <= FORWARD_BOUND
            assert (lse - right_lse).abs().max() <= 1e-5
            of_both = call == 3  # a gradient of lse too
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


@pytest.mark.parametrize(("sharp", "loose"), [(1.0, 1.1), (4.0, 1.5)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_its_rounding_is_no_worse_than_pytorch_s(way: str, head_dim: int, sharp: float, loose: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4096, head_dim, device="cuda", generator=generator).bfloat16() for _ in range(3))
    q = q * sharp
    right = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, head_dim**-0.5)).out
    ours = relative(attention(q, k, v, causal=True, backend="hopper"), right)
    theirs = relative(F.scaled_dot_product_attention(q, k, v, is_causal=True), right)
    bound = (0.9 if sharp == 1 else 1.0) if way == "finer" and head_dim <= 128 else 1.01
    assert ours <= bound * theirs
    if head_dim <= 128:  # block maps neither follow a maximum nor make V finer: docs/kernels.md
        blocks = Blocks.of(CAUSAL, 4096, 4096).to("cuda")
        assert relative(attention(q, k, v, mask=blocks, backend="hopper"), right) <= loose * theirs


def rowwise(found: Tensor, wanted: Tensor) -> float:
    """The largest error of a row, relative to the row."""
    found, wanted = found.double(), wanted.double()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-5, 1.0, 1e3, 1e6, 1e30])
def test_values_of_any_size(way: str, head_dim: int, size: float) -> None:
    choice = random.Random(1)
    q, k, v, _ = tensors(choice, 1, 2, 2, 900, 900, head_dim)
    v = (v * size).bfloat16()
    v[:, 1, 300:500] = 0.0
    right = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, head_dim**-0.5)).out
    assert rowwise(attention(q, k, v, causal=True, backend="hopper"), right) <= 2e-2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_that_differ_by_more_than_float16_holds(way: str, head_dim: int) -> None:
    """Keys a million times larger or smaller than their neighbours, seen and not seen."""
    q, k, v, _ = tensors(random.Random(2), 1, 2, 2, 900, 900, head_dim)
    for place, size in ((3, 1e-6), (130, 1e6), (131, 1e-9), (640, 1e9), (899, 1e30)):
        v[:, :, place] *= size
    right = reference.forward(q.double(), k.double(), v.double(), Problem(CAUSAL, head_dim**-0.5)).out
    assert rowwise(attention(q, k, v, causal=True, backend="hopper"), right) <= 2e-2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("place", [0, -1])
def test_keys_that_weigh_little_beside_one_of_no_value(way: str, head_dim: int, place: int) -> None:
    """The row is what the light ones say: weights of e^-14 of the largest, whichever block it is in."""
    q, k, v, _ = tensors(random.Random(6), 1, 2, 2, 4096, 4096, head_dim)
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, place, 0], v[:, :, place] = 14.0, 0.0
    right = reference.forward(q.double(), k.double(), v.double(), Problem(EVERYTHING, 0.125)).out
    assert relative(attention(q, k, v, scale=0.125, backend="hopper"), right) <= FORWARD_BOUND


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_whose_scores_rise_late_and_not_all_at_once(way: str, head_dim: int) -> None:
    """Keys are walked from the last to the first: here the first have much larger scores, for some rows, by steps and
    in one leap, and all keys together outweigh the largest."""
    q, k, v, _ = tensors(random.Random(4), 1, 2, 2, 2000, 2000, head_dim)
    k[..., 0], q[..., 0] = 0.0, 0.0
    q[:, :, 5::64, 0] = 8.0
    q[:, 1, 40::64, 0] = 16.0
    # In units of a row's factor, times the scale of 1 / 8: up to 20, or 40, nats.
    k[:, :, :1500, 0] = (torch.arange(1500, 0, -1, device="cuda") / 75).bfloat16()
    k[:, 1, 700, 0] = 32.0
    for mask in (CAUSAL, EVERYTHING):
        check([q, k, v, torch.randn_like(q)], mask, 0.125, 1, lse_bound=1e-4)
        if head_dim == 64:
            check([q * (0.125 / UNIT), k, v, torch.randn_like(q)], mask, UNIT, 1, lse_bound=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_heads_than_a_grid_has_lines(deterministic: bool) -> None:
    """65,600 of them, in 4,100 short sequences: CUDA counts to 65,535 in all directions but the first."""
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
def test_a_graph_can_hold_it() -> None:
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
def test_what_repeats_is_read_where_it_lies(head_dim: int) -> None:
    q, k, v, _ = tensors(random.Random(5), 2, 8, 1, 2000, 2000, head_dim)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    everywhere = [x.expand(2, 8, 2000, head_dim) for x in (k, v)]
    apart = [x.detach().contiguous() for x in everywhere]
    with torch.no_grad():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attention(q, *everywhere, causal=True, backend="hopper")
        assert torch.cuda.max_memory_allocated() - before < 1.5 * q.numel() * 2  # the output; no K or V
        assert torch.equal(out, attention(q, *apart, causal=True, backend="hopper"))
    out = attention(q, k, v, causal=True, deterministic=True)
    of_sum = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    of_ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(of_sum, of_ones, strict=True))


@pytest.mark.usefixtures("way")  # there are two kernels, and how much work there is decides
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


def follow(
    x: list[Tensor], mask: Mask, cuts: list[int], out: Tensor | None = None, hidden: dict[int, float] | None = None
) -> tuple[Carry, Carry]:
    """Carried calls over the keys between cuts, some keys replaced where nobody sees them, and the float32 truth."""
    from flashspan.kernels import hopper

    q, k, v, _ = x
    scale = q.shape[-1] ** -0.5
    right = reference.forward(q.float(), k.float(), v.float(), Problem(mask, scale))
    for index, value in (hidden or {}).items():
        k[:, :, index] = value
        v[:, :, index] = value
    carry: Carry | None = None
    if out is not None:
        nothing = torch.full(q.shape[:3], -torch.inf, device="cuda")
        carry = Carry(out.zero_(), nothing)
    for a, b in itertools.pairwise(cuts):
        part = mask.slice(range(q.shape[2]), range(a, b)).to("cuda")
        carry = hopper.forward(
            q, k[:, :, a:b], v[:, :, a:b], Problem(part, scale), carry=carry, out_dtype=torch.float32
        )
    assert carry is not None
    return carry, right


def check_carry(got: Carry, right: Carry) -> None:
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert relative(got.out, right.out) <= FORWARD_BOUND
    assert torch.equal(got.lse.isinf(), right.lse.isinf())
    assert (got.lse - right.lse).nan_to_num(0, 0, 0).abs().max() <= 1e-5
    assert not got.out[right.lse.isinf()].any()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(4100, 1280), (4100, 1344), (4100, 1300), (4200, 8960), (8300, 9088)]
)
def test_tiles_of_a_full_mask_are_cut_into_parts(num_queries: int, num_keys: int, head_dim: int) -> None:
    """Where gradients are added: all tiles where there are fewer than multiprocessors, else those that are left over.
    The parts of one must not be shared by two, or left out."""
    from flashspan.kernels.hopper.one_pass import backward_launch
    from flashspan.kernels.hopper.parts import new_rows
    from flashspan.kernels.hopper.tensors import new_counter

    q, k, v, dout = x = tensors(random.Random(head_dim), 1, 4, 2, num_queries, num_keys, head_dim)
    rows, sums = new_rows(q), [t.float() for t in (q, k, v)]
    counter = new_counter(q.device)
    launch = backward_launch(dout, q, k, v, rows, rows, EVERYTHING, 1.0, *sums, True, counter, counter)
    assert launch.constants["SPLIT_TILES"]
    assert launch.arguments[-1] > 1, "parts"
    check(x, EVERYTHING, head_dim**-0.5, 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 192, 256])
def test_a_carry_survives_what_is_hidden_and_rows_that_see_nothing(head_dim: int) -> None:
    """In a call, a tile with a NaN behind the mask is left to another kernel: its carry must still be as it was."""
    start = torch.arange(333, dtype=torch.int32) % 300
    end = torch.where(start % 7 == 0, start, (start + 150).clamp(max=480))
    cases: list[tuple[Mask, list[int], tuple[int, ...]]] = [
        (Band(190, 289), [0, 150, 260, 500], (0, 100, 189)),  # nobody sees the first call's keys, the last rows none
        (Rows(start, end, 500), [0, 130, 131, 390, 500], (485, 499)),  # every seventh row sees nothing
    ]
    for dtype, value in ((torch.bfloat16, torch.nan), (torch.float16, torch.inf)):
        for mask, cuts, hidden in cases:
            x = tensors(random.Random(head_dim), 2, 4, 2, 333, 500, head_dim, dtype)
            check_carry(*follow(x, mask.to("cuda"), cuts, hidden=dict.fromkeys(hidden, value)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_carry_may_be_a_view_of_something_larger(head_dim: int) -> None:
    """It is updated in place, and nothing beside it: past its rows and columns, other tensors may begin."""
    x = tensors(random.Random(head_dim), 2, 3, 1, 200, 300, head_dim)
    larger = torch.full((2, 264, 5, head_dim + 8), 7.0, device="cuda")
    out = larger[:, 32:232, 1:4, :head_dim].transpose(1, 2)
    got, right = follow(x, CAUSAL, [0, 70, 300], out=out)
    check_carry(got, right)
    assert got.out.data_ptr() == out.data_ptr()
    out.fill_(7.0)
    assert (larger == 7.0).all()


def test_the_sequences_of_a_carry_may_lie_two_to_the_31_numbers_apart() -> None:
    x = tensors(random.Random(0), 2, 3, 1, 200, 300, 128)
    room = torch.empty(2**31 + 2**17, device="cuda")
    got, right = follow(x, CAUSAL, [0, 70, 300], out=room.as_strided((2, 3, 200, 128), (2**31, 128, 384, 1)))
    assert got.out.data_ptr() == room.data_ptr(), "in place"
    check_carry(got, right)
