"""`flashspan check`: proof, on the user's own machine, that attention across ranks equals attention on one device.

flashspan check                                              every strategy and layout on 4 ranks
flashspan check --ranks 4 --strategy ring --layout zigzag --tokens 1000
flashspan check --ranks 4 --share-gpu                        4 ranks on one GPU
torchrun --nproc-per-node 8 -m flashspan.check               joins the ranks that torchrun started
flashspan check --preflight                                  links, overlap and one strategy: see preflight.py
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan import promise
from flashspan.bench.measure.clock import here
from flashspan.bench.measure.memory import free_bytes, refuse_shared_gpu
from flashspan.bench.measure.strategies import Layout, Strategy, over_all_ranks
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES, ContextAttention
from flashspan.kernels.masks import CAUSAL, EVERYTHING
from flashspan.launch import Ranks, check_num_ranks, joined, send_to_parent
from flashspan.progress import progress
from flashspan.stdout import counted

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""The choices in help; a test compares them with STRATEGIES, LAYOUTS and BOUNDS."""

BOUNDS = {"float32": (promise.FORWARD, promise.GRADIENT), "bfloat16": (1e-2, 2e-2), "float16": (2e-3, 4e-3)}
"""The largest allowed errors of out, and of dq, dk and dv, relative to `promise.Answer.size`."""
LONG = 131072
"""With more tokens, ten times the float32 error is allowed. Longer sums have larger rounding errors, and the mean of
more values is smaller: with 2**20 tokens and no mask, one device alone has an error of 1.4e-6."""


def is_long(dtype: str, tokens: int) -> bool:
    return dtype == "float32" and tokens > LONG


def at_length(bounds: tuple[float, float], dtype: str, tokens: int) -> tuple[float, float]:
    """The allowed errors for this number of tokens, from those for short sequences."""
    forward, backward = bounds
    return (10 * forward, 10 * backward) if is_long(dtype, tokens) else bounds


def why_more(dtype: str, tokens: int) -> str:
    """Text for the output: why an error above the promised one is allowed; empty if it is not allowed."""
    return (
        f"; ten times the bounds for up to {LONG:,} tokens, since longer sums have larger rounding errors"
        if is_long(dtype, tokens)
        else ""
    )


@dataclass(frozen=True)
class Problem:
    """The inputs of a check. Each case, a strategy and a layout, is compared with one device in float64."""

    cases: tuple[tuple[str, str], ...]
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str
    seed: int

    def needed_bytes(self, ranks: int) -> int:
        """A lower bound on the memory of all ranks: each holds the inputs, and the first also the float64 results."""
        numbers = 2 * (self.heads + self.kv_heads) * self.tokens * self.head_dim
        return numbers * (ranks * getattr(torch, self.dtype).itemsize + 2 * torch.float64.itemsize)

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q, k, v and dout of the whole sequence, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, num, self.tokens, self.head_dim) for num in heads]
        dtype = getattr(torch, self.dtype)
        return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@dataclass(frozen=True)
class Result:
    """Relative errors against float64 (`promise.Answer.size`), Frobenius norms."""

    strategy: str
    layout: str
    out: float
    dq: float
    dk: float
    dv: float
    transport: str = ""

    def passes(self, dtype: str, tokens: int = 1) -> bool:
        forward, backward = at_length(BOUNDS[dtype], dtype, tokens)
        # Compared one by one: a NaN fails every comparison, but may be lost in a maximum.
        return self.out <= forward and all(error <= backward for error in (self.dq, self.dk, self.dv))


def check(
    *,
    ranks: int = 4,
    strategy: Strategy | None = None,
    layout: Layout | None = None,
    tokens: int = 1000,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    causal: bool = True,
    dtype: Dtype = "float32",
    seed: int = 0,
    share_gpu: bool = False,
) -> int:
    """Prove on this machine that parallel attention equals serial attention.

    Starts the ranks (or joins them, under torchrun), computes attention over them and on one device from the same
    inputs, and prints the errors of out, dq, dk and dv with a verdict. Exit code 1 on failure. With no arguments:
    every strategy and layout.

    With --preflight it checks one strategy, measures the links between the ranks, and names slow ones, in about a
    minute; flashspan check --preflight --help lists its options.

    Example: flashspan check --ranks 4 --strategy ring --layout zigzag --tokens 1000

    Args:
        ranks: Number of ranks to start: at most 64, or 8 per core if that is more.
        strategy: Strategy of context parallelism; all by default.
        layout: Assignment of tokens to ranks; all by default.
        tokens: Number of tokens in the whole sequence; it need not be divisible by the number of ranks.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Head size.
        causal: Causal mask.
        dtype: Dtype of q, k and v.
        seed: Random seed for the inputs.
        share_gpu: All ranks on the first GPU, for development and debugging.
    """
    if dtype not in BOUNDS:
        raise ValueError(f"dtype must be one of {', '.join(BOUNDS)}: got {dtype!r}")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"the kv heads must divide the query heads: got {heads} query heads and {kv_heads} kv heads")
    if tokens < 1 or not 1 <= head_dim <= 256:
        raise ValueError(f"check needs 1 or more tokens and a head size of 1 to 256: got {tokens} and {head_dim}")
    refuse_large_seed(seed)
    by_torchrun = under_torchrun(share_gpu)
    cases = [(s, l) for s in STRATEGIES for l in LAYOUTS if strategy in (None, s) and layout in (None, l)]
    if not cases:
        raise ValueError(
            f"strategy must be one of {', '.join(STRATEGIES)} and layout one of {', '.join(LAYOUTS)}: "
            f"got {strategy!r} and {layout!r}"
        )
    problem = Problem(tuple(cases), tokens, heads, kv_heads, head_dim, causal, dtype, seed)
    if by_torchrun:
        with joined(timeout=120) as device_type:
            ranks = dist.get_world_size()
            results = run_on_rank(problem, device_type)
    else:
        check_num_ranks(ranks, "check")
        cuda = share_gpu or ranks <= torch.cuda.device_count()
        if share_gpu:
            refuse_shared_gpu(ranks, problem.needed_bytes(1), "lower --ranks, --tokens or the heads")
        needed, free = problem.needed_bytes(1 if cuda else ranks), free_bytes("cuda" if cuda else "cpu")
        if free is not None and needed > free:
            raise ValueError(
                f"check must fit in memory: {tokens} tokens, {heads} heads on {kv_heads} kv heads of {head_dim} on "
                f"{ranks} ranks need about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} are available; lower "
                "--tokens, the heads or --ranks"
            )
        what = f"{counted(len(cases), 'case')} on {counted(ranks, 'rank')}"
        backend = "nccl" if cuda and not share_gpu else "gloo"
        with (
            progress(what, len(cases)) as line,
            Ranks(ranks, backend=backend, timeout=120, share_gpu=share_gpu) as pool,
        ):
            given = (problem, "cuda" if cuda else "cpu", True)
            results = pool.run(run_on_rank, *given, timeout=900, on_message=lambda _: line.advance())[0]
    if results:  # on rank 0 only
        print_table(problem, ranks, results)
    return 0 if all(result.passes(dtype, tokens) for result in results) else 1


