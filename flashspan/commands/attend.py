"""`flashspan attend N T D`: attention over N devices: the output, its error, and each device's time and memory.

flashspan attend 4 2048 64 --causal
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.attention import attention
from flashspan.bench.measure import sweep
from flashspan.bench.measure.clock import here, timed
from flashspan.bench.measure.memory import free_bytes, peak_of, refuse_shared_gpu
from flashspan.bench.measure.strategies import Layout, Strategy, over_all_ranks
from flashspan.commands.check import BOUNDS, Dtype, at_length, refuse_large_seed, why_more
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES
from flashspan.kernels import reference
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import CAUSAL, EVERYTHING
from flashspan.launch import RankError, Ranks
from flashspan.progress import progress
from flashspan.stdout import counted

MAX_DEVICES = 8
CHECKED_ROWS = 256  # queries compared with float64, spread over the sequence
REPEATS = 3


@dataclass(frozen=True)
class Job:
    """The attention to compute."""

    seq_len: int
    head_dim: int
    strategy: str
    layout: str
    causal: bool
    heads: int
    kv_heads: int
    dtype: str
    seed: int
    device_type: str


@dataclass(frozen=True)
class Answer:
    """The results of a device. Only rank 0 sets the last three; `alone_ms` is 0 if there is only one device."""

    tokens: int
    milliseconds: float
    peak_mib: float
    sent_mib: float
    alone_ms: float = 0.0
    error: float = 0.0
    sample: tuple[float, ...] = ()


def attend(
    num_devices: int,
    seq_len: int,
    head_dim: int,
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    causal: bool = False,
    strategy: Strategy = "ring",
    layout: Layout = "zigzag",
    dtype: Dtype = "float32",
    seed: int = 0,
    share_gpu: bool = False,
) -> int:
    """Run attention over 1 to 8 devices and compare it with one device.

    Prints the configuration, the first eight numbers of the output, the error against a float64 reference, and each
    device's time and peak memory. GPUs are used when there are enough of them, CPU processes otherwise.

    Example: flashspan attend 4 2048 64 --causal

    Args:
        num_devices: Number of devices that share the sequence, 1 to 8.
        seq_len: Number of tokens in the whole sequence; it need not be divisible by the number of devices.
        head_dim: Head size, 1 to 256.
        heads: Number of query heads.
        kv_heads: Number of key and value heads; by default as many as --heads.
        causal: Causal mask.
        strategy: Strategy of context parallelism.
        layout: Assignment of tokens to devices.
        dtype: Dtype of q, k and v.
        seed: Random seed for the inputs.
        share_gpu: All ranks on the first GPU, for development and debugging.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ValueError(f"attend runs on 1 to {MAX_DEVICES} devices: got {num_devices}")
    if seq_len < 1 or not 1 <= head_dim <= 256:
        raise ValueError(f"attend needs 1 or more tokens and a head size of 1 to 256: got {seq_len} and {head_dim}")
    if heads < 1:
        raise ValueError(f"attend needs 1 or more heads: got {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"the kv heads must divide the query heads: got {heads} query heads and {kv_heads} kv heads")
    refuse_large_seed(seed)
    known: dict[str, Iterable[str]] = {"strategy": STRATEGIES, "layout": LAYOUTS, "dtype": BOUNDS}
    for (name, choices), value in zip(known.items(), (strategy, layout, dtype), strict=True):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}")
    gpus = share_gpu or torch.cuda.device_count() >= num_devices
    job = Job(seq_len, head_dim, strategy, layout, causal, heads, kv_heads, dtype, seed, "cuda" if gpus else "cpu")
    if share_gpu:
        refuse_shared_gpu(num_devices, needed_bytes(job, 1), "lower N, T, D or the heads")
    needed, free = needed_bytes(job, num_devices), free_bytes(job.device_type)
    needs = f"attend {num_devices} {seq_len} {head_dim} needs about {needed / 2**30:.1f} GiB of memory"
    if free is not None and needed > free:
        raise ValueError(f"{needs}, but {free / 2**30:.1f} are available: lower T, D or the heads")
    where = "ranks on one GPU" if share_gpu else "GPUs" if gpus else f"CPU processes on {os.cpu_count()} cores"
    print("FlashAttention across devices, forward")
    print(f"Devices: {num_devices} ({where}), sequence length T: {seq_len}, head dim D: {head_dim}")
    print(f"Heads: {heads} on {kv_heads} kv heads, {'causal' if causal else 'full'}, {dtype}, {strategy}, {layout}\n")
    try:
        backend = "nccl" if gpus and not share_gpu else "gloo"
        with (
            progress(f"attention on {counted(num_devices, 'device')}"),
            Ranks(num_devices, backend=backend, timeout=120, share_gpu=share_gpu) as ranks,
        ):
            answers: list[Answer] = ranks.run(run_on_rank, job, timeout=900)
    except RankError as error:
        if sweep.is_out_of_memory(error):
            raise ValueError(f"{needs}, and memory ran out: lower T, D or the heads") from error
        raise
    first = answers[0]
    print("Output O[0..7]:", " ".join(f"{x:9.6f}" for x in first.sample))
    bound = at_length(BOUNDS[dtype], dtype, seq_len)[0]
    right = first.error <= bound
    allowed = f"allowed {bound:g}{why_more(dtype, seq_len)}"
    print(f"Error against float64: {first.error:.1e} ({allowed}) {'ok' if right else 'WRONG'}\n")
    print("device   tokens   time ms   peak MiB   sent MiB")
    for rank, answer in enumerate(answers):
        figures = f"{answer.milliseconds:>9.1f} {answer.peak_mib:>10.1f} {answer.sent_mib:>10.2f}"
        print(f"{rank:>6} {answer.tokens:>8} {figures}")
    if num_devices > 1:
        slowest = max(answer.milliseconds for answer in answers)
        print(
            f"\nOne device alone: {first.alone_ms:.1f} ms; {num_devices} together: {slowest:.1f} ms; "
            f"speedup {first.alone_ms / slowest:.2f}x"
        )
    return 0 if right else 1


