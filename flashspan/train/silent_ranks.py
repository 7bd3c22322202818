"""Find the ranks that a failed collective was waiting for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from flashspan.context.transport import ExchangeError
from flashspan.launch import SilentRank

PATIENCE = 4.0
"""Seconds that a failed rank waits for the others to fail too."""


@contextlib.contextmanager
def report_silent_ranks(when: str) -> Iterator[None]:
    """If communication fails or times out, raise SilentRank with the ranks that did not fail too: they are stalled or
    dead.

    Every rank that fails sets a key in the group's store. A rank that has set none after PATIENCE seconds is silent.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if not _is_communication_error(error):
            raise
        store = dist.distributed_c10d._get_default_store()
        notes = {rank: f"flashspan/failed/{rank}" for rank in range(dist.get_world_size())}
        store.set(notes[dist.get_rank()], when)
        deadline = time.monotonic() + PATIENCE
        silent = list(notes)
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            silent = [rank for rank in silent if not store.check([notes[rank]])]
        if not silent:
            raise
        ranks = ", ".join(map(str, silent))
        first = str(error).partition("\n")[0]
        raise SilentRank(f"rank {ranks} did not answer during {when}: stalled or dead; first error: {first}") from error


def _is_communication_error(error: Exception) -> bool:
    """Whether communication with other ranks failed. gloo raises plain RuntimeErrors, recognised by their text."""
    known = isinstance(error, (dist.DistError, ExchangeError, TimeoutError))
    return known or any(word in str(error) for word in ("gloo", "Timed out", "Connection", "NCCL"))
