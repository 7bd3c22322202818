"""On a GPU: the planner compared with measurements, and a check of the measuring code."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from flashspan.bench.suites.study import bench_in_turns
from flashspan.plan import ParallelConfig, ledger
from flashspan.plan.devices import DEVICES, is_named, make_cluster
from tests.plan.twelve import measure, off, parse, ratios, table, to_json


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_memory_and_calibrated_time_on_12_configurations() -> None:
    """The device limits all 12. Small configurations would depend on the host, whose times vary.

    See Note [Why the 12 are large] in twelve.py. With -s for the table and the rows: pytest -s -m alone
    """
    name = torch.cuda.get_device_name()
    device = next((known for known in DEVICES if is_named(known, name)), "H100")
    samples, peaks = measure()
    memory = {case: ledger(parse(case), ParallelConfig()).peak / peak for case, peak in peaks.items()}
    time = ratios(make_cluster(device, 1), samples)
    print(f"\n{table(time, memory, samples)}\n{to_json(samples)}")  # pytest shows it with -s, and if the test fails
    assert not (wrong := off(memory, 0.10)), f"planned over measured memory: {wrong}"
    assert not (wrong := off(time, 0.15)), f"planned over measured time: {wrong}"


@pytest.mark.gpu
@pytest.mark.alone
def test_the_harness_adds_less_than_a_hundredth_and_repeats_itself() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def call() -> torch.Tensor:
        return x @ x @ x @ x  # about a millisecond

    medians = [median(bench_in_turns({"": call}, torch.device("cuda"))[""]) for _ in range(3)]
    assert max(medians) / min(medians) < 1.02
    # A hundred calls between two events measure only the kernels.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(100):
        call()
    end.record()
    torch.cuda.synchronize()
    assert medians[0] < 1.01 * begin.elapsed_time(end) / 100 + 0.005
