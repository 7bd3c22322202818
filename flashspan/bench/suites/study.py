"""`flashspan bench study`: plain PyTorch attention over lengths and head sizes, and flashspan compared with it.

    flashspan bench study eager      # batch 8, one head: eager and compiled, 100 forward and 100 backward passes
    flashspan bench study flash      # batch 1, causal, bfloat16 and float32: ours and plain, with do_bench

A shape that does not fit is recorded as such, with the bytes that plain attention would need. Eager and compiled, and
ours and plain, take turns, so that other load of the machine affects both equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from flashspan.attention import attention
from flashspan.bench.measure import memory, record, sweep
from flashspan.bench.measure.clock import check_repeats, in_turns, timed
from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import Table, pivot, show_tables

HEAD_DIMS = (16, 32, 64, 128)
EAGER_LENGTHS = (256, 1024, 4096, 8192, 16384)
FLASH_LENGTHS = tuple(2**power for power in range(7, 17))
BATCH = 8
EAGER_IMPLS = ("eager", "compiled")
EAGER_KINDS = ("forward", "backward")
FLASH_IMPLS = ("flashspan", "pytorch")

K = TypeVar("K")


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(d)) v on [B, T, d], every intermediate in memory."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def footprint(batch: int, tokens: int, head_dim: int, itemsize: int) -> float:
    """Bytes of plain attention at the peak of backward: four [T, T] matrices (scores, softmax and their gradients) and
    eight [T, d] matrices (q, k, v, out and their gradients)."""
    return itemsize * batch * (4.0 * tokens**2 + 8.0 * tokens * head_dim)


def eager_rows(tokens: int, head_dim: int, impls: Sequence[str], repeats: int, device: torch.device) -> list[Row]:
    """Rows of forward and backward of plain attention, eager and compiled in turns, synchronised after each pass, with
    the memory in use before backward."""
    memory.check_room(footprint(BATCH, tokens, head_dim, 4), device)
    calls: dict[str, Callable[..., Tensor]] = dict.fromkeys(impls, plain)
    if "compiled" in impls:
        torch._dynamo.reset()
        calls["compiled"] = torch.compile(plain)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(BATCH, tokens, head_dim, device=device) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def turn(call: Callable[..., Tensor]) -> tuple[float, float, float]:
        """Milliseconds of forward and of backward, and the bytes in use between them. Frees all tensors."""
        forward, out = timed(partial(call, q, k, v), device)
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else saved_bytes(tokens, head_dim)
        backward, _ = timed(partial(out.backward, dout), device)
        q.grad = k.grad = v.grad = None
        return forward, backward, held

    turns = {impl: partial(turn, call) for impl, call in calls.items()}
    in_turns(turns, 3 if repeats >= 10 else 1)  # warm-up
    rows = []
    for impl, found in in_turns(turns, repeats).items():
        *times, held = zip(*found, strict=True)
        more = {"repeats": repeats, "before_mib": max(held) / 2**20}
        for kind, samples in zip(EAGER_KINDS, times, strict=True):
            rows.append(_eager_row(tokens, head_dim, impl, kind, device, samples, **more))
    return rows


def saved_bytes(tokens: int, head_dim: int) -> float:
    """The bytes of tensors between the passes, for a device that does not report them: q, k, v, the output and its
    gradient, and the softmax."""
    return 4.0 * BATCH * (5 * tokens * head_dim + tokens**2)


def _eager_row(
    tokens: int,
    head_dim: int,
    impl: str,
    kind: str,
    device: torch.device,
    samples: Sequence[float] = (),
    **more: float,
) -> Row:
    work = 4.0 * BATCH * tokens**2 * head_dim / 1e12 * (2 if kind == "backward" else 1)
    needed = footprint(BATCH, tokens, head_dim, 4) / 2**20
    return record.row(
        record.environment(device), what="study eager", shape=f"{BATCH}x{tokens}x{head_dim}",
        impl=impl, kind=kind, dtype="float32", samples_ms=samples, tflop=work,
        peak_mib=more.get("before_mib", math.nan),
        more={"tokens": tokens, "head_dim": head_dim, "footprint_mib": needed, **more},
    )  # fmt: skip


def flash_rows(tokens: int, head_dim: int, dtype: str, impls: Sequence[str], device: torch.device) -> list[Row]:
    """Rows of forward, backward and both, of implementations that take turns: batch 1, one head, causal."""
    if "pytorch" in impls:
        memory.check_room(footprint(1, tokens, head_dim, getattr(torch, dtype).itemsize), device)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, tokens, head_dim, device=device, dtype=getattr(torch, dtype)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def passes(impl: str) -> dict[tuple[str, str], Callable[[], Any]]:
        def attend() -> Tensor:
            if impl == "pytorch":
                return plain(q, k, v, causal=True)
            out: Tensor = attention(q[:, None], k[:, None], v[:, None], causal=True)
            return out[:, 0]

        out = attend()
        return {
            (impl, "forward"): attend,
            (impl, "backward"): lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
            (impl, "both"): lambda: torch.autograd.grad(attend(), (q, k, v), dout),
        }

    calls = {key: call for impl in impls for key, call in passes(impl).items()}
    times = bench_in_turns(calls, device)
    return [_flash_row(tokens, head_dim, dtype, *key, device, samples) for key, samples in times.items()]


def _flash_row(
    tokens: int, head_dim: int, dtype: str, impl: str, kind: str, device: torch.device, samples: Sequence[float] = ()
) -> Row:
    weight = {"forward": 1.0, "backward": 2.5, "both": 3.5}[kind]
    needed = footprint(1, tokens, head_dim, getattr(torch, dtype).itemsize) / 2**20
    return record.row(
        record.environment(device), what="study flash", shape=f"1x{tokens}x{head_dim} causal", impl=impl, kind=kind,
        dtype=dtype, samples_ms=samples, tflop=weight * 2.0 * tokens**2 * head_dim / 1e12,
        more={"tokens": tokens, "head_dim": head_dim, "footprint_mib": needed},
    )  # fmt: skip


def bench_in_turns(calls: Mapping[K, Callable[[], Any]], device: torch.device) -> dict[K, list[float]]:
    """Milliseconds of the single runs of each call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        # A GPU is a tenth faster until it reaches its power limit: warm up until two medians of all calls agree.
        before = dict.fromkeys(calls, 0.0)
        for _ in range(8):
            times = {
                name: [float(t) for t in do_bench(call, warmup=20, rep=50, return_mode="all")]
                for name, call in calls.items()
            }
            now = {name: median(samples) for name, samples in times.items()}
            if all(abs(now[name] - before[name]) <= 0.01 * before[name] for name in calls):
                break
            before = now
        return times
    for call in calls.values():
        call()
    clocks = {name: partial(timed, call, device) for name, call in calls.items()}
    return {name: [ms for ms, _ in results] for name, results in in_turns(clocks, 3).items()}


