"""Our ring compared with PyTorch's ring template on CPU ranks, with the same operator: time, memory, errors.

    flashspan bench cpu-ring --tokens 8192 --heads 8 --head-dim 64 --ranks 4

The two take turns, so that other load of the machine slows both; CPU seconds hardly depend on the load. Time is that of
the slowest rank, forward and backward; memory is the peak of all tensors, including q, k, v and dout.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.bench.measure.clock import check_repeats, timed
from flashspan.bench.measure.memory import peak_of
from flashspan.context.strategy import context_parallel
from flashspan.launch import Ranks, check_num_ranks
from flashspan.progress import progress

MIB = 2**20


def compare(tokens: int, heads: int, head_dim: int, repeats: int, head_chunks: int | None) -> dict[str, list[Any]]:
    """Run on each rank: (seconds, CPU seconds) of each repeat of both, both peaks in MiB, the difference of results."""
    attend = context_parallel(
        dist.group.WORLD, layout="zigzag", strategy="ring", num_tokens=tokens, head_chunks=head_chunks
    )
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, tokens, head_dim, generator=generator) for _ in range(4)]
    q, k, v, dout = (attend.shard(x, 2) for x in whole)
    del whole
    theirs = Template()

    def run_ours() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, causal=True)
        out.backward(dout)
        return (out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))

    def run_theirs() -> tuple[Tensor, ...]:
        out, lse = theirs.forward(q, k, v)
        return (out, *theirs.backward(dout, q, k, v, out, lse))

    device = torch.device("cpu")
    calls = {"ours": run_ours, "theirs": run_theirs}
    warm = {name: peak_of(call, device) for name, call in calls.items()}
    results: dict[str, list[Any]] = {"peaks": [peak / MIB for peak, _ in warm.values()], "ours": [], "theirs": []}
    pairs = zip(warm["ours"][1], warm["theirs"][1], strict=True)
    results["difference"] = [float((a - b).norm() / b.norm()) for a, b in pairs]
    del warm
    for _ in range(repeats):
        for name, call in calls.items():
            dist.barrier()
            before = time.process_time()
            milliseconds, _ = timed(call, device)
            results[name].append((milliseconds / 1e3, time.process_time() - before))
    return results


class Template:
    """PyTorch's `_templated_ring_attention` with its fused CPU operator, causal, balanced (zigzag)."""

    def __init__(self) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        _attention._cp_options.enable_load_balance = True
        self.module: Any = _attention
        self.group = dist.group.WORLD
        aten = torch.ops.aten
        self.op: Any = aten._scaled_dot_product_flash_attention_for_cpu
        self.backward_op: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module._templated_ring_attention(self.group, 2, self.op, q, k, v, is_causal=True)
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        def op(*, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Any:
            return self.backward_op(grad_out, query, key, value, rest["out"], rest["logsumexp"], 0.0, rest["is_causal"])

        grads = self.module._templated_ring_attention_backward(
            self.group, 2, op, dout, "grad_out", q, k, v, out, lse, is_causal=True
        )
        return tuple(grads[:3])


def bench_cpu_ring(
    *,
    tokens: int = 8192,
    heads: int = 8,
    head_dim: int = 64,
    ranks: int = 4,
    repeats: int = 5,
    head_chunks: int | None = None,
) -> int:
    """A ring of CPU ranks compared with PyTorch's own ring: time, memory, difference of results. Both use the same
    attention operator for CPUs.

    Args:
        tokens: Number of tokens in the sequence.
        heads: Number of query heads, and of key and value heads.
        head_dim: Head size.
        ranks: Number of processes on this machine.
        repeats: Number of runs.
        head_chunks: Number of chunks of heads; by default that of context_parallel.
    """
    check_repeats(1, tokens=tokens, heads=heads, head_dim=head_dim, repeats=repeats)
    check_num_ranks(ranks, "ranks")
    with progress("bench cpu-ring"), Ranks(ranks, timeout=300) as pool:
        answers = pool.run(
            compare,
            tokens,
            heads,
            head_dim,
            repeats,
            head_chunks,
            timeout=1800,
        )
    tensor = tokens * heads * head_dim * 4 / ranks / MIB
    print(f"{ranks} gloo ranks, T={tokens} causal, {heads} heads x {head_dim}, float32")
    for number, (name, label) in enumerate((("ours", "flashspan"), ("theirs", "PyTorch"))):
        slowest = [max(answer[name][i][0] for answer in answers) for i in range(repeats)]
        busy = min(sum(answer[name][i][1] for answer in answers) for i in range(repeats))
        low, middle = min(slowest), statistics.median(slowest)
        # q, k, v and dout existed before the call; out, dq, dk, dv and all else were allocated in it.
        total = max(answer["peaks"][number] for answer in answers) + 4 * tensor
        ratio = (total - 4 * tensor) / (8 * tensor)
        print(
            f"{label:<9} median {middle:.3f} s, best {low:.3f} s, {busy:.3f} CPU s of all ranks; "
            f"peak {total:.1f} MiB per rank, inputs included; {4 * tensor:.1f} MiB of it are two K/V buffers, "
            f"the rest is {ratio:.2f}x the {8 * tensor:.1f} MiB of the rank's q, k, v, out and gradients"
        )
    print("relative difference of out, dq, dk, dv:", " ".join(f"{x:.1e}" for x in answers[0]["difference"]))

    return 0
