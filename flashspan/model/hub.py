"""Finds a model of the Hugging Face Hub by its name, such as meta-llama/Llama-3.2-1B: its folder on this machine.

    folder = find_model("meta-llama/Llama-3.2-1B")  # from the cache of huggingface_hub, or downloaded into it

A local folder of that name comes first, then the cache, then a download. Only safetensors and JSON files are
downloaded, no pickle.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .huggingface import files_to_read

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WANTED = ("*.safetensors", "*.json")
"""The files of a repository that a model is read from, including its tokenizer.json."""
UNWANTED = ("*/*", "consolidated*")
"""Files in subfolders, and the second copy of the weights that some repositories have, in the original format."""
RUNS = "runs"
"""The folder of `flashspan train`: a path that begins with it is a run, even if that does not exist yet."""


def is_hub_name(name: str) -> bool:
    """Whether a name is that of a model on the Hub: ORG/NAME, not a run, and no file or folder ORG exists here."""
    if not NAME.fullmatch(name):
        return False
    first = name.partition("/")[0]
    return first != RUNS and not os.path.lexists(first)


def find_model(name: str, *, download: bool = True, config_only: bool = False) -> str:
    """The folder of a model on the Hub. Any other name is returned unchanged; the code that reads it reports errors.

    Without `download` a model that is not in the cache is an error. `config_only`: only its config.json is needed.

    ValueError, with the command that downloads the model, if it cannot be found or downloaded, or if huggingface_hub is
    not installed.
    """
    if not is_hub_name(name):
        return name
    if importlib.util.find_spec("huggingface_hub") is None:
        raise _failure(name, "huggingface_hub is not installed: pip install 'flashspan[hub]'")
    from huggingface_hub import constants, snapshot_download

    wanted = ("config.json",) if config_only else WANTED
    try:
        cached = snapshot_download(name, allow_patterns=wanted, ignore_patterns=UNWANTED, local_files_only=True)
    except (OSError, ValueError):  # not in the cache
        cached = None
    if cached is not None and _is_whole(Path(cached), config_only):
        return cached
    if not download:
        raise _failure(name, "it is not in the cache, and a dry run downloads nothing")
    if constants.HF_HUB_OFFLINE:
        raise _failure(name, "it is not in the cache, and HF_HUB_OFFLINE is set")
    print(f"downloading {name} from the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        return snapshot_download(name, allow_patterns=wanted, ignore_patterns=UNWANTED)
    except Exception as error:  # errors of the Hub, the network or the disk have dozens of types
        raise _failure(name, _reason(error)) from error


def _is_whole(folder: Path, config_only: bool) -> bool:
    """Whether a snapshot in the cache has all files of its model: a download may have been interrupted."""
    names: Sequence[str] | set[str] = ("config.json",)
    if not config_only:
        try:
            names = files_to_read(folder)
        except (OSError, ValueError):
            return False
    return all((folder / name).exists() for name in names)


def _failure(name: str, reason: str) -> ValueError:
    short = name.partition("/")[2]
    return ValueError(
        f"{name} is not a folder, and the model of that name on the Hugging Face Hub could not be used: {reason}; "
        f"download it with `hf download {name} --exclude 'original/*' --local-dir {short}` and give the folder {short}"
    )


def _reason(error: Exception) -> str:
    """The reason for a Hub error in one line; the library's messages have several, with a web address."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "its owner must give you access: ask for it on the model's page, then run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "it does not exist, or it is private; for a private one, run `hf auth login` first"
    if isinstance(error, OSError) and "ConnectError" in str(error):
        return "there is no connection to it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".;")
