"""`flashspan prepare`: token files from text.

    flashspan prepare book.txt dialogue.jsonl web.parquet --folder data

Inputs are cut into parts. Processes encode the parts in parallel, each into its own file in `folder/.preparing`; then
the parts are joined in order. After a kill, the same command resumes with the missing parts; the result has the same
bytes.
"""

from __future__ import annotations

import errno
import json
import multiprocessing as mp
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from flashspan.files import make_folder
from flashspan.launch import start_fork_server
from flashspan.lock import LOCK, locked_folder
from flashspan.model import preset
from flashspan.process import die_with
from flashspan.progress import progress

from . import documents
from .defaults import DEFAULT_PRESET, DEFAULT_SEQUENCE
from .tokenizer import CORPUS, NAMED, ByteTokenizer, Tokenizer, load_tokenizer
from .tokens import HEADER_BYTES, TokenFile, make_header, token_dtype, write_tokens

WORK = ".preparing"
WHOLE = ".all"
"""The file of all tokens before they are split. If a run is killed, the next one removes it."""
VALIDATION = 0.1
BLOCK = 2**24
"""The most tokens in memory at a time."""
PIECE = 2**20
"""Characters that a tokenizer.json encodes at a time: the tokenizers library takes hundreds of bytes per token."""
REMEDY = "free some space and run the same command, which resumes, or choose another --folder"
BREAK = "\n\n* * *\n\n"
"""The separator of tales in the text in the package."""


def prepare(
    inputs: Sequence[str] = (),
    *,
    folder: str = "data",
    tokenizer: str = "bytes",
    validation: float = VALIDATION,
    field: str = "text",
    dataset: str = "",
    split: str = "train",
    processes: int = 0,
    synthetic: int = 0,
    seed: int = 0,
) -> int:
    """Encode text as train.bin and val.bin; after an interruption, the same command resumes.

    Each .txt file, each line of a .jsonl file that is not blank and each row of a .parquet file is a document. In
    .txt files CRLF becomes LF. Without inputs: the text in the package.

    Args:
        inputs: Files: .txt, .jsonl and .parquet.
        folder: Folder for train.bin and val.bin.
        tokenizer: Tokenizer: bytes, tales (made for the text in the package), or the path of a tokenizer.json.
        validation: Share of the tokens, from the end, that goes into val.bin.
        field: Key of the text in a JSON line, or its column in a .parquet file.
        dataset: Hugging Face dataset, by name or as a saved folder, added after the inputs.
        split: Split of the dataset.
        processes: Number of processes that encode; 0 for one per core.
        synthetic: Number of random tokens to write instead of text, for profiling.
        seed: Random seed for --synthetic.
    """
    if not folder.strip():  # an empty name would be the current folder
        raise ValueError(f"folder must be the name of a folder: got {folder!r}; the default is 'data'")
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be a share of the tokens, from 0 to below 1: got {validation}")
    for name, number in (("processes", processes), ("synthetic", synthetic), ("seed", seed)):
        if number < 0:
            raise ValueError(f"{name} must be at least 0: got {number}")
    if synthetic and (inputs or dataset):
        names = ", ".join([*inputs, dataset] if dataset else inputs)
        raise ValueError(f"give files or --synthetic, not both: got {names} and {synthetic}; leave one out")
    _refuse_unused(inputs, field, dataset, split, synthetic, seed)
    coder = load_tokenizer(tokenizer)
    make_header(coder, sys.maxsize)  # refuses a name that does not fit, before anything is encoded
    out = Path(folder)
    with _named(out):
        if synthetic:
            check_space(out, 2 * synthetic * token_dtype(coder).itemsize)  # all tokens, then the two files
            chance = np.random.default_rng(seed)
            sizes = (min(BLOCK, synthetic - at) for at in range(0, synthetic, BLOCK))
            counts = write_files(out, coder, (chance.integers(0, coder.vocab_size, n) for n in sizes), validation)
        elif inputs or dataset:
            parts = documents.cut(inputs, dataset, split)
            plan = {
                "inputs": documents.identify(inputs, dataset, split),
                "tokenizer": _describe_tokenizer(tokenizer),
                "field": field,
                "parts": len(parts),
            }
            with parts_folder(out, plan) as work:
                files = encode_parts(parts, work, tokenizer, field, processes or os.cpu_count() or 1)
                counts = join(out, coder, files, validation)
        else:
            counts = write_files(out, coder, encode(corpus(), coder), validation)
    print(f"{counts[0]:,} tokens in {out / 'train.bin'}, {counts[1]:,} in {out / 'val.bin'}")
    print(describe_next(out, coder, counts[0]))
    return 0


