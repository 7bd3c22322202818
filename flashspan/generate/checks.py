"""Checks of what the command and the function `generate` receive."""

from __future__ import annotations

import torch


def check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"the seed must be a whole number: got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"the seed must fit 64 bits, -2**63 to 2**64 - 1: got {seed}; choose one in this range")


def check_prompt(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are not text become lone surrogates
        raise ValueError(
            f"the prompt must be UTF-8 text: got {prompt!r}; convert it, for example with iconv"
        ) from error


def check_device(device: torch.device | str) -> torch.device:
    """The device, on which this machine can allocate."""
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:  # PyTorch without CUDA raises AssertionError
        reason = str(error).partition("\n")[0]
        raise ValueError(f'device must be one of this machine: got {device!r} ({reason}); use "cpu"') from error
    return place
