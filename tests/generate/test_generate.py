"""Decoding with a cache gives the same tokens as without one."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models
from torch import Tensor

from flashspan import attention
from flashspan.checkpoint import format as checkpoint
from flashspan.data.tokenizer import ByteTokenizer, load_tokenizer
from flashspan.generate import Cache, Sampling, decode, generate, load
from flashspan.generate.command import AROUND, read_prompts, stream
from flashspan.launch import RankError, RankFailure
from flashspan.model import Llama, LlamaConfig, RopeScaling, preset, save_llama, save_state

CONFIGS = {
    "llama-2": LlamaConfig(67, 32, 2, 4, 4, 48),
    "llama-3": LlamaConfig(67, 32, 3, 4, 2, 48, rope_theta=5e5, rope_scaling=RopeScaling(8, 1, 4, 32)),
    "tied": LlamaConfig(67, 32, 2, 4, 1, 48, tie_embeddings=True),
}


def make(config: LlamaConfig) -> Llama:
    """A model with weights so large that the next token does not depend on the last one alone."""
    model = Llama(config, attention=attention).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.25 + ("norm" in name))
    return model


def draw_prompt(*shape: int) -> Tensor:
    return torch.randint(0, 67, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("length", [1, 13])
def test_greedy_equals_recomputing_everything(family: str, length: int) -> None:
    model, tokens = make(CONFIGS[family]), draw_prompt(2, length)
    got = torch.stack(list(decode(model, tokens, 30, sampling=Sampling(0))), 1)
    with torch.no_grad():
        for _ in range(30):
            following = model.logits(model(tokens)[:, -1]).argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), 1)
    assert torch.equal(got, tokens[:, length:])
    assert len(set(got[0].tolist())) > 5


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokens = make(CONFIGS[family]), draw_prompt(1, 9)
    save_llama(model, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    want = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    got = torch.stack(list(decode(model, tokens, 40, sampling=Sampling(0))), 1)
    assert torch.equal(got, want[:, 9:])


def test_the_cache_is_the_attention_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, 20, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 20, 8, generator=generator)
    cache = Cache(attention, 20)
    parts = [cache(*(x[:, :, a:b] for x in (q, k, v)), causal=True) for a, b in ((0, 7), (7, 8), (8, 17), (17, 20))]
    want = attention(q, k, v, causal=True)
    assert (torch.cat(parts, 2) - want).norm() <= 1e-6 * want.norm()
    with pytest.raises(ValueError, match="room for 20 tokens: got 21"):
        cache(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True)
    with pytest.raises(ValueError, match=r"no memory for keys and values \[2, 2, 2, \d+, 8\]: ask for fewer"):
        Cache(attention, 2**58)(q, k, v, causal=True)


def test_room_that_is_not_used_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = decode(make(CONFIGS["llama-2"]), [1, 2, 3], 4_000_000, sampling=Sampling(0))  # 2 GB in total
    assert len([next(tokens) for _ in range(3)]) == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_a_seed_decides_the_draws() -> None:
    model, tokens = make(CONFIGS["llama-3"]), draw_prompt(5)
    first, again, other = (
        torch.cat(list(decode(model, tokens, 25, sampling=Sampling(1.0), seed=s))) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_top_k_and_top_p_keep_the_most_probable() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    plain = Sampling(0.5).probabilities(logits)
    assert torch.allclose(plain, (logits / 0.5).softmax(-1))
    assert (Sampling(1.0, top_k=2).probabilities(logits) > 0).tolist() == [[True, False, True, False]]
    # 0.64, 0.24, 0.09, 0.03: two are needed to reach 0.7, one to reach 0.6.
    assert (Sampling(1.0, top_p=0.7).probabilities(logits) > 0).tolist() == [[True, False, True, False]]
    only = Sampling(1.0, top_p=0.6).probabilities(logits)
    assert only.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert torch.equal(Sampling(1.0, top_p=1e-50).probabilities(logits), only)
    counts = torch.zeros(4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        counts[Sampling(1.0, top_k=3).choose(logits, [generator])] += 1
    want = Sampling(1.0, top_k=3).probabilities(logits)[0]
    assert counts[3] == 0
    assert (counts / 2000 - want).abs().max() < 0.04


def test_the_least_temperature_and_the_widest_seeds_draw() -> None:
    model, tokens = make(CONFIGS["llama-2"]), draw_prompt(5)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4)  # logits in the hundreds
    want = torch.cat(list(decode(model, tokens, 9, sampling=Sampling(0))))
    for seed in (-(2**63), 2**64 - 1):
        assert torch.equal(torch.cat(list(decode(model, tokens, 9, sampling=Sampling(1e-6), seed=seed))), want)


def test_decoding_stops_when_every_row_has_ended() -> None:
    model, tokens = make(CONFIGS["llama-2"]), draw_prompt(1, 4)
    whole = [int(t) for t in decode(model, tokens, 30, sampling=Sampling(0))]
    end = whole[11]
    never = next(token for token in range(model.config.vocab_size) if token not in whole)
    for ends in ([end], {never, end}):
        got = [int(t) for t in decode(model, tokens, 30, sampling=Sampling(0), ends=ends)]
        assert got == whole[: whole.index(end) + 1]


def test_a_folder_s_stop_tokens_end_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Llama(preset("tiny", vocab_size=257), attention=attention)
    model.initialize(0)
    save_state(model.state_dict(), model.config, tmp_path)  # without a manifest, so that the test may edit it
    whole = [int(t) for t in decode(model, list(b"Hear me"), 12, sampling=Sampling(0))]
    end = whole[3]
    expected = whole.index(end) + 1
    (tmp_path / "prompts.txt").write_text("Hear me\nHear me\n")
    config = json.loads((tmp_path / "config.json").read_text())
    for file, value in (("config.json", end), ("generation_config.json", [1000000, -1, end])):
        (tmp_path / file).write_text(json.dumps({**config, "eos_token_id": value}))
        assert load(tmp_path)[2] == {ByteTokenizer.end, end}
        generate(str(tmp_path), prompt="Hear me", tokens=12, temperature=0)
        assert f"[{expected} tokens, " in capsys.readouterr().out
        generate(str(tmp_path), file=str(tmp_path / "prompts.txt"), tokens=12, temperature=0, batch=2)
        assert f"[{2 * expected} tokens, " in capsys.readouterr().out
        (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path)[2] == {ByteTokenizer.end}


def test_streamed_text_holds_back_half_characters() -> None:
    coder = ByteTokenizer()
    text = "né 世"
    pieces = list(stream((torch.tensor([t]) for t in coder.encode(text)), coder))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())
    assert "".join(stream(([t] for t in coder.encode("a世")[:-1]), coder)) == "a\ufffd", "what is left is told"


def test_streamed_text_keeps_the_space_after_the_prompt(tmp_path: Path) -> None:
    fast = Fast(models.WordLevel({"▁go": 0, "▁on": 1}, unk_token="▁on"))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.save(str(tmp_path / "tokenizer.json"))
    coder = load_tokenizer(str(tmp_path))
    assert list(stream([[1], [1]], coder, [0] * 50)) == [" on", " on"]
    assert list(stream([[1], [1]], coder)) == ["on", " on"]
    decoded = []

    class Counting:
        def decode(self, tokens: list[int]) -> str:
            decoded.append(len(tokens))
            return coder.decode(tokens)

    assert "".join(stream([[1]] * 500, Counting())) == " ".join(["on"] * 500)
    assert max(decoded) <= 2 * AROUND + 1, "a long text is not decoded from its start for every token"


def test_prompts_are_lines_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\fpage\r\n\ntwo\u2028lines\n".encode())
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["one\fpage", "two\u2028lines"]
    for name, fault in (("", "is a folder"), ("none.txt", "is missing")):
        with pytest.raises(ValueError, match=fault):
            read_prompts(str(tmp_path / name))


def test_the_command_continues_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Llama(preset("tiny", vocab_size=257), attention=attention)
    model.initialize(0)
    save_llama(model, tmp_path / "model")
    assert generate(str(tmp_path / "model"), prompt="Hear me", tokens=12, seed=3) == 0
    said = capsys.readouterr().out
    assert said.startswith("Hear me")
    assert "[12 tokens, " in said
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    generate(str(tmp_path / "model"), file=str(tmp_path / "prompts.txt"), tokens=3, temperature=0)
    said = capsys.readouterr().out
    assert said.startswith("one")
    assert "\ntwo" in said
    assert load(tmp_path / "model")[0].config == preset("tiny", vocab_size=257)


def test_ctrl_c_ends_the_text_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashspan.generate.command.decode", interrupt)
    save_llama(Llama(preset("tiny", vocab_size=257), attention=attention), tmp_path)
    assert generate(str(tmp_path), prompt="a") == 130


def start_talking(folder: Path, num_tokens: int, ranks: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command with a tiny model in a process of its own, with two lines as prompts."""
    model = Llama(preset("tiny", vocab_size=257, num_layers=1), attention=attention)
    model.initialize(0)
    save_llama(model, folder)
    words = ["generate", str(folder), "--prompt", "one\ntwo", "--tokens", str(num_tokens), "--device", "cpu"]
    command = [sys.executable, "-m", "flashspan.cli", *words, "--ranks", str(ranks)]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, **options})


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_line_of_a_text(tmp_path: Path, ranks: int) -> None:
    # unbuffered: communicate does not return what readline has read ahead
    with start_talking(tmp_path, 100_000, ranks, stderr=subprocess.STDOUT, bufsize=0) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"one\n"
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert said.startswith(b"two")
    assert said.endswith(b"\n")
    assert b"flashspan: " not in said, "someone has read enough: there is nothing to say"


