"""Prints the tokenizer file of the package: byte-level BPE with a small vocabulary, trained on the tales.

python examples/tales_tokenizer.py flashspan/data/corpus/tales.txt > flashspan/data/corpus/tokenizer.json
"""

import argparse
from pathlib import Path

from tales import BREAK
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
BEGIN, END = "<s>", "</s>"


def make_tokenizer(text: str) -> Tokenizer:
    """A tokenizer trained on a text. The same text always gives the same vocabulary, since ties have a fixed order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(BREAK), trainer)
    # A prompt begins like a tale, with BEGIN, so that the model continues it as one.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the text to train on")
    print(make_tokenizer(parser.parse_args().text.read_text(encoding="utf-8").rstrip("\n")).to_str())
