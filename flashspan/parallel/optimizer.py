"""Optimizer state sharded over ranks (ZeRO stage 1): each rank keeps, and steps, its share of the parameters.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

Gradients must already be reduced. Whole parameters are assigned to ranks, the largest first, each to the least loaded
rank, so an optimizer that treats parameters one by one gives the same bits as without sharding. A rank steps its share
chunk by chunk, and broadcasts each chunk while it steps the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from flashspan.agreement import raise_together, require_same
from flashspan.parallel.collectives import full_tensor, shard_like

from .collectives import is_dtensor, local_part

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class ShardedOptimizer(Optimizer):
    """An `optimizer_cls(params, **kwargs)` with its state sharded over the ranks of `group`.

    `state` is this rank's share only. `state_dict()` is a collective: it returns the whole state on every rank, in
    the format of `optimizer_cls`, and any number of ranks (or a plain `optimizer_cls`) can load it.
    """

    def __init__(
        self,
        params: Params,
        optimizer_cls: type[Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        chunk_mb: float = 25.0,
        **kwargs: Any,
    ) -> None:
        if issubclass(optimizer_cls, LBFGS):
            raise ValueError("LBFGS steps all parameters as one vector and cannot be sharded: use a plain LBFGS")
        self._cls, self._kwargs, self._group = optimizer_cls, kwargs, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._cap = chunk_mb * 2**20
        self._owner: dict[Tensor, int] = {}
        self._load = [0] * self._num_ranks
        self._rounds: list[_Round] = []
        # An optimizer of one element, to get the defaults that the class adds to these arguments.
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1, 1))], **kwargs).defaults
        super().__init__(params, defaults)  # calls add_param_group
        shapes = [f"{tuple(p.shape)} {p.dtype}" for param_group in self.param_groups for p in param_group["params"]]
        require_same("the optimizer's parameters", shapes, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Assign one more group of parameters to ranks."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        params = self.param_groups[index]["params"]
        for param in sorted(params, key=lambda p: -p.numel()):  # stable: the same order on every rank
            owner = self._load.index(min(self._load))
            self._owner[param] = owner
            self._load[owner] += param.numel()
        shares = [_chunk([p for p in params if self._owner[p] == rank], self._cap) for rank in range(self._num_ranks)]
        for position in range(max(map(len, shares))):
            chunks = [share[position] if position < len(share) else [] for share in shares]
            mine = chunks[self._rank]
            inner = self._cls(mine, **self._kwargs) if mine else None
            if inner is not None:
                self.state.update(inner.state)  # some optimizers create state in the constructor
                inner.state = self.state  # all inner optimizers share one dictionary, keyed by parameter
            self._rounds.append(_Round(index, chunks, inner))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's parameters and receive the others. A closure is evaluated once, before the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        in_flight: deque[_Broadcast] = deque()
        for round_ in self._rounds:
            round_.step(self.param_groups[round_.group_index])
            in_flight.extend(
                _Broadcast(chunk, owner, self._rank, self._group) for owner, chunk in enumerate(round_.chunks) if chunk
            )
            while len(in_flight) > 2 * self._num_ranks:  # bounds the memory of broadcasts in flight
                in_flight.popleft().wait()
        while in_flight:
            in_flight.popleft().wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on the CPU of every rank: `{"state": {index: ...}, "param_groups": [...]}`. A collective."""
        params = [p for group in self.param_groups for p in group["params"]]
        number = {param: index for index, param in enumerate(params)}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [number[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        mine = {i: self._local_state(p) for i, p in enumerate(params) if self._owner[p] == self._rank}
        # Ranks exchange outlines of their state: numbers and one-element tensors; shapes and dtypes of other tensors.
        plan = {i: {key: _outline(value) for key, value in entry.items()} for i, entry in mine.items()}
        plans: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(plans, plan, group=self._group)
        state: dict[int, dict[str, Any]] = {}
        for index, param in enumerate(params):
            owner = self._owner[param]
            state[index] = {}
            for key, outline in plans[owner][index].items():
                if isinstance(outline, _Outline):
                    held = mine[index][key] if owner == self._rank else None
                    state[index][key] = self._fetch(held, outline, owner, local_part(param).device)
                else:
                    state[index][key] = outline
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's share of a whole state. ValueError on all ranks if the state is invalid on any rank."""
        raise_together(self._mismatch(state_dict), self._group)
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        self.state.clear()
        for round_ in self._rounds:
            if round_.inner is None:
                continue
            mine = round_.chunks[self._rank]
            share = {i: self._shard_state(p, state_dict["state"].get(index[p], {})) for i, p in enumerate(mine)}
            group = {k: v for k, v in self.param_groups[round_.group_index].items() if k != "params"}
            # The optimizer's own load_state_dict chooses the values to convert to the parameter's device and dtype.
            round_.inner.load_state_dict(
                {"state": share, "param_groups": [{**group, "params": list(range(len(mine)))}]}
            )
            self.state.update(round_.inner.state)
            round_.inner.state = self.state

    def _local_state(self, param: Tensor) -> dict[str, Any]:
        return {k: full_tensor(v) if isinstance(v, Tensor) else v for k, v in self.state.get(param, {}).items()}

    def _shard_state(self, param: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()}
        return {
            k: shard_like(param, v) if isinstance(v, Tensor) and v.shape == param.shape else v
            for k, v in copies.items()
        }

    def _fetch(self, held: Tensor | None, outline: _Outline, owner: int, device: torch.device) -> Tensor:
        if held is None:
            held = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        sent = held.to(device).contiguous()
        dist.broadcast(sent, group=self._group, group_src=owner)
        return sent.cpu().clone()

    def _mismatch(self, state_dict: dict[str, Any]) -> str | None:
        """The reason why a state cannot be loaded on this rank; None if it can."""
        missing_parts = {"state", "param_groups"} - set(state_dict)
        if missing_parts:
            return (
                f"an optimizer state has the keys state and param_groups: {', '.join(sorted(missing_parts))} is missing"
            )
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        if ours != theirs:
            return f"the parameter groups must have the same sizes: the state has {theirs}, the optimizer has {ours}"
        known, given = set(range(sum(ours))), set(state_dict["state"])
        if extra := sorted(map(str, given - known)):
            return f"the state has entries for unknown parameters {', '.join(extra)}: there are {sum(ours)} parameters"
        if given and (missing := sorted(known - given)):
            return (
                f"the state has no entry for parameters {', '.join(map(str, missing))} of {sum(ours)}; "
                "give an empty one ({}) to a parameter that was never stepped"
            )
        return None


class _Round:
    """One chunk per rank, all of one parameter group. The owner of a chunk steps it, then broadcasts it."""

    def __init__(self, group_index: int, chunks: list[list[Tensor]], inner: Optimizer | None) -> None:
        self.group_index, self.chunks, self.inner = group_index, chunks, inner

    def step(self, hyper: dict[str, Any]) -> None:
        """Step this rank's chunk with the outer group's settings, which a scheduler may have changed."""
        if self.inner is not None:
            group = self.inner.param_groups[0]
            group.update({key: value for key, value in hyper.items() if key not in ("params", "param_names")})
            self.inner.step()


class _Broadcast:
    """The broadcast of a chunk of updated parameters from its owner."""

    def __init__(self, chunk: list[Tensor], owner: int, rank: int, group: dist.ProcessGroup | None) -> None:
        self.targets = [local_part(p) for p in chunk]
        self.receiving = owner != rank
        if self.receiving:
            self.flat = self.targets[0].new_empty(sum(t.numel() for t in self.targets))
        else:
            self.flat = torch.cat([t.reshape(-1) for t in self.targets])
        self.work = (
            dist.broadcast(self.flat, group=group, group_src=owner, async_op=True) if self.flat.numel() else None
        )

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.receiving:
            for target, piece in zip(self.targets, self.flat.split([t.numel() for t in self.targets]), strict=True):
                target.copy_(piece.view(target.shape))


class _Outline:
    """The shape and dtype of a tensor that will be sent."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Outline(value) if value.numel() > 1 else value.detach().cpu().clone()
    return value


def _chunk(params: list[Tensor], cap: float) -> list[list[Tensor]]:
    """Split parameters, in order, into chunks of at most `cap` bytes (or one parameter) of one dtype and device."""
    chunks: list[list[Tensor]] = []
    kind: Any = None
    size = 0
    for param in params:
        local = local_part(param)
        # And of one mesh: optimizers that step many parameters in one call need this.
        this = (param.dtype, param.device, param.device_mesh if is_dtensor(param) else None)
        if this != kind or size + local.nbytes > cap:
            chunks.append([])
            kind, size = this, 0
        chunks[-1].append(param)
        size += local.nbytes
    return chunks