def test_what_is_left_of_a_character_is_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(Llama(preset("tiny", vocab_size=257, num_layers=1), attention=attention), tmp_path)
    half = [torch.tensor([byte]) for byte in "a世".encode()[:-1]]
    monkeypatch.setattr("flashspan.generate.command.decode", lambda *args, **rest: iter(half))
    generate(str(tmp_path), prompt="Hear me")
    assert capsys.readouterr().out.startswith("Hear mea\ufffd\n[3 tokens, ")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, file: str) -> None:
    model = Llama(preset("tiny", vocab_size=257, num_layers=1), attention=attention)
    model.initialize(0)
    path = checkpoint.write(tmp_path, checkpoint.State(7, model.config, model.state_dict(), {}, {}))
    assert load(path)[0].config == model.config
    if file == "manifest.json":
        (path / file).unlink()
    else:
        data = bytearray((path / file).read_bytes())
        data[-1 if file == "model.safetensors" else data.index(b"1e-05")] ^= 2  # a new weight, or 3e-05: both load
        (path / file).write_bytes(data)
    fault = "manifest.json is missing" if file == "manifest.json" else f"the hash of {file} does not match"
    with pytest.raises(ValueError, match=rf"step-00000007 is damaged \(.*{fault}"):
        load(path)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reader_that_leaves_ends_the_text_quietly(tmp_path: Path, ranks: int) -> None:
    with start_talking(tmp_path, 3000, ranks, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.timeout(100)
def test_a_full_disk_is_one_line(tmp_path: Path, ranks: int) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start_talking(tmp_path, 20, ranks, stdout=full, stderr=subprocess.PIPE)
        _, said = process.communicate(timeout=90)
    assert (process.returncode, said) == (2, b"flashspan: No space left on device\n")


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OSError), (errno.EPIPE, BrokenPipeError)])
def test_an_output_error_of_a_rank_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OSError]
) -> None:
    text = traceback.format_exception_only(OSError(number, os.strerror(number)))[0].strip()
    ranks = mock.MagicMock()
    ranks.return_value.__enter__.return_value.run.side_effect = RankError("rank 0", RankFailure(0, text, "Traceback"))
    ranks.return_value.__exit__.return_value = False
    monkeypatch.setattr("flashspan.generate.command.Ranks", ranks)
    save_llama(Llama(preset("tiny", vocab_size=257, num_layers=1), attention=attention), tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        generate(str(tmp_path), prompt="a", ranks=2, device="cpu")
    assert caught.type is kind
    assert caught.value.strerror == os.strerror(number)


def test_a_prompt_that_is_refused_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(Llama(preset("tiny", vocab_size=257, num_layers=1), attention=attention), tmp_path)

    def refuse(*args: object, **rest: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("flashspan.generate.cache.Whole.begin", refuse)
    with pytest.raises(ValueError, match="no"):
        generate(str(tmp_path), prompt="Hear me")
    assert capsys.readouterr().out == ""


def test_bad_input_is_named(tmp_path: Path) -> None:
    model = make(CONFIGS["tied"])
    with pytest.raises(ValueError, match="vocabulary of 67: got 3 to 67"):
        list(decode(model, [3, 67], 2))
    with pytest.raises(ValueError, match="at least one token"):
        list(decode(model, [], 2))
    with pytest.raises(ValueError, match=r"decoding needs one prompt or more: got tokens of shape \[0, 3\]; give"):
        list(decode(model, torch.zeros(0, 3, dtype=torch.int64), 2))
    with pytest.raises(ValueError, match=r"top_p must be .*: got 0.0$"):
        Sampling(1.0, top_p=0.0)
    with pytest.raises(ValueError, match=r"top_k must be .*: got -1$"):
        Sampling(1.0, top_k=-1)
    with pytest.raises(ValueError, match=r"temperature must be .*: got 'hot'$"):
        Sampling("hot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"temperature must be 0 or at least 1e-06: got 1.4.*e-45; use 0"):
        Sampling(1.4e-45)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"the seed must fit 64 bits, .*: got {seed}"):
            generate(str(tmp_path), prompt="a", seed=seed)
    with pytest.raises(ValueError, match=r"the prompt must be UTF-8 text: got 'caf\\udce9'"):
        generate(str(tmp_path), prompt=b"caf\xe9".decode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="is not a folder"):
        generate(str(tmp_path / "nothing"), prompt="a")
    with pytest.raises(ValueError, match="no whole checkpoint in"):
        generate(str(tmp_path), prompt="a")
    (tmp_path / "prompts.txt").write_bytes(b"\xff")
    with pytest.raises(
        ValueError, match="txt is not UTF-8 text: byte 0 is 0xff; convert it to UTF-8, for example with iconv"
    ):
        generate(str(tmp_path), file=str(tmp_path / "prompts.txt"))
    with pytest.raises(ValueError, match="give --prompt or --file, not both"):
        generate(str(tmp_path), prompt="a", file=str(tmp_path / "prompts.txt"))
    for ranks in (0, -1):
        with pytest.raises(ValueError, match=f"--ranks must be 1 or more: got {ranks}"):
            generate(str(tmp_path), prompt="a", ranks=ranks)
    with pytest.raises(ValueError, match="99 ranks on CUDA need as many GPUs"):
        generate(str(tmp_path), prompt="a", ranks=99, device="cuda")
    save_llama(model, tmp_path)
    with pytest.raises(ValueError, match="bytes has 257 tokens, the model 67"):
        generate(str(tmp_path), prompt="a")
    words = Llama(preset("tiny", num_layers=1, vocab_size=300), attention=attention)
    save_llama(words, tmp_path)
    with pytest.raises(
        ValueError, match=r"no tokenizer\.json, and its vocabulary of 300 tokens is larger .*: give --tokenizer"
    ):
        generate(str(tmp_path), prompt="a")
    with torch.no_grad():
        words.norm.weight.fill_(torch.inf)
    with pytest.raises(
        ValueError, match=r"got inf or nan in torch\.float32 by token 1 after the prompt; use a dtype of wider range"
    ):
        list(decode(words, [1], 2))


@pytest.mark.parametrize("ends", [(), (66,)])
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, top_k=20)])
def test_logits_that_are_not_finite_are_noticed_after_the_prompt(sampling: Sampling, ends: tuple[int, ...]) -> None:
    model, prompt = make(CONFIGS["llama-2"]), draw_prompt(4).tolist()
    first, second = (int(token) for token in decode(model, prompt, 2, sampling=sampling, seed=3))
    assert second not in (*prompt, first, *ends)
    with torch.no_grad():
        model.embed.weight[second] = torch.nan
    said: list[int] = []
    with pytest.raises(ValueError, match=r"got inf or nan in torch\.float32 by token 3 after the prompt; use"):
        said.extend(int(token) for token in decode(model, prompt, 3, sampling=sampling, seed=3, ends=ends))
    assert said == [first, second]


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, top_k=20)])
def test_prompts_of_any_lengths_together_say_what_each_says_alone(sampling: Sampling) -> None:
    model = make(CONFIGS["llama-3"])
    prompts = [draw_prompt(length).tolist() for length in (9, 1, 13, 13, 4)]
    together = torch.stack(list(decode(model, prompts, 25, sampling=sampling, seed=5)), 1)
    for prompt, got in zip(prompts, together, strict=True):
        alone = torch.cat(list(decode(model, prompt, 25, sampling=sampling, seed=5)))
        assert torch.equal(got, alone)
    assert not torch.equal(together[0], together[1])


