"""`flashspan plan`: whether a run fits, how fast it is, and which parallelism config is best.

flashspan plan llama-3-8b --tokens 131072 --batch 8 --devices 64 --device H100
flashspan plan draw --ranks 8 --strategy helper --layout contiguous             one schedule, as pictures
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flashspan.files import MAX_LINES_BYTES, make_folder, parse_json, read_bytes
from flashspan.model import PRESETS, LlamaConfig, find_model, preset, read_config
from flashspan.progress import progress
from flashspan.stdout import counted

from .calibrate import Measurement, calibrate
from .devices import Cluster, Device, Link, is_named, make_cluster
from .draw import draw_scaling, draw_simulation, written_to
from .memory import ParallelConfig, Run
from .search import Answer, divisors, grown, longest, parallel_configs, rank, scaling


def plan(
    model: str = "llama-3-8b",
    *,
    tokens: int = 32768,
    batch: int = 8,
    devices: int = 8,
    device: str = "H100",
    per_node: int = 8,
    link: str | None = None,
    network: str = "ib-ndr",
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    table: Path | None = None,
    top: int = 10,
    scale: bool = False,
    folder: Path | None = None,
    calibrate: Path | None = None,
) -> int:
    """Memory and time of a training run before it is launched, for every parallelism config that fits.

    Prints the configs, fastest first, with the memory of one device and the time of a step; for the best one, the
    memory of parameters, gradients, activations and so on; and the longest context that fits. The time of attention
    is simulated from the schedule that would run.

    Example: flashspan plan llama-3-8b --tokens 131072 --batch 8 --devices 64 --device H100

    `flashspan plan draw` needs no model: it draws a schedule of attention as two pictures: a timeline of tiles
    and transfers, and the mask, coloured by the rank that computes each part. `flashspan plan draw --help` lists its
    options.

    Example: flashspan plan draw --ranks 8 --strategy helper --layout contiguous

    Args:
        model: Name of a model (tiny, small, ..., llama-3-8b), a Hugging Face folder, or a name on the Hugging Face Hub
            (meta-llama/Llama-3.2-1B), of which only the config is read.
        tokens: Tokens per sample.
        batch: Samples per step, over all devices.
        devices: Number of devices, at most a million.
        device: Type of device: H200, H200-NVL, H100, H100-NVL, H100-PCIe, H800, A100, B200, L40S, L40, RTX4090,
            RTX4050, cpu-core, or a device in --table.
        per_node: Number of devices per node.
        link: Link inside a node; by default the usual one of the device.
        network: Link between nodes.
        precision: Dtype of matmuls; weights stay float32.
        table: TOML file with more devices and links.
        top: Number of parallelism configs to show.
        scale: Table of the best parallelism config on 1 to 1,024 devices, with the batch in proportion.
        folder: Folder for SVG pictures: the timeline of the best schedule, and with --scale the scaling curve.
        calibrate: Folder of measured rows (bench model, bench collectives) that set the device's speeds.
    """
    if top < 1:
        raise ValueError(f"top must be 1 or more configs to show: got {top}")
    cluster = make_cluster(device, devices, per_node=per_node, inside=link, between=network, table=table)
    run = Run(config_of(model), batch, tokens, precision, fused_norms=not device.startswith("cpu"))
    if calibrate is not None:
        cluster = calibrated(cluster, calibrate)
    with progress(f"plan of {model} on {counted(devices, 'device')}"):
        answers = rank(run, cluster)
    links = f"{cluster.inside.name} inside nodes of {per_node}, {cluster.between.name} between"
    samples = counted(batch, "sample")
    print(f"{model}, {samples} of {counted(tokens, 'token')}, on {devices} x {device} ({links})")
    if answers:
        show(answers[:top], run, cluster)
        print(f"{len(answers)} parallelism configs fit." if len(answers) > 1 else "1 parallelism config fits.")
        print(f"The best: {train_command(model, run, answers[0].parallel, per_node)}")
    elif next(parallel_configs(run, cluster), None) is None:
        print(
            f"No parallelism config uses exactly {counted(devices, 'device')}: use fewer devices, or more samples or "
            "tokens."
        )
        return 1
    else:
        print("No parallelism config fits: use more devices, fewer tokens or samples, or a smaller model.")
    with progress("longest context"):
        most, parallel = longest(run, cluster)
    if parallel is None:
        print(f"Longest context at {samples}: not even 1,024 tokens fit.")
    else:
        print(f"Longest context at {samples}: {most:,} tokens ({parallel}).")
    with progress("scaling"):
        points = scaling(run, cluster) if scale else []
    if points:
        show_scaling(points, run, cluster)
    if folder is not None and answers:
        write_pictures(folder, answers, run, cluster, points)
    return 0 if answers else 1


def config_of(model: str) -> LlamaConfig:
    """The config of a preset, a Hugging Face folder or a model on the Hub."""
    if model not in PRESETS and os.path.isdir(found := find_model(model, config_only=True)):
        return read_config(found)
    return preset(model)


def memory_unit(answers: Sequence[Answer]) -> tuple[str, float]:
    """The name and the bytes of a unit of memory in which the smallest value does not round to 0."""
    return ("GB", 1e9) if min(answer.memory.peak for answer in answers) >= 0.1e9 else ("MB", 1e6)


def show(answers: Sequence[Answer], run: Run, cluster: Cluster) -> None:
    """Print the table of parallelism configs, and the memory of the best by kind."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    unit, size = memory_unit(answers)
    table = Table(title="fastest first", title_justify="left")
    table.add_column("parallelism config")
    for heading in (f"{unit}/device", "s/step", "tokens/s", "MFU", "attention", "waiting", "communication"):
        table.add_column(heading, justify="right", no_wrap=True)
    for answer in answers:
        time = answer.time
        table.add_row(
            str(answer.parallel),
            f"{answer.memory.peak / size:,.1f}",
            f"{time.total:.3g}" if time.total < 999.5 else f"{time.total:,.0f}",
            f"{answer.tokens_per_second(run):,.0f}",
            f"{answer.mfu(run, cluster):.0%}",
            *(f"{part / time.total:.0%}" for part in (time.attention, time.waiting, time.communication)),
        )
    room, wide = console.width, Console(width=1000)
    if console.is_terminal and wide.measure(table).maximum > room:
        # Without rules there is more space for the parallelism configs, which wrap; numbers do not.
        table.box, table.pad_edge = None, False
    console.width = max(wide.measure(table).minimum if console.is_terminal else 1000, room)
    console.print(table)
    best = answers[0]
    seen = {name: value / size for name, value in best.memory.items() if value >= 0.005 * size}  # not 0.00
    parts = ", ".join(f"{name} {value:,.2f}" for name, value in seen.items())
    peak, most = best.memory.peak / size, cluster.device.memory / size
    print(f"Best, {unit} per device: {parts}; peak {peak:,.2f} of {most:,.0f}.")


