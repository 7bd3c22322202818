"""The write-up: its measurements, in parts, and the page made from their rows.

    python -m flashspan.bench.writeup measure --minutes 8.5     # on the GPU, again and again until nothing is left
    python -m flashspan.bench.writeup write                     # docs/writeup.md from the rows
    python -m flashspan.bench.writeup left                      # what is still to be measured, by section

Every call of `measure` goes on where the last one stopped and ends after its minutes. First it compiles what is to be
measured, side by side on all cores; then it measures, alone on the GPU, in a process of its own that may die. The page
says only what rows say; what is not measured yet is named as missing, section by section.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from flashspan.bench import memory, model, plots, profile, record, study, sweep, trace
from flashspan.bench import precision as precisions
from flashspan.bench.model import Setting
from flashspan.bench.record import Row
from flashspan.bench.tables import Table, make, pivot
from flashspan.model import preset

FOLDER = Path("docs/benchmarks/writeup")
PAGE = Path("docs/writeup.md")
SIZES = ("small", "medium", "large", "xl", "2.7B")
LENGTHS = (128, 256, 512, 1024)
LARGEST = "2.7B"
EAGER, COMPILED = "plain, eager", "plain, compiled"
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
    more: dict[str, object] = {"preset": setting.preset, "tokens": setting.tokens}
    if summary is not None:
        more |= {
            "product_share": trace.share(summary.kernels, "product"),
            "other_share": trace.share(summary.kernels, "other"),
            "top": [[k.name[:100], k.milliseconds, k.count] for k in summary.kernels[:5]],
            "others": [[k.name[:100], k.milliseconds] for k in summary.kernels if k.kind == "other"][:4],
            "parts": summary.parts,
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
    more: dict[str, object] = {"preset": setting.preset, "tokens": setting.tokens}
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


class Writer:
    """Makes the page. A section says what is missing of it, and which command would give it."""

    def __init__(self, rows: Sequence[Row], folder: Path) -> None:
        self.rows, self.folder = record.newest(rows), folder
        self.lines: list[str] = []
        self.parts = sections(torch.device("cpu"))  # for what they measure, wherever that was done

    def pick(self, what: str, *kinds: str, test: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        return [row for row in self.rows if row.what == what and (not kinds or row.kind in kinds) and test(row)]

    def say(self, *text: str) -> None:
        self.lines += [*text, ""]

    def table(self, table: Table) -> None:
        self.say(table.markdown().strip())

    def picture(self, name: str, figure: object, alt: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(plots.to_svg(figure, alt), encoding="utf-8")  # type: ignore[arg-type]
        self.say(f"![{alt}](benchmarks/writeup/{name})")

    def section(self, title: str, parts: Sequence[str], write: Callable[[Sequence[Row]], None]) -> None:
        jobs = list({job.expected[0].key: job for part in parts for job in self.parts[part]}.values())
        about = {row.subject for job in jobs for row in job.expected}
        rows = [row for row in self.rows if row.subject in about]
        known = {row.subject for row in rows if row.ok or row.status == record.OUT_OF_MEMORY}
        missing = [job.name for job in jobs if not all(row.subject in known for row in job.expected)]
        self.say(f"## {title}")
        if not any(row.ok for row in rows):
            self.say("Not measured yet: `python -m flashspan.bench.writeup measure` on a GPU gives the rows.")
            return
        write(rows)
        if missing:
            named = "; ".join(missing[:4]) + ("; ..." if len(missing) > 4 else "")
            self.say(f"Not measured yet: {len(missing)} of {len(jobs)} jobs of this section ({named}).")

    def page(self) -> str:
        places = dict.fromkeys(f"{row.device}, torch {row.torch}, Triton {row.triton}" for row in self.rows)
        self.say(
            "# Write-up",
            "",
            "Answers to the written questions of CS336's assignment 2 (systems), from measured rows: "
            f"{'; '.join(places) or 'none yet'}. Made by `python -m flashspan.bench.writeup write`; "
            "rows by `python -m flashspan.bench.writeup measure --minutes 8.5`, run until nothing is left.",
        )
        for title, parts, write in self.outline():
            self.section(title, parts, write)
        return "\n".join(self.lines).rstrip() + "\n"

    def outline(self) -> list[tuple[str, tuple[str, ...], Callable[[Sequence[Row]], None]]]:
        """The page's sections in order: title, the parts of the sweep it is made from, who writes it."""
        return [
            ("1.1.3 Forward and backward of every size", ("sizes",), self._sizes),
            ("1.1.3 (c) Warm-up", ("warm-up",), self._warmup),
            ("1.1.4 Profiles", ("profiles", "long profiles"), self._profiles),
            ("1.1.5 Accumulation and autocast", ("precision",), self._precision),
            ("1.1.5 (c) Mixed precision", ("mixed",), self._mixed),
            ("1.1.6 Memory", ("memory",), self._memory),
            ("1.2.1 Plain attention", ("attention",), self._eager),
            ("1.3.1 torch.compile", ("compiled",), self._compiled),
            ("1.3.2 (e) FlashAttention-2 beside PyTorch", ("flash",), self._flash),
            ("Longer contexts, and our attention in place of plain", ("lengths",), self._lengths),
        ]

    def _sizes(self, rows: Sequence[Row]) -> None:
        self.table(model.table(rows))
        steps = {row.more["preset"]: row for row in rows if row.kind == "training" and row.ok}
        ratios = []
        for name in steps:
            found = {row.kind: row.mean_ms for row in rows if row.more["preset"] == name and row.ok}
            ratios.append(found["backward"] / found["forward"])
        spread = max(row.std_ms / row.mean_ms for row in rows if row.ok)
        self.say(
            f"Backward takes {min(ratios):.2f} to {max(ratios):.2f} times as long as forward. The largest standard "
            f"deviation is {spread:.1%} of its mean."
        )

    def _warmup(self, rows: Sequence[Row]) -> None:
        self.table(model.table(rows))
        first = {row.more["warmup"]: row for row in rows if row.kind == "training" and row.ok}
        if 0 in first and 5 in first:
            cold, warm = first[0], first[5]
            self.say(
                f"Without warm-up the mean training step is {cold.mean_ms / warm.mean_ms:.2f} times that after five, "
                f"and its deviation {cold.std_ms / warm.std_ms:.0f} times as large: the first step loads kernels, "
                "chooses algorithms and fills the allocator's cache. What one or two steps leave over is in their rows."
            )

    def _profiles(self, rows: Sequence[Row]) -> None:
        done = [row for row in rows if row.ok]

        def top(row: Row) -> str:
            name, time, count = row.more["top"][0]
            return f"{name[:48]}: {time:.3g} ms, {count} calls"

        self.table(
            make(
                "",
                done,
                {
                    "model": lambda row: row.shape,
                    "pass": lambda row: row.kind,
                    "wall ms": lambda row: row.p50_ms,
                    "products": lambda row: f"{row.more['product_share']:.0%}",
                    "other": lambda row: f"{row.more['other_share']:.0%}",
                    "longest kernel": top,
                },
                2,
            )
        )
        if lost := [f"{row.shape} ({row.kind})" for row in rows if row.status == record.OUT_OF_MEMORY]:
            self.say(f"Out of memory: {', '.join(lost)}.")
        timed = {row.shape: row.mean_ms for row in self.pick("model", "inference") if row.dtype == "float32" and row.ok}
        pairs = [row for row in done if row.kind == "inference" and row.shape in timed]
        if pairs:
            ratio = [row.p50_ms / timed[row.shape] for row in pairs]
            self.say(
                f"(a) Forward under the profiler takes {min(ratio):.2f} to {max(ratio):.2f} times the benched time."
            )
        ways = {kind: [r.more["product_share"] for r in done if r.kind == kind] for kind in ("inference", "training")}
        if all(ways.values()):
            low, high = ({k: f"{pick(v):.0%}" for k, v in ways.items()} for pick in (min, max))
            self.say(
                f"(b, d) Matrix products take {low['inference']} to {high['inference']} of inference and "
                f"{low['training']} to {high['training']} of a training step with AdamW."
            )
        others = dict.fromkeys(name[:60] for row in done for name, _ in row.more["others"][:2])
        if others:
            self.say(f"(c) Besides products, the longest are: {'; '.join(list(others)[:5])}.")
        parts = [row for row in done if row.kind == "inference" and set(profile.PARTS) <= row.more["parts"].keys()]
        if parts:
            found = []
            for row in parts:
                p = row.more["parts"]
                found.append(p["attention softmax"] / (p["attention scores"] + p["attention values"]))
            self.say(
                f"(e) In attention, softmax takes {min(found):.2f} to {max(found):.2f} of the time of the two products "
                "(with scaling and mask), for a small part of their operations: it is bound by memory."
            )

    def _precision(self, rows: Sequence[Row]) -> None:
        more = rows[-1].more
        self.table(Table("", ("accumulation", "sum (10 is right)"), tuple((n, f"{v:.6f}") for n, v in more["sums"])))
        half, brain = (dict(map(tuple, more[name])) for name in ("float16", "bfloat16"))
        self.table(
            Table("", ("part", "float16 autocast", "bfloat16 autocast"), tuple((k, half[k], brain[k]) for k in half), 3)
        )
        self.table(Table("", ("mean square of 250..350", "value"), tuple(map(tuple, more["squares"]))))
        self.say(
            "The sum itself must be wide: a float16 sum stops resolving its addend as it grows, while float16 addends "
            "into a float32 sum bring only the rounding of 0.01, converted before or not. A norm's mean square "
            "overflows float16 and keeps its range in bfloat16, but with three digits: both are better in float32."
        )

    def _mixed(self, rows: Sequence[Row]) -> None:
        self.table(
            pivot(
                "",
                [row for row in rows if row.kind in ("forward", "backward")],
                line=lambda row: (row.more["preset"],),
                names=("model",),
                column=lambda row: f"{row.kind} {row.dtype}",
                cell=lambda row: row.mean_ms,
            )
        )
        gains = []
        for name in SIZES:
            both = {r.dtype: r.mean_ms for r in rows if r.kind == "training" and r.ok and r.more["preset"] == name}
            if len(both) == 2:
                gains.append((both["float32"] / both["bfloat16"], name))
        if gains:
            self.say(
                f"A training step in bfloat16 is {min(gains)[0]:.2f} ({min(gains)[1]}) to {max(gains)[0]:.2f} "
                f"({max(gains)[1]}) times as fast: the larger the products, the more of the time they are."
            )

    def _memory(self, rows: Sequence[Row]) -> None:
        drawn = {row.kind: row for row in rows if row.what == "memory" and row.ok}
        for kind, row in drawn.items():
            timeline = memory.Timeline(**row.more["timeline"])
            title = f"{row.shape} {row.dtype}: active memory, {kind}"
            self.picture(f"memory-{kind}.svg", memory.draw(timeline, title), title)
        if "training" in drawn:
            timeline = memory.Timeline(**drawn["training"].more["timeline"])
            peaks = {phase: timeline.peak_of(phase) / 2**30 for phase in ("forward", "backward", "optimizer")}
            listed = ", ".join(f"{phase} {peak:.1f} GiB" for phase, peak in peaks.items() if peak)
            self.say(
                f"(a) Forward piles up what backward needs and backward takes it down again, layer by layer, while "
                f"gradients grow. Peaks of the phases of a training step: {listed}."
            )
        self.table(
            pivot(
                "",
                [row for row in rows if row.what == "model" and row.kind in PASSES],
                line=lambda row: (row.more["tokens"],),
                names=("tokens",),
                column=lambda row: f"{row.kind} {row.dtype}, GiB",
                cell=lambda row: row.peak_mib / 1024,
            )
        )
        width = preset(LARGEST).width
        self.say(
            f"(d) One tensor of the residual stream, 4 samples of 512 tokens of width {width} in float32, is "
            f"4 x 512 x {width} x 4 / 1024² = {4 * 512 * width * 4 / 2**20:.0f} MiB."
        )
        if "inference" in drawn and (largest := drawn["inference"].more["timeline"]["largest"]):
            listed = "; ".join(
                dict.fromkeys(f"{size / 2**20:.1f} MiB in {where or 'no range'}" for size, where in largest)
            )
            self.say(f"(e) The largest allocations of inference: {listed}.")

    def _eager(self, rows: Sequence[Row]) -> None:
        self.table(study.table(rows))
        self.say("MiB in use before backward:")
        self.table(study.memory_table(rows))
        lost = sorted(
            (row for row in rows if row.status == record.OUT_OF_MEMORY), key=lambda r: r.more["footprint_mib"]
        )
        if lost:
            self.say(
                f"The smallest that runs out of memory is {lost[0].shape}: plain attention needs "
                f"{lost[0].more['footprint_mib'] / 1024:.1f} GiB there, four squares of scores and their gradients."
            )
        else:
            worst = max(rows, key=lambda r: r.more["footprint_mib"])
            self.say(
                f"Nothing ran out of memory: the largest, {worst.shape}, is {worst.more['footprint_mib'] / 1024:.0f} "
                "GiB of plain attention."
            )
        self.say(
            "What is kept for backward grows with the square of the length; attention that recomputes tiles of the "
            "scores from the saved log-sum-exp keeps none of it."
        )

    def _compiled(self, rows: Sequence[Row]) -> None:
        """Beside the same settings, eager."""
        same = {(row.shape, row.dtype) for row in rows}
        beside = self.pick("model", "forward", "training", test=lambda r: (r.shape, r.dtype) in same)
        self.table(
            pivot(
                "",
                [row for row in beside if row.impl in (EAGER, COMPILED)],
                line=lambda row: (row.shape,),
                names=("model",),
                column=lambda row: f"{row.kind} {row.impl.split(', ')[1]}",
                cell=lambda row: row.mean_ms,
            )
        )
        self.say("Attention alone, eager and compiled, is in the table of 1.2.1.")

    def _flash(self, rows: Sequence[Row]) -> None:
        self.table(study.table(rows))
        for dtype in ("bfloat16", "float32"):
            both = [row for row in rows if row.kind == "both" and row.dtype == dtype and row.more["head_dim"] == 64]
            series = plots.by(both, lambda r: r.impl, lambda r: r.more["tokens"], lambda r: r.p50_ms)
            if series:
                figure = plots.lines(series, title=f"forward and backward, head size 64, {dtype}", x="tokens",
                                     y="milliseconds", log_x=True, log_y=True)  # fmt: skip
                self.picture(f"flash-{dtype}.svg", figure, f"forward and backward over length, {dtype}")
        ours = {(r.shape, r.dtype): r.p50_ms for r in rows if r.impl == "flashspan" and r.kind == "both" and r.ok}
        ratios = {
            (r.shape, r.dtype): r.p50_ms / ours[r.shape, r.dtype]
            for r in rows
            if r.impl == "pytorch" and r.kind == "both" and r.ok and (r.shape, r.dtype) in ours
        }
        if ratios:
            best = max(ratios, key=lambda key: ratios[key])
            self.say(
                f"Both passes: ours is {min(ratios.values()):.2f} to {ratios[best]:.1f} times as fast, most at "
                f"{best[0]} in {best[1]}."
            )

    def _lengths(self, rows: Sequence[Row]) -> None:
        steps = [row for row in rows if row.kind == "training"]
        for what, cell in (("ms", lambda row: row.mean_ms), ("GiB", lambda row: row.peak_mib / 1024)):
            self.say(f"A training step in bfloat16, {what}:")
            self.table(
                pivot(
                    "",
                    steps,
                    line=lambda row: (row.more["preset"], row.more["tokens"]),
                    names=("model", "tokens"),
                    column=lambda row: row.more["attention"],
                    cell=cell,
                )
            )
        times = {(row.shape, row.more["attention"]): row.mean_ms for row in steps if row.ok}
        gains = [times[shape, "plain"] / t for (shape, kind), t in times.items()
                 if kind == "flashspan" and (shape, "plain") in times]  # fmt: skip
        if gains:
            self.say(f"With our attention a step is {min(gains):.2f} to {max(gains):.2f} times as fast.")


def write(folder: Path, page: Path) -> None:
    """Make the page from the rows there are."""
    file = folder / "writeup.jsonl"
    rows = record.read(file) if file.exists() else []
    page.write_text(Writer(rows, folder).page(), encoding="utf-8")
    print(f"wrote {page} from {len(rows)} rows")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measurements of the write-up, and its page.")
    parser.add_argument("what", choices=("measure", "left", "write"))
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="end then; what is being measured is left for the next call"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args(arguments)
    if chosen.what == "write":
        write(chosen.folder, chosen.page)
    elif chosen.what == "measure":
        measure(chosen.minutes, chosen.folder, record.find_device("cuda"))
    else:
        device, path = record.find_device("auto"), chosen.folder / "writeup.jsonl"
        for part, jobs in sections(device).items():
            print(f"{part}: {len(sweep.left(jobs, path))} of {len(jobs)} jobs left")
        print(f"{len(sweep.left(measurements(device), path))} jobs left")


if __name__ == "__main__":
    main()