def test_a_batch_goes_on_until_its_last_row_has_ended() -> None:
    model, prompts = make(CONFIGS["llama-2"]), [draw_prompt(4).tolist(), draw_prompt(7).tolist()]
    alone = [[int(t) for t in decode(model, prompt, 30, sampling=Sampling(0))] for prompt in prompts]
    end = next(token for token in alone[0] if token in alone[1])
    together = torch.stack(list(decode(model, prompts, 30, sampling=Sampling(0), ends=[end])), 1).tolist()
    for got, want in zip(together, alone, strict=True):
        assert got[: got.index(end) + 1] == want[: want.index(end) + 1]
    assert len(together[0]) == max(want.index(end) for want in alone) + 1


def test_a_file_of_prompts_is_decoded_in_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Llama(preset("tiny", vocab_size=257), attention=attention)
    model.initialize(0)
    save_llama(model, tmp_path)
    (tmp_path / "prompts.txt").write_text("Hear me\nSpeak\nA much longer one\n")
    texts = []
    for batch in (1, 2, 8):
        generate(str(tmp_path), file=str(tmp_path / "prompts.txt"), tokens=12, seed=3, batch=batch)
        said = capsys.readouterr().out
        texts.append("".join(line for line in said.splitlines(keepends=True) if " tokens, " not in line))
    assert texts[0] == texts[1] == texts[2]
    assert "A much longer one" in texts[0]
