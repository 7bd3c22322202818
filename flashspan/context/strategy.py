"""context_parallel: attention over the ranks of a group, as a callable.

attend = context_parallel(group, layout="zigzag", strategy="ring")
q, k, v = (attend.shard(x, 2) for x in (q, k, v))      # or split the tokens before the model
out = attend(q, k, v, causal=True)                     # this rank's rows of the result on one device
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashspan.arguments import (
    FLOATS,
    autocast,
    check_inputs,
    check_mask,
    check_seed,
    check_unchanged,
    dense_rows,
    draw_seed,
    mask_of,
    mask_versions,
    resolve_mask,
    scale_of,
    unknown_argument,
    window_band,
)
from flashspan.attention import attention
from flashspan.attention_operator import refuse_transforms
from flashspan.context.agreement import COMPARED, decode, digest, encode
from flashspan.context.checks import agree_on_placement, check_grid, check_one_rank, check_same_tokens, check_shards
from flashspan.context.core import Attend, Core, Options, Scheduled
from flashspan.context.execute import Plan
from flashspan.context.generators import GENERATORS, in_chunks
from flashspan.context.layout import Layout, Placement, contiguous, deal, place
from flashspan.context.recompute import in_kept_block
from flashspan.context.settings import STRATEGIES as STRATEGIES
from flashspan.context.settings import Settings
from flashspan.context.symmetric import SymmetricTransport, TransportName
from flashspan.context.transport import ExchangeError, GroupTransport
from flashspan.context.ulysses import Ulysses, all_gather, share_heads
from flashspan.context.visibility import Visibility
from flashspan.kernels.backends import Chosen, choose
from flashspan.kernels.contract import LocalAttention
from flashspan.kernels.dropout import Dropout
from flashspan.kernels.masks import EVERYTHING, Blocks, Mask, Rows

PLANS_KEPT = 32
MESSAGE_BYTES = 2**20  # bytes of keys and values in one transfer between CPUs, unless `head_chunks` is given

_NO_MASK: tuple[object, list[int]] = (None, [])
"""The last call's mask and the versions of its tensors, if there was none with tensors."""


def context_parallel(
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    layout: Layout = "zigzag",
    strategy: str = "ring",
    sizes: Sequence[int] | None = None,
    slow_group: dist.ProcessGroup | None = None,
    across: str = "ring",
    head_chunks: int | None = None,
    num_tokens: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    transport: TransportName = "auto",
    timeout: float = 300.0,
) -> ContextAttention:
    """Attention over the ranks of a group, each with a part of the tokens. Call the result like `flashspan.attention`.

    Args:
        group: A process group, a mesh of one dimension, or for `hybrid` a mesh of two dimensions, (across, ulysses).
            None means one rank.
        layout: "contiguous", "zigzag", "striped", or a function of (num_tokens, num_ranks), such as `balanced(mask)`.
        strategy: "ring", "double_ring" (with `sizes`), "gather", "helper", "ulysses", or "hybrid": ulysses along the
            mesh's second dimension, and the strategy `across` along its first.
        sizes: For double_ring, (nodes, ranks per node).
        slow_group: For double_ring on NCCL, a second group of the same ranks. It sends keys between nodes while the
            first group sends inside the nodes.
        across: For hybrid, the strategy along the mesh's first dimension.
        head_chunks: Number of chunks in which the heads are computed; transfer buffers become smaller by this factor.
            Default: one chunk on GPUs; on CPUs, as many as make each transfer about a MiB, at no other cost.
        num_tokens: The length of the whole sequence, if it is always the same. Then ranks compare their calls only if a
            shape or mask is new. Otherwise they gather the length in each call, unless the mask has it. If ranks then
            make different calls, none of them new, gloo waits until the timeout; NCCL does not detect it, and their
            transfers do not match.
        backend: As in `flashspan.attention`.
        deterministic: As in `flashspan.attention`.
        transport: How messages are sent. "symmetric": as copies into the receiver's memory, on one host; "group": by
            the process group; "auto": symmetric between GPUs of one host, otherwise the group.
            `attend.transport(device)` returns the choice.
        timeout: Seconds to wait for a transfer (with NCCL, the group's own timeout applies).

    Returns:
        Attention, to be called on every rank with that rank's part of q, k and v, and the other arguments of
        `flashspan.attention`. `attend.shard(x, dim)` is this rank's part of a whole tensor.

    Raises:
        ValueError: For settings that do not fit one another or the group.

    Example:
            attend = context_parallel(dist.group.WORLD, layout="zigzag", strategy="ring")
            q, k, v = (attend.shard(x, dim=2) for x in whole)
            out = attend(q, k, v, causal=True)
    """
    settings = Settings(
        layout, strategy, across, sizes, head_chunks, num_tokens, backend, deterministic, transport, timeout
    )
    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None
    if strategy == "hybrid":
        if not isinstance(group, DeviceMesh) or group.ndim != 2:
            raise ValueError(
                f"hybrid needs a DeviceMesh of two dimensions, (across, ulysses): got {group}; "
                f'make one with init_device_mesh("cpu", (2, 4))'
            )
        check_grid(group.mesh)
        outer, inner = group.get_group(0), group.get_group(1)
    else:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"{strategy} needs a group or a mesh of one dimension: got {group}; slice it by name")
            group = group.get_group()
        if isinstance(group, str):
            raise ValueError(f"group must be a process group, a DeviceMesh or None: got {group!r}")
        outer, inner = (None, group) if strategy == "ulysses" else (group, None)
    outer_transport = GroupTransport(outer, slow_group=slow_group, timeout=timeout)
    settings.check_sizes(outer_transport.num_ranks)
    inner_transport = GroupTransport(inner, timeout=timeout)
    return ContextAttention(
        SymmetricTransport(outer_transport, transport), SymmetricTransport(inner_transport, transport), settings
    )