def jobs(
    which: str, lengths: Sequence[int], head_dims: Sequence[int], device: torch.device, repeats: int
) -> list[sweep.Job]:
    """The jobs of a study."""
    shapes = [(tokens, head_dim) for head_dim in head_dims for tokens in lengths]
    if which == "eager":
        return [_eager_job(*shape, repeats, device, tuple(head_dims), EAGER_IMPLS) for shape in shapes]
    return [
        _flash_job(*shape, dtype, device, (min(lengths), max(lengths)), FLASH_IMPLS)
        for shape in shapes
        for dtype in ("bfloat16", "float32")
    ]


def _eager_job(
    tokens: int, head_dim: int, repeats: int, device: torch.device, head_dims: tuple[int, ...], impls: Sequence[str]
) -> sweep.Job:
    expected = tuple(
        _eager_row(tokens, head_dim, impl, kind, device, repeats=repeats) for impl in impls for kind in EAGER_KINDS
    )
    ready = partial(compile_plain, tokens, head_dims, device) if "compiled" in impls else None
    some = partial(_eager_job, tokens, head_dim, repeats, device, head_dims)
    return _job_of_turns(expected, partial(eager_rows, tokens, head_dim, impls, repeats, device), ready, some)


def _flash_job(
    tokens: int, head_dim: int, dtype: str, device: torch.device, lengths: tuple[int, int], impls: Sequence[str]
) -> sweep.Job:
    kinds = ("forward", "backward", "both")
    expected = tuple(_flash_row(tokens, head_dim, dtype, impl, kind, device) for impl in impls for kind in kinds)
    ready = partial(compile_ours, lengths, head_dim, dtype, device) if "flashspan" in impls else None
    some = partial(_flash_job, tokens, head_dim, dtype, device, lengths)
    return _job_of_turns(expected, partial(flash_rows, tokens, head_dim, dtype, impls, device), ready, some)


def _job_of_turns(
    expected: tuple[Row, ...],
    together: Callable[[], list[Row]],
    ready: partial[None] | None,
    some: Callable[[Sequence[str]], sweep.Job],
) -> sweep.Job:
    """Implementations that take turns. If they fail, each is measured alone, so that one failure costs few rows."""
    return sweep.Job(expected, partial(_measure, together, some, _impls(expected)), ready, part=partial(_part, some))


