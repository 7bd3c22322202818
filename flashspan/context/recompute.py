"""Checkpointing that never runs attention's forward twice.

    from torch.utils.checkpoint import checkpoint
    y = checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

Activation checkpointing throws a block's activations away and recomputes them in backward; with attention across
devices that would send every key round the ring once more. Here attention's out and lse are kept, 1 + 1/D times its
output, and handed back when the block is recomputed; everything else is recomputed as usual.
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
    """compute(), or what it returned when the block ran for the first time."""
    handler = _current.get()
    return compute() if handler is None else handler(compute)


class Recording(AbstractContextManager[None]):
    """The block's first run: what is kept goes on the tape, and how often each of it has been written to."""

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
    """The block's recomputation: each time it is entered the tape plays from its beginning."""

    def handler(self) -> Handler:
        tape = iter(self.tape)

        def replay(compute: Callable[[], Kept]) -> Kept:
            kept, versions = next(tape)
            if [x._version for x in kept] != versions:
                raise RuntimeError(
                    "attention's output was changed in place in a block that keeps it for its recomputation: make a "
                    "new tensor of it (out * 2, not out.mul_(2)), or checkpoint the block without keep_attention"
                )
            return kept

        return replay
