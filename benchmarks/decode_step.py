"""Measure a decode step of the Llama-3.2-1B shape on one GPU: whole, by kernel, and the tiles of each matmul.

    PYTHONPATH=. python benchmarks/decode_step.py            # every tile
    PYTHONPATH=. python benchmarks/decode_step.py --quick    # the first few tiles of each matmul
    PYTHONPATH=. python benchmarks/decode_step.py --tiny     # a tiny model, to test this program

It measures in bfloat16, with 1 and 16 rows and 8,192 tokens of context, in CUDA graphs. A graph has one launch per
layer, so that weights come from memory, not from the L2 cache; a kernel's time is that of one launch. GB/s counts only
weights (for attention, keys and values). A tile that cannot be compiled or is wrong is reported and left out. Then the
step is timed with the fastest tiles, which need not make the fastest step: with an early start, the tile of one kernel
decides where the programs of the next one find room. All this is repeated with an early start. Several processes first
compile the kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashspan import masks
from flashspan.attention import attention
from flashspan.generate import Whole, fused_step
from flashspan.generate.kernels import matvec
from flashspan.generate.kernels.matvec import Tile
from flashspan.generate.sample import most_probable
from flashspan.kernels.contract import Problem
from flashspan.kernels.launch.launch import Launch
from flashspan.kernels.portable import decode
from flashspan.model import Llama, LlamaConfig, preset

CONTEXT, ROOM, QUICK = 8192, 400, 4
TINY = LlamaConfig(1024, 128, 2, 4, 2, 384, tie_embeddings=True)
NARROW = [
    Tile(16, 4, 128, 4, 8, rows=1, ahead=2048),
    Tile(16, 4, 128, 4, 5, ahead=1024),
    Tile(16, 8, 64, 8, 5),
    Tile(32, 8, 64, 8, 5),
    Tile(16, 8, 128, 8, 4),
    Tile(16, 4, 128, 4, 5, rows=1),
    Tile(16, 4, 64, 4, 8),
    Tile(16, 4, 128, 4, 4),
]
WIDE = [
    Tile(64, 4, 64, 4, 4, rows=1),
    Tile(32, 4, 64, 4, 3),
    Tile(32, 4, 64, 4, 4),
    Tile(64, 4, 32, 4, 5),
    Tile(64, 4, 64, 4, 3),
    Tile(64, 4, 64, 4, 4),
    Tile(64, 8, 32, 8, 4),
    Tile(128, 4, 32, 8, 4),
    Tile(128, 4, 64, 8, 3),
]
PROJECT = [
    Tile(8, 4, 128, 4, 8, rows=1, ahead=1024),
    Tile(8, 4, 128, 4, 4, ahead=1024),
    Tile(16, 4, 128, 4, 4),
    Tile(16, 8, 64, 8, 4),
    Tile(32, 4, 64, 4, 4),
    Tile(32, 8, 64, 8, 4),
    Tile(16, 4, 128, 4, 4, rows=1),
    Tile(16, 4, 64, 4, 6),
    Tile(16, 4, 128, 4, 3),
]
VARIANTS = {"project": PROJECT, "output": NARROW, "gated": WIDE, "down": NARROW, "head": WIDE}
ENTRIES = {"output": "add", "down": "add"}
"""Kind of matmul -> its entry in matvec.TABLE, if the names differ."""


def make_tensors(config: LlamaConfig, num_rows: int, device: str, num_layers: int) -> SimpleNamespace:
    """The tensors that the kernels read and write, including the weights of each layer."""
    E, D, H, G, N = config.width, config.head_dim, config.num_heads, config.num_kv_heads, config.ffn_width

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0, scale)

    def layer() -> dict[str, list[Tensor]]:
        return {
            "project": [draw(heads * D, E, scale=E**-0.5) for heads in (H, G, G)],
            "output": [draw(E, H * D, scale=E**-0.5)],
            "gated": [draw(N, E, scale=E**-0.5) for _ in range(2)],
            "down": [draw(E, N, scale=N**-0.5)],
        }

    return SimpleNamespace(
        layers=[layer() for _ in range(num_layers)],
        head=[draw(config.vocab_size, E, scale=E**-0.5)],
        norm=draw(E),
        x=draw(num_rows, E),
        scaled=draw(num_rows, E),
        mixed=draw(num_rows, H * D),
        hidden=draw(num_rows, N),
        q=draw(num_rows, H, D),
        gated=draw(num_rows, N),
        logits=draw(num_rows, config.vocab_size),
        room=draw(2, num_rows, G, 64, D),
        cos=torch.full((num_rows, D // 2), 0.6, device=device),
        sin=torch.full((num_rows, D // 2), 0.8, device=device),
        positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
    )


def make_launch(kind: str, t: SimpleNamespace, i: int, size: Tile) -> Launch:
    """The launch of a kind of matmul with the weights of layer i, for rows whose mean square is 1."""
    E = t.x.shape[1]
    num_parts = -(-E // size.columns) if kind in ENTRIES else E // 16
    squares = torch.zeros(num_parts, matvec.MAX_ROWS, device=t.x.device)
    squares += E / len(squares)
    weights = t.head if kind == "head" else t.layers[i][kind]
    if kind == "project":
        return matvec.project_launch(
            t.scaled, squares, weights, t.cos, t.sin, t.positions, t.q, t.room, 0.0, 1.0, size
        )  # fmt: skip
    if kind == "gated":
        return matvec.gated_launch(t.scaled, squares, *weights, t.gated, 0.0, 1.0, size)
    if kind == "head":
        return matvec.head_launch(t.scaled, squares, *weights, t.logits, t.positions.clone(), 0.0, 1.0, size)
    a = t.mixed if kind == "output" else t.hidden
    return matvec.add_launch(a, *weights, t.x, t.norm, torch.empty_like(t.x), squares, 1.0, size)


def error(kind: str, t: SimpleNamespace, size: Tile) -> float:
    """The relative error of a tile in layer 0, compared with PyTorch in float32."""
    rows, x = t.scaled.float(), t.x.float()
    weights = [w.float() for w in (t.head if kind == "head" else t.layers[0][kind])]
    if kind == "project":
        left, right = (rows @ weights[0].T).view(t.q.shape).chunk(2, -1)
        want, got = torch.cat((left * 0.6 - right * 0.8, right * 0.6 + left * 0.8), -1), t.q
    elif kind == "gated":
        want, got = F.silu(rows @ weights[0].T) * (rows @ weights[1].T), t.gated
    elif kind == "head":
        want, got = rows @ weights[0].T, t.logits
    else:
        want, got = x + (t.mixed if kind == "output" else t.hidden).float() @ weights[0].T, t.x
    got_before = t.x.clone()
    make_launch(kind, t, 0, size)()
    found = float((got.float() - want).norm() / want.norm())
    t.x.copy_(got_before)
    return found


def compile_ahead(job: tuple[LlamaConfig, str, int, Tile]) -> None:
    """Run in a separate process: compile a kernel into Triton's cache on disk."""
    config, kind, num_rows, size = job
    make_launch(kind, make_tensors(config, num_rows, "cuda", 1), 0, size).compiled()


