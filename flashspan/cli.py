"""The `flashspan` command: which function serves which words. The functions, and what they say, are elsewhere."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.conf import Positional

import flashspan
from flashspan.launch import RankError
from flashspan.stdout import discard_stdout


def bench() -> int:
    """Measure and record: attention, leaderboard, sparse, model, context, study, collectives, data,
    training and others.

    Each has its own options: flashspan bench NAME --help. Rows go to a folder, and flashspan report makes a page of it.
    """
    raise AssertionError("main hands bench its own command line")


def train() -> int:
    """Train a LLaMA, from scratch or a checkpoint, with any mix of data, context, tensor and sharded parallelism.

    With no arguments: a tiny model on the text in the package, on 4 CPU ranks in a zigzag ring (or the GPUs here).
    Takes a TOML file and --section.key value; flashspan train --help lists the keys.
    """
    raise AssertionError("main hands train its own command line")


def positional(function: Callable[..., Any], places: dict[str, str | None]) -> Callable[..., Any]:
    """The same function with parameters given by place, each -> what help calls it: those who write it need not know
    this library."""
    hints: dict[str, Any] = get_type_hints(function)
    for name, shown in places.items():
        hints[name] = Annotated[Positional[hints[name]], tyro.conf.arg(metavar=shown)]  # type: ignore[valid-type, misc]

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    signature = inspect.signature(function)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = hints
    wrapped.__doc__ = flowing(function.__doc__)
    del wrapped.__wrapped__  # or the hints would be read from the original
    return wrapped


def flowing(doc: str | None) -> str:
    """A docstring with each paragraph and each argument on a line: in help, breaks of the source would be breaks."""
    return re.sub(r"(?<=\S)\n(?=\S| {8})\s*", " ", inspect.cleandoc(doc or ""))


def described(doc: str | None) -> str:
    """What a docstring says of a whole command, no wider than the terminal: help folds all else, but not this.

    It would join lines that begin with a letter, so those that go on are indented.
    """
    width = shutil.get_terminal_size().columns
    paragraphs = flowing(doc).split("\n\nArgs:")[0].split("\n\n")
    return "\n\n".join(textwrap.fill(text, width, subsequent_indent="  ") for text in paragraphs)


@dataclass(frozen=True)
class Command:
    """A function of a module: each imports much, and of most command lines one is wanted."""

    module: str
    function: str
    places: dict[str, str | None] = field(default_factory=dict)

    def bring(self) -> Callable[..., Any]:
        function = getattr(importlib.import_module(f"flashspan.{self.module}"), self.function)
        return positional(function, self.places)

    def listed(self) -> Callable[..., Any]:
        """For a list of commands: nothing but the docstring, read without an import."""
        source = Path(__file__).parent.joinpath(*self.module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        nodes = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))

        def listed() -> None: ...

        listed.__doc__ = flowing(next(ast.get_docstring(node) for node in nodes if node.name == self.function))
        return listed


COMMANDS = {
    "train": Command("cli", "train"),
    "generate": Command("generate.command", "generate", {"folder": None}),
    "prepare": Command("data.prepare", "prepare", {"inputs": None}),
    "attend": Command("commands.attend", "attend", {"num_devices": "N", "seq_len": "T", "head_dim": "D"}),
    "check": Command("commands.check", "check"),
    "plan": Command("plan.command", "plan", {"model": None}),
    "bench": Command("cli", "bench"),
    "profile": Command("commands.profile", "profile"),
    "report": Command("bench.report.page", "report", {"folder": None}),
}
BENCHES = {
    "attention": Command("bench.suites.attention", "bench_attention"),
    "leaderboard": Command("bench.suites.leaderboard", "bench_leaderboard"),
    "sparse": Command("bench.suites.sparse", "bench_sparse"),
    "model": Command("bench.suites.model", "bench_model"),
    "context": Command("bench.suites.context", "bench_context"),
    "ring": Command("bench.suites.ring", "bench_ring"),
    "study": Command("bench.suites.study", "bench_study", {"which": None}),
    "collectives": Command("bench.suites.collectives", "bench_collectives"),
    "data": Command("bench.suites.data", "bench_data"),
    "training": Command("bench.suites.training", "bench_training"),
    "host": Command("bench.suites.host", "bench_host"),
    "rounding": Command("bench.suites.rounding", "bench_rounding"),
    "cpu-ring": Command("bench.suites.cpu_ring", "bench_cpu_ring"),
    "single-device-ring": Command("bench.suites.single_device_ring", "bench_single_device_ring"),
    "masks": Command("bench.report.mask_pictures", "bench_masks", {"folder": None}),
    "console": Command("bench.report.console", "bench_console", {"pages": None}),
}
PLAN_DRAW = Command("commands.draw", "draw")
PREFLIGHT = Command("commands.preflight", "preflight")

CLOSED_PIPE = 141  # what a shell says of a command that wrote to one: 128 and SIGPIPE
MOST_SHOWN = 1000
"""Characters of an error that are printed: it may name a value of any length."""


def _run(words: list[str]) -> int:
    if words[:1] == ["train"]:  # its keys have dots, and come from a file too
        from flashspan.train import main as run

        return run(words[1:])
    if words[:1] == ["bench"]:
        return _choose(BENCHES, words[1:], "flashspan bench", "Measure and record.")
    if words[:2] == ["plan", "draw"]:
        return _call(PLAN_DRAW, words[2:], "flashspan plan draw")
    if words[:1] == ["check"] and "--preflight" in words:
        rest = [word for word in words[1:] if word != "--preflight"]
        return _call(PREFLIGHT, rest, "flashspan check --preflight")
    if words == ["--version"]:
        print(f"flashspan {flashspan.__version__}")
        return 0
    about = "FlashAttention that spans devices: train with it, run it, check it, measure it."
    return _choose(COMMANDS, words, "flashspan", about)


def _choose(commands: dict[str, Command], words: list[str], prog: str, about: str) -> int:
    """Run the command that the first word names, or list them all."""
    if words and words[0] in commands:
        return _call(commands[words[0]], words[1:], f"{prog} {words[0]}")
    whole = words[:1] == ["--tyro-print-completion"]  # a shell wants their options too
    functions = {name: command.bring() if whole else command.listed() for name, command in commands.items()}
    with _one_line_errors(prog):
        tyro.extras.subcommand_cli_from_dict(functions, args=words, prog=prog, description=about)
    return 0


def _call(command: Command, words: list[str], prog: str) -> int:
    function = command.bring()

    @functools.wraps(function)
    def prepared(*args: Any, **options: Any) -> Callable[[], Any]:
        return functools.partial(function, *args, **options)

    prepared.__annotations__ = {**function.__annotations__, "return": Any}
    with _one_line_errors(prog):
        run: Any = tyro.cli(prepared, args=words, prog=prog, description=described(function.__doc__))
    return int(run() or 0)


@contextlib.contextmanager
def _one_line_errors(prog: str) -> Iterator[None]:
    """ValueError of one line in place of the box that tyro draws on stderr for options it cannot read."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit as end:
        if not end.code or not box.getvalue():
            raise
        raise ValueError(f"{_first_part(box.getvalue())}; see {prog} --help") from None


def _first_part(box: str) -> str:
    """The text in a box, without its title and what comes after a rule. Where the terminal has no lines to draw a box
    with, the title has a line and a rule of its own."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = [" ".join(part.split()) for part in re.split(r"^[─-]+$", "\n".join(lines), flags=re.MULTILINE)]
    text = parts[0] if "╭" in box or len(parts) == 1 else parts[1]
    return f"{text[:1].lower()}{text[1:]}".rstrip(".")


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Bad input prints one line and exits with 2, a failed rank with 1, Ctrl-C and SIGTERM with 130."""
    words = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # closed by who started this, `>&-`: nobody will read
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that ranks and folders are cleared away
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is met
    except BrokenPipeError:  # whoever was reading, `| head` say, has read enough
        discard_stdout()
        return CLOSED_PIPE
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return CLOSED_PIPE  # a table met it, and has made stdout lead nowhere
    except (ValueError, OSError) as error:  # OSError: a file or folder that cannot be read or written, a full disk
        text = " ".join(str(error).split())  # a name of a file, or a value, may hold line breaks
        print(f"flashspan: {text[:MOST_SHOWN]}{'...' if len(text) > MOST_SHOWN else ''}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"flashspan: {error.report}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("flashspan: stopped; what was written stays", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
