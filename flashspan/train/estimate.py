"""The facts of a run before it is started, with an estimate of its memory and disk space."""

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
from flashspan.stdout import counted

from .config import TrainConfig
from .dataset import num_evaluated, open_samples
from .pattern import make_pattern, visible_share
from .resume import choose

PROCESS_BYTES = 64 * 2**20
"""The least memory of a rank on a CPU, without its tensors and without memory shared by all ranks."""


def describe_plan(config: TrainConfig, num_ranks: int) -> str:
    """Text for a dry run: model, mesh, data, the step at which the run would begin, and the memory of one rank."""
    held = estimate(config, num_ranks)
    num_tokens = config.data.sequence
    share = visible_share(make_pattern(config.attention, num_tokens, torch.device("cpu")), num_tokens)
    lines = [
        describe_run(config, num_ranks),
        f"pattern {config.attention.pattern}: {share:.1%} of the pairs that causal attention sees",
        f"run     {_standing(config)}",
        "memory  of one rank, estimate in MiB; not all of it is used at once:",
        *(f"  {name:<12} {size / 2**20:12,.1f}" for name, size in held.items()),
        f"  {'peak':<12} {held.peak / 2**20:12,.1f}",
        "  This counts tensors only. The memory that a run on a CPU reports is that of the",
        "  whole process, including Python and PyTorch.",
    ]
    return "\n".join(lines)


def describe_run(config: TrainConfig, num_ranks: int) -> str:
    """The facts of a run that are known before its first step, one per line."""
    shape, parallel, train = config.model.resolve(), config.parallel, config.train
    degrees = parallel.degrees(num_ranks)
    on_cpu = parallel.device == "cpu" or not torch.cuda.is_available()
    devices = (
        f"CPU process{'' if num_ranks == 1 else 'es'} on {os.cpu_count()} cores"
        if on_cpu
        else torch.cuda.get_device_name(0)
    )
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
        "mesh": f"{' x '.join(f'{axis} {degree}' for axis, degree in degrees.items())} = {counted(num_ranks, 'rank')}",
        "context": context,
        "data": describe_data(config),
        "steps": f"{train.steps:,}, each of {train.batch} samples x {config.data.sequence} tokens = "
        f"{train.batch * config.data.sequence:,} tokens{passes}",
        "saved": f"in {config.checkpoint.folder}, {', '.join([*times, 'at the end'])}",
        "eval": describe_evaluation(config),
    }
    return "\n".join(f"{name:<7} {text}" for name, text in lines.items())


def describe_data(config: TrainConfig) -> str:
    """The training tokens, their tokenizer, and both vocabulary sizes: the data's may be smaller than the model's,
    perhaps by mistake."""
    file = open_samples(config)[0].file
    source = file.path if config.data.train else "the text in the package"
    return (
        f"{source}, {len(file.tokens):,} tokens; tokenizer {file.tokenizer or 'without a name'} "
        f"({file.vocab_size:,} tokens, the model has {config.model.resolve().vocab_size:,})"
    )


def describe_evaluation(config: TrainConfig) -> str:
    """When the validation loss is computed, or why it is not."""
    every, (samples, validation) = config.train.evaluate_every, open_samples(config)
    if not every:
        return "none: train.evaluate_every is 0"
    if validation is not None:
        held_out = validation.file.path.name if config.data.train or config.data.validation else "the rest of the text"
        num_samples = num_evaluated(config, validation)
        return f"validation loss every {every} steps and at the end, on {num_samples} samples of {held_out}"
    file = samples.file.path.with_name("val.bin")
    why = f"has too few tokens for a sample of {config.data.sequence}" if file.exists() else "does not exist"
    return f"none: {file} {why}; data.validation sets another file"


def lack_of_memory(config: TrainConfig, num_ranks: int, num_here: int) -> str | None:
    """The reason why this machine has too little memory for `num_here` ranks; None if it has enough, or if the free
    memory is unknown."""
    peak = estimate(config, num_ranks).peak + PROCESS_BYTES
    where, free = "a CPU", available_bytes()
    if config.parallel.share_gpu:
        where, free = "one GPU", free_gpu_bytes()
    if free is None or num_here * peak <= free:
        return None
    return (
        f"the ranks on {where} must fit in its memory: {num_here} ranks of about {peak / 2**30:,.2f} GiB need "
        f"{num_here * peak / 2**30:,.2f} GiB, but {free / 2**30:,.2f} GiB are available; use fewer ranks, a smaller "
        "train.batch or data.sequence, or a smaller model"
    )


def lack_of_disk(config: TrainConfig) -> str | None:
    """The reason why the disk has too little space for a checkpoint of this run; None if it has enough."""
    place = Path(config.checkpoint.folder).absolute()
    while not place.exists():
        place = place.parent
    # Weights, and two moments per weight.
    needed = needed_bytes(3 * config.model.resolve().num_parameters * getattr(torch, config.train.weights).itemsize)
    if (free := shutil.disk_usage(place).free) >= needed or not os.statvfs(place).f_blocks:  # /proc has no blocks
        return None
    return (
        f"a checkpoint takes {needed / 1e6:,.1f} MB, but {config.checkpoint.folder} has {free / 1e6:,.1f} MB "
        "free: free some space, or choose another --checkpoint.folder"
    )


def _standing(config: TrainConfig) -> str:
    """The first and the last step of a run in this folder, as text. ValueError if the run would be refused."""
    folder, asked = config.checkpoint.folder, config.train.steps
    check_folder(folder, "--checkpoint.folder")
    refuse_locked(folder)
    notes: list[str] = []
    path = choose(config, open_samples(config)[0].file, say=notes.append)
    lines = [f"        {note}" for note in notes]
    if path is None:
        place = f"replacing the run at step {last_step(folder)} in" if checkpoints(folder) else "in"
        return "\n".join([f"from step 0 to {asked}, {place} {folder}", *lines])
    step = step_of(path)
    if step >= asked:
        return "\n".join([f"nothing to do: {folder} is at step {step}, train.steps is {asked}", *lines])
    return "\n".join([f"from step {step}, the last checkpoint in {folder}, to {asked}", *lines])


def estimate(config: TrainConfig, num_ranks: int) -> Ledger:
    """The memory of one rank, computed by the planner."""
    degrees = config.parallel.degrees(num_ranks)
    # The batch of one backward pass: only its activations are in memory at the same time.
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
