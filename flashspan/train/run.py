"""`flashspan train`: starts the ranks (or joins them, under torchrun) and trains.

flashspan train
flashspan train configs/tiny.toml --parallel.data 2 --parallel.context 2
torchrun --nproc-per-node 8 -m flashspan.train configs/llama-3.2-1b.toml --parallel.context 8
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from flashspan.checkpoint.format import checkpoints, last_step, refuse_damaged
from flashspan.data.tokenizer import load_tokenizer, tokenizer_of
from flashspan.data.tokens import TokenFile
from flashspan.files import make_folder
from flashspan.launch import (
    PRELOAD,
    RankError,
    Ranks,
    SilentRank,
    raise_user_error,
    send_to_parent,
    start_fork_server,
)
from flashspan.model import find_model
from flashspan.model.huggingface import check_config
from flashspan.process import LONGEST
from flashspan.stdout import counted, open_stdout, say, waiting

from .boards import check_boards
from .config import TrainConfig
from .dataset import num_evaluated, open_samples
from .estimate import describe_plan, describe_run, lack_of_disk, lack_of_memory
from .loop import DONE, NOT_FINITE, NOT_SAVED, STOPPED, Trainer
from .metrics import Report
from .options import parse, show_help
from .restart import Attempts
from .resume import refuse_folder
from .signals import STOPS, catch_signals, deadline, pass_signals_on
from .silent_ranks import report_silent_ranks
from .torchrun import join

SLOW = 4.0  # warn if a matmul takes this many times as long as in float32
LONG_ENOUGH, LARGEST = 0.05, 1024
"""The timed matmul takes at least this many seconds or has this width: in a small one, the time is mostly overhead."""
FAILED, LATE, INTERRUPTED = "failed", "late", "interrupted"
"""The status of a run if ranks failed, if it could not save within `checkpoint.grace`, or if Ctrl-C stopped it."""


def main(arguments: Sequence[str] = ()) -> int:
    """Run the command `[config.toml] [--section.key value ...] [--dry-run]` and return its exit code."""
    words = list(arguments)
    if {"-h", "--help"} & set(words):
        return show_help()
    dry_run = "--dry-run" in words
    return train(parse([word for word in words if word != "--dry-run"]), dry_run=dry_run)


def train(config: TrainConfig, *, dry_run: bool = False) -> int:
    """Train with this config and return the exit code: 0 after all steps; 143 or 130 if SIGTERM or Ctrl-C stopped the
    run and its state is saved, so that a scheduler does not count it as complete; otherwise 1."""
    codes = {DONE: 0, STOPPED: 128 + signal.SIGTERM, INTERRUPTED: 128 + signal.SIGINT}
    return codes.get(run(config, dry_run=dry_run), 1)


def run(config: TrainConfig, *, dry_run: bool = False, report: Report | None = None) -> str:
    """Train with this config and return the status: DONE, STOPPED, INTERRUPTED, NOT_FINITE, NOT_SAVED, FAILED or LATE.

    Under torchrun this process is one of the ranks; otherwise it starts them. `report` is called in this process after
    each step, under torchrun on the first rank. `dry_run` prints the config, the mesh and an estimate of the memory;
    it starts and writes nothing, and raises the errors that the run would raise before it starts.
    """
    open_stdout()
    if config.model.load:
        found = find_model(config.model.load, download=not dry_run)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, load=found))
    joined = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    num_ranks = int(os.environ["WORLD_SIZE"]) if joined else config.parallel.default_ranks(_num_gpus(config))
    check(config, num_ranks, joined)
    # If ranks were started without LOCAL_WORLD_SIZE, the memory is checked for one rank only.
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if joined else num_ranks
    # A GPU's allocator reports missing memory. On a CPU, the system would kill a rank instead: check before the start.
    has_own = _num_gpus(config) and not config.parallel.share_gpu
    lack = None if has_own else lack_of_memory(config, num_ranks, num_here)
    first = not joined or os.environ["RANK"] == "0"
    if first and last_step(config.checkpoint.folder) < config.train.steps:  # only the first rank writes
        lack = lack or lack_of_disk(config)
    if dry_run:
        if config.model.load:
            refuse_damaged(config.model.load)  # reads the whole file; in a run, the first rank does it
        print(config.describe())
        print(describe_plan(config, num_ranks))
    if lack:
        raise ValueError(lack)
    if dry_run:
        return DONE
    if not joined:
        refuse_folder(config)  # the ranks do it again, with the hashes and the lock; they take seconds to start
    if first:
        say(describe_run(config, num_ranks))
        warn_of_slow_matmuls(config)
    how = _join(config, report) if joined else _start(config, num_ranks, report)
    if first:
        say(_summary(config, how))
    return how


def check(config: TrainConfig, num_ranks: int, joined: bool = False) -> None:
    """ValueError for a config that cannot run, before anything is started or written."""
    degrees = config.parallel.degrees(num_ranks)
    shape = config.model.resolve()
    parts = degrees["data"] * degrees["shard"] * config.train.accumulate
    if config.train.batch % parts:
        raise ValueError(
            f"train.batch must divide over data x shard ranks and train.accumulate: got {config.train.batch} samples "
            f"for {degrees['data']} x {degrees['shard']} ranks and {config.train.accumulate} passes; "
            f"use a multiple of {parts}"
        )
    if shape.num_heads % degrees["tensor"] or shape.num_kv_heads % degrees["tensor"]:
        raise ValueError(
            f"parallel.tensor must divide the heads and the kv heads: got {shape.num_heads} and {shape.num_kv_heads} "
            f"heads on {degrees['tensor']} ranks; use a smaller degree"
        )
    if config.parallel.share_gpu and (joined or degrees["shard"] > 1 or degrees["tensor"] > 1):
        raise ValueError(
            "parallel.share_gpu supports only the data and context degrees, without torchrun: got "
            + ("torchrun" if joined else f"shard {degrees['shard']}, tensor {degrees['tensor']}")
        )
    if config.parallel.inner and degrees["context"] % config.parallel.inner:
        raise ValueError(
            f"parallel.inner must divide the context ranks: got {config.parallel.inner} for {degrees['context']} ranks"
        )
    check_boards(config.log)
    if config.model.load:
        check_config(config.model.load, shape)
    samples, validation = open_samples(config)
    samples.file.check()
    if validation is not None and config.train.evaluate_every:
        for number in range(num_evaluated(config, validation)):
            validation.read([number])  # reports damage now, and not after many steps
    check_tokenizer(config, [samples.file, *([] if validation is None else [validation.file])])


def check_tokenizer(config: TrainConfig, files: Sequence[TokenFile]) -> None:
    """ValueError if the data and the weights to load have different tokenizers: the same token numbers would mean
    other words."""
    name = tokenizer_of(config.model.load) if config.model.load else ""
    if not name:
        return
    size = None
    with contextlib.suppress(ValueError):  # an unreadable file, or one that no longer exists
        size = load_tokenizer(name).vocab_size
    for file in files:
        if not file.may_be_of(name, size):
            raise ValueError(
                f"data must be made with the tokenizer of the model that model.load names: {file.path} has "
                f"{file.vocab_size:,} tokens ({file.tokenizer or 'unnamed'}), {config.model.load} has "
                f"{'another vocabulary' if size is None else f'{size:,}'} ({name}); make it again with `flashspan "
                f"prepare --tokenizer {shlex.quote(name)}`, or leave model.load out and begin with new weights"
            )


def warn_of_slow_matmuls(config: TrainConfig) -> None:
    """Warn if 16-bit matmuls are slow: a CPU without hardware support may take a hundred times as long."""
    if config.train.precision == "float32" or _num_gpus(config):
        return
    size, dtype = 128, getattr(torch, config.train.precision)
    while (seconds := time_matmul(size, dtype)) < LONG_ENOUGH and size < LARGEST:
        size *= 2
    if (slower := seconds / time_matmul(size, torch.float32)) > SLOW:
        say(
            f"on this CPU, a {config.train.precision} matmul takes at least {slower:.0f} times as long as a float32 "
            f"one: --train.precision float32 is faster"
        )


def time_matmul(size: int, dtype: torch.dtype) -> float:
    """The seconds of a square matmul on one thread, as in ranks that share a CPU. The best of three times, or of fewer
    if they are long."""
    x, times = torch.ones(size, size, dtype=dtype), list[float]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    while len(times) < 3 and sum(times) < LONG_ENOUGH:
        begin = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return min(times)


def run_rank(config: TrainConfig, report: Report | None = None, on_signal: Callable[[], None] = lambda: None) -> str:
    """The run of one rank, in an existing process group; returns the status. The first rank calls `report` after each
    step; `on_signal` is called inside the handler of a signal."""
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # repeated on CPUs without 16-bit matmuls
    with catch_signals(on_signal) as asked:
        torch.manual_seed(config.train.seed)
        shown = waiting("building the model") if dist.get_rank() == 0 else contextlib.nullcontext()
        with report_silent_ranks("the initialisation of the model"), shown:
            trainer = Trainer(config, report)
        return trainer.run(asked)


def _start(config: TrainConfig, num_ranks: int, report: Report | None) -> str:
    share_gpu = config.parallel.share_gpu
    backend = "nccl" if _num_gpus(config) and not share_gpu else "gloo"
    if backend == "nccl" and num_ranks > _num_gpus(config):
        raise ValueError(
            f"{num_ranks} ranks need as many GPUs: found {_num_gpus(config)}; use fewer ranks, or --parallel.device cpu"
        )
    make_folder(config.checkpoint.folder, "--checkpoint.folder")
    attempts = Attempts(config)
    with pass_signals_on(config.checkpoint.grace) as stop:
        while True:
            try:
                # The ranks inherit the blocked signals: one sent to the whole process group stays pending until a rank
                # is ready to save. torch._dynamo is preloaded because PyTorch's optimizers import it, which takes a
                # second.
                with contextlib.ExitStack() as held:
                    with waiting(f"starting {counted(num_ranks, 'rank')}"):
                        start_fork_server([*PRELOAD, "torch._dynamo", __name__], blocked=STOPS)
                        timeout = config.parallel.timeout
                        ranks = Ranks(
                            num_ranks, backend=backend, timeout=timeout, share_gpu=share_gpu, own_functions=True
                        )
                        held.enter_context(ranks)
                        stop.pass_to(ranks.pids)
                        ranks.run(os.getpid, timeout=LONGEST)  # returns when all ranks have joined the group
                    if report is None:
                        how = ranks.run(run_rank, attempts.config, timeout=LONGEST)[0]
                    else:
                        send = send_to_parent
                        how = ranks.run(run_rank, attempts.config, send, timeout=LONGEST, on_message=report)[0]
                    return INTERRUPTED if how == STOPPED and stop.signal == signal.SIGINT else how
            except RankError as error:
                if stop.late:
                    return LATE
                raise_user_error(error)
                failure = error
            refusal = "not restarted: the run was being stopped" if stop.asked else attempts.restart()
            if failure.report != failure.cause:
                print(failure.report, file=sys.stderr)
            if refusal:
                print(f"flashspan: step {attempts.failed_at}: {failure.cause}; {refusal}", file=sys.stderr)
                return FAILED
            say(f"step {attempts.failed_at}: {failure.cause}; {attempts.describe()}")


def _join(config: TrainConfig, report: Report | None) -> str:
    make_folder(config.checkpoint.folder, "--checkpoint.folder")
    gpus = _num_gpus(config)
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        if not dist.is_initialized():
            join("nccl" if gpus else "gloo", config.parallel.timeout)
        with deadline(config.checkpoint.grace, partial(_end_late, config)) as start_clock:
            return run_rank(config, report, start_clock)
    except SilentRank as error:
        print(f"flashspan: {error}", file=sys.stderr)
        return FAILED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_late(config: TrainConfig) -> None:
    """End this rank of torchrun: it has not saved its state within `checkpoint.grace`."""
    if dist.get_rank() == 0:
        say(_summary(config, LATE))
    os._exit(1)


def _num_gpus(config: TrainConfig) -> int:
    if config.parallel.share_gpu and (config.parallel.device == "cpu" or not torch.cuda.is_available()):
        raise ValueError("parallel.share_gpu needs a GPU: found none, or parallel.device is cpu; leave it out")
    if config.parallel.device == "cpu":
        return 0
    found = torch.cuda.device_count()
    if config.parallel.device == "cuda" and not found:
        raise ValueError("parallel.device cuda needs a CUDA device: found none; use auto or cpu")
    return found


def _summary(config: TrainConfig, how: str) -> str:
    """The last lines of a run: its status, the files that it wrote, and the next commands."""
    folder = config.checkpoint.folder
    saved = bool(checkpoints(folder))
    again = "the same command" if config.checkpoint.resume else "the same command with --checkpoint.resume true"
    late = f"stopped as asked, but the state could not be saved within checkpoint.grace {config.checkpoint.grace:g} s"
    lines_of = {
        DONE: "done",
        **dict.fromkeys((STOPPED, INTERRUPTED), f"stopped as asked, state saved; {again} resumes"),
        NOT_FINITE: "stopped: loss or gradients were not finite; the state before that step is saved",
        NOT_SAVED: f"ended, and the last checkpoint could not be written; {again} resumes from the one before",
        FAILED: f"a rank failed; {again} resumes from the last checkpoint",
        LATE: f"{late}; {again} resumes from the last checkpoint, step {last_step(folder)}",
    }
    if not saved:
        lines_of[NOT_SAVED] = "ended, and its only checkpoint could not be written; the same command starts over"
        lines_of[FAILED] = "a rank failed before the first checkpoint; the same command starts over"
        lines_of[LATE] = f"{late}; there is no checkpoint, the same command starts over"
    there = ["checkpoints"] if saved else []
    there += [name for name in ("metrics.jsonl", "loss.png") if (Path(folder) / name).exists()]
    lines = [lines_of[how]]
    if there:
        listed = " and ".join(filter(None, (", ".join(there[:-1]), there[-1])))
        lines.append(f"  {listed} {'are' if saved or len(there) > 1 else 'is'} in {folder}")
    if how == DONE:
        prompt = "Once" if config.data.train else "One morning in March"
        more = 2 * max(config.train.steps, last_step(folder))  # the checkpoint may be past train.steps
        lines += [
            f'  generate text:     flashspan generate {shlex.quote(folder)} --prompt "{prompt}"',
            f"  continue training: {again} {'with' if config.checkpoint.resume else 'and'} --train.steps {more}",
        ]
    return "\n".join(lines)