def _refuse_unused(inputs: Sequence[str], field: str, dataset: str, split: str, synthetic: int, seed: int) -> None:
    """ValueError for an option that would do nothing with these inputs."""
    if seed and not synthetic:
        raise ValueError(f"--seed needs --synthetic: got {seed} without it; leave --seed out")
    if split != "train" and not dataset:
        raise ValueError(f"--split needs --dataset: got {split!r} without it; leave --split out")
    if (
        field != "text"
        and not dataset
        and all(Path(name).suffix.lower() not in (".jsonl", ".parquet") for name in inputs)
    ):
        raise ValueError(f"--field needs a .jsonl file, a .parquet file or --dataset: got {field!r} without any")


def describe_next(folder: Path, coder: Tokenizer, num_tokens: int) -> str:
    """The command that trains on these files, with the options whose defaults do not fit them."""
    if num_tokens < 2:
        return "next: add text; a sample needs at least 2 tokens"
    words = ["flashspan train --data.train", shlex.quote(str(folder)), "--checkpoint.folder runs/mine"]
    if num_tokens <= DEFAULT_SEQUENCE:
        words.append(f"--data.sequence {num_tokens - 1}")
    if coder.vocab_size > preset(DEFAULT_PRESET).vocab_size:
        words.append(f"--model.vocab_size {coder.vocab_size}")
    return f"next: {' '.join(words)}"


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Add the folder to the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(f"no space left in {folder}: {REMEDY}") from error


def corpus() -> Iterator[str]:
    """The text in the package: each tale is a document."""
    yield from (CORPUS / "tales.txt").read_text(encoding="utf-8").rstrip("\n").split(BREAK)


def encode(texts: Iterable[str], coder: Tokenizer) -> Iterator[Sequence[int]]:
    """Yield runs of tokens: those of each document, then the end token. Empty documents are skipped."""
    for text in filter(None, texts):
        yield from _encode_pieces(text, coder, True)
        if coder.end >= 0:
            yield [coder.end]


def encode_text(part: documents.Part, coder: Tokenizer) -> Iterator[Sequence[int]]:
    """Yield runs of tokens of one part of a text file; the last part has the end token. Together, the parts have the
    tokens of the whole file."""
    text, first, last = documents.read_text(part, partial(_may_split, coder))
    yield from _encode_pieces(text, coder, first)
    if last and text and coder.end >= 0:
        yield [coder.end]


def _may_split(coder: Tokenizer, left: str, right: str) -> bool:
    """Whether two texts have the same tokens together and apart; false if a tokenizer begins texts with a space."""
    if isinstance(coder, ByteTokenizer):
        return True
    return coder.encode(left + right) == [*coder.encode(left), *coder.encode(right)[_num_prefix(coder) :]]


def _num_prefix(coder: Tokenizer) -> int:
    """The number of tokens that a tokenizer puts before every text."""
    return len(coder.encode(""))


def _encode_pieces(text: str, coder: Tokenizer, first: bool) -> Iterator[Sequence[int]]:
    """The tokens of a text, in pieces if it is long. Tokens that the tokenizer puts before every text are kept only at
    the beginning, and only if the text is the `first` of its document."""
    if isinstance(coder, ByteTokenizer):  # the list of a long text's bytes would take many times its memory
        yield from (coder.encode(text[at : at + BLOCK]) for at in range(0, len(text), BLOCK))
        return
    begin = 0
    while begin < len(text):
        end = _end_of_piece(text, begin + PIECE, coder)
        yield coder.encode(text[begin:end])[0 if first else _num_prefix(coder) :]
        begin, first = end, False


def _end_of_piece(text: str, at: int, coder: Tokenizer) -> int:
    """The end of the first line at or after `at` where the text may be split, else the end of the text."""
    for _ in range(documents.TRIES):
        at = text.find("\n", at) + 1
        if not at:
            break
        if _may_split(coder, text[max(0, at - documents.NEAR) : at], text[at : at + documents.NEAR]):
            return at
    return len(text)


