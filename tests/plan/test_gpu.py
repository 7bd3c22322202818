"""On a GPU: the planner against what is measured there, and the harness against itself."""

from __future__ import annotations

import gc
from statistics import median

import pytest
import torch

from flashspan.bench.model import Setting, Stepper, peak_bytes, time_phases
from flashspan.bench.study import _bench
from flashspan.model import preset
from flashspan.plan import Mixture, Run, ledger
from flashspan.plan.calibrate import Measurement, calibrate, predict
from flashspan.plan.devices import DEVICES, make_cluster

CASES = [(name, tokens, dtype) for name in ("small", "medium", "large") for tokens in (256, 1024)
         for dtype in ("float32", "bfloat16")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_memory_and_calibrated_time_on_12_configurations() -> None:
    name = torch.cuda.get_device_name()
    device = next((known for known in DEVICES if known in name), "H100")
    kinds = ("forward", "backward", "optimizer")
    runs, measured = [], []
    for model, tokens, dtype in CASES:
        stepper = Stepper(Setting(model, 4, tokens, dtype), torch.device("cuda"))
        times = time_phases(stepper, 3, 5)
        run = Run(preset(model), 4, tokens, dtype)
        peak = peak_bytes(stepper, stepper.train)
        assert abs(ledger(run, Mixture()).peak / peak - 1) < 0.10, (model, tokens, dtype)
        runs.append((run, median(times["training"]) / 1e3))
        measured += [Measurement(run, kind, median(times[kind]) / 1e3) for kind in kinds]
        del stepper
        gc.collect()
        torch.cuda.empty_cache()
    found = calibrate(make_cluster(device, 1), measured)
    ratios = {case: predict(found, run, "total") / s for case, (run, s) in zip(CASES, runs, strict=True)}
    wrong = {case: round(ratio, 2) for case, ratio in ratios.items() if abs(ratio - 1) >= 0.15}
    assert not wrong, f"planned over measured: {wrong}"


@pytest.mark.gpu
def test_the_harness_adds_less_than_a_hundredth_and_repeats_itself() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def call() -> torch.Tensor:
        return x @ x @ x @ x  # about a millisecond

    medians = [median(_bench(call, torch.device("cuda"))) for _ in range(3)]
    assert max(medians) / min(medians) < 1.02
    # A hundred in a row between two events: nothing but the kernels.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(100):
        call()
    end.record()
    torch.cuda.synchronize()
    assert medians[0] < 1.01 * begin.elapsed_time(end) / 100 + 0.005
