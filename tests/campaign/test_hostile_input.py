"""Hostile files and options for every command: each is refused with one line, at once, and with little memory.

pytest -m campaign tests/campaign/test_hostile_input.py -s
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import random
import shutil
import time
import typing
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashspan.attention import attention
from flashspan.cli import BENCHES, COMMANDS, PLAN_DRAW, Command
from flashspan.model import Llama, preset, save_llama, save_state
from flashspan.train.config import SECTIONS
from tests.campaign import hostile
from tests.campaign.processes import Outcome, run

SEED, NUM_CASES, NUM_SAMPLED = 35, 400, 16
LIMIT_S, LIMIT_MIB, LIMIT_LINES = 5, 1024, 3


@dataclass(frozen=True)
class Case:
    words: list[str]
    what: str = ""
    may_pass: bool = False  # whether the input may be valid after all, so that only its effects are judged


@dataclass(frozen=True)
class Sources:
    """Good files, to be damaged."""

    folder: Path

    def copy(self, name: str, place: Path) -> Path:
        source = self.folder / name
        return Path(shutil.copytree(source, place / name) if source.is_dir() else shutil.copy(source, place / name))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    model = Llama(
        preset("tiny", num_layers=1, width=32, ffn_width=48, num_heads=2, num_kv_heads=1), attention=attention
    )
    model.initialize(0)
    save_state(model.state_dict(), model.config, folder / "model", shard_bytes=2**30)
    save_state(model.state_dict(), model.config, folder / "sharded", shard_bytes=20_000)
    save_llama(model, folder / "signed")
    for command in (*COMMANDS.values(), *BENCHES.values(), PLAN_DRAW):
        importlib.import_module(f"flashspan.{command.module}")
    importlib.import_module("flashspan.train.run")
    return Sources(folder)


# Valid command lines. Those of large commands are only run after they are made invalid.
SMALL = {
    "generate": ["generate", "model", "--tokens", "2"],
    "prepare": ["prepare", "--folder", "data", "--processes", "1"],
    "attend": ["attend", "1", "16", "8"],
    "check": ["check", "--ranks", "1", "--tokens", "16"],
    "plan": ["plan", "tiny", "--devices", "2", "--tokens", "256"],
    "plan draw": ["plan", "draw", "--ranks", "2", "--tokens", "64"],
    "profile": ["profile", "--tokens", "8", "--batch", "1"],
    "report": ["report", "rows"],
    **{f"bench {name}": ["bench", name] for name in BENCHES},
}
SMALL["bench study"] += ["flash"]
FUNCTIONS: dict[str, Command] = {**COMMANDS, "plan draw": PLAN_DRAW}
FUNCTIONS |= {f"bench {name}": command for name, command in BENCHES.items()}
ANY_SEED = {("attend", "seed"), ("check", "seed"), ("generate", "seed")}
PLACES = {"folder", "file", "output", "figures", "table", "calibrate", "tokenizer", "inputs", "dataset"}
"""Options that name files: see `files`."""
ANY_TEXT = {"prompt", "field", "split"}
LARGE_IS_FINE = {
    *(("generate", name) for name in ("batch", "top_k")),
    *(("plan", name) for name in ("per_node", "top", "batch", "tokens")),
    *(("plan draw", name) for name in ("window", "sizes")),
    ("prepare", "processes"),
    ("prepare", "seed"),
}
"""Options for which the largest number means the same as a smaller one, or a plan reports that nothing fits."""


def options_of(name: str) -> dict[str, Any]:
    """The options of a command, each with its type."""
    command = FUNCTIONS[name]
    function = getattr(importlib.import_module(f"flashspan.{command.module}"), command.function)
    hints = typing.get_type_hints(function)
    return {key: hints[key] for key in inspect.signature(function).parameters if key not in command.places}


def bad_value(rng: random.Random, name: str, key: str, kind: Any) -> tuple[str, bool]:
    """Return a value that an option must refuse, and whether it may be valid after all."""
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    if kind is int or int in inner:
        wrong = rng.choice(hostile.NOT_INTEGERS)
        if rng.random() < 0.5 or (name, key) in ANY_SEED:
            return wrong, False
        large = rng.choice(hostile.BAD_COUNTS)
        return large, (name, key) in LARGE_IS_FINE and not large.startswith("-")
    if kind is float or float in inner:
        return rng.choice([*hostile.NOT_NUMBERS, *hostile.NOT_FINITE]), False
    if kind is bool:
        return rng.choice(["maybe", "", "2", "\0"]), False
    return rng.choice(hostile.NOT_WORDS), key in ANY_TEXT


def option(rng: random.Random, place: Path, sources: Sources) -> Case:
    """One option of one command with an invalid value."""
    name = rng.choice(sorted(set(SMALL) - {"report"}))  # all options of report are places
    if name == "generate":
        sources.copy("model", place)
    kinds = {key: kind for key, kind in options_of(name).items() if key not in PLACES}
    key = rng.choice(sorted(kinds))
    value, may_pass = bad_value(rng, name, key, kinds[key])
    word = f"--{key.replace('_', '-')}"
    words = [*SMALL[name], f"{word}={value}"] if rng.random() < 0.5 else [*SMALL[name], word, value]
    return Case(words, may_pass=may_pass)


def unknown(rng: random.Random, place: Path, sources: Sources) -> Case:
    """Unknown words, too few words, or too many."""
    base = rng.choice([*SMALL.values(), [], ["bench"], ["train"], ["plan"], ["attend"], ["generate"]])
    strange = rng.choice(
        ["--no-such", "--", "---", "-x", "--tokens.x=3", "\ud800", "--" + "x" * 5000, "-1", "💥", "--=", ""]
    )
    if base == ["train"] and strange == "--":  # no further options: it would train
        strange = "---"
    return Case([*base, strange] if base[:1] != ["prepare"] else [*base, "--no-such"])


def devices(rng: random.Random, place: Path, sources: Sources) -> Case:
    """Ranks, memory or GPUs that do not exist."""
    many, long = rng.choice(["9", "1000", "1000000"]), rng.choice(["10000000", "10000000000"])
    return Case(
        rng.choice(
            [
                ["attend", many, "64", "8"],
                ["attend", "2", long, "64"],
                ["attend", "1", "64", "8", "--heads", long],
                ["check", "--ranks", many + "000"],
                ["check", "--tokens", long],
                ["check", "--ranks", "1", "--tokens", "8", "--heads", long, "--kv-heads", "1"],
                ["plan", "tiny", "--devices", long],
                ["plan", "draw", "--ranks", many + "0000"],
                ["plan", "draw", "--tokens", long],
                ["profile", "--tokens", long],
                ["profile", "--batch", long],
                ["profile", "--tokens", "8", "--preset", "2.7B", "--batch", "400"],
                ["profile", "--device", "cuda"],
                ["generate", ".", "--ranks", many],
                ["prepare", "--synthetic", long + "000000"],
                ["bench", "attention"],
                ["bench", "leaderboard"],
                ["bench", "sparse"],
                ["bench", "model", "--device", "cuda"],
                ["bench", "study", "eager", "--device", "cuda"],
                ["bench", "study", "eager", "--lengths", "0"],
                ["bench", "collectives", "--ranks", many],
                ["bench", "collectives", "--sizes", "4", "7"],
                ["bench", "context", "--ranks", many],
                ["bench", "context", "--width", long],
                ["bench", "context", "--layers", long],
                ["bench", "context", "--preset", "llama-3-8b"],
                ["bench", "data", "--ranks", many],
                ["bench", "data", "--width", long],
                ["bench", "data", "--layers", long],
                ["bench", "data", "--tokens", long],
                ["bench", "data", "--batch", long],
                ["train", "--parallel.ranks", many + "000"],
                ["train", "--parallel.context", long],
                ["train", "--train.batch", long],
                ["train", "--data.sequence", long],
                ["train", "--model.width", long],
                ["train", "--model.num_layers", long],
                ["train", "--model.vocab_size", long],
                ["train", "--model.preset", "llama-3-8b"],
                ["train", "--parallel.device", "cuda"],
            ]
        )
    )


def train_option(rng: random.Random, place: Path, sources: Sources) -> Case:
    """One key of a training run with an invalid value, on the command line or in a file."""
    section = rng.choice(sorted(SECTIONS))
    entry = rng.choice(dataclasses.fields(SECTIONS[section]))
    kind = typing.get_type_hints(SECTIONS[section])[entry.name]
    places = (section, entry.name) in (("checkpoint", "folder"), ("data", "train"), ("data", "validation"))
    if places or (section, entry.name) in (("model", "load"), ("model", "preset")):
        value = hostile.strange_path(rng, place / "strange")
        harmless = section == "checkpoint" and (place / "strange").is_dir()
        if section == "data" and value in ("/proc", "/proc/self/fd"):
            value = "/nonexistent"
        words = ["train", f"--{section}.{entry.name}={value}", "--dry-run"]
        return Case(words, may_pass=harmless)
    if rng.random() < 0.5:
        value, _ = bad_value(rng, "train", entry.name, kind)
        large = value == str(2**63) and entry.name == "seed"
        return Case(["train", f"--{section}.{entry.name}={value}", "--dry-run"], may_pass=large)
    words = [
        "2020-01-01",
        "[1]",
        "{a = 1}",
        "'x'",
        "''",
        "nan",
        "-inf",
        "1e999",
        str(10**30),
        "-1",
        '"\\u0000"',
        "[[]]",
    ]
    value = rng.choice([word for word in words if kind is not str or word[0] not in "'\""])
    (place / "run.toml").write_text(f"[{section}]\n{entry.name} = {value}\n")
    return Case(["train", "run.toml", "--dry-run"], f"{section}.{entry.name} = {value}", entry.name == "seed")


def train_file(rng: random.Random, place: Path, sources: Sources) -> Case:
    """A file that is not a config, or not a token file."""
    file = place / "x.toml"
    how = rng.randrange(4)
    if how == 0:
        return Case(
            ["train", hostile.bad_file(rng, file), "--dry-run"], may_pass=file.is_file() and not file.stat().st_size
        )
    if how == 1:
        texts = [
            "[train",
            "train = 1",
            "[nothing]\n",
            "[train]\nsteps = 1\nsteps = 2",
            "[[train]]\n",
            "[train.steps]\nx = 1",
        ]
        texts += [
            "\0",
            "[train]\nstepz = 1",
            "x" * 10**6,
            '"" = {}',
            "[train]\nlr = 1",
            "a = " + "[" * 10**5,
            "[train]\r\r",
        ]
        file.write_text(rng.choice([*texts, " " * (17 * 2**20), "[train]\n" + "a.b." * 10**4 + "c = 1"]))
        return Case(["train", "x.toml", "--dry-run"])
    hostile.token_file(rng, place / "train.bin")
    name = rng.choice(["train", "validation"])
    return Case(["train", f"--data.{name}={place / 'train.bin'}", "--data.sequence=64", "--dry-run"])


def weights(rng: random.Random, place: Path, sources: Sources) -> Case:
    """A folder without weights, or with a config that does not match them."""
    folder = sources.copy(rng.choice(["model", "model", "sharded", "signed"]), place)
    how, may_pass = rng.randrange(6), False
    if how == 0:
        hostile.damage_json(rng, folder / "config.json", ESSENTIAL)
    elif how == 1:
        hostile.safetensors(rng, rng.choice(sorted(folder.glob("*.safetensors"))))
    elif how == 2:
        file = rng.choice(sorted(folder.iterdir()))
        file.unlink()
        hostile.bad_file(rng, file)
    elif how == 3:
        index = folder / "model.safetensors.index.json"
        named = [
            "/etc/passwd",
            "../x.safetensors",
            "model.bin",
            3,
            None,
            "",
            "config.json",
            "\0.safetensors",
            "x" * 300,
        ]
        maps: list[Any] = [None, [], {}, 3, {"model.norm.weight": rng.choice(named)}]
        index.write_text(json.dumps({"weight_map": rng.choice(maps)}))
    elif how == 4:
        (folder / "tokenizer.json").unlink(missing_ok=True)
        hostile.tokenizer(rng, folder / "tokenizer.json")
        return Case(["generate", folder.name, "--prompt", "a", "--tokens", "2"], "its tokenizer", may_pass=True)
    else:
        hostile.bad_file(rng, folder / "generation_config.json")
        return Case(["generate", folder.name, "--prompt", "a", "--tokens", "2"], "generation_config", may_pass=True)
    words = rng.choice(
        [["generate", folder.name, "--tokens", "2"], ["train", f"--model.load={folder.name}", "--dry-run"]]
    )
    return Case(words, f"damage {how} to {folder.name}", may_pass)


ESSENTIAL = ["model_type", "hidden_act", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
ESSENTIAL += ["intermediate_size", "attention_bias"]


def prompts(rng: random.Random, place: Path, sources: Sources) -> Case:
    """Invalid prompts, tokenizers and folders for generate."""
    sources.copy("model", place)
    how = rng.randrange(4)
    if how == 0:
        file = hostile.bad_file(rng, place / "prompts")
        return Case(["generate", "model", "--tokens=1", "--file", file], may_pass=(place / "prompts").is_file())
    if how == 1:
        hostile.tokenizer(rng, place / "tokenizer.json")
        return Case(["generate", "model", "--tokens=1", "--prompt=a", "--tokenizer=tokenizer.json"], may_pass=True)
    if how == 2:
        return Case(["generate", hostile.bad_file(rng, place / "weights")])
    return Case(["generate", "model", f"--prompt={rng.choice(hostile.NOT_WORDS)}", "--file", "x"], may_pass=True)


def text(rng: random.Random, place: Path, sources: Sources) -> Case:
    """Inputs for prepare that are not text."""
    kind = rng.choice(["txt", "jsonl", "jsonl", "parquet", "md", "", "exe"])
    file = place / (f"x.{kind}" if kind else "x")
    if kind == "jsonl" and rng.random() < 0.6:
        values = [value for value in hostile.VALUES if not isinstance(value, str)]
        rows = [
            json.dumps({"text": rng.choice(values)}),
            json.dumps([]),
            "{",
            hostile.nested(rng),
            '{"text": "\\ud800"}',
            "NaN",
        ]
        file.write_text('{"text": "a"}\n' * rng.randrange(3) + rng.choice(rows) + "\n")
        path, may_pass = str(file), False
    else:
        path = hostile.bad_file(rng, file)
        may_pass = file.is_file() and kind in ("txt", "md", "", "jsonl")
    words = ["prepare", path, "--folder", "data", "--processes=1"]
    how = rng.random()
    if how < 0.15:
        hostile.tokenizer(rng, place / "tokenizer.json")
        (place / "good.txt").write_text("a a")
        return Case(
            ["prepare", "good.txt", "--folder=data", "--tokenizer=tokenizer.json"], "a tokenizer", may_pass=True
        )
    if how < 0.3:
        words = ["prepare", f"--folder={hostile.strange_path(rng, place / 'data')}"]
        return Case(words, may_pass=(place / "data").is_dir())
    return Case(words, may_pass=may_pass)


ROW: dict[str, Any] = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms", "mean_ms", "std_ms", "tflops", "peak_mib"), 1.0)
ROW |= {**dict.fromkeys(("torch", "triton", "commit"), "1"), "error": None, "bytes": None}
ROW |= {"device": "x86_64, 2 cores", "shape": "tiny 4x128", "impl": "flashspan", "kind": "forward", "what": "model"}
ROW |= {"dtype": "float32", "ranks": 1, "status": "ok", "more": {"preset": "tiny", "batch": 4, "tokens": 128}}


def rows(rng: random.Random, place: Path, sources: Sources) -> Case:
    """Invalid rows of measurements for report, plan --calibrate and the sweeps that append to them."""
    folder = place / "rows"
    folder.mkdir()
    whats = ["model", "context", "collective", "attention", "study", "data", "compare", "sparse", "trainer", "train"]
    row = {**ROW, "what": rng.choice(whats)}
    file = folder / rng.choice(["model.jsonl", "model.jsonl", "attention.csv", "sparse.csv"])
    how, may_pass = rng.randrange(5), False
    if how == 0:
        file.write_bytes(hostile.garbage(rng))
        may_pass = True
    elif how == 1:
        hostile.strange_path(rng, file)
    elif how == 2 or file.suffix == ".csv":
        file = folder / "model.jsonl"
        row[rng.choice(sorted(row))] = rng.choice(hostile.VALUES)
        file.write_text(json.dumps(row) + "\n")
        may_pass = True
    elif how == 3:
        row["more"] = rng.choice([{**row["more"], key: value} for key in row["more"] for value in hostile.VALUES])
        row["impl"] = "flashspan, eager"
        file.write_text(json.dumps(row) + "\n")
        may_pass = True
    else:
        file.write_text("\n".join(rng.choice(["{}", "[]", "null", "3", hostile.nested(rng)]) for _ in range(5)))
        may_pass = True
    reports = [["report", "rows"], ["report", "rows"], ["plan", "tiny", "--device=cpu-core", "--calibrate=rows"]]
    words = rng.choice(
        [*reports, ["report", hostile.strange_path(rng, place / "f")], ["report", "rows", "--output=/dev/null/x"]]
    )
    return Case(words, f"{file.name}: {how}", may_pass or words[1] != "rows")


def table(rng: random.Random, place: Path, sources: Sources) -> Case:
    """Invalid devices and links, and folders that cannot be created, for plan."""
    file = place / "table.toml"
    if rng.random() < 0.25:
        folder = hostile.strange_path(rng, place / "out")
        words = rng.choice([["plan", "tiny", "--scale"], ["plan", "draw", "--ranks=2", "--tokens=64"]])
        return Case([*words, f"--folder={folder}"], may_pass=True)
    if rng.random() < 0.4:
        path = hostile.bad_file(rng, file)
        return Case(["plan", "tiny", f"--table={path}"], may_pass=file.is_file())
    key = rng.choice(["memory", "flops_16", "flops_32", "bandwidth", "nothing", "name"])
    value = rng.choice(["nan", "inf", "-1", "0", "''", "[]", "true", str(10**400), "{}", "1e-320", "2020-01-01"])
    lines = [f"[devices.H100]\n{key} = {value}", "devices = 3", "[devices]\nH100 = 1", "[links.ib-ndr]\nlatency = nan"]
    lines += [
        "[links.x]\n",
        "[links.ib-ndr]\nbandwidth = 0",
        "[nothing]\n",
        "[devices.new]\n",
        "[devices.H100]\nmemory = 1",
    ]
    file.write_text(rng.choice(lines))
    return Case(["plan", "tiny", "--table=table.toml", "--devices=2"], may_pass=True)


KINDS = [option] * 8 + [unknown] * 2 + [devices] * 4 + [train_option] * 6 + [train_file] * 4 + [weights] * 6
KINDS += [prompts] * 3 + [text] * 4 + [rows] * 4 + [table] * 2


def judge(case: Case, outcome: Outcome) -> str | None:
    """Return what is wrong with the outcome of a command; None if nothing is."""
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    if outcome.seconds > LIMIT_S:
        return f"hung for {outcome.seconds:.1f} s"
    if "Traceback" in outcome.err + outcome.out:
        return f"a traceback: {(lines or ['?'])[-1][:300]}"
    if outcome.code < 0 or outcome.code == 70:
        return f"ended by {outcome.code}"
    if outcome.mib > LIMIT_MIB:
        return f"took {outcome.mib:.0f} MiB"
    if not outcome.code:
        return None if case.may_pass else "accepted"
    if len(lines) > LIMIT_LINES or any(len(line) > 2000 for line in lines):
        return f"{len(lines)} lines of {max(map(len, lines))} characters: {lines[0][:200]}"
    if not lines and not outcome.out.strip():
        return "not a word"
    return None


@pytest.mark.parametrize(
    "num_cases",
    [
        pytest.param(NUM_SAMPLED, marks=pytest.mark.timeout(300)),
        pytest.param(NUM_CASES, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)]),
    ],
)
def test_hostile_input_is_refused_in_a_line(
    sources: Sources, tmp_path: Path, num_cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, counts, failures, slowest, most = time.monotonic(), Counter[str](), list[str](), 0.0, 0.0
    for number in range(num_cases):
        rng = random.Random(f"{SEED}/{number}")
        place = tmp_path / f"{number}"
        place.mkdir()
        kind = rng.choice(KINDS)
        case = kind(rng, place, sources)
        outcome = run(case.words, place, limit_s=2 * LIMIT_S)
        if outcome.seconds > LIMIT_S:  # the machine may have been busy
            outcome = run(case.words, place, limit_s=2 * LIMIT_S)
        fault = judge(case, outcome)
        counts["failed" if fault else "refused" if outcome.code else "harmless"] += 1
        slowest, most = max(slowest, outcome.seconds), max(most, outcome.mib)
        if fault:
            shown = [word if len(word) < 80 else f"{word[:60]}...({len(word)})" for word in case.words]
            failures.append(f"case {number}, {kind.__name__}: {shown!a} {case.what[:80]!a}: {fault}")
        shutil.rmtree(place)
    with capsys.disabled():
        said = f"{dict(counts)} in {time.monotonic() - begin:.0f} s; at most {slowest:.1f} s and {most:.0f} MiB"
        print(f"\n{num_cases} hostile inputs, seed {SEED}: {said}")
    assert not failures, "\n".join(failures)
    assert counts["refused"] > 0.7 * num_cases
