"""Decoding: a prompt once through the model, then a token at a time, with the keys and values kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashspan.model import Llama

from .cache import Context, Whole
from .sample import Sampling


@torch.inference_mode()
def decode(
    model: Llama,
    prompt: Sequence[int] | Tensor,
    num_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    end: int = -1,
    context: Context | None = None,
) -> Iterator[Tensor]:
    """Yield up to `num_tokens` tokens [B] that continue a prompt [T] or [B, T]; stops when every row has said `end`.

    With a context split over ranks, every rank calls this with the same arguments and yields the same tokens.
    """
    sampling = sampling or Sampling()
    device = model.embed.weight.device
    tokens = torch.as_tensor(prompt, dtype=torch.int64, device=device)
    tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
    length = tokens.shape[1]
    if length == 0:
        raise ValueError("a prompt needs at least one token: give some text to go on from")
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the prompt's tokens must be in the model's vocabulary of {model.config.vocab_size}: "
            f"got {int(tokens.min())} to {int(tokens.max())}; is this the model's tokenizer?"
        )
    generator = torch.Generator(device).manual_seed(seed)
    context = context or Whole()
    said = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    hidden = context.begin(model, tokens, length + num_tokens)
    for position in range(length, length + num_tokens):
        chosen = sampling.choose(model.logits(hidden), generator)
        yield chosen
        said |= chosen == end
        if bool(said.all()) or position == length + num_tokens - 1:
            return
        hidden = context.extend(model, chosen.unsqueeze(1), position)
