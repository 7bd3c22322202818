"""What a run will hold, before it is started."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from flashspan.checkpoint.format import checkpoints, last_step, needed_bytes, step_of
from flashspan.files import check_folder
from flashspan.lock import refuse_locked
from flashspan.plan.devices import available_bytes, free_gpu_bytes
from flashspan.plan.memory import Ledger, ParallelConfig, Run, ledger

from .config import TrainConfig
from .dataset import open_samples
from .pattern import make_pattern, visible_share
from .resume import choose

PROCESS_BYTES = 64 * 2**20
"""What a rank on a CPU holds besides its tensors and what it shares with the others, at least."""


def describe_plan(config: TrainConfig, num_ranks: int) -> str:
    """The model, the mesh, the data, where the run stands and the bytes of one rank, in words."""
    held = estimate(config, num_ranks)
    num_tokens = config.data.sequence
    share = visible_share(make_pattern(config.attention, num_tokens, torch.device("cpu")), num_tokens)
    lines = [
        describe_run(config, num_ranks),
        f"pattern {config.attention.pattern}: {share:.1%} of the pairs that causal attention sees",
        f"run     {_standing(config)}",
        "memory  of one rank in MiB, estimated; these rows are not in memory all at the same time:",
        *(f"  {name:<12} {size / 2**20:12,.1f}" for name, size in held.items()),
        f"  {'peak':<12} {held.peak / 2**20:12,.1f}",
        "  Tensors only. On a CPU, the steps of a run show the resident size of a process,",
        "  which includes Python and PyTorch.",
    ]
    return "\n".join(lines)


def describe_run(config: TrainConfig, num_ranks: int) -> str:
    """The facts of a run that are known before its first step, one a line."""
    shape, parallel, train = config.model.resolve(), config.parallel, config.train
    degrees = parallel.degrees(num_ranks)
    on_cpu = parallel.device == "cpu" or not torch.cuda.is_available()
    devices = f"CPU processes on {os.cpu_count()} cores" if on_cpu else torch.cuda.get_device_name(0)
    shared = "sharing 1 " if parallel.share_gpu else ""
    context = "each rank has whole sequences"
    if degrees["context"] > 1:
        context = f"{parallel.strategy}, {parallel.layout} layout: {degrees['context']} ranks split each sequence"
    passes = f" in {train.accumulate} backward passes" if train.accumulate > 1 else ""
    times = [f"every {config.checkpoint.every} steps"] if config.checkpoint.every else []
    times += [f"every {config.checkpoint.minutes:g} minutes"] if config.checkpoint.minutes else []
    lines = {
        "model": f"{shape.num_parameters / 1e6:,.2f} M parameters, {shape.num_layers} layers of width {shape.width}",
        "devices": f"{num_ranks} {shared}{devices}",
        "mesh": f"{' x '.join(f'{axis} {degree}' for axis, degree in degrees.items())} = {num_ranks} ranks",
        "context": context,
        "data": describe_data(config),
        "steps": f"{train.steps:,}, each of {train.batch} samples x {config.data.sequence} tokens = "
        f"{train.batch * config.data.sequence:,} tokens{passes}",
        "saved": f"in {config.checkpoint.folder}, {', '.join([*times, 'at the end'])}",
    }
    return "\n".join(f"{name:<7} {text}" for name, text in lines.items())


def describe_data(config: TrainConfig) -> str:
    """The tokens to train on and their tokenizer. A vocabulary smaller than the model's is no error, and not always
    meant."""
    file = open_samples(config)[0].file
    source = file.path if config.data.train else "the text in the package"
    return (
        f"{source}, {len(file.tokens):,} tokens; tokenizer {file.tokenizer or 'without a name'} "
        f"({file.vocab_size:,} tokens, the model has {config.model.resolve().vocab_size:,})"
    )


def lack_of_memory(config: TrainConfig, num_ranks: int, num_here: int) -> str | None:
    """Why this machine's memory is too little for `num_here` of the ranks; None where it is not, or nobody knows."""
    peak = estimate(config, num_ranks).peak + PROCESS_BYTES
    where, free = "a CPU", available_bytes()
    if config.parallel.share_gpu:
        where, free = "one GPU", free_gpu_bytes()
    if free is None or num_here * peak <= free:
        return None
    return (
        f"the ranks on {where} share its memory: {num_here} of about {peak / 2**30:,.1f} GiB each need "
        f"{num_here * peak / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are available; use fewer ranks, a smaller "
        "train.batch or data.sequence, or a smaller model"
    )


def lack_of_disk(config: TrainConfig) -> str | None:
    """Why the disk is too small for a checkpoint of this run; None where it is not."""
    place = Path(config.checkpoint.folder).absolute()
    while not place.exists():
        place = place.parent
    # Weights and two moments of each.
    needed = needed_bytes(3 * config.model.resolve().num_parameters * getattr(torch, config.train.weights).itemsize)
    if (free := shutil.disk_usage(place).free) >= needed:
        return None
    return (
        f"a checkpoint takes {needed / 1e6:,.1f} MB, and {config.checkpoint.folder} has room for {free / 1e6:,.1f} MB: "
        "make room, or choose another --checkpoint.folder"
    )


def _standing(config: TrainConfig) -> str:
    """Where a run in this folder would begin. ValueError where the run would be refused."""
    folder, asked = config.checkpoint.folder, config.train.steps
    check_folder(folder, "--checkpoint.folder")
    refuse_locked(folder)
    notes: list[str] = []
    path = choose(config, open_samples(config)[0].file, say=notes.append)
    lines = [f"        {note}" for note in notes]
    if path is None:
        place = f"in place of the run at step {last_step(folder)} in" if checkpoints(folder) else "in"
        return "\n".join([f"from step 0 to {asked}, {place} {folder}", *lines])
    step = step_of(path)
    if step >= asked:
        return "\n".join([f"already at step {step} of the {asked} asked for in {folder}: nothing to do", *lines])
    return "\n".join([f"from step {step}, where it stands in {folder}, to {asked}", *lines])


def estimate(config: TrainConfig, num_ranks: int) -> Ledger:
    """Bytes one rank holds, by the planner's count."""
    degrees = config.parallel.degrees(num_ranks)
    # Of the batch, what one backward pass sees: that many tokens' activations live at a time.
    batch = max(1, config.train.batch // config.train.accumulate)
    on_gpu = config.parallel.device != "cpu" and torch.cuda.is_available()
    run = Run(
        config.model.resolve(),
        batch,
        config.data.sequence,
        config.train.precision,
        config.train.weights,
        fused_norms=on_gpu,
    )
    parallel = ParallelConfig(
        **degrees,
        strategy=config.parallel.strategy,
        layout=config.parallel.layout,
        recompute=config.train.recompute,
        sharded_optimizer=config.optimizer.sharded,
        offload=config.train.offload,
    )
    return ledger(run, parallel)
