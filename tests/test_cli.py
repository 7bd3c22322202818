"""The command line: its output, and its errors for bad input."""

import inspect
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from flashspan import cli
from flashspan.bench.report.tables import Table, show_tables
from flashspan.cli import BENCHES, CLOSED_PIPE, COMMANDS, PLAN_DRAW, PREFLIGHT, Command, flowing, main
from flashspan.commands import check
from flashspan.context.layout import LAYOUTS
from flashspan.context.strategy import STRATEGIES
from flashspan.signatures import read_signature

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "words", [["--help"], *([name, "--help"] for name in COMMANDS), ["check", "--preflight", "--help"]], ids=" ".join
)
def test_help_explains_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(" ".join(words).split())
    except SystemExit as end:
        code = int(end.code or 0)
    text = capsys.readouterr().out
    assert code == 0
    assert len(text) > 300
    assert words[0] == "--help" or "--" in text


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_the_packages(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert main([word]) == 0
    assert capsys.readouterr().out == f"flashspan {declared}\n"


SLOW_IMPORTS = {"torch", "numpy", "triton", "matplotlib", "rich"}
SLOW_HELP = {"bench data"}
"""Commands whose defaults cannot be read without torch."""
HELPS = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)]
HELPS_OF_ALL = """
import sys
from flashspan.cli import main
for line in sys.argv[1:]:
    try:
        main([*line.split(), "--help"])
    except SystemExit as end:
        assert not end.code
print("IMPORTED", *sys.modules)
"""