def needed_bytes(job: Job, num_devices: int) -> int:
    """The peak memory of a GPU, or of all CPU processes together. It is reached when each process has made all inputs,
    or when the first compares its output with float64, which stores the scores of the checked rows three times."""
    numbers = (job.heads + 2 * job.kv_heads) * job.seq_len * job.head_dim
    inputs = numbers * getattr(torch, job.dtype).itemsize
    compared = inputs + 8 * numbers + 3 * 8 * job.heads * len(checked_rows(job)) * job.seq_len
    return max(inputs * (1 if job.device_type == "cuda" else num_devices), compared)


@torch.no_grad()
def run_on_rank(job: Job) -> Answer:
    """Run on each rank: time the call. Rank 0 also times one device, and computes the error of the checked rows."""
    device = here(job.device_type)
    whole = make_inputs(job, device)
    attend = over_all_ranks(job.strategy, job.layout, job.device_type, num_tokens=job.seq_len)
    q, k, v = (attend.shard(x, 2) for x in whole)
    if dist.get_rank():
        del whole
    peak, out = peak_of(lambda: attend(q, k, v, causal=job.causal), device)  # warm-up, which also connects the ranks
    alone, times = [], []
    for _ in range(REPEATS):  # alternately, so that other load slows both
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            alone.append(timed(lambda: attention(*whole, causal=job.causal), device)[0])
        sent = attend.bytes_sent
        del out
        milliseconds, out = timed(lambda: attend(q, k, v, causal=job.causal), device, together=True)
        times.append(milliseconds)
        sent = attend.bytes_sent - sent
    joined = attend.unshard(out, 2)
    answer = (q.shape[2], min(times), (q.nbytes + 2 * k.nbytes + peak) / 2**20, sent / 2**20)
    if dist.get_rank():
        return Answer(*answer)
    sample = tuple(joined.flatten()[:8].tolist())
    return Answer(*answer, min(alone, default=0.0), row_error(job, whole, joined), sample)


def make_inputs(job: Job, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(job.seed)
    shapes = [(1, heads, job.seq_len, job.head_dim) for heads in (job.heads, job.kv_heads, job.kv_heads)]
    return [torch.randn(shape, generator=generator).to(device, getattr(torch, job.dtype)) for shape in shapes]


def checked_rows(job: Job) -> range:
    """Queries spread over the sequence."""
    return range(0, job.seq_len, max(1, job.seq_len // CHECKED_ROWS))


def row_error(job: Job, whole: list[Tensor], out: Tensor) -> float:
    """The relative error of the checked rows against float64."""
    rows = checked_rows(job)
    q, k, v = (x.double() for x in whole)
    mask = (CAUSAL if job.causal else EVERYTHING).slice(rows, range(job.seq_len))
    scale = 1.0 / math.sqrt(job.head_dim)
    exact = reference.forward(q[:, :, :: rows.step], k, v, Problem(mask, scale)).out
    return float((out[:, :, :: rows.step].double() - exact).norm() / exact.norm())
