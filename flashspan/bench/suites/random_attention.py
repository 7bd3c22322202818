"""Our attention compared with the fastest of PyTorch's on shapes drawn at random, on one GPU, in one run.

flashspan bench attention --random 200 --seed 7              # appends rows to docs/benchmarks/random.csv
flashspan bench attention --random 200 --seed 7 --part 1/4   # every fourth shape, from the first
flashspan bench attention --page                             # docs/benchmarks/random.md and random.svg from the rows

Note: what is compared. The other implementations are the fused backends of `F.scaled_dot_product_attention`: flash,
cuDNN and efficient, with enable_gqa, or with expanded keys and values if they refuse enable_gqa. They support every
shape without a mask, and causal shapes with T = S; flash and efficient also support causal shapes with T < S
(`causal_lower_right`). For these, cuDNN reads an explicit mask, made before the measurement; for windows, cuDNN and
efficient do. FlexAttention is compiled for each shape (`--flex`), which takes seconds. By default it is measured for
windows too large for an explicit mask, and for every fourth of the other windows. An implementation whose output
differs from float32 arithmetic by more than MOST_ERROR is left out; if it is ours, this is recorded as a failure.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashspan import attention, explain
from flashspan.bench.measure import record
from flashspan.bench.measure.clock import Samples, cold_samples
from flashspan.bench.report import random_page
from flashspan.bench.report.tables import show_tables
from flashspan.bench.suites.random_shapes import RandomShape, check_draw, draw
from flashspan.progress import progress

PATH = Path("docs/benchmarks/random.csv")
OURS = random_page.OURS
BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WITHOUT_MASKS = ("sdpa-flash",)
"""The backends that read no explicit mask."""
LOWER_RIGHT = ("sdpa-flash", "sdpa-efficient")
"""The backends that support `causal_lower_right` without an explicit mask."""
MOST_PAIRS = 2**28
"""The most pairs in an explicit mask. FlexAttention makes its block mask from a bool mask and may have 8 times that."""
MOST_EXPANDED = 16 * 2**30
"""The most bytes of expanded keys and values and their gradients."""
MOST_ERROR = 1e-2
"""The largest relative error of the last head, compared with float32 arithmetic; bf16 outputs have 2e-3 to 4e-3."""
BUDGET_MS, LEAST_ROUNDS, MOST_ROUNDS = 20.0, 5, 60
"""Time of the samples of one implementation and one pass, and bounds on their number."""
TRIALS, BEHIND = 2, 2.0
"""Samples of each implementation at first. Those over BEHIND times the time of the fastest get no more."""
FLEX_EVERY = 4
"""By default, FlexAttention is measured on every FLEX_EVERY-th of the windows that fit an explicit mask."""
Flex = Literal["none", "some", "all"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Implementation(NamedTuple):
    """An implementation. `make` prepares it. If `instead_of` names another, it is tried only if that was refused."""

    name: str
    make: Callable[[], Attend]
    backend: SDPBackend | None = None
    instead_of: str = ""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context that calls must run in; it is entered before a measurement begins."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class DeviceLost(Exception):
    """The device no longer responds after a failure of this implementation: every later call would fail too."""

    def __init__(self, name: str, refusal: str) -> None:
        super().__init__(f"{name}: {refusal}")
        self.name = name


def implementations(
    shape: RandomShape,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    flex: bool = False,
    backends: dict[str, SDPBackend] = BACKENDS,
) -> list[Implementation]:
    """The implementations in PyTorch that may support this shape (see the note)."""
    found = []
    for name, backend in backends.items():
        masked = not shape.sees_all and not (shape.pattern == "causal" and (shape.T == shape.S or name in LOWER_RIGHT))
        if masked and (name in WITHOUT_MASKS or shape.T * shape.S > MOST_PAIRS):
            continue
        name += "-mask" if masked else ""

        def make(masked: bool = masked, expanded: bool = False) -> Attend:
            return _sdpa(shape, bias_of(shape, device, dtype) if masked else None, expanded)

        found.append(Implementation(name, make, backend))
        if shape.H != shape.K and 8 * shape.B * shape.H * shape.S * shape.D <= MOST_EXPANDED:
            found.append(Implementation(f"{name}-expanded", lambda make=make: make(expanded=True), backend, name))  # type: ignore[misc]
    if flex and shape.T * shape.S <= 8 * MOST_PAIRS:
        found.append(Implementation("flex", lambda: _flex(shape, device)))
    return found


def bias_of(shape: RandomShape, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The mask as a bias [1, 1, T, S] that SDPA adds to scores; it would convert a bool mask to this in each call."""
    lo, hi = shape.mask().bounds(shape.T, shape.S)
    distance = torch.arange(shape.S, device=device) - torch.arange(shape.T, device=device)[:, None]  # [T, S]
    bias = torch.zeros(shape.T, shape.S, device=device, dtype=dtype)
    return bias.masked_fill_((distance < lo) | (distance > hi), -math.inf)[None, None]


