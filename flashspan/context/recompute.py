"""Activation checkpointing that does not run attention's forward twice.

    from torch.utils.checkpoint import checkpoint
    y = checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

Activation checkpointing discards a block's activations and recomputes them in backward. With attention across devices,
this sends every key around the ring a second time. Here attention's out and lse (about 1 + 1/D times the output's size)
are kept and reused when the block is recomputed. Everything else is recomputed as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token

from torch import Tensor

Kept = tuple[Tensor, ...]
Handler = Callable[[Callable[[], Kept]], Kept]
_current: ContextVar[Handler | None] = ContextVar("keep_attention", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch.utils.checkpoint (use_reentrant=False): a context to record in, and one to replay."""
    tape: list[tuple[Kept, list[int]]] = []
    return Recording(tape), Replaying(tape)


def keep(compute: Callable[[], Kept]) -> Kept:
    """Return compute(), or, when a block is recomputed, the result from the block's first run."""
    handler = _current.get()
    return compute() if handler is None else handler(compute)


def in_kept_block() -> bool:
    """Whether the caller is inside a block that is checkpointed with `keep_attention`."""
    return _current.get() is not None


class Recording(AbstractContextManager[None]):
    """The first run of a block: results are recorded on the tape, with the version counters of their tensors."""

    def __init__(self, tape: list[tuple[Kept, list[int]]]) -> None:
        self.tape = tape
        self.token: Token[Handler | None] | None = None

    def handler(self) -> Handler:
        def record(compute: Callable[[], Kept]) -> Kept:
            kept = compute()
            self.tape.append((kept, [x._version for x in kept]))
            return kept

        return record

    def __enter__(self) -> None:
        self.token = _current.set(self.handler())

    def __exit__(self, *error: object) -> None:
        assert self.token is not None
        _current.reset(self.token)


class Replaying(Recording):
    """The recomputation of a block: replays the tape from its beginning each time the context is entered."""

    def handler(self) -> Handler:
        tape = iter(self.tape)

        def replay(compute: Callable[[], Kept]) -> Kept:
            kept, versions = next(tape)
            if [x._version for x in kept] != versions:
                raise RuntimeError(
                    "attention's output was changed in place, but its block keeps it for recomputation: make a new "
                    "tensor (out * 2, not out.mul_(2)), or checkpoint the block without keep_attention"
                )
            return kept

        return replay
