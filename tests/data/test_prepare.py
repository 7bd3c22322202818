"""Text becomes the same bytes for any number of processes that encode it, and after any number of kills."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, processors, trainers

from flashspan.cli import main
from flashspan.data import documents
from flashspan.data.prepare import prepare
from flashspan.data.tokenizer import ByteTokenizer, load_tokenizer
from flashspan.data.tokens import open_tokens
from flashspan.lock import LOCK, locked_folder

command = importlib.import_module("flashspan.data.prepare")  # in the package, this name is the function
TEXTS = [f"{i}: " + "wörd " * (i * 7 % 23) for i in range(300)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A JSONL file of 300 documents."""
    file = tmp_path / "texts.jsonl"
    rows = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(TEXTS)]
    file.write_text("\n".join(rows), encoding="utf-8")  # without a last newline
    return file


def read_texts(folder: Path) -> list[str]:
    """The documents in a prepared folder."""
    tokens = [int(t) for name in ("train.bin", "val.bin") for t in open_tokens(folder / name).tokens]
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == ByteTokenizer.end:
            texts.append([])
        else:
            texts[-1].append(token)
    assert texts.pop() == []
    return [ByteTokenizer().decode(text) for text in texts]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("num_bytes", [2, 200, 3000])
@pytest.mark.parametrize("tokenizer", ["bytes", "1999 words"])
def test_the_suggested_next_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int, tokenizer: str
) -> None:
    (tmp_path / "a.txt").write_text("w " * (num_bytes // 2))
    words = Fast(models.WordLevel({"w": 0, "x": 1998}, unk_token="x"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    name = "bytes" if tokenizer == "bytes" else str(tmp_path)
    assert main(["prepare", str(tmp_path / "a.txt"), "--folder", str(tmp_path / "data"), "--tokenizer", name]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    if tokenizer != "bytes" and num_bytes == 2:
        assert re.match(r"next: .* 2 tokens", said)
    else:
        assert main([*said.removeprefix("next: flashspan ").split(), "--parallel.device=cpu", "--dry-run"]) == 0
        assert ("--data.sequence" in said) == (num_bytes < 3000)
        assert ("--model.vocab_size 1999" in said) == (tokenizer != "bytes")


def test_a_file_that_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nosuch\.txt does not exist: .*\.txt, \.jsonl or \.parquet"):
        prepare([str(tmp_path / "nosuch.txt")], folder=str(tmp_path / "out"))


@pytest.mark.parametrize("size", [1, 100, 997, 2**22])
def test_lines_belong_to_one_part_each(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", size)
    parts = documents.cut([str(lines)])
    assert [text for part in parts for text in documents.read(part, "text")] == TEXTS


@pytest.mark.parametrize("size", [1, 7, 2**22])
def test_blank_lines_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", size)
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\n \t\n\r\n{"text": "b"}\r\n\n')
    parts = documents.cut([str(tmp_path / "a.jsonl")])
    assert [text for part in parts for text in documents.read(part, "text")] == ["a", "b"]


def test_half_a_character_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n\n{"text": "x\\ud800"}\n')  # a pair, half a pair
    with pytest.raises(ValueError, match=r"a\.jsonl line 3 .*: '\\ud800' is an unpaired surrogate; repair or drop it"):
        prepare([str(tmp_path / "a.jsonl")], folder=str(tmp_path / "out"), processes=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "fault"), [('{"text": null}', "of type NoneType, not text; repair or drop it"), ("[" * 200_000, "nested")]
)
def test_a_row_without_text_is_reported_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, fault: str
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 7)  # earlier lines are counted in such parts too
    (tmp_path / "A.JSONL").write_text('{"text": "a"}\n\n{"text": "b"}\n' + row)
    with pytest.raises(ValueError, match=rf"A\.JSONL line 4 is not a JSON object with the key 'text': .*{fault}"):
        [text for part in documents.cut([str(tmp_path / "A.JSONL")]) for text in documents.read(part, "text")]


def test_line_ends_of_text_files_become_newlines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    prepare([str(tmp_path / "a.txt")], folder=str(tmp_path / "out"))
    assert read_texts(tmp_path / "out") == ["one\ntwo\n"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_long_text_file_is_one_document_for_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    text = "".join(f"{'wörd ' * (i * 7 % 23)}{i}\n" for i in range(400)) + "z" * 3000 + "\nand no last newline"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(documents, "PART_BYTES", 1000)
    prepare([str(tmp_path / "a.txt")], folder=str(tmp_path / "out"), validation=0, processes=processes)
    assert read_texts(tmp_path / "out") == [text]


def test_bytes_that_are_not_text_are_reported_with_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"line\n" * 300 + b"\xff" + b"line\n" * 300)
    monkeypatch.setattr(documents, "PART_BYTES", 1000)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: byte 1,503, 0xff, is invalid start byte; convert"):
        prepare([str(tmp_path / "a.txt")], folder=str(tmp_path / "out"), processes=1)


def test_a_long_text_is_converted_to_bytes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BLOCK", 4)
    runs = list(command.encode(["one ünd twö", "", "3"], ByteTokenizer()))
    assert max(map(len, runs)) <= 2 * 4  # characters have at most two bytes
    assert [token for run in runs for token in run] == [*"one ünd twö".encode(), 256, *b"3", 256]


@pytest.mark.parametrize("afresh", [True, False], ids=["begins afresh at lines", "begins with a space"])
def test_a_long_text_is_encoded_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: bool
) -> None:
    """Some tokenizers do not allow a cut at the end of a line. The tokens are always those of the whole text."""
    fast = Fast(models.BPE(unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if afresh else pre_tokenizers.Metaspace()
    text = "\n".join(command.corpus())[:20_000]
    fast.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, special_tokens=["?", "<s>"]))
    fast.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    coder = load_tokenizer(str(tmp_path))
    monkeypatch.setattr(command, "PIECE", 300)
    monkeypatch.setattr(documents, "NEAR", 50)
    runs = list(command.encode([text], coder))
    assert [token for run in runs for token in run] == coder.encode(text)
    assert (len(runs) > 20) == afresh

    # And in parallel, from a file with Windows line ends, in parts of which some are empty.
    (tmp_path / "long.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    monkeypatch.setattr(documents, "PART_BYTES", 700)
    parts = documents.cut([str(tmp_path / "long.txt")])
    assert len(parts) > 20
    runs = [[token for run in command.encode_text(part, coder) for token in run] for part in parts]
    assert [token for run in runs for token in run] == coder.encode(text)
    assert (sum(map(bool, runs)) > 15) == afresh


def test_ctrl_c_ends_the_encoding_processes_without_a_message() -> None:
    with command._pool(1) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_DFL
        assert not pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()


def test_many_processes_write_what_one_writes(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    (tmp_path / "book.txt").write_text("A whole book.")
    inputs = [str(lines), str(tmp_path / "book.txt")]
    for processes in (1, 2):
        assert prepare(inputs, folder=str(tmp_path / str(processes)), processes=processes) == 0
    assert files(tmp_path / "1") == files(tmp_path / "2")
    assert set(files(tmp_path / "1")) == {LOCK, "train.bin", "val.bin"}
    assert read_texts(tmp_path / "1") == [*TEXTS, "A whole book."]


def test_an_interrupted_run_resumes_with_the_missing_parts(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    prepare([str(lines)], folder=str(tmp_path / "whole"), processes=1)
    real, made = command.encode_part, []

    def fragile(part: documents.Part, *rest: object) -> None:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(part)
        real(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "encode_part", fragile)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(lines)], folder=str(tmp_path / "cut"), processes=1)
    assert not (tmp_path / "cut" / "train.bin").exists()
    monkeypatch.setattr(command, "encode_part", lambda part, *rest: (made.append(part), real(part, *rest)))
    prepare([str(lines)], folder=str(tmp_path / "cut"), processes=1)
    assert "resuming: 3 of" in capsys.readouterr().out
    assert len(made) == len(documents.cut([str(lines)]))
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    # With another field or file, no part of the old plan is used.
    with pytest.raises(
        ValueError, match=r"line 1 is not a JSON object with the key 'body': it has text; .* with --field"
    ):
        prepare([str(lines)], folder=str(tmp_path / "cut"), field="body", processes=1)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_bad_input_does_not_remove_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n[]\n')
    (tmp_path / "old").mkdir()
    for notes in ([], ["notes.txt"]):
        folder = tmp_path / "old" / f"new{len(notes)}" / "data"
        real = command.encode_part

        def encode(*args: Any, folder: Path = folder, notes: list[str] = notes, real: Any = real) -> None:
            for name in notes:
                (folder / name).write_text("mine")
            real(*args)

        monkeypatch.setattr(command, "encode_part", encode)
        with pytest.raises(ValueError, match="line 2 is not a JSON object"):
            prepare([str(tmp_path / "a.jsonl")], folder=str(folder), processes=1)
        monkeypatch.setattr(command, "encode_part", real)
        assert [path.name for path in folder.glob("*")] == notes
        assert folder.parent.exists() == bool(notes)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new1"]


def test_a_part_is_on_the_disk_before_it_counts(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, a file may have its name but none of its bytes, and would be mistaken for a complete part."""
    part, kept = tmp_path / "00000000", []
    monkeypatch.setattr(os, "fsync", lambda handle: kept.append((os.fstat(handle).st_size, part.exists())))
    command.encode_part(documents.cut([str(lines)])[0], part, "bytes", "text")
    assert kept == [(part.stat().st_size, False)]


SLOWLY = """
import importlib, sys, time
from flashspan.data import documents
from flashspan.data.prepare import prepare
command = importlib.import_module("flashspan.data.prepare")
documents.PART_BYTES = 2000
real = command.encode_part
def slow(*args):
    time.sleep(0.05)
    real(*args)
command.encode_part = slow
prepare([sys.argv[1]], folder=sys.argv[2], processes=1)
"""


def test_a_kill_loses_nothing_and_changes_no_byte(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    prepare([str(lines)], folder=str(tmp_path / "whole"), processes=1)
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(lines), str(tmp_path / "cut")])
    done = tmp_path / "cut" / ".preparing"
    deadline = time.monotonic() + 60
    while len(list(done.glob("0*"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list(done.glob("0*"))) >= 3
    assert not (tmp_path / "cut" / "train.bin").exists()
    prepare([str(lines)], folder=str(tmp_path / "cut"), processes=2)
    assert re.search(r"resuming: \d+ of \d+ parts", capsys.readouterr().out)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_killed_process_is_reported_in_one_line(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(Executor):
        def submit(self, *args: object, **kwargs: object) -> Future[object]:  # type: ignore[override]
            job: Future[object] = Future()
            job.set_exception(BrokenProcessPool())
            return job

    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    monkeypatch.setattr(command, "_pool", lambda processes: Killed())
    assert main(["prepare", str(lines), "--folder", str(tmp_path / "out"), "--processes", "2"]) == 2
    assert re.fullmatch(r".*killed.*\n", capsys.readouterr().err)
    assert (tmp_path / "out" / ".preparing" / "plan.json").exists()


def test_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(300)), "text": TEXTS})
    parquet.write_table(table, tmp_path / "texts.parquet", row_group_size=70)
    assert len(documents.cut([str(tmp_path / "texts.parquet")])) == 5
    prepare([str(tmp_path / "texts.parquet")], folder=str(tmp_path / "out"), processes=1)
    assert read_texts(tmp_path / "out") == TEXTS
    with pytest.raises(ValueError, match=r"no column 'body': it has id, text; name one with --field"):
        prepare([str(tmp_path / "texts.parquet")], folder=str(tmp_path / "out"), field="body", processes=1)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "holes.parquet")
    with pytest.raises(ValueError, match=r"in row 1 of row group 0: of type NoneType, not text; repair or drop it"):
        prepare([str(tmp_path / "holes.parquet")], folder=str(tmp_path / "out"), processes=1)
    torn = bytearray((tmp_path / "texts.parquet").read_bytes())
    about = 8 + int.from_bytes(torn[-8:-4], "little")  # the metadata are at the end of the file
    torn[4:-about] = bytes(len(torn) - about - 4)
    (tmp_path / "torn.parquet").write_bytes(torn)
    with pytest.raises(ValueError, match=r"row group 0 of .*torn\.parquet cannot be read: .*; fetch it again"):
        prepare([str(tmp_path / "torn.parquet")], folder=str(tmp_path / "out"), processes=1)
    torn[-100:-8] = b"\xff" * 92
    (tmp_path / "lost.parquet").write_bytes(torn)
    with pytest.raises(ValueError, match=r"lost\.parquet is not a Parquet file: "):
        prepare([str(tmp_path / "lost.parquet")], folder=str(tmp_path / "out"), processes=1)


def test_any_number_of_parquet_files_are_read(tmp_path: Path) -> None:
    """More files than a process may have open."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number, text in enumerate(TEXTS[:9]):
        parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / f"{number}.parquet")
    before = len(os.listdir("/proc/self/fd"))
    prepare(sorted(map(str, tmp_path.glob("*.parquet"))), folder=str(tmp_path / "out"), processes=1)
    assert read_texts(tmp_path / "out") == TEXTS[:9]
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_bytes_in_parquet_that_are_no_text_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    ends, halves = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"x\xed\xa0\x80")
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, ends, halves])})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no UTF-8 text in row 1 of row group 0: "):
        prepare([str(tmp_path / "a.parquet")], folder=str(tmp_path / "out"), processes=1)


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(tmp_path / "saved"))
    prepare(dataset=str(tmp_path / "saved"), folder=str(tmp_path / "out"), processes=1)
    assert read_texts(tmp_path / "out") == TEXTS
    with pytest.raises(ValueError, match=r"no split 'test': it has train; use --split"):
        prepare(dataset=str(tmp_path / "saved"), folder=str(tmp_path / "out"), split="test")


