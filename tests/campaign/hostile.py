"""Random hostile files and values. Each function writes a file that must be refused to a given path."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_INTEGERS = ["abc", "", " ", "1.5", "1e3", "nan", "Infinity", "-inf", "0x10", "[1]", "9" * 5000, "null", "1,2", "½"]
NOT_INTEGERS += ["\0", "1\0", "\ud800", "true", "1" + "\u200b", "--", "💥", "$(id)", "%s%n", "../.."]
NOT_NUMBERS = ["abc", "", " ", "1,5", "0x1p3", "[]", "\0", "1e", "none", "true", "½", "\ud800", "1.0.0"]
BAD_COUNTS = ["-1", "-7", str(-(10**30)), str(10**30), str(2**63), str(-(2**63))]
NOT_FINITE = ["nan", "inf", "-inf", "1e999", "-1e999"]
NOT_WORDS = ["", " ", "None", "null", "float32 ", "RING", "ring\0", "\ud800", "é" * 40, "x" * 10000, "-", "*", "0"]
VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, -(10**30), 2**63, 1e308, "", "abc", "\0", [], [[]], {}, {"a": 1}]
VALUES += ["9" * 5000, [None], float("nan"), float("inf"), "\u202e", 2**64]


def nested(rng: random.Random) -> str:
    """JSON or TOML that is nested deeper than any parser supports."""
    depth = rng.choice([1000, 5000, 100_000, 10**6])
    return rng.choice(["[" * depth, "[" * depth + "]" * depth, '{"a":' * depth, '{"a":' * depth + "1" + "}" * depth])


def garbage(rng: random.Random) -> bytes:
    """Bytes that are not text, or text without meaning."""
    kinds: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: b"\0" * rng.choice([1, 8, 4096]),
        lambda: rng.randbytes(rng.choice([1, 100, 5000])),
        lambda: b"\xff\xfe" + "[train]".encode("utf-16-le"),
        lambda: b"\xef\xbb\xbf{",
        lambda: nested(rng).encode(),
        lambda: b"null",
        lambda: b"NaN",
        lambda: b'"' + b"x" * rng.choice([10, 10**6]),
        lambda: b"9" * 5000,
        lambda: b"[1, 2",
        lambda: b"\x80\x04\x95\x00.",  # a pickle
        lambda: b"PK\x03\x04" + rng.randbytes(50),
    ]
    return rng.choice(kinds)()


def strange_path(rng: random.Random, path: Path) -> str:
    """Return a path that is not a regular file: this one, at which it is created, or another."""
    kind = rng.randrange(12)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.symlink_to("nothing")
    elif kind == 4:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/dev/null", "/dev/urandom"]))
    elif kind == 5:
        with socket.socket(socket.AF_UNIX) as server, _inside(path.parent):
            server.bind(path.name)
    else:
        names = [
            "/dev/zero",
            "/dev/null",
            "/proc/self/mem",
            "/proc/nonexistent/x",
            "x" * 300,
            "x/" * 3000,
            "a\0b",
            "\ud800",
        ]
        names += ["/proc", "/proc/self/fd", "/dev/tty", "/dev/null/x", str(path)]
        return rng.choice(names)
    return str(path)


class _inside:
    """A current folder: the name of a socket may not be longer than 100 characters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, os.getcwd()

    def __enter__(self) -> None:
        os.chdir(self.folder)

    def __exit__(self, *_: object) -> None:
        os.chdir(self.before)


def bad_file(rng: random.Random, path: Path) -> str:
    """A file of garbage, or something that is not a regular file."""
    if rng.random() < 0.5:
        return strange_path(rng, path)
    path.write_bytes(garbage(rng))
    return str(path)


def damage_json(rng: random.Random, path: Path, keys: list[str] | None = None) -> None:
    """Replace one value of a JSON object by another, in place."""
    about: Any = json.loads(path.read_text())
    key = rng.choice(keys or sorted(about))
    about[key] = rng.choice([value for value in VALUES if value != about[key]])
    path.write_text(json.dumps(about))


