"""`flashspan.generate(...)`: text from a model or its folder.

text = flashspan.generate("runs/tiny", "Once upon a time", tokens=100)
"""

from __future__ import annotations

from pathlib import Path

import torch

from flashspan.data.tokenizer import load_tokenizer
from flashspan.model import Llama, find_model

from .checks import check_device, check_prompt, check_seed
from .command import load, stream
from .decode import decode
from .sample import Sampling


def generate(
    model: str | Path | Llama,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: str | Path = "",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> str:
    """Continue a prompt with a model, on one device, and return the text.

    To print the text token by token, or to split a long context over devices, use the command `flashspan generate`.

    Args:
        model: A training run (`runs/tiny`), one of its checkpoints, a Hugging Face folder, a name on the
            Hugging Face Hub (`meta-llama/Llama-3.2-1B`), or a `Llama` in memory.
        prompt: The text to continue.
        tokens: The most tokens to add; fewer if the model ends the text.
        temperature: Sampling temperature; 0 always takes the most probable token.
        top_k: Sample from the k most probable tokens only; 0 for all.
        top_p: Sample from the most probable tokens that together have this probability.
        seed: Random seed for sampling.
        tokenizer: "bytes", "tales" or the path of a tokenizer.json; by default the one of the folder, and for a
            `Llama` in memory "bytes".
        device: Device for a model that is read from a folder.
        dtype: Dtype of the weights of a model that is read from a folder.

    Returns:
        The prompt and its continuation.

    Raises:
        ValueError: For a folder without weights, a tokenizer that does not fit, or a value out of range.

    Example:
        ```python
        import flashspan

        print(flashspan.generate("runs/tiny", "Once upon a time", tokens=100))
        ```
    """
    if not isinstance(prompt, str):
        raise ValueError(f"a prompt is one string: got a {type(prompt).__name__}; call generate for each prompt")
    if not isinstance(tokens, int):
        raise ValueError(f"tokens must be a whole number: got {tokens!r}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1: got {tokens}")
    check_prompt(prompt)
    check_seed(seed)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype: got {dtype!r}; for example torch.bfloat16")
    if not isinstance(tokenizer, str | Path):
        raise ValueError(f'tokenizer must be "bytes", "tales" or the path of a tokenizer.json: got {tokenizer!r}')
    tokenizer, place = str(tokenizer), check_device(device)
    sampling = Sampling(temperature, top_k, top_p)
    if isinstance(model, Llama):
        coder = load_tokenizer(tokenizer or "bytes")
        ends = frozenset(end for end in (coder.end,) if end >= 0)
        if coder.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer's vocabulary must fit the model's: {coder.name} has {coder.vocab_size} tokens, the "
                f"model {model.config.vocab_size}; give tokenizer="
            )
        network = model
    else:
        network, coder, ends = load(find_model(str(model)), tokenizer, device=place, dtype=dtype)
    start = coder.encode(prompt) or [max(0, coder.end)]
    was_training = network.training
    try:
        drawn = decode(network.eval(), [start], tokens, sampling=sampling, seed=seed, ends=ends)
        return prompt + "".join(stream(drawn, coder, start))
    finally:
        network.train(was_training)