@pytest.mark.parametrize(("package", "extra"), [("pyarrow", "parquet"), ("datasets", "datasets")])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=rf"pip install 'flashspan\[{extra}\]'"):
        prepare([str(file)] if package == "pyarrow" else [], dataset="some/dataset", folder=str(tmp_path / "out"))


def test_what_cannot_be_written_or_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert main(["prepare", str(tmp_path / "a.txt"), "--folder", str(tmp_path / "a.txt" / "data")]) == 2
    assert "a.txt/data cannot be made: " in capsys.readouterr().err
    for inputs in ([str(tmp_path / "a.txt")], [], ["--synthetic", "9"]):
        assert main(["prepare", *inputs, "--folder", str(tmp_path / "a.txt")]) == 2
        assert "a.txt cannot be made: File exists; choose another with --folder" in capsys.readouterr().err
    for name in ("", " "):
        assert main(["prepare", "--synthetic", "9", "--folder", name]) == 2
        assert f"folder must be the name of a folder: got {name!r}; the default is 'data'" in capsys.readouterr().err
    assert main(["prepare", "--synthetic", "-5"]) == 2
    assert "at least 0" in capsys.readouterr().err
    assert main(["prepare", str(tmp_path / "a.txt"), "--synthetic", "5"]) == 2
    assert "give files or --synthetic, not both: got " in capsys.readouterr().err


