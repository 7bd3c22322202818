"""What the write-up measures, part by part, and how: see writeup.py for the commands and the page.

Every call of `measure` goes on where the last one stopped and ends after its minutes. First it compiles what is to be
measured, side by side on all cores; then it measures, alone on the GPU, in a process of its own that may die.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from flashspan.bench import memory, model, profile, record, study, sweep, trace
from flashspan.bench import precision as precisions
from flashspan.bench.model import Setting
from flashspan.bench.record import Row

SIZES = ("small", "medium", "large", "xl", "2.7B")
LENGTHS = (128, 256, 512, 1024)
LARGEST = "2.7B"
PASSES = ("inference", "training")
PROFILED = "profiled"  # the process of what profiles: a profiler once started may slow down every later launch
LIMIT = 90.0  # seconds of one job: several times what the longest should take
PREPARATION = 120.0  # seconds at most for compiling ahead
COMPILER = ("torch._inductor.compile_fx",)  # imported before the clock runs


def sections(device: torch.device) -> dict[str, list[sweep.Job]]:
    """The jobs of each part of the page, in the order of measuring: what tells most, and soonest, first.

    Parts may share jobs.
    """

    def models(sizes: Sequence[str], lengths: Sequence[int], dtype: str, **rest: object) -> list[sweep.Job]:
        return [
            model.job(Setting(size, 4, length, dtype, **{"attention": "plain", **rest}), device)  # type: ignore[arg-type]
            for length in lengths
            for size in sizes
        ]

    def profiles(*lengths: int) -> list[sweep.Job]:
        settings = [Setting(size, 4, n, "float32", "plain", warmup=2) for n in lengths for size in SIZES]
        return [profile_job(setting, kind, device) for setting in settings for kind in PASSES]

    drawn = Setting(LARGEST, 4, 128, "float32", "plain", warmup=1)
    long = [Setting("llama-3.2-1b", 1, length, "bfloat16") for length in (4096, 16384)]
    warmups = [Setting("small", 4, 128, "float32", "plain", warmup=number) for number in (0, 1, 2, 5)]
    return {
        "sizes": models(SIZES, (128,), "float32"),
        "mixed": [*models(SIZES, (128,), "float32"), *models(SIZES, (128,), "bfloat16")],
        "warm-up": [model.job(setting, device, fresh=True) for setting in warmups],
        "precision": [precision_job(device)],
        "memory": [
            *(timeline_job(drawn, kind, device) for kind in PASSES),
            *models((LARGEST,), (128,), "float32"),
            *models((LARGEST,), (256, 512), "float32", warmup=2, steps=3),
            *models((LARGEST,), (128, 256, 512), "bfloat16"),
        ],
        "flash": study.jobs("flash", study.FLASH_LENGTHS, study.HEAD_DIMS, device, 1),
        "profiles": profiles(256, 128),
        "attention": study.jobs("eager", study.EAGER_LENGTHS, study.HEAD_DIMS, device, 100),
        "compiled": models(SIZES, (128,), "bfloat16", compiled=True),
        "long profiles": profiles(512, 1024),
        "lengths": [
            *models(SIZES, LENGTHS[1:], "bfloat16"),
            *models(SIZES, (256, 1024), "bfloat16", attention="flashspan"),
            *(model.job(setting, device) for setting in long),
        ],
    }


def measurements(device: torch.device) -> list[sweep.Job]:
    """Every job once, in the order of measuring."""
    jobs = [job for part in sections(device).values() for job in part]
    return list({job.expected[0].key: job for job in jobs}.values())


def profile_job(setting: Setting, kind: str, device: torch.device) -> sweep.Job:
    """Kernels of an inference or of a training step, as a row: shares, the longest kernel, attention's parts."""
    measure = partial(measure_profile, setting, kind, device)
    return sweep.Job((profile_row(setting, kind, device),), measure, process=PROFILED)


