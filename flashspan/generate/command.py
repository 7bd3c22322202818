"""`flashspan generate`: text from a checkpoint.

flashspan generate runs/tiny --prompt "One morning in March"
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from flashspan.agreement import from_first
from flashspan.attention import attention
from flashspan.checkpoint.format import checkpoints, newest, refuse_damaged
from flashspan.context import context_parallel
from flashspan.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, tokenizer_of
from flashspan.files import MAX_LINES_BYTES, read_bytes, read_json
from flashspan.launch import RankError, Ranks, check_num_ranks, raise_user_error
from flashspan.model import Llama, find_model, load_llama
from flashspan.process import LONGEST
from flashspan.progress import progress

from .checks import check_prompt, check_seed
from .decode import decode
from .sample import Sampling
from .split import Split

BATCH = 8
"""Prompts of a file that are decoded together by default."""
AROUND = 32
"""The text of a token may depend on this many tokens before it."""


def generate(
    folder: str,
    *,
    prompt: str = "",
    file: str = "",
    batch: int | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    ranks: int = 1,
    tokenizer: str = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> int:
    """Continue a prompt, token by token, on the terminal.

    Example: flashspan generate runs/tiny --prompt "One morning in March"

    Args:
        folder: Training run, one of its checkpoints, a Hugging Face folder, or a name on the Hugging Face Hub
            (meta-llama/Llama-3.2-1B).
        prompt: Text to continue.
        file: File of prompts, one per line, instead of --prompt.
        batch: Number of prompts of a file that are decoded together, only with --ranks 1; 8 by default.
        tokens: Number of tokens to generate.
        temperature: Sampling temperature; 0 always takes the most probable token.
        top_k: Number of most probable tokens to sample from; 0 for all.
        top_p: Probability mass of the most probable tokens to sample from.
        seed: Random seed for sampling, the same for each prompt of a file.
        ranks: Number of devices (or CPU processes) that split the context; each holds a part of the KV cache.
        tokenizer: "bytes", "tales" or a tokenizer.json; by default the tokenizer of the run or of the folder.
        device: Device type; auto: GPUs if there are enough.
        dtype: Dtype of the weights.
    """
    sampling = Sampling(temperature, top_k, top_p)
    for name, value in (("--tokens", tokens), ("--batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more: got {value}")
    if batch is not None and (not file or ranks > 1):
        raise ValueError(f"--batch is for the prompts of a --file on one rank: got --batch {batch}; leave it out")
    if prompt and file:
        raise ValueError(f"give --prompt or --file, not both: got {prompt!r} and {file}; add the prompt to the file")
    check_seed(seed)
    check_prompt(prompt)
    prompts = read_prompts(file) if file else [prompt]
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < ranks:
        raise ValueError(f"{ranks} ranks on CUDA need as many GPUs: found {gpus}; use --device cpu")
    check_num_ranks(ranks, "generate")
    folder = find_model(folder)
    _require_weights(Path(folder))  # before ranks are started, which takes seconds
    where = "cuda" if gpus >= ranks else "cpu"
    try:
        if ranks == 1:
            talk(folder, prompts, tokens, sampling, seed, tokenizer, where, dtype, batch or BATCH)
        else:
            backend = "nccl" if where == "cuda" else "gloo"
            _talk_on_ranks(ranks, backend, folder, prompts, tokens, sampling, seed, tokenizer, where, dtype)
    except KeyboardInterrupt:  # Ctrl-C is a normal end of a long text
        print()
        return 130
    return 0


def _talk_on_ranks(num_ranks: int, backend: str, *args: Any) -> None:
    """Run `talk` on ranks that are started here and have ended when this returns or raises."""
    # Without a timeout: a pager or Ctrl-S may stop the first rank while it prints. A dead rank is still detected.
    with Ranks(num_ranks, backend=backend, timeout=LONGEST, own_functions=True) as pool:
        try:
            pool.run(talk, *args, timeout=LONGEST)
        except RankError as error:
            # As with one rank: stdout is a full disk, or its reader has ended (OSError makes that a BrokenPipeError).
            if error.first and (found := re.fullmatch(r"\w+: \[Errno (\d+)\] (.+)", error.first.error)):
                raise OSError(int(found[1]), found[2]) from error
            raise_user_error(error)
            raise


def talk(
    folder: str,
    prompts: list[str],
    num_tokens: int,
    sampling: Sampling,
    seed: int,
    tokenizer: str,
    device: str,
    dtype: str,
    batch: int = 1,
) -> None:
    """Continue and print each prompt, `batch` of them at a time. A single prompt is printed token by token. In a
    process group, all ranks continue one prompt at a time together, and the first rank prints."""
    split = dist.is_initialized() and dist.get_world_size() > 1
    silent = split and dist.get_rank() > 0
    with contextlib.nullcontext() if silent else progress(f"reading {folder}"):
        model, coder, ends = load(folder, tokenizer, device=device, dtype=getattr(torch, dtype))
    say = (lambda text: None) if silent else (lambda text: print(text, end="", flush=True))
    batch = 1 if split else batch
    attend = context_parallel(dist.group.WORLD, timeout=LONGEST) if split else None
    encoded = [coder.encode(text) or [max(0, coder.end)] for text in prompts]
    for i in range(0, len(prompts), batch):
        begin, count = time.perf_counter(), 0
        texts, starts = prompts[i : i + batch], encoded[i : i + batch]
        context = None if attend is None else Split(attend)
        tokens = decode(model, starts, num_tokens, sampling=sampling, seed=seed, ends=ends, context=context)
        if len(texts) > 1:
            drawn = torch.stack(list(tokens), 1).tolist()  # [B, n]
            for text, start, row in zip(texts, starts, drawn, strict=True):
                row = row[: 1 + next((i for i, token in enumerate(row) if token in ends), len(row))]
                say(text + "".join(stream(([token] for token in row), coder, start)) + "\n")
                count += len(row)
        else:
            prefix, counter = texts[0], itertools.count()
            for piece in stream((token for token, _ in zip(tokens, counter, strict=False)), coder, starts[0]):
                # The prompt is printed with the first token: after an error before that, only the error is printed.
                say(prefix + piece)
                prefix = ""
            count = next(counter)  # tokens, not pieces: after the last token, text that was held back is one more piece
            say("\n")
        say(f"[{count} tokens, {count / (time.perf_counter() - begin):.1f} a second]\n")


def load(
    folder: str | Path, tokenizer: str = "", *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Llama, Tokenizer, frozenset[int]]:
    """The model of a training run, one of its checkpoints, or a Hugging Face folder; its tokenizer; and the tokens
    that end a text."""
    # The first rank chooses: ranks could find different checkpoints if the run is still training.
    path = from_first(lambda: _choose(folder)) if dist.is_initialized() else _choose(folder)
    model = load_llama(path, attention=attention, dtype=dtype, device=device, verify=False).eval()  # _choose has
    coder = load_tokenizer(tokenizer or _find_tokenizer(path, model.config.vocab_size))
    if coder.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer's vocabulary must fit the model's: {coder.name} has {coder.vocab_size} tokens, the model "
            f"{model.config.vocab_size}; give --tokenizer"
        )
    return model, coder, _find_ends(path, coder, model.config.vocab_size)


def _require_weights(path: Path) -> None:
    """ValueError unless this is a folder of weights or a training run."""
    remedy = "give a training run (runs/tiny), a Hugging Face folder or a name on the Hub (ORG/NAME)"
    try:
        if not path.is_dir():
            raise ValueError(f"{str(path)[:200]!r} is not a folder: {remedy}")
        if not (path / "config.json").exists() and not checkpoints(path):
            raise ValueError(f"no whole checkpoint in {path}: {remedy}")
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise ValueError(f"{str(path)[:200]!r} cannot be opened: {error.strerror}; {remedy}") from error


def _choose(folder: str | Path) -> Path:
    """The folder of weights: the newest whole checkpoint of a run, or this folder itself."""
    path = Path(folder)
    _require_weights(path)
    if (path / "config.json").exists():
        refuse_damaged(path)
        return path
    found = newest(path)
    if found is None:
        raise ValueError(f"no whole checkpoint in {path}: give a training run (runs/tiny) or a Hugging Face folder")
    return found


def stream(tokens: Iterable[torch.Tensor | list[int]], coder: Tokenizer, prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of each token of the first row, which continues `prompt`. Incomplete characters are held back
    until they are whole, or until the end."""
    if isinstance(coder, ByteTokenizer):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            value = int(token[0])
            yield decoder.decode(bytes([value]) if value < coder.end else b"")
        if rest := decoder.decode(b"", final=True):
            yield rest
        return
    seen = list(prompt[-AROUND:])  # decoded alone, a token may lose its leading space, as at the start of a text
    text = printed = coder.decode(seen)
    for token in tokens:
        seen.append(int(token[0]))
        text = coder.decode(seen)
        piece = "" if text.endswith("\ufffd") else text[len(printed) :]
        printed += piece
        if piece and len(seen) > 2 * AROUND:  # decoding all tokens each time would take longer and longer
            seen = seen[-AROUND:]
            text = printed = coder.decode(seen)
        yield piece
    if rest := text[len(printed) :]:
        yield rest