def safetensors(rng: random.Random, path: Path) -> None:
    """A safetensors file with a false header."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = bytes(data[8 + length :])
    name = rng.choice([name for name in header if name != "__metadata__"])
    other = rng.choice([each for each in header if each not in (name, "__metadata__")] or [name])
    how = rng.randrange(12)
    if how == 0:
        path.write_bytes(rng.choice([2**63, 2**64 - 1, 10**9, 0, 1, len(data)]).to_bytes(8, "little") + data[8:])
        return
    if how == 1:
        path.write_bytes(data[: rng.randrange(len(data))])
        return
    if how == 2:
        path.write_bytes(garbage(rng))
        return
    if how == 3:
        header[name]["data_offsets"] = header[other]["data_offsets"]
    elif how == 4:
        header[name]["data_offsets"] = rng.choice([[-1, 4], [0, 10**18], [4, 0], [0], None, "0", [0, 2**64], [0.5, 4]])
    elif how == 5:
        header[name]["shape"] = rng.choice([[-1], [2**62, 8], [], [0], None, [1.5], ["4"], [10**30], [2**32, 2**32]])
    elif how == 6:
        header[name]["dtype"] = rng.choice(["F128", None, 4, "", "I64", "BOOL", "f32", []])
    elif how == 7:
        del header[name]
    elif how == 8:
        header["extra.weight"] = header.pop(name)
    elif how == 9:
        header["__metadata__"] = rng.choice([None, [], {"format": 3}, "pt", {"a": {"b": {}}}])
        del header[name]
    elif how == 10:
        header = rng.choice([[], None, "x", 3, {}])
    else:
        body += b"\0" * rng.choice([1, 4096])
    raw = nested(rng).encode() if rng.random() < 0.05 else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def token_file(rng: random.Random, path: Path) -> None:
    """A token file with a false header or false tokens."""
    header = {"format": "flashspan tokens 1", "dtype": "uint16", "num_tokens": 5000, "vocab_size": 257, "end": 256}
    header["tokenizer"] = "bytes"
    body = bytes(10000)
    how = rng.randrange(8)
    if how == 0:
        path.write_bytes(garbage(rng))
        return
    if how == 1:
        key = rng.choice(["format", "dtype", "num_tokens", "vocab_size", "end"])
        if key in ("vocab_size", "num_tokens", "end"):
            header[key] = rng.choice([value for value in VALUES if value not in (-1, 0, 2**63, 2**64)])
        else:
            header[key] = rng.choice(["float32", "uint64", *VALUES])
    elif how == 2:
        del header[rng.choice(["format", "dtype", "num_tokens", "vocab_size", "end"])]
    elif how == 3:
        body = body[: rng.randrange(len(body))]
    elif how == 4:
        body = b"\xff" * len(body)  # tokens beyond the vocabulary
    elif how == 5:
        header["num_tokens"] = rng.choice([-1, 2**63, 10**18, 5001, 4999])
    elif how == 6:
        header["vocab_size"] = rng.choice([0, -1, 2**63, 10**30, 10**6])
    else:
        header["num_tokens"], body = rng.choice([(0, b""), (1, b"\0\0")])
    line = rng.choice([nested(rng).encode()] if rng.random() < 0.1 else [json.dumps(header).encode()])[:1023]
    path.write_bytes(line + b"\n" + b" " * (1023 - len(line)) + body)


def tokenizer(rng: random.Random, path: Path) -> None:
    """A tokenizer.json that the library refuses, or that cannot be used."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    about: dict[str, Any] = {"version": "1.0", "model": model, "added_tokens": []}
    how = rng.randrange(8)
    if how == 0:
        path.write_bytes(garbage(rng))
        return
    if how == 1:
        about["model"]["vocab"] = rng.choice([{}, None, [], {"a": -1}, {"a": 2**40}, {"a": "0"}])
    elif how == 2:
        about["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    elif how == 3:
        about["model"] = rng.choice([None, [], {}, {"type": "BPE"}, {"type": "Nothing", "vocab": {}}, "x"])
    elif how == 4:
        about["added_tokens"] = rng.choice([None, 3, [{}], [{"id": -1, "content": "x"}]])
    elif how == 5:
        about["normalizer"] = rng.choice([3, {"type": "x"}, [], {"type": "Sequence"}])
    elif how == 6:
        about["decoder"] = rng.choice([3, {"type": "x"}, [], {"type": "Fuse", "a": nested}][:3])
    else:
        about["version"] = rng.choice([None, 2, "9.0", []])
    path.write_text(json.dumps(about))
