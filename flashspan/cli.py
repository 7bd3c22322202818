"""The `flashspan` command: finds the function for a command line, parses its options and reports errors in one line."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import io
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from tyro.conf import Positional

import flashspan
from flashspan.completion import SHELLS, read_options, write_script
from flashspan.signatures import read_doc, read_signature, read_types
from flashspan.stdout import discard_stdout, discard_terminal, open_stdout


def bench() -> int:
    """Measure and record: attention, leaderboard, sparse, model, context, study, collectives, data,
    training and others.

    Each has its own options: flashspan bench NAME --help. Rows go to a folder, and flashspan report makes a page of it.
    """
    raise AssertionError("not called: _run parses bench")


def train() -> int:
    """Train a LLaMA, from scratch or a checkpoint, with data, context, tensor and sharded parallelism combined.

    With no arguments: a tiny model on the text in the package, on 4 CPU ranks in a zigzag ring (or the GPUs here).
    Takes a TOML file and --section.key value; flashspan train --help lists the keys.
    """
    raise AssertionError("not called: _run parses train")


METAVARS = {
    "calibrate": "FOLDER",
    "dataset": "NAME",
    "field": "NAME",
    "figures": "FOLDER",
    "file": "FILE",
    "folder": "FOLDER",
    "inputs": "FILE ...",
    "link": "NAME",
    "model": "MODEL",
    "network": "NAME",
    "output": "FILE",
    "pages": "FILE ...",
    "part": "I/N",
    "preset": "MODEL",
    "presets": "MODEL [MODEL ...]",
    "shapes": "SHAPE [SHAPE ...]",
    "table": "FILE",
    "tokenizer": "FILE",
}
"""Metavars in help, by option name; `metavar_of` has the others."""
OF_TYPE: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


def metavar_of(name: str, kind: Any) -> str | None:
    """The metavar of an option in help: `N` for a number, `{a,b}` for choices; None for a switch."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    if name in METAVARS and not any(get_origin(part) is Literal for part in parts):
        return METAVARS[name]
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if get_origin(kind) is tuple and parts:
        each = metavar_of("", parts[0])
        return f"{each} [{each} ...]" if parts[-1] is ... else " ".join(each for _ in parts if each)
    return metavar_of("", parts[0]) if parts else OF_TYPE.get(kind)


def flowing(doc: str | None) -> str:
    """A docstring with each paragraph and each argument on one line: help would keep the line breaks of the source."""
    return re.sub(r"(?<=\S)\n(?=\S| {8})\s*", " ", inspect.cleandoc(doc or ""))


def described(doc: str | None) -> str:
    """A command's description, wrapped at the width of the terminal: tyro wraps all other text, but not this.

    Continuation lines are indented, since tyro joins lines that begin with a letter.
    """
    width = shutil.get_terminal_size().columns
    paragraphs = flowing(doc).split("\n\nArgs:")[0].split("\n\n")
    return "\n\n".join(textwrap.fill(text, width, subsequent_indent="  ") for text in paragraphs)


