"""One training step under every strategy of `flashspan.parallel`, on 1 to 8 ranks of this machine, in one run.

    flashspan bench data --ranks 2 4         # appends rows to data.jsonl, prints tables

Ranks are GPUs where there are enough of them for all that is asked for, and processes on the CPU otherwise.

All strategies take turns, step by step and in changing order, so that whatever else the machine does hits them equally.
They share the global batch: data strategies split its samples, context its sequences, tensor strategies the layers.
`hybrid` is the tensor strategy with sparse attention: blocks of `HybridBlock` and a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flashspan.attention import attention
from flashspan.bench.measure import record, trace
from flashspan.bench.measure.clock import check_repeats, here, synchronise, timed
from flashspan.bench.measure.ledger import Ledger, Strategy, Transformer, measure, predict, record_activations
from flashspan.bench.measure.memory import free_bytes
from flashspan.bench.measure.record import Row
from flashspan.bench.report.tables import Table, make, show_tables
from flashspan.context import context_parallel
from flashspan.launch import Ranks
from flashspan.parallel import (
    DataParallel,
    HybridBlock,
    ShardedOptimizer,
    apply_fully_sharded,
    apply_tensor_parallel,
    build_mesh,
    vocabulary_parallel_cross_entropy,
)
from flashspan.parallel.data import Mode
from flashspan.parallel.tensor import Style

SIZES = Transformer(num_layers=6, width=256, num_heads=8, num_kv_heads=4, ffn_width=688, vocab_size=4096)
LENGTH = 128
WINDOW = 32
BUCKET_MB = 4.0  # in proportion to a model this small; the default suits larger ones
PROFILED = 3  # steps, apart from those that are timed: a profiler slows the host down
MIB = 2**20
WIRE = (
    "communication ms and hidden: on the CPU, for those that reduce gradients by DataParallel (naive to bucketed, "
    "sharded optimizer, context), that reduction alone, and the part of it before backward ended; for the others, and "
    "for all on GPUs, every collective of a profiled step, waiting included, and the part in which the rank also "
    "computed. "
    "The two kinds of hidden do not compare."
)

SPLIT: dict[str, Style] = {
    "embed": "vocabulary",
    "blocks.*_norm": "norm-entering",
    **{f"blocks.*.{name}": "column-entered" for name in ("query", "key", "value", "gate", "up")},
    "blocks.*.output": "row",
    "blocks.*.down": "row",
    "norm": "norm",
    "head": "column",
}


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    """A pre-norm transformer block, told nothing of devices; the number of heads it sees is up to its projections."""

    def __init__(self, sizes: Transformer, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_size = sizes.width // sizes.num_heads
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, sizes.kv_width, bias=False)
        self.value = nn.Linear(sizes.width, sizes.kv_width, bias=False)
        self.output = nn.Linear(sizes.width, sizes.width, bias=False)
        self.ffn_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.gate = nn.Linear(sizes.width, sizes.ffn_width, bias=False)
        self.up = nn.Linear(sizes.width, sizes.ffn_width, bias=False)
        self.down = nn.Linear(sizes.ffn_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Embedding, blocks, norm and head: [B, T] -> [B, T, V]."""

    def __init__(self, sizes: Transformer, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab_size, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes, attend) for _ in range(sizes.num_layers)])
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Contender:
    """A strategy ready to step: what runs, what holds the parameters, and this rank's part of the batch."""

    strategy: Strategy  # which ledger it keeps
    model: nn.Module
    running: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.running(self.tokens), self.tokens).backward()
        self.optimizer.step()

    def watch(self, device: torch.device) -> tuple[float, float]:
        """The milliseconds of communication in a profiled step, and the fraction of them that computing hid."""
        dist.barrier()
        with trace.profiled(device) as profiler:
            self.step()
            synchronise(device)
        return trace.wire_of(profiler.kineto_results.events(), device)

    def ledger(self) -> Ledger:
        """Of a step taken for the purpose."""
        self.optimizer.zero_grad()
        with record_activations(self.model) as kept:
            loss = self.loss(self.running(self.tokens), self.tokens)
        loss.backward()
        self.optimizer.step()
        return measure(self.model, self.optimizer, kept)


CONTENDERS = (
    *get_args(Mode),
    "torch DDP",
    "sharded optimizer",
    "fully sharded",
    "context",
    "tensor",
    "tensor and sequence",
    "hybrid",
)


SPLIT_BY: dict[str, Strategy] = {
    "sharded optimizer": "sharded optimizer",
    "fully sharded": "fully sharded",
    "tensor": "tensor",
    "tensor and sequence": "tensor and sequence",
    "hybrid": "tensor",
}
"""What splits the memory of the contenders; that of the others is "data"."""


