"""Random damage to checkpoints: each one is refused, loads with the same result, or is skipped with a message.

    pytest -m campaign tests/campaign/test_damaged_checkpoints.py -s

There is one fault per case. A file that is edited together with its hash is a forgery, and is only detected if its
content makes no sense.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan.attention import attention
from flashspan.checkpoint.state import model_state, optimizer_state
from flashspan.generate import command
from flashspan.launch import use_loopback
from flashspan.manifest import write_manifest
from flashspan.model import Llama, load_llama, save_state
from flashspan.train import TrainConfig, parse
from flashspan.train.loop import Trainer
from flashspan.train.run import run_rank, train

SEED, NUM_CASES, NUM_SAMPLED = 35, 300, 12
LIMIT_S = 5
STEPS = (2, 4)
"""The steps of the run's checkpoints; the last checkpoint is damaged."""


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone, so that runs can be trained and resumed without starting ranks."""
    use_loopback()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config_of(folder: Path, *options: str) -> TrainConfig:
    sizes = "--model.num_layers=1 --model.width=16 --model.num_heads=2 --model.num_kv_heads=1 --model.ffn_width=24"
    rest = "--data.sequence=15 --train.batch=1 --train.evaluate_every=0 --parallel.device=cpu --parallel.ranks=1"
    folder_option = f"--checkpoint.folder={folder}"
    return parse([*sizes.split(), *rest.split(), "--checkpoint.every=2", "--train.steps=4", folder_option, *options])


@dataclass(frozen=True)
class Originals:
    """The checkpoints that are damaged, and those from which other files are taken."""

    run: Path
    later: Path  # the same run, two steps later
    other: Path  # a checkpoint of another model
    single: Path  # a Hugging Face folder that we have written, with one file
    sharded: Path  # the same model in several files


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, alone: None) -> Originals:
    folder = tmp_path_factory.mktemp("originals")
    with contextlib.redirect_stdout(io.StringIO()):
        run_rank(config_of(folder / "run"))
        shutil.copytree(folder / "run", folder / "longer")
        run_rank(config_of(folder / "longer", "--train.steps=6"))
        run_rank(config_of(folder / "wide", "--model.ffn_width=32"))
    model = Llama(config_of(folder).model.resolve(), attention=attention)
    model.initialize(3)
    for name, shard_bytes in (("single", 2**30), ("sharded", 9000)):
        files = save_state(model.state_dict(), model.config, folder / name, shard_bytes=shard_bytes)
        write_manifest(folder / name, files)
    assert len(list((folder / "sharded").iterdir())) > 4
    return Originals(
        folder / "run",
        folder / "longer" / "step-00000006",
        folder / "wide" / "step-00000004",
        folder / "single",
        folder / "sharded",
    )


# Each function below damages one random file, or the folder itself, in one way, and returns a text that describes it.


def pick(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def flip(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = pick(rng, folder)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data)) if rng.random() < 0.7 else rng.randrange(min(256, len(data)))
    data[at] ^= rng.randrange(1, 256)
    file.write_bytes(data)
    return f"byte {at} of {file.name} flipped"


def truncate(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = pick(rng, folder)
    size = rng.choice([0, 1, 7, 8, rng.randrange(file.stat().st_size), file.stat().st_size - 1])
    os.truncate(file, size)
    return f"{file.name} cut to {size} bytes"


def extend(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = pick(rng, folder)
    with file.open("ab") as stream:
        stream.write(rng.choice([b"\0", b" ", b"}", b"\0" * 4096, file.read_bytes()]))
    return f"{file.name} made longer"


def remove(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = pick(rng, folder)
    file.unlink()
    return f"{file.name} removed"


def duplicate(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = pick(rng, folder)
    names = ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json"]
    name = rng.choice([*names, "state.json", "optimizer.safetensors", "manifest.json", f"copy of {file.name}"])
    if name != file.name:
        shutil.copy(file, folder / name)
    return f"{file.name} copied to {name}"


def replace_kind(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = pick(rng, folder)
    kept = file.rename(folder.parent / "kept")
    kind = rng.choice(["pipe", "folder", "link to nothing", "link to itself", "link to the same", "device"])
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        ends = {"link to nothing": "nothing", "link to itself": file.name, "device": "/dev/zero"}
        file.symlink_to(ends.get(kind, kept))
    return f"{file.name} is a {kind}"


def swap(rng: random.Random, folder: Path, others: list[Path]) -> str:
    """Replace some files by those of another checkpoint, but never all that differ, which would be that checkpoint."""
    other = rng.choice(others)
    common = sorted({path.name for path in folder.iterdir()} & {path.name for path in other.iterdir()})
    names = [name for name in common if (folder / name).read_bytes() != (other / name).read_bytes()]
    listed = json.loads((other / "manifest.json").read_text())
    chosen = rng.sample(names, rng.randrange(1, max(2, len(names))))
    if "manifest.json" in chosen and {name for name in names if name in listed} <= set(chosen):
        chosen.remove("manifest.json")
    for name in chosen:
        shutil.copy(other / name, folder / name)
    return f"{', '.join(chosen)} of {other.parent.name}/{other.name}"


def edit_manifest(rng: random.Random, folder: Path, others: list[Path]) -> str:
    file = folder / "manifest.json"
    manifest: dict[str, Any] = json.loads(file.read_text())
    name, another = rng.sample(sorted(manifest), 2)
    how = rng.choice(["remove", "hash", "size", "add", "swap", "fields", "type", "reformat", "double"])
    if how == "remove":
        del manifest[name]
    elif how == "hash":
        manifest[name]["blake2b"] = rng.choice(["", "0" * 40, None, 7, manifest[another]["blake2b"]])
    elif how == "size":
        size = manifest[name]["bytes"]
        manifest[name]["bytes"] = rng.choice([size + 1, -1, 0, str(size), None, 1e400, 10**30, [size]])
    elif how == "add":
        extra = rng.choice(["nothing.json", "../state.json", "/etc/passwd", "", ".", "..", "a\0b", "x" * 5000])
        manifest[extra] = manifest[name]
    elif how == "swap":
        manifest[name], manifest[another] = manifest[another], manifest[name]
    elif how == "fields":
        manifest[name] = rng.choice([{}, {"bytes": manifest[name]["bytes"]}, {"blake2b": "x"}])
    elif how == "type":
        manifest[name] = rng.choice([None, [], "fine", 3, True])
    text = json.dumps(manifest, indent=rng.choice([None, 1]))
    if how == "double":
        text = text.replace("{", '{"model.safetensors": {"bytes": 1, "blake2b": "x"}, ', 1)
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(manifest[name])}}}"
    file.write_text(rng.choice([text, text, text, "[" + text + "]"]) if how == "type" else text)
    return f"manifest: {how} {name}"


def edit_state(rng: random.Random, folder: Path, others: list[Path]) -> str:
    """Change state.json alone, or make a senseless change with a manifest that matches it."""
    file = folder / "state.json"
    about: dict[str, Any] = json.loads(file.read_text())
    key = rng.choice(["step", "order", "extra", "format"])
    if rng.random() < 0.5:
        about[key] = {"step": 2, "order": {**about["order"], "seed": 9}, "extra": {}, "format": 1.5}[key]
        file.write_text(json.dumps(about))
        return f"state.json: other {key}"
    about[key] = rng.choice([None, [], "4", -1, 4.5, {}, 10**30, {"config": None}])
    file.write_text(json.dumps(about))
    write_manifest(folder, sorted(path.name for path in folder.iterdir() if path.name != "manifest.json"))
    return f"state.json and its hash: {key} is {about[key]!r:.40}"


def swap_moments(rng: random.Random, folder: Path, others: list[Path]) -> str:
    """Replace the optimizer's state by that of another step, with a manifest that matches it."""
    shutil.copy(others[0] / "optimizer.safetensors", folder)
    write_manifest(folder, sorted(path.name for path in folder.iterdir() if path.name != "manifest.json"))
    return "optimizer.safetensors and its hash of another step"


