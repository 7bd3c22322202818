"""A process group for tests that enforces NCCL's rules on CPUs: real processes, over gloo.

    nccl_like.register()                                       # on every rank
    group = dist.new_group(ranks, backend="nccl_like")

- Operations posted between `_start_coalescing` and `_end_coalescing` are one batch, with one work for all of them. A
  send or a receive outside of a batch is refused: NCCL would open another communicator for the pair.
- Batches and collectives of a group run on one thread, in the order of the calls: each begins when the previous one
  has ended. A batch ends when each of its messages has arrived; a message moves when both of its batches have begun.
- There are no tags: the n-th receive from a peer takes the peer's n-th send.
- The first call on a group is a collective of all its ranks, which on NCCL connects them.

Cases in which NCCL would hang or give wrong data are errors: ends of different sizes, a message whose other end does
not come within the timeout, a buffer that is written to between the post and the wait. After an error, all later calls
on the group fail. Receive buffers contain NaN until the message arrives.

With `NcclLike.seed`, batches and messages are delayed at random, by the same times for the same seed.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

NAME = "nccl_like"
LONGEST = 0.004  # seconds of a delay


def register() -> None:
    """Make the backend known to torch, in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])
        dist.batch_isend_irecv = batch_isend_irecv


_batch_isend_irecv = dist.batch_isend_irecv


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
    """torch's function without a check: torch makes one batch of the operations only if `type(group) is ProcessGroup`,
    but a group that is written in Python is a subclass."""
    group = ops[0].group
    if not isinstance(group, NcclLike):
        return _batch_isend_irecv(ops)  # type: ignore[no-any-return]
    with _coalescing_manager(group, ops[0].tensor.device, async_ops=True) as manager:
        for op in ops:
            peer = "group_dst" if op.op is dist.isend else "group_src"
            op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
    return manager.works  # type: ignore[no-any-return]


class Call(dist.Work):  # type: ignore[misc]
    """One batch or collective in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"not done after {timeout.total_seconds():g} s")
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


@dataclass(frozen=True, eq=False)
class Message:
    """This rank's end of the n-th message from `src` to `dst`."""

    src: int
    dst: int
    count: int
    buffer: Tensor
    posted: Tensor  # the buffer's content at the post

    def __str__(self) -> str:
        return f"message {self.count} from rank {self.src} to rank {self.dst}"


class NcclLike(dist.ProcessGroup):  # type: ignore[misc]
    """The process group; see the module's docstring."""

    seed: ClassVar[int | None] = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout
        self.batches: list[list[Message]] = []  # all batches so far
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._batch: list[Message] | None = None
        self._counts: Counter[tuple[int, int]] = Counter()
        self._connected = False
        self._error: Exception | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Call] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]  # type: ignore[no-any-return]

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._batch is None, "batches do not nest"
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Call:
        batch, self._batch = self._batch, None
        assert batch, "a batch is begun before it ends, and holds something"
        self.batches.append(batch)
        number = len(self.batches) - 1
        return self._enqueue(lambda: self._exchange(batch, number))

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> None:
        self._post(self.rank(), dst, tensors[0])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> None:
        tensors[0].fill_(255)
        self._post(src, self.rank(), tensors[0])

    def _post(self, src: int, dst: int, buffer: Tensor) -> None:
        if self._batch is None:
            raise RuntimeError("a message is posted in a batch: NCCL opens another communicator for one by itself")
        if not self._connected:
            raise RuntimeError("the first call on a group is a collective: messages would connect only some ranks")
        if src == dst or buffer.dtype != torch.uint8 or not buffer.is_contiguous() or not buffer.numel():
            raise RuntimeError(f"rank {src} sends rank {dst} {buffer.dtype} {tuple(buffer.shape)}, not bytes to a peer")
        self._batch.append(Message(src, dst, self._counts[src, dst], buffer, buffer.clone()))
        self._counts[src, dst] += 1

    def allgather(self, *args: Any) -> Call:
        return self._collective(self._gloo.allgather, args)

    def allreduce(self, *args: Any) -> Call:
        return self._collective(self._gloo.allreduce, args)

    def broadcast(self, *args: Any) -> Call:
        return self._collective(self._gloo.broadcast, args)

    def _collective(self, call: Callable[..., dist.Work], args: Sequence[Any]) -> Call:
        self._connected = True
        return self._enqueue(lambda: call(*args).wait(self.timeout))

    def _enqueue(self, what: Callable[[], Any]) -> Call:
        call, mode = Call(), torch.is_inference_mode_enabled()  # inference mode is per thread

        def run() -> None:
            with torch.inference_mode(mode):
                what()

        self._calls.put((run, call))
        return call

    def _run(self) -> None:
        """Run one call after another."""
        while (item := self._calls.get()) is not None:
            what, call = item
            try:
                if self._error is not None:
                    raise RuntimeError(f"the group is broken: {self._error}")
                what()
            except Exception as error:
                self._error = self._error or error
                call.error = error
            call.ended.set()

    def _exchange(self, batch: list[Message], number: int) -> None:
        """Wait for the peers' batches, compare sizes, then send the bytes."""
        chance = random.Random(f"{self.seed} {self.group_name} {self.rank()} {number}")
        sides = [(m, *((m.dst, 0, 1) if m.src == self.rank() else (m.src, 1, 0))) for m in batch]
        self._delay(chance)
        sizes = [torch.tensor([m.buffer.numel()]) for m in batch]
        theirs = [torch.zeros_like(size) for size in sizes]
        greetings = []
        for (m, peer, mine, other), size, answer in zip(sides, sizes, theirs, strict=True):
            # A message uses three gloo tags; the first two send the sizes of both ranks.
            greetings.append(self._gloo.send([size], peer, 3 * m.count + mine))
            greetings.append(self._gloo.recv([answer], peer, 3 * m.count + other))
        deadline = time.monotonic() + self.timeout.total_seconds()
        for index, greeting in enumerate(greetings):
            m, peer, *_ = sides[index // 2]
            try:
                greeting.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                raise RuntimeError(
                    f"batch {number} of rank {self.rank()} has {m}: within {self.timeout.total_seconds():g} s rank "
                    f"{peer} began no batch with the other end"
                ) from error
        for m, size, answer in zip(batch, sizes, theirs, strict=True):
            if not torch.equal(size, answer):
                raise RuntimeError(f"{m} has {int(size)} bytes on rank {self.rank()} and {int(answer)} on the other")
        moves = []
        for m, peer, *_ in chance.sample(sides, len(sides)):
            self._delay(chance)
            if not torch.equal(m.buffer, m.posted):
                raise RuntimeError(f"the buffer of {m} was written to on rank {self.rank()} before its wait")
            move = self._gloo.send if m.src == self.rank() else self._gloo.recv
            moves.append(move([m.buffer], peer, 3 * m.count + 2))
        for move in moves:
            move.wait(self.timeout)
        self._delay(chance)

    def _delay(self, chance: random.Random) -> None:
        if self.seed is not None:
            time.sleep(LONGEST * chance.random() ** 3)  # usually short
