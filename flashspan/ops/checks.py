"""Checks of the public operators' shapes. Operators flatten the tokens, so wrong shapes could still fit together."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(name: str, **tensors: Tensor | None) -> None:
    """ValueError unless the tensors are [B, T, ...] with the same B and T."""
    shapes = {key: tuple(x.shape) for key, x in tensors.items() if x is not None}
    if len({shape[:2] for shape in shapes.values()}) > 1 or any(len(shape) != 3 for shape in shapes.values()):
        raise ValueError(f"{name} needs tensors [B, T, width] with the same B and the same T: got {_list(shapes)}")


def check_weights(name: str, rows: int | None, columns: int, **weights: Tensor) -> None:
    """ValueError unless the weights are [rows, columns]; `rows=None` allows any number of rows."""
    for key, weight in weights.items():
        if weight.dim() != 2 or weight.shape[1] != columns or rows not in (None, weight.shape[0]):
            asked = f"[{'rows' if rows is None else rows}, {columns}]"
            raise ValueError(
                f"{name} needs {key} {asked}: got {tuple(weight.shape)}; weights are stored as in nn.Linear"
            )


def check_angles(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """ValueError unless cos and sin have one row for each token of x [B, T, E], and require no gradient."""
    batch, length = x.shape[:2]
    if cos.shape != sin.shape or tuple(cos.shape[:-1]) not in ((length, 1), (1, length, 1), (batch, length, 1)):
        raise ValueError(
            f"{name} needs cos and sin [{length}, 1, D / 2] or [{batch}, {length}, 1, D / 2]: got "
            f"{_list({'cos': tuple(cos.shape), 'sin': tuple(sin.shape)})}; cut a longer table to the tokens of x"
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(f"{name} computes no gradients of cos and sin: got angles that require them; use .detach()")


def _list(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {shape}" for key, shape in shapes.items())