def rename(rng: random.Random, folder: Path, others: list[Path]) -> str:
    """Rename the folder to another step, or to another spelling of its step; or give its name to another's content."""
    how = rng.randrange(4)
    if how == 0:
        shutil.rmtree(folder)
        shutil.copytree(rng.choice(others[:2]), folder)
        return "the content of another step's checkpoint"
    before = folder.with_name(f"step-{STEPS[0]:08}")
    if how == 1 and before.exists():
        before.rename(folder.with_name(f"step-{STEPS[0]}"))
        return "the one before renamed to a shorter number"
    if how == 2 and before.exists():
        aside = before.rename(folder.with_name("aside"))
        folder.rename(before)
        aside.rename(folder)
        return "the names of both checkpoints swapped"
    name = rng.choice(["step-4", "step-00000009", "step-3", "step-²", "step-99999999999999999999", "step-0000000004"])
    folder.rename(folder.with_name(name))
    return f"renamed to {name}"


ANY = [flip, flip, flip, truncate, truncate, extend, remove, duplicate, replace_kind, swap, swap, edit_manifest]
OURS = [*ANY, edit_manifest, edit_state, swap_moments, rename, rename]


# The loaded state, in a form that can be compared.


def resumed(folder: Path) -> tuple[Any, list[str]]:
    """Resume a run. Returns its whole state, and its messages."""
    notes: list[str] = []
    trainer = Trainer(config_of(folder, "--train.steps=9"))
    with contextlib.ExitStack() as held:
        trainer._resume(notes, held)
    state = {**model_state(trainer.parts, keep=True), **optimizer_state(trainer.parts, keep=True)}
    return ({**state, "step": torch.tensor(trainer.step)}, notes)


