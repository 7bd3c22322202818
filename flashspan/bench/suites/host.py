"""The host's time for a call: calls are queued without waiting for the device, which keeps up with such small tensors.

    flashspan bench host --calls 500

The result is the minimum of twenty rounds, in which all calls take turns, compared with PyTorch's own attention. On a
CPU, where nothing is queued, it is the time of the whole call. Backward runs on an autograd thread, and switching
threads may take longer than the rest: the cases "one thread" do not switch. "one rank" is `context_parallel` without a
group, which should cost no more than `attention`.

On a GPU there are two shapes: a pass of the first is one launch; the second takes the Hopper kernels, with more
launches and temporary tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import attention, context_parallel, masks
from flashspan.bench.measure.clock import check_repeats, default_device

SHAPES = ((1, 2, 2, 128, 128), (1, 32, 8, 1024, 128))
"""Batch, heads, key heads, tokens, head size."""


def microseconds(
    cases: dict[str, Callable[[], object]], calls: int, device: torch.device, rounds: int = 20
) -> dict[str, float]:
    """Name -> microseconds of one call, the minimum over rounds. The names take turns, so that other load of the
    machine affects some rounds but not all rounds of one name."""
    least = dict.fromkeys(cases, float("inf"))
    for number in range(rounds + 1):  # the first compiles and warms up
        for name, call in cases.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            spent = (time.perf_counter() - started) / calls * 1e6
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                least[name] = min(least[name], spent)
    return least


def cases(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Name -> a call to time. "with grad" records the graph for backward; "both" also runs backward."""
    gq, gk, gv = (x.clone().requires_grad_() for x in (q, k, v))
    dout = torch.randn_like(q)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def differentiate(out: Tensor, threads: bool = True) -> object:
        with torch.autograd.set_multithreading_enabled(threads):
            return torch.autograd.grad(out, (gq, gk, gv), dout)

    documents = masks.documents([q.shape[2] // 2] * 2)
    one_rank = context_parallel(None)
    return {
        "forward, full": lambda: attention(q, k, v),
        "forward, causal": lambda: attention(q, k, v, causal=True),
        "forward, documents": lambda: attention(q, k, v, mask=documents),
        "SDPA, causal": lambda: sdpa(q, k, v),
        "one rank, causal": lambda: one_rank(q, k, v, causal=True),
        "forward with grad, causal": lambda: attention(gq, gk, gv, causal=True),
        "SDPA with grad, causal": lambda: sdpa(gq, gk, gv),
        "both, causal": lambda: differentiate(attention(gq, gk, gv, causal=True)),
        "SDPA both, causal": lambda: differentiate(sdpa(gq, gk, gv)),
        "one rank both, causal": lambda: differentiate(one_rank(gq, gk, gv, causal=True)),
        "both, one thread": lambda: differentiate(attention(gq, gk, gv, causal=True), False),
        "SDPA both, one thread": lambda: differentiate(sdpa(gq, gk, gv), False),
    }


def bench_host(*, calls: int = 100, device: str = "") -> int:
    """The host's time for one call of attention, in microseconds: flashspan and PyTorch.

    Args:
        calls: Number of calls per round.
        device: Device type, cuda or cpu; by default a GPU if there is one.
    """
    check_repeats(1, calls=calls)
    where = default_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    for B, H, K, T, D in SHAPES if where.type == "cuda" else SHAPES[:1]:
        q, k, v = (torch.randn(B, heads, T, D, device=where, dtype=dtype) for heads in (H, K, K))
        print(f"{B}x{H}/{K}x{T}x{D}")
        for name, least in microseconds(cases(q, k, v), calls, where).items():
            print(f"  {name:<26} {least:7.1f} us")
    return 0
