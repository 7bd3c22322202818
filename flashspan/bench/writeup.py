"""The write-up: its commands, and the page made from the rows that writeup_jobs.py and leaderboard.py measure.

    python -m flashspan.bench.writeup measure --minutes 8.5     # on the GPU, again and again until nothing is left
    python -m flashspan.bench.writeup write                     # docs/writeup.md from the rows
    python -m flashspan.bench.writeup left                      # what is still to be measured, by section

The page says only what rows say; what is not measured yet is named as missing, section by section.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flashspan.bench import leaderboard, memory, model, plots, profile, record, study, sweep, writeup_jobs
from flashspan.bench.record import Row
from flashspan.bench.slower import Pair, where_slower
from flashspan.bench.tables import Table, make, pivot
from flashspan.bench.writeup_jobs import LARGEST, PASSES, SIZES
from flashspan.bench.writeup_page import Page, Section, ends, same_visit
from flashspan.model import preset

FOLDER = Path("docs/benchmarks/writeup")
PAGE = Path("docs/writeup.md")
EAGER, COMPILED = "plain, eager", "plain, compiled"
DRAWN = (64, 128)  # head sizes of the figures
APART = 0.1  # two times of the same settings that differ by more, as a share of the smaller, are told of


class Writer(Page):
    """What each section says."""

    def outline(self) -> list[Section]:
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
            ("1.3.3 Leaderboard", (), self._leaderboard),
            ("Longer contexts, and our attention in place of plain", ("lengths",), self._lengths),
        ]

    def _sizes(self, rows: Sequence[Row]) -> None:
        self.table(model.table(rows))
        steps = {row.more["preset"]: row for row in rows if row.kind == "training" and row.ok}
        ratios = []
        for name in steps:
            found = {row.kind: row.mean_ms for row in rows if row.more["preset"] == name and row.ok}
            ratios.append((found["backward"] / found["forward"], name))
        spread = max(row.std_ms / row.mean_ms for row in rows if row.ok)
        self.say(
            f"Backward takes {ends(ratios)} times as long as forward. The largest standard deviation is "
            f"{spread:.1%} of its mean."
        )

    def _warmup(self, rows: Sequence[Row]) -> None:
        self.table(model.table(rows))
        first = {row.more["warmup"]: row for row in rows if row.kind == "training" and row.ok}
        if {0, 1, 2, 5} <= first.keys():
            mean, spread = ([getattr(first[n], name) for n in (0, 1, 2, 5)] for name in ("mean_ms", "std_ms"))
            self.say(
                f"Without warm-up the mean training step is {mean[0] / mean[3]:.2f} times that after five, and its "
                f"deviation {spread[0] / spread[3]:.0f} times as large: the first step loads kernels, chooses "
                f"algorithms and fills the allocator's cache. After one step the mean is {mean[1] / mean[3]:.2f} times "
                f"it and after two {mean[2] / mean[3]:.2f} times, with {spread[1] / spread[3]:.1f} and "
                f"{spread[2] / spread[3]:.1f} times its deviation: what is left is how evenly the host launches."
            )
            self._say_other_minutes(first[5])

    def _say_other_minutes(self, row: Row) -> None:
        """Where the table of sizes has another time for the very settings of this training step: why."""
        others = self.pick("model", row.kind, test=lambda r: r.ok and r.impl == EAGER)
        found = [r for r in others if (r.shape, r.dtype) == (row.shape, row.dtype)]
        profiles = self.pick("profile", row.kind, test=lambda r: r.ok and r.shape == row.shape)
        busy = profiles[0].more["busy_ms"] if profiles else float("inf")
        for other in found:
            low, high = sorted((other.mean_ms, row.mean_ms))
            if other.more["warmup"] != row.more["warmup"] or high - low <= APART * low:
                continue
            waits = f": a step that is bound by the host's launches, as its kernels take {busy:.1f} ms of it (1.1.4)"
            self.say(
                f"The table of sizes has {other.mean_ms:.2f} ms for the training step that has {row.mean_ms:.2f} here, "
                f"with the same settings {'and' if same_visit(row, other) else 'but not'} the same commit, in "
                f"another process and other minutes{waits if busy < low else ''}."
            )

    def _profiles(self, rows: Sequence[Row]) -> None:
        done = [row for row in rows if row.ok]

        def top(row: Row) -> str:
            name, time, count = row.more["top"][0]
            return f"{name}: {time:.3g} ms, {count} calls"

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
            ratios = [(row.p50_ms / timed[row.shape], row.shape) for row in pairs]
            self.say(f"(a) Forward under the profiler takes {ends(ratios)} times the benched time.")
        ways = {kind: [r.more["product_share"] for r in done if r.kind == kind] for kind in ("inference", "training")}
        if all(ways.values()):
            low, high = ({k: f"{pick(v):.0%}" for k, v in ways.items()} for pick in (min, max))
            self.say(
                f"(b, d) Matrix products take {low['inference']} to {high['inference']} of inference and "
                f"{low['training']} to {high['training']} of a training step with AdamW."
            )
            self._say_which_kernels(done)
        parts = [row for row in done if row.kind == "inference" and set(profile.PARTS) <= row.more["parts"].keys()]
        if parts:
            found, prepared = [], []
            for row in parts:
                scores, scaled, softmax, values = (row.more["parts"][part] for part in profile.PARTS)
                found.append(softmax / (scores + values))
                prepared.append(scaled / (scores + values))
            operations = [profile.flop_ratio(row.more["head_dim"]) for row in parts]
            self.say(
                f"(e) In attention, softmax takes {min(found):.2f} to {max(found):.2f} of the time of the two "
                f"products, for {min(operations):.3f} to {max(operations):.3f} of their operations: it is bound by "
                f"memory. So are scaling and mask, which take {min(prepared):.2f} to {max(prepared):.2f} of it."
            )

    def _say_which_kernels(self, rows: Sequence[Row]) -> None:
        """The longest kernel of inference and of training, and what else there is."""
        longest = {(row.shape, row.kind): row.more["top"][0][0] for row in rows}
        both = [shape for shape, kind in longest if kind == "inference" and (shape, "training") in longest]
        same = [shape for shape in both if longest[shape, "inference"] == longest[shape, "training"]]
        products = all("gemm" in name for name in longest.values())
        self.say(
            f"(b) In {len(same)} of {len(both)} cases inference and a training step have the same longest kernel."
            + (" It is a product everywhere." if products else "")
        )
        for kind in PASSES:
            shares: dict[str, list[float]] = {}
            for row in rows:
                if row.kind == kind:
                    for name, time in row.more["others"]:
                        shares.setdefault(name, []).append(time / row.more["busy_ms"])
            most = sorted(shares, key=lambda name: -max(shares[name]))[:5]
            listed = "; ".join(f"{name} up to {max(shares[name]):.0%}" for name in most)
            part = "(c) Besides products, in inference" if kind == "inference" else "(d) And in a training step"
            self.say(f"{part}: {listed}.")

    def _precision(self, rows: Sequence[Row]) -> None:
        more = rows[-1].more
        self.table(Table("", ("accumulation", "sum (10 is right)"), tuple((n, f"{v:.6g}") for n, v in more["sums"])))
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
                [row for row in rows if row.kind in ("forward", "backward", "training")],
                line=lambda row: (row.more["preset"],),
                names=("model",),
                column=lambda row: f"{row.kind} {row.dtype}",
                cell=lambda row: row.mean_ms,
            )
        )
        gains = []
        for name in SIZES:
            both = {r.dtype: r for r in rows if r.kind == "training" and r.ok and r.more["preset"] == name}
            if len(both) == 2 and same_visit(*both.values()):
                gains.append((both["float32"].mean_ms / both["bfloat16"].mean_ms, name))
        if gains:
            listed = ", ".join(f"{gain:.2f} ({name})" for gain, name in gains)
            self.say(
                f"A training step in bfloat16 is so many times as fast: {listed}. It is the products that gain; a step "
                "that waits for the host, as those of small models do, gains nothing."
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
            growing = ", which are more: memory grows on" if peaks["backward"] > peaks["forward"] else ""
            self.say(
                "(a) Forward piles up what backward needs, and backward frees it layer by layer while gradients "
                f"come{growing}. Peaks of the phases of a training step: {listed}."
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
        self._say_mixed_memory([row for row in rows if row.what == "model" and row.kind in PASSES and row.ok])
        width = preset(LARGEST).width
        self.say(
            f"(d) One tensor of the residual stream, 4 samples of 512 tokens of width {width} in float32, is "
            f"4 x 512 x {width} x 4 / 1024² = {4 * 512 * width * 4 / 2**20:.0f} MiB."
        )
        if "inference" in drawn and (largest := drawn["inference"].more["timeline"]["largest"]):
            listed = "; ".join(
                f"{number} x {size / 2**20:.1f} MiB in {where or 'no range'}" for size, where, number in largest[:8]
            )
            self.say(f"(e) The largest allocations of inference: {listed}.")

    def _say_mixed_memory(self, rows: Sequence[Row]) -> None:
        """What autocast does to the peaks of the table."""
        peaks = {(row.kind, row.dtype, row.more["tokens"]): row.peak_mib / 1024 for row in rows}
        more = {
            kind: [
                peaks[kind, "bfloat16", tokens] - peak
                for (kind_of, dtype, tokens), peak in peaks.items()
                if kind_of == kind and dtype == "float32" and (kind, "bfloat16", tokens) in peaks
            ]
            for kind in PASSES
        }
        if not all(more.values()):
            return
        spans = {kind: f"{min(found):+.1f} to {max(found):+.1f} GiB" for kind, found in more.items()}
        copies = preset(LARGEST).num_parameters * 2 / 2**30
        self.say(
            f"(c) Mixed precision, beside float32: inference {spans['inference']}, a training step "
            f"{spans['training']}. Weights, gradients and moments stay in float32, and autocast keeps a copy of each "
            f"weight in bfloat16 ({copies:.1f} GiB) for as long as a pass lasts: only what backward needs is smaller."
        )

    def _eager(self, rows: Sequence[Row]) -> None:
        self.table(study.table(rows))
        self.say("MiB in use before backward:")
        self.table(study.memory_table(rows))
        lost = sorted(
            (row for row in rows if row.status == record.OUT_OF_MEMORY), key=lambda r: r.more["footprint_mib"]
        )
        least = min((row for row in rows if row.ok), key=lambda row: row.peak_mib)
        held = study.saved_bytes(least.more["tokens"], least.more["head_dim"]) / 2**20
        self.say(
            f"The smallest number, {least.peak_mib:.0f} MiB at {least.shape}, is of {held:.1f} MiB of tensors: the "
            "rest is the workspace of the libraries, and in every number."
        )
        told = lost[0] if lost else max(rows, key=lambda row: row.more["footprint_mib"])
        T, d, gib = told.more["tokens"], told.more["head_dim"], told.more["footprint_mib"] / 1024
        what = "The smallest that runs out of memory is" if lost else "Nothing ran out of memory. The largest is"
        self.say(
            f"{what} {told.shape}: plain attention needs {study.BATCH} x (4 x {T}² + 8 x {T} x {d}) x 4 bytes = "
            f"{gib:.1f} GiB there, scores and softmax with a gradient each, which are squares, and q, k, v and the "
            "output with theirs."
        )
        self.say(
            "What is kept for backward grows with the square of the length; attention that recomputes tiles of the "
            "scores from the saved log-sum-exp keeps none of it."
        )

    def _compiled(self, rows: Sequence[Row]) -> None:
        """Beside the same settings, eager."""
        same = {(row.shape, row.dtype) for row in rows}
        beside = self.pick("model", *PASSES, test=lambda r: (r.shape, r.dtype) in same)
        self.say(f"Milliseconds in {' and '.join(sorted({row.dtype for row in rows}))}, plain attention:")
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
        for kind in PASSES:
            found = {(row.impl, row.shape): row for row in beside if row.kind == kind and row.ok}
            gains = [
                (found[EAGER, shape].mean_ms / compiled.mean_ms, shape.split()[0])
                for (impl, shape), compiled in found.items()
                if impl == COMPILED and (EAGER, shape) in found and same_visit(found[EAGER, shape], compiled)
            ]
            if gains:
                what = "Forward" if kind == "inference" else "A training step"
                self.say(f"{what} is {ends(gains)} times as fast compiled.")
        self.say(
            "The compiler fuses what lies between products (norms, rotations, SwiGLU, softmax), whose time goes into "
            "reading and writing memory and, in small models, into launches. Attention alone is in the table of 1.2.1."
        )

    def _flash(self, rows: Sequence[Row]) -> None:
        self.table(study.table(rows))
        both = [row for row in rows if row.kind == "both" and row.ok]
        for dtype in ("bfloat16", "float32"):
            drawn = [row for row in both if row.dtype == dtype and row.more["head_dim"] in DRAWN]
            series = plots.by(drawn, lambda r: f"{r.impl}, head size {r.more['head_dim']}",
                              lambda r: r.more["tokens"], lambda r: r.p50_ms)  # fmt: skip
            if series:
                figure = plots.lines(series, title=f"forward and backward, {dtype}", x="tokens", y="milliseconds",
                                     log_x=True, log_y=True)  # fmt: skip
                self.picture(f"flash-{dtype}.svg", figure, f"forward and backward over length, {dtype}")
        theirs = {(row.shape, row.dtype): row for row in both if row.impl == "pytorch"}
        pairs = [
            Pair(row, theirs[row.shape, row.dtype])
            for row in both
            if row.impl == "flashspan" and (row.shape, row.dtype) in theirs
        ]
        if pairs:
            found = [(pair.ratio, f"{pair.ours.shape} in {pair.ours.dtype}") for pair in pairs]
            self.say(f"Both passes: ours is {ends(found)} times as fast.")
            for paragraph in where_slower(pairs):
                self.say(paragraph)

    def _leaderboard(self, rows: Sequence[Row]) -> None:
        """Rows of the course's test, which has a command of its own."""
        found = [row for row in rows if row.what == "leaderboard" and row.ok]
        command = "`flashspan bench leaderboard`"
        if not found:
            self.say(f"Not measured yet: {command} on a GPU gives the rows.")
            return
        self.table(
            make(
                "",
                found,
                {
                    "implementation": lambda row: row.impl,
                    "shape": lambda row: row.shape,
                    "commit": lambda row: row.commit,
                    "ms": lambda row: row.p50_ms,
                    "20th to 80th percentile": lambda row: f"{row.p20_ms:.3f} to {row.p80_ms:.3f}",
                    "TFLOP/s": lambda row: row.tflops,
                    "error": lambda row: f"{row.error:.2e}",
                },
                3,
            )
        )
        self.say(
            f"{command} runs the course's test on {' and '.join(dict.fromkeys(row.device for row in found))}, where "
            "the course has an H100: bfloat16, compiled, forward, the sum of the output as the loss, backward. "
            "Milliseconds are the median of `do_bench` with the course's warm-up and repetitions. Untraced, the "
            "compiler leaves our call as it is. The kernels are in Gluon, [a part of Triton](kernels.md). The error is "
            "the output's, against float32 arithmetic."
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
        self._say_what_no_job_measures(steps)
        found = {(row.shape, row.more["attention"]): row for row in steps if row.ok}
        gains = [
            (found[shape, "plain"].mean_ms / ours.mean_ms, shape)
            for (shape, kind), ours in found.items()
            if kind == "flashspan" and (shape, "plain") in found and same_visit(found[shape, "plain"], ours)
        ]
        if gains:
            self.say(f"With our attention a step is {ends(gains)} times as fast.")

    def _say_what_no_job_measures(self, steps: Sequence[Row]) -> None:
        """Why cells of the tables of `_lengths` are empty, other than those that are to be measured yet."""
        asked = {
            (row.more["attention"], row.more["preset"], row.more["tokens"])
            for job in self.parts["lengths"]
            for row in job.expected
        }
        lines = {(row.more["preset"], row.more["tokens"]) for row in steps}
        parts = []
        for kind in sorted({row.more["attention"] for row in steps}):
            lengths = sorted({tokens for name, tokens in lines if (kind, name, tokens) not in asked})
            if lengths:
                parts.append(f"{kind} attention at {' and '.join(map(str, lengths))} tokens")
        if parts:
            self.say(f"Empty cells were never measured, because no job of the sweep asks for them: {', '.join(parts)}.")


def read_rows(folder: Path) -> list[Row]:
    """Those of the sweep, and the leaderboard's, which lie beside the folder."""
    files = (folder / "writeup.jsonl", folder.parent / leaderboard.PATH.name)
    return [row for file in files if file.exists() for row in record.read(file)]


def write(folder: Path, page: Path) -> None:
    """Make the page from the rows there are."""
    rows = read_rows(folder)
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
        writeup_jobs.measure(chosen.minutes, chosen.folder, record.find_device("cuda"))
    else:
        device, path = record.find_device("auto"), chosen.folder / "writeup.jsonl"
        for part, jobs in writeup_jobs.sections(device).items():
            print(f"{part}: {len(sweep.left(jobs, path))} of {len(jobs)} jobs left")
        print(f"{len(sweep.left(writeup_jobs.measurements(device), path))} jobs left")


if __name__ == "__main__":
    main()
