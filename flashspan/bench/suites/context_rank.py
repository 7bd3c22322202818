"""The measurements of `flashspan bench context` on a rank: steps of a LLaMA with attention split, or on one device.

The time of computation is that of the same step with transfers switched off; the time of communication is that of the
same attention calls with computation switched off. Compared cases take turns, step by step, so that other load of the
machine affects all of them equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.attention import attention
from flashspan.bench.measure import memory, trace
from flashspan.bench.measure.clock import cpu_peak, here, in_turns, timed
from flashspan.bench.measure.strategies import over_all_ranks
from flashspan.bench.measure.switch import Switch
from flashspan.context.strategy import ContextAttention
from flashspan.model import Llama, LlamaConfig, preset
from flashspan.train.metrics import peak_flops

ALONE = "one device"
"""The case of one device, in place of a strategy."""


@dataclass(frozen=True)
class Workload:
    """A model, from a preset or from sizes with a small vocabulary, and the number of tokens on all ranks."""

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tokens: int
    dtype: str
    preset: str | None = None

    @classmethod
    def of_preset(cls, name: str, tokens: int, dtype: str) -> Workload:
        sizes = preset(name)
        return cls(sizes.width, sizes.num_layers, sizes.num_heads, sizes.num_kv_heads, tokens, dtype, name)

    def __str__(self) -> str:
        sizes = f"{self.num_layers}x{self.width}, {self.num_heads}/{self.num_kv_heads} heads"
        return f"{self.preset or sizes}, {self.tokens} tokens"

    def config(self) -> LlamaConfig:
        if self.preset is not None:
            return preset(self.preset)
        return LlamaConfig(
            512, self.width, self.num_layers, self.num_heads, self.num_kv_heads, 64 * ((8 * self.width // 3 + 63) // 64)
        )

    def tflop(self, kind: str) -> float:
        whole = self.config().flops_per_token(self.tokens) * self.tokens / 1e12
        return whole / 3 if kind == "forward" else whole


Entry: TypeAlias = tuple[Workload, tuple[str, str]]
"""One of the cases that take turns: a workload, with a strategy and a layout, or with ALONE and ""."""


@dataclass(frozen=True)
class Measured:
    """One rank's numbers for one case and pass, in milliseconds; numbers of rank 0 only are nan on other ranks."""

    steps: list[float]
    computing: float
    communication: float
    peak_mib: float
    sent: float
    product_share: float
    peak_flops: float
    transport: str = ""  # the transport and its reason


class Case:
    """A case on this rank: its attention and its part of the tokens. All cases share one model."""

    def __init__(self, case: tuple[str, str], work: Workload, model: Llama, tokens: Tensor) -> None:
        self.work, self.model, self.device = work, model, tokens.device
        self.attend = self.switch = None
        self.num_ranks = 1 if case[0] == ALONE else dist.get_world_size()
        self.waits = case[0] == ALONE and dist.get_rank() > 0  # only rank 0 runs the case of one device
        self.tokens, self.targets = tokens, tokens.roll(-1, 1)
        self.positions = torch.arange(work.tokens, device=self.device)
        if case[0] != ALONE:
            self.attend = over_all_ranks(*case, self.device.type, num_tokens=work.tokens)
            self.switch = Switch(self.attend)
            self.tokens, self.targets = (self.attend.shard(x, 1) for x in (self.tokens, self.targets))
            self.positions = self.attend.positions(work.tokens, self.device)

    def step(self, kind: str) -> None:
        if self.waits:
            return
        model, dtype = self.model, self.work.dtype
        model.attend = self.attend or attention
        cast = torch.autocast(self.device.type, getattr(torch, dtype), enabled=dtype != "float32")
        with torch.set_grad_enabled(kind != "forward"), cast:
            loss = model.loss(model(self.tokens, self.positions), self.targets)
        if kind != "forward":
            loss.backward()
            model.zero_grad()

    def turns(self, kind: str) -> dict[str, Callable[[], None]]:
        """The timed calls: the step, the step without transfers, and its attention without computation."""
        step = partial(self.step, kind)
        if self.attend is None or self.switch is None:
            return {"step": step}
        calls = _attention_calls(self.attend, kind, self.work, self.device)
        return {
            "step": step,
            "computing": partial(self.switch.without, "sends", step),
            "communication": partial(self.switch.without, "computes", calls),
        }

    def watch(self, kind: str) -> tuple[float, float, float]:
        """Peak MiB, bytes sent and share of matmuls of a step, after a warm-up step that also connects the ranks."""
        self.step(kind)
        timeline = memory.Timeline(held=sum(p.nbytes for p in self.model.parameters()) + 3 * self.tokens.nbytes)
        before = self.attend.bytes_sent if self.attend else 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with trace.profiled(self.device, memory=True) as profiler:
            self.step(kind)
        memory.fill(timeline, profiler, self.device)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else timeline.peak
        share = trace.share(trace.kernels(profiler, self.device), "product", "attention")
        return peak / 2**20, (self.attend.bytes_sent if self.attend else 0) - before, share


