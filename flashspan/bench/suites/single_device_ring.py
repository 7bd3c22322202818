"""Kernel time of a ring on one device: the steps of all ranks run one after another, compared with one call.

    flashspan bench single-device-ring --tokens 32768 --heads 16 --kv-heads 16 --head-dim 128 --ranks 8
    flashspan bench single-device-ring --step --tokens 8192 --full      # one step of a ring, and a plain call

Only kernels are timed (by CUDA events around each; on a CPU, by a clock): the result is the cost of splitting a causal
call into the tiles of a zigzag ring. Transfers are copies in memory, and are not counted. A step continues a float32
carry and adds into float32 gradients; a plain call does neither, and its results have the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from flashspan.bench.measure.clock import check_repeats, default_device, in_turns, synchronise, timed
from flashspan.bench.measure.strategies import Layout
from flashspan.context.execute import Call, Plan, simulate
from flashspan.context.generators import GENERATORS
from flashspan.context.layout import place
from flashspan.context.passes import BackwardPass, ForwardPass
from flashspan.context.transport import LocalTransports
from flashspan.context.visibility import Visibility
from flashspan.kernels.backends import Chosen
from flashspan.kernels.contract import Carry, LocalAttention, Problem
from flashspan.kernels.delta import row_delta
from flashspan.kernels.masks import CAUSAL, EVERYTHING, Mask
from flashspan.progress import progress


class Stopwatch:
    """LocalAttention that records the time of every call."""

    def __init__(self, local: LocalAttention, device: torch.device) -> None:
        self.local, self.device = local, device
        self.spans: list[Any] = []

    def forward(self, *args: Any, **rest: Any) -> Carry:
        return self._time(lambda: self.local.forward(*args, **rest))

    def backward(self, *args: Any, **rest: Any) -> None:
        self._time(lambda: self.local.backward(*args, **rest))

    def _time(self, call: Callable[[], Any]) -> Any:
        if self.device.type != "cuda":
            milliseconds, result = timed(call, self.device)
            self.spans.append(milliseconds)
            return result
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        result = call()
        after.record()
        self.spans.append((before, after))
        return result

    def run_ahead(self) -> None:
        """Keep the GPU busy while the host queues the next calls, so that no gaps between kernels are timed."""
        if self.device.type == "cuda":
            torch.cuda._sleep(400_000_000)  # about a fifth of a second

    def milliseconds(self) -> float:
        """The time of all calls since the last call of this method."""
        synchronise(self.device)
        cuda = self.device.type == "cuda"
        total = sum(before.elapsed_time(after) for before, after in self.spans) if cuda else sum(self.spans)
        self.spans = []
        return float(total)


Once: TypeAlias = Callable[[], tuple[float, float]]
"""A function that runs forward and backward once, and returns the milliseconds of the kernels of each."""


def all_steps(inputs: list[Tensor], mask: Mask, num_ranks: int, *, strategy: str, layout: str, backend: str) -> Once:
    """A function that runs the steps of all ranks, one after another."""
    q, k, v, dout = inputs
    placement = place(layout, q.shape[2], num_ranks)
    plan = Plan(placement, mask, GENERATORS[strategy](Visibility(placement, mask)))
    watch = Stopwatch(Chosen(backend), q.device)
    parts = [[placement.shard(x, 2, rank) for rank in range(num_ranks)] for x in (q, k, v, dout)]
    calls = [Call(parts[0][r], parts[1][r], parts[2][r], q.shape[3] ** -0.5) for r in range(num_ranks)]
    ranks = range(num_ranks)

    def once() -> tuple[float, float]:
        transports = LocalTransports(num_ranks).transports
        watch.run_ahead()
        carries = simulate([ForwardPass(plan, transports[r], watch, calls[r]) for r in ranks])
        forward = watch.milliseconds()
        deltas = [row_delta(parts[3][r], carries[r].out) for r in ranks]
        watch.run_ahead()
        simulate(
            [BackwardPass(plan, transports[r], watch, calls[r], parts[3][r], carries[r].lse, deltas[r]) for r in ranks]
        )
        return forward, watch.milliseconds()

    return once


def one_step(inputs: list[Tensor], mask: Mask, *, carried: bool, backend: str) -> Once:
    """A function that runs one call. With `carried` it is a step of a ring, which continues a carry and adds into
    gradients; otherwise a plain call."""
    q, k, v, dout = inputs
    problem = Problem(mask, q.shape[3] ** -0.5)
    watch = Stopwatch(Chosen(backend), q.device)
    dtype = torch.float32 if carried else q.dtype
    # Every call continues the previous one, as in a ring.
    carry = watch.local.forward(q, k, v, problem, carry=None, out_dtype=dtype)
    lse, delta = carry.lse.clone(), row_delta(dout, carry.out)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))

    def once() -> tuple[float, float]:
        nonlocal carry
        watch.run_ahead()
        carry = watch.forward(q, k, v, problem, carry=carry if carried else None, out_dtype=dtype)
        forward = watch.milliseconds()
        watch.run_ahead()
        watch.backward(dout, q, k, v, lse, delta, problem, dq=dq, dk=dk, dv=dv, accumulate=carried)
        return forward, watch.milliseconds()

    return once


def in_turn(runs: Sequence[Once], repeats: int) -> list[tuple[float, float]]:
    """The median milliseconds of forward and of backward of each; they take turns."""
    for run in runs:  # compiles and warms up
        run()
    times = in_turns(dict(enumerate(runs)), repeats).values()
    return [(median(forward for forward, _ in t), median(backward for _, backward in t)) for t in times]


def bench_single_device_ring(
    *,
    tokens: int = 32768,
    heads: int = 16,
    kv_heads: int = 16,
    head_dim: int = 128,
    ranks: int = 8,
    repeats: int = 10,
    strategy: Literal["ring", "gather", "helper"] = "ring",
    layout: Layout = "zigzag",
    step: bool = False,
    full: bool = False,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    backend: str = "auto",
    device: str = "",
) -> int:
    """Kernel time of a ring on one device: the steps of all ranks one after another, compared with one call.

    Args:
        tokens: Number of tokens in the sequence.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Head size.
        ranks: Number of ranks whose steps are run.
        repeats: Number of runs, of which the median counts.
        strategy: Schedule of the steps.
        layout: Assignment of tokens to ranks.
        step: One step of a ring instead of the steps of all ranks.
        full: Full mask instead of a causal one.
        dtype: Dtype of q, k and v.
        backend: Kernels to use.
        device: Device type, cuda or cpu; by default a GPU if there is one.
    """
    check_repeats(1, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ranks=ranks, repeats=repeats)
    where = default_device(device)
    torch.manual_seed(0)
    shapes = [(1, num, tokens, head_dim) for num in (heads, kv_heads, kv_heads, heads)]
    inputs = [torch.randn(shape, device=where, dtype=getattr(torch, dtype)) for shape in shapes]
    mask = EVERYTHING if full else CAUSAL
    choice = {"strategy": strategy, "layout": layout, "backend": backend}
    if step:
        what, how = "a step", "one step of a ring"
        runs = [one_step(inputs, mask, carried=carried, backend=backend) for carried in (False, True)]
    else:
        what, how = "all ranks' kernels", f"{strategy}, {layout}, {ranks} ranks"
        runs = [all_steps(inputs, mask, n, **choice) for n in (1, ranks)]
    with progress(f"{how}, {repeats} runs"):
        one, many = in_turn(runs, repeats)
    print(f"{tokens} tokens, {heads} heads on {kv_heads} of {head_dim}, {dtype}, {'full' if full else 'causal'}; {how}")
    for name, alone, together in zip(("forward", "backward"), one, many, strict=True):
        print(f"{name:<9} one call {alone:.3f} ms, {what} {together:.3f} ms: {together / alone:.3f}x")
    return 0
