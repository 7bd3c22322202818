"""Decoding: the model processes the prompts once, then one token at a time; keys and values are cached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from flashspan.model import Llama

from .cache import Context, Whole
from .sample import Sampling, most_probable


@torch.inference_mode()
def decode(
    model: Llama,
    prompt: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    num_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    ends: Collection[int] = (),
    context: Context | None = None,
) -> Iterator[Tensor]:
    """Yield up to `num_tokens` tokens [B] that continue a prompt [T], or several prompts of any lengths. It stops when
    every row has one of `ends`; a row's tokens after its end mean nothing.

    ValueError if logits are not finite. With `ends`, it is raised before a token chosen from them is yielded. Without
    `ends`, the host checks only before the first and the last token, and the error may be raised as late as then.

    A row does not depend on the other rows: each row has a random generator with this seed. With a context split over
    ranks, every rank calls this with the same arguments and yields the same tokens.
    """
    sampling = sampling or Sampling()
    device = model.embed.weight.device
    tokens, lengths = _pad(prompt)
    if not len(tokens):
        raise ValueError(
            f"decoding needs one prompt or more: got tokens of shape {list(tokens.shape)}; give a row for each prompt"
        )
    if int(lengths.min()) == 0:
        raise ValueError("a prompt needs at least one token: give some text to continue")
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the prompt's tokens must be in the model's vocabulary of {model.config.vocab_size}: "
            f"got {int(tokens.min())} to {int(tokens.max())}; use the model's tokenizer"
        )
    tokens = tokens.to(device)
    generators = [torch.Generator(device).manual_seed(seed) for _ in tokens]
    context = context or Whole()
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    end_tokens = torch.tensor(list(ends), dtype=torch.int64, device=device)
    not_finite = torch.zeros_like(ended)
    logits = context.begin(model, tokens, lengths, tokens.shape[1] + num_tokens)
    for number in range(1, num_tokens + 1):
        chosen = most_probable(logits, ended, not_finite, end_tokens) if sampling.temperature == 0 else None
        if chosen is None:
            not_finite |= ~(ended | logits.isfinite().all(-1))
            # NaN is replaced: the host reads `not_finite` later, and sampling from NaN on a GPU makes all later calls
            # fail.
            chosen = sampling.choose(logits.nan_to_num(0.0, 0.0, 0.0), generators)
            ended |= torch.isin(chosen, end_tokens)
        last = number == num_tokens
        if ends or last or number == 1:
            all_ended, any_not_finite = torch.stack((ended.all(), not_finite.any())).tolist()  # one wait for both
            if any_not_finite:
                raise ValueError(
                    f"the model must make finite logits: got inf or nan in {logits.dtype} by token {number} after the "
                    "prompt; use a dtype of wider range (bfloat16 or float32), or another checkpoint"
                )
            last |= all_ended
        yield chosen
        if last:
            return
        logits = context.extend(model, chosen.unsqueeze(1))


def _pad(prompt: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> tuple[Tensor, Tensor]:
    """Rows of equal length [B, T], padded with token 0, and the length of each [B]."""
    if isinstance(prompt, Tensor):
        tokens = torch.atleast_2d(prompt.cpu()).long()
        return tokens, torch.full((len(tokens),), tokens.shape[1])
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in prompt]
    if not rows or rows[0].dim() == 0:
        rows = [torch.as_tensor(prompt, dtype=torch.int64)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
