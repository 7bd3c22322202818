"""Our trainer and our decoding compared with transformers + SDPA, in one run on one GPU, on Llama-3.2-1B's shape.

Training is also compared with transformers + Liger's kernels + cuDNN's attention where liger-kernel is installed.

    flashspan bench training --profile                    # all parts, about 3 minutes on an H200
    flashspan bench training --part train8k               # or train32k, or generate
    flashspan bench training --tiny                       # a tiny model, to test the benchmark, also on a CPU

Our step is `Trainer.take_step`, which `flashspan train` calls, with the options in OURS: data from a token file, the
loss on the device, clipping, fused AdamW. Theirs is forward, backward, clipping to the same norm, the same fused AdamW.
Both start from one checkpoint, so the first losses can be compared. The dtypes are:

    theirs              weights, gradients, moments bfloat16; norms in float32; logits bfloat16, then float32
    flashspan           weights, gradients, moments bfloat16; norms in float32; logits bfloat16, a chunk at a time
    flashspan, mixed    weights, gradients, moments float32; matmuls bfloat16 (autocast)

Note [Memory and time]
A layer stores for each token, in bfloat16: its input (4 KB), q, k and v (6), the attention output (4), the output
projection (4), gate and up (32), 50 KB in all. Norms and SwiGLU are recomputed in backward, inside the kernels that
need them. 16 layers take 6.3 GiB at 8k tokens and 25 GiB at 32k. Weights and moments are 6.9 GiB; gradients (2.3 GiB)
are allocated while activations are freed. The loss has 2 GiB of logits, which their gradients overwrite, and 1 GiB for
the head's gradient. So the peak, at the end of forward, is about 16 GiB at 8k and 35 GiB at 32k.

Time at 8k, in ms: matmuls (61 TFLOP) with the operations fused into them 87; attention (15 TFLOP, with scores
recomputed in backward) 30, at 510 TFLOP/s; norms and RoPE in backward 3; other kernels of the loss and the embedding
4; AdamW, which also clips, 4; the gradient norm 1; waiting 4: 134 in all. At 32k: matmuls 348, at 700 TFLOP/s;
attention 444, at 555; the rest 31.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flashspan.attention import attention
from flashspan.bench.measure import record, trace
from flashspan.bench.measure.clock import synchronise, timed
from flashspan.bench.measure.memory import clear, peak_bytes, reset_peak
from flashspan.bench.report import training as page
from flashspan.bench.suites.plain_llama import Baseline, liger_baseline, load_baseline
from flashspan.bench.suites.training_results import Measured, describe, rows_of, table_of
from flashspan.data.samples import Samples
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.data.tokens import open_tokens, write_tokens
from flashspan.generate import Sampling, Whole, decode
from flashspan.launch import use_loopback
from flashspan.model import Llama, LlamaConfig, load_llama, preset, save_state
from flashspan.train import parse
from flashspan.train.loop import Trainer

OURS = ("--train.precision=bfloat16", "--train.recompute=elementwise", "--train.compile=true", "--optimizer.lr=2e-5")
MODES = {"flashspan": "bfloat16", "flashspan, mixed": "float32"}
CLIP, BETAS, EPS = 1.0, (0.9, 0.95), 1e-8
STEPS = 8
"""Measured steps of each implementation: the first few are up to 1% slower than later ones."""

Part: TypeAlias = Literal["train8k", "train32k", "generate"]


@dataclass(frozen=True)
class Sizes:
    """The model and the lengths, in tokens."""

    shape: LlamaConfig
    train: dict[str, int]
    prompt: int = 8192
    new: int = 256


FULL = Sizes(preset("llama-3.2-1b"), {"train8k": 8192, "train32k": 32768})
TINY = Sizes(
    preset("tiny", width=32, ffn_width=64, num_layers=2, tie_embeddings=True), {"train8k": 32, "train32k": 96}, 24, 6
)


class Bench:
    """The measurements of one run, in a separate folder."""

    def __init__(self, sizes: Sizes, folder: Path, device: torch.device, *, profile: bool = False) -> None:
        self.sizes, self.folder, self.device, self.profile = sizes, folder, device, profile
        self.results: list[Measured] = []
        save_state(random_weights(sizes.shape, device), sizes.shape, folder / "model")
        coder = ByteTokenizer()
        coder.vocab_size = sizes.shape.vocab_size
        noise = torch.randint(sizes.shape.vocab_size, (4 * max(sizes.train.values()) + 1,)).numpy()
        with write_tokens(folder / "data" / "train.bin", coder) as writer:
            writer.add(noise)
        self.noise = torch.from_numpy(open_tokens(folder / "data").tokens.astype("int64"))

    def train(self, part: str, modes: Sequence[str]) -> None:
        """Measure steps of the baseline, of the one with Liger's kernels if installed, then of ours in each mode."""
        num_tokens = self.sizes.train[part]
        flops = self.sizes.shape.flops_per_token(num_tokens) * num_tokens
        theirs = load_baseline(self.folder / "model", self.device)
        name, step = theirs.name, self._their_step(theirs, num_tokens)
        del theirs
        first, seconds, peak = self._measure(step, name)
        self._keep(Measured(part, name, seconds, peak, num_tokens, flops, 0.0))
        del step
        if self.device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
            clear(self.device)
            with liger_baseline(self.folder / "model", self.device) as liger:
                loss, seconds, peak = self._measure(self._their_step(liger, num_tokens), liger.name)
            self._keep(Measured(part, liger.name, seconds, peak, num_tokens, flops, abs(loss / first - 1)))
            del liger
        for name in modes:
            clear(self.device)  # frees the previous one
            found = None
            try:
                found = self._measure(self._our_step(num_tokens, MODES[name]), name)
            except torch._dynamo.exc.TorchDynamoException:  # print the reason, then measure without compilation
                traceback.print_exc()
            if found is None:
                clear(self.device)
                step = self._our_step(num_tokens, MODES[name], "--train.compile=false")
                name += ", not compiled"
                found = self._measure(step, name)
                del step
            loss, seconds, peak = found
            self._keep(Measured(part, name, seconds, peak, num_tokens, flops, abs(loss / first - 1)))
        clear(self.device)

    def generate(self) -> None:
        """Measure a prompt and the greedy decoding after it, after one warm-up run."""
        prompt = self.noise[: self.sizes.prompt].unsqueeze(0).to(self.device)
        theirs = load_baseline(self.folder / "model", self.device)
        theirs.model.eval()
        with torch.inference_mode():
            logits = theirs.extend(prompt, None)[0]  # without the cache, whose memory would count below
        self._generate(theirs.name, partial(self._their_decode, theirs, prompt), 0.0)
        del theirs
        clear(self.device)
        model = load_llama(self.folder / "model", attention=attention, dtype=torch.bfloat16, device=self.device).eval()
        with torch.inference_mode():
            ours = model.logits(model(prompt)[:, -1])
        error = float((ours.float() - logits.float()).norm() / logits.float().norm())
        try:
            self._generate("flashspan", partial(self._our_decode, model, prompt, graph=True), error)
        except RuntimeError as problem:  # a kernel that cannot be recorded: print it, and measure without a graph
            print(f"flashspan's decoding could not be recorded as a CUDA graph: {problem}")
            self._generate("flashspan", partial(self._our_decode, model, prompt, graph=False), error)
        del model
        clear(self.device)

    def _our_step(self, num_tokens: int, weights: str, *more: str) -> Callable[[], float]:
        options = [
            f"--model.load={self.folder / 'model'}",
            f"--data.train={self.folder / 'data'}",
            f"--data.sequence={num_tokens}",
            "--train.batch=1",
            f"--train.weights={weights}",
            f"--checkpoint.folder={self.folder / 'run'}",
            "--parallel.context=1",
            f"--parallel.device={self.device.type}",
            f"--optimizer.clip={CLIP}",
            *OURS,
            *more,
        ]
        print("flashspan train", " ".join(options), flush=True)
        trainer = Trainer(parse(options))
        return lambda: trainer.take_step()[0]

    def _their_step(self, theirs: Baseline, num_tokens: int) -> Callable[[], float]:
        params = list(theirs.model.parameters())
        optimizer = torch.optim.AdamW(
            params, lr=2e-5, betas=BETAS, eps=EPS, weight_decay=0.1, fused=self.device.type == "cuda"
        )
        theirs.model.train()
        samples = Samples(open_tokens(self.folder / "data"), num_tokens, seed=0)
        taken = iter(range(1000))

        def step() -> float:
            optimizer.zero_grad()
            tokens, targets = (x.to(self.device) for x in samples.read([next(taken)]))
            loss = theirs.loss(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, CLIP)
            optimizer.step()
            return float(loss.detach())

        return step

    def _measure(self, step: Callable[[], float], name: str) -> tuple[float, list[float], int]:
        """The first loss, the seconds of STEPS steps after two warm-up steps, and the peak memory of those steps."""
        spent, (first, _) = timed(lambda: (step(), step()), self.device)
        print(f"{name}: {spent / 1e3:.1f} s to warm up", flush=True)
        reset_peak(self.device)
        seconds = [timed(step, self.device)[0] / 1e3 for _ in range(STEPS)]
        peak = peak_bytes(self.device)
        if self.profile and self.device.type == "cuda":
            self._show(step, name)
        return first, seconds, peak

    def _show(self, step: Callable[[], float], name: str) -> None:
        """Print the time of a step by kernel."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            synchronise(self.device)
        kernels = trace.kernels(seen.profiler, self.device)
        print(f"{name}: {sum(kernel.milliseconds for kernel in kernels):.1f} ms of kernels in a step")
        for kernel in kernels[:14]:
            print(f"  {kernel.milliseconds:8.2f} ms {kernel.count:5} x  {kernel.name[:100]}")

    def _their_decode(self, theirs: Baseline, prompt: Tensor) -> tuple[float, float]:
        """Seconds of the prompt and of the tokens after it. Unlike generate(), this does not wait for each token."""
        state: tuple[Tensor, Any] = (prompt, None)

        def extend(times: int) -> None:
            nonlocal state
            for _ in range(times):
                logits, cache = theirs.extend(*state)
                state = logits.argmax(-1, keepdim=True), cache

        with torch.inference_mode():
            first, rest = (timed(partial(extend, times), self.device)[0] for times in (1, self.sizes.new - 1))
        return first / 1e3, rest / 1e3

    def _our_decode(self, model: Llama, prompt: Tensor, *, graph: bool) -> tuple[float, float]:
        """The same seconds for our `decode`, including the recording of the graph."""
        tokens = decode(model, prompt, self.sizes.new, sampling=Sampling(0), context=Whole(graph=graph))
        first, _ = timed(lambda: next(tokens), self.device)
        rest, _ = timed(lambda: sum(1 for _ in tokens), self.device)
        return first / 1e3, rest / 1e3

    def _generate(self, name: str, run: Callable[[], tuple[float, float]], error: float) -> None:
        run()
        reset_peak(self.device)
        prompts, rest = zip(*(run() for _ in range(3)), strict=True)
        peak, shape, new = peak_bytes(self.device), self.sizes.shape, self.sizes.new - 1
        forward = shape.flops_per_token(self.sizes.prompt) / 3
        self._keep(
            Measured("prefill", name, list(prompts), peak, self.sizes.prompt, forward * self.sizes.prompt, error)
        )
        self._keep(Measured("decode", name, list(rest), peak, new, forward * new, 0.0))

    def _keep(self, measured: Measured) -> None:
        self.results.append(measured)
        print(f"{measured.part} {measured.name}: {describe(measured)}", flush=True)


def random_weights(shape: LlamaConfig, device: torch.device) -> dict[str, Tensor]:
    """Random bfloat16 weights of a model, generated on the device."""
    with torch.device("meta"):
        model = Llama(shape, attention=attention)
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.ones(p.shape, dtype=torch.bfloat16)
        if p.dim() == 1
        else torch.empty(p.shape, device=device).normal_(0, 0.02, generator=generator).bfloat16().cpu()
        for name, p in model.named_parameters()
    }


def bench_training(
    part: tuple[Part, ...] = (), *, file: Path | None = None, profile: bool = False, tiny: bool = False
) -> int:
    """Training and generation of Llama-3.2-1B's shape on one GPU, compared with transformers with SDPA and,
    if installed, with Liger's kernels.

    Appends rows to docs/benchmarks/trainer.csv and writes the page next to it. About 3 minutes on an H200.

    Args:
        part: Parts to measure: a training step at 8k or 32k tokens, or generation; all by default.
        file: File that rows are appended to; by default docs/benchmarks/trainer.csv, none with --tiny.
        profile: Time of a step by kernel.
        tiny: Tiny model and short sequences, to test the benchmark itself, also on a CPU.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not tiny:
        raise ValueError("bench training needs a CUDA device: found none; --tiny runs on a CPU")
    parts = part or get_args(Part)
    file = file or (None if tiny else page.PATH)
    folder = Path(tempfile.mkdtemp(prefix="flashspan-bench-"))
    alone = not dist.is_initialized()
    if alone:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        use_loopback()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(TINY if tiny else FULL, folder, device, profile=profile)
    failed = False
    try:
        for name in parts:
            try:
                if name == "generate":
                    bench.generate()
                else:
                    # Other weight dtypes need another compilation: only at the shorter length.
                    bench.train(name, list(MODES) if name == "train8k" else ["flashspan"])
            except Exception:  # the other parts are still measured
                traceback.print_exc()
                failed = True
            clear(device)
    finally:
        if bench.results:
            print(f"\n{table_of(bench.results)}")
            if file is not None:
                record.append(rows_of(bench.results, bench.sizes.shape, bench.sizes.prompt, device), file)
                print(f"rows are in {file}")
            if file == page.PATH:
                page.write()
        shutil.rmtree(folder, ignore_errors=True)
        if alone:
            dist.destroy_process_group()
    return int(failed)
