"""A decode step of a plain LLaMA in six launches per layer, for up to 16 rows on an NVIDIA GPU.

    step = fused_step(model, rooms, positions, even)  # None if the kernels do not support the model
    logits = step(tokens)                             # one token per row at `positions`, [B, V]

A layer is: norm, projections, rotation and the write to the cache (1); attention over the cache and the combination of
its parts (2, 3); output projection and residual (4); norm, gate and up (5); down projection and residual (6). The
kernels are in generate/kernels/matvec.py. The residual is rounded where the model rounds it; elsewhere there are fewer
roundings. Queries and keys are rounded after the rotation only. A projection is not rounded before it is added to the
residual, nor gate and up before they are multiplied. A norm's result is rounded before the division by the root of the
mean square, not after.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flashspan import masks
from flashspan.kernels.contract import Problem
from flashspan.kernels.failure import KernelFailed
from flashspan.model import Llama
from flashspan.model.llama import Attention, Block, FeedForward, RMSNorm
from flashspan.model.rope import frequencies

if TYPE_CHECKING:
    from flashspan.kernels.launch.launch import Launch

FAILED: dict[tuple[Any, ...], str] = {}
"""Shapes whose kernels failed to compile on this machine -> the error. They are not tried again."""


class FusedStep:
    """The launches of a step, and the buffers between them. Weights and caches are not copied.

    rooms: the keys and values of each layer, [2, B, K, capacity, D]. even: all positions are equal.
    """

    def __init__(self, model: Llama, rooms: Sequence[Tensor], positions: Tensor, even: bool = False) -> None:
        from flashspan.generate.kernels import matvec

        config, weight = model.config, model.head.weight
        B, device = len(positions), positions.device
        self.model, self.rooms, self.positions = model, rooms, positions
        self.frequencies = frequencies(config, device)
        self.x, self.scaled = (weight.new_empty(B, config.width) for _ in range(2))
        self.q = weight.new_zeros(B, config.num_heads, config.head_dim)
        self.gated = weight.new_empty(B, config.ffn_width)
        self.logits = weight.new_empty(B, config.vocab_size)
        self.cos, self.sin = torch.empty(2, B, config.head_dim // 2, device=device)
        layers: Any = model.layers
        self.squares = matvec.new_squares(layers[0].attention.output.weight)
        self.layers = layers
        self.norms = [norm for layer in self.layers for norm in (layer.attention_norm, layer.ffn_norm)] + [model.norm]
        self.gains = gains([norm.weight for norm in self.norms], weight.dtype)
        # The mask is made once, because its transpose takes many kernels. Each step writes new ends into it.
        self.end = torch.ones(B, 1, dtype=torch.int32, device=device)
        end = self.end[0] if even else self.end
        self.seen = masks.Rows(torch.zeros_like(end), end, rooms[0].shape[3], convex=True)
        self.problem = Problem(self.seen, 1.0 / math.sqrt(config.head_dim))

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] of tokens [B, 1]; the next call overwrites them. Adds one to the positions."""
        from flashspan.kernels.launch.launch import on

        with on(self.positions.device):
            self._begin(tokens.contiguous())()  # a column of [B, n] tokens is not contiguous
            for i in range(len(self.layers)):
                self._project(i)()
                for launch in self._rest(i, self._attend(i)):
                    launch()
            self._head()()
        return self.logits

    def compile(self) -> None:
        """Compile and load every kernel; KernelFailed if one fails. Caches and positions do not change."""
        from flashspan.kernels.launch.compiling import compile_together

        tokens = self.positions.unsqueeze(1)
        compile_together([self._begin(tokens), self._project(0), *self._rest(0, self.q.flatten(1)), self._head()])
        self._attend(0)

    def _begin(self, tokens: Tensor) -> Launch:
        from flashspan.generate.kernels.matvec import begin_launch

        return begin_launch(
            tokens, self.model.embed.weight, self.norms[0].weight, self.positions, self.frequencies, self.x,
            self.scaled, self.squares, self.cos, self.sin, self.end, self.gains[0],
        )  # fmt: skip

    def _project(self, i: int) -> Launch:
        from flashspan.generate.kernels.matvec import project_launch

        attention, room = self.layers[i].attention, self.rooms[i]
        weights = [linear.weight for linear in (attention.query, attention.key, attention.value)]
        return project_launch(
            self.scaled, self.squares, weights, self.cos, self.sin, self.positions, self.q, room,
            self.norms[2 * i].eps, self.gains[2 * i],
        )  # fmt: skip

    def _attend(self, i: int) -> Tensor:
        """The output of a layer's attention, [B, H * D]."""
        from flashspan.kernels.portable import decode

        keys, values = self.rooms[i]
        found = decode.forward(self.q.unsqueeze(2), keys, values, self.problem, carry=None, out_dtype=self.q.dtype)
        if found is None:
            raise KernelFailed(decode.FAILED[-1])
        return found.out.flatten(1)

    def _rest(self, i: int, mixed: Tensor) -> list[Launch]:
        """A layer's launches after attention."""
        from flashspan.generate.kernels.matvec import add_launch, gated_launch

        layer, (norm, after) = self.layers[i], self.norms[2 * i + 1 : 2 * i + 3]
        gain, gain_after = self.gains[2 * i + 1 : 2 * i + 3]
        made, ffn = (self.scaled, self.squares), layer.ffn
        return [
            add_launch(mixed, layer.attention.output.weight, self.x, norm.weight, *made, gain),
            gated_launch(*made, ffn.gate.weight, ffn.up.weight, self.gated, norm.eps, gain),
            add_launch(self.gated, ffn.down.weight, self.x, after.weight, *made, gain_after),
        ]

    def _head(self) -> Launch:
        from flashspan.generate.kernels.matvec import head_launch

        return head_launch(
            self.scaled, self.squares, self.model.head.weight, self.logits, self.positions, self.norms[-1].eps,
            self.gains[-1],
        )  # fmt: skip


