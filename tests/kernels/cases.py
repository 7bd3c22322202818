"""Random shapes, masks and inputs for the tests of one device's attention, and how errors are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashspan import promise
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import Band, Mask, Positions, Rows
from flashspan.masks.patterns import documents, prefix, ragged

FORWARD_BOUND, GRADIENT_BOUND = promise.FORWARD, promise.GRADIENT  # of float32

LENGTHS = (1, 2, 17, 63, 64, 100, 150)


def examples(count: int) -> settings:
    """The settings of a property test with `count` cases, which are the same in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@st.composite
def split_lengths(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    """This many lengths, often including 0, which add up to the total."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def bands(draw: st.DrawFn, num_queries: int, num_keys: int) -> Band:
    bound = st.none() | st.integers(-num_queries - 2, num_keys + 2)
    lo, hi = draw(bound), draw(bound)
    width = draw(st.none() | st.integers(0, 40))
    return Band(lo, hi if lo is None or width is None else lo + width)


@st.composite
def masks(draw: st.DrawFn, num_batch: int, num_queries: int, num_keys: int) -> Mask:
    """Any mask of the package, for these lengths."""
    kind = draw(st.sampled_from(("band", "rows", "documents", "slice", "batch", "prefix")))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    band = draw(bands(num_queries, num_keys))
    if kind == "rows":
        start, end = torch.randint(0, num_keys + 1, (2, num_queries), generator=random)
        return Rows(start, end, num_keys)
    if kind == "documents":
        mask = documents(draw(split_lengths(num_queries, 4)), draw(split_lengths(num_keys, 4)))
        return draw(st.sampled_from((mask, mask & band)))
    if kind == "slice":  # the keys of a peer that a rank sees in a zigzag or striped layout
        q, k = draw(positions(num_queries)), draw(positions(num_keys))
        lo = draw(st.none() | st.integers(-3 * num_queries, num_keys))
        return Band(lo, draw(st.integers(-num_queries, 2 * num_keys))).slice(q, k)
    if kind == "batch":
        lengths = torch.randint(0, num_keys + 1, (num_batch,), generator=random)
        start, end = torch.randint(0, num_keys + 1, (2, num_batch, num_queries), generator=random)
        some = Rows(start.sort(-1).values, end.sort(-1).values, num_keys)
        return draw(st.sampled_from((ragged(lengths, num_queries, num_keys) & band, some)))
    if kind == "prefix" and num_queries == num_keys:
        return prefix(draw(st.integers(0, num_keys)), num_keys)
    return band


@st.composite
def positions(draw: st.DrawFn, length: int) -> Positions:
    """Global positions of this many tokens: one range, or two apart, of any step."""
    step, first, gap = draw(st.integers(1, 3)), draw(st.integers(0, 20)), draw(st.integers(0, 30))
    near = range(first, first + step * draw(st.integers(0, length)), step)
    if draw(st.booleans()):
        return range(first, first + step * length, step)
    middle = first + step * len(near) + gap
    return [near, range(middle, middle + step * (length - len(near)), step)]


class Watched(TorchDispatchMode):
    """A mode that changes nothing. A call under it goes through the operator, like a compiled call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Shape:
    """B, H, K, T, S, D."""

    num_batch: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int


@st.composite
def shapes(draw: st.DrawFn, lengths: tuple[int, ...] = LENGTHS) -> Shape:
    kv_heads, group = draw(st.sampled_from(((1, 1), (2, 1), (1, 3), (2, 2))))
    return Shape(
        num_batch=draw(st.integers(1, 2)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        num_queries=draw(st.sampled_from(lengths)),
        num_keys=draw(st.sampled_from(lengths)),
        head_dim=draw(st.sampled_from((1, 8, 40, 64))),
    )


@dataclass
class Inputs:
    """The tensors of one call. dlse is a gradient of lse, which the contract folds into delta."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    def double(self) -> Inputs:
        return Inputs(*(x.double() for x in vars(self).values()))


def make_inputs(
    shape: Shape, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "BHTD"
) -> Inputs:
    """Random inputs. The layout is their order in memory: "BTHD" transposed, "fused" views of one projection."""
    random = torch.Generator().manual_seed(seed)
    B, H, K, T, S, D = vars(shape).values()

    def draw(heads: int, length: int) -> Tensor:
        if layout == "BHTD":
            return torch.randn(B, heads, length, D, generator=random).to(device, dtype)
        if layout == "BTHD":
            return torch.randn(B, length, heads, D, generator=random).to(device, dtype).transpose(1, 2)
        assert layout == "fused"
        wide = torch.randn(B, length, heads + 3, D + 5, generator=random).to(device, dtype)
        return wide[:, :, 2 : heads + 2, 4 : D + 4].transpose(1, 2)

    q, k, v, dout = draw(H, T), draw(K, S), draw(K, S), draw(H, T)
    return Inputs(q, k, v, dout, torch.randn(B, H, T, generator=random).to(device))


@dataclass
class Answer:
    """The correct results of attention: out and lse, the gradients, and the delta that backward receives.

    spread is the size that out would have if its terms had random signs. Errors are relative to it if terms cancel.
    """

    out: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    spread: Tensor


def solve(inputs: Inputs, mask: Mask, scale: float, dropout: Dropout | None = None) -> Answer:
    """The answer in float64, computed by the reference."""
    x = inputs.double()
    out, lse = reference.forward(x.q, x.k, x.v, Problem(mask, scale, dropout))
    # sum (p v)^2, as attention with squared scores and values: p^2 = exp(2 score) / exp(2 lse)
    squares, square_lse = reference.forward(x.q, x.k, x.v**2, Problem(mask, 2 * scale, dropout))
    spread = (squares * torch.exp(square_lse - 2 * lse.clamp(min=-1e30))[..., None]).sqrt()
    delta = row_delta(x.dout, out) - x.dlse
    dq, dk, dv = torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v)
    reference.backward(
        x.dout, x.q, x.k, x.v, lse, delta, Problem(mask, scale, dropout), dq=dq, dk=dk, dv=dv, accumulate=True
    )
    return Answer(out, lse, delta, dq, dk, dv, spread)


def relative(got: Tensor, want: Tensor, *beside: Tensor) -> float:
    """The error's norm divided by the norm of `want` or, if larger, that of one of `beside`.

    A gradient may be 0 because its terms cancel (as for a query with one visible key). Its error is then that of its
    terms.
    """
    size = max([float(x.detach().double().norm()) for x in (want, *beside)])
    error = float((got.detach().double() - want.detach().double().to(got.device)).norm())
    return error if size == 0 else error / size


def check_lse(got: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    """Check that lse is -inf in exactly the rows that see no key, and close to `want` in the others."""
    empty = want == -torch.inf
    assert torch.equal(got.cpu() == -torch.inf, empty.cpu())
    assert relative(got.masked_fill(empty, 0.0), want.masked_fill(empty, 0.0), torch.ones(())) <= bound
