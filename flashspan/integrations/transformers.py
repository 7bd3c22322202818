"""flashspan as an attention implementation of Hugging Face transformers.

    import flashspan.integrations.transformers as span

    span.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="span")

or, later, `model.set_attn_implementation("span")`.

transformers then calls two functions of this file: `make_mask` once in each forward pass, for each kind of mask the
model has, and `attend` in each layer. transformers passes the result of `make_mask` unchanged to the layers: a
`SpanMask` that contains a `Band`, `Rows` or `Blocks`, and no [T, S] tensor. docs/transformers.md lists what works.

Note: the name "span". transformers treats every name that contains "flash", "sdpa" or "flex_attention" as its own.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakTensorKeyDictionary

from flashspan.arguments import mask_of
from flashspan.attention import attention
from flashspan.integrations.mask_functions import Grid, MaskFunction, Translator
from flashspan.kernels import masks
from flashspan.kernels.masks import Mask
from flashspan.masks import Band, documents

NAME = "span"
OLDEST, NEWEST = (5, 17), (5, 23)
"""The oldest and newest release of transformers that was tested; later ones of the same major version are allowed."""

HARMLESS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "layer_idx",
        "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch", "output_hidden_states", "output_router_logits",
        "return_dict", "labels", "shift_labels", "deterministic", "token_type_ids", "mm_token_type_ids",
        "logits_to_keep",
    }
)  # fmt: skip
"""Arguments that reach an attention function and do not change its result."""

NOT_SERVED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "soft-capped scores",
    "position_bias": "a bias added to the scores",
    "output_attentions": "the attention weights as an output",
    "indices": "keys chosen for each query by an indexer",
    "block_indices": "blocks of keys chosen for each query by an indexer",
    "cache": "the paged cache of continuous batching",
}
"""Arguments that change the result and are not supported yet."""

OTHERWISE = 'use attn_implementation="sdpa" or "eager" for this model'
HIDES = -1e9
"""A bias this low hides a key."""


def register() -> None:
    """Make attn_implementation="span" known to transformers; call it once, before the model is made or switched.

    Raises ValueError if transformers is missing or its release is not supported.

    Example:
        flashspan.integrations.transformers.register()
        model.set_attn_implementation("span")
    """
    library = _load_transformers()
    from transformers.masking_utils import AttentionMaskInterface

    _translator()
    library.AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def _load_transformers() -> ModuleType:
    bounds = f"transformers {OLDEST[0]}.{OLDEST[1]} or later, below {OLDEST[0] + 1}"
    remedy = "pip install 'flashspan[transformers]'"
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f'attn_implementation="{NAME}" needs {bounds}: found none; {remedy}')
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version < (OLDEST[0] + 1, 0):
        raise ValueError(f'attn_implementation="{NAME}" needs {bounds}: found {transformers.__version__}; {remedy}')
    return transformers


@cache
def _translator() -> Translator:
    from transformers import masking_utils

    return Translator(masking_utils)


class SpanMask(BlockMask):
    """A flashspan mask that a model of transformers passes to its layers, with the shape [B, 1, T, S].

    It is a BlockMask because transformers accepts a finished mask of four dimensions only as a tensor or a BlockMask;
    the content of the BlockMask is not used. A model that computes with its mask is refused: a static cache's mask, an
    additive mask and a bool mask would each need other operations.
    """

    def __init__(self, mask: Mask, shape: tuple[int, int, int, int], *, counts: bool = False) -> None:
        self.mask, self._shape = mask, shape
        self.counts = counts  # chunks from the row's first token, not from that of each packed sequence
        self._within: tuple[Tensor, Mask] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("_"):
            _refuse_computing(f"uses .{name} of")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def contiguous(self) -> SpanMask:
        return self

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> SpanMask:
        moves = isinstance(device, (str, torch.device))
        return SpanMask(self.mask.to(device), self.shape, counts=self.counts) if moves else self

    def to_dense(self) -> Tensor:
        """The mask as a bool tensor [B or 1, 1, T, S], for tests and pictures."""
        dense = masks.dense(self.mask, *self.shape[2:])
        return dense[:, None] if dense.dim() == 3 else dense[(None,) * (4 - dense.dim())]

    def __repr__(self) -> str:
        return f"SpanMask({self.mask!r}, shape={self.shape})"

    def __getitem__(self, index: Any) -> SpanMask:
        """The mask of slices of the queries and keys: mask[:, :, a:b, c:d]."""
        parts = index if isinstance(index, tuple) else (index,)
        parts = (*parts, *[slice(None)] * (4 - len(parts)))
        if len(parts) != 4 or not all(isinstance(part, slice) for part in parts) or parts[:2] != (slice(None),) * 2:
            _refuse_computing("takes out parts of")
        queries, keys = (range(length)[part] for length, part in zip(self.shape[2:], parts[2:], strict=True))
        if (len(queries), len(keys)) == self.shape[2:]:
            return self
        shape = (*self.shape[:2], len(queries), len(keys))
        return SpanMask(self.mask.slice(queries, keys), shape, counts=self.counts)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse_computing(f"calls torch's {getattr(function, '__name__', 'function')} with")

    def fit(self, num_queries: int, num_keys: int) -> Mask:
        """The mask for a layer's queries and keys."""
        _, _, own_queries, own_keys = self.shape
        if own_queries == own_keys == 1 and self.mask == Band():  # as a tensor of one element would broadcast
            return self.mask
        if (num_queries, num_keys) != (own_queries, own_keys):
            raise ValueError(
                f"the mask must have the layer's size, queries x keys: got {own_queries} x {own_keys} for a layer of "
                f"{num_queries} x {num_keys}; {OTHERWISE}"
            )
        return self.mask

    def within(self, ends: Tensor, key_ends: Tensor | None) -> SpanMask:
        """This mask, limited to each query's own packed sequence; `ends` are the cumulative lengths [N + 1], from 0."""
        if self.counts:
            raise ValueError(
                "for layers with chunks, cu_seq_lens_q needs position_ids that restart in each sequence and "
                "use_cache=False; "
                f"otherwise chunks would be counted from the start of the row; {OTHERWISE}"
            )
        if self._within is None or self._within[0] is not ends:
            num_batch, _, num_queries, num_keys = self.shape
            if ends.dim() != 1 or not len(ends) or int(ends[0]) or bool((ends.diff() < 0).any()):
                raise ValueError(
                    f"cu_seq_lens_q must be the ends of the sequences, ascending from 0: got {ends.tolist()}; for "
                    f"lengths of 5 and 9 give [0, 5, 14]"
                )
            same = key_ends is None or torch.equal(key_ends, ends)
            if num_batch != 1 or num_queries != num_keys or int(ends[-1]) != num_queries or not same:
                raise ValueError(
                    f"cu_seq_lens_q must describe one row of packed sequences that covers all tokens, the same for "
                    f"queries and keys: got a batch of {num_batch}, {num_queries} queries, {num_keys} keys and an end "
                    f"of {int(ends[-1])}; pack them into one row, or give only position_ids"
                )
            lengths = documents(ends.diff().cpu(), device=ends.device)
            self._within = ends, self.mask & lengths
        return SpanMask(self._within[1], self.shape)


