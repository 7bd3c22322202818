"""The planner calibrated from measured rows: only from rows of the same device that it can use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashspan.cli import main
from flashspan.model import preset
from flashspan.plan import Run
from flashspan.plan.calibrate import Measurement, calibrate, fit_link, predict
from flashspan.plan.command import calibrated
from flashspan.plan.devices import make_cluster


def test_calibration_finds_the_device_that_made_the_times() -> None:
    cluster = make_cluster("H100", 1)
    truth = replace(
        cluster, device=replace(cluster.device, product_share=0.45, traffic_share=0.5, forward_share=0.3, launch=2e-5)
    )
    runs = [Run(preset(name), 4, tokens) for name in ("small", "large") for tokens in (512, 8192)]
    kinds = ("forward", "backward", "optimizer")
    measured = [Measurement(run, kind, predict(truth, run, kind)) for run in runs for kind in kinds]
    found = calibrate(cluster, measured)
    others = [Run(preset("medium"), 2, 2048), Run(preset("xl"), 1, 4096)]
    for run in others:
        assert predict(found, run, "total") == pytest.approx(predict(truth, run, "total"), rel=0.15)


def test_calibration_takes_the_newest_times_of_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "what": "model", "impl": "flashspan, eager", "kind": "forward", "status": "ok", "device": "NVIDIA H100",
        "shape": "s", "dtype": "float32", "ranks": 1, "p20_ms": 5.0,
        "more": {"preset": "tiny", "batch": 1, "tokens": 64},
    }  # fmt: skip
    words = ["plan", "tiny", "--tokens", "64", "--devices", "1", "--calibrate", str(tmp_path)]
    file = tmp_path / "model.jsonl"
    file.write_text("\n".join(json.dumps({**row, "p20_ms": time}) for time in (5.0, 6.0)))
    assert main(words) == 0
    assert "Calibrated from 1 measured times" in capsys.readouterr().out
    file.write_text("\n".join(json.dumps({**row, "device": name}) for name in ("A", "B")))
    assert main(words) == 2
    assert "rows of several devices, A, B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": {"preset": "tiny"}}, "another version wrote (KeyError: 'batch')"),
        ({"p20_ms": None}, "another version wrote"),
        ({"p20_ms": 0.0}, "a measured time must be positive"),
        ({"more": {"preset": "gpt-9", "batch": 1, "tokens": 64}}, "rows has a row that cannot be used"),
        ({"more": {"preset": "tiny", "batch": 0, "tokens": 64}}, "rows has a row that cannot be used"),
        ({"impl": "plain, eager"}, "no rows to calibrate from"),
        ({"what": "collective", "impl": "send-receive", "more": {}}, "another version wrote (KeyError: 'alpha_us')"),
    ],
)
def test_calibration_refuses_rows_it_cannot_use(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "what": "model", "impl": "flashspan, eager", "kind": "forward", "status": "ok", "device": "NVIDIA H100",
        "dtype": "float32", "p20_ms": 5.0, "more": {"preset": "tiny", "batch": 1, "tokens": 64}, **changes,
    }  # fmt: skip
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "old.jsonl").write_text(json.dumps(row))
    assert main(["plan", "tiny", "--calibrate", str(folder)]) == 2
    assert message in capsys.readouterr().err


def link_row(device: str, ranks: int = 2, gb_per_s: float = 2.5) -> dict[str, Any]:
    """A row of `bench collectives`."""
    return {
        "what": "collective", "impl": "send-receive", "status": "ok", "device": device, "shape": "1024 bytes",
        "ranks": ranks, "more": {"alpha_us": 10.0, "gb_per_s": gb_per_s},
    }  # fmt: skip


@pytest.mark.parametrize("what", ["model", "collective"])
@pytest.mark.parametrize(
    ("planned", "measured", "accepted"),
    [
        ("H200", "NVIDIA H200", True),
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("cpu-core", "x86_64, 2 cores", True),
        ("H100", "x86_64, 2 cores", False),
        ("H100", "NVIDIA H200", False),
        ("cpu-core", "NVIDIA H200", False),
        ("H100-PCIe", "NVIDIA H100 PCIe", True),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H100 PCIe", False),
        ("L40", "NVIDIA L40S", False),
    ],
)
def test_a_device_is_calibrated_by_its_own_rows_only(
    planned: str, measured: str, accepted: bool, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {
        "what": "model", "impl": "flashspan, eager", "kind": "forward", "status": "ok", "device": measured,
        "dtype": "float32", "p20_ms": 5.0, "more": {"preset": "tiny", "batch": 1, "tokens": 64},
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(model if what == "model" else link_row(measured)))
    words = ["plan", "tiny", "--tokens", "64", "--devices", "1", "--device", planned, "--calibrate", str(tmp_path)]
    assert main(words) == (0 if accepted else 2)
    said = capsys.readouterr().err
    assert all(fact in said for fact in (f"{planned}:", str(tmp_path), f"of {measured};")) != accepted


def test_transfers_of_another_device_than_the_models_are_refused(tmp_path: Path) -> None:
    model = {"what": "model", "status": "ok", "device": "NVIDIA H100"}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (model, link_row("x86_64, 2 cores")))))
    with pytest.raises(ValueError, match="several devices, NVIDIA H100, x86_64, 2 cores"):
        calibrated(make_cluster("H100", 8), tmp_path)


def test_the_link_is_that_of_the_most_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [link_row("NVIDIA H100", ranks, speed) for ranks, speed in ((2, 90.0), (4, 80.0), (3, 70.0))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cluster = make_cluster("H100", 8)
    found = calibrated(cluster, tmp_path)
    assert found.inside.bandwidth == pytest.approx(80e9)
    assert found.inside.latency == pytest.approx(1e-5)
    assert replace(found, inside=cluster.inside) == cluster
    assert "Calibrated from 0 measured times and the link of 4 ranks" in capsys.readouterr().out


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe{}")
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    for option, given, named in (("--calibrate", "", "rows.jsonl"), ("--table", "mine.toml", "mine.toml")):
        assert main(["plan", "tiny", option, str(tmp_path / given)]) == 2
        assert f"{tmp_path / named} is not" in capsys.readouterr().err


def test_the_fit_of_a_link_is_the_link() -> None:
    sizes = [1e3, 1e4, 1e6, 1e8]
    link = fit_link("x", sizes, [5e-6 + size / 2e9 for size in sizes])
    assert link.latency == pytest.approx(5e-6)
    assert link.bandwidth == pytest.approx(2e9)