def train_command(model: str, run: Run, parallel: ParallelConfig, per_node: int) -> str:
    """The command that trains with this config, to be run on every node. All nodes start equally many ranks; the number
    of nodes is the smallest for which that is possible."""
    nodes = next(n for n in divisors(parallel.num_devices) if parallel.num_devices // n <= per_node)
    per_node = parallel.num_devices // nodes
    options: dict[str, object] = {
        "model.preset" if model in PRESETS else "model.load": shlex.quote(model),
        "data.sequence": run.tokens,
        "train.batch": run.batch,
        "train.precision": run.precision,
    }
    degrees = {f"parallel.{name}": getattr(parallel, name) for name in ("data", "shard", "context", "tensor")}
    # The default of parallel.context is 0, all remaining ranks: always set it.
    options |= {name: degree for name, degree in degrees.items() if degree > 1 or name == "parallel.context"}
    if parallel.context > 1:
        options |= {"parallel.strategy": parallel.strategy, "parallel.layout": parallel.layout}
    if parallel.strategy == "double_ring":
        options["parallel.inner"] = per_node // parallel.tensor
    if parallel.recompute != "none":
        options["train.recompute"] = parallel.recompute
    if parallel.sharded_optimizer:
        options["optimizer.sharded"] = "true"
    start = "flashspan train"
    if nodes > 1:
        start = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} -m flashspan.train"
    return " ".join([start, *(f"--{name} {value}" for name, value in options.items())])


def show_scaling(points: Sequence[tuple[int, Answer | None]], run: Run, cluster: Cluster) -> None:
    """Print the best parallelism config on each number of devices."""
    print("Devices, best parallelism config, tokens/s per device (batch in proportion to devices):")
    for num, answer in points:
        if answer is None:
            print(f"{num:>6}  nothing fits")
            continue
        speed = answer.tokens_per_second(grown(run, cluster, num)) / num
        print(f"{num:>6}  {speed:>10,.0f}  {answer.parallel}")