def prepare(
    name: str,
    sizes: Transformer,
    batch: int,
    length: int,
    window: int = WINDOW,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> Contender:
    """A contender by name, with `batch` sequences per rank. A collective."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Model(sizes, _causal).to(device)
    tokens = torch.randint(sizes.vocab_size, (batch * num_ranks, length)).to(device)
    running: nn.Module = model
    strategy = SPLIT_BY.get(name, "data")
    loss: Callable[[Tensor, Tensor], Tensor] = _loss
    mine = tokens.chunk(num_ranks)[rank]
    if name in get_args(Mode):
        running = DataParallel(model, name, BUCKET_MB)  # type: ignore[arg-type]
    elif name == "torch DDP":
        running = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    elif name == "sharded optimizer":
        running = DataParallel(model, bucket_mb=BUCKET_MB)
    elif name == "fully sharded":
        apply_fully_sharded(model, build_mesh(shard=num_ranks), model.blocks)
    elif name == "context":
        ring = context_parallel(dist.group.WORLD, num_tokens=length)
        model = Model(sizes, partial(ring, causal=True)).to(device)
        running, mine = DataParallel(model, bucket_mb=BUCKET_MB, op="sum"), ring.shard(tokens, 1)

        def loss(logits: Tensor, tokens: Tensor) -> Tensor:
            return _loss(logits, tokens) / num_ranks
    elif name in ("tensor", "tensor and sequence", "hybrid"):
        sequence = name == "tensor and sequence"
        mine = tokens
        mesh = build_mesh(tensor=num_ranks)["tensor"]
        if name == "hybrid":
            model.blocks = nn.ModuleList([_hybrid_block(sizes, window, mesh, device) for _ in model.blocks])
        plan = {k: v for k, v in SPLIT.items() if name != "hybrid" or not k.startswith("blocks")}
        apply_tensor_parallel(model, mesh, plan, sequence_dim=1 if sequence else None)

        def loss(logits: Tensor, tokens: Tensor) -> Tensor:
            return vocabulary_parallel_cross_entropy(logits, tokens, vocab_size=sizes.vocab_size, mesh=mesh).mean()
    else:
        raise ValueError(f"a contender is one of {', '.join(CONTENDERS)}: got {name!r}")
    params = list(model.parameters())
    if name == "sharded optimizer":
        return Contender(strategy, model, running, ShardedOptimizer(params, torch.optim.AdamW), mine, loss)
    return Contender(strategy, model, running, torch.optim.AdamW(params), mine, loss)


def _hybrid_block(sizes: Transformer, window: int, mesh: DeviceMesh, device: torch.device) -> HybridBlock:
    return HybridBlock(
        sizes.width,
        sizes.num_heads,
        sizes.ffn_width,
        attention=partial(attention, causal=True, window=window),
        mesh=mesh,
        num_kv_heads=sizes.num_kv_heads,
        device=device,
    )


def sizes_of(width: int, layers: int, heads: int, kv_heads: int) -> Transformer:
    """The model of these sizes, its MLP 8/3 as wide; refuses what cannot be."""
    given = {"--width": width, "--layers": layers, "--heads": heads, "--kv-heads": kv_heads}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more: got {value}")
    if width % heads or heads % kv_heads or width // heads > 256:
        raise ValueError(
            "heads must divide the width, and kv heads the heads, and a head has 256 features at most: "
            f"got width {width}, {heads} heads and {kv_heads} kv heads; change --width, --heads or --kv-heads"
        )
    ffn_width = 16 * -(-8 * width // (3 * 16))
    return replace(SIZES, width=width, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, ffn_width=ffn_width)


def fitting(names: Sequence[str], num_ranks: int, sizes: Transformer = SIZES) -> list[str]:
    """The contenders that fit so many ranks: tensor parallelism cannot cut a head. There must be one."""
    whole = sizes.num_kv_heads % num_ranks == 0
    found = [name for name in names if whole or not name.startswith(("tensor", "hybrid"))]
    if not found:
        raise ValueError(
            f"tensor parallelism needs a number of ranks that divides the {sizes.num_kv_heads} kv heads: "
            f"got {num_ranks} for {', '.join(names)}; use other --ranks or --kv-heads, or measure other strategies too"
        )
    return found


def refuse_large(names: Sequence[str], num_ranks: int, sizes: Transformer, tokens: int, device_type: str) -> None:
    """ValueError for what a CPU's memory cannot hold, before ranks are started: each has all contenders at once."""
    count = num_ranks * tokens  # of a step, over all ranks
    needed = sum(predict(sizes, SPLIT_BY.get(name, "data"), num_ranks=num_ranks, tokens=count).total for name in names)
    needed *= num_ranks
    free = free_bytes(device_type) if device_type == "cpu" else None
    if free is not None and needed > free:
        raise ValueError(
            f"bench data must fit in memory: {len(names)} strategies on {num_ranks} ranks need {needed / 2**30:,.1f} "
            f"GiB, and {free / 2**30:,.1f} are there; measure fewer with --only, or a smaller model or --batch"
        )


def shape_of(sizes: Transformer, window: int, batch: int, length: int) -> str:
    """What rows call these sizes. Heads and window are named where they are not the usual ones, which earlier rows did
    not name."""
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
    """Rows for the named contenders that fit so many ranks, measured in turns on ranks started for it.

    Times are a step's, the slowest rank's; memory is rank 0's.
    """
    names = fitting(names, num_ranks, sizes)
    with Ranks(num_ranks, backend="nccl" if device_type == "cuda" else "gloo", timeout=300) as ranks:
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
                    "communication_ms": first["communication"],  # WIRE says of what
                    "hidden": first["hidden"],  # the fraction of it that computing hid
                    "parameters_mib": ledger.parameters / MIB,
                    "gradients_mib": ledger.gradients / MIB,
                    "optimizer_mib": ledger.optimizer / MIB,
                    "activations_mib": ledger.activations / MIB,
                    "predicted_mib": expected.total / MIB,  # the four together
                },
            )
        )
    return rows


