"""The training and validation samples of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashspan.data.prepare import corpus_tokens
from flashspan.data.samples import Samples
from flashspan.data.tokens import TokenFile, open_tokens

from .config import TrainConfig


def open_samples(config: TrainConfig) -> tuple[Samples, Samples | None]:
    """The training and validation samples of a run, checked against the model's vocabulary."""
    held_out: TokenFile | None
    if config.data.train:
        file = open_tokens(config.data.train)
        neighbour = file.path.with_name("val.bin")
        held_out = open_tokens(neighbour) if neighbour.exists() and not config.data.validation else None
    else:
        file, held_out = corpus_tokens()
    if config.data.validation:
        chosen = Path(config.data.validation)
        held_out = open_tokens(chosen / "val.bin" if chosen.is_dir() else chosen)
    vocab_size = config.model.resolve().vocab_size
    for part in (file, held_out):
        if part is not None and part.vocab_size > vocab_size:
            raise ValueError(
                f"the data's vocabulary must fit the model's: {part.path} has {part.vocab_size} tokens "
                f"({part.tokenizer}), the model {vocab_size}; prepare it with the model's tokenizer, or set "
                f"model.vocab_size to {part.vocab_size}"
            )
    if held_out is not None and not file.may_be_of(held_out.tokenizer, held_out.vocab_size):
        raise ValueError(
            f"training and validation data must be made with one tokenizer: {file.path} has {file.vocab_size:,} tokens "
            f"({file.tokenizer}), {held_out.path} {held_out.vocab_size:,} ({held_out.tokenizer}); prepare both by one "
            "command, or set another data.validation"
        )
    options = (config.data.sequence, config.train.seed, config.data.documents)
    # A default val.bin that is too short for a sample is ignored; one that was set is an error.
    if held_out is not None and len(held_out.tokens) <= config.data.sequence and not config.data.validation:
        held_out = None
    return Samples(file, *options), None if held_out is None else Samples(held_out, *options)


def num_evaluated(config: TrainConfig, validation: Samples) -> int:
    """The number of samples in an evaluation."""
    return min(config.train.evaluate_samples, validation.num_windows)


def order_of(config: TrainConfig, file: TokenFile) -> dict[str, Any]:
    """The settings that determine the tokens of a step and their mask: a resumed run must have the same."""
    return {
        "seed": config.train.seed,
        "batch": config.train.batch,
        "sequence": config.data.sequence,
        "documents": config.data.documents,
        "num_tokens": len(file.tokens),
        "data": file.fingerprint,
        "tokenizer": file.tokenizer,
        "attention": str(config.attention),
    }
