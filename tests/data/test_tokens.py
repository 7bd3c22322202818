"""Token files, and the samples read from them."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

from flashspan import masks
from flashspan.data.prepare import corpus, prepare
from flashspan.data.samples import Samples, permute
from flashspan.data.tokenizer import CORPUS, ByteTokenizer, load_tokenizer
from flashspan.data.tokens import HEADER_BYTES, open_tokens, write_tokens
from flashspan.train import parse
from flashspan.train.run import train

command = importlib.import_module("flashspan.data.prepare")  # in the package, this name is the function


def make(path: Path, tokens: list[int]) -> Path:
    with write_tokens(path, ByteTokenizer()) as writer:
        writer.add(tokens)
    return path


def test_bytes_come_back() -> None:
    coder = ByteTokenizer()
    text = "Grüße, 世界! 🙂\n\0"
    assert coder.decode(coder.encode(text)) == text
    assert max(coder.encode(text)) < 256 == coder.end


def write_tokenizer(path: Path, words: dict[str, int]) -> str:
    """Write a tokenizer.json that, like LLaMA 2's, puts the space at the start of a word, drops a text's first space,
    and has settings for batches. Returns the path."""
    fast = Fast(models.WordLevel(words, unk_token="<unk>"))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if "</s>" in words:
        fast.post_processor = processors.TemplateProcessing(single="$0 </s>", special_tokens=[("</s>", words["</s>"])])
    fast.enable_truncation(2)
    fast.enable_padding(length=4)
    fast.save(str(path))
    return str(path)


def test_a_tokenizer_encodes_every_word_and_no_more(tmp_path: Path) -> None:
    coder = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", {"<unk>": 0, "▁a": 1, "▁b": 70_000}))
    for text in ("a b a b b", "a"):
        assert coder.decode(coder.encode(text)) == text
    assert coder.encode("a b a b b") == [1, 70_000, 1, 70_000, 70_000]
    assert coder.vocab_size == 70_001  # room for the largest number, although there are only three tokens
    ending = load_tokenizer(write_tokenizer(tmp_path / "ending.json", {"<unk>": 0, "▁a": 1, "</s>": 2}))
    assert (ending.encode("a a"), ending.end) == ([1, 1], 2)  # encode adds no end: the writer of a document does
    with pytest.raises(ValueError, match=r"empty\.json has no tokens: give another"):
        load_tokenizer(write_tokenizer(tmp_path / "empty.json", {}))


def test_a_token_file_names_its_tokenizer_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a a")
    write_tokenizer(tmp_path / "words.json", {"<unk>": 0, "▁a": 1})
    monkeypatch.chdir(tmp_path)
    prepare(["a.txt"], folder="out", tokenizer="words.json", validation=0.0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    named = open_tokens(tmp_path / "out").tokenizer  # a checkpoint stores this name too
    assert load_tokenizer(named).encode("a") == [1]


def test_a_tokenizer_that_cannot_serve_is_named_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a c")
    deep = tmp_path.joinpath(*["é" * 100] * 2)  # in a header, this letter is six characters
    deep.mkdir(parents=True)
    for path, words, says in (
        (tmp_path / "few.json", {"▁a": 0}, r"few\.json cannot encode a text: .*; give one that has every character"),
        (deep / "far.json", {"<unk>": 0}, r"the header of a token file .*far\.json; copy .* shorter path"),
    ):
        with pytest.raises(ValueError, match=says):
            prepare([str(tmp_path / "a.txt")], folder=str(tmp_path / "out"), tokenizer=write_tokenizer(path, words))
        assert not (tmp_path / "out").exists()


def test_prepared_text_is_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one é", encoding="utf-8-sig")  # as Windows writes it, with a byte order mark
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    assert prepare([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], folder=str(tmp_path), validation=0.25) == 0
    train, held_out = (open_tokens(tmp_path / name) for name in ("train.bin", "val.bin"))
    assert (len(train.tokens), len(held_out.tokens)) == (13, 4)
    whole = [*train.tokens.tolist(), *held_out.tokens.tolist()]
    assert ByteTokenizer().decode(whole) == "one étwothree"
    assert whole.count(256) == 3
    assert (train.vocab_size, train.tokenizer, train.end) == (257, "bytes", 256)


def test_synthetic_tokens_are_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":  # the second time in small blocks
        monkeypatch.setattr(command, "BLOCK", 2**24 if name == "a" else 99)
        prepare(folder=str(tmp_path / name), synthetic=1000, validation=0.0)
    first, second = (open_tokens(tmp_path / name).tokens for name in "ab")
    assert len(first) == 1000
    assert np.array_equal(first, second)
    assert first.max() > 200


@pytest.mark.parametrize("damage", ["truncated", "longer", "not ours", "empty"])
def test_a_damaged_token_file_is_named(tmp_path: Path, damage: str) -> None:
    path = make(tmp_path / "train.bin", list(range(100)))
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-3], "longer": data + b"x", "not ours": b"x" * 2000, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"train\.bin is (truncated or damaged|not a token file)"):
        open_tokens(path)


@pytest.mark.parametrize(
    "field",
    [
        '"num_tokens": Infinity',
        '"num_tokens": 1e999',
        '"vocab_size": 0',
        '"vocab_size": true',
        '"end": 257',
        '"end": -2',
    ],
)
def test_a_header_that_no_tokenizer_writes_is_refused(tmp_path: Path, field: str) -> None:
    path = make(tmp_path / "train.bin", list(range(100)))
    name = field.split(":")[0]
    data = path.read_bytes()
    header = re.sub(rf"{name}: -?\d+", field, data[:HEADER_BYTES].decode().rstrip())
    path.write_bytes(header.encode().ljust(HEADER_BYTES) + data[HEADER_BYTES:])
    with pytest.raises(ValueError, match=r"train\.bin is (damaged|not a token file)"):
        open_tokens(path)


@pytest.mark.parametrize("header", [b"[" * 1024, b'{"a":' * 204 + b"1234"])
def test_a_header_of_brackets_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(header)
    with pytest.raises(ValueError, match=r"train\.bin is not a token file"):
        open_tokens(path)


def test_a_pipe_is_no_token_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.bin")
    for path in (tmp_path, tmp_path / "train.bin"):
        with pytest.raises(ValueError, match="not a regular file"):
            open_tokens(path)


def test_a_tokenizer_whose_pattern_backtracks_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fast = Fast(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    fast.save(str(tmp_path / "tokenizer.json"))
    coder = load_tokenizer(str(tmp_path))
    assert coder.encode("a") == [1]
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot encode"):
        coder.encode("a" * 40 + "b")
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"  # no long message of the library


@pytest.mark.parametrize("name", ["missing.txt", "bad.jsonl", "data.parquet", "latin.txt"])
def test_text_that_cannot_be_read_is_named_and_leaves_no_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"txt": "a"}))
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    (tmp_path / "latin.txt").write_bytes(b"\xe9\xff")
    with pytest.raises(ValueError, match=name):
        prepare([str(tmp_path / name)], folder=str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(ValueError, match=r"nowhere\.json is missing"):
        load_tokenizer("nowhere.json")


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_the_order_of_samples_is_a_permutation(size: int) -> None:
    order = [permute(i, size, "0/0") for i in range(size)]
    assert sorted(order) == list(range(size))
    if size >= 16:
        assert order != list(range(size))
        assert order != [permute(i, size, "0/1") for i in range(size)]


def test_samples_are_addressed_by_number_and_targets_are_one_later(tmp_path: Path) -> None:
    samples = Samples(open_tokens(make(tmp_path / "t.bin", [i % 251 for i in range(1001)])), 10, seed=3)
    assert samples.num_windows == 100
    tokens, targets = samples.read(range(5, 9))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(samples.read([7])[0][0], tokens[2])
    starts = [samples.window(n) for n in range(200)]
    assert sorted(starts[:100]) == sorted(starts[100:]) == list(range(0, 1000, 10))
    assert starts[:100] != starts[100:]


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    samples = Samples(open_tokens(make(tmp_path / "t.bin", [5, 6, 257, 7])), 3, seed=0)
    with pytest.raises(ValueError, match=r"t\.bin is damaged: .* a vocabulary of 257, .* number 257"):
        samples.read([0])


def test_documents_in_a_sample_are_found(tmp_path: Path) -> None:
    row = [5, 6, 256, 7, 256, 8, 9, 1]
    samples = Samples(open_tokens(make(tmp_path / "t.bin", row)), 7, seed=0, documents=True)
    tokens, targets = samples.read([0])
    first = samples.first_keys(tokens)
    assert first.tolist() == [[0, 0, 0, 3, 3, 5, 5]]
    assert targets.tolist() == [[6, 256, -100, 256, -100, 9, 1]]
    want = masks.documents([3, 2, 2]) & masks.causal()
    start, end = want.intervals(7, 7)
    assert start.tolist() == first[0].tolist()
    assert end.tolist() == list(range(1, 8))


def test_the_package_contains_text() -> None:
    text = "".join(corpus())
    assert len(text) > 100_000
    assert len(set(text.split())) > 400


def test_the_package_s_text_is_what_its_grammar_writes() -> None:
    maker = Path(__file__).parent.parent.parent / "examples" / "tales.py"
    made = subprocess.run([sys.executable, maker], capture_output=True, text=True, check=True, timeout=60).stdout
    assert made == (CORPUS / "tales.txt").read_text(encoding="utf-8")
    assert len(list(corpus())) == 1000


def test_the_grammar_has_help_and_can_write_to_a_closed_pipe() -> None:
    maker = f"{sys.executable} {Path(__file__).parent.parent.parent / 'examples' / 'tales.py'}"
    for command, num_lines in ((f"{maker} --help", 12), (f"{maker} | head -1", 1)):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, timeout=60)
        assert 1 <= len(done.stdout.splitlines()) <= num_lines
        assert not done.stderr


@pytest.mark.parametrize("num_tokens", [1, 100, 5000, 600_000])
def test_a_fingerprint_differs_for_different_data(tmp_path: Path, num_tokens: int) -> None:
    tokens = [i * i % 251 for i in range(num_tokens)]
    one = open_tokens(make(tmp_path / "one.bin", tokens))
    assert open_tokens(make(tmp_path / "again.bin", tokens)).fingerprint == one.fingerprint
    held = replace(one, tokens=np.array(tokens, dtype=np.uint32))
    assert held.fingerprint == one.fingerprint  # for any storage of the tokens
    for place in (0, num_tokens - 1):
        other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
        assert open_tokens(make(tmp_path / "other.bin", other)).fingerprint != one.fingerprint


def test_a_dry_run_finds_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokens = np.full(600, 65)
    tokens[500] = 300
    with pytest.raises(ValueError, match=r"t\.bin is damaged: .* a vocabulary of 257, .* number 300"):
        train(parse([f"--data.train={make(tmp_path / 't.bin', tokens)}", "--data.sequence=15"]), dry_run=True)
