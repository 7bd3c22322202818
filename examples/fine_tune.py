"""Train a tiny model, then fine-tune its checkpoint with other settings, and generate. A Hugging Face folder of LLaMA
weights works in place of the checkpoint.

python examples/fine_tune.py
"""

import tempfile
from pathlib import Path

import flashspan

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    small = {"data.sequence": 64, "train.batch": 4, "parallel.device": "cpu", "train.evaluate_every": 0}

    first = flashspan.train(small, num_layers=1, context=1, steps=6, folder=folder / "first")
    assert first.checkpoint is not None

    losses = []
    second = flashspan.train(
        small,
        load=str(first.checkpoint),  # loads sizes and weights; the optimizer starts with new moments
        context=2,  # now on two ranks, each with half of every sequence
        lr=1e-4,
        steps=3,
        folder=folder / "second",
        callbacks=[lambda metrics: losses.append(metrics.loss)],
    )
    assert losses == second.losses
    assert second.losses[0] < first.losses[0], "it starts from the weights of the first run"
    print(f"loss {first.losses[0]:.3f} -> {first.losses[-1]:.3f}, fine-tuned {second.losses[-1]:.3f}")
    text = flashspan.generate(second.checkpoint, "Once", tokens=20)
    print(f"after {6 + 3} steps, too few for words: {text!r}")
