"""Data parallelism: every rank holds the model, sees its part of the batch, and the gradients are averaged.

    model = DataParallel(model)             # parameters of the first rank, from here on
    loss(model(batch)).backward()           # when backward returns, .grad is the average over ranks
    optimizer.step()

The four modes differ in how gradients are packed and when they travel, and in nothing else: each mode is a list of
buckets, and a bucket is one flat tensor that is summed over ranks in rank order (`sum_in_rank_order`), so all modes
give the same bits.

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
from concurrent.futures import Future, ThreadPoolExecutor
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

from .collectives import copy_from_first, local_part, part_like, sum_in_rank_order, timeout_of

Mode = Literal["naive", "flat", "overlapped", "bucketed"]


@dataclass
class Traffic:
    """Seconds of the last reduction: spent communicating, and spent waiting for it after backward had ended."""

    communication: float = 0.0
    exposed: float = 0.0

    @property
    def hidden(self) -> float:
        """The fraction of communication that backward hid."""
        return max(0.0, 1.0 - self.exposed / self.communication) if self.communication else 0.0


class DataParallel(nn.Module):
    """Runs `module`, and averages (or sums) its gradients over the ranks of `group` by the time backward returns.

    After backward a parameter's `.grad` is a view of its bucket, which the next backward overwrites: clone what is to
    be kept. Use `op="sum"` where the loss is already divided by the global count, and empty the gradients between
    backward passes or accumulate under `no_sync()`: a gradient reduced twice is summed twice. A parameter that no rank
    used keeps `.grad = None`; one that only some ranks used is an error.
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
                f'bucket_mb must be a positive number: got {bucket_mb!r}; mode="overlapped" is one bucket per parameter'
            )
        self.module, self.mode, self.op = module, mode, op
        self.traffic = Traffic()
        named = [*module.named_parameters(), *module.named_buffers()]
        require_same("the model", [f"{name} {_describe(tensor)}" for name, tensor in named], group)
        # Reductions run beside backward, which may have collectives of its own: they need a group of their own.
        self._group = _clone_group(group)
        self._num_ranks = dist.get_world_size(self._group)
        copy_from_first([*module.parameters(), *module.buffers()], self._group)
        self._signature = _signature(module)
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        stored = module.state_dict(keep_vars=True)
        self._stored_buffers = {name: (b.shape, b.dtype) for name, b in module.named_buffers() if name in stored}
        cap = {"naive": 0.0, "overlapped": 0.0, "flat": float("inf"), "bucketed": bucket_mb * 2**20}[mode]
        self._buckets = _pack([p for p in module.parameters() if p.requires_grad], cap, self._num_ranks)
        self._place: dict[Tensor, tuple[_Bucket, int]] = {
            p: (bucket, slot) for bucket in self._buckets for slot, p in enumerate(bucket.params)
        }
        # One thread reduces buckets in the order they are launched, the same on every rank.
        self._lane = ThreadPoolExecutor(1, "flashspan-reduce")
        self._num_launched = 0
        self._active = True
        # What the backward under way will call at its end; one that raised has let go of it.
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._fault: str | None = None
        for param in self._place:
            param.register_post_accumulate_grad_hook(_forget_with(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        # Called during its own backward, this is a checkpoint's recomputation: everything was said the first time.
        synced = self._active and torch.is_grad_enabled() and not self._in_backward()
        if synced:
            self._require_whole()
            self._fault = _compare(self._signature, _signature(self.module))
            if self.training and self._stored_buffers:
                copy_from_first(self._current_buffers(), self._group)
        out = self.module(*args, **kwargs)
        if synced:
            # Even a rank where no parameter gets a gradient must take part.
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._on_output, self._parameter_below(leaf.grad_fn)))
        return out

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add to the local gradients; the next one outside it reduces the total."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; a failure on any rank is a ValueError on every rank."""
        result, fault = None, None
        try:
            result = self.module.load_state_dict(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            fault = str(error)
        raise_together(fault, self._group)
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As part of another module: the names are the module's own here too."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _in_backward(self) -> bool:
        return self._ending is not None and self._ending() is not None

    def _require_whole(self) -> None:
        if self._num_launched:
            raise RuntimeError("an earlier backward was interrupted after gradients had left: wrap the module again")

    def _begin(self) -> None:
        """At the first sign of a backward: see to it that it ends in a reduction."""
        if self._in_backward():
            return
        self._require_whole()
        for bucket in self._buckets:
            bucket.reset()
        finish = partial(self._finish)
        self._ending = weakref.ref(finish)
        Variable._execution_engine.queue_callback(finish)

    def _on_output(self, parameter: Node | None, _: Tensor) -> None:
        # autograd.grad comes by here too, adds to no parameter's gradient, and leaves nothing to reduce.
        if self._active and (parameter is None or _accumulates(parameter)):
            self._begin()

    def _parameter_below(self, start: Node | None) -> Node | None:
        """Where a gradient that enters the graph at `start` would be added to a parameter of ours, if anywhere."""
        ahead, seen = [start], set[Node]()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            if node.name() == "torch::autograd::AccumulateGrad" and getattr(node, "variable", None) in self._place:
                return node
            seen.add(node)
            ahead += [below for below, _ in node.next_functions]
        return None

    def _on_gradient(self, param: Tensor) -> None:
        if not self._active:
            return
        self._begin()
        if self.mode not in ("overlapped", "bucketed"):
            return
        bucket, slot = self._place[param]
        if bucket.job is not None:
            self._fault = (
                f"the gradient of {self._names[param]!r} came twice in one backward; "
                'use checkpoint(use_reentrant=False), or mode="flat"'
            )
            return
        self._put(bucket, slot)
        # The last bucket waits for the end of backward, which its last gradient is: it carries what else is to be said.
        while self._num_launched < len(self._buckets) - 1 and not self._buckets[self._num_launched].awaited:
            self._launch()

    def _put(self, bucket: _Bucket, slot: int) -> None:
        try:
            bucket.put(slot)
        except (RuntimeError, TypeError) as error:
            bucket.leave_out(slot)
            self._fault = f"the gradient of {self._names[bucket.params[slot]]!r} cannot be reduced: {error}"

    def _launch(self) -> None:
        bucket = self._buckets[self._num_launched]
        self._num_launched += 1
        ready = torch.cuda.current_stream(bucket.flat.device).record_event() if bucket.flat.is_cuda else None
        bucket.job = self._lane.submit(self._reduce, bucket.flat, ready)

    def _reduce(self, flat: Tensor, ready: torch.cuda.Event | None) -> float:
        """Sum one bucket over ranks, on the lane; the seconds it took. On a GPU, on the lane's own stream."""
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
        """At the end of backward: launch what is left, wait for all, and see that every rank brought the same."""
        start = time.perf_counter()
        self._ending = None
        for bucket in self._buckets[self._num_launched :]:
            for slot in sorted(bucket.awaited):
                if bucket.params[slot].grad is None:
                    bucket.leave_out(slot)
                else:
                    self._put(bucket, slot)
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
            for slot, (param, (had, lacked)) in enumerate(zip(bucket.params, bucket.flags.tolist(), strict=True)):
                if lacked and not had:
                    param.grad = None
                elif lacked:
                    agreed = False
                    if slot in bucket.left_out:
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
        """The buffers that are stored with the module; something of the same shape in place of a lost one."""
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


class _Bucket:
    """Gradients that travel together: one flat tensor, a view of it per parameter, and two flags per gradient: whether
    this rank had it, whether this rank lacked it.

    Flags are summed with the gradients, so that each rank learns whether any rank had or lacked each of them at no
    extra cost. Sums are only compared with 0: in 16 bits, 511 of 512 ranks would count as all.
    """

    def __init__(self, params: list[nn.Parameter], num_ranks: int) -> None:
        self.params = params
        sizes = [local_part(p).numel() for p in params]
        used = sum(sizes) + 2 * len(params)
        self.flat = local_part(params[0]).new_zeros(used + -used % num_ranks)
        *pieces, flags, _ = self.flat.split([*sizes, 2 * len(params), self.flat.numel() - used])
        self.flags = flags.view(-1, 2)
        self.had, self.lacked = self.flat.new_tensor([[1.0, 0.0], [0.0, 1.0]])
        self.views = [piece.view(local_part(p).shape) for piece, p in zip(pieces, params, strict=True)]
        self.reset()

    def reset(self) -> None:
        self.awaited = set(range(len(self.params)))
        self.left_out: set[int] = set()
        self.job: Future[float] | None = None

    def put(self, slot: int) -> None:
        """Move a parameter's gradient into the bucket; from now on `.grad` is the bucket's view."""
        param, view = self.params[slot], self.views[slot]
        assert param.grad is not None
        grad = local_part(param.grad)
        if grad.shape != view.shape or grad.layout != view.layout:
            raise TypeError(
                f"got {tuple(grad.shape)} {grad.layout}, the parameter had {tuple(view.shape)} {view.layout}"
            )
        if grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad)
            param.grad = part_like(param, view)
        self._flag(slot, had=True)
        self.awaited.discard(slot)

    def leave_out(self, slot: int) -> None:
        """Send zeros for a gradient this rank does not have."""
        self.views[slot].zero_()
        self._flag(slot, had=False)
        self.awaited.discard(slot)
        self.left_out.add(slot)

    def _flag(self, slot: int, *, had: bool) -> None:
        self.flags[slot].copy_(self.had if had else self.lacked)