def fused_step(model: Llama, rooms: Sequence[Tensor], positions: Tensor, even: bool = False) -> FusedStep | None:
    """The step for a model and the filled caches of its layers; None without a GPU or if no kernels support them."""
    shape = (model.config, rooms[0].shape, model.head.weight.dtype, positions.device)
    if not _has_gpu(positions.device) or not serves(model, rooms) or shape in FAILED:
        return None
    from flashspan.kernels.launch.launch import on

    try:
        with on(positions.device):
            step = FusedStep(model, rooms, positions, even)
            step.compile()
    except KernelFailed as failure:
        FAILED[shape] = str(failure)
        warnings.warn(
            f"the fused decode step is off for this shape and PyTorch is used: a kernel {failure}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return step


def serves(model: Llama, rooms: Sequence[Tensor]) -> bool:
    """Whether the kernels support a model: an unmodified `Llama` with whole, contiguous weights of one dtype, no hooks
    and few rows."""
    from flashspan.generate.kernels.matvec import MAX_ROWS
    from flashspan.kernels.portable import decode

    dtype, device = model.head.weight.dtype, model.head.weight.device
    kinds = (Llama, Block, Attention, FeedForward, RMSNorm, nn.Linear, nn.Embedding, nn.ModuleList)
    plain = all(type(module) in kinds and not _has_hooks(module) for module in model.modules())
    whole = all(
        type(param.data) is Tensor and param.is_contiguous() and (param.dtype, param.device) == (dtype, device)
        for param in model.parameters()
    )
    return (
        rooms[0].shape[1] <= MAX_ROWS
        and model.config.head_dim <= 256
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and plain
        and whole
        and not any(module.bias is not None for module in model.modules() if isinstance(module, nn.Linear))
        and not any(module.products is not None for module in model.modules() if isinstance(module, Attention))
        and not torch.is_autocast_enabled(device.type)
        and all(room.dtype == dtype and room.is_contiguous() for room in rooms)
        and not decode.FAILED
    )


def gains(weights: Sequence[Tensor], dtype: torch.dtype) -> list[float]:
    """A power of two for each norm that keeps the residual times the norm's weight within float16; 1 in other
    dtypes."""
    if dtype != torch.float16:
        return [1.0] * len(weights)
    largest = torch.stack([weight.abs().amax().float() for weight in weights]).tolist()
    return [2.0 ** -max(0, math.ceil(math.log2(most))) if 0 < most < math.inf else 1.0 for most in largest]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _has_gpu(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU with the kernels' instructions: Ampere or later."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
