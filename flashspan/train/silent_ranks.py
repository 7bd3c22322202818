"""Which ranks an exchange was waiting for when it failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from flashspan.context.transport import ExchangeError
from flashspan.launch import SilentRank

PATIENCE = 4.0
"""Seconds that a rank which failed waits for the others to fail too."""


@contextlib.contextmanager
def report_silent_ranks(when: str) -> Iterator[None]:
    """Where an exchange fails or times out, say which ranks did not fail with this one: those it was waiting for.

    Every rank that fails leaves a note in the group's store; who has left none after a while is stalled or dead.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if not _is_of_exchange(error):
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
        who = ", ".join(map(str, silent))
        sign = str(error).partition("\n")[0]
        raise SilentRank(f"rank {who} did not answer in {when} and is stalled or dead; first sign: {sign}") from error


def _is_of_exchange(error: Exception) -> bool:
    """Whether others had a part in this failure. gloo's are plain RuntimeErrors, known by their words."""
    known = isinstance(error, (dist.DistError, ExchangeError, TimeoutError))
    return known or any(word in str(error) for word in ("gloo", "Timed out", "Connection", "NCCL"))
