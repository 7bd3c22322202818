"""Random calls of `attention` against float64: shapes, masks, strides, dtypes, scales, dropout and gradients of lse.

pytest -m "campaign and not gpu" -s tests/test_random_calls.py    # 2,000 calls, a minute
pytest -m "campaign and gpu" -n 12 tests/test_random_calls.py     # 1,000 calls on a GPU

The visible pairs of a mask are computed here separately, from the definition of each mask.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flashspan import attention, masks, promise
from flashspan.kernels import portable
from flashspan.kernels.contract import Carry, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.portable import few_tiles
from flashspan.kernels.portable.tiles import Tile
from tests.kernels.cases import Watched

DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
LENGTHS = (0, 1, 1, 2, 3, 17, 31, 64, 65, 100, 127, 129, 200, 257)
HEADS = ((1, 1), (2, 1), (2, 2), (6, 2), (5, 1), (4, 4))
SCALES = (1.0, 1.0, 1.0, 0.1, 3.0, 10.0, 40.0, -1.0, 0.0)  # times 1 / sqrt(head size): from flat to saturated
SIZES = (1.0, 1.0, 1.0, 1e-12, 1e6)
LAYOUTS = ("contiguous", "transposed", "fused", "expanded", "columns")
MASKS = (
    *("full", "causal", "causal", "offset", "window", "causal window", "pair", "documents", "causal documents"),
    *("ragged", "prefix", "rows", "bool", "bool batch", "bool heads", "bool causal", "block map", "block map heads"),
)


@dataclass(frozen=True)
class Classes:
    """The ranges from which calls are drawn. Each head size, dtype and kind of mask compiles a GPU kernel."""

    types: Sequence[tuple[torch.dtype, int]] = tuple(product(DTYPES, range(1, 257)))  # dtypes and head sizes
    backends: Sequence[str] = ("auto",) * 8 + ("tiled", "reference")
    masks: Sequence[str] = MASKS
    lengths: Sequence[int] = LENGTHS
    watched: float = 0.1  # share of calls that go through the operator
    device: str = "cpu"


CPU = Classes()
SMALL = Classes(lengths=(0, 1, 2, 3, 17, 65, 129), watched=0.0)
INTERPRETED = Classes(
    types=tuple(product((torch.float32, torch.float16), (1, 8, 20))),
    backends=("portable",),
    lengths=(0, 1, 2, 17, 40),
    watched=0.0,
)
GPU = Classes(
    types=((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 40)),
    backends=("auto",),
    masks=("full", "causal", "causal window", "causal documents", "rows", "bool", "block map heads"),
    lengths=(*LENGTHS, 513, 1000, 2047),
    watched=0.0,
    device="cuda",
)


@dataclass(frozen=True)
class Call:
    """One call. Its repr contains all that is needed to repeat it."""

    seed: int
    B: int
    H: int
    K: int
    T: int
    S: int
    D: int
    dtype: torch.dtype
    mask: str
    sharpness: float
    dropout: float
    with_dlse: bool
    layouts: tuple[str, ...]
    shift: float  # of v: a common term, which cancels in gradients
    sizes: tuple[float, float]  # the size of v, and that of dout and dlse
    backend: str
    watched: bool
    device: str = field(repr=False, default="cpu")


def draw(seed: int, classes: Classes = CPU) -> Call:
    pick = random.Random(seed)
    (H, K), mask, T = pick.choice(HEADS), pick.choice(classes.masks), pick.choice(classes.lengths)
    dtype, head_dim = pick.choice(classes.types)
    return Call(
        seed=seed,
        B=pick.choice((1, 1, 2, 3)),
        H=H,
        K=K,
        T=T,
        S=T if mask == "prefix" or pick.random() < 0.5 else pick.choice(classes.lengths),
        D=head_dim,
        dtype=dtype,
        mask=mask,
        sharpness=pick.choice(SCALES),
        dropout=pick.choice((0.0, 0.0, 0.1, 0.5)),
        with_dlse=pick.random() < 0.4,
        layouts=tuple(pick.choice(LAYOUTS) for _ in range(4)),
        shift=pick.choice((0.0, 0.0, 0.0, 30.0)),
        sizes=(pick.choice(SIZES), pick.choice(SIZES)) if dtype != torch.float16 else (1.0, 1.0),
        backend=pick.choice(classes.backends),
        watched=pick.random() < classes.watched,
        device=classes.device,
    )


def make(call: Call, which: int, generator: torch.Generator) -> Tensor:
    """q, k, v or dout, with the call's layout in memory."""
    B, H, T, D = call.B, call.K if which in (1, 2) else call.H, call.S if which in (1, 2) else call.T, call.D
    layout = call.layouts[which]

    def numbers(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator) + (call.shift if which == 2 else 0.0)
        return (x * (1.0, 1.0, *call.sizes)[which]).to(call.device, call.dtype)

    if layout == "transposed":
        return numbers(B, T, H, D).transpose(1, 2)
    if layout == "fused":
        return numbers(B, T, H + 2, D + 3)[:, :, 1 : H + 1, 2 : D + 2].transpose(1, 2)
    if layout == "expanded":
        return numbers(1, H, T, D).expand(B, H, T, D)
    if layout == "columns":
        return numbers(B, H, D, T).mT
    return numbers(B, H, T, D)