def recorded(run: Callable[[], Any]) -> Callable[[], None]:
    """A function's launches as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(run: Callable[[], Any], times: int = 10, repeats: int = 5) -> float:
    """The median time of a call; each measurement is of several calls in a row."""
    for _ in range(3):
        run()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / times)
    return statistics.median(found)


def measure_tiles(config: LlamaConfig, num_rows: int, num_tiles: int, early: bool) -> dict[str, Tile]:
    """Print the time of each tile of each matmul; return the fastest of each."""
    t, best = make_tensors(config, num_rows, "cuda", config.num_layers), {}
    for kind, sizes in VARIANTS.items():
        fastest = float("inf")
        num_launches = 1 if kind == "head" else config.num_layers
        num_bytes = 2 * sum(w.numel() for w in (t.head if kind == "head" else t.layers[0][kind]))
        for size in [size for size in sizes if size.rows >= num_rows][:num_tiles]:
            name = f"  {kind:8} {size.columns:3} columns, {size.slices} x {size.depth:3}, {size.num_warps} warps, "
            name += f"{size.num_stages} stages, tile of {size.rows:2} rows{', early' if early else ''}"
            try:
                tile = replace(size, early=early)
                wrong = error(kind, t, tile)
                launches = [make_launch(kind, t, i, tile) for i in range(num_launches)]
                run = recorded(lambda launches=launches: [launch() for launch in launches])
                spent = microseconds(run) / num_launches
            except Exception as problem:  # whatever fails, this tile is left out
                print(f"{name} failed: {type(problem).__name__}: {problem}"[:200], flush=True)
                continue
            verdict = "" if wrong < 1e-2 else f"  WRONG: error {wrong:.1e}"
            print(f"{name} {spent:7.2f} us {num_bytes / spent / 1e3:6.0f} GB/s{verdict}", flush=True)
            if not verdict and spent < fastest:
                fastest, best[kind] = spent, tile
    return best


def measure_attention(config: LlamaConfig, num_rows: int, length: int) -> None:
    """Print the time of the attention of one token."""
    D, shape = config.head_dim, (2, num_rows, config.num_kv_heads, length + ROOM, config.head_dim)
    rooms = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(config.num_layers)]
    q = torch.randn(num_rows, config.num_heads, 1, D, device="cuda", dtype=torch.bfloat16)
    end = torch.full((num_rows, 1), length, dtype=torch.int32, device="cuda")
    problem = Problem(masks.Rows(torch.zeros_like(end), end, length + ROOM, convex=True), D**-0.5)
    run = recorded(lambda: [decode.forward(q, *room, problem, carry=None, out_dtype=q.dtype) for room in rooms])
    spent = microseconds(run) / len(rooms)
    num_bytes = 4 * num_rows * config.num_kv_heads * length * D
    print(f"  attention {spent:7.2f} us {num_bytes / spent / 1e3:6.0f} GB/s", flush=True)


def measure_step(model: Llama, num_rows: int, length: int, name: str, *, fused: bool) -> Tensor:
    """Print the time of a token, including its greedy choice; return the logits of a step."""
    config, context = model.config, Whole(fused=fused)
    tokens = torch.arange(num_rows, device="cuda").unsqueeze(1)
    context.begin(model, tokens, torch.ones(num_rows, dtype=torch.int64), length + ROOM)
    torch.manual_seed(1)
    for cache in context.caches:
        cache.room[:, :, :, :length].normal_()
    context.positions.fill_(length)
    context.longest = length
    ended, not_finite = torch.zeros(2, num_rows, dtype=torch.bool, device="cuda")
    ends = torch.empty(0, dtype=torch.int64, device="cuda")
    logits = context.extend(model, tokens).clone()
    spent = microseconds(lambda: most_probable(context.extend(model, tokens), ended, not_finite, ends), 20, 7)
    alone = microseconds(lambda: context.extend(model, tokens), 10, 3)
    keys = 2 * num_rows * length * config.num_kv_heads * config.head_dim * config.num_layers
    least = 2 * (config.num_matrix_parameters + keys) / 4.2e6
    kind = "kernels of matvec.py" if context._kept is not None else "the model"
    print(
        f"  {name:24} {spent / 1e3:6.3f} ms a token ({alone / 1e3:.3f} without the choice), "
        f"{1e6 * num_rows / spent:8,.0f} tokens/s, {least / 1e3:.3f} ms at 4.2 TB/s; by {kind}",
        flush=True,
    )
    return logits


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first few tiles of each matmul only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a short context")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="batch sizes")
    asked = parser.parse_args()
    config, length = (TINY, 256) if asked.tiny else (preset("llama-3.2-1b"), CONTEXT)
    num_tiles = QUICK if asked.quick else 99
    began = time.perf_counter()
    jobs = [
        (config, kind, num_rows, replace(size, early=early))
        for early in (False, True)
        for kind, sizes in VARIANTS.items()
        for num_rows in asked.rows[:1]
        for size in sizes[:num_tiles]
    ]
    workers = min(12, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        ahead = [pool.submit(compile_ahead, job) for job in jobs]
        failed = [str(job.exception())[:200] for job in ahead if job.exception() is not None]
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", *failed[:3], flush=True)
    with torch.device("cuda"):
        model = Llama(config, attention=attention).bfloat16().eval()
    with torch.inference_mode():
        wanted = {}
        for early in (False, True):  # early start last: if it fails, the other results are printed
            for num_rows in asked.rows:
                print(f"{torch.cuda.get_device_name()}, {num_rows} rows, {length} tokens{', early' if early else ''}")
                best = measure_tiles(config, num_rows, num_tiles, early)
                if not early:
                    measure_attention(config, num_rows, length)
                    wanted[num_rows] = measure_step(model, num_rows, length, "by the model", fused=False).float()
                table = matvec.ONE_ROW if num_rows == 1 else matvec.TABLE
                shipped = dict(table)
                fastest = {kind: best[of] for of, kind in TABLED.items() if of in best}
                for name, chosen in (("tiles of the table", shipped), ("fastest tiles", {**shipped, **fastest})):
                    table.update({kind: replace(size, early=early) for kind, size in chosen.items()})
                    fused_step.FAILED.clear()
                    try:
                        got = measure_step(model, num_rows, length, name, fused=True).float()
                    except Exception as problem:
                        print(f"  {name} failed: {type(problem).__name__}: {problem}"[:300], flush=True)
                        continue
                    far = float((got - wanted[num_rows]).norm() / wanted[num_rows].norm())
                    print(f"  {'':24} logits' distance from the model's: {far:.1e}")
                table.update(shipped)
                print("  fastest:", {kind: str(size) for kind, size in fastest.items()})
                print("  " + "-" * 40, f"{time.perf_counter() - began:.0f} s so far", flush=True)


TABLED = {"project": "project", "down": "add", "gated": "gated", "head": "head"}
"""Kind of matmul -> the entry of matvec.TABLE for which its fastest tile is used; "output" uses that of "down"."""


if __name__ == "__main__":
    main()
