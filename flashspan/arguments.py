"""Check the arguments of an attention call, once, and convert them to the mask, scale and seed that kernels use."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flashspan.kernels import masks
from flashspan.kernels.masks import Band, Blocks, Mask, Rows
from flashspan.kernels.masks.build import check_dense
from flashspan.kernels.masks.mask import whole_number
from flashspan.masks.runs import find_runs

MAX_HEAD_DIM = 256
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


OUR_NAMES = {
    "is_causal": "causal=",
    "attn_mask": "mask=, a bool tensor or a value of flashspan.masks",
    "attention_mask": "mask=, a bool tensor or a value of flashspan.masks",
    "attn_bias": "mask= if it only hides keys",
    "dropout_p": "dropout=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "window_size": "window=",
    "return_attn_probs": "return_lse=",
    "enable_gqa": "nothing in its place, k and v may have fewer heads than q",
}
"""Argument names of PyTorch's and flash-attn's functions, and the flashspan argument to use instead."""


def unknown_argument(unknown: Mapping[str, object]) -> TypeError:
    """The error for arguments that attention does not have."""
    name = next(iter(unknown))
    remedy = OUR_NAMES.get(name, "causal=, window=, mask=, scale=, dropout= and others, see help(flashspan.attention)")
    return TypeError(f"attention has no argument {name}: use {remedy}")


def _kind(x: object) -> object:
    """The layout of a tensor, or the type of anything else."""
    return "nested" if isinstance(x, Tensor) and x.is_nested else getattr(x, "layout", type(x).__name__)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, scale: float | None = None) -> None:
    """ValueError for inputs that attention cannot use, with the rule, the values and the remedy."""
    kinds = [_kind(x) for x in (q, k, v)]
    if kinds != [torch.strided] * 3:
        raise ValueError(
            f"q, k and v must be dense tensors: got {', '.join(map(str, kinds))}; use torch.as_tensor or .to_dense()"
        )

    def shapes() -> str:
        return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be [batch, heads, tokens, head size]: {shapes()}; add dimensions with .unsqueeze"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype: got {q.dtype}, {k.dtype}, {v.dtype}; cast with .to(q.dtype)")
    if q.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"attention works on {names}: got {q.dtype}; cast the inputs")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device: got {q.device}, {k.device}, {v.device}; move them with .to(q.device)"
        )
    batch, heads, _, head_dim = q.shape
    kv_batch, kv_heads, _, kv_head_dim = k.shape
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape: {shapes()}")
    if batch != kv_batch:
        raise ValueError(f"q and k must have the same batch: {shapes()}; expand the smaller one")
    if head_dim != kv_head_dim:
        raise ValueError(f"q and k must have the same head size: {shapes()}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        remedy = "split larger heads" if head_dim else "heads of size 0 have nothing to compare"
        raise ValueError(f"the head size must be 1 to {MAX_HEAD_DIM}: {shapes()}; {remedy}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the key heads must divide the query heads: got {heads} query heads and {kv_heads} key heads; "
            "repeat or leave out heads"
        )
    if not isinstance(dropout, (int, float, np.floating)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is a probability in [0, 1): got {dropout}")
    number = float(scale) if isinstance(scale, (np.integer, np.floating)) else scale  # a float16 would overflow below
    # math.isfinite would break a compiled graph. A tensor is refused: its gradient would be lost silently.
    largest = sys.float_info.max if q.dtype == torch.float64 else FLOAT32_MAX
    if scale is not None and not (isinstance(number, (int, float)) and abs(number) <= largest):
        remedy = "multiply q by a tensor" if isinstance(scale, Tensor) else "use None for 1 / sqrt(head size)"
        raise ValueError(f"scale must be a finite number: got {scale!r}; {remedy}")


def resolve_mask(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mask: Mask | Tensor | None = None,
) -> Mask:
    """The intersection of causal, window and mask, checked against q [B, H, T, D] and k [B, K, S, D]."""
    if isinstance(causal, str):  # "False" would count as True
        raise ValueError(f"causal must be True or False: got {causal!r}")
    result: Mask = masks.CAUSAL if causal else masks.EVERYTHING
    if window is not None:
        result = result & window_band(window)
    if mask is None:
        return result
    check_mask(mask)
    if isinstance(mask, Tensor):
        mask = mask_of(mask, q, q.shape[2], k.shape[2])
    mask.check(q.shape[0], q.shape[2], k.shape[2], q.shape[1])
    return mask if result == masks.EVERYTHING else mask & result


def window_band(window: int | tuple[int, int]) -> Band:
    """A window argument as a band; ValueError if it is not valid."""
    width = whole_number(window)
    pair = window if width is None else (width - 1, width - 1)
    sides = [whole_number(x) for x in pair] if isinstance(pair, (tuple, list)) and len(pair) == 2 else []
    found = [side for side in sides if side is not None and side >= 0]
    if len(found) != 2:
        raise ValueError(
            f"a window is an int >= 1 or a pair (left, right) of ints >= 0: got {window!r}; leave it out for no window"
        )
    left, right = found
    return Band(-left, right)


def check_mask(mask: object) -> None:
    """ValueError for a value that is not a mask."""
    if mask is None or isinstance(mask, (Tensor, Band, Rows, Blocks)):
        return
    remedy = "additive masks are not supported, use mask=bias.isfinite() where they only hide keys"
    if isinstance(mask, (np.ndarray, list, tuple)):
        remedy = "use torch.as_tensor(mask, dtype=torch.bool, device=q.device)"
    elif callable(mask):
        remedy = "use masks.Blocks.from_rule(rule, num_queries, num_keys) for a rule of index tensors (b, h, i, j)"
    raise ValueError(f"mask must be a bool tensor or made by flashspan.masks: got {type(mask).__name__}; {remedy}")


def mask_of(visible: Tensor, q: Tensor, num_queries: int, num_keys: int) -> Rows | Blocks:
    """A bool tensor [T, S], [B, T, S], [H, T, S] or [B, H, T, S] as a mask: Rows if each row is one run, or Blocks."""
    if visible.device != q.device and not q.is_meta:
        raise ValueError(
            f"a mask tensor must be on q's device, {q.device}: got {visible.device}; move it with .to(q.device), once"
        )
    if visible.dim() not in (2, 3, 4):
        raise ValueError(
            f"a mask tensor must be [T, S], [B, T, S], [H, T, S] or [B, H, T, S]: got {tuple(visible.shape)}; use "
            f".view or .reshape"
        )
    check_dense(visible)
    shape = tuple(visible.shape)
    if visible.dim() == 3 and visible.shape[0] == q.shape[0] == q.shape[1] > 1:
        raise ValueError(
            f"a mask tensor of three dimensions is [B, T, S] or [H, T, S], which is ambiguous for q with B = H = "
            f"{q.shape[0]}: got {shape}; use mask[:, None] for one mask per sequence, or mask[None] for one per head "
            f"(as in PyTorch)"
        )
    if visible.dim() == 3 and visible.shape[0] in (1, q.shape[0]):
        visible = visible[:, None]
    visible = visible[(None,) * (4 - visible.dim())]
    if visible.shape[0] not in (1, q.shape[0]) or visible.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"a mask tensor must broadcast to q's batch and heads, [{q.shape[0]}, {q.shape[1]}, T, S]: got {shape}; "
            f"use one mask for each sequence and head, or one for all, [T, S]"
        )
    if visible.stride(0) == 0:  # expanded, so all sequences have the same mask: read one
        visible = visible[:1]
    visible = visible.expand(-1, -1, -1, num_keys if visible.shape[3] == 1 else -1)
    rows = num_queries if visible.shape[2] == 1 else visible.shape[2]  # read a padding mask's one row once
    if visible.shape[1] == 1 or (visible.shape[1] > 1 and visible.stride(1) == 0):
        runs = find_runs(visible[:, 0])
        if runs is not None:
            start, end = (x.expand(-1, rows)[0 if len(visible) == 1 else slice(None)] for x in runs)
            return Rows(start, end, visible.shape[3])
    return Blocks.from_dense(visible.expand(-1, -1, rows, -1))


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor of the scores: 1 / sqrt(D) unless given."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def check_seed(seed: int | None, generator: torch.Generator | None) -> None:
    """ValueError for a seed or a generator that dropout cannot use."""
    if seed is not None and generator is not None:
        raise ValueError("dropout takes either a seed or a generator: got both; leave one out")
    if seed is not None and not isinstance(seed, (int, np.integer)):
        raise ValueError(f"a seed is a whole number: got {seed!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"a generator is a torch.Generator: got {generator!r}; use seed= for a number")


def draw_seed(device: torch.device, seed: int | None, generator: torch.Generator | None) -> Tensor:
    """A dropout seed as an int64 tensor on the device; without a seed, one is drawn from the generator."""
    check_seed(seed, generator)
    if seed is not None:
        return torch.full((1,), (int(seed) + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    return torch.randint(0, 2**62, (1,), device=source, generator=generator).to(device)


def mask_versions(mask: Mask) -> list[int]:
    """The version counters of a mask's tensors, for `check_unchanged`. A band has none."""
    if isinstance(mask, Band):
        return []
    return [0 if x.is_inference() else x._version for x in mask.pack()[2]]  # inference tensors have no counter


def check_unchanged(mask: Mask, versions: list[int]) -> None:
    """RuntimeError for a mask whose tensors have changed in place: backward must see the mask of forward."""
    if (now := mask_versions(mask)) != versions:
        raise RuntimeError(
            f"a mask must not change between forward and backward: its tensors were changed in place "
            f"(their versions were {versions}, now {now}); make a new mask instead"
        )


def dense_rows(x: Tensor) -> Tensor:
    """x, or a copy in which the last dimension is contiguous.

    Expanded sequences and heads (as in the gradient of a sum) are copied once and expanded again. Expanded rows are
    copied in full: GPU threads that all read the same row would wait for one another.
    """
    if x.stride(-1) == 1:
        return x
    once = [slice(0, 1) if step == 0 else slice(None) for step in x.stride()[:-2]]
    return x[tuple(once)].contiguous().expand(x.shape)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors; under autocast, float32 tensors are cast to its dtype."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in tensors)
