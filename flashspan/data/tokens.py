"""Token files.

A token file is 1024 bytes of JSON header, padded with spaces, and then the tokens, little-endian uint16 or uint32. It
is mapped into memory, never read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from flashspan.files import parse_json, require_file

from .tokenizer import NAMED, Tokenizer

FORMAT = "flashspan tokens 1"
HEADER_BYTES = 1024
NUM_RUNS, RUN = 256, 1024  # what a fingerprint reads


@dataclass(frozen=True)
class TokenFile:
    """Tokens and where they come from: a mapped file, or the text in the package."""

    path: Path
    tokens: np.ndarray
    vocab_size: int
    tokenizer: str
    end: int

    def may_be_of(self, tokenizer: str, vocab_size: int | None) -> bool:
        """Whether a tokenizer may have made these tokens, of whose name and size nothing or None is known. The name is
        a path, and the same file may lie elsewhere: only the tokenizers in the package are told from others by it."""
        names = {self.tokenizer, tokenizer}
        differs = "" not in names and len(names) == 2 and bool(names & set(NAMED))
        return not differs and vocab_size in (None, self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """Tells these tokens from others, the same in memory and in a file. A small file is read whole; of a large one
        evenly spaced runs, first and last among them, so that a terabyte costs no more than a few hundred pages."""
        digest = hashlib.blake2b(f"{len(self.tokens)} {self.vocab_size} {self.end}".encode(), digest_size=16)
        for run in self._runs():
            digest.update(run.astype("<u4").tobytes())
        return digest.hexdigest()

    def check(self) -> None:
        """ValueError where one of the tokens that a fingerprint reads is not in the vocabulary."""
        for run in self._runs():
            self.check_tokens(run)

    def check_tokens(self, tokens: np.ndarray) -> None:
        """ValueError where one of these tokens is not in the vocabulary."""
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(
                f"{self.path} is damaged: its header says {self.vocab_size} tokens and it holds number {largest}; "
                "make it again"
            )

    def _runs(self) -> Iterator[np.ndarray]:
        last = max(0, len(self.tokens) - RUN)
        for start in np.unique(np.linspace(0, last, NUM_RUNS).astype(np.int64)):
            yield self.tokens[start : start + RUN]


@contextmanager
def write_tokens(path: str | Path, tokenizer: Tokenizer) -> Iterator[TokenWriter]:
    """A token file to add to, which appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.writing")
    writer = TokenWriter(half, tokenizer)
    try:
        yield writer
        writer.close()
        half.replace(path)
    finally:
        writer.stream.close()
        half.unlink(missing_ok=True)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """How a tokenizer's tokens are stored."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def make_header(tokenizer: Tokenizer, num_tokens: int) -> bytes:
    """What a token file begins with; ValueError where the tokenizer's name does not fit."""
    header = {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer).name,
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "end": tokenizer.end,
    }
    line = json.dumps(header).encode() + b"\n"
    if len(line) > HEADER_BYTES:
        raise ValueError(
            f"{tokenizer.name} is too long for the header of a token file, which takes {HEADER_BYTES} bytes and would "
            f"take {len(line)} with it: give a copy of a shorter path"
        )
    return line


class TokenWriter:
    """Adds tokens to a file and, at the end, says in its header how many."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_tokens = tokenizer, 0
        self.dtype = token_dtype(tokenizer)
        self.stream = path.open("wb")
        self.stream.write(b" " * HEADER_BYTES)

    def add(self, tokens: Iterable[int] | np.ndarray) -> None:
        data = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=self.dtype)
        self.stream.write(data.tobytes())
        self.num_tokens += len(data)

    def close(self) -> None:
        self.stream.seek(0)
        self.stream.write(make_header(self.tokenizer, self.num_tokens))


def open_tokens(path: str | Path) -> TokenFile:
    """Map a token file, once its header and its length agree."""
    path = Path(path)
    path = path / "train.bin" if path.is_dir() else path
    require_file(path, "make it with `flashspan prepare`, or name another")
    with path.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    try:
        header = parse_json(head.split(b"\n", 1)[0], strict=True)
        if header["format"] != FORMAT or header["dtype"] not in ("uint16", "uint32"):
            raise KeyError("format")
        num_tokens, vocab_size, end = (header[key] for key in ("num_tokens", "vocab_size", "end"))
        if not all(type(number) is int for number in (num_tokens, vocab_size, end)):
            raise TypeError("a count is not a whole number")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a token file: no {FORMAT!r} header; make it with `flashspan prepare`"
        ) from error
    if num_tokens < 0 or vocab_size < 1 or not -1 <= end < vocab_size:
        raise ValueError(
            f"{path} is damaged: its header says {num_tokens} tokens of a vocabulary of {vocab_size}, where {end} ends "
            "a document; make it again"
        )
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    expected, size = HEADER_BYTES + num_tokens * dtype.itemsize, path.stat().st_size
    if size != expected:
        raise ValueError(
            f"{path} is truncated or damaged: its header says {expected} bytes, it has {size}; make it again"
        )
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(num_tokens,))
    return TokenFile(path, tokens, vocab_size, str(header.get("tokenizer", "")), end)