def generated(folder: Path, tokenizer: str = "") -> tuple[Any, list[str]]:
    model, coder, ends = command.load(folder, tokenizer)
    return {**model.state_dict(), "all": str((model.config, coder.name, sorted(ends)))}, []


def generated_as_tales(folder: Path) -> tuple[Any, list[str]]:
    """The state with which `generate` runs on a Hugging Face folder without a tokenizer."""
    return generated(folder, "tales")


def loaded(folder: Path) -> tuple[Any, list[str]]:
    model = load_llama(folder, attention=attention)
    return {**model.state_dict(), "config": str(model.config)}, []


def begun(folder: Path) -> tuple[Any, list[str]]:
    """The weights with which a run begins if `model.load` is this folder. A dry run comes first."""
    small = ["--data.sequence=15", "--train.batch=1", "--parallel.device=cpu", "--parallel.ranks=1"]
    config = parse([*small, f"--model.load={folder}", f"--checkpoint.folder={folder.parent / 'new'}"])
    train(config, dry_run=True)
    trainer = Trainer(config)
    return {**model_state(trainer.parts, keep=True), "config": str(trainer.shape)}, []


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        for name, value in first.items()
    )


Load = Callable[[Path], tuple[Any, list[str]]]


def outcome(load: Load, folder: Path, wanted: Any, before: Any, capture: pytest.CaptureFixture[str]) -> str:
    """Return "refused", "same" or "fell back"; any other text describes a failure."""
    capture.readouterr()
    begin = time.monotonic()

    def stop(kind: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        found, notes = load(folder)
    except ValueError as error:
        return "refused" if str(error).strip() and "\n" not in str(error) else f"not one line: {error!r}"
    except TimeoutError:
        return f"hung for {time.monotonic() - begin:.0f} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    if same(found, wanted):
        return "same"
    words = capture.readouterr().out + "\n".join(notes)
    if (before is not None and same(found, before)) or found.get("step") == 0:
        return "fell back" if "damaged" in words or "is ignored" in words else "fell back without a word"
    return "accepted, and differs"


def search(
    originals: Originals, work: Path, num_cases: int, capture: pytest.CaptureFixture[str]
) -> tuple[Counter[str], list[str]]:
    """Return the number of cases for each outcome, and the failures."""
    counts, failures = Counter[str](), list[str]()
    last, first = (f"step-{step:08}" for step in reversed(STEPS))
    truth: dict[Load, Any] = {load: load(originals.run)[0] for load in (resumed, generated)}
    older = work / "older"
    shutil.copytree(originals.run / first, older / first)
    before = {load: load(older)[0] for load in (resumed, generated)}
    hugging_face: dict[Load, Any] = {load: load(originals.single)[0] for load in (loaded, generated_as_tales, begun)}
    direct: dict[Load, Any] = {load: load(originals.run / last)[0] for load in (loaded, generated, begun)}
    for case in range(num_cases):
        rng = random.Random(f"{SEED}/{case}")
        place = work / f"case-{case}"
        if case % 3 == 2:
            source = rng.choice([originals.single, originals.sharded])
            others = [originals.sharded, originals.single, originals.other, originals.run / last]
            target = shutil.copytree(source, place / "model")
            said = rng.choice(ANY)(rng, target, [other for other in others if other != source])
            results = {load: outcome(load, target, want, None, capture) for load, want in hugging_face.items()}
        else:
            shutil.copytree(originals.run, place / "run")
            target = place / "run" / last
            others = [originals.later, originals.run / first, originals.other, originals.single]
            if rng.random() < 0.2:  # without another checkpoint to fall back to
                shutil.rmtree(place / "run" / first)
            damage = rng.choice(OURS)
            said = damage(rng, target, others[:3] if rng.random() < 0.8 else others)
            results = {load: outcome(load, place / "run", truth[load], before[load], capture) for load in truth}
            for load, want in direct.items() if target.exists() else ():
                if damage is not rename or load is not loaded:  # callers of the library may give a folder any name
                    results[load] = outcome(load, target, want, None, capture)
        counts.update(results.values())
        bad = {load.__name__: how for load, how in results.items() if how not in ("refused", "same", "fell back")}
        failures += [f"case {case}, {said}: {name}: {how}" for name, how in bad.items()]
        shutil.rmtree(place)
    return counts, failures


@pytest.mark.parametrize(
    "num_cases", [NUM_SAMPLED, pytest.param(NUM_CASES, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])]
)
def test_no_damage_is_accepted_silently(
    originals: Originals, tmp_path: Path, num_cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    counts, failures = search(originals, tmp_path, num_cases, capsys)
    with capsys.disabled():
        seconds = time.monotonic() - begin
        print(f"\n{num_cases} damaged checkpoints, seed {SEED}: {dict(counts)} in {seconds:.0f} s")
    assert not failures, "\n".join(failures)
    assert counts["refused"] > num_cases
