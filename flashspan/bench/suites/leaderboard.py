"""The course's leaderboard test: causal attention on 16 heads of 64 over 16,384 tokens, forward and backward.

    flashspan bench leaderboard

As in the course: compiled, bfloat16, the sum of the output as the loss, milliseconds from `do_bench` over ten seconds.
It is measured twice: with the call traced by the compiler, and not traced ("untraced"). A compiled backward first
copies its incoming gradient, which for a sum is one number expanded to 16 million elements; our backward copies one
head of it. Rows are appended to docs/benchmarks/leaderboard.csv.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flashspan import attention
from flashspan.bench.measure import record
from flashspan.bench.measure.clock import check_repeats
from flashspan.kernels.masks import CAUSAL

PATH = Path("docs/benchmarks/leaderboard.csv")
HEADS, TOKENS, HEAD_DIM = 16, 16384, 64


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The course's call: tensors [heads, tokens, head size], without a batch."""
    return attention(q[None], k[None], v[None], causal=is_causal).squeeze(0)  # a view, also in backward


def untraced(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The same call, not traced by the compiler."""
    return _as_it_is(q, k, v, is_causal)


_as_it_is = torch.compiler.disable(flash, reason="a compiled backward would copy the gradient of a sum")


def bench_leaderboard(*, rep: int = 10000, warmup: int = 1000) -> int:
    """The leaderboard test of the course CS336, unchanged: compiled, 16 heads of 64 over 16,384 tokens, causal.

    Args:
        rep: Milliseconds of measurement, for each of two variants: torch.compile traces the call of attention, or
            leaves it untraced.
        warmup: Milliseconds of warm-up.
    """
    check_repeats(1, rep=rep)
    check_repeats(0, warmup=warmup)
    if not torch.cuda.is_available():
        raise ValueError("bench leaderboard needs a CUDA device: found none; `flashspan check` runs anywhere")
    for impl, call in (("flashspan", flash), ("flashspan untraced", untraced)):
        row = _measure(impl, call, rep, warmup)
        record.append([row], PATH)
        print(f"{impl:18} forward and backward {row.p50_ms:.3f} ms ({row.tflops:.0f} TFLOP/s), error {row.error:.1e}")
    print(f"appended to {PATH}")
    return 0


def _measure(impl: str, call: Callable[..., Tensor], rep: int, warmup: int) -> record.Row:
    from triton.testing import do_bench

    torch.manual_seed(0)
    shape = (3, HEADS, TOKENS, HEAD_DIM)
    q, k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(call)

    def step() -> None:
        compiled(q, k, v, True).sum().backward()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.no_grad():
        out = compiled(q, k, v, True)
        error = record.output_error(q[None, :1], k[None, :1], v[None, :1], out[None, :1], CAUSAL)
    low, middle, high = do_bench(step, rep=rep, warmup=warmup, quantiles=[0.2, 0.5, 0.8])
    return record.Row(
        **record.environment(torch.device("cuda")), shape=f"1x{HEADS}/{HEADS}x{TOKENS}x{HEAD_DIM} causal",
        impl=impl, kind="both", p20_ms=low, p50_ms=middle, p80_ms=high,
        tflops=3.5 * 2 * HEADS * TOKENS**2 * HEAD_DIM / middle / 1e9, error=error, peak_mib=peak,
        what="leaderboard",
    )  # fmt: skip