def split(total: int, parts: int, pick: random.Random) -> list[int]:
    cuts = sorted(pick.randint(0, total) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def make_mask(call: Call) -> tuple[dict[str, Any], Tensor]:
    """The arguments of the mask, and the visible pairs, bool [B or 1, H or 1, T, S]."""
    pick, B, H, T, S = random.Random(call.seed + 1), call.B, call.H, call.T, call.S
    generator = torch.Generator().manual_seed(call.seed + 1)
    i, j = torch.arange(T)[:, None], torch.arange(S)
    causal, everything = j <= i, torch.ones(T, S, dtype=torch.bool)
    kind, width, offset = call.mask, pick.randint(1, 70), pick.randint(-20, 60)

    def dense(*lead: int) -> Tensor:
        return torch.rand(*lead, T, S, generator=generator) < pick.choice((0.02, 0.5, 0.95))

    def documents() -> tuple[list[int], list[int], Tensor]:
        q, k = split(T, 4, pick), split(S, 4, pick)
        if T == S and pick.random() < 0.7:
            k = q
        numbers = [torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)) for lengths in (q, k)]
        return q, k, numbers[0][:, None] == numbers[1]

    if kind == "full":
        return {}, everything[None, None]
    if kind == "causal":
        return {"causal": True}, causal[None, None]
    if kind == "offset":
        return {"mask": masks.causal(offset)}, (j <= i + offset)[None, None]
    if kind == "window":
        return {"window": width}, ((i - j).abs() < width)[None, None]
    if kind == "causal window":
        return {"causal": True, "window": width}, (causal & (i - j < width))[None, None]
    if kind == "pair":
        return {"window": (width, width // 3)}, ((j >= i - width) & (j <= i + width // 3))[None, None]
    if kind in ("documents", "causal documents"):
        q, k, same = documents()
        if kind == "documents":
            return {"mask": masks.documents(q, k)}, same[None, None]
        return {"mask": masks.documents(q, k), "causal": True}, (same & causal)[None, None]
    if kind == "ragged":
        lengths = torch.tensor([pick.randint(0, S) for _ in range(B)])
        return {"mask": masks.ragged(lengths, T, S)}, (j < lengths[:, None, None])[:, None].expand(B, 1, T, S)
    if kind == "prefix":
        length = pick.randint(0, T)
        return {"mask": masks.prefix(length, T)}, (causal | (j < length))[None, None]
    if kind == "rows":
        start, end = torch.randint(0, S + 1, (2, T), generator=generator)
        return {"mask": masks.Rows(start, end, S)}, ((start[:, None] <= j) & (j < end[:, None]))[None, None]
    if kind in ("block map", "block map heads"):
        visible = dense(B, H) if kind == "block map heads" else dense(1, 1)
        for b, h in ((b, h) for b in range(visible.shape[0]) for h in range(visible.shape[1])):
            visible[b, h, :, pick.randint(0, S) :] = False  # some tiles are empty, and some rows see no key
            visible[b, h, : pick.randint(0, T), : pick.randint(0, S)] = True  # some tiles are full
        return {"mask": masks.Blocks.from_dense(visible, block=pick.choice((64, 128)))}, visible
    visible = dense(*{"bool batch": (B, 1), "bool heads": (1, H)}.get(kind, (1, 1)))
    if kind == "bool causal":
        return {"mask": visible[0, 0], "causal": True}, visible & causal
    return {"mask": visible[0, 0] if kind == "bool" else visible}, visible


def run(call: Call) -> dict[str, float]:
    """The error of each result divided by the allowed one."""
    generator = torch.Generator().manual_seed(call.seed)
    q, k, v, dout = (make(call, which, generator) for which in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scale = call.sharpness * call.D**-0.5
    told, visible = make_mask(call)
    told = {name: x.to(call.device) if hasattr(x, "to") else x for name, x in told.items()}
    exact = torch.promote_types(call.dtype, torch.float32)
    dlse = None
    if call.with_dlse:
        dlse = call.sizes[1] * torch.randn(call.B, call.H, call.T, generator=generator).to(call.device, exact)
    with Watched() if call.watched else nullcontext():
        out, lse = attention(
            q, k, v, **told, scale=scale, dropout=call.dropout, seed=call.seed, backend=call.backend, return_lse=True
        )
    if dlse is None:
        grads = torch.autograd.grad(out, (q, k, v), dout)
    else:
        grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert out.dtype == call.dtype
    assert lse.dtype == exact
    rounded = call.dtype.itemsize == 2 and (call.device == "cuda" or call.backend == "portable")
    drop = Dropout(call.dropout, torch.tensor([call.seed], device=call.device)) if call.dropout else None
    answer = promise.solve(q, k, v, dout, mask=visible, scale=scale, dropout=drop, dlse=dlse, rounded=rounded)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    return answer.ratios(call.dtype, **results)


def search(first: int, count: int, classes: Classes) -> None:
    """Make `count` calls, from seed `first` on. Print the worst one, and fail with all that exceed the promise."""
    worst: dict[tuple[str, str], tuple[float, int]] = {}
    spent: Counter[str] = Counter()
    known: set[object] = set()
    broken = []
    begin = time.perf_counter()
    for seed in range(first, first + count):
        call = draw(seed, classes)
        start = time.perf_counter()
        found = run(call)
        kind = (call.D, call.dtype, call.mask, call.backend, call.dropout > 0, call.with_dlse)
        spent["calls like one before" if kind in known else "first calls of their kind"] += time.perf_counter() - start
        known.add(kind)
        for name, ratio in found.items():
            key = str(call.dtype).removeprefix("torch."), name
            worst[key] = max(worst.get(key, (0.0, 0)), (ratio, seed))
            if not ratio <= 1.0:
                broken.append(f"{name} {ratio:.3g} times what is allowed: {call}")
    for (dtype, name), (ratio, seed) in sorted(worst.items()):
        print(f"{dtype:<9} {name:<4} at most {ratio:.3f} of what is allowed (seed {seed})")
    print(f"{count} calls, seeds {first} to {first + count - 1}, {time.perf_counter() - begin:.0f} s:", dict(spent))
    assert not broken, f"{len(broken)} over the promise:\n" + "\n".join(broken[:20])


def test_random_calls_keep_the_promise() -> None:
    search(0, 25, SMALL)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_two_thousand_random_calls() -> None:
    search(10_000, 2000, CPU)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")
def test_interpreted_kernels() -> None:
    search(20_000, 50, INTERPRETED)


@pytest.fixture
def few_tiles_serve(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let the backend "portable" use the kernels for few tiles for all calls that they support, and count the calls."""
    served: Counter[str] = Counter()
    given = portable.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, **rest: Any) -> Carry:
        if isinstance(problem.mask, masks.Blocks) or problem.dropout is not None or not (q.numel() and k.numel()):
            return given(q, k, v, problem, **rest)
        served["forward"] += 1
        return few_tiles.forward(q, k, v, problem, Tile(32, 32, 16, 4, 1), rest["out_dtype"])

    def backward_of_output(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem, **into: Tensor
    ) -> None:
        if isinstance(problem.mask, masks.Blocks) or problem.dropout is not None or not (q.numel() and k.numel()):
            portable.backward(dout, q, k, v, lse, row_delta(dout, out), problem, accumulate=False, **into)
            return
        served["backward"] += 1
        few_tiles.backward((dout, q, k, v, lse, out), list(into.values()), problem, Tile(32, 64, 64, 4, 1))

    monkeypatch.setattr(portable, "forward", forward)
    monkeypatch.setattr(portable, "backward_of_output", backward_of_output, raising=False)
    return served


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_interpreted_kernels_of_few_tiles(count: int, few_tiles_serve: Counter[str]) -> None:
    search(40_000, count, INTERPRETED)
    assert min(few_tiles_serve["forward"], few_tiles_serve["backward"]) > count // 10


@pytest.mark.campaign
@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(40))
def test_a_thousand_random_calls_on_a_gpu(part: int) -> None:
    """In forty parts, for `-n 12 --dist worksteal`, because nearly all the time is compilation."""
    search(30_000 + 25 * part, 25, GPU)
