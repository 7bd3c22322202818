"""Shared by all tests: without a GPU, Triton kernels run in its interpreter, which must be chosen before import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Shapes are small and tests run beside one another: a second thread would mostly wait. What tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

from flashspan import launch  # noqa: E402  (after the interpreter was chosen)

# Ranks are forked from a server: what it has imported, no rank of any test imports again.
launch.PRELOAD += [
    "torch._dynamo",
    "torch.distributed.tensor.experimental",
    "torch.distributed.fsdp",
    "flashspan.train",
    "pytest",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out where there is no GPU, and slow ones unless `-m` asks for them."""
    chosen = config.getoption("markexpr")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    skip_slow = pytest.mark.skip(reason="slow: run with -m slow")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if "slow" in item.keywords and "slow" not in chosen:
            item.add_marker(skip_slow)
