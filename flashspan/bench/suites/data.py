"""One training step under every strategy of `flashspan.parallel`, on 1 to 8 ranks of this machine, in one run.

    flashspan bench data --ranks 2 4         # appends rows to data.jsonl, prints tables

Ranks use GPUs if there are enough for the largest number of ranks, and are CPU processes otherwise.

All strategies take turns, step by step in changing order, so that other load of the machine affects them equally.
All have the same global batch: data strategies split its samples, context its sequences, tensor strategies the layers.
`hybrid` is the tensor strategy with sparse attention: a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flashspan.bench.measure import record
from flashspan.bench.measure.clock import check_repeats, here, timed
from flashspan.bench.measure.ledger import Ledger, Transformer, predict
from flashspan.bench.measure.memory import free_bytes
from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import Table, make, show_tables
from flashspan.bench.suites.data_strategies import SIZES, SPLIT_BY, STRATEGIES, WINDOW, prepare
from flashspan.launch import Ranks
from flashspan.parallel import DataParallel
from flashspan.progress import progress

LENGTH = 128
PROFILED = 3  # steps that are profiled, separate from the timed ones: profiling slows the host down
MIB = 2**20
WIRE = (
    '"communication ms" and "hidden" have two meanings, which are not comparable. On CPUs, for strategies that reduce '
    'gradients by DataParallel (naive to bucketed, sharded optimizer, context), "communication ms" is that reduction '
    'only, and "hidden" is the part of it before backward ended. For the others, and for all on GPUs, both are from a '
    'profile: "communication ms" is every collective of a step, including waiting, and "hidden" is the part during '
    "which the rank also computed."
)


def sizes_of(width: int, layers: int, heads: int, kv_heads: int) -> Transformer:
    """The model with these sizes and an MLP 8/3 as wide; ValueError for invalid sizes."""
    given = {"--width": width, "--layers": layers, "--heads": heads, "--kv-heads": kv_heads}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more: got {value}")
    if width % heads or heads % kv_heads or width // heads > 256:
        raise ValueError(
            "heads must divide the width, kv heads must divide the heads, and a head has at most 256 features: "
            f"got width {width}, {heads} heads and {kv_heads} kv heads; change --width, --heads or --kv-heads"
        )
    ffn_width = 16 * -(-8 * width // (3 * 16))
    return replace(SIZES, width=width, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, ffn_width=ffn_width)


def fitting(names: Sequence[str], num_ranks: int, sizes: Transformer = SIZES) -> list[str]:
    """The strategies that are possible with this number of ranks: tensor parallelism cannot split a head. ValueError if
    there are none."""
    whole = sizes.num_kv_heads % num_ranks == 0
    found = [name for name in names if whole or not name.startswith(("tensor", "hybrid"))]
    if not found:
        raise ValueError(
            f"tensor parallelism needs a number of ranks that divides the {sizes.num_kv_heads} kv heads: "
            f"got {num_ranks} for {', '.join(names)}; use other --ranks or --kv-heads, or add strategies to --only"
        )
    return found


def refuse_large(names: Sequence[str], num_ranks: int, sizes: Transformer, tokens: int, device_type: str) -> None:
    """ValueError if a CPU's memory is too small, before ranks are started: each rank has all strategies at once."""
    count = num_ranks * tokens  # per step, on all ranks
    needed = sum(predict(sizes, SPLIT_BY.get(name, "data"), num_ranks=num_ranks, tokens=count).total for name in names)
    needed *= num_ranks
    free = free_bytes(device_type) if device_type == "cpu" else None
    if free is not None and needed > free:
        raise ValueError(
            f"bench data must fit in memory: {len(names)} strategies on {num_ranks} ranks need {needed / 2**30:,.1f} "
            f"GiB, but {free / 2**30:,.1f} are available; use fewer in --only, or a smaller model or --batch"
        )


