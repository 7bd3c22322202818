"""Decoding with a context that is split over ranks gives the tokens of one device."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashspan import attention
from flashspan.checkpoint import format as checkpoint
from flashspan.context import LAYOUTS, context_parallel
from flashspan.data.tokenizer import ByteTokenizer
from flashspan.generate import Sampling, Split, command, decode, generate
from flashspan.generate.command import stream, talk
from flashspan.launch import Ranks
from flashspan.model import Llama, LlamaConfig, preset
from flashspan.process import LONGEST
from tests.generate.test_generate import CONFIGS, draw_prompt, make


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, threads=1, timeout=30) as pool:
        yield pool


def continue_prompt(
    config: LlamaConfig, length: int, layout: str, sampling: Sampling
) -> tuple[list[list[int]], list[int]]:
    """The tokens that this rank yields, and the number of keys that it holds for each layer at the end."""
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


def differing(num_tokens: int) -> list[tuple[str, int]]:
    """The layouts and prompt lengths whose continuation on this group differs from that of one device."""
    model, wrong = make(CONFIGS["llama-3"]), []
    for length in range(1, 2 * dist.get_world_size() + 1):
        prompt = draw_prompt(2, length)
        want = [token.tolist() for token in decode(model, prompt, num_tokens, sampling=Sampling(0))]
        for layout in LAYOUTS:
            context = Split(context_parallel(dist.group.WORLD, layout=layout, timeout=20))
            got = [token.tolist() for token in decode(model, prompt, num_tokens, sampling=Sampling(0), context=context)]
            if got != want:
                wrong.append((layout, length))
    return wrong


def test_ranks_without_a_token_of_the_prompt_take_part(on_ranks) -> None:
    """Zigzag gives 4 ranks 1, 2, 0 and 2 of 5 tokens. With 1 token, three ranks have none in any layout."""
    assert on_ranks(4, differing, 5) == [[]] * 4


def continue_by_pairs(pass_group: bool) -> tuple[list[int], list[int]]:
    """The continuations of a prompt, which differs between pairs of ranks, by one device and by this rank's pair."""
    pair, model = dist.get_rank() // 2, make(CONFIGS["llama-2"])
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][pair]
    attend = context_parallel(group, timeout=20)
    prompt = draw_prompt(2, 9)[pair]
    context = Split(attend, group) if pass_group else Split(attend)
    want, got = (decode(model, prompt, 6, sampling=Sampling(0), context=c) for c in (None, context))
    return [int(token) for token in want], [int(token) for token in got]


@pytest.mark.parametrize("pass_group", [False, True])
def test_disjoint_groups_do_not_interfere(on_ranks, pass_group: bool) -> None:
    first, *_, last = said = on_ranks(4, continue_by_pairs, pass_group)
    assert all(got == want for want, got in said)
    assert first != last


def split_over_a_mesh() -> tuple[list[int], list[int], list[str]]:
    """The continuations by one device and by a two-dimensional mesh, and the errors for groups other than the
    attention's."""
    model, prompt = make(CONFIGS["llama-2"]), draw_prompt(9)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    attend = context_parallel(mesh, strategy="hybrid", timeout=20)
    want, got = (decode(model, prompt, 6, sampling=Sampling(0), context=c) for c in (None, Split(attend)))
    columns_first = DeviceMesh("cpu", [[0, 2], [1, 3]])
    pair = context_parallel(mesh.get_group(1), timeout=20)
    faults = []
    for other, group in (
        (pair, dist.group.WORLD),
        (context_parallel(None), dist.group.WORLD),
        (context_parallel(columns_first, strategy="hybrid", timeout=20), None),
    ):
        try:
            Split(other, group)
            faults.append("")
        except ValueError as error:
            faults.append(str(error))
    return [int(token) for token in want], [int(token) for token in got], faults


def test_a_mesh_is_split_over_the_world_and_other_groups_are_refused(on_ranks) -> None:
    told = on_ranks(4, split_over_a_mesh)
    for rank, (want, got, faults) in enumerate(told):
        assert got == want
        assert (
            f"got rank {rank} of 4 in the group, rank {rank % 2} of 2 in the attention; pass such a group" in faults[0]
        )
        assert f"got rank {rank} of 4 in the group, rank 0 of 1 in the attention" in faults[1]
    # Ranks 0 and 3 have the same place in both orders; ranks 1 and 2 do not.
    assert "got rank 1 of 4 in the group, rank 2 of 4 in the attention; pass such a group" in told[1][2][2]
    assert "got rank 2 of 4 in the group, rank 1 of 4 in the attention; pass such a group" in told[2][2][2]


def test_one_rank_needs_no_process_group() -> None:
    model, prompt = make(CONFIGS["tied"]), draw_prompt(2, 5)
    want, got = (
        [token.tolist() for token in decode(model, prompt, 9, sampling=Sampling(0), context=context)]
        for context in (None, Split(context_parallel(None)))
    )
    assert got == want


def talk_aloud(folder: str, prompts: list[str]) -> tuple[str, str]:
    """The output of this rank, and the error that ends it."""
    said, fault = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            talk(folder, prompts, 9, Sampling(0), 0, "", "cpu", "float32")
        except ValueError as error:
            fault = str(error)
    return said.getvalue(), fault


def test_the_first_rank_prints_what_all_say(ranks: Ranks, tmp_path: Path) -> None:
    model = Llama(preset("tiny", vocab_size=257), attention=attention)
    model.initialize(0)
    for step in (1, 2):  # a run whose newest checkpoint is damaged
        path = checkpoint.write(tmp_path, checkpoint.State(step, model.config, model.state_dict(), {}, {}))
    (path / "state.json").unlink()
    (first, _), *others = ranks.run(talk_aloud, str(tmp_path), ["Hear me", "I"])
    assert others == [("", "")] * 2
    assert first.count("step-00000002 is damaged (state.json is missing); using the one before it") == 1
    coder = ByteTokenizer()
    for prompt in ("Hear me", "I"):  # 7 tokens, and fewer tokens than ranks
        want = "".join(stream(decode(model, coder.encode(prompt), 9, sampling=Sampling(0)), coder))
        assert f"{prompt}{want}\n[9 tokens, " in first


def test_ranks_wait_for_the_rank_that_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager or Ctrl-S stops the first rank while it prints, and Ctrl-Z stops all ranks, for any length of time."""
    monkeypatch.setattr(command, "Ranks", pool := mock.MagicMock())
    (tmp_path / "config.json").write_text("{}")  # only the ranks would read it
    assert generate(str(tmp_path), prompt="Hear me", ranks=2, device="cpu") == 0
    assert pool.call_args.kwargs["timeout"] == LONGEST