def _measure(
    together: Callable[[], list[Row]], some: Callable[[Sequence[str]], sweep.Job], impls: Sequence[str]
) -> list[Row]:
    try:
        return together()
    except Exception:  # Triton's errors are not RuntimeErrors
        if len(impls) == 1:
            raise
    # Here the error is out of scope, so the tensors in its frames are freed.
    return [row for impl in impls for row in sweep.attempt_here(some((impl,)))]


def _part(some: Callable[[Sequence[str]], sweep.Job], rows: Sequence[Row]) -> sweep.Job:
    return some(_impls(rows))


def _impls(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.impl for row in rows))


def compile_plain(tokens: int, head_dims: tuple[int, ...], device: torch.device) -> None:
    """Compile plain attention of this length to the disk cache. One head size after another: the scores are large."""
    from torch._inductor import config

    # Autotuning is repeated when it is measured, because other processes use the device now.
    with config.patch(autotune_local_cache=False):
        for head_dim in head_dims:
            eager_rows(tokens, head_dim, ("compiled",), 1, device)


def compile_ours(lengths: tuple[int, ...], head_dim: int, dtype: str, device: torch.device) -> None:
    """Compile our kernels to the disk cache. They depend on the length only through its divisibility."""
    for tokens in lengths:
        q, k, v = (torch.randn(1, 1, tokens, head_dim, device=device, dtype=getattr(torch, dtype)) for _ in range(3))
        for x in (q, k, v):
            x.requires_grad_()
        out: Tensor = attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def table(rows: Sequence[Row]) -> Table:
    """A table with a line per shape and dtype, a column per implementation and pass, and plain attention's memory."""

    def shape(row: Row) -> tuple[object, ...]:
        return (row.shape, row.dtype, f"{row.more['footprint_mib']:,.0f}")

    return pivot(
        "median milliseconds; MiB: memory of plain attention",
        rows,
        line=shape,
        names=("shape", "dtype", "MiB"),
        column=lambda row: f"{row.impl} {row.kind}",
        cell=lambda row: row.p50_ms,
    )


def memory_table(rows: Sequence[Row]) -> Table:
    """A table of the memory in use between forward and backward, with a line per shape."""
    return pivot(
        "MiB in use before backward",
        [row for row in rows if row.kind == "backward"],
        line=lambda row: (row.shape,),
        names=("shape",),
        column=lambda row: row.impl,
        cell=lambda row: row.peak_mib,
    )


def bench_study(
    which: Literal["eager", "flash"],
    *,
    lengths: tuple[int, ...] = (),
    head_dims: tuple[int, ...] = HEAD_DIMS,
    repeats: int | None = None,
    device: str = "auto",
    folder: Path = record.FOLDER,
    again: bool = False,
) -> int:
    """Plain PyTorch attention over lengths and head sizes (eager), and flashspan compared with it (flash); shapes
    that run out of memory are recorded as such.

    eager: batch 8, one head, plain attention, eager and compiled; forward, backward, memory before backward.

    flash: batch 1, causal, bfloat16 and float32; flashspan and plain attention; forward, backward, both.

    Args:
        which: Study: eager or flash.
        lengths: Sequence lengths; by default all lengths of the study on a GPU, 256 and 1024 on a CPU.
        head_dims: Head sizes.
        repeats: Number of passes of the eager study; 100 by default.
        device: Device type: auto, cpu or cuda.
        folder: Folder for the rows.
        again: Repetition of measurements that the folder already has.
    """
    place = record.find_device(device)
    if not lengths:
        lengths = (256, 1024) if place.type == "cpu" else EAGER_LENGTHS if which == "eager" else FLASH_LENGTHS
    if min(lengths) < 1:
        raise ValueError(f"a study needs lengths of 1 or more: got {' '.join(map(str, lengths))}")
    if not head_dims or not all(1 <= d <= 256 for d in head_dims):
        raise ValueError(f"a study needs head sizes 1 to 256: got {' '.join(map(str, head_dims)) or 'none'}")
    if which == "flash" and repeats is not None:
        raise ValueError(
            f"--repeats belongs to the eager study: got {repeats} for flash, which chooses its own number; leave it out"
        )
    repeats = 100 if repeats is None else repeats
    check_repeats(1, repeats=repeats)
    path = folder / "study.jsonl"
    outcome = sweep.run(jobs(which, lengths, head_dims, place, repeats), path, again=again, title=which)
    measured = which == "eager" and place.type == "cuda"  # on a CPU they would only be computed from the shapes
    shown = [table(outcome.rows)] + ([memory_table(outcome.rows)] if measured else [])
    show_tables(shown, outcome.note(path))
    return 0