def shape_of(sizes: Transformer, window: int, batch: int, length: int) -> str:
    """The shape in rows. Heads and window are included only if they are not the defaults, since earlier rows do not
    have them."""
    usual = (sizes.num_heads, sizes.num_kv_heads, window) == (SIZES.num_heads, SIZES.num_kv_heads, WINDOW)
    named = "" if usual else f", {sizes.num_heads}/{sizes.num_kv_heads} heads, window {window},"
    return f"{sizes.num_layers}x{sizes.width}{named} {batch}x{length} per rank"


def measure_ranks(
    num_ranks: int,
    names: Sequence[str],
    *,
    rounds: int,
    batch: int,
    length: int = LENGTH,
    window: int = WINDOW,
    sizes: Transformer = SIZES,
    device_type: str = "cpu",
) -> list[Row]:
    """Rows for these strategies, if possible with this number of ranks, measured in turns on ranks started for it.

    Times are those of a step on the slowest rank; memory is that of rank 0.
    """
    names = fitting(names, num_ranks, sizes)
    backend = "nccl" if device_type == "cuda" else "gloo"
    title = f"{len(names)} strategies on {num_ranks} ranks"
    with progress(title), Ranks(num_ranks, backend=backend, timeout=300) as ranks:
        results = ranks.run(_take_turns, names, sizes, batch, length, window, rounds, device_type, timeout=1800)
    shape = shape_of(sizes, window, batch, length)
    where = record.environment(torch.device(device_type))
    rows = []
    for name in names:
        first = results[0][name]
        ledger: Ledger = first["ledger"]
        expected = predict(sizes, first["strategy"], num_ranks=num_ranks, tokens=num_ranks * batch * length)
        rows.append(
            record.row(
                where,
                what="data",
                shape=shape,
                impl=name,
                kind="step",
                dtype="float32",
                ranks=num_ranks,
                samples_ms=[max(times) for times in zip(*(r[name]["steps"] for r in results), strict=True)],
                peak_mib=ledger.total / MIB,
                more={
                    "communication_ms": first["communication"],  # see WIRE
                    "hidden": first["hidden"],  # the share of it that computation hid
                    "parameters_mib": ledger.parameters / MIB,
                    "gradients_mib": ledger.gradients / MIB,
                    "optimizer_mib": ledger.optimizer / MIB,
                    "activations_mib": ledger.activations / MIB,
                    "predicted_mib": expected.total / MIB,  # the sum of the four
                },
            )
        )
    return rows


def _take_turns(
    names: list[str], sizes: Transformer, batch: int, length: int, window: int, rounds: int, device_type: str
) -> dict[str, Any]:
    """Run on each rank: steps of all strategies in turns; returns the times and the memory of each."""
    device = here(device_type)
    prepared = {name: prepare(name, sizes, batch, length, window, device) for name in names}
    ledgers = {name: case.ledger() for name, case in prepared.items()}  # also the first warm-up
    steps: dict[str, list[float]] = {name: [] for name in names}
    traffic: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            case = prepared[name]
            elapsed, _ = timed(case.step, device, together=True)
            if turn:  # the first is a warm-up step
                steps[name].append(elapsed)
                # On a GPU, the host's clock would only time the launch of a reduction.
                if isinstance(case.running, DataParallel) and device.type == "cpu":
                    spent = case.running.traffic
                    traffic[name].append((1e3 * spent.communication, spent.hidden))
    for name in names:  # after all timed steps
        if not traffic[name]:
            traffic[name] = [prepared[name].watch(device) for _ in range(PROFILED)]
    return {
        name: {
            "strategy": prepared[name].strategy,
            "steps": steps[name],
            "ledger": ledgers[name],
            "communication": median(c for c, _ in traffic[name]),
            "hidden": median(h for _, h in traffic[name]),
        }
        for name in names
    }


