"""`flashspan compile`: compile GPU kernels before their first use, in parallel, into Triton's cache.

    flashspan compile llama-3.2-1b --tokens 8192            # the kernels of training and of generation
    flashspan compile --shapes 1,32,8,8192,128,causal       # attention of one shape, forward and backward
    flashspan compile llama-3.2-1b --architecture 90        # for a Hopper GPU, on a machine without one

Calls are made on meta tensors, which have no data; the kernels that they would launch are compiled instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flashspan.attention import attention
from flashspan.bench.suites.attention import Shape
from flashspan.generate.fused_step import FusedStep
from flashspan.kernels.contract import Problem
from flashspan.kernels.masks import CAUSAL, Mask, Rows
from flashspan.model import Llama, LlamaConfig
from flashspan.model import preset as find_preset
from flashspan.progress import progress

MOST_TOKENS = 2**31 - 1
DEVICE = torch.device("meta")


def compile_kernels(
    model: str = "",
    *,
    shapes: tuple[str, ...] = (),
    tokens: int = 8192,
    batch: int = 1,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    only: Literal["both", "training", "generation"] = "both",
    architecture: int = 0,
) -> int:
    """Compile GPU kernels before their first use, in parallel, into Triton's cache.

    Args:
        model: Name of a model preset, such as llama-3.2-1b.
        shapes: Attention shapes, each batch,heads,key heads,tokens,head size,pattern; patterns as in bench attention.
        tokens: Length of a training sequence, and of prompt and answer together in generation.
        batch: Number of sequences.
        dtype: Data type of the model or of the shapes.
        only: Part of the model's work to compile for.
        architecture: Compute capability without the dot (90 for an H100 or H200); 0: that of this machine's
            GPU.
    """
    if not model and not shapes:
        raise ValueError(
            "compile needs a model or shapes: got neither; for example flashspan compile llama-3.2-1b, or "
            "flashspan compile --shapes 1,32,8,8192,128,causal"
        )
    if not (1 <= tokens <= MOST_TOKENS and 1 <= batch <= MOST_TOKENS):
        raise ValueError(f"tokens and batch must be 1 to {MOST_TOKENS}: got {tokens} tokens and batch {batch}")
    config, parsed = find_preset(model) if model else None, [Shape.parse(shape) for shape in shapes]
    from flashspan.kernels.launch import triton_abi

    kernels = Kernels(choose_architecture(architecture), getattr(torch, dtype))
    calls = [call for shape in parsed for call in kernels.of_shape(shape)]
    if config is not None:
        calls += kernels.of_model(config, tokens, batch, training=only != "generation", generation=only != "training")
    found = {"compiled": 0, "cached": 0}

    def count(cached: bool) -> None:
        found["cached" if cached else "compiled"] += 1

    triton_abi.count_compilations(count)
    began = time.monotonic()
    failures = compile_calls(calls)
    spent = time.monotonic() - began
    print(
        f"{found['compiled']} kernels compiled in {spent:.1f} s, {found['cached']} were there already; sm_"
        f"{kernels.architecture}, {dtype}, in {triton_abi.cache_folder()}"
    )
    for name, failure in failures.items():
        print(f"{name} does not compile, so other kernels are used: {failure}")
    return 1 if failures else 0


def choose_architecture(architecture: int) -> int:
    """The given architecture, or that of this machine's GPU; Triton compiles for it from now on."""
    from flashspan.kernels.launch import triton_abi

    here = 0
    if torch.cuda.is_available() and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability()
        here = 10 * major + minor
    if not architecture and not here:
        raise ValueError(
            "compile needs an NVIDIA GPU here or the architecture of another: found neither; use --architecture 90 for "
            "an H100 or H200"
        )
    if architecture and not 80 <= architecture < 1000:
        raise ValueError(f"the kernels need an architecture of 80 or more (Ampere): got {architecture}")
    if triton_abi.is_interpreting():
        raise ValueError("Triton's interpreter compiles nothing: got TRITON_INTERPRET=1; unset it")
    if architecture not in (0, here):
        triton_abi.compile_for_architecture(architecture)
    return architecture or here


def compile_calls(calls: list[Callable[[], object]]) -> dict[str, str]:
    """Compile the kernels that calls on meta tensors launch, each once. Returns the errors, by the kernel's name."""
    from flashspan.kernels.launch.compiling import launches_of, start

    launches = {launch.key(): launch for call in calls for launch in launches_of(call)}
    failures: dict[str, str] = {}
    with progress("compile", total=len(launches)) as line:
        # The kernels of attention take longest to compile; their calls come first.
        running = {start(launch, None): launch for launch in launches.values()}
        try:
            for future in as_completed(running):
                kernel = running[future].kernel
                if (error := future.exception()) is not None:
                    failures[kernel.__name__] = f"{type(error).__name__}: {error}"[:300]
                line.show(f"compile {kernel.__name__}")
                line.advance()
        finally:
            for future in running:
                future.cancel()  # otherwise, after Ctrl-C, Python would wait for compilations that have not begun
    return failures