def _refuse_computing(what: str) -> NoReturn:
    raise ValueError(f"this model {what} its attention mask, which {NAME!r} does not support; {OTHERWISE}")


def _refuse_operator(*_: Any) -> NoReturn:
    _refuse_computing("computes with")


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "invert", "neg", "eq", "ne",
              "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(SpanMask, f"__{_name}__", _refuse_operator)


@torch.compiler.disable
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> SpanMask:
    """The mask of one forward pass; the signature is that of transformers' mask interface.

    attention_mask: bool [B, S'], False where a token is padding. q_offset: a tensor for a static cache. The other
    arguments (dtype, config, permission to omit the mask) have no effect.
    """
    translator = _translator()
    function = translator.causal if mask_function is None else mask_function
    grid = Grid(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    mask = translator.translate(function, grid, attention_mask, one_by_one=use_vmap)
    return SpanMask(mask, (batch_size, 1, q_length, kv_length), counts=translator.counts_chunks(function))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SpanMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: query [B, H, T, D], key and value [B, K, S, D] to [B, T, H, D], and no weights.

    sliding_window: a mask already includes it; without a mask, a window shorter than the keys is refused. So are
    unsupported arguments.
    """
    refuse_unserved(query, key, value, kwargs)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if not isinstance(cu_seq_lens_q, Tensor):
            raise ValueError(
                f"packed sequences need cu_seq_lens_q as a tensor: got {type(cu_seq_lens_q).__name__}; give both "
                f"cu_seq_lens_q and cu_seq_lens_k, or {OTHERWISE}"
            )
        if not isinstance(attention_mask, SpanMask):
            raise ValueError(f"cu_seq_lens_q needs a mask made by transformers: got none; {OTHERWISE}")
        attention_mask = attention_mask.within(cu_seq_lens_q, cu_seq_lens_k)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask: Mask | Tensor
    if isinstance(attention_mask, SpanMask):
        mask = attention_mask.fit(num_queries, num_keys)
    elif attention_mask is not None:
        mask = mask_of_tensor(attention_mask, query, num_keys)
    elif sliding_window is not None and num_keys > sliding_window:
        raise ValueError(
            f"a layer with a sliding window needs a mask: got a window of {sliding_window} without one; {OTHERWISE}"
        )
    else:  # as transformers does with SDPA: one query continues a cache, several queries begin at the first key
        mask = Band(None, 0) if is_causal and num_queries > 1 else Band()
    if query.shape[0] != key.shape[0]:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    out = attention(query, key, value, mask=mask, scale=scaling, dropout=dropout if module.training else 0.0)
    return out.transpose(1, 2), None


def refuse_unserved(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
    """ValueError that names the argument or size, if `attend` does not support one."""
    for name, given in arguments.items():
        if given is None or given is False or name in HARMLESS:
            continue
        what = f"{NOT_SERVED[name]} ({name})" if name in NOT_SERVED else f"the unknown attention argument {name!r}"
        raise ValueError(f'attn_implementation="{NAME}" does not support {what}; {OTHERWISE}')
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    if sizes[1] != sizes[2]:
        raise ValueError(
            f'attn_implementation="{NAME}" supports keys and values of one head size: got keys of {sizes[1]} and '
            f"values of {sizes[2]}; {OTHERWISE}"
        )
    if sizes[0] > 256:
        raise ValueError(f'attn_implementation="{NAME}" supports head sizes up to 256: got {sizes[0]}; {OTHERWISE}')


_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""A mask that a user gave as a tensor -> (a copy of the tensor, the mask of flashspan made from it)."""


def mask_of_tensor(given: Tensor, query: Tensor, num_keys: int) -> Mask:
    """The mask of flashspan for a finished mask [B, 1, T, S] of a user or a model: bool, or 0 where visible and very
    negative elsewhere. It is converted once for all layers. Its values are compared with a copy to find out whether it
    has changed, because PyTorch does not count changes in inference mode."""
    if not isinstance(given, Tensor) or given.dim() != 4:
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(
            f"an attention mask that transformers does not make must be a tensor [B, 1, T, S]: got {shape}; {OTHERWISE}"
        )
    known: tuple[Tensor, Mask] | None = _READ.get(given)
    if known is not None and torch.equal(known[0], given):
        return known[1]
    visible = given if given.dtype == torch.bool else given == 0
    if given.requires_grad:
        found = f"learned {given.dtype} values"  # they may start at 0
    elif given.is_floating_point():
        hidden = given <= max(HIDES, torch.finfo(given.dtype).min)
        found = "" if bool((visible | hidden).all()) else f"values that are neither 0 nor below {HIDES:g}"
    else:
        found = "" if given.dtype == torch.bool else f"values of {given.dtype}"
    if found:
        raise ValueError(
            f'attn_implementation="{NAME}" does not support an additive bias, only one that hides keys: got {found}; '
            f"give a bool mask, or {OTHERWISE}"
        )
    mask = mask_of(visible, query, query.shape[2], num_keys)
    _READ[given] = given.clone(), mask
    return mask