@contextmanager
def parts_folder(folder: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """A folder for finished parts. If this process is killed, the folder stays; a run with the same plan reuses it."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with locked_folder(make_folder(folder, "--folder"), "--folder"):
        (folder / WHOLE).unlink(missing_ok=True)
        work = folder / WORK
        note, text = work / "plan.json", json.dumps(plan)
        if not note.is_file() or note.read_bytes() != text.encode():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            note.write_text(text, encoding="utf-8")
        try:
            yield work
        except ValueError:  # wrong inputs: the next run will have others
            shutil.rmtree(work)
            if created:
                (folder / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # no longer empty
                    for path in created:
                        path.rmdir()
            raise
        shutil.rmtree(work)


def encode_parts(parts: Sequence[documents.Part], work: Path, tokenizer: str, field: str, processes: int) -> list[Path]:
    """Write the tokens of every part to a file, and return the files in order. Existing files are kept."""
    files = [work / f"{i:08}" for i in range(len(parts))]
    todo = [(part, file) for part, file in zip(parts, files, strict=True) if not file.exists()]
    if len(todo) < len(parts):
        print(f"resuming: {len(parts) - len(todo):,} of {len(parts):,} parts are done")
    with progress("encoding parts", len(parts), completed=len(parts) - len(todo)) as line:
        if min(processes, len(todo)) <= 1:
            for part, file in todo:
                encode_part(part, file, tokenizer, field)
                line.advance()
            return files
        with _pool(min(processes, len(todo))) as pool:
            try:
                # Ctrl-C does not interrupt this thread, which starts the processes. A process interrupted while it
                # starts would print a traceback after this one has ended.
                with ThreadPoolExecutor(1) as starter:
                    args = (tokenizer, field)
                    begun = starter.submit(lambda: {pool.submit(encode_part, *job, *args): job[0] for job in todo})
                    jobs = begun.result()
                for job in as_completed(jobs):
                    job.result()
                    line.advance()
            except BrokenProcessPool as error:
                raise OSError(
                    "an encoding process was killed, perhaps because memory ran out: run the same command with fewer "
                    "--processes; it resumes with the missing parts"
                ) from error
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return files


def encode_part(part: documents.Part, file: Path, tokenizer: str, field: str) -> None:
    """Write one part's tokens to a file that appears whole or not at all."""
    coder = _tokenizer(tokenizer)
    runs = encode_text(part, coder) if part.kind == "text" else encode(documents.read(part, field), coder)
    half = file.with_name(f"{file.name}.writing")
    with half.open("wb") as stream:
        for tokens in runs:
            stream.write(np.asarray(tokens, dtype=token_dtype(coder)).tobytes())
        stream.flush()
        os.fsync(stream.fileno())  # otherwise a power cut could leave an empty file that counts as done
    half.replace(file)


def write_files(
    folder: Path, coder: Tokenizer, runs: Iterable[Sequence[int] | np.ndarray], validation: float
) -> tuple[int, int]:
    """Write runs of tokens to train.bin, and the last of them to val.bin; return the number of tokens in each."""
    whole = folder / WHOLE
    with locked_folder(make_folder(folder, "--folder"), "--folder"):
        try:
            with whole.open("wb") as stream:
                for run in runs:
                    stream.write(np.asarray(run, dtype=token_dtype(coder)).tobytes())
            return join(folder, coder, [whole], validation)
        finally:
            whole.unlink(missing_ok=True)


def join(folder: Path, coder: Tokenizer, files: Sequence[Path], validation: float) -> tuple[int, int]:
    """Join files of tokens without headers into train.bin and val.bin; return the number of tokens in each."""
    dtype = token_dtype(coder)
    sizes = [file.stat().st_size // dtype.itemsize for file in files]
    total = sum(sizes)
    if not total:
        raise ValueError("the inputs have no text: add some")
    check_space(folder, total * dtype.itemsize)
    cut = first_held_out(total, validation)
    for name, begin, end in (("train.bin", 0, cut), ("val.bin", cut, total)):
        with write_tokens(folder / name, coder) as writer:
            at = 0  # the current file's first token, among all tokens
            for file, size in zip(files, sizes, strict=True):
                first, last = max(begin, at) - at, min(end, at + size) - at
                for where in range(first, last, BLOCK):
                    count = min(BLOCK, last - where)
                    writer.add(np.fromfile(file, dtype, count, offset=where * dtype.itemsize))
                at += size
    return cut, total - cut


def check_space(folder: Path, size: int) -> None:
    """OSError unless these bytes and two headers fit on the disk. (An OSError does not remove encoded parts.)"""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if shutil.disk_usage(there).free < size + 2 * HEADER_BYTES:
        raise OSError(f"no space left for {size:,} bytes in {folder}: {REMEDY}")


def first_held_out(num_tokens: int, validation: float) -> int:
    """The index of the first validation token."""
    return num_tokens - int(num_tokens * validation)


@cache
def corpus_tokens() -> tuple[TokenFile, TokenFile]:
    """The training and validation tokens of the text in the package, as `flashspan prepare --tokenizer tales` writes
    them, in memory."""
    coder = load_tokenizer("tales")
    tokens = np.concatenate([np.asarray(run, dtype=token_dtype(coder)) for run in encode(corpus(), coder)])
    cut = first_held_out(len(tokens), VALIDATION)
    first, second = (
        TokenFile(CORPUS, part, coder.vocab_size, coder.name, coder.end) for part in np.split(tokens, [cut])
    )
    return first, second


_tokenizer = cache(load_tokenizer)


def _describe_tokenizer(name: str) -> Any:
    """A value that changes when the tokenizer changes."""
    if name in NAMED:
        return name
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


def _pool(processes: int) -> Executor:
    """Processes that end when this one ends."""
    start_fork_server([__name__])
    return ProcessPoolExecutor(processes, mp.get_context("forkserver"), _begin, (os.getpid(),))


def _begin(parent: int) -> None:
    die_with(parent)
    # Ctrl-C ends a process at once, without a message; its part is encoded again later. A fork server that a training
    # run started has blocked the signals that stop a run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
