"""Converts the mask functions of transformers to the masks of flashspan.

transformers describes a mask as a function (batch, head, query, key) -> bool, composed of the closures in its
`masking_utils.py`: causal, sliding window, chunks, packed sequences, image blocks, padding. A closure is recognised by
its code object, and its parameters are read from the variables it closes over. The result is a `Band` or `Rows`, and no
[T, S] mask is made. Any other function becomes a block map, made once per forward pass.

Note: recognition is checked. For each kind of closure, `Translator` once compares its mask with the function's own
result on a small grid. If a later release of transformers changes the meaning of a kind, functions of that kind become
block maps: slower, but still exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashspan.kernels import masks
from flashspan.kernels.masks import Mask
from flashspan.kernels.masks.intervals import canonical
from flashspan.masks import Band, Blocks, Rows

MaskFunction: TypeAlias = Callable[..., Any]
"""(batch, head, query, key), index tensors that broadcast, to bool."""


@dataclass(frozen=True)
class Grid:
    """The queries and keys of one mask: query i is token q_offset + i of its sequence, key j is token kv_offset + j.

    q_offset is a tensor for a static cache. It may be on a GPU, so its value is not read here.
    documents, position: the sequence of each token, and its position there; set while packed sequences are read.
    """

    num_batch: int
    num_queries: int
    num_keys: int
    q_offset: int | Tensor = 0
    kv_offset: int = 0
    device: torch.device | str = "cpu"
    documents: Tensor | None = None
    position: Tensor | None = None

    @property
    def query(self) -> Tensor:
        """The token of each query, int64 [T]."""
        return torch.arange(self.num_queries, device=self.device) + self.q_offset

    @property
    def is_square(self) -> bool:
        """Whether both the queries and the keys are all tokens of the sequence."""
        starts_at_0 = isinstance(self.q_offset, int) and self.q_offset == self.kv_offset == 0
        return starts_at_0 and self.num_queries == self.num_keys

    def near(self, first: int | Tensor | None, last: int | Tensor | None) -> Mask:
        """The mask of keys `first` to `last` tokens after the query (negative: before); tensors are [T] or [B, T]."""
        if isinstance(self.q_offset, int) and not isinstance(first, Tensor) and not isinstance(last, Tensor):
            shift = self.q_offset - self.kv_offset
            band = Band(None if first is None else shift + first, None if last is None else shift + last)
            return band.simplify(self.num_queries, self.num_keys)  # one query that continues a cache sees everything
        own = self.query - self.kv_offset
        start = own * 0 if first is None else own + first
        end = own * 0 + self.num_keys if last is None else own + last + 1
        return self.rows(start, end)

    def rows(self, start: Tensor, end: Tensor) -> Rows:
        """The mask of keys j with start <= j < end, both [T] or [B, T]."""
        start, end = torch.broadcast_tensors(start, end)
        start, end = canonical(start.clamp(0, self.num_keys).int(), end.clamp(0, self.num_keys).int())
        # The bounds of one query are always ascending; reading them would wait for the device.
        convex = self.num_queries == 1 or bool((start.diff() >= 0).all() and (end.diff() >= 0).all())
        return Rows(start, end, self.num_keys, convex=convex)


Reader: TypeAlias = Callable[..., Mask | None]
"""(Translator, Grid, **variables of a mask function's closure) -> its mask; None if a query's keys are no interval."""


class Translator:
    """Reads mask functions of one release of transformers (`masking_utils` is its module)."""

    def __init__(self, masking_utils: Any) -> None:
        self.and_masks: Callable[..., MaskFunction] = masking_utils.and_masks
        self.padding_mask_function: Callable[[Tensor], MaskFunction] = masking_utils.padding_mask_function
        self.causal: MaskFunction = masking_utils.causal_mask_function
        samples = sample_functions(masking_utils)
        packed = samples["packed_sequence_mask_function"]
        self.packed_code = packed.__code__
        self.chunk_code = samples["chunked_overlay"].__code__
        self.readers: dict[CodeType, Reader] = {function.__code__: READERS[name] for name, function in samples.items()}
        for name, function in samples.items():
            remaps = READERS[name] is _remapped  # only within packed sequences
            if not self.agrees(self.and_masks(packed, function) if remaps else function):
                del self.readers[function.__code__]
                warnings.warn(
                    f"{name} of this release of transformers works differently than expected: a block map is used, "
                    f"which is exact but slower",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def agrees(self, function: MaskFunction) -> bool:
        """Whether a function is recognised and its mask equals the function's result, on 6 queries and 6 keys."""
        grid = Grid(1, 6, 6)
        try:
            found = self.read(function, grid)
        except (KeyError, TypeError, ValueError, IndexError):
            return False
        if found is None:
            return False
        i = torch.arange(6)
        said = function(i[:1, None, None], i[:1, None, None], i[None, :, None], i[None, None, :])
        return torch.equal(masks.dense(found, 6, 6).expand(1, 6, 6), said.expand(1, 6, 6))

    def translate(
        self, function: MaskFunction, grid: Grid, padding: Tensor | None = None, *, one_by_one: bool = False
    ) -> Mask:
        """The mask of a function, with keys hidden where `padding` [B, S'] is False.

        one_by_one: the function may be written for single indices; torch.vmap then maps it over tensors.
        """
        if padding is not None:
            missing = grid.kv_offset + grid.num_keys - padding.shape[-1]  # a static cache: room for later tokens
            padding = torch.nn.functional.pad(padding, (0, max(0, missing)))
            function = self.and_masks(function, self.padding_mask_function(padding))
        found = self.read(function, grid)
        return self.block_map(function, grid, one_by_one) if found is None else found

    def read(self, function: MaskFunction, grid: Grid) -> Mask | None:
        """The mask of a function if it is recognised, else None."""
        code = getattr(function, "__code__", None)
        reader = self.readers.get(code) if isinstance(code, CodeType) else None
        return None if reader is None else reader(self, grid, **closed_over(function))

    def counts_chunks(self, function: MaskFunction) -> bool:
        """Whether a mask function has chunks that are counted from the start of the row."""
        if getattr(function, "__code__", None) is self.chunk_code:
            return True
        return any(map(self.counts_chunks, closed_over(function).get("mask_functions", ())))

    def block_map(self, function: MaskFunction, grid: Grid, one_by_one: bool) -> Blocks:
        """The block map of any function, evaluated for every pair."""
        ask = _mapped(function) if one_by_one else function

        def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return ask(b.long(), h.long(), i.long() + grid.q_offset, j.long() + grid.kv_offset)

        return Blocks.from_rule(
            rule, grid.num_queries, grid.num_keys, num_batch=grid.num_batch, device=torch.device(grid.device)
        )


def closed_over(function: MaskFunction) -> dict[str, Any]:
    """The variables of a closure by name."""
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _mapped(function: MaskFunction) -> MaskFunction:
    """Turn a function of single indices into one of tensors [1, 1], [1, 1], [rows, 1], [1, columns]."""
    # Lets the function index its own tensors by one index, as transformers and FlexAttention do.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_both = torch.vmap(over_keys, in_dims=(None, None, 0, None))

    def evaluate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            seen: Tensor = over_both(b[0, 0], h[0, 0], i[:, 0], j[0])
        return seen

    return evaluate


# One reader for each closure of transformers. The reader's parameters are the variables of the closure.


def _everything(translator: Translator, grid: Grid) -> Mask:
    return Band()


def _causal(translator: Translator, grid: Grid) -> Mask:
    return grid.near(None, 0)


def _window(translator: Translator, grid: Grid, sliding_window: int) -> Mask:
    return grid.near(1 - sliding_window, None)


def _window_both_ways(translator: Translator, grid: Grid, sliding_window: int) -> Mask:
    return grid.near(-sliding_window, sliding_window)


def _chunk(translator: Translator, grid: Grid, chunk_size: int, left_padding: Tensor) -> Mask:
    position = grid.query if grid.position is None else grid.position
    behind = (position - left_padding.to(position.device)[:, None]) % chunk_size
    return grid.near(-behind, chunk_size - 1 - behind)


def _padding(translator: Translator, grid: Grid, padding_mask: Tensor) -> Mask | None:
    if grid.position is not None:
        return None
    shown = padding_mask[:, grid.kv_offset : grid.kv_offset + grid.num_keys].bool()
    count = shown.sum(-1, keepdim=True)
    place = torch.arange(grid.num_keys, device=shown.device)
    first = torch.where(shown, place, grid.num_keys).amin(-1, keepdim=True)
    last = torch.where(shown, place, -1).amax(-1, keepdim=True)
    if not bool(((last - first + 1 == count) | (count == 0)).all()):
        return None
    if bool((count == grid.num_keys).all()):
        return Band()
    start, end = (x.expand(-1, grid.num_queries) for x in (first, last + 1))
    return grid.rows(start, end)


def _packed(translator: Translator, grid: Grid, packed_sequence_mask: Tensor) -> Mask | None:
    return _own_run(grid, packed_sequence_mask) if grid.is_square else None


def _image_block(translator: Translator, grid: Grid, block_sequence_ids: Tensor) -> Mask | None:
    return _own_run(grid, block_sequence_ids)


def _own_run(grid: Grid, ids: Tensor) -> Mask | None:
    """The mask in which a query sees the tokens with its own id, and none if its id is negative. ids [B, L] of tokens 0
    to L - 1. None if the tokens of an id are not one run."""
    if grid.position is not None or ids.shape[-1] < grid.kv_offset + grid.num_keys:
        return None
    num_tokens, query = ids.shape[-1], grid.query
    place = torch.arange(num_tokens, device=ids.device)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = begins.roll(-1, -1)
    # Two runs with one id would be a set of keys with a gap, so the id of a new run must exceed all earlier ids.
    before = torch.nn.functional.pad(ids.cummax(-1).values[:, :-1], (1, 0), value=-1)
    if not bool((~begins | (ids < 0) | (ids > before)).all()):
        return None
    start = torch.where(begins, place, 0).cummax(-1).values
    end = torch.where(ends, place + 1, num_tokens).flip(-1).cummin(-1).values.flip(-1)
    end = torch.where(ids < 0, start, end)
    return grid.rows(start[:, query] - grid.kv_offset, end[:, query] - grid.kv_offset)


def _remapped(translator: Translator, grid: Grid, mask_function: MaskFunction, position_ids: Tensor) -> Mask | None:
    """The mask of a function of positions within packed sequences; None unless positions there increase by 1: then two
    tokens of a sequence are as far apart as their positions."""
    if grid.documents is None or grid.position is not None or not grid.is_square:
        return None
    apart = grid.documents.diff() != 0
    if not bool((apart | (position_ids.diff() == 1)).all()):
        return None
    return translator.read(mask_function, replace(grid, position=position_ids))


def _all(translator: Translator, grid: Grid, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
    for function in mask_functions:
        if getattr(function, "__code__", None) is translator.packed_code:
            grid = replace(grid, documents=closed_over(function)["packed_sequence_mask"])
    found: Mask = Band()
    for function in mask_functions:
        mask = translator.read(function, grid)
        if mask is None:
            return None
        found = found & mask
    return found


def _any(translator: Translator, grid: Grid, mask_functions: tuple[MaskFunction, ...]) -> Mask | None:
    # Only a mask of packed sequences inside a part limits that part, so those outside do not count here.
    parts = [translator.read(function, replace(grid, documents=None)) for function in mask_functions]
    found: Mask | None = parts[0]
    for mask in parts[1:]:
        found = None if found is None or mask is None else _union(grid, found, mask)
    return found


def _union(grid: Grid, one: Mask, two: Mask) -> Mask:
    """The union of two masks: `Rows` if the two intervals of every query overlap or touch, else a block map."""
    if not isinstance(one, Blocks) and not isinstance(two, Blocks):
        pairs = [mask.intervals(grid.num_queries, grid.num_keys) for mask in (one, two)]
        (a, b), (c, d) = ((start.to(grid.device), end.to(grid.device)) for start, end in pairs)
        nothing = (b <= a) | (d <= c)
        if bool((nothing | (torch.maximum(a, c) <= torch.minimum(b, d))).all()):
            low, high = torch.minimum(a, c), torch.maximum(b, d)
            start = torch.where(b <= a, c, torch.where(d <= c, a, low))
            end = torch.where(b <= a, d, torch.where(d <= c, b, high))
            return grid.rows(start, end)
    return Blocks.of(one, grid.num_queries, grid.num_keys, device=grid.device) | two


READERS: dict[str, Reader] = {
    "and_masks": _all,
    "or_masks": _any,
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _everything,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _window_both_ways,
    "chunked_overlay": _chunk,
    "blockwise_overlay": _image_block,
    "padding_mask_function": _padding,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _remapped,
}
"""Names in transformers' masking_utils (functions, and functions that make closures) -> their readers."""


def sample_functions(masking_utils: Any) -> dict[str, MaskFunction]:
    """One mask function of each kind that this release has, by its name in READERS, for 6 queries and 6 keys."""
    utils, causal = masking_utils, masking_utils.causal_mask_function
    packed = torch.tensor([[0, 0, 0, 1, 1, 2]])
    position = torch.tensor([[0, 1, 2, 0, 1, 0]])
    image = torch.tensor([[-1, 0, 0, -1, 1, 1]])
    padding = torch.tensor([[False, True, True, True, True, False]])
    chunks = utils.chunked_overlay(2, torch.tensor([1]))
    make: dict[str, Callable[[], MaskFunction]] = {
        "and_masks": lambda: utils.and_masks(causal, utils.bidirectional_mask_function),
        "or_masks": lambda: utils.or_masks(causal, utils.bidirectional_mask_function),
        "causal_mask_function": lambda: causal,
        "bidirectional_mask_function": lambda: utils.bidirectional_mask_function,
        "sliding_window_overlay": lambda: utils.sliding_window_overlay(3),
        "sliding_window_bidirectional_overlay": lambda: utils.sliding_window_bidirectional_overlay(2),
        "chunked_overlay": lambda: chunks,
        "blockwise_overlay": lambda: utils.blockwise_overlay(image),
        "padding_mask_function": lambda: utils.padding_mask_function(padding),
        "packed_sequence_mask_function": lambda: utils.packed_sequence_mask_function(packed),
        "remap_positions_for_packed_sequence": lambda: utils.remap_positions_for_packed_sequence(chunks, position),
    }
    return {name: made() for name, made in make.items() if hasattr(utils, name)}