def table(rows: Sequence[Row]) -> Table:
    """A table of rows with one number of ranks."""
    rows = [record.kept(row) for row in rows]
    best = min(row.p50_ms for row in rows)

    def more(name: str) -> Callable[[Row], object]:
        return lambda row: row.more[name]

    return make(
        f"{rows[0].ranks} ranks, {rows[0].shape}: milliseconds of a step, MiB of a rank",
        rows,
        {
            "strategy": lambda row: row.impl,
            "ms": lambda row: row.p50_ms,
            "/ best": lambda row: row.p50_ms / best,
            "p20": lambda row: row.p20_ms,
            "p80": lambda row: row.p80_ms,
            "communication ms": more("communication_ms"),
            "hidden": more("hidden"),
            "parameters": more("parameters_mib"),
            "gradients": more("gradients_mib"),
            "optimizer": more("optimizer_mib"),
            "activations": more("activations_mib"),
            "predicted": lambda row: f"{row.more['predicted_mib'] / row.peak_mib:.3f}x",
        },
    )


def bench_data(
    *,
    ranks: tuple[int, ...] = (2, 4),
    rounds: int = 15,
    batch: int = 1,
    tokens: int = LENGTH,
    width: int = SIZES.width,
    layers: int = SIZES.num_layers,
    heads: int = SIZES.num_heads,
    kv_heads: int = SIZES.num_kv_heads,
    window: int = WINDOW,
    only: tuple[str, ...] = STRATEGIES,
    folder: Path = record.FOLDER,
) -> int:
    """A training step under every strategy of data, optimizer, context and tensor parallelism, in one run.

    Measures time, communication, the part of communication that computation hides, and the memory of a rank by type of
    tensor. Runs on GPUs if there are as many as the largest number of ranks, otherwise on CPU processes. Rows are
    appended to FOLDER/data.jsonl.

    Args:
        ranks: Numbers of ranks, each 1 to 8.
        rounds: Number of timed steps.
        batch: Sequences per rank.
        tokens: Tokens per sequence.
        width: Hidden size.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        window: Number of keys that a query sees in the strategy "hybrid": a block with tensor parallelism and a window
            (examples/hybrid_block.py).
        only: Strategies to measure.
        folder: Folder for the rows.
    """
    unknown = [name for name in only if name not in STRATEGIES]
    if unknown or not only:
        raise ValueError(f"--only takes {', '.join(STRATEGIES)}: got {', '.join(unknown) or 'none'}")
    if not ranks or min(ranks) < 1 or max(ranks) > 8 or batch < 1:
        shown = " ".join(map(str, ranks)) or "none"
        raise ValueError(f"bench data needs 1 to 8 ranks and 1 sequence: got {shown} ranks and {batch} sequences")
    check_repeats(2, rounds=rounds)
    sizes = sizes_of(width, layers, heads, kv_heads)
    if window < 1:
        raise ValueError(f"--window must be 1 or more: got {window}")
    if window != WINDOW and "hybrid" not in only:
        raise ValueError(
            f"--window needs the strategy hybrid: got {window} without it; leave --window out, or add hybrid to --only"
        )
    if tokens < 2 * max(ranks):
        raise ValueError(f"bench data needs 2 tokens per rank or more: got {tokens} tokens on {max(ranks)} ranks")
    if "tensor and sequence" in only and any(tokens % num_ranks for num_ranks in ranks):
        raise ValueError(
            "for the strategy tensor and sequence, the ranks must divide --tokens: "
            f"got {tokens} tokens on {' '.join(map(str, ranks))} ranks; use other numbers, or leave it out of --only"
        )
    for num_ranks in ranks:
        fitting(only, num_ranks, sizes)  # raises before anything is measured
    device_type = "cuda" if torch.cuda.device_count() >= max(ranks) else "cpu"
    for num_ranks in ranks:
        refuse_large(fitting(only, num_ranks, sizes), num_ranks, sizes, batch * tokens, device_type)
    path = folder / "data.jsonl"
    record.append([], path)  # a folder that cannot be written to is found before anything is measured
    for num_ranks in ranks:
        rows = measure_ranks(
            num_ranks, only, rounds=rounds, batch=batch, length=tokens, window=window, sizes=sizes,
            device_type=device_type,
        )  # fmt: skip
        record.append(rows, path)
        show_tables([table(rows)])
    print(f"{WIRE}\nrows in {path}")
    return 0