def test_help_and_version_need_no_torch() -> None:
    """Importing torch takes seconds; help and version answer in under half a second of CPU time."""
    lines = [" ".join(words) for words in HELPS if " ".join(words) not in SLOW_HELP]
    command = [sys.executable, "-c", HELPS_OF_ALL, *lines]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not SLOW_IMPORTS & set(done.stdout.rpartition("IMPORTED")[2].split())
    command = [sys.executable, "-X", "importtime", "-m", "flashspan", "-V"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout.startswith("flashspan ")
    assert "flashspan.cli" in imported
    assert not SLOW_IMPORTS & imported


@pytest.mark.parametrize(
    "command", [*COMMANDS.values(), *BENCHES.values(), PLAN_DRAW, PREFLIGHT], ids=lambda c: c.function
)
def test_a_signature_read_from_source_is_that_of_the_function(command: Command) -> None:
    function = command.bring()
    hints, read = get_type_hints(function), read_signature(f"flashspan.{command.module}", command.function)
    assert {name: each.annotation for name, each in read.parameters.items()} == {
        name: hint for name, hint in hints.items() if name != "return"
    }
    assert [(each.name, each.default, each.kind) for each in read.parameters.values()] == [
        (each.name, each.default, each.kind) for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(
    ("words", "meant"), [(["trian"], "flashspan train"), (["bench", "contxt"], "flashspan bench context")]
)
def test_a_misspelled_command_gets_a_suggestion(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["bench", "--help"]], ids=" ".join)
def test_a_list_of_commands_imports_none_of_them(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = [command.bring().__doc__ for command in (BENCHES if words[0] == "bench" else COMMANDS).values()]

    def refuse(command: Command) -> None:
        raise AssertionError(f"{command.module} was imported")

    monkeypatch.setattr(Command, "bring", refuse)
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(" ".join(str(doc).split("\n\n")[0].split()) in shown for doc in docs)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", [["prepare"], ["bench", "context"]], ids=" ".join)
def test_help_is_no_wider_than_the_terminal(
    words: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_help_has_no_line_breaks_of_the_source() -> None:
    source = """Each row.

    A line in
    .txt files, and
    more.

    Args:
        rows: 0 to
            98 % of them.
        page: one.
    """
    shown = "Each row.\n\nA line in .txt files, and more.\n\nArgs:\n    rows: 0 to 98 % of them.\n    page: one."
    assert flowing(source) == shown


def test_choices_in_help_are_the_real_ones() -> None:
    found = [get_args(choices) for choices in (check.Strategy, check.Layout, check.Dtype)]
    assert found == [STRATEGIES, tuple(LAYOUTS), tuple(check.BOUNDS)]


def test_attend_on_one_device_shows_output_error_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attend", "1", "100", "16"]) == 0
    text = capsys.readouterr().out
    for part in ("sequence length T: 100, head dim D: 16", "O[0..7]", "Error against float64", "time ms", "peak MiB"):
        assert part in text


def test_plan_draw_writes_both_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "draw", "--ranks", "3", "--tokens", "65", "--folder", str(tmp_path)]) == 0
    assert "busiest rank" in capsys.readouterr().out
    pictures = list(tmp_path.glob("*.svg"))
    assert len(pictures) == 2
    assert all("<svg" in picture.read_text() for picture in pictures)


def test_a_refused_picture_writes_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "draw", "--ranks", "2", "--tokens", "4097", "--folder", str(tmp_path)]) == 2
    assert "4096 or fewer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attend", "9", "100", "16"], "1 to 8"),
        (["attend", "1", "100", "300"], "1 to 256"),
        (["attend", "1", "8", "8", "--seed", str(2**64)], "-2**63 to 2**64 - 1: got 18446744073709551616"),
        (["check", "--ranks", "1", "--seed", str(2**64)], "-2**63 to 2**64 - 1: got 18446744073709551616"),
        (["plan", "draw", "--strategy", "double_ring"], "--sizes"),
        (["plan", "draw", "--sizes", "2", "4"], "--sizes belongs to the strategy double_ring: got ring"),
        (["bench", "attention", "--shapes", "1,1,1,64,16,window x"], "numbers from 1"),
        (["bench", "attention", "--shapes", "1,1,1,64,16,documents 0"], "numbers from 1"),
        (["bench", "attention", "--shapes", "1,3,2,64,16,causal"], "a divisor of the heads"),
        (["check", "--ranks", "0"], "--ranks must be 1 or more: got 0"),
        (["check", "--preflight", "--ranks", "0"], "--ranks must be 1 or more: got 0"),
        (["check", "--ranks", "100000"], "or 64 if that is more: got 100000"),
        (["plan", "draw", "--ranks", "0"], "at least 1 rank"),
        (["plan", "draw", "--ranks", "100000"], "at most 256 ranks"),
        (["plan", "draw", "--folder", "/dev/null/x"], "/dev/null/x cannot be made: Not a directory; choose another"),
        (["train", "--train.stepz", "3"], "did you mean"),
        (["train", "--dry-run", "--checkpoint.folder=a\0b"], "choose another with --checkpoint.folder"),
        (["train", "--dry-run", "--checkpoint.folder=" + "x" * 300], "File name too long"),
        (["plan", "tiny", "--tokens", "many"], "error parsing --tokens"),
        (["plan", "tiny", "--no-such-option"], "unknown option --no-such-option: see flashspan plan --help"),
        (["plan", "x\ny" * 5000], "unknown model 'x"),
        (["attend", "1"], "missing from flashspan attend: T, D; see"),
        (["bench", "sparse", "--page", "--rows", "seed"], "leave --rows"),
        (["bench", "attention", "--page", "--quick"], "leave --quick"),
        (["profile", "--precision", "--tokens", "64"], "accepts only --device"),
        (["generate", ".", "--prompt", "a", "--batch", "2"], "--batch is for the prompts of a --file"),
        (["generate", ".", "--file", "a", "--ranks", "2", "--batch", "2"], "--batch is for the prompts of a --file"),
        (["bench", "nothing"], "see flashspan bench --help"),
        (["generate", "--temprature", "1"], "unknown option --temprature: did you mean --temperature?"),
        (["plan", "--num_devices=8"], "unknown option --num-devices: did you mean --devices?"),
        (["check", "--preflight", "--rank", "2"], "did you mean --ranks? see flashspan check --preflight --help"),
        (["--verison"], "unknown option --verison: did you mean --version?"),
        (["--completion", "ksh"], "one of bash, zsh, fish, tcsh: got ksh"),
        (["--completion"], "got nothing"),
        (["generate", ".", "--ranks", "9"], "no whole checkpoint in ."),
        (["generate", ".", "--ranks", "100000"], "or 64 if that is more: got 100000"),
        (["bench", "study", "flash", "--repeats", "3"], "--repeats belongs to the eager study"),
        (["bench", "study", "eager", "--repeats", str(2**63)], "repeats must be 1 to 1,000,000"),
        (["bench", "model", "--warmups", str(10**12)], "warmups must be 0 to 1,000,000"),
        (["bench", "attention", "--quick", "--shapes", "1,1,1,64,16,causal"], "leave one out"),
        (["bench", "data", "--layers", "10000000"], "bench data must fit in memory"),
        (["bench", "data", "--window", "9", "--only", "context"], "--window needs the strategy hybrid"),
        (["prepare", "--seed", "3"], "--seed needs --synthetic"),
        (["prepare", "--split", "test"], "--split needs --dataset"),
        (["prepare", "a.txt", "--field", "content"], "--field needs a .jsonl file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("flashspan: ")
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("words", [["plan", "tiny"], ["attend", "--help"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-m", "flashspan.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_no_stdout_is_no_error() -> None:
    """As with `>&-`: a scheduler may start a command without stdout."""
    code = "import os; from flashspan.cli import main; main(['plan', 'tiny']); assert os.get_inheritable(1)"
    command = [sys.executable, "-c", code]  # ranks inherit the closed stdout
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_the_encoding_of_stdout_lacks_is_escaped(encoding: str) -> None:
    code = "import sys; from flashspan import cli; cli._run = lambda _: print('\\u2019') or 0; sys.exit(cli.main())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\u2019\n", b"")


def test_a_pipe_closed_during_a_table_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library prints tables, and it ends the process in its own way."""
    given, taken = os.pipe()
    os.close(given)
    with os.fdopen(taken, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(check, "check", lambda **_: show_tables([Table("a", ("b",), (("c",),))]))
        assert main(["check"]) == CLOSED_PIPE


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
{entry}
sys.exit(main())
"""


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, function = scripts["flashspan"].split(":")
    code = INTERRUPTED.format(entry=f"from {module} import {function} as main")
    done = subprocess.run([sys.executable, "-c", code, "plan", "tiny"], cwd=ROOT, capture_output=True, check=False)
    assert done.stderr == b""
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_the_last_cleanup_leaves_no_traceback(
    kind: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            os.kill(os.getpid(), kind)
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Stderr())
    monkeypatch.setattr(cli, "_run", lambda words: os.kill(os.getpid(), kind) or time.sleep(10))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert main([]) == 130
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert sys.stderr.getvalue() == "flashspan: stopped; what was written stays\n"


HUNG_UP = """
import os, signal, sys
from flashspan import cli
cli._run = lambda words: os.kill(os.getpid(), signal.SIGHUP) or 7
sys.exit(cli.main())
"""


@pytest.mark.parametrize(("prefix", "code"), [([], 130), (["nohup"], 7)])
def test_a_closed_terminal_ends_a_command_with_cleanup_unless_ignored(prefix: list[str], code: int) -> None:
    done = subprocess.run([*prefix, sys.executable, "-c", HUNG_UP], capture_output=True, check=False)
    assert (done.returncode, b"stopped" in done.stderr) == (code, not prefix)


def test_help_of_training_benchmarks_lists_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "training", "--help"])
    shown = capsys.readouterr().out
    assert "--part {train8k,train32k,generate}" in shown
    assert "I/N" not in shown