def profile_row(setting: Setting, kind: str, device: torch.device, summary: profile.Summary | None = None) -> Row:
    """A row of `profile_job`, with or without its findings."""
    more: dict[str, object] = {"preset": setting.preset, "tokens": setting.tokens, "names": "short"}
    if summary is not None:
        more |= {
            "product_share": trace.share(summary.kernels, "product"),
            "other_share": trace.share(summary.kernels, "other"),
            "busy_ms": sum(k.milliseconds for k in summary.kernels),
            "top": [[k.short, k.milliseconds, k.count] for k in summary.kernels[:5]],
            "others": [[k.short, k.milliseconds] for k in summary.kernels if k.kind == "other"][:8],
            "parts": summary.parts,
            "head_dim": summary.head_dim,
        }
    return record.row(
        record.environment(device), what="profile", shape=setting.shape, impl=setting.impl, kind=kind,
        dtype=setting.dtype, samples_ms=[summary.wall_ms] if summary is not None else (), more=more,
    )  # fmt: skip


def measure_profile(setting: Setting, kind: str, device: torch.device) -> list[Row]:
    summary = profile.run_profile(setting, device, training=kind == "training")
    return [profile_row(setting, kind, device, summary)]


def timeline_job(setting: Setting, kind: str, device: torch.device) -> sweep.Job:
    """The memory of an inference or of a training step over time, as a row."""
    measure = partial(measure_timeline, setting, kind, device)
    return sweep.Job((timeline_row(setting, kind, device),), measure, process=PROFILED)


def timeline_row(setting: Setting, kind: str, device: torch.device, timeline: memory.Timeline | None = None) -> Row:
    """A row of `timeline_job`, with or without its timeline."""
    more: dict[str, object] = {"preset": setting.preset, "tokens": setting.tokens, "largest": "with how often"}
    if timeline is not None:
        more["timeline"] = asdict(memory.thin(timeline))
    return record.row(
        record.environment(device), what="memory", shape=setting.shape, impl=setting.impl, kind=kind,
        dtype=setting.dtype, peak_mib=float("nan") if timeline is None else timeline.peak / 2**20, more=more,
    )  # fmt: skip


def measure_timeline(setting: Setting, kind: str, device: torch.device) -> list[Row]:
    timeline = profile.memory_timeline(setting, device, training=kind == "training")
    return [timeline_row(setting, kind, device, timeline)]


def precision_job(device: torch.device) -> sweep.Job:
    """The mixed precision experiments as one row."""
    return sweep.Job((precision_row(device),), partial(measure_precision, device))


def precision_row(device: torch.device, **more: object) -> Row:
    return record.row(
        record.environment(device), what="precision", shape="toy", impl="autocast", kind="study", dtype="float16",
        more=more,
    )  # fmt: skip


def measure_precision(device: torch.device) -> list[Row]:
    return [
        precision_row(
            device,
            sums=precisions.accumulate(),
            float16=precisions.autocast_dtypes(device, torch.float16),
            bfloat16=precisions.autocast_dtypes(device, torch.bfloat16),
            squares=[[name, str(value)] for name, value in precisions.norm_in_half()],
        )
    ]


def measure(minutes: float, folder: Path, device: torch.device) -> int:
    """Measure for so long; how many jobs are left."""
    begin = time.monotonic()
    deadline = begin + 60 * minutes
    # Whoever compiles beside others, or while the clock runs, needs no further processes for it.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    jobs, path = measurements(device), folder / "writeup.jsonl"
    todo = sweep.left(jobs, path)
    if not todo:
        print(f"nothing left to measure; rows in {path}")
        return 0
    spares = 3 + sum(job.process is None for job in todo)  # one for each name, and one for what dies
    with sweep.Apart(limit=LIMIT, deadline=deadline, spares=spares, modules=COMPILER) as apart:
        if device.type == "cuda":
            num = sweep.prepare(todo, seconds=min(PREPARATION, 30 * minutes), modules=COMPILER)
            print(f"compiled ahead for {num} kinds of jobs in {time.monotonic() - begin:.0f} s", flush=True)
        outcome = sweep.run(jobs, path, attempt=apart, title="write-up")
    spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in outcome.seconds.items())
    print(f"{outcome.num_measured} measured in {time.monotonic() - begin:.0f} s ({spent}); "
          f"{outcome.num_left} left; rows in {path}")  # fmt: skip
    return outcome.num_left