@dataclass(frozen=True)
class Command:
    """A command: a function of a module. Help and parsing read its source (signatures.py); only a call imports it."""

    module: str
    function: str
    places: dict[str, str | None] = field(default_factory=dict)
    """Positional parameters -> their names in help; None for the usual metavar."""

    def bring(self) -> Callable[..., Any]:
        """Import the function. The import may take seconds, and Ctrl-C then ends the process at once."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        module = importlib.import_module(f"flashspan.{self.module}")
        signal.signal(signal.SIGINT, before)
        function: Callable[..., Any] = getattr(module, self.function)
        return function

    def signature(self) -> Callable[..., dict[str, Any]]:
        """A function with the signature and the docstring of the command, which returns its arguments."""
        signature = read_signature(f"flashspan.{self.module}", self.function)

        def arguments(*args: Any, **options: Any) -> dict[str, Any]:
            return signature.bind(*args, **options).arguments

        parameters = []
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            metavar = self.places.get(name) or metavar_of(name, kind)
            if name in self.places:
                kind = Positional[kind]  # type: ignore[misc, valid-type]
                metavar = metavar if parameter.default is inspect.Parameter.empty else f"[{metavar}]"
            # Where None or "" stands for a default, the text of the option says which.
            shown = "" if parameter.default in (None, "", ()) else None
            hint: Any = Annotated[kind, tyro.conf.arg(metavar=metavar, help_behavior_hint=shown)]
            parameters.append(parameter.replace(annotation=hint))
        arguments.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        arguments.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": dict[str, Any]}
        arguments.__doc__ = self.doc()
        return arguments

    def doc(self) -> str:
        return flowing(read_doc(f"flashspan.{self.module}", self.function))

    def options(self) -> dict[str, tuple[str, ...]]:
        """Its options, each with its choices."""
        kinds = read_types(f"flashspan.{self.module}", self.function)
        return read_options({name: kind for name, kind in kinds.items() if name not in self.places})


COMMANDS = {
    "train": Command("cli", "train"),
    "generate": Command("generate.command", "generate", {"folder": None}),
    "prepare": Command("data.prepare", "prepare", {"inputs": None}),
    "attend": Command("commands.attend", "attend", {"num_devices": "N", "seq_len": "T", "head_dim": "D"}),
    "check": Command("commands.check", "check"),
    "plan": Command("plan.command", "plan", {"model": None}),
    "bench": Command("cli", "bench"),
    "profile": Command("commands.profile", "profile"),
    "compile": Command("commands.compile", "compile_kernels", {"model": None}),
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
TRAIN, TRAIN_HELP = Command("train.run", "main"), Command("train.options", "show_help")
PLAN_DRAW = Command("commands.draw", "draw")
PREFLIGHT = Command("commands.preflight", "preflight")

ABOUT = "FlashAttention that spans devices: train with it, run it, check it, measure it."
HELP_OPTION = {"-h, --help": "show this help message and exit"}
GLOBAL_OPTIONS = HELP_OPTION | {
    "-V, --version": "show the version and exit",
    "--completion SHELL": f"print a script for completion with the Tab key: {', '.join(SHELLS)}",
}


def names_of(options: dict[str, str]) -> list[str]:
    """The names of options that are listed like "-V, --version"."""
    return [word for name in options for word in name.replace(",", "").split() if word.startswith("-")]


CLOSED_PIPE = 141  # a shell's exit code for a command that wrote to a closed pipe: 128 + SIGPIPE
MOST_SHOWN = 1000
"""The most characters of an error that are printed: it may quote a value of any length."""


def _run(words: list[str]) -> int:
    if words[:1] == ["train"]:  # parses its options itself: they have dots, and can also come from a file
        command = TRAIN_HELP if {"-h", "--help"} & set(words) else TRAIN
        return int(command.bring()(*() if command is TRAIN_HELP else (words[1:],)))
    if words[:1] == ["bench"]:
        return _choose(BENCHES, words[1:], "flashspan bench", "Measure and record.")
    if words[:2] == ["plan", "draw"]:
        return _call(PLAN_DRAW, words[2:], "flashspan plan draw")
    if words[:1] == ["check"] and "--preflight" in words:
        rest = [word for word in words[1:] if word != "--preflight"]
        return _call(PREFLIGHT, rest, "flashspan check --preflight")
    if words in (["--version"], ["-V"]):
        print(f"flashspan {flashspan.__version__}")
        return 0
    if words[:1] == ["--completion"]:
        return _print_completion(words[1:])
    return _choose(COMMANDS, words, "flashspan", ABOUT)


def _choose(commands: dict[str, Command], words: list[str], prog: str, about: str) -> int:
    """Run the command that the first word names, or list all commands."""
    if words and words[0] in commands:
        return _call(commands[words[0]], words[1:], f"{prog} {words[0]}")
    options = GLOBAL_OPTIONS if commands is COMMANDS else HELP_OPTION
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        raise _unknown(f"option {words[0]}", names_of(options), prog)
    if words and not words[0].startswith("-"):
        raise _unknown(f"command {prog} {words[0]}", [f"{prog} {name}" for name in commands], prog)
    described = {name: command.doc().partition("\n\n")[0] for name, command in commands.items()}
    print(f"usage: {prog} COMMAND [OPTIONS]\n\n{about}")
    for title, rows in (
        (f"commands ({prog} COMMAND --help lists the options of one):", described),
        ("options:", options),
    ):
        print(f"\n{title}")
        indent = " " * (4 + max(map(len, rows)))
        for name, text in rows.items():
            line, width = f"  {name}".ljust(len(indent)) + text, shutil.get_terminal_size().columns
            print(textwrap.fill(line, max(width, 2 * len(indent)), subsequent_indent=indent, break_on_hyphens=False))
    return 0


def _print_completion(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in SHELLS:
        raise ValueError(
            f"--completion takes one of {', '.join(SHELLS)}: got {' '.join(words) or 'nothing'}; "
            "write --completion bash"
        )
    options = {
        "": dict.fromkeys(names_of(GLOBAL_OPTIONS), ()) | {"--completion": tuple(SHELLS)},
        **{name: command.options() for name, command in COMMANDS.items()},
        **{f"bench {name}": command.options() for name, command in BENCHES.items()},
        "plan draw": PLAN_DRAW.options(),
    }
    options["train"] = importlib.import_module("flashspan.train.options").option_choices()
    options["check"] |= {"--preflight": (), **PREFLIGHT.options()}
    print(write_script(words[0], options))
    return 0


def describe(error: ValueError | OSError) -> str:
    """An error as text. Python's text for a file begins with a number: [Errno 2]."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _unknown(what: str, known: list[str], prog: str) -> ValueError:
    """The error for an unknown option or command, with the most similar known one."""
    names = {name.rpartition(" ")[2]: name for name in known}
    found = difflib.get_close_matches(what.rpartition(" ")[2], names, 1)
    close = [names[name] for name in found]
    hint = f"did you mean {close[0]}? " if close else ""
    return ValueError(f"unknown {what}: {hint}see {prog} --help")


