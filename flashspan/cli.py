"""The `flashspan` command. Each subcommand is a function here: what it takes, what it says, then a call elsewhere."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_type_hints

import tyro
from tyro.conf import Positional

from flashspan.stdout import be_silent

Strategy = Literal["ring", "double_ring", "gather", "helper", "ulysses", "hybrid"]
Layout = Literal["contiguous", "zigzag", "striped"]
Dtype = Literal["float32", "bfloat16", "float16"]


def attend(
    num_devices: Annotated[Positional[int], tyro.conf.arg(metavar="N")],
    seq_len: Annotated[Positional[int], tyro.conf.arg(metavar="T")],
    head_dim: Annotated[Positional[int], tyro.conf.arg(metavar="D")],
    *,
    heads: int = 1,
    causal: bool = False,
    strategy: Strategy = "ring",
    layout: Layout = "zigzag",
    dtype: Dtype = "float32",
    seed: int = 0,
) -> int:
    """Run attention over 1 to 8 devices and show that it is right.

    Prints the configuration, the first eight numbers of the output, the error against a float64 reference, and each
    device's time and peak memory. GPUs are used when there are enough of them, CPU processes otherwise.

    Example: flashspan attend 4 2048 64 --causal

    Args:
        num_devices: how many devices share the sequence, 1 to 8.
        seq_len: tokens in the whole sequence; need not divide by the devices.
        head_dim: size of each head, 1 to 256.
        heads: attention heads.
        causal: each token sees only itself and those before it.
        strategy: how keys and values travel between devices.
        layout: which device holds which tokens.
        dtype: of q, k and v.
        seed: of the random inputs.
    """
    from flashspan.bench.attend import attend as run

    return run(
        num_devices,
        seq_len,
        head_dim,
        heads=heads,
        causal=causal,
        strategy=strategy,
        layout=layout,
        dtype=dtype,
        seed=seed,
    )


def check(
    *,
    ranks: int = 4,
    strategy: Strategy | None = None,
    layout: Layout | None = None,
    tokens: int = 1000,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    causal: bool = True,
    dtype: Dtype = "float32",
    seed: int = 0,
) -> int:
    """Prove on this machine that parallel attention equals serial attention.

    Spawns the ranks (or joins them, under torchrun), runs the strategy and one device on the same inputs, and prints
    the errors of out, dq, dk and dv with a verdict. Exit code 1 on failure. With no arguments: every strategy and
    layout.

    Example: flashspan check --ranks 4 --strategy ring --layout zigzag --tokens 1000

    Args:
        ranks: how many ranks to spawn.
        strategy: one strategy; all of them unless given.
        layout: one layout; all that fit unless given.
        tokens: length of the whole sequence; need not divide by the ranks.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of each head.
        causal: each token sees only itself and those before it.
        dtype: of q, k and v.
        seed: of the random inputs.
    """
    from flashspan.bench.check import check as run

    return run(
        ranks=ranks,
        strategy=strategy,
        layout=layout,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
        dtype=dtype,
        seed=seed,
    )


def bench() -> int:
    """Measure and record: attention, leaderboard, sparse, model, context, study, collectives, data.

    Each has its own options: flashspan bench NAME --help. Rows go to a folder, and flashspan report makes a page of it.
    """
    raise AssertionError("main hands bench its own command line")


def bench_attention(*, quick: bool = False, shapes: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> int:
    """Our kernels beside PyTorch's (and flash-attn's, if installed), forward, backward and both, on a CUDA device.

    Rows are appended to docs/benchmarks/attention.csv and printed as a table.

    Example: flashspan bench attention --shapes 1,32,8,8192,128,causal --only flashspan sdpa-cudnn

    Args:
        quick: the first two shapes only.
        shapes: batch,heads,key heads,tokens,head size,pattern each; the pattern is full, causal, "window W" or
            "documents N".
        only: these implementations.
    """
    from flashspan.bench.attention import main as run

    return run(quick=quick, shapes=shapes, only=only)


def bench_leaderboard(*, rep: int = 10000, warmup: int = 1000) -> int:
    """The course's leaderboard test, as it stands: compiled, 16 heads of 64 over 16,384 tokens, causal.

    Args:
        rep: milliseconds to measure for.
        warmup: milliseconds to warm up for.
    """
    from flashspan.bench.leaderboard import main as run

    return run(rep=rep, warmup=warmup)


def plan_draw(
    *,
    ranks: int = 8,
    strategy: Literal["ring", "double_ring", "gather", "helper"] = "ring",
    layout: Layout = "zigzag",
    sizes: tuple[int, int] | None = None,
    tokens: int = 2048,
    causal: bool = True,
    window: int | None = None,
    folder: str = ".",
) -> int:
    """See a schedule before it runs: two pictures.

    The timeline of the schedule (compute, transfers and waiting of every rank) and who computes which part of the
    mask, as SVG.

    Example: flashspan plan draw --ranks 8 --strategy helper --layout contiguous

    Args:
        ranks: how many ranks share the sequence.
        strategy: how keys and values travel between ranks.
        layout: which rank holds which tokens.
        sizes: nodes and ranks per node, for double_ring.
        tokens: length of the whole sequence, at most 4096 for the picture of the mask.
        causal: each token sees only itself and those before it.
        window: each token sees this many tokens, itself included.
        folder: where the pictures go.
    """
    from flashspan.bench.schedule import draw

    return draw(ranks, strategy, layout, sizes=sizes, tokens=tokens, causal=causal, window=window, folder=folder)


def train() -> int:
    """Train a LLaMA, from scratch or a checkpoint, with any mixture of data, context, tensor and sharded parallelism.

    With no arguments: a tiny model on the text in the package, on 4 CPU ranks in a zigzag ring (or the GPUs here).
    Takes a TOML file and --section.key value; flashspan train --help lists the keys.
    """
    raise AssertionError("main hands train its own command line")


def positional(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with one parameter given by place: those who write it need not know this library."""
    hints: dict[str, Any] = get_type_hints(function)
    hints[name] = Positional[hints[name]]  # type: ignore[valid-type, misc]

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    signature = inspect.signature(function)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = hints
    del wrapped.__wrapped__  # or the hints would be read from the original
    return wrapped


