"""The 12 configurations on which the planner's time is checked: measured on a GPU, and as recorded in h200.json.

python -m tests.plan.twelve > tests/plan/h200.json      # on the GPU machine: record them again
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable

import torch

from flashspan.bench.model import Setting, Stepper, peak_bytes, time_phases
from flashspan.model import preset
from flashspan.plan import Cluster, Run
from flashspan.plan.calibrate import Measurement, calibrate, predict

CASES = [f"{model} {tokens} {dtype}" for model in ("small", "medium", "large") for tokens in (256, 1024)
         for dtype in ("float32", "bfloat16")]  # fmt: skip
BATCH = 4
KINDS = ("forward", "backward", "optimizer")
Samples = dict[str, dict[str, list[float]]]
"""Case -> phase -> milliseconds."""


def parse(case: str) -> Run:
    model, tokens, dtype = case.split()
    return Run(preset(model), BATCH, int(tokens), dtype)


def measure() -> tuple[Samples, dict[str, float]]:
    """Samples, and bytes at the peak.

    A bfloat16 step of these models waits for the host, whose speed jitters and drifts over seconds: they are cheap, so
    they have more samples, half of them later.
    """
    samples: Samples = {case: {kind: [] for kind in (*KINDS, "training")} for case in CASES}
    peaks = {}
    for case in [*CASES, *(case for case in CASES if case.endswith("bfloat16"))]:
        model, tokens, dtype = case.split()
        stepper = Stepper(Setting(model, BATCH, int(tokens), dtype), torch.device("cuda"))
        times = time_phases(stepper, 3, 5 if dtype == "float32" else 10)
        for kind, found in samples[case].items():
            found += times[kind]
        peaks[case] = peak_bytes(stepper, stepper.train)
        del stepper
        gc.collect()
        torch.cuda.empty_cache()
    return samples, peaks


def ratios(cluster: Cluster, samples: Samples, used: Iterable[str] = CASES) -> dict[str, float]:
    """Planned over measured time of every case's step, after calibration on the phases of those used.

    The least of the samples counts: what disturbs a host makes times longer, never shorter.
    """
    measured = [Measurement(parse(case), kind, min(samples[case][kind]) / 1e3) for case in used for kind in KINDS]
    found = calibrate(cluster, measured)
    return {case: predict(found, parse(case), "total") / (min(samples[case]["training"]) / 1e3) for case in CASES}


def off(found: dict[str, float], bound: float) -> dict[str, float]:
    """The ratios that are not within the bound of 1, for a message."""
    return {case: round(ratio, 3) for case, ratio in found.items() if abs(ratio - 1) >= bound}


if __name__ == "__main__":
    where = f"one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(json.dumps({"where": where, "ms": measure()[0]}))