def _sdpa(shape: RandomShape, bias: Tensor | None, expanded: bool) -> Attend:
    from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, which takes two seconds

    whole = bias is not None or shape.sees_all  # needs no further mask
    gqa = shape.H != shape.K and not expanded
    attn_mask: Any = bias if whole or shape.T == shape.S else causal_lower_right(shape.T, shape.S)
    causal = not whole and shape.T == shape.S

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if expanded:
            k, v = (x[:, :, None].expand(-1, -1, shape.H // shape.K, -1, -1).flatten(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=causal, enable_gqa=gqa)

    return attend


def _flex(shape: RandomShape, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # past its limit of recompilations it would run uncompiled, without an error
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    lo, hi = shape.mask().bounds(shape.T, shape.S)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j - i >= lo) & (j - i <= hi)

    masked = not shape.sees_all
    block_mask = create_block_mask(rule, None, None, shape.T, shape.S, device=str(device)) if masked else None
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=shape.H != shape.K)


def passes(attend: Attend, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """The calls of both passes: forward; and, if q requires a gradient, forward and backward."""
    q, k, v, dout = inputs
    calls: dict[str, Callable[[], object]] = {"forward": lambda: attend(q, k, v)}
    if q.requires_grad:
        calls["both"] = lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    return calls


def prepare(implementation: Implementation, inputs: Inputs, shape: RandomShape) -> tuple[Attend, float, float]:
    """Run all passes of an implementation; return its function, the error of its output and the MiB it allocated.
    Raises what the implementation raises, and ValueError for a wrong output."""
    q, k, v, _ = inputs
    before = torch.cuda.memory_allocated() if q.is_cuda else 0
    if q.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with implementation.context():
        attend = implementation.make()
        for call in passes(attend, inputs).values():
            call()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if q.is_cuda else math.nan
        last_q, last_k, last_v, last_out = (x[-1:, -1:].detach() for x in (q, k, v, attend(q, k, v)))
    error = record.output_error(last_q, last_k, last_v, last_out, shape.mask())
    if not error <= MOST_ERROR:
        raise ValueError(f"wrong output: its relative error is {error:.3g}, and at most {MOST_ERROR:g} is allowed")
    return attend, error, peak


def ready(
    candidates: Iterable[Implementation], inputs: Inputs, shape: RandomShape
) -> tuple[dict[Implementation, tuple[Attend, float, float]], dict[str, str]]:
    """The implementations that support the shape, with the results of `prepare`; and the others' names and refusals."""
    serving: dict[Implementation, tuple[Attend, float, float]] = {}
    refusals: dict[str, str] = {}
    for implementation in candidates:
        if implementation.instead_of and implementation.instead_of not in refusals:
            continue
        try:
            with warnings.catch_warnings():
                if implementation.name != OURS:  # PyTorch explains each refusal in several warnings
                    warnings.simplefilter("ignore")
                serving[implementation] = prepare(implementation, inputs, shape)
        except Exception as error:
            refusals[implementation.name] = _one_line(error)
            _check_device(inputs.q.device, implementation.name, refusals[implementation.name])
    return serving, refusals


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_device(device: torch.device, name: str, refusal: str) -> None:
    """DeviceLost if a failure, such as an illegal memory access, has made the device unusable."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception as error:
        raise DeviceLost(name, refusal) from error


def time_in_turns(
    serving: dict[Implementation, Attend], kind: str, inputs: Inputs, budget_ms: float = BUDGET_MS
) -> dict[str, Samples]:
    """The times of one pass, by name. Ours and the implementations near the fastest one have all rounds of samples, in
    turns, with cold caches; the slower ones have only the first samples."""
    contexts = {implementation.name: implementation.context for implementation in serving}
    calls = {implementation.name: passes(attend, inputs)[kind] for implementation, attend in serving.items()}
    device = inputs.q.device
    trials = cold_samples(calls, TRIALS, device, contexts)
    last = BEHIND * min((min(times.device) for name, times in trials.items() if name != OURS), default=0.0)
    calls = {name: call for name, call in calls.items() if name == OURS or min(trials[name].device) <= last}
    mean = sum(min(trials[name].device) for name in calls) / len(calls)
    rounds = min(max(int(budget_ms / mean), LEAST_ROUNDS), MOST_ROUNDS)
    return trials | cold_samples(calls, rounds, device, contexts)


def measure(
    shape: RandomShape,
    where: dict[str, Any],
    more: dict[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    flex: bool = False,
    backends: dict[str, SDPBackend] = BACKENDS,
    budget_ms: float = BUDGET_MS,
) -> list[record.Row]:
    """Rows of ours and of all others that support the shape. If ours fails, its rows have the failure as status."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int, length: int) -> Tensor:
        return torch.randn((shape.B, heads, length, shape.D), device=device, dtype=dtype, generator=generator)

    sizes = ((shape.H, shape.T), (shape.K, shape.S), (shape.K, shape.S))
    q, k, v = (random(*size).requires_grad_(shape.trains) for size in sizes)
    inputs, mask = Inputs(q, k, v, random(shape.H, shape.T)), shape.mask()
    ours = Implementation(OURS, lambda: lambda q, k, v: attention(q, k, v, mask=mask))
    others = implementations(shape, device, dtype, flex=flex, backends=backends)
    serving, refusals = ready([ours, *others], inputs, shape)
    more = {**more, "classes": list(shape.classes())}
    ours_more = {**more, "backend": explain(q, k, v, mask=mask).name}
    if not serving.keys() - {ours}:
        ours_more["refusals"] = {name: why for name, why in refusals.items() if name != OURS}
    named: dict[str, Any] = {"what": "random", "shape": str(shape), "dtype": str(dtype).removeprefix("torch.")}
    rows = []
    for kind, weight in (("forward", 1.0), ("both", 3.5))[: 1 + shape.trains]:
        if OURS in refusals:
            failed = f"failed: {refusals[OURS]}"
            rows.append(record.row(where, **named, impl=OURS, kind=kind, status=failed, more=ours_more))
        if not serving:
            continue
        times = time_in_turns({each: found[0] for each, found in serving.items()}, kind, inputs, budget_ms)
        for implementation, (_, error, peak) in serving.items():
            rows.append(
                record.row(
                    where,
                    **named,
                    impl=implementation.name,
                    kind=kind,
                    samples_ms=times[implementation.name].device,
                    tflop=weight * shape.flops() / 1e12,
                    error=error,
                    peak_mib=peak,
                    more={
                        **(ours_more if implementation is ours else more),
                        "host_us": round(1e3 * median(times[implementation.name].host), 1),
                    },
                )
            )
    return rows


def chosen_part(part: str | None, number: int) -> range:
    """The indices of part "I/N" of a number of shapes: every Nth from the Ith, so that parts resemble each other."""
    if part is None:
        return range(number)
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    first, step = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= step <= number:
        raise ValueError(f"--part is I/N with 1 <= I <= N <= {number}, the number of shapes: got {part!r}; write 1/4")
    return range(first - 1, number, step)


def flex_shapes(shapes: Collection[RandomShape], flex: Flex) -> set[RandomShape]:
    """The shapes that FlexAttention is compiled for. some: windows too large for an explicit mask, and every fourth of
    the other windows; all: windows, and causal shapes with T < S."""
    if flex == "none":
        return set()
    if flex == "all":
        return {shape for shape in shapes if not shape.sees_all and (shape.T < shape.S or "window" in shape.pattern)}
    windows = [shape for shape in shapes if shape.pattern.startswith("window")]
    large = {shape for shape in windows if shape.T * shape.S > MOST_PAIRS}
    return large | set([shape for shape in windows if shape not in large][::FLEX_EVERY])


def bench_random(number: int, seed: int = 0, part: str | None = None, flex: Flex = "some") -> int:
    """Measure, append rows to PATH and print a table; 1 if ours failed on a shape or shapes were left out."""
    check_draw(number, seed)
    indices = chosen_part(part, number)
    if not torch.cuda.is_available():
        raise ValueError("bench attention needs a CUDA device and none is present; `flashspan check` runs anywhere")
    device = torch.device("cuda")
    shapes, where = draw(number, seed), record.environment(device)
    compiled = flex_shapes(shapes, flex)
    rows: list[record.Row] = []
    lost = False
    with progress("bench attention", len(indices)) as line:
        for index in indices:
            line.show(str(shapes[index]))
            more = {"seed": seed, "number": index}
            measured, lost = measure_or_fail(shapes[index], where, more, device=device, flex=shapes[index] in compiled)
            record.append(measured, PATH)
            rows += measured
            line.print(f"{index + 1}/{number} {random_page.summary(measured)}")
            line.advance()
            if lost:
                line.print("the device no longer responds; measure the other shapes in a new process, with --part")
                break
    show_tables([random_page.class_table(rows)], f"{len(rows)} rows appended to {PATH}")
    return 1 if lost or random_page.failures(rows) else 0


def measure_or_fail(
    shape: RandomShape, where: dict[str, Any], more: dict[str, Any], *, device: torch.device, **options: Any
) -> tuple[list[record.Row], bool]:
    """The rows of `measure`, or a row that says why there are none; and whether the device no longer responds."""
    name, lost = OURS, False
    try:
        return measure(shape, where, more, device=device, **options), False
    except DeviceLost as error:
        name, reason, lost = error.name, str(error), True
    except Exception as error:  # raised after `ready`: its origin is unknown, so it counts as a failure of ours
        reason = _one_line(error)
        try:
            _check_device(device, name, reason)
        except DeviceLost:
            lost = True
    more = {**more, "classes": list(shape.classes())}
    named: dict[str, Any] = {"what": "random", "shape": str(shape), "dtype": "bfloat16", "kind": "forward"}
    return [record.row(where, **named, impl=name, status=f"failed: {reason}", more=more)], lost
