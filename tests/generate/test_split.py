"""A context split over ranks says what one device would say."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from flashspan import attention
from flashspan.context import context_parallel
from flashspan.generate import Sampling, Split, command, decode, generate
from flashspan.generate.command import stream, talk
from flashspan.launch import Ranks
from flashspan.model import Llama, LlamaConfig, preset, save_llama
from flashspan.train import checkpoint
from flashspan.train.config import LONGEST
from flashspan.train.data import ByteTokenizer
from tests.generate.test_generate import CONFIGS, draw_prompt, make


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, threads=1, timeout=30) as pool:
        yield pool


def continue_prompt(
    config: LlamaConfig, length: int, layout: str, sampling: Sampling
) -> tuple[list[list[int]], list[int]]:
    """The tokens this rank yields, and how many keys of each layer it holds at the end."""
    context = Split(context_parallel(dist.group.WORLD, layout=layout), dist.group.WORLD)
    tokens = decode(make(config), draw_prompt(2, length), 20, sampling=sampling, seed=4, context=context)
    return [token.tolist() for token in tokens], [cache.length for cache in context.caches]


@pytest.mark.parametrize(
    ("family", "length", "layout"),
    [("llama-3", 31, "zigzag"), ("tied", 3, "striped"), ("llama-2", 50, "contiguous")],
)
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, top_k=20)])
def test_a_split_context_gives_the_tokens_of_one_device(
    ranks: Ranks, family: str, length: int, layout: str, sampling: Sampling
) -> None:
    model = make(CONFIGS[family])
    want = [token.tolist() for token in decode(model, draw_prompt(2, length), 20, sampling=sampling, seed=4)]
    held = []
    for got, lengths in ranks.run(continue_prompt, CONFIGS[family], length, layout, sampling):
        assert got == want
        assert len(set(lengths)) == 1
        held.append(lengths[0])
    assert sum(held) == length + 19
    assert max(held) <= -(-(length + 19) // 3) + 2


def talk_aloud(folder: str, prompts: list[str]) -> tuple[str, str]:
    """What this rank prints, and the error it ends with."""
    said, fault = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            talk(folder, prompts, 9, Sampling(0), 0, "", "cpu", "float32")
        except ValueError as error:
            fault = str(error)
    return said.getvalue(), fault


def test_the_first_rank_prints_what_all_say(ranks: Ranks, tmp_path: Path) -> None:
    model = Llama(preset("tiny"), attention=attention)
    model.initialize(0)
    for step in (1, 2):  # a run, of which the newest checkpoint is damaged
        path = checkpoint.write(tmp_path, checkpoint.State(step, model.config, model.state_dict(), {}, {}))
    (path / "state.json").unlink()
    (first, _), *others = ranks.run(talk_aloud, str(tmp_path), ["Hear me", "Speak"])
    assert others == [("", "")] * 2
    assert first.count("step-00000002 is damaged (state.json is missing); using the one before it") == 1
    coder = ByteTokenizer()
    for prompt in ("Hear me", "Speak"):
        want = "".join(stream(decode(model, coder.encode(prompt), 9, sampling=Sampling(0)), coder))
        assert f"{prompt}{want}\n[9 tokens, " in first
    # Before the first of a file is decoded, not when its turn comes.
    for said, fault in ranks.run(talk_aloud, str(path.parent / "step-00000001"), ["Hear me", "me"]):
        assert said == ""
        assert "prompt of at least one token a rank: got 2 tokens on 3 ranks; use fewer ranks" in fault


def test_ranks_wait_for_whoever_holds_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager or Ctrl-S stops the first rank where it prints, and Ctrl-Z all of them, for as long as a user likes."""
    monkeypatch.setattr(command, "Ranks", pool := mock.MagicMock())
    assert generate(str(tmp_path), prompt="Hear me", ranks=2, device="cpu") == 0
    assert pool.call_args.kwargs["timeout"] == LONGEST


def test_a_prompt_shorter_than_the_ranks_is_named(tmp_path: Path) -> None:
    save_llama(Llama(preset("tiny"), attention=attention), tmp_path)
    with pytest.raises(ValueError, match="got 1 tokens on 2 ranks; use fewer ranks"):
        generate(str(tmp_path), prompt="H", tokens=3, ranks=2)
