"""Text to numbers and back: bytes, or a tokenizer.json of the tokenizers library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Protocol

from flashspan.files import read_json, require_file

END = 256
"""The byte tokenizer's end token, which follows each document."""
CORPUS = Path(str(resources.files("flashspan.data") / "corpus"))
"""The folder of the text in the package and of the tokenizer made for it."""
NAMED = ("bytes", "tales")
"""The names of the tokenizers in the package; the name of any other is the path of its file."""


class Tokenizer(Protocol):
    """Text to numbers and back."""

    name: str
    vocab_size: int
    end: int  # the token after each document, -1 if there is none

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Tokens 0 to 255 are UTF-8 bytes; token 256 ends a document."""

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
        require_file(path, "give a tokenizer.json, or the word bytes or tales")
        with _library_faults(f"{path} is not a tokenizer.json of the tokenizers library"):
            self._fast = Fast.from_file(str(path))
        # A file may have truncation and padding settings, meant for batches: ignore them.
        self._fast.no_truncation()
        self._fast.no_padding()
        # Token numbers may have gaps: the vocabulary size is the largest number + 1, not their count.
        self.vocab_size = max(self._fast.get_vocab().values(), default=-1) + 1
        # Absolute: token files and checkpoints keep the name, and are read from other folders too.
        self.name = "tales" if path.parent == CORPUS else str(path.absolute())
        if not self.vocab_size:
            raise ValueError(f"{path} has no tokens: give another tokenizer.json, or the word bytes")
        ends = [self._fast.token_to_id(word) for word in ("</s>", "<|end_of_text|>", "<|endoftext|>")]
        self.end = next((token for token in ends if token is not None), -1)

    def encode(self, text: str) -> list[int]:
        remedy = "give one that has every character, or the word bytes"
        with _library_faults(f"{self.name} cannot encode a text", remedy):
            found = self._fast.encode(text)
        # Some files add an end token to every text. Here `prepare` adds it, and a prompt must not have one.
        ended = bool(found.ids) and found.ids[-1] == self.end and found.special_tokens_mask[-1]
        return found.ids[:-1] if ended else found.ids

    def decode(self, tokens: Iterable[int]) -> str:
        with _library_faults(f"{self.name} cannot decode tokens"):
            return self._fast.decode(list(tokens))


@contextmanager
def _library_faults(what: str, remedy: str = "give another tokenizer.json") -> Iterator[None]:
    """Turn failures of the tokenizers library into a ValueError of one line.

    The library raises plain Exceptions. A panic of its Rust code, for example because of a pattern that backtracks
    without end, is a BaseException. It also prints a page on stderr, which is suppressed here.
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
    """Discard everything that native code writes to stderr."""
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
    """The byte tokenizer for "bytes", the tokenizer of the text in the package for "tales", else the tokenizer.json at
    this path."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(CORPUS if name == "tales" else name)


def tokenizer_of(folder: str | Path) -> str:
    """The tokenizer of a folder of weights: its tokenizer.json, or the one that a flashspan checkpoint names; empty if
    it has neither."""
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        return str(folder / "tokenizer.json")
    about = read_json(folder / "state.json") if (folder / "state.json").exists() else {}
    extra = about.get("extra")
    return str(extra.get("tokenizer", "")) if isinstance(extra, dict) else ""
