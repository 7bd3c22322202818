"""A run's settings, from TOML and the command line. Mistakes are reported before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models

from flashspan import attention
from flashspan.checkpoint import format as checkpoint
from flashspan.data.prepare import corpus_tokens, prepare
from flashspan.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from flashspan.data.tokens import open_tokens, write_tokens
from flashspan.launch import Ranks
from flashspan.lock import locked_folder
from flashspan.model import Llama, preset, save_llama
from flashspan.train import TrainConfig, parse, train
from flashspan.train.config import CheckpointSection, OptimizerSection
from flashspan.train.dataset import open_samples, order_of
from flashspan.train.learning_rate import learning_rate
from flashspan.train.options import KEYS, SYNONYMS, build, read_toml
from flashspan.train.run import check, main, run_rank

CONFIGS = Path(__file__).parents[2] / "configs"


def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nsteps = 7\nbatch = 3\nprecision = "bfloat16"\n[optimizer]\nlr = 1\n')
    config = parse([str(file), "--train.batch", "5", "--train.compile", "--optimizer.final-lr=0.5"])
    assert (config.train.steps, config.train.batch, config.train.precision) == (7, 5, "bfloat16")
    assert (config.train.compile, config.optimizer.lr, config.optimizer.final_lr) == (True, 1.0, 0.5)
    assert config.train.seed == TrainConfig().train.seed


def test_a_described_config_is_that_config(tmp_path: Path) -> None:
    config = parse(["--train.steps=9", "--data.documents", "--model.preset", "small", "--optimizer.lr=1e-4"])
    config = replace(config, checkpoint=CheckpointSection(folder='a "b"\\ü'))
    (tmp_path / "again.toml").write_text(config.describe())
    assert build(read_toml(tmp_path / "again.toml")) == config


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--train.step", "3"], "unknown key --train.step: did you mean --train.steps?"),
        (["--trian.steps", "3"], "unknown key --trian.steps: did you mean --train.steps?"),
        (["--lr", "1e-3"], "did you mean --optimizer.lr?"),
        (["--seed", "1"], "did you mean --attention.seed or --train.seed?"),
        (["--learning-rate=1"], "did you mean --optimizer.lr?"),
        (["--batch_size", "8"], "did you mean --train.batch?"),
        (["--train.seq_len", "8"], "did you mean --data.sequence?"),
        (["--optimizer.steps", "8"], "did you mean --train.steps?"),
        (["--warmpu", "8"], "did you mean --optimizer.warmup?"),
        (["--zzz", "8"], "flashspan train --help lists the keys"),
        (["--train.steps", "3", "4"], "got '4'; a TOML file comes before the options"),
        (["--train.steps", "many"], "train.steps must be a whole number: got 'many'"),
        (["--train.precision", "int8"], "train.precision must be one of float32, bfloat16, float16: got 'int8'"),
        (["--train.compile", "maybe"], "train.compile must be true or false: got 'maybe'"),
        (["--train.steps", "0"], "train.steps must be at least 1: got 0"),
        (["missing.toml"], "missing.toml is missing"),
        (["--train.steps", "3", "run.toml"], "got 'run.toml'; a TOML file comes before the options"),
        (
            ["."],
            "a config is a TOML file: got the folder .; to resume the run in it, use --checkpoint.folder .",
        ),
        (["--model.preset", "tinny"], "did you mean 'tiny'"),
        (["--parallel.data", "3", "--train.batch", "7"], "use a multiple of 3"),
        (["--parallel.ranks", "4", "--parallel.data", "3"], "the degrees must multiply to the 4 ranks"),
        (["--parallel.data", "0"], "only one of parallel.data and parallel.context can be 0"),
        (["--parallel.tensor", "4"], "parallel.tensor must divide the heads and the kv heads: got 4 and 2"),
        (["--parallel.device", "cuda"], "needs a CUDA device: found none"),
        (["--parallel.strategy", "hybrid"], "parallel.inner is needed by the strategies double_ring and hybrid"),
        (["--parallel.inner", "2"], "got strategy ring and inner 2"),
        (
            ["--parallel.context", "4", "--parallel.strategy", "hybrid", "--parallel.inner", "3"],
            "parallel.inner must divide the context ranks: got 3 for 4 ranks",
        ),
        (["--train.weights", "bfloat16"], "bfloat16 weights need bfloat16 matmuls: got train.precision float32"),
        (["--train.offload"], "got train.recompute none; set it to"),
        (["--model.vocab_size", "100"], "the data's vocabulary must fit the model's"),
        (["--data.sequence", "1000000"], "a sample takes 1000001 tokens"),
        (["--data.train", "nowhere.bin"], "nowhere.bin is missing: make it with `flashspan prepare`"),
        (["--train.seed", str(2**64)], "train.seed must be a number of 64 bits"),
        (["--model.load", "nowhere"], "nowhere/config.json is missing; give a checkpoint of a run"),
        (["--checkpoint.folder", "--train.steps", "3"], "--checkpoint.folder needs a value: got none"),
        (["--train.steps"], "--train.steps needs a value: got none; write --train.steps=VALUE"),
        (["--train.precision"], "--train.precision needs a value"),
        (["--dryrun"], "unknown key --dryrun: did you mean --dry-run?"),
        (["--parallel.timeout", "-1"], "parallel.timeout must be at least 1: got -1.0"),
        (
            ["--parallel.timeout", "1e300"],
            "parallel.timeout must be at most 1000000 seconds",
        ),
        (["--optimizer.lr", "inf"], "optimizer.lr must be finite: got inf; the default is 0.007"),
        (["--optimizer.lr", "nan"], "optimizer.lr must be at least 0: got nan"),
        (["--optimizer.final_lr", "-0.1"], "optimizer.final_lr must be finite and at least 0: got -0.1"),
        (["--optimizer.beta1", "1"], "optimizer.beta1 must be at least 0 and less than 1: got 1.0; the default is 0.9"),
        (["--optimizer.beta2", "-0.5"], "optimizer.beta2 must be at least 0 and less than 1: got -0.5"),
        (["--optimizer.eps", "0"], "optimizer.eps must be finite and greater than 0: got 0.0"),
        (["--optimizer.weight_decay", "-1"], "optimizer.weight_decay must be finite and at least 0: got -1.0"),
        (
            ["--checkpoint.folder="],
            "checkpoint.folder must be the name of a folder: got ''; the default",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match=says.replace("?", r"\?").replace(".", r"\.")):
        main([*arguments, "--dry-run"])
    with pytest.raises(ValueError):
        main(arguments)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--parallel.device", "cpu"]) == 0
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_gpus_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="4 ranks need as many GPUs: found 1"):
        main(["--parallel.ranks", "4"])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/run cannot be made: .*; choose another with --checkpoint\.folder"):
        main(["--checkpoint.folder", str(tmp_path / "file" / "run"), "--parallel.device", "cpu"])


def test_a_folder_that_cannot_be_written_to_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    match = r"cannot be written to: Is a directory \(\.lock\); choose another with --checkpoint\.folder"
    with pytest.raises(ValueError, match=match):
        main(["--checkpoint.folder", str(tmp_path), "--parallel.device", "cpu", "--parallel.ranks", "1"])


def test_the_packages_text_is_the_same_in_memory_and_in_a_file(tmp_path: Path) -> None:
    prepare(folder=str(tmp_path), tokenizer="tales")
    for held, name in zip(corpus_tokens(), ("train.bin", "val.bin"), strict=True):
        file = open_tokens(tmp_path / name)
        assert np.array_equal(held.tokens, file.tokens)
        assert (held.vocab_size, held.tokenizer, held.end) == (file.vocab_size, file.tokenizer, file.end)


def test_a_validation_file_that_was_asked_for_is_used_or_refused(
    config_of: Callable[..., TrainConfig], corpus: Path, tmp_path: Path
) -> None:
    _, held_out = open_samples(config_of(f"--data.validation={corpus.parent}"))
    assert held_out is not None
    assert held_out.file.path.name == "val.bin"
    with write_tokens(tmp_path / "val.bin", ByteTokenizer()) as writer:
        writer.add([1, 2, 3])
    with pytest.raises(ValueError, match=r"a sample takes 64 tokens: .*val\.bin has 3"):
        open_samples(config_of(f"--data.validation={tmp_path}"))
    shutil.copy(corpus, tmp_path / "train.bin")
    assert open_samples(config_of(f"--data.train={tmp_path}"))[1] is None  # val.bin is there, but not requested


def test_data_of_another_tokenizer_than_the_loaded_model_s_is_refused(
    config_of: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    def tokenizer(folder: str, num_words: int) -> FileTokenizer:
        (tmp_path / folder).mkdir(exist_ok=True)
        words = models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0")
        Fast(words).save(str(tmp_path / folder / "tokenizer.json"))
        return FileTokenizer(tmp_path / folder)

    def check_with(coder: Tokenizer) -> None:
        with write_tokens(tmp_path / "train.bin", coder) as writer:
            writer.add([1, 2, 3] * 50)
        check(config_of("--model.num_layers=0", "--model.width=0", "--model.ffn_width=0", *load), 1)

    load = [f"--data.train={tmp_path}", f"--model.load={tmp_path / 'model'}"]
    save_llama(Llama(preset("tiny", num_layers=1), attention=lambda *_: None), tmp_path / "model")
    check_with(tokenizer("other", 100))  # the model's tokenizer is unknown
    (tmp_path / "model" / "state.json").write_text('{"extra": {"tokenizer": "bytes"}}')
    check_with(ByteTokenizer())
    with pytest.raises(ValueError, match=r"has 100 tokens \(.*other.tokenizer\.json\), .*model has 257 \(bytes\); "):
        check_with(tokenizer("other", 100))
    (tmp_path / "model" / "state.json").write_text('{"extra": {"tokenizer": "gone/tokenizer.json"}}')
    check_with(tokenizer("other", 100))
    with pytest.raises(
        ValueError, match=r"has 257 tokens \(bytes\), .*model has another vocabulary \(gone/tokenizer\.json\); "
    ):
        check_with(ByteTokenizer())
    mine = tokenizer("model", 200)
    check_with(mine)
    check_with(tokenizer("copy", 200))
    for coder, said in ((ByteTokenizer(), r"257 tokens \(bytes\)"), (tokenizer("other", 100), "100 tokens")):
        with pytest.raises(
            ValueError, match=rf"has {said}.* has 200 \(.*; make it again with `flashspan prepare --tok"
        ):
            check_with(coder)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_run_says_what_it_trains_on(
    config_of: Callable[..., TrainConfig],
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dry_run: bool,
) -> None:
    monkeypatch.setattr("flashspan.train.run._start", lambda *_: "done")
    text = corpus_tokens()[0]
    for options, source, file in (
        ([], corpus, open_tokens(corpus)),
        (["--data.train="], "the text in the package", text),
    ):
        train(config_of("--model.vocab_size=3000", *options), dry_run=dry_run)
        said = re.search(r"^data {2,}.*$", capsys.readouterr().out, re.MULTILINE)
        assert said is not None
        for fact in (source, f"{len(file.tokens):,} tokens", f"{file.tokenizer} ({file.vocab_size:,}", "3,000"):
            assert str(fact) in said[0]


def test_an_unknown_toml_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nlearning_rate = 1\nweight_decya = 0.1\n")
    with pytest.raises(ValueError, match=r"unknown key optimizer\.(learning_rate|weight_decya): "):
        parse([str(file)])
    file.write_text("steps = 3\n", encoding="utf-8-sig")  # as Windows writes it
    with pytest.raises(ValueError, match=r"steps must be in a section, like \[train\]"):
        parse([str(file)])
    file.write_text(f"[optimizer]\nlr = {10**400}\n")  # larger than any float
    with pytest.raises(ValueError, match=r"optimizer\.lr must be a number: got 1000"):
        parse([str(file)])


@pytest.mark.parametrize("text", ["[data]\ntrain = " + 3000 * "[", "[train]\nsteps = " + 5000 * "9", "[train", b"\xff"])
def test_what_is_not_toml_is_named(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r"run\.toml is not TOML: "):
        parse([str(file)])


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_fit_the_ranks_they_name(file: Path) -> None:
    config = parse([str(file)])
    degrees = config.parallel.degrees(config.parallel.default_ranks(0))
    assert config.train.batch % (degrees["data"] * degrees["shard"] * config.train.accumulate) == 0
    assert config.model.resolve().num_parameters > 0


def test_a_dry_run_describes_the_run_and_starts_nothing(
    config_of: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("--parallel.data=2", "--parallel.context=2")
    assert train(config, dry_run=True) == 0
    said = capsys.readouterr().out
    assert "data 2 x shard 1 x context 2 x tensor 1 = 4 ranks" in said
    assert "steps = 6" in said
    assert "activations" in said
    assert re.search(r"^  peak +\d+\.\d$", said, re.MULTILINE)
    assert f"run     from step 0 to 6, in {config.checkpoint.folder}\n" in said
    assert not list(Path(config.checkpoint.folder).glob("step-*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--train.steps=200"], "from step 130, the last checkpoint in {folder}, to 200"),
        (["--train.steps=3"], "nothing to do: {folder} is at step 130, train.steps is 3"),
        (["--checkpoint.resume=false"], "from step 0 to 6, replacing the run at step 130 in {folder}"),
    ],
)
def test_a_dry_run_shows_the_last_saved_step(
    config_of: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    config = config_of(*options)
    _leave_checkpoints(config, 90, 130)
    assert train(config, dry_run=True) == 0
    assert f"run     {says.format(folder=config.checkpoint.folder)}\n" in capsys.readouterr().out


def _leave_checkpoints(config: TrainConfig, *steps: int) -> list[Path]:
    """Write checkpoints of a config's run at these steps, and return them."""
    shape, (samples, _) = config.model.resolve(), open_samples(config)
    extra = {"scale": 1.0, "steady": 0, "tokenizer": "bytes", "config": config.as_dict()}
    weights, order = Llama(shape, attention=attention).state_dict(), order_of(config, samples.file)
    states = [checkpoint.State(step, shape, weights, {}, order, extra) for step in steps]
    return [checkpoint.write(config.checkpoint.folder, state, keep=len(steps)) for state in states]