def test_no_text_leaves_the_old_files(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "two words"
    prepare([str(lines)], folder=str(out), processes=1)
    assert f"flashspan train --data.train '{out}'" in capsys.readouterr().out
    before = files(out)
    for name, text in (("empty.jsonl", ""), ("empty.txt", ""), ("blank.jsonl", '{"text": ""}\n')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="no text"):
            prepare([str(tmp_path / name)], folder=str(out))
    assert files(out) == before


def test_two_commands_at_once_in_one_folder_are_refused(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked_folder(out):
        (out / ".preparing").mkdir()
        (out / ".preparing" / "00000000").write_bytes(b"of the first")
        for inputs in ([str(lines)], []):
            with pytest.raises(ValueError, match=rf"another is at work in {out}; .* choose another with --folder"):
                prepare(inputs, folder=str(out), processes=1)
        assert files(out / ".preparing") == {"00000000": b"of the first"}
    assert prepare([str(lines)], folder=str(out), processes=1) == 0


def test_more_tokens_than_fit_are_refused_before_any_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, small = tmp_path / "out", shutil._ntuple_diskusage(10**6, 9, 10**4)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    assert main(["prepare", "--synthetic", "9999", "--folder", str(out)]) == 2
    assert f"no space left for 39,996 bytes in {out}: free" in capsys.readouterr().err
    assert not out.exists()


def test_the_next_run_removes_the_files_of_a_killed_one(lines: Path, tmp_path: Path) -> None:
    (tmp_path / ".all").write_bytes(b"half of it")
    assert prepare([str(lines)], folder=str(tmp_path), processes=1) == 0
    assert not (tmp_path / ".all").exists()


def test_a_full_disk_costs_no_part(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        assert main(["prepare", str(lines), "--folder", str(out), "--processes", "1"]) == 2
    assert "no space left for" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(command, "token_dtype", fill := mock.Mock(side_effect=OSError(28, "No space left on device")))
        assert main(["prepare", "--synthetic", "9", "--folder", str(tmp_path / "other")]) == 2
    assert fill.called
    assert f"no space left in {tmp_path / 'other'}: free" in capsys.readouterr().err
    prepare([str(lines)], folder=str(out), processes=1)
    assert "resuming: 1 of 1 parts" in capsys.readouterr().out
    assert read_texts(out) == TEXTS


def test_a_file_that_is_no_tokenizer_is_named(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text("{}")
    with pytest.raises(ValueError, match=r"some.json is not a tokenizer.json"):
        prepare([str(lines)], folder=str(tmp_path / "data"), tokenizer=str(tmp_path / "some.json"))
