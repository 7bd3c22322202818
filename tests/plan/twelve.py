"""The configurations on which the planner's time is checked: 12 to measure on a GPU, also recorded in h200_large.json,
and 12 recorded in h200.json.

python -m tests.plan.twelve > FILE      # on an idle GPU machine: the times of the 12 to measure, as in h200.json

Note [Why the 12 are large]
The planner takes the longer of the device's time and the host's time to launch its kernels. The device's time repeats
within 1%. The host's does not: for the same step it changed by 30 to 40%, and of the small configurations, 4 of 12 were
within 15% in one run and not in another. So the 12 to measure have so much work that even a host half as fast would
hardly matter (a test checks this). Most of the 12 recorded are small and wait for the host. They check the planner's
count of operators with the times of one run.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable

import torch

from flashspan.bench.suites.model import Setting, Stepper, peak_bytes, time_phases
from flashspan.model import preset
from flashspan.plan import Cluster, Run
from flashspan.plan.calibrate import Measurement, calibrate, predict

RECORDED = [f"{model} {tokens} {dtype}" for model in ("small", "medium", "large") for tokens in (256, 1024)
            for dtype in ("float32", "bfloat16")]  # fmt: skip
MEASURED = [
    "small 32x512 float32",
    "small 2x4096 float32",
    "small 64x1024 bfloat16",
    "medium 4x1024 float32",
    "medium 8x4096 bfloat16",
    "large 2x1024 float32",
    "large 8x2048 bfloat16",
    "2.7B 4x2048 bfloat16",
    "llama-3.2-1b 4x512 float32",
    "llama-3.2-1b 1x2048 float32",
    "llama-3.2-1b 16x512 bfloat16",
    "llama-3.2-3b 2x4096 bfloat16",
]
BATCH = 4  # for cases with tokens only
WARMUP, STEPS = 3, 5
KINDS = ("forward", "backward", "optimizer")
Samples = dict[str, dict[str, list[float]]]
"""Case -> phase -> milliseconds."""


def parse(case: str) -> Run:
    model, size, dtype = case.split()
    batch, tokens = size.split("x") if "x" in size else (BATCH, size)
    return Run(preset(model), int(batch), int(tokens), dtype, plain_loss=True)


def measure(cases: Iterable[str] = MEASURED) -> tuple[Samples, dict[str, float]]:
    """Return time samples and peak bytes."""
    samples: Samples = {}
    peaks = {}
    for case in cases:
        run = parse(case)
        setting = Setting(case.split()[0], run.batch, run.tokens, run.precision)
        stepper = Stepper(setting, torch.device("cuda"))
        times = time_phases(stepper, WARMUP, STEPS, (*KINDS, "training"))
        samples[case] = times
        peaks[case] = peak_bytes(stepper, stepper.train)
        del stepper
        gc.collect()
        torch.cuda.empty_cache()
    return samples, peaks


def calibrated(cluster: Cluster, samples: Samples, used: Iterable[str] | None = None) -> Cluster:
    """The cluster calibrated on the phases of these cases, or of all.

    The smallest sample is used, because disturbances of a host make times longer, never shorter.
    """
    cases = samples if used is None else used
    return calibrate(
        cluster, [Measurement(parse(case), kind, min(samples[case][kind]) / 1e3) for case in cases for kind in KINDS]
    )


def ratios(cluster: Cluster, samples: Samples, used: Iterable[str] | None = None) -> dict[str, float]:
    """Planned divided by measured step time of every case, after calibration on these cases."""
    found = calibrated(cluster, samples, used)
    planned = {case: 1e3 * predict(found, parse(case), "total") for case in samples}
    return {case: planned[case] / min(times["training"]) for case, times in samples.items()}


def off(found: dict[str, float], bound: float) -> dict[str, float]:
    """The ratios that differ from 1 by more than the bound, as text."""
    return {case: round(ratio, 3) for case, ratio in found.items() if abs(ratio - 1) >= bound}


def table(time: dict[str, float], memory: dict[str, float], samples: Samples) -> str:
    """For every case: the planned and measured step, their ratio, and the ratio of memory."""
    lines = [f"{'case':<30} {'planned ms':>10} {'measured ms':>11} {'ratio':>6} {'memory':>6}"]
    for case, ratio in time.items():
        step = min(samples[case]["training"])
        lines.append(f"{case:<30} {ratio * step:>10.1f} {step:>11.1f} {ratio:>6.3f} {memory[case]:>6.3f}")
    return "\n".join(lines)


def to_json(samples: Samples) -> str:
    """The content of a file such as h200.json."""
    where = f"one {torch.cuda.get_device_name()}, torch {torch.__version__}; {STEPS} samples each"
    short = {case: {kind: [round(ms, 2) for ms in found] for kind, found in times.items()}
             for case, times in samples.items()}  # fmt: skip
    return json.dumps({"where": where, "ms": short})


if __name__ == "__main__":
    print(to_json(measure()[0]))