class ContextAttention:
    """Attention over a group. This rank has the number `rank` and the tokens `placement(num_tokens).ranges[rank]`."""

    def __init__(self, outer: SymmetricTransport, inner: SymmetricTransport, settings: Settings) -> None:
        self.outer, self.inner, self.settings = outer, inner, settings
        self.rank = outer.rank * inner.num_ranks + inner.rank
        self.num_ranks = outer.num_ranks * inner.num_ranks
        self.local: LocalAttention = Chosen(settings.backend, settings.deterministic)
        self._cores: OrderedDict[Any, Core] = OrderedDict()
        self._versions = _NO_MASK
        self._digested: tuple[object, int] = (None, digest(None))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        mask: Mask | Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        return_lse: bool = False,
        **unknown: Any,
    ) -> Any:
        """Return this rank's rows of attention over all ranks' tokens: out, or with `return_lse` (out, lse).

        The arguments are those of `flashspan.attention`. q [B, H, T, D], k and v [B, K, T, D] are this rank's shards of
        the same T tokens; the mask is that of the whole sequence. Dropout drops the same elements as one device with
        the same seed; without a seed, rank 0 draws it (see `flashspan.attention` about generators and checkpointing).
        """
        if unknown:
            raise unknown_argument(unknown)
        if self.num_ranks == 1 and not in_kept_block():
            check_one_rank(self.settings, self.placement, q, k)
            if mask is not None or self._versions is not _NO_MASK:
                self._check_mask(mask)
            return attention(  # type: ignore[call-overload, misc]
                q, k, v, causal=causal, window=window, mask=mask, scale=scale, dropout=dropout, return_lse=return_lse,
                seed=seed, generator=generator, backend=self.settings.backend,
                deterministic=self.settings.deterministic,
            )  # fmt: skip
        refuse_transforms()
        self.outer.caller = self.inner.caller = threading.get_ident()
        q, k, v = autocast(q, k, v)
        core = self._core(q, k, v, causal, window, mask, scale, dropout, seed, generator)
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        drop = None
        if dropout > 0:
            seeds = draw_seed(q.device, seed, generator)
            if seed is None:
                seeds.fill_(self._gather([int(seeds)])[0][0])
            drop = Dropout(float(dropout), seeds)
        with torch.autocast(q.device.type, enabled=False):  # sums stay float32
            out, lse = Attend.apply(q, k, v, core, Options(scale_of(q, scale), k.shape[1], drop))
        return (out, lse) if return_lse else out

    def _check_mask(self, mask: object) -> None:
        """RuntimeError if the mask was used in the last call and has been changed since."""
        if not isinstance(mask, (Rows, Blocks)):
            self._versions = _NO_MASK
            return
        last, versions = self._versions
        if mask is last:
            check_unchanged(mask, versions)
        self._versions = mask, mask_versions(mask)

    def __deepcopy__(self, memo: object) -> ContextAttention:
        """Return self: a copy of a model uses the same group."""
        return self

    def placement(self, num_tokens: int) -> Placement:
        """The tokens of each rank, for a sequence of this length."""
        outer, inner = self.outer.num_ranks, self.inner.num_ranks
        if outer == 1:
            return place(self.settings.layout, num_tokens, inner)
        return deal(place(self.settings.layout, num_tokens, outer), inner)

    def positions(self, num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of this rank's tokens, int64 [T_rank]."""
        return self.placement(num_tokens).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of a whole tensor."""
        return self.placement(x.size(dim)).shard(x, dim, self.rank)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor from all ranks' shards, on every rank. Not differentiable."""
        x = x.detach().movedim(dim, 0)
        gathered = self._gather([len(x), digest((x.dtype, x.shape[1:]))])
        if len({kind for _, kind in gathered}) > 1:
            raise ValueError(
                f"all ranks must agree on the dtype of the shards, and on their shape except in dimension {dim}: "
                f"rank {self.rank} has {x.dtype} and {tuple(x.movedim(0, dim).shape)}"
            )
        sizes = [size for size, _ in gathered]
        placement = self.placement(sum(sizes))
        rows = [sizes[i : i + self.inner.num_ranks] for i in range(0, len(sizes), self.inner.num_ranks)]
        row = torch.cat(all_gather(self.inner, x, rows[self.outer.rank]))
        whole = torch.cat(all_gather(self.outer, row, [sum(sizes) for sizes in rows]))
        return placement.unshard(whole.split(sizes), 0).movedim(0, dim)

    def transport(self, device: torch.device | str) -> str:
        """The transport for tensors on this device, and why it was chosen. The first call is a collective."""
        transports = [transport for transport in (self.outer, self.inner) if transport.num_ranks > 1]
        reached = dict.fromkeys(str(transport.reach(torch.device(device))) for transport in transports)
        return "; ".join(reached) or "none: one rank"

    @property
    def bytes_sent(self) -> int:
        """The bytes of data this rank has sent so far."""
        return self.outer.bytes_sent + self.inner.bytes_sent

    def _core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        window: int | tuple[int, int] | None,
        mask: Mask | Tensor | None,
        scale: float | None,
        dropout: float,
        seed: int | None,
        generator: torch.Generator | None,
    ) -> Core:
        """The core for this call, cached. Before a new core is made, all ranks compare the call."""
        window = tuple(window) if isinstance(window, list) else window
        try:
            check_inputs(q, k, v, dropout, scale)
            check_same_tokens(q, k)
            check_mask(mask)
            check_seed(seed, generator)
            if window is not None:
                window_band(window)
            if isinstance(mask, Tensor):
                num = 0 if 0 in mask.shape[-2:] else max(mask.shape[-2:], default=0)  # all tokens; size 1 broadcasts
                declared = self.settings.num_tokens
                num = num if num != 1 or declared is None else declared
                mask = mask_of(mask, q, num, num)
        except ValueError as error:  # perhaps on this rank only: `_compare` raises it on all ranks
            try:
                self._compare(dict.fromkeys(COMPARED, 0), 0, str(error))
            except ExchangeError as failure:  # the others had agreed on this call before: they compare nothing
                raise error from failure
        num_tokens = mask.num_keys if isinstance(mask, (Rows, Blocks)) else self.settings.num_tokens
        self._check_mask(mask)
        if self._digested[0] is not mask:  # the layers of a model share a mask: hash it once
            self._digested = mask, digest(mask)
        rest = (causal, window, self._digested[1], scale_of(q, scale), dropout, seed is None)
        call = (*((tuple(x.shape), x.dtype, x.device) for x in (q, k, v)), rest)
        if num_tokens is None or (call, num_tokens) not in self._cores:
            num_tokens = self._agree(q, k, v, mask, repr((rest, seed)), dropout)
        key = (call, num_tokens)
        if key not in self._cores:
            whole = [x.new_empty((*x.shape[:2], num_tokens, x.shape[3]), device="meta") for x in (q, k)]
            resolved = resolve_mask(*whole, causal=causal, window=window, mask=mask)
            self._cores[key] = self._build(resolved, num_tokens, q.shape[1], k, digest(rest))
            if len(self._cores) > PLANS_KEPT:
                self._cores.popitem(last=False)
        self._cores.move_to_end(key)
        return self._cores[key]

    def _require_symmetric(self, device: torch.device) -> None:
        """Raise the same ValueError on every rank if transport is `symmetric` and a rank cannot use it."""
        if self.outer.transport != "symmetric":
            return
        problem = ""
        for transport in (self.outer, self.inner):
            try:
                transport.reach(device)
            except ValueError as error:
                problem = problem or str(error)
        for row in self._gather(encode(problem)):
            if text := decode(row):
                raise ValueError(text)

    def _build(self, mask: Mask, num_tokens: int, num_heads: int, k: Tensor, call: int) -> Core:
        self._require_symmetric(k.device)
        settings, U, num_kv_heads = self.settings, self.inner.num_ranks, k.shape[1]
        outer = place(settings.layout, num_tokens, self.outer.num_ranks) if self.outer.num_ranks > 1 else None
        rows = outer or contiguous(num_tokens, 1)
        options = {"sizes": tuple(settings.sizes or ())} if settings.schedule == "double_ring" else {}
        kv_heads = 0
        if num_kv_heads:
            share = share_heads(num_heads, num_kv_heads, U)[self.inner.rank]
            kv_heads = len(share.kv)
            mask = mask.heads(share.q) if isinstance(mask, Blocks) else mask
        schedule = GENERATORS[settings.schedule](Visibility(rows, mask), **options)
        head_chunks = settings.head_chunks
        if head_chunks is None:
            shard = -(-num_tokens // self.outer.num_ranks)
            head = 2 * k.shape[0] * shard * k.shape[3] * k.element_size()
            head_chunks = 1 if k.is_cuda or self.outer.num_ranks == 1 else kv_heads * head // MESSAGE_BYTES
        schedule = in_chunks(schedule, max(1, min(head_chunks, kv_heads)))
        core: Core = Scheduled(Plan(rows, mask, schedule, max(1, kv_heads), call), self.outer, self.local)
        if U > 1:
            row = contiguous(rows.sizes[self.outer.rank], U) if outer else place(settings.layout, num_tokens, U)
            core = Ulysses(core, self.inner, row, call)
        return core

    def _agree(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, rest: str, dropout: float) -> int:
        """Compare the call on all ranks. Return the number of all tokens; raise the same ValueError on every rank if
        their calls differ."""
        problem = ""
        try:  # if raised later, the other ranks would wait for a rank whose backend refuses the call
            mask = EVERYTHING if mask is None else mask
            asked = self.settings
            choose(q, mask, dropout=dropout > 0, deterministic=asked.deterministic, backend=asked.backend)
        except ValueError as error:
            problem = str(error)
        mine = {
            "strategy, layout or options": digest(self.settings.compared()),
            "kind of device": digest(q.device.type),
            "batch": q.shape[0],
            "query heads": q.shape[1],
            "kv heads": k.shape[1],
            "head size": q.shape[3],
            "dtype": FLOATS.index(q.dtype),
            "causal, window, mask, scale, dropout or seed": digest(rest),
        }
        return self._compare(mine, q.shape[2], problem)

    def _compare(self, mine: dict[str, int], num_mine: int, problem: str) -> int:
        """`_agree`, given this rank's compared values, number of tokens and error message (empty if none)."""
        rows = self._gather([*mine.values(), num_mine, *encode(problem)])
        for rank, row in enumerate(rows):
            if text := decode(row[len(COMPARED) + 1 :]):
                raise ValueError(f"rank {rank}: {text}")
        for name, values in zip(COMPARED, zip(*rows, strict=True), strict=False):
            if len(set(values)) > 1:
                got = [str(FLOATS[x]).removeprefix("torch.") for x in values] if name == "dtype" else list(values)
                text = f": got [{', '.join(map(str, got))}] on ranks 0 to {len(rows) - 1}"
                shown = text if max(values) < 2**31 else ""
                raise ValueError(f"all ranks must agree on {name}{shown}; every rank must make the same call")
        sizes = tuple(row[len(COMPARED)] for row in rows)
        num_tokens = sum(sizes) if self.settings.num_tokens is None else self.settings.num_tokens
        make = partial(self.placement, num_tokens)
        placement = agree_on_placement(make, self._gather) if callable(self.settings.layout) else make()
        check_shards(self.settings.layout, placement, sizes)
        return num_tokens

    def _gather(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, in rank order."""
        flat = [number for part in self.inner.agree(row) for number in part]
        rows = []
        for part in self.outer.agree(flat):
            rows += [part[i : i + len(row)] for i in range(0, len(part), len(row))]
        return rows
