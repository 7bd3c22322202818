"""Data parallelism: every rank has the model and its part of the batch, and gradients are averaged over ranks.

    model = DataParallel(model)             # copies the first rank's parameters to all ranks
    loss(model(batch)).backward()           # when backward returns, .grad is the average over ranks
    optimizer.step()

The four modes differ only in how gradients are packed and when they are sent. Each mode is a list of buckets. A bucket
is one flat tensor that is summed over ranks in rank order (`sum_in_rank_order`), so results of all modes are bitwise
equal.

    naive       one bucket per parameter    after backward
    flat        one bucket                  after backward
    overlapped  one bucket per parameter    during backward
    bucketed    buckets of `bucket_mb`      during backward
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from flashspan.agreement import raise_together, require_same

from .buckets import Bucket, pack
from .collectives import copy_from_first, sum_in_rank_order, timeout_of

Mode = Literal["naive", "flat", "overlapped", "bucketed"]


@dataclass
class Traffic:
    """Seconds of the last reduction: all communication, and the exposed part, after backward had ended."""

    communication: float = 0.0
    exposed: float = 0.0

    @property
    def hidden(self) -> float:
        """The fraction of communication that overlapped with backward."""
        return max(0.0, 1.0 - self.exposed / self.communication) if self.communication else 0.0


class DataParallel(nn.Module):
    """Runs `module`, and averages (or sums) its gradients over the ranks of `group` by the time backward returns.

    After backward a parameter's `.grad` is a view of its bucket, which the next backward overwrites: clone it to keep
    it. Use `op="sum"` if the loss is already divided by the global count. Set gradients to None between backward
    passes, or accumulate them under `no_sync()`: a gradient that is reduced twice is summed twice. A parameter that no
    rank used keeps `.grad = None`; one that only some ranks used is an error.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: Mode = "bucketed",
        bucket_mb: float = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
        op: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}: got {mode!r}")
        if op not in ("mean", "sum"):
            raise ValueError(f'op must be "mean" or "sum": got {op!r}')
        if not isinstance(bucket_mb, (float, Real)) or not bucket_mb > 0:
            raise ValueError(
                f"bucket_mb must be a positive number: got {bucket_mb!r}; "
                'for one bucket per parameter use mode="overlapped"'
            )
        self.module, self.mode, self.op = module, mode, op
        self.traffic = Traffic()
        named = [*module.named_parameters(), *module.named_buffers()]
        require_same("the model", [f"{name} {_describe(tensor)}" for name, tensor in named], group)
        # Backward may issue other collectives while reductions run, so reductions need a separate group.
        self._group = _clone_group(group)
        self._num_ranks = dist.get_world_size(self._group)
        copy_from_first([*module.parameters(), *module.buffers()], self._group)
        self._signature = _signature(module)
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        stored = module.state_dict(keep_vars=True)
        self._stored_buffers = {name: (b.shape, b.dtype) for name, b in module.named_buffers() if name in stored}
        cap = {"naive": 0.0, "overlapped": 0.0, "flat": float("inf"), "bucketed": bucket_mb * 2**20}[mode]
        self._buckets = pack([p for p in module.parameters() if p.requires_grad], cap, self._num_ranks)
        self._place: dict[Tensor, tuple[Bucket, int]] = {
            p: (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.params)
        }
        # One thread reduces the buckets in the order of their launch, which is the same on every rank.
        self._thread = ThreadPoolExecutor(1, "flashspan-reduce")
        self._num_launched = 0
        self._active = True
        # The callback at the end of the current backward. If backward raises, autograd drops the callback.
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._fault: str | None = None
        for param in self._place:
            param.register_post_accumulate_grad_hook(_hook_of(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        # A forward during backward is the recomputation of a checkpoint: the first forward has done what follows.
        synced = self._active and torch.is_grad_enabled() and not self._in_backward()
        if synced:
            self._require_whole()
            self._fault = _compare(self._signature, _signature(self.module))
            if self.training and self._stored_buffers:
                copy_from_first(self._current_buffers(), self._group)
        out = self.module(*args, **kwargs)
        if synced:
            # A rank that computes no gradient must take part in the reduction too.
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._on_output, self._parameter_below(leaf.grad_fn)))
        return out

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add to the local gradients; the next one outside it reduces the sums."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module, with its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's state; a failure on any rank is a ValueError on every rank."""
        result, fault = None, None
        try:
            result = self.module.load_state_dict(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            fault = str(error)
        raise_together(fault, self._group)
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as a submodule of another module, whose state also has the wrapped module's own names."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _in_backward(self) -> bool:
        return self._ending is not None and self._ending() is not None

    def _require_whole(self) -> None:
        if self._num_launched:
            raise RuntimeError("an earlier backward was interrupted after gradients were sent: wrap the module again")

    def _begin(self) -> None:
        """Register `_finish` to run at the end of the current backward, unless this has been done."""
        if self._in_backward():
            return
        self._require_whole()
        for bucket in self._buckets:
            bucket.reset()
        finish = partial(self._finish)
        self._ending = weakref.ref(finish)
        Variable._execution_engine.queue_callback(finish)

    def _on_output(self, parameter: Node | None, _: Tensor) -> None:
        # autograd.grad calls this hook too, but adds to no parameter's gradient: there is nothing to reduce.
        if self._active and (parameter is None or _accumulates(parameter)):
            self._begin()

    def _parameter_below(self, start: Node | None) -> Node | None:
        """A node below `start` that adds to the gradient of a parameter of this module; None if there is none."""
        pending, seen = [start], set[Node]()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            if node.name() == "torch::autograd::AccumulateGrad" and getattr(node, "variable", None) in self._place:
                return node
            seen.add(node)
            pending += [below for below, _ in node.next_functions]
        return None

    def _on_gradient(self, param: Tensor) -> None:
        if not self._active:
            return
        self._begin()
        if self.mode not in ("overlapped", "bucketed"):
            return
        bucket, index = self._place[param]
        if bucket.job is not None:
            self._fault = (
                f"the gradient of {self._names[param]!r} was computed twice in one backward; "
                'use checkpoint(use_reentrant=False), or mode="flat"'
            )
            return
        self._put(bucket, index)
        # The last bucket is launched at the end of backward, because its flags also report faults.
        while self._num_launched < len(self._buckets) - 1 and not self._buckets[self._num_launched].awaited:
            self._launch()

    def _put(self, bucket: Bucket, index: int) -> None:
        try:
            bucket.put(index)
        except (RuntimeError, TypeError) as error:
            bucket.put_zeros(index)
            self._fault = f"the gradient of {self._names[bucket.params[index]]!r} cannot be reduced: {error}"

    def _launch(self) -> None:
        bucket = self._buckets[self._num_launched]
        self._num_launched += 1
        ready = torch.cuda.current_stream(bucket.flat.device).record_event() if bucket.flat.is_cuda else None
        bucket.job = self._thread.submit(self._reduce, bucket.flat, ready)

    def _reduce(self, flat: Tensor, ready: torch.cuda.Event | None) -> float:
        """Sum one bucket over ranks on the reduction thread (on a GPU, on a separate stream); return the seconds."""
        start = time.perf_counter()
        with torch.no_grad(), torch.cuda.stream(self._stream(flat.device) if ready else None):
            if ready is not None:
                ready.wait()
            sum_in_rank_order(flat, self._group, divisor=self._num_ranks if self.op == "mean" else 1)
        return time.perf_counter() - start

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if not hasattr(self, "_side"):
            self._side = torch.cuda.Stream(device)
        return self._side

    def _finish(self) -> None:
        """At the end of backward: launch the remaining buckets, wait for all, and check that ranks agree."""
        start = time.perf_counter()
        self._ending = None
        for bucket in self._buckets[self._num_launched :]:
            for index in sorted(bucket.awaited):
                if bucket.params[index].grad is None:
                    bucket.put_zeros(index)
                else:
                    self._put(bucket, index)
            if bucket is self._buckets[-1] and self._fault is not None:
                bucket.flags.fill_(float("nan"))
            self._launch()
        spent = [bucket.job.result() for bucket in self._buckets if bucket.job is not None]
        if hasattr(self, "_side"):
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self.traffic = Traffic(communication=sum(spent), exposed=time.perf_counter() - start)
        lacking: list[nn.Parameter] = []
        agreed = True
        for bucket in self._buckets:
            for index, (param, (had, lacked)) in enumerate(zip(bucket.params, bucket.flags.tolist(), strict=True)):
                if lacked and not had:
                    param.grad = None
                elif lacked:
                    agreed = False
                    if index in bucket.without_gradient:
                        lacking.append(param)
        self._num_launched = 0
        if not agreed:
            fault, self._fault = self._fault, None
            if fault is None and lacking:
                names = ", ".join(self._names[p] for p in lacking)
                fault = (
                    f"no gradient for {names}; a parameter must have a gradient on every rank or on none: "
                    "add 0 * parameter.sum() to the loss where it is unused, or freeze it"
                )
            raise_together(fault, self._group)

    def _current_buffers(self) -> list[Tensor]:
        """The buffers in the module's state. Replaces missing or changed buffers by empty ones, and notes a fault."""
        buffers = dict(self.module.named_buffers())
        found = []
        for name, (shape, dtype) in self._stored_buffers.items():
            buffer = buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (shape, dtype):
                self._fault = (
                    f"the module changed after it was wrapped: buffer {name} was {tuple(shape)}; wrap it again"
                )
                buffer = torch.empty(shape, dtype=dtype, device=next(iter(self._names)).device)
            found.append(buffer)
        return found


def _accumulates(leaf: Node) -> bool:
    """Whether the current backward adds to a leaf's gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # autograd.grad of this leaf
        return False


def _describe(param: Tensor) -> str:
    kind = str(param.dtype).removeprefix("torch.")
    return f"{tuple(param.shape)} {kind}{'' if param.requires_grad else ' frozen'}"


def _hook_of(wrapper: DataParallel) -> Callable[[Tensor], None]:
    """A hook that does nothing after the wrapper is deleted, so that a module can be wrapped again."""
    reference = weakref.ref(wrapper)

    def hook(param: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner._on_gradient(param)

    return hook


_Signature = dict[str, tuple[int, torch.Size, torch.dtype, torch.device, bool]]


def _signature(module: nn.Module) -> _Signature:
    """The properties of parameters that must not change after wrapping."""
    return {n: (id(p), p.shape, p.dtype, p.device, p.requires_grad) for n, p in module.named_parameters()}


def _compare(was: _Signature, now: _Signature) -> str | None:
    """A message about what has changed in a module since it was wrapped; None if nothing has."""
    if was == now:
        return None
    name = next(name for name in [*was, *now] if was.get(name) != now.get(name))

    def describe(signature: _Signature) -> str:
        if name not in signature:
            return "absent"
        _, shape, dtype, device, trained = signature[name]
        return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}{'' if trained else ', frozen'}"

    old, new = describe(was), describe(now)
    change = f"{old}, and is now {new}" if old != new else f"{old}, and is now another tensor like it"
    return f"the module changed after it was wrapped: {name} was {change}; wrap it again after changing it"


def _clone_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A second group with the same ranks, backend and timeout. A collective of these ranks only."""
    original = group or dist.group.WORLD
    assert original is not None
    ranks = dist.get_process_group_ranks(original)
    alone = len(ranks) < dist.get_world_size()  # ranks outside the group do not call this
    if alone:
        _require_equal_group_counts(ranks, original)
    timeout = timeout_of(original)
    clone = dist.new_group(ranks, timeout=timeout, backend=dist.get_backend(original), use_local_synchronization=alone)
    assert isinstance(clone, dist.ProcessGroup)
    return clone


def _require_equal_group_counts(ranks: list[int], group: dist.ProcessGroup) -> None:
    """ValueError on every rank unless all ranks are in the same number of process groups. A collective.

    If only some ranks make a group, each rank names it by the number of groups that it is in. Ranks with different
    names for the group would wait for each other until the timeout.
    """
    numbers = [0] * len(ranks)
    dist.all_gather_object(numbers, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(numbers)) > 1:
        counts = ", ".join(f"{number} on rank {rank}" for rank, number in zip(ranks, numbers, strict=True))
        raise ValueError(
            "if only some ranks wrap a model, these ranks must all be in the same number of process groups: got "
            f"{counts}; wrap the model before making groups that only some of these ranks join, or take all groups "
            "from one mesh"
        )
