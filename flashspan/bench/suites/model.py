"""`flashspan bench model`: forward, backward and optimizer of a training step, for presets, lengths and precisions.

    flashspan bench model --presets small medium --tokens 128 256 --dtypes float32 bfloat16
    flashspan bench model --presets small --warmups 0 1 2 5      # the warm-up study: each in a separate process

Every phase is timed separately, with an idle device before and after it: w warm-up steps, then n measured steps. A row
has their mean, standard deviation and percentiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashspan.attention import attention
from flashspan.bench.measure import memory, ranges, record, sweep
from flashspan.bench.measure.clock import check_repeats, timed
from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import Table, pivot, show_tables
from flashspan.model import Llama, LlamaConfig, preset
from flashspan.plan import ParallelConfig, Run, ledger

KINDS = ("inference", "forward", "backward", "optimizer", "training")
FORWARD_ONLY = KINDS[:1]
ATTENTIONS: dict[str, Callable[..., Any]] = {"flashspan": attention, "plain": ranges.in_parts}


@dataclass(frozen=True)
class Setting:
    """One configuration. `attention` is "flashspan", or "plain": scores, softmax and values as PyTorch operators."""

    preset: str
    batch: int
    tokens: int
    dtype: str = "float32"
    attention: str = "flashspan"
    compiled: bool = False
    warmup: int = 5
    steps: int = 10

    @property
    def impl(self) -> str:
        return f"{self.attention}, {'compiled' if self.compiled else 'eager'}"

    @property
    def shape(self) -> str:
        return f"{self.preset} {self.batch}x{self.tokens}"


class Stepper:
    """A model, an optimizer and a batch, stepped phase by phase."""

    def __init__(self, setting: Setting, device: torch.device, config: LlamaConfig | None = None) -> None:
        torch.manual_seed(0)
        self.setting, self.device = setting, device
        config = config or preset(setting.preset)
        with device:
            self.model = Llama(config, attention=ATTENTIONS[setting.attention])
            self.tokens = torch.randint(config.vocab_size, (setting.batch, setting.tokens))
        self.targets = self.tokens.roll(-1, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        if setting.compiled:
            torch._dynamo.reset()  # graphs of earlier configurations would count towards its limit
            for layer in self.model.layers:
                layer.compile()
        self.loss: torch.Tensor | None = None

    def infer(self) -> None:
        with torch.no_grad():
            self.forward()
        self.loss = None

    def forward(self) -> None:
        with self._autocast(), ranges.span("forward"):
            self.loss = self.model.loss(self.model(self.tokens), self.targets) / self.tokens.numel()

    def backward(self) -> None:
        assert self.loss is not None
        with ranges.span("backward"):
            self.loss.backward()
        self.loss = None

    def update(self) -> None:
        with ranges.span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self) -> None:
        self.forward()
        self.backward()
        self.update()

    def held(self) -> float:
        """Bytes of weights, gradients, optimizer state and tokens."""
        state = [v for entry in self.optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]
        tensors = {t.data_ptr(): t.nbytes for t in [*self.model.parameters(), *state, self.tokens, self.targets]}
        return float(sum(tensors.values()))

    def _autocast(self) -> torch.autocast:
        dtype = getattr(torch, self.setting.dtype)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)


def peak_bytes(stepper: Stepper, call: Callable[[], None]) -> float:
    """The most bytes allocated at once in a call, including the model."""
    cuda = stepper.device.type == "cuda"
    held = torch.cuda.memory_allocated(stepper.device) if cuda else stepper.held()
    return held + memory.peak_of(call, stepper.device)[0]


def needed_bytes(setting: Setting, kinds: Sequence[str] = KINDS) -> float:
    """An estimate for a CPU. Training: the planner's memory, plus the scores that plain attention stores. Inference:
    the weights, in two dtypes under autocast, and the scores of one layer."""
    run = Run(preset(setting.preset), setting.batch, setting.tokens, setting.dtype, fused_norms=False)
    scores = run.model.num_heads * run.batch * run.tokens**2 * run.itemsize if setting.attention == "plain" else 0
    if kinds == FORWARD_ONLY:
        each = 4 if setting.dtype == "float32" else 4 + run.itemsize
        return float(run.model.num_parameters * each + scores)
    return ledger(run, ParallelConfig()).peak + float(run.model.num_layers * scores)


def time_phases(stepper: Stepper, warmup: int, steps: int, kinds: Sequence[str]) -> dict[str, list[float]]:
    """Milliseconds of every measured run of each phase. Inference is last, so that without warm-up the slow first run
    is counted in training."""
    calls = {
        "forward": stepper.forward,
        "backward": stepper.backward,
        "optimizer": stepper.update,
        "inference": stepper.infer,
    }
    phases: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(warmup + steps):
        parts = {kind: timed(call, stepper.device)[0] for kind, call in calls.items() if kind in kinds}
        if "training" in kinds:
            parts["training"] = parts["forward"] + parts["backward"] + parts["optimizer"]
        if number >= warmup:
            for kind, value in parts.items():
                phases[kind].append(value)
    return phases


def measure(setting: Setting, device: torch.device, what: str = "model", kinds: Sequence[str] = KINDS) -> list[Row]:
    """A row for every phase, or only for inference."""
    memory.check_room(needed_bytes(setting, kinds), device)
    stepper = Stepper(setting, device)
    phases = time_phases(stepper, setting.warmup, setting.steps, kinds)
    peaks = {}
    if "training" in kinds:
        peaks["training"] = peak_bytes(stepper, stepper.train)
        stepper.optimizer.state.clear()  # inference needs no moments
    peaks["inference"] = peak_bytes(stepper, stepper.infer)
    return [make_row(setting, device, what, kind, phases[kind], peaks.get(kind)) for kind in kinds]


def make_row(
    setting: Setting, device: torch.device, what: str, kind: str, samples: Sequence[float] = (), peak: Any = None
) -> Row:
    """A row of this benchmark, with or without times."""
    step = preset(setting.preset).flops_per_token(setting.tokens) * setting.batch * setting.tokens / 1e12
    parts = {"inference": 1 / 3, "forward": 1 / 3, "backward": 2 / 3, "training": 1.0}
    impl = setting.impl if what == "model" else f"{setting.impl}, {setting.warmup} warm-ups"
    return record.row(
        record.environment(device), what=what, shape=setting.shape, impl=impl, kind=kind, dtype=setting.dtype,
        samples_ms=samples, tflop=step * parts.get(kind, float("nan")),
        peak_mib=float("nan") if peak is None else peak / 2**20, more=asdict(setting),
    )  # fmt: skip


def compile_layers(setting: Setting, device: torch.device, kinds: Sequence[str]) -> None:
    """Compile a model to the disk cache. Layers share their graphs, so two layers are enough."""
    from torch._inductor import config

    # Autotuning is repeated when the model is measured, because other processes use the device now.
    with config.patch(autotune_local_cache=False):
        stepper = Stepper(setting, device, replace(preset(setting.preset), num_layers=2))
        stepper.infer()
        if "training" in kinds:
            stepper.train()


def job(setting: Setting, device: torch.device, *, fresh: bool = False, kinds: Sequence[str] = KINDS) -> sweep.Job:
    """A job of a sweep; a `fresh` one runs in a new process, without warm-up, for the warm-up study."""
    what = "warm-up" if fresh else "model"
    expected = tuple(make_row(setting, device, what, kind) for kind in kinds)
    ready = partial(compile_layers, setting, device, kinds) if setting.compiled else None
    return sweep.Job(expected, partial(measure, setting, device, what, kinds), ready, None if fresh else "timed")


def table(rows: Sequence[Row]) -> Table:
    """A table with a line per configuration and a column per phase: mean ± standard deviation."""
    return pivot(
        "milliseconds, mean ± standard deviation",
        rows,
        line=lambda row: (row.shape, row.impl, row.dtype),
        names=("model", "implementation", "dtype"),
        column=lambda row: row.kind,
        cell=lambda row: f"{_rounded(row.mean_ms, 4)} ± {_rounded(row.std_ms, 2)}",
    )


def _rounded(value: float, digits: int) -> str:
    """A number with this many significant digits, or all digits before the point, without an exponent."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def bench_model(
    *,
    presets: tuple[str, ...] = ("small",),
    tokens: tuple[int, ...] = (128,),
    batch: int = 4,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    attentions: tuple[str, ...] = ("flashspan",),
    compiled: bool = False,
    warmups: tuple[int, ...] = (5,),
    steps: int = 10,
    forward_only: bool = False,
    device: str = "auto",
    folder: Path = record.FOLDER,
    again: bool = False,
) -> int:
    """Times of forward, backward and optimizer in training steps: mean and deviation; and peak memory.

    Appends rows to FOLDER/model.jsonl. With several --warmups, each configuration runs once for each number of warm-up
    steps, in separate processes: the warm-up study.

    Example: flashspan bench model --presets small medium --tokens 128 256 --compiled

    Args:
        presets: Names of models: tiny, small, medium, large, xl, 2.7B, llama-3.2-1b, ...
        tokens: Context lengths.
        batch: Samples per step.
        dtypes: Dtypes: float32, and bfloat16 for autocast.
        attentions: Attention: flashspan, or plain (scores, softmax, values).
        compiled: Measurements with torch.compile, in addition.
        warmups: Numbers of steps before the measured ones.
        steps: Number of measured steps.
        forward_only: Inference only, for models whose training step does not fit.
        device: Device type: auto, cpu or cuda.
        folder: Folder for the rows.
        again: Repetition of measurements that the folder already has.
    """
    place = record.find_device(device)
    if not presets:
        raise ValueError("--presets needs one or more models, such as small: got none")
    for name in presets:
        preset(name)  # raises for unknown ones
    _check(tokens=tokens, batch=(batch,))
    check_repeats(1, steps=steps)
    if not warmups:
        raise ValueError("--warmups needs one or more numbers: got none")
    for count in warmups:
        check_repeats(0, warmups=count)
    for names, known, word in (
        (dtypes, ("float32", "bfloat16", "float16"), "dtypes"),
        (attentions, ATTENTIONS, "attentions"),
    ):
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ValueError(f"--{word} takes {', '.join(known)}: got {', '.join(unknown) or 'none'}")
    settings = [
        Setting(name, batch, length, dtype, attend, comp, warmup, steps)
        for name in presets
        for length in tokens
        for dtype in dtypes
        for attend in attentions
        for comp in ((False, True) if compiled else (False,))
        for warmup in warmups
    ]
    study = len(warmups) > 1
    path = folder / "model.jsonl"
    kinds = FORWARD_ONLY if forward_only else KINDS
    jobs = [job(setting, place, fresh=study, kinds=kinds) for setting in settings]
    outcome = sweep.run(jobs, path, again=again, title="model")
    show_tables([table(outcome.rows)], outcome.note(path))
    return 0


def _check(**numbers: Sequence[int]) -> None:
    for name, values in numbers.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be 1 or more: got {' '.join(map(str, values)) or 'none'}")