def _call(command: Command, words: list[str], prog: str) -> int:
    known = command.options()
    for word in words[: words.index("--")] if "--" in words else words:
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and name not in known:
            raise _unknown(f"option {name}", list(known), prog)
    with _one_line_errors(prog):
        options = tyro.cli(command.signature(), args=words, prog=prog, description=described(command.doc()))
    return int(command.bring()(**options) or 0)


@contextlib.contextmanager
def _one_line_errors(prog: str) -> Iterator[None]:
    """Turn the box that tyro draws on stderr for options it cannot parse into a ValueError of one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit as end:
        if not end.code or not box.getvalue():
            raise
        raise ValueError(f"{_first_part(box.getvalue())}; see {prog} --help") from None


def _first_part(box: str) -> str:
    """The text in a box, without its title and without the text below a rule. In a terminal without box characters, the
    title has a line and a rule of its own."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    lines = [line.replace("'None', ", "") for line in lines]  # a choice that means the default
    parts = [" ".join(part.split()) for part in re.split(r"^[─-]+$", "\n".join(lines), flags=re.MULTILINE)]
    text = parts[0] if "╭" in box or len(parts) == 1 else parts[1]
    if text.startswith("Missing from"):  # the names of the arguments, without what help says of each
        text = f"{text.partition(':')[0]}: {', '.join(re.findall(r'(?<= )[A-Z]+(?= [A-Z])', text))}"
    return f"{text[:1].lower()}{text[1:]}".rstrip(".")


def _hang_up(kind: int, frame: Any) -> None:
    """End the command like Ctrl-C: its terminal was closed."""
    discard_terminal()
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Bad input prints one line and exits with 2, a failed rank with 1, Ctrl-C, SIGTERM and SIGHUP with
    130."""
    words = sys.argv[1:] if arguments is None else arguments
    open_stdout()
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that ranks and folders are cleaned up
        if before[signal.SIGHUP] != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signal.SIGHUP, _hang_up)
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # here, where BrokenPipeError is caught
    except BrokenPipeError:  # the reader has ended, such as `| head`
        discard_stdout()
        return CLOSED_PIPE
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return CLOSED_PIPE  # rich caught it while printing a table, and has redirected stdout to the null device
    except (ValueError, OSError) as error:  # OSError: a file or folder that cannot be read or written, a full disk
        text = " ".join(describe(error).split())  # a name of a file, or a value, may hold line breaks
        print(f"flashspan: {text[:MOST_SHOWN]}{'...' if len(text) > MOST_SHOWN else ''}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        launch = sys.modules.get("flashspan.launch")  # not imported here: it needs torch, and --help does not
        if launch is None or not isinstance(error, launch.RankError):
            raise
        print(f"flashspan: {error.report}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        for kind in before:  # a second signal would end what follows with a traceback
            signal.signal(kind, signal.SIG_IGN)
        print(f"flashspan: {str(stop) or 'stopped; what was written stays'}", file=sys.stderr)
        return 130
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


if __name__ == "__main__":
    sys.exit(main())