def _take_turns(
    names: list[str], sizes: Transformer, batch: int, length: int, window: int, rounds: int, device_type: str
) -> dict[str, Any]:
    """On each rank: steps of all contenders in turns; what each took, and what it holds."""
    device = here(device_type)
    contenders = {name: prepare(name, sizes, batch, length, window, device) for name in names}
    ledgers = {name: contender.ledger() for name, contender in contenders.items()}  # also the first warm-up
    steps: dict[str, list[float]] = {name: [] for name in names}
    traffic: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            contender = contenders[name]
            elapsed, _ = timed(contender.step, device, together=True)
            if turn:  # the first is for warming up
                steps[name].append(elapsed)
                # On a GPU its clock, the host's, would count how long it takes to launch a reduction.
                if isinstance(contender.running, DataParallel) and device.type == "cpu":
                    spent = contender.running.traffic
                    traffic[name].append((1e3 * spent.communication, spent.hidden))
    for name in names:  # after all that is timed
        if not traffic[name]:
            traffic[name] = [contenders[name].watch(device) for _ in range(PROFILED)]
    return {
        name: {
            "strategy": contenders[name].strategy,
            "steps": steps[name],
            "ledger": ledgers[name],
            "communication": median(c for c, _ in traffic[name]),
            "hidden": median(h for _, h in traffic[name]),
        }
        for name in names
    }


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def table(rows: Sequence[Row]) -> Table:
    """Rows of one number of ranks."""
    rows = [record.kept(row) for row in rows]
    best = min(row.p50_ms for row in rows)

    def more(name: str) -> Callable[[Row], object]:
        return lambda row: row.more[name]

    return make(
        f"{rows[0].ranks} ranks, {rows[0].shape}: a step in milliseconds, what a rank holds in MiB",
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
    only: tuple[str, ...] = CONTENDERS,
    folder: Path = record.FOLDER,
) -> int:
    """A training step under every strategy of data, optimizer, context and tensor parallelism, in one run.

    Time, communication and the part of it that computing hides, and the memory of a rank by kind. Runs on GPUs
    where there are as many as the largest number of ranks; without enough GPUs it measures processes on the CPU. Rows
    go to FOLDER/data.jsonl.

    Args:
        ranks: the numbers of ranks, each 1 to 8.
        rounds: timed steps of each.
        batch: sequences per rank.
        tokens: of each sequence.
        width: of the model.
        layers: of the model.
        heads: query heads.
        kv_heads: key and value heads.
        window: how many keys a query of hybrid sees.
        only: the strategies to measure.
        folder: where the rows go.
    """
    unknown = [name for name in only if name not in CONTENDERS]
    if unknown or not only:
        raise ValueError(f"a contender is one of {', '.join(CONTENDERS)}: got {', '.join(unknown) or 'none'}")
    if not ranks or min(ranks) < 1 or max(ranks) > 8 or batch < 1:
        shown = " ".join(map(str, ranks)) or "none"
        raise ValueError(f"bench data needs 1 to 8 ranks and 1 sequence: got {shown} ranks and {batch} sequences")
    check_repeats(2, rounds=rounds)
    sizes = sizes_of(width, layers, heads, kv_heads)
    if window < 1:
        raise ValueError(f"--window must be 1 or more: got {window}")
    if window != WINDOW and "hybrid" not in only:
        raise ValueError(
            f"--window is of the strategy hybrid: got {window} without it; leave it out, or add it to --only"
        )
    if tokens < 2 * max(ranks):
        raise ValueError(f"bench data needs 2 tokens per rank or more: got {tokens} tokens on {max(ranks)} ranks")
    if "tensor and sequence" in only and any(tokens % num_ranks for num_ranks in ranks):
        raise ValueError(
            "with tensor and sequence the --tokens must divide by the ranks: "
            f"got {tokens} tokens on {' '.join(map(str, ranks))} ranks; use others, or leave it out of --only"
        )
    for num_ranks in ranks:
        fitting(only, num_ranks, sizes)  # refused before anything is measured
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