def _pack(params: list[nn.Parameter], cap: float, num_ranks: int) -> list[_Bucket]:
    """Buckets of at most `cap` bytes (or one parameter) in reverse order, the order in which gradients come."""
    filled: list[list[nn.Parameter]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for param in reversed(params):
        local = local_part(param)
        kind = (local.dtype, local.device)
        bucket, size = current.get(kind, ([], 0))
        if not bucket or size + local.nbytes > cap:
            bucket, size = [], 0
            filled.append(bucket)
        bucket.append(param)
        current[kind] = (bucket, size + local.nbytes)
    return [_Bucket(bucket, num_ranks) for bucket in filled]


def _accumulates(leaf: Node) -> bool:
    """Whether the pass under way will add to a leaf's gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # autograd.grad was asked for this very leaf
        return False


def _describe(param: Tensor) -> str:
    kind = str(param.dtype).removeprefix("torch.")
    return f"{tuple(param.shape)} {kind}{'' if param.requires_grad else ' frozen'}"


def _forget_with(wrapper: DataParallel) -> Callable[[Tensor], None]:
    """A hook that does nothing once the wrapper is gone, so that a module can be wrapped again."""
    reference = weakref.ref(wrapper)

    def hook(param: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner._on_gradient(param)

    return hook


_Signature = dict[str, tuple[int, torch.Size, torch.dtype, torch.device, bool]]


def _signature(module: nn.Module) -> _Signature:
    """What must not change in a module once it is wrapped."""
    return {n: (id(p), p.shape, p.dtype, p.device, p.requires_grad) for n, p in module.named_parameters()}


def _compare(was: _Signature, now: _Signature) -> str | None:
    """What changed in a module since it was wrapped, in words."""
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
    """A second group of the same ranks, backend and timeout. A collective of these ranks alone."""
    original = group or dist.group.WORLD
    assert original is not None
    ranks = dist.get_process_group_ranks(original)
    alone = len(ranks) < dist.get_world_size()  # ranks outside the group do not call this
    if alone:
        _require_like_numbers_of_groups(ranks, original)
    timeout = timeout_of(original)
    clone = dist.new_group(ranks, timeout=timeout, backend=dist.get_backend(original), use_local_synchronization=alone)
    assert isinstance(clone, dist.ProcessGroup)
    return clone


def _require_like_numbers_of_groups(ranks: list[int], group: dist.ProcessGroup) -> None:
    """ValueError on every rank unless all are in as many groups. A collective.

    torch names a group that its ranks make without the others by how many groups a rank is in, and ranks that have
    different names for it wait for each other until the timeout.
    """
    numbers = [0] * len(ranks)
    dist.all_gather_object(numbers, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(numbers)) > 1:
        counts = ", ".join(f"{number} on rank {rank}" for rank, number in zip(ranks, numbers, strict=True))
        raise ValueError(
            f"data parallelism over a part of the ranks needs these to be in as many groups each: got {counts}; wrap "
            "the model before making groups that only some of them are in, or take all groups from one mesh"
        )
