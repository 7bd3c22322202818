"""The training loop, which every rank runs. Loss and gradient norm do not depend on the number of ranks.

Labels are shifted before the sequence is split. The loss is a sum over valid tokens, divided by their number on all
ranks. Gradients are summed over data, shard and context ranks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.agreement import from_each, from_first
from flashspan.checkpoint import format as checkpoint
from flashspan.checkpoint.state import load_optimizer_state, model_state, optimizer_state
from flashspan.checkpoint.writer import Writer
from flashspan.lock import locked_folder
from flashspan.model import IGNORE
from flashspan.parallel import build_mesh, clip_factor, clip_grad_norm, grad_norm, submesh

from . import resume
from .batches import Batch, Feed, Placed, num_targets
from .boards import open_boards
from .build import build, load_into
from .config import TrainConfig
from .dataset import num_evaluated, open_samples, order_of
from .learning_rate import learning_rate
from .metrics import Display, Report, StepMetrics, draw_loss, memory_gib, peak_flops
from .pattern import make_pattern
from .run_ahead import RunAhead, copy_to_host, skips_bad_steps
from .silent_ranks import report_silent_ranks

DONE, STOPPED, NOT_FINITE, NOT_SAVED = "done", "stopped", "not finite", "not saved"
FIRST_SCALE, GROW_AFTER = 2.0**14, 200


class Trainer:
    """One rank's part of a run."""

    def __init__(self, config: TrainConfig, report: Report | None = None) -> None:
        self.config, self.report = config, report
        self.device = _device(config)
        if config.train.tf32:
            torch.set_float32_matmul_precision("high")  # our own kernels read this setting too
        degrees: dict[str, Any] = {**config.parallel.degrees(dist.get_world_size())}
        self.mesh = build_mesh(**degrees)
        self.shape = config.model.resolve()
        self.num_tensor = self.mesh["tensor"].size()
        self.folder = Path(config.checkpoint.folder)
        self.train, self.validation = open_samples(config)
        self.pattern = make_pattern(config.attention, config.data.sequence, self.device)
        self.parts = build(config, self.shape, self.mesh, self.device, self.pattern)
        batch, attend = submesh(self.mesh, "batch"), self.parts.attend
        self.feed = Feed(config, batch.get_local_rank(), batch.size(), attend, self.pattern, self.device)
        self.positions = torch.arange(config.data.sequence, device=self.device)
        if attend is not None:
            self.positions = attend.positions(config.data.sequence, self.device)
        self.guarded = skips_bad_steps(self.parts.optimizer)
        # Whether forward runs without communication.
        self.alone = all(self.mesh[axis].size() == 1 for axis in ("shard", "context", "tensor"))
        self.scale = FIRST_SCALE if config.train.precision == "float16" else 1.0
        self.steady = 0  # steps since the scale last changed
        self.step = self.saved = 0
        self.saved_at = time.monotonic()
        self.overdue = False  # whether the last save is at least checkpoint.minutes ago, by the first rank's clock
        self.ahead = RunAhead()
        self.num_pairs = 0.0  # visible (query, key) pairs of the last step, on all ranks
        self.fault: str | None = None  # the reason why the next step's samples cannot be read

    def run(self, asked: Sequence[int] = ()) -> str:
        """Train to the last step, or until `asked` has a signal. Returns the status: DONE, STOPPED, NOT_FINITE or
        NOT_SAVED."""
        config, first = self.config, dist.get_rank() == 0
        notes: list[str] = []
        with contextlib.ExitStack() as held:
            with report_silent_ranks("the loading of the checkpoint"):
                saved = self._resume(notes, held)
            display = held.enter_context(
                Display(
                    self.folder,
                    config.train.steps,
                    active=first,
                    boards=open_boards(config, self.step) if first else (),
                    start=self.step,
                    saved=saved,
                    report=self.report,
                )
            )
            anew = not config.checkpoint.resume
            writer = Writer(self.folder, keep=config.checkpoint.keep, anew=anew, say=display.say)
            for note in notes:
                display.say(note)
            # A run that was stopped or killed may have ended before the evaluation that was due after this step.
            if self._is_evaluated(self.step) and not from_first(partial(display.evaluated, self.step)):
                self._evaluate(display)
            begun = self.step
            how = display.status = self._take_steps(display, writer, asked)
            if self.step > begun:
                display.now("writing the last checkpoint and loss.png")
            if self.saved != self.step or not self.step:
                self._save(writer)
            with report_silent_ranks(f"the checkpoint of step {self.step}"):
                kept = from_first(writer.wait)
            if first and not (how == STOPPED and config.checkpoint.grace):  # in the grace period, save only the state
                try:
                    draw_loss(self.folder)
                except OSError as error:
                    display.say(f"loss.png was not written: {error}; all other files are complete")
            with report_silent_ranks("the end of the run"):
                from_each(partial(self._tell_fault, kept))
        return how if kept else NOT_SAVED

    def _tell_fault(self, kept: bool) -> None:
        """ValueError if the next step's samples could not be read; `kept`: whether the state is saved."""
        if self.fault is not None:
            saved = "with its state saved" if kept else "and its state could not be saved"
            raise ValueError(f"{self.fault}; the run ended before step {self.step + 1}, {saved}")

    def _take_steps(self, display: Display, writer: Writer, asked: Sequence[int]) -> str:
        """Take the remaining steps and show them; save and evaluate when due. Returns the status: DONE, STOPPED or
        NOT_FINITE."""
        config = self.config
        peak = peak_flops(self.device, dist.get_world_size(), config.train.precision)
        num_tokens = config.train.batch * config.data.sequence
        scaled, end = (self.scale, self.steady), 0.0
        while self.step < config.train.steps:
            # If the forward of this step was launched early, its time begins at the end of the previous step.
            begin = time.perf_counter() if not self.ahead.begun else end
            with report_silent_ranks(f"step {self.step + 1}"):
                loss, norm, lr, stop = self.take_step(asked)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                if config.train.precision == "float16" and self.scale >= 1.0:
                    display.say(
                        f"step {self.step + 1}: float16 overflow; repeating the step with loss scale {self.scale:g}"
                    )
                    if stop:
                        return STOPPED
                    continue
                display.say(
                    f"step {self.step + 1}: loss {loss}, gradient norm {norm}: not finite; stopping before the "
                    f"update, with the state of step {self.step}. Lower optimizer.lr, or look at the data of this step"
                )
                self.scale, self.steady = scaled  # no loss scale helps: restore the one before this step
                return NOT_FINITE
            scaled = self.scale, self.steady
            end = time.perf_counter()
            seconds = end - begin
            # Patterns and documents hide pairs: `seen` is the length of a causal sequence with as many per token.
            seen = 2 * self.num_pairs / (config.train.batch * (config.data.sequence + 1))
            flops = self.shape.flops_per_token(seen) * num_tokens
            speed, mfu, memory = num_tokens / seconds, flops / seconds / peak, memory_gib(self.device)
            display.step(StepMetrics(self.step, loss, norm, lr, speed, mfu, memory, seconds))
            last = self.step == config.train.steps
            if self.overdue or self._is_saved(self.step):
                self._save(writer)
            if self._is_evaluated(self.step) and (last or not stop):
                self._evaluate(display)
            if stop and not last:
                return STOPPED
        return DONE

    def _is_evaluated(self, step: int) -> bool:
        """Whether an evaluation is due after this many steps."""
        train = self.config.train
        every = train.evaluate_every if self.validation is not None else 0
        return step > 0 and every > 0 and (step >= train.steps or step % every == 0)

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint is due after this many steps."""
        every = self.config.checkpoint.every
        return step == self.config.train.steps or (every > 0 and step % every == 0)

    def _is_overdue(self) -> bool:
        """On the first rank, whether a checkpoint is due by its clock; False on other ranks, which receive the first
        rank's answer with the loss."""
        minutes = self.config.checkpoint.minutes
        return 0 < minutes <= (time.monotonic() - self.saved_at) / 60 and dist.get_rank() == 0

    def take_step(self, asked: Sized = ()) -> tuple[float, float, float, bool]:
        """Take one optimizer step. Returns its loss, gradient norm and learning rate, and whether the run must stop.

        The run must stop if a rank has a signal in `asked` by the time it has launched backward, or cannot read the
        samples of the next step. If the loss or the norm is not finite, nothing is updated and `step` does not advance.
        On return, the forward of the next step may already be launched, with the present weights (`RunAhead`).
        """
        config, optimizer = self.config, self.parts.optimizer
        batches, (count, num_pairs) = self._begin()
        local = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, batch in enumerate(batches):
            with self.parts.without_sync(i < len(batches) - 1):
                begun = self.ahead.take_loss()
                total = self._forward(batch) if begun is None else begun
                (total * (self.scale / count)).backward()
            local += total.detach()
        following: list[Batch] = []
        if self.step + 1 < config.train.steps:
            try:
                following = self.feed.read(self.train, self.step + 1)
            except (ValueError, OSError) as error:
                self.fault = str(error)
        stopping = len(asked) > 0 or self.fault is not None
        flags = self._number(float(stopping)), self._number(float(self._is_overdue()))
        mine = (local, *flags, *self._counts(following))
        sums = self._sum(torch.stack(mine))
        norms = self._clip()
        lr = learning_rate(self.step, config.train.steps, config.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = lr
        results = torch.stack((sums[0] / count, sums[1], sums[2], norms.to(sums.dtype), num_pairs))
        if self.guarded:
            optimizer.found_inf = (~results.isfinite().all()).float()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        # Copy the next step's samples before the host waits: after that wait, the device has no work left.
        placed = [self.feed.place(*batch) for batch in following]
        self.ahead.place(self.step + 1, placed, sums[3:])
        wait = copy_to_host(results)
        # A guarded optimizer skips a bad step by itself: the next forward need not wait for the results.
        between = self._is_saved(self.step + 1) or self._is_evaluated(self.step + 1)
        if placed and self.guarded and self.alone and not (stopping or between):
            with self.parts.without_sync(len(placed) > 1):
                self.ahead.begin(self._forward)
        # Without documents and other data ranks, the host waits for the device only here.
        loss, stops, overdue, norm, self.num_pairs = wait()
        self.overdue = overdue > 0
        fine = math.isfinite(loss) and math.isfinite(norm)
        if not fine or stops > 0:
            self.ahead.drop_loss()
        if not self.guarded:
            if fine:
                optimizer.step()
            optimizer.zero_grad()
        if fine:
            self.step += 1
        if config.train.precision == "float16":
            self._rescale(fine)
        return loss, norm, lr, stops > 0

    def _begin(self) -> tuple[list[Placed], Tensor]:
        """The step's samples, and their numbers of targets and visible pairs on all ranks."""
        ready = self.ahead.batches_of(self.step)
        if ready is None:
            read = self.feed.read(self.train, self.step)
            ready = [self.feed.place(*batch) for batch in read], self._sum(torch.stack(self._counts(read)))
        # At least 1: a step of short documents may have no targets. Its loss is then 0, not 0 / 0.
        batches, counts = ready
        return batches, counts.clamp(min=1)

    def _counts(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """This rank's share of the numbers of targets and visible pairs of these samples."""
        pairs = self.feed.num_pairs(batches) / self.mesh["context"].size()  # context ranks read the same samples
        return self._number(num_targets(batches)), self._number(pairs)

    def _clip(self) -> Tensor:
        """Remove the loss scale from the gradients, clip them, and return their norm before clipping. A guarded
        optimizer clips them itself: it divides them by `grad_scale` when it reads them."""
        params, clip = list(self.parts.names), self.config.optimizer.clip
        if self.scale != 1.0:
            for param in params:
                if param.grad is not None:
                    param.grad.div_(self.scale)
        if not clip:
            return grad_norm(params)
        if not self.guarded:
            return clip_grad_norm(params, clip)
        norm, factor = clip_factor(params, clip)
        self.parts.optimizer.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]
        return norm

    def _evaluate(self, display: Display) -> None:
        with report_silent_ranks(f"the evaluation after step {self.step}"):
            display.evaluation(self.step, self.evaluate())

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on samples 0, 1, 2, ... of the validation data, as many as `num_evaluated` returns."""
        assert self.validation is not None
        self.parts.runner.eval()
        num_samples = num_evaluated(self.config, self.validation)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, num_samples, self.feed.num_ranks):
            number = start + self.feed.rank
            batch = self.feed.prepare(self.validation, [min(number, num_samples - 1)])
            tokens, targets, mask = self.feed.place(*batch)
            if number >= num_samples:  # all ranks take part in each pass, and this one has no sample left
                targets.fill_(IGNORE)
            sums[0] += self._forward((tokens, targets, mask))
            sums[1] += (targets >= 0).sum()
        self.parts.runner.train()
        total, count = self._sum(sums).tolist()
        return total / max(1.0, count)

    def _forward(self, batch: Placed) -> Tensor:
        """The sum of the losses of this rank's tokens."""
        tokens, targets, mask = batch
        with self._autocast():
            loss: Tensor = self.parts.runner(tokens, targets, self.positions, mask)
        return loss

    def _number(self, value: float) -> Tensor:
        """A float64 scalar on the device. It is filled there: a copy from the host would wait for all queued work."""
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum of these values over all ranks that have different tokens, float64. Tensor ranks have the same."""
        total = values.to(self.device, torch.float64, copy=True)
        dist.all_reduce(total)
        return total / self.num_tensor

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context for matmuls in `train.precision`; it does nothing if the weights already have this dtype."""
        train = self.config.train
        dtype = getattr(torch, train.precision)
        return torch.autocast(self.device.type, dtype, enabled=train.precision != train.weights)

    def _rescale(self, fine: bool) -> None:
        """Adjust the loss scale, which keeps float16 gradients from underflow: halve it after an overflow, double it
        after GROW_AFTER steps without one."""
        self.steady = self.steady + 1 if fine else 0
        if not fine or self.steady == GROW_AFTER:
            self.scale *= 2.0 if fine else 0.5
            self.steady = 0

    def _save(self, writer: Writer) -> None:
        first = dist.get_rank() == 0
        with report_silent_ranks(f"the checkpoint of step {self.step}"):
            from_first(writer.wait)  # for the previous state: two may not fit in memory
            model, moments = model_state(self.parts, keep=first), optimizer_state(self.parts, keep=first)
        if first:
            extra = {
                "scale": self.scale,
                "steady": self.steady,
                "tokenizer": self.train.file.tokenizer,
                "config": self.config.as_dict(),
                "time": time.time(),
            }
            order = order_of(self.config, self.train.file)
            writer.submit(checkpoint.State(self.step, self.shape, model, moments, order, extra))
        self.saved, self.saved_at = self.step, time.monotonic()

    def _resume(self, notes: list[str], held: contextlib.ExitStack) -> float:
        """Lock the folder until `held` ends, and load the checkpoint that the first rank chooses, if there is one.
        Returns the time at which it was saved; inf without a checkpoint or a time in it."""
        path = from_first(lambda: self._choose(notes, held))
        if path is None:
            return math.inf
        state = checkpoint.read(path, model=False)
        load_into(self.parts.model, path)
        load_optimizer_state(self.parts, state.optimizer, state.step)
        self.step = self.saved = state.step
        self.saved_at = time.monotonic()
        # The saved loss scale is of use only if both runs are in float16.
        if self.config.train.precision == state.extra["config"]["train"]["precision"] == "float16":
            self.scale, self.steady = float(state.extra["scale"]), int(state.extra["steady"])
        if self.step < self.config.train.steps:
            notes.append(f"resuming {path} at step {self.step}")
            notes += self._new_schedule(state.extra["config"])
        else:
            asked = self.config.train.steps
            notes.append(f"{path} is already at step {self.step}, and train.steps is {asked}: nothing to do")
        return float(state.extra.get("time", math.inf))

    def _new_schedule(self, before: dict[str, Any]) -> list[str]:
        """A list with a note if the number of steps has changed, and with it the learning rate at this step; else
        an empty list."""
        old, new = before["train"]["steps"], self.config.train.steps
        was, now = (learning_rate(self.step, steps, self.config.optimizer) for steps in (old, new))
        if was == now:
            return []
        return [f"train.steps changed from {old} to {new}, and so the learning rate from {was:.1e} to {now:.1e}"]

    def _choose(self, notes: list[str], held: contextlib.ExitStack) -> Path | None:
        """Lock the folder, remove unfinished checkpoints and return the one to resume from; None to begin at step 0."""
        held.enter_context(locked_folder(self.folder))
        checkpoint.clear_unfinished(self.folder)
        return resume.choose(self.config, self.train.file, say=notes.append)


def _device(config: TrainConfig) -> torch.device:
    if dist.get_backend() == "nccl" or config.parallel.share_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
