"""Text into token files.

flashspan prepare book.txt dialogue.jsonl --folder data
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from .data import HEADER_BYTES, ByteTokenizer, Tokenizer, load_tokenizer, open_tokens, write_tokens


def prepare(
    inputs: Sequence[str] = (),
    *,
    folder: str = "data",
    tokenizer: str = "bytes",
    validation: float = 0.1,
    field: str = "text",
    synthetic: int = 0,
    seed: int = 0,
) -> int:
    """Turn text into train.bin and val.bin.

    Each .txt file and each line of a .jsonl file is a document. Without inputs: the text in the package.

    Args:
        inputs: .txt and .jsonl files.
        folder: where train.bin and val.bin go.
        tokenizer: "bytes", or the path of a tokenizer.json.
        validation: the part of the tokens, from the end, that goes into val.bin.
        field: the key of the text in a line of JSON.
        synthetic: make this many random tokens instead, for profiling.
        seed: of the random tokens.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation is a part of the tokens, in [0, 1): got {validation}")
    coder = load_tokenizer(tokenizer)
    out = Path(folder)
    if synthetic:
        noise = np.random.default_rng(seed).integers(0, coder.vocab_size, synthetic)
        counts = write_files(out, coder, [noise], validation)
    else:
        documents = read_documents(inputs, field=field) if inputs else corpus()
        counts = write_files(out, coder, encode(documents, coder), validation)
    print(f"{counts[0]:,} tokens in {out / 'train.bin'}, {counts[1]:,} in {out / 'val.bin'}")
    print(f"next: flashspan train --data.train {out} --checkpoint.folder runs/mine")
    return 0


def corpus() -> Iterator[str]:
    """The documents that come with the package."""
    for entry in sorted((resources.files("flashspan.train") / "corpus").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".txt"):
            yield entry.read_text(encoding="utf-8")


def read_documents(inputs: Iterable[str], *, field: str = "text") -> Iterator[str]:
    """The documents of text and JSONL files."""
    for name in inputs:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"{path} is missing")
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        yield str(json.loads(line)[field])
                    except (ValueError, KeyError, TypeError) as error:
                        raise ValueError(
                            f"{path} line {number} is not a JSON object with {field!r}: {error}"
                        ) from error
        elif path.suffix in (".txt", ".md", ""):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        else:
            raise ValueError(f"{path}: .txt and .jsonl files are read; convert {path.suffix} files first")


def encode(documents: Iterable[str], coder: Tokenizer) -> Iterator[Sequence[int]]:
    """The tokens of each document, and its end."""
    for text in documents:
        yield coder.encode(text) + ([coder.end] if coder.end >= 0 else [])


def write_files(
    folder: Path, coder: Tokenizer, runs: Iterable[Sequence[int] | np.ndarray], validation: float
) -> tuple[int, int]:
    """Runs of tokens into train.bin and, from their end, val.bin; how many went into each."""
    whole = folder / ".all.bin"
    try:
        with write_tokens(whole, coder) as writer:
            for run in runs:
                writer.add(run)
        tokens = open_tokens(whole).tokens
        if shutil.disk_usage(folder).free < tokens.nbytes + 2 * HEADER_BYTES:
            raise ValueError(f"no space left for {tokens.nbytes:,} bytes in {folder}: choose another folder")
        cut = len(tokens) - int(len(tokens) * validation)
        for name, part in (("train.bin", tokens[:cut]), ("val.bin", tokens[cut:])):
            with write_tokens(folder / name, coder) as writer:
                for begin in range(0, len(part), 2**24):
                    writer.add(part[begin : begin + 2**24])
        return cut, len(tokens) - cut
    finally:
        whole.unlink(missing_ok=True)


def prepare_corpus(folder: Path) -> Path:
    """The package's text as token files in a folder, made once; the training file."""
    if not (folder / "train.bin").exists() or not (folder / "val.bin").exists():
        coder = ByteTokenizer()
        write_files(folder, coder, encode(corpus(), coder), 0.1)
    return folder / "train.bin"