def under_torchrun(share_gpu: bool) -> bool:
    """Whether torchrun started this process as one of its ranks."""
    started = dist.is_torchelastic_launched()
    if started and share_gpu:
        raise ValueError("--share-gpu starts its own ranks: run it without torchrun, or leave --share-gpu out")
    return started


def refuse_large_seed(seed: int) -> None:
    """ValueError for a seed that a generator refuses, before ranks are started."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed must be a 64-bit number, from -2**63 to 2**64 - 1: got {seed}")


def run_on_rank(problem: Problem, device_type: str, counted: bool = False) -> list[Result]:
    """Run on each rank: every case, forward and backward. Rank 0 returns the errors of the whole tensors, and with
    `counted` sends a message to the parent after each case. Other ranks return an empty list."""
    device = here(device_type)
    inputs = problem.inputs(device)
    exact = truth(problem, inputs) if dist.get_rank() == 0 else None
    results = []
    for strategy, layout in problem.cases:
        attend = over_all_ranks(strategy, layout, device_type, num_tokens=problem.tokens)
        transport = attend.transport(device)
        errors = compare(attend, problem, inputs, exact)
        if errors:
            results.append(Result(strategy, layout, *errors, transport))
            if counted:
                send_to_parent(len(results))
    return results


def compare(
    attend: ContextAttention, problem: Problem, inputs: list[Tensor], exact: promise.Answer | None
) -> tuple[float, float, float, float] | None:
    """Run forward and backward on all ranks of `attend`; with `exact`, return the errors of out, dq, dk and dv."""
    q, k, v, dout = (attend.shard(x, 2) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, causal=problem.causal)
    out.backward(dout)
    whole_out, *grads = (attend.unshard(x, 2) for x in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None)))
    if exact is None:
        return None
    dq, dk, dv = (relative(grad, exact, name) for name, grad in zip(("dq", "dk", "dv"), grads, strict=True))
    return relative(whole_out, exact, "out"), dq, dk, dv


def truth(problem: Problem, inputs: list[Tensor]) -> promise.Answer:
    """The result of one device, in float64."""
    mask, scale = CAUSAL if problem.causal else EVERYTHING, 1.0 / math.sqrt(problem.head_dim)
    return promise.solve(*inputs, mask=mask, scale=scale)


def relative(mine: Tensor, exact: promise.Answer, name: str) -> float:
    """The norm of one result's error, relative to the size that the promise uses."""
    return float((mine.double() - exact.results[name]).norm()) / exact.size(name)


def print_table(problem: Problem, ranks: int, results: list[Result]) -> None:
    kind = "causal" if problem.causal else "full"
    forward, backward = at_length(BOUNDS[problem.dtype], problem.dtype, problem.tokens)
    print(
        f"{counted(ranks, 'rank')} against one device in float64: {problem.tokens} tokens, {problem.heads} heads on "
        f"{problem.kv_heads} kv heads of {problem.head_dim}, {kind}, {problem.dtype}"
    )
    for transport in dict.fromkeys(result.transport for result in results):
        print(f"transport: {transport}")
    why = why_more(problem.dtype, problem.tokens)
    print(f"relative errors; allowed: out {forward:g}, gradients {backward:g}{why}\n")
    print(f"{'strategy':<12} {'layout':<11} " + " ".join(f"{name:>9}" for name in ("out", "dq", "dk", "dv")))
    for result in results:
        values = [value for value in asdict(result).values() if isinstance(value, float)]
        verdict = "ok" if result.passes(problem.dtype, problem.tokens) else "WRONG"
        cells = " ".join(f"{value:9.1e}" for value in values)
        print(f"{result.strategy:<12} {result.layout:<11} {cells}  {verdict}")
    wrong = sum(not result.passes(problem.dtype, problem.tokens) for result in results)
    print(f"\n{'parallel equals serial' if not wrong else f'{wrong} of {len(results)} FAILED'}")