def read_prompts(file: str) -> list[str]:
    """The prompts in a file, one per line."""
    path = Path(file)
    data = read_bytes(path, "give a text file with one prompt per line", limit=MAX_LINES_BYTES)
    try:
        # Newlines alone: splitlines would cut a prompt at a form feed or U+2028 too.
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        prompts = [line for line in text.split("\n") if line]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}; convert it to UTF-8, "
            "for example with iconv"
        ) from error
    if not prompts:
        raise ValueError(f"{path} has no prompts: write one per line")
    return prompts


def _find_ends(path: Path, coder: Tokenizer, vocab_size: int) -> frozenset[int]:
    """The tokenizer's end token, and those that a Hugging Face folder names: a chat model may end its turns with other
    tokens."""
    files = (path / "generation_config.json", path / "config.json")
    named = (read_json(file).get("eos_token_id") for file in files if file.exists())
    found: Any = next((value for value in named if value is not None), [])
    ends = [coder.end, *(found if isinstance(found, list) else [found])]
    return frozenset(end for end in ends if type(end) is int and 0 <= end < vocab_size)


def _find_tokenizer(path: Path, vocab_size: int) -> str:
    if name := tokenizer_of(path):
        return name
    if (path / "state.json").exists():
        return "bytes"
    if vocab_size > ByteTokenizer.vocab_size:  # the tokens are not bytes
        raise ValueError(
            f"{path} has no tokenizer.json, and its vocabulary of {vocab_size} tokens is larger than that of "
            "the byte tokenizer: give --tokenizer"
        )
    return "bytes"