def test_a_dry_run_refuses_what_the_run_would(config_of: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = config_of("--parallel.context=1", "--train.steps=1")
    with Ranks(1) as ranks:
        ranks.run(run_rank, config)
    assert train(config_of("--parallel.context=1"), dry_run=True) == 0
    with pytest.raises(ValueError, match=r"is a checkpoint of another model .*width was 48, is 64"):
        train(config_of("--parallel.context=1", "--model.width=64"), dry_run=True)
    last = checkpoint.checkpoints(config.checkpoint.folder)[-1]
    (last.with_name("step-00000002")).mkdir()  # an empty checkpoint, so that the previous one is used
    with pytest.raises(ValueError, match=r"is of a run with other samples .*seed was 0, is 7"):
        train(config_of("--parallel.context=1", "--train.seed=7"), dry_run=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match=r"file cannot be made: Not a directory; choose another with"):
        train(config_of(f"--checkpoint.folder={file}"), dry_run=True)


def _spoil_weights(folder: Path, how: str) -> None:
    """Damage a Hugging Face folder so that no run can start with it."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if how == "pickle":
        file.rename(folder / "pytorch_model.bin")
        return
    if how == "traversal":
        index = {"weight_map": dict.fromkeys(header, "../model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return
    names = [name for name in header if name != "__metadata__"]
    if how == "overlap":
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    elif how == "shape":
        header[names[0]]["shape"] = header[names[0]]["shape"][::-1]
    elif how == "bias":
        header["model.layers.0.self_attn.q_proj.bias"] = header.pop(names[0])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("how", ["pickle", "traversal", "overlap", "shape", "bias"])
def test_a_dry_run_refuses_weights_that_the_run_would(
    config_of: Callable[..., TrainConfig], tmp_path: Path, how: str
) -> None:
    save_llama(Llama(config_of().model.resolve(), attention=attention), tmp_path / "weights")
    given = [f"--model.load={tmp_path / 'weights'}", *(f"--model.{n}=0" for n in ("num_layers", "width", "ffn_width"))]
    assert train(config_of(*given), dry_run=True) == 0
    _spoil_weights(tmp_path / "weights", how)
    with pytest.raises(ValueError, match=r"safetensors|pickle|tensors"):
        train(config_of(*given), dry_run=True)


def test_a_dry_run_refuses_a_checkpoint_that_a_run_would_not_load(config_of: Callable[..., TrainConfig]) -> None:
    config = config_of()
    path = _leave_checkpoints(config, 3)[0]
    given = [f"--model.load={path}", *(f"--model.{n}=0" for n in ("num_layers", "width", "ffn_width"))]
    other = f"--checkpoint.folder={path.parent}-other"
    assert train(config_of(*given, other), dry_run=True) == 0
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    for options in ([*given, other], []):  # as initial weights, and as the state to resume from
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            train(config_of(*options), dry_run=True)


def test_a_dry_run_refuses_a_folder_that_is_in_use(config_of: Callable[..., TrainConfig]) -> None:
    config = config_of()
    with locked_folder(config.checkpoint.folder), pytest.raises(ValueError, match="another is at work"):
        train(config, dry_run=True)
    assert train(config, dry_run=True) == 0


@pytest.mark.parametrize("option", ["train.steps", "train.batch", "parallel.ranks", "checkpoint.every"])
def test_a_count_beyond_any_run_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        parse([f"--{option}={10**30}"])


def test_more_ranks_than_a_machine_holds_are_refused(config_of: Callable[..., TrainConfig]) -> None:
    with pytest.raises(ValueError, match="memory"):
        train(config_of("--parallel.ranks=100000"), dry_run=True)


def test_a_disk_too_small_for_a_checkpoint_is_reported_before(
    config_of: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("--checkpoint.folder=runs/of/mine")
    needed = checkpoint.needed_bytes(3 * 4 * config.model.resolve().num_parameters)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(ValueError, match=r"a checkpoint takes .* MB, but runs/of/mine has .* MB free"):
        train(config)
    with pytest.raises(ValueError, match="a checkpoint takes"):
        train(config, dry_run=True)
    assert "memory" in capsys.readouterr().out  # the plan is printed anyway
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed))
    assert train(config, dry_run=True) == 0


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    named = [line.split()[0].removeprefix("--") for line in said.splitlines() if line.startswith("  --")]
    assert named == list(KEYS)
    assert all(entry.metadata["help"] for entry in KEYS.values())


def test_the_learning_rate_rises_and_falls() -> None:
    options = OptimizerSection(lr=1.0, final_lr=0.1, warmup=4)
    rates = [learning_rate(step, 20, options) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in pairwise(rates[3:]))
    assert abs(rates[-1] - 0.1) < 1e-12


def test_a_run_without_ranks_of_its_own_uses_what_the_degrees_say() -> None:
    assert parse(["--parallel.data=3"]).parallel.default_ranks(0) == 3
    assert parse([]).parallel.default_ranks(0) == 4
    assert parse([]).parallel.default_ranks(2) == 2
    assert parse(["--parallel.data=2", "--parallel.context=3"]).parallel.default_ranks(0) == 6
    assert parse([]).parallel.degrees(4) == {"data": 1, "shard": 1, "context": 4, "tensor": 1}
    assert parse(["--parallel.data=0", "--parallel.context=2"]).parallel.degrees(6)["data"] == 3


def test_a_loaded_model_has_its_own_sizes(tmp_path: Path) -> None:
    config = preset("tiny", num_layers=1)
    save_llama(Llama(config, attention=lambda *_: None), tmp_path)
    same = parse(["--model.load", str(tmp_path), "--model.width", str(config.width)])
    assert same.model.resolve() == config
    with pytest.raises(ValueError, match=r"num_layers is 1 there, got .*model\.preset small"):
        parse(["--model.load", str(tmp_path), "--model.preset", "small"]).model.resolve()
    with pytest.raises(ValueError, match=rf"model.width is {config.width} there, got 48; leave these options out"):
        parse(["--model.load", str(tmp_path), "--model.width", "48"]).model.resolve()


def test_a_synonym_is_of_a_key_that_exists_and_is_none_itself() -> None:
    assert set(SYNONYMS.values()) <= set(KEYS)
    assert not set(SYNONYMS) & {key.rpartition(".")[2] for key in KEYS}