def write_pictures(folder: Path, answers: Sequence[Answer], run: Run, cluster: Cluster, points: Any) -> None:
    """Draw the timeline of the fastest parallelism config whose attention is a schedule, and the scaling curve."""
    make_folder(folder, "--folder")
    scheduled = [a.parallel for a in answers if a.parallel.context > 1 and a.parallel.strategy != "ulysses"]
    with written_to(folder, "--folder"):
        if scheduled:
            draw_simulation(run, scheduled[0], cluster, folder / "plan-timeline.svg")
            print(f"wrote {folder / 'plan-timeline.svg'} ({scheduled[0]})")
        if points:
            draw_scaling(points, run, cluster, folder / "plan-scaling.svg")
            print(f"wrote {folder / 'plan-scaling.svg'}")


def calibrated(cluster: Cluster, folder: Path) -> Cluster:
    """The cluster with speeds from the JSON lines of `flashspan bench`. Prints the number of times, and the link."""
    good = [row for row in read_rows(folder) if row.get("status") == "ok"]
    names = ("what", "shape", "impl", "kind", "dtype", "ranks", "device")
    good = list({tuple(str(row.get(name)) for name in names): row for row in good}.values())  # the newest of each
    collectives = [row for row in good if row.get("what") == "collective" and row.get("impl") == "send-receive"]
    models = [row for row in good if row.get("what") == "model"]
    check_devices({str(row.get("device")) for row in (*models, *collectives)}, cluster.device, folder)
    try:
        measured = measurements(models)
        links = [(link_of(row), row["ranks"]) for row in collectives]
        # The row of every size has the fit to all sizes. Use the last row with the most ranks.
        link, ranks = max(reversed(links), key=lambda pair: pair[1], default=(cluster.inside, 0))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} has rows that another version wrote ({type(error).__name__}: {error}): move their files away "
            "and measure again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder} has a row that cannot be used, move its file away: {error}") from error
    if not measured and not links:
        raise ValueError(f"no rows to calibrate from in {folder}: run `flashspan bench model` there first")
    if measured:
        cluster = calibrate(cluster, measured)
    source = f"the link of {ranks} ranks" if links else "no link"
    print(f"Calibrated from {len(measured)} measured times and {source} in {folder}.")
    return replace(cluster, inside=link)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The JSON objects in a folder's .jsonl files, one per line."""
    rows = []
    for file in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
        try:
            lines = read_bytes(file, limit=MAX_LINES_BYTES).decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not text in UTF-8, as rows are: {error}; move it away") from error
        for line in lines:
            try:
                rows.append(parse_json(line))
            except ValueError:
                continue  # truncated by a kill
    return [row for row in rows if isinstance(row, dict)]


def check_devices(measured: Collection[str], planned: Device, folder: Path) -> None:
    """ValueError if rows are of several devices, or of another device than the planned one."""
    if len(measured) > 1:
        raise ValueError(
            f"{folder} has rows of several devices, {', '.join(sorted(measured))}: use one folder per device"
        )
    for name in measured:
        if not is_named(planned.name, name):
            raise ValueError(
                f"--calibrate needs rows of the planned device, {planned.name}: the rows in {folder} are of {name}; "
                f"measure on {planned.name}, plan for the device of the rows, or omit --calibrate"
            )


def link_of(row: dict[str, Any]) -> Link:
    """The link of a row of `bench collectives`."""
    fit = row["more"]
    return Link("measured", fit["alpha_us"] / 1e6, fit["gb_per_s"] * 1e9)


def measurements(rows: Sequence[dict[str, Any]]) -> list[Measurement]:
    """The measurements in rows of `bench model` with our attention, uncompiled."""
    found = []
    for row in rows:
        more = row.get("more") or {}
        if row.get("what") != "model" or row.get("impl") != "flashspan, eager" or "preset" not in more:
            continue
        if row["kind"] in ("forward", "backward", "optimizer"):
            run = Run(
                preset(more["preset"]),
                more["batch"],
                more["tokens"],
                row["dtype"],
                fused_norms="cores" not in row["device"],
                plain_loss=True,
            )
            # The 20th percentile, not the median: disturbances of a host make times longer, never shorter.
            found.append(Measurement(run, row["kind"], row["p20_ms"] / 1e3))
    return found
