"""Token files, and samples addressed by number: which tokens a step reads depends on (seed, step) and nothing else.

A token file is 1024 bytes of JSON header, padded with spaces, and then the tokens, little-endian uint16 or uint32. It
is mapped into memory, never read whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flashspan.files import parse_json, read_json, require_file
from flashspan.model import IGNORE

FORMAT = "flashspan tokens 1"
HEADER_BYTES = 1024
NUM_RUNS, RUN = 256, 1024  # what a fingerprint reads
END = 256
"""The byte tokenizer's end of a document."""


class Tokenizer(Protocol):
    """Text to numbers and back."""

    name: str
    vocab_size: int
    end: int  # the token after each document, -1 if there is none

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are tokens 0 to 255, and 256 ends a document."""

    name, vocab_size, end = "bytes", 257, END

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < END).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer as Fast

        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        require_file(path, "give a tokenizer.json, or the word bytes")
        with _library_faults(f"{path} is not a tokenizer.json of the tokenizers library"):
            self._fast = Fast.from_file(str(path))
        # A file may tell the library to cut every text to some length, or to fill it up: for batches, not for us.
        self._fast.no_truncation()
        self._fast.no_padding()
        # Numbers may have gaps: what a model needs room for is the largest, not how many there are.
        self.vocab_size = max(self._fast.get_vocab().values(), default=-1) + 1
        self.name = str(path.absolute())  # token files and checkpoints keep it, and are read from other folders too
        if not self.vocab_size:
            raise ValueError(f"{path} has no tokens: give another tokenizer.json, or the word bytes")
        ends = [self._fast.token_to_id(word) for word in ("</s>", "<|end_of_text|>", "<|endoftext|>")]
        self.end = next((token for token in ends if token is not None), -1)

    def encode(self, text: str) -> list[int]:
        remedy = "give one that knows every character, or the word bytes"
        with _library_faults(f"{self.name} cannot encode a text", remedy):
            found = self._fast.encode(text)
        # Some files end every text: here whoever writes a document does that, and a prompt is to go on.
        ended = bool(found.ids) and found.ids[-1] == self.end and found.special_tokens_mask[-1]
        return found.ids[:-1] if ended else found.ids

    def decode(self, tokens: Iterable[int]) -> str:
        with _library_faults(f"{self.name} cannot decode tokens"):
            return self._fast.decode(list(tokens))


@contextmanager
def _library_faults(what: str, remedy: str = "give another tokenizer.json") -> Iterator[None]:
    """Failures of the tokenizers library as a ValueError of one line.

    It raises plain Exceptions. A panic of its Rust code, of a pattern that backtracks without end for instance, is no
    Exception at all, and prints a page to the standard error stream before it is raised: nothing is printed here.
    """
    try:
        with _silent_stderr():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {' '.join(str(error).split())}; {remedy}") from error


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Nothing that native code writes to the standard error stream is seen."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def load_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for "bytes", else the tokenizer.json at this path."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def tokenizer_of(folder: str | Path) -> str:
    """The tokenizer that belongs to a folder of weights: its tokenizer.json, or the one that a checkpoint of ours
    names; empty where it has neither."""
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        return str(folder / "tokenizer.json")
    about = read_json(folder / "state.json") if (folder / "state.json").exists() else {}
    extra = about.get("extra")
    return str(extra.get("tokenizer", "")) if isinstance(extra, dict) else ""


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
        a path, and the same file may lie elsewhere: only bytes are told from others by it."""
        named = self.tokenizer != "" and tokenizer != ""
        differs = named and (self.tokenizer == "bytes") != (tokenizer == "bytes")
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


@dataclass(frozen=True)
class Samples:
    """Runs of `sequence` + 1 tokens, numbered without end: each pass over the file is in an order of its own."""

    file: TokenFile
    sequence: int
    seed: int
    documents: bool = False

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise ValueError(
                f"a sample takes {self.sequence + 1} tokens: {self.file.path} has {len(self.file.tokens)}; "
                "lower data.sequence or prepare more text"
            )
        if self.documents and self.file.end < 0:
            raise ValueError(f"{self.file.path} marks no end of documents: set data.documents to false")

    @property
    def num_windows(self) -> int:
        return (len(self.file.tokens) - 1) // self.sequence

    def window(self, number: int) -> int:
        """Where in the file sample `number` begins."""
        epoch, index = divmod(number, self.num_windows)
        return permute(index, self.num_windows, f"{self.seed}/{epoch}") * self.sequence

    def read(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """tokens and targets, int64 [B, T]: targets are the tokens one later, shifted here, before any split."""
        rows = [np.asarray(self.file.tokens[at : at + self.sequence + 1]) for at in map(self.window, numbers)]
        stacked = np.stack(rows)
        self.file.check_tokens(stacked)
        whole = torch.from_numpy(stacked.astype(np.int64))
        tokens, targets = whole[:, :-1], whole[:, 1:].clone()
        if self.documents:
            targets[tokens == self.file.end] = IGNORE
        return tokens, targets

    def first_keys(self, tokens: Tensor) -> Tensor:
        """Where the document of each token begins, int64 [B, T]."""
        places = torch.arange(1, self.sequence + 1)
        begins = torch.where(tokens == self.file.end, places, 0).cummax(1).values
        return torch.cat((torch.zeros_like(begins[:, :1]), begins[:, :-1]), 1)


def permute(index: int, size: int, key: str) -> int:
    """Where `index` goes in a pseudo-random order of range(size), with no table: a Feistel network over a power of 4,
    walked until it lands inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = (left << half) | right
        if index < size:
            return index
