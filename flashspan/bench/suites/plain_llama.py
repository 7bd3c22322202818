"""The baselines of the training benchmark: transformers with SDPA, or, without transformers, a plain PyTorch LLaMA with
the same operations; and transformers with Liger's kernels and cuDNN's attention, if liger-kernel is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashspan.model import LlamaConfig, read_config, read_weights
from flashspan.model.rope import frequencies


@dataclass(frozen=True)
class Baseline:
    """A model, a function of (tokens, targets) that returns its mean loss, and one for its decoding step: (tokens,
    cache) -> last logits, cache."""

    name: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    extend: Callable[[Tensor, Any], tuple[Tensor, Any]]


def load_baseline(folder: Path, device: torch.device) -> Baseline:
    """A bfloat16 model with the weights of a folder, from transformers if it is installed."""
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: the baseline is a plain PyTorch LLaMA with the same operations")
        plain = PlainLlama(folder).to(device)

        def mean(tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(plain(tokens)[0].float().flatten(0, 1), targets.flatten())

        return Baseline("plain PyTorch + SDPA", plain, mean, plain.extend)
    theirs = _load_transformers(folder, device)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        # The same as the model's own loss without its shift, because the targets are already shifted.
        logits = theirs(tokens, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def extend(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = theirs(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], out.past_key_values

    return Baseline("transformers + SDPA", theirs, loss, extend)


def _load_transformers(folder: Path, device: torch.device) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to(device)


@contextlib.contextmanager
def liger_baseline(folder: Path, device: torch.device) -> Iterator[Baseline]:
    """The model of `load_baseline` with Liger's norms, RoPE, SwiGLU and loss, and cuDNN's attention, for training only.
    Liger replaces functions and classes of transformers; the originals are restored at the end."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from transformers.models.llama import modeling_llama

    theirs = _load_transformers(folder, device)
    names = dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(model=theirs)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return theirs(tokens, shift_labels=targets, use_cache=False).loss

    def extend(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError("this baseline is for training")

    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield Baseline("transformers + Liger + cuDNN", theirs, loss, extend)
    finally:
        vars(modeling_llama).update(names)


class PlainLlama(nn.Module):
    """A LLaMA with the operations of transformers: eager modules, norms in float32, SDPA, whole logits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config: LlamaConfig = read_config(folder)
        weights = {name: nn.Parameter(value.bfloat16()) for name, value in read_weights(folder, self.config)}
        self.weights = nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})

    def forward(self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None, last: bool = False) -> Any:
        """Logits of all tokens, or only of the last one, and the keys and values of every layer."""
        begin = cache[0][0].shape[2] if cache else 0
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        angles = positions[:, None].float() * frequencies(self.config, tokens.device)
        cos, sin = (torch.cat((f, f), -1).bfloat16() for f in (angles.cos(), angles.sin()))
        x = F.embedding(tokens, self._get("embed.weight"))
        kept = []
        for i in range(self.config.num_layers):
            name = f"layers.{i}."
            y = self._norm(x, name + "attention_norm.weight")
            q, k, v = (
                F.linear(y, self._get(f"{name}attention.{part}.weight"))
                .unflatten(-1, (-1, self.config.head_dim))
                .transpose(1, 2)
                for part in ("query", "key", "value")
            )
            q, k = (h * cos + _turn(h) * sin for h in (q, k))
            if cache:
                k, v = torch.cat((cache[i][0], k), 2), torch.cat((cache[i][1], v), 2)
            kept.append((k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=tokens.shape[1] > 1, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), self._get(name + "attention.output.weight"))
            y = self._norm(x, name + "ffn_norm.weight")
            gate, up = (F.linear(y, self._get(f"{name}ffn.{part}.weight")) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._get(name + "ffn.down.weight"))
        x = self._norm(x[:, -1:] if last else x, "norm.weight")
        return F.linear(x, self._get("embed.weight" if self.config.tie_embeddings else "head.weight")), kept

    def extend(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits, cache = self(tokens, cache, last=True)
        return logits[:, -1], cache

    def _get(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        return self._get(name) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)).to(
            x.dtype
        )


def _turn(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)