def run_on_rank(
    entries: Sequence[Entry], kinds: Sequence[str], repeats: int, device_type: str
) -> dict[Entry, dict[str, Measured]]:
    """Run on each rank: the measurements of each entry, by pass. Steps, computation and communication take turns."""
    device = here(device_type)
    torch.manual_seed(0)
    config, longest = entries[0][0].config(), max(work.tokens for work, _ in entries)
    tokens = torch.randint(config.vocab_size, (1, longest), device=device)
    with device:
        model = Llama(config, attention=attention)
    cases, watched, transports = {}, {}, {}
    for entry in entries:  # one after another: a GPU's peak counts all allocated tensors
        work, case = entry
        cases[entry] = Case(case, work, model, tokens[:, : work.tokens])
        watched[entry] = {kind: cases[entry].watch(kind) for kind in kinds}
        attend = cases[entry].attend
        transports[entry] = attend.transport(device) if attend else ""
        dist.barrier()
    nums = {case.num_ranks for case in cases.values()}
    flops = dict.fromkeys(nums, float("nan"))
    if dist.get_rank() == 0:
        dtype, on_gpu = entries[0][0].dtype, device.type == "cuda"
        flops = {num: peak_flops(device, num, dtype) if on_gpu else cpu_peak(num) for num in nums}
    clocks = {
        (entry, kind, name): partial(timed, call, device, together=True)
        for entry in entries
        for kind in kinds
        for name, call in cases[entry].turns(kind).items()
    }
    times = {key: [ms for ms, _ in results] for key, results in in_turns(clocks, repeats).items()}

    def measured(entry: Entry, kind: str) -> Measured:
        steps = times[entry, kind, "step"]
        computing = median(times.get((entry, kind, "computing"), steps))
        communication = median(times.get((entry, kind, "communication"), [0.0]))
        transport = transports[entry]
        return Measured(
            steps, computing, communication, *watched[entry][kind], flops[cases[entry].num_ranks], transport
        )

    return {entry: {kind: measured(entry, kind) for kind in kinds} for entry in entries}


def _attention_calls(attend: ContextAttention, kind: str, work: Workload, device: torch.device) -> Callable[[], None]:
    """A function that calls attention once per layer, as the model does."""
    config, dtype = work.config(), getattr(torch, work.dtype)
    mine = attend.placement(work.tokens).sizes[attend.rank]
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.randn(1, n, mine, config.head_dim, device=device, dtype=dtype) for n in heads)
    for x in (q, k, v):
        x.requires_grad_(kind != "forward")

    def calls() -> None:
        for _ in range(config.num_layers):
            out = attend(q, k, v, causal=True)
            if kind != "forward":
                out.backward(out.detach())

    return calls