@dataclass(frozen=True)
class Kernels:
    """Makes calls on meta tensors, with the backend that is used on a GPU of this architecture."""

    architecture: int
    dtype: torch.dtype

    def of_shape(self, shape: Shape) -> Iterator[Callable[[], object]]:
        """Attention of a shape, forward and backward."""
        yield from self.attention(shape.B, shape.H, shape.K, shape.T, shape.T, shape.D, shape.mask(), None, True)

    def of_model(
        self, model: LlamaConfig, tokens: int, batch: int, *, training: bool, generation: bool
    ) -> list[Callable[[], object]]:
        """The calls of a LLaMA's training and generation."""
        heads = (batch, model.num_heads, model.num_kv_heads)
        fused = self.is_hopper and self.dtype != torch.float32 and model.head_dim in (64, 128)
        calls: list[Callable[[], object]] = []
        if training:
            scale = math.log(2) if fused else None
            calls += self.attention(*heads, tokens, tokens, model.head_dim, CAUSAL, scale, True)
            calls += self.operators(model, batch * tokens) if fused else []
            calls.append(self.loss(model, batch * tokens))
            calls.append(self.optimizer)
        if generation:
            calls += self.attention(*heads, tokens, tokens, model.head_dim, CAUSAL, None, False)
            calls += self.attention(*heads, 1, tokens, model.head_dim, self.ragged(batch, tokens), None, False)
            calls += self.decode_step(model, tokens, batch)
        return calls

    @property
    def is_hopper(self) -> bool:
        return self.architecture == 90

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=DEVICE)

    def ragged(self, batch: int, num_keys: int) -> Mask:
        """A mask with one query per row, which sees the first keys of a cache; the number of keys is on the device."""
        end = self.empty(batch, 1, dtype=torch.int32)
        return Rows.unpack([num_keys, 1, num_keys], [end, end, *(self.empty(batch, num_keys, dtype=torch.int32),) * 2])

    def attention(
        self, B: int, H: int, K: int, T: int, S: int, D: int, mask: Mask, scale: float | None, backward: bool
    ) -> list[Callable[[], object]]:
        """Calls of attention with these shapes: forward and, with `backward`, backward."""
        local: Any
        if self.is_hopper and self.dtype != torch.float32 and D % 8 == 0:
            from flashspan.kernels import hopper as local
        else:
            from flashspan.kernels import portable as local
        from flashspan.kernels.backends import backward_of_output

        q, k, v = (self.empty(B, length, heads, D).transpose(1, 2) for length, heads in ((T, H), (S, K), (S, K)))
        problem = Problem(mask.to(DEVICE), D**-0.5 if scale is None else scale)
        lse = self.empty(B, H, T, dtype=torch.float32)
        into = {"dq": q, "dk": k, "dv": v}
        calls: list[Callable[[], object]] = [lambda: local.forward(q, k, v, problem, out_dtype=self.dtype)]
        if backward:
            calls.append(lambda: backward_of_output(local, (q, q, k, v, q, lse), problem, **into))
        return calls

    def decode_step(self, model: LlamaConfig, tokens: int, batch: int) -> list[Callable[[], object]]:
        """A step of generation by `FusedStep`; none if its kernels do not support this many sequences."""
        from flashspan.generate.kernels.matvec import MAX_ROWS

        if batch > MAX_ROWS or self.architecture < 80:
            return []
        with torch.device(DEVICE):
            llama = Llama(replace(model, num_layers=1), attention=attention).to(self.dtype)
        room = self.empty(2, batch, model.num_kv_heads, tokens, model.head_dim)
        positions, given = self.empty(batch, dtype=torch.int64), self.empty(batch, 1, dtype=torch.int64)
        steps = [FusedStep(llama, [room], positions, even) for even in {True, batch == 1}]
        return [partial(step, given) for step in steps]

    def operators(self, model: LlamaConfig, rows: int) -> list[Callable[[], object]]:
        """A layer's matmuls with their epilogues, forward and backward."""
        from flashspan.ops.kernels.gated import gated, gated_backward
        from flashspan.ops.kernels.projection import project
        from flashspan.ops.kernels.residual import sum_of_products

        E, F, D = model.width, model.ffn_width, model.head_dim
        q_width, k_width = model.num_heads * D, model.num_kv_heads * D
        x, wide, q, k = (self.empty(rows, width) for width in (E, F, q_width, k_width))
        wq, wk, gate, down, out = (
            self.empty(*shape) for shape in ((q_width, E), (k_width, E), (F, E), (E, F), (E, q_width))
        )
        angles = self.empty(rows, D // 2, dtype=torch.float32)
        return [
            lambda: gated_backward(x, down, wide, wide),
            lambda: gated(x, gate, gate),
            lambda: project(x, (wq, wk, wk), angles, angles, 1.0),
            lambda: sum_of_products(x, (q, out), transposed=True),
            lambda: sum_of_products(x, (wide, down), transposed=True),
            lambda: sum_of_products(None, (wide, gate), (wide, gate), transposed=False),
            lambda: sum_of_products(None, (q, wq), (k, wk), (k, wk), transposed=False),
        ]

    def loss(self, model: LlamaConfig, rows: int) -> Callable[[], object]:
        from flashspan.ops.kernels.cross_entropy import losses_and_gradients

        logits, targets = self.empty(rows, model.vocab_size), self.empty(rows, dtype=torch.int64)
        return lambda: losses_and_gradients(logits, targets, ignored=-100)

    def optimizer(self) -> None:
        from flashspan.ops.kernels.adamw import adamw_launch

        int32, int64, float32 = (self.empty(8, dtype=x) for x in (torch.int32, torch.int64, torch.float32))
        tensors = (int64, int32, int64, int64, float32, float32, float32, float32)
        adamw_launch(tensors, (0.9, 0.1, 0.95, 0.05, 1e-8, 1.0), self.dtype)()