def _generate() -> Callable[..., Any]:
    from flashspan.generate import generate

    return positional(generate, "folder")


def _prepare() -> Callable[..., Any]:
    from flashspan.train import prepare

    return positional(prepare, "inputs")


def _plan() -> Callable[..., Any]:
    from flashspan.plan.command import plan

    return positional(plan, "model")


def _profile() -> Callable[..., Any]:
    from flashspan.bench.profile import profile

    return profile


def _report() -> Callable[..., Any]:
    from flashspan.bench.report import report

    return positional(report, "folder")


# Subcommand -> what brings its function: each imports much, and of most command lines one is wanted.
COMMANDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "train": lambda: train,
    "generate": _generate,
    "prepare": _prepare,
    "attend": lambda: attend,
    "check": lambda: check,
    "plan": _plan,
    "bench": lambda: bench,
    "profile": _profile,
    "report": _report,
}


def bench_commands() -> dict[str, Callable[..., Any]]:
    """What `flashspan bench` measures -> function."""
    from flashspan.bench.collectives import bench_collectives
    from flashspan.bench.context import bench_context
    from flashspan.bench.data import bench_data
    from flashspan.bench.model import bench_model
    from flashspan.bench.sparse import bench_sparse
    from flashspan.bench.study import bench_study

    return {
        "attention": bench_attention,
        "leaderboard": bench_leaderboard,
        "sparse": bench_sparse,
        "model": bench_model,
        "context": bench_context,
        "study": positional(bench_study, "which"),
        "collectives": bench_collectives,
        "data": bench_data,
    }


CLOSED_PIPE = 141  # what a shell says of a command that wrote to one: 128 and SIGPIPE


def _run(words: list[str]) -> int:
    if words[:1] == ["train"]:  # its keys have dots, and come from a file too
        from flashspan.train import main as run

        return run(words[1:])
    if words[:1] == ["bench"]:
        return _choose(bench_commands(), words[1:], "flashspan bench", "Measure and record.")
    if words[:2] == ["plan", "draw"]:
        return int(tyro.cli(plan_draw, args=words[2:], prog="flashspan plan draw"))
    if words and words[0] in COMMANDS:
        return int(tyro.cli(COMMANDS[words[0]](), args=words[1:], prog=f"flashspan {words[0]}") or 0)
    about = "FlashAttention that spans devices: train with it, run it, check it, measure it."
    return _choose({name: bring() for name, bring in COMMANDS.items()}, words, "flashspan", about)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; bad input prints one line and exits with 2, Ctrl-C and SIGTERM one and 130."""
    words = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints a line when it starts and when it stops
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that ranks and folders are cleared away
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is met
    except BrokenPipeError:  # whoever was reading, `| head` say, has read enough
        be_silent()
        return CLOSED_PIPE
    except (ValueError, OSError) as error:  # OSError: a file or folder that cannot be read or written, a full disk
        print(f"flashspan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flashspan: stopped; what was written stays", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _choose(functions: dict[str, Callable[..., Any]], words: list[str], prog: str, about: str) -> int:
    """Run the function that the first word names."""
    return int(tyro.extras.subcommand_cli_from_dict(functions, args=words, prog=prog, description=about) or 0)


if __name__ == "__main__":
    sys.exit(main())
