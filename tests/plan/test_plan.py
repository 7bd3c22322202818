"""The planner: its memory compared with measurements, its time with published numbers, and its errors for bad input."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashspan.bench.measure.memory import peak_of
from flashspan.bench.suites.model import Setting, Stepper, peak_bytes
from flashspan.cli import main
from flashspan.context.schedule import Shape
from flashspan.model import LlamaConfig, preset
from flashspan.model.loss import linear_cross_entropy, losses_and_gradients_in_parts
from flashspan.plan import ParallelConfig, Run, ledger, longest, rank, simulate, step_time
from flashspan.plan.command import show, train_command
from flashspan.plan.devices import DEVICES, LINKS, USUAL_LINK, Cluster, load_table, make_cluster
from flashspan.plan.search import Answer, divisors, fits, parallel_configs, scaling
from flashspan.plan.step import moved_per_logit, schedules
from flashspan.train import parse

ROOT = Path(__file__).parent.parent.parent
MODELS = (
    LlamaConfig(500, 128, 4, 4, 2, 384),
    LlamaConfig(2000, 64, 2, 4, 4, 256),
    LlamaConfig(257, 192, 6, 6, 2, 512),
)
LITTLE = (LlamaConfig(125, 32, 3, 4, 2, 64), LlamaConfig(500, 16, 2, 4, 4, 64))
SIZES = ((1, 127), (2, 384))
# Without 16-bit matmuls, a CPU takes a minute for a second of float32 work.
CASES = [
    *((model, size, "float32") for model in MODELS for size in SIZES),
    *((model, size, "bfloat16") for model in LITTLE for size in SIZES),
    *(pytest.param(m, size, "bfloat16", marks=[pytest.mark.slow, pytest.mark.timeout(600)])
      for m in MODELS for size in SIZES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "batch_tokens", "dtype"),
    CASES,
    ids=lambda x: f"{x.num_layers}x{x.width}" if hasattr(x, "width") else str(x),
)
def test_memory_is_within_a_tenth_of_the_measured_peak(
    model: LlamaConfig, batch_tokens: tuple[int, int], dtype: str
) -> None:
    stepper = Stepper(Setting("tiny", *batch_tokens, dtype), torch.device("cpu"), model)
    stepper.train()  # gives the optimizer its state
    measured = peak_bytes(stepper, stepper.train)
    predicted = ledger(Run(model, *batch_tokens, dtype, fused_norms=False), ParallelConfig()).peak
    assert abs(predicted / measured - 1) < 0.10


def published() -> tuple[Cluster, Shape, float, float]:
    """8 x H800 as in ring-flash-attention's table: 8192 tokens per GPU, 32 heads on 8, and the speed of one GPU."""
    cluster, shape = make_cluster("H800", 8), Shape(1, 32, 8, 128, 2)
    forward, both = 1 / 591.5, 1 / 154.7  # seconds of one GPU, from the table's "theoretic" column
    work = 4 * 32 * 128 * 8192**2 / 2
    device = replace(
        cluster.device,
        forward_share=work / forward / cluster.device.flops,
        backward_share=2.5 * work / (both - forward) / cluster.device.flops,
    )
    return replace(cluster, device=device), shape, forward, both


def efficiency(layout: str, *, merges: bool) -> float:
    """Percent of one GPU's speed times 8, forward and backward."""
    cluster, shape, _, _ = published()

    def seconds(layout: str, num: int) -> float:
        passes = schedules("ring", layout, 64 * num, num, num)
        return sum(simulate(one, shape, cluster, scale=8192 / 64, merges=merges).seconds for one in passes)

    return 100 * 8 * seconds("contiguous", 1) / seconds(layout, 8)


PUBLISHED = {"contiguous": 53.9, "striped": 82.9, "zigzag": 90.2}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_efficiency_on_8_devices_is_near_the_published(layout: str) -> None:
    # Those kernels return partial results, which are merged separately.
    assert abs(efficiency(layout, merges=True) - PUBLISHED[layout]) < 10


def test_carries_lose_less_than_merging_as_the_page_states() -> None:
    page = " ".join((ROOT / "docs" / "measuring.md").read_text(encoding="utf-8").split())
    for merges in (True, False):
        found = [efficiency(layout, merges=merges) for layout in PUBLISHED]
        assert "gives {:.0f}, {:.0f} and {:.0f}".format(*found) in page
    assert all(efficiency(layout, merges=False) > efficiency(layout, merges=True) for layout in PUBLISHED)


def test_scaled_rows_cost_as_much_as_the_rows_they_represent() -> None:
    cluster, shape = make_cluster("H100", 4), Shape(1, 8, 2, 128, 2)
    for layout in ("zigzag", "contiguous", "striped"):
        small, large = (schedules("ring", layout, tokens, 4, 4)[0] for tokens in (256, 8192))
        guess, exact = simulate(small, shape, cluster, scale=32).seconds, simulate(large, shape, cluster).seconds
        assert guess == pytest.approx(exact, rel=0.03)


def test_a_slow_link_shows_as_waiting() -> None:
    shape = Shape(1, 8, 8, 64, 2)
    fast = make_cluster("H100", 8)
    slow = replace(fast, inside=replace(fast.inside, bandwidth=1e9))
    schedule = schedules("ring", "zigzag", 512, 8, 8)[0]
    assert max(simulate(schedule, shape, fast, scale=64).waiting) < 1e-4
    late = simulate(schedule, shape, slow, scale=64)
    assert max(late.waiting) > 10 * max(late.computing)


def test_every_parallel_config_uses_all_devices_and_fits() -> None:
    run, cluster = Run(preset("llama-3.2-1b"), 8, 8192), make_cluster("H100", 16)
    answers = rank(run, cluster)
    assert len(answers) > 50
    assert [a.time.total for a in answers] == sorted(a.time.total for a in answers)
    limit = cluster.device.memory - cluster.device.reserve
    for answer in answers:
        assert answer.parallel.num_devices == 16
        assert answer.memory.peak <= limit
        assert 0 < answer.mfu(run, cluster) < 1
    chosen = {a.parallel for a in answers}
    assert all(m in chosen or not fits(run, m, cluster) for m in parallel_configs(run, cluster, 64))


def test_the_longest_context_fits_and_one_more_unit_does_not() -> None:
    run, cluster = Run(preset("llama-3.2-1b"), 1, 1), make_cluster("L40", 4)
    tokens, parallel = longest(run, cluster)
    assert parallel is not None
    assert fits(replace(run, tokens=tokens), parallel, cluster)
    more = replace(run, tokens=tokens + 1024)
    assert not any(fits(more, m, cluster) for m in parallel_configs(more, cluster))


def test_the_longest_context_is_found_if_only_many_ranks_can_share_it() -> None:
    run, cluster = Run(preset("tiny"), 1, 4096), make_cluster("H100", 256, per_node=1)
    assert {parallel.context for parallel in parallel_configs(run, cluster)} == {256}
    assert longest(run, cluster)[0] >= 4096


def test_more_devices_than_can_share_the_work_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--devices", "4096", "--batch", "1", "--tokens", "65536"]) == 1
    said = capsys.readouterr().out
    assert "No parallelism config uses exactly 4,096 devices: use fewer devices, or more samples or tokens." in said
    assert "Longest context" not in said


def test_more_devices_hold_more_and_the_curve_reaches_1024() -> None:
    run = Run(preset("llama-3.2-1b"), 8, 4096)
    assert longest(run, make_cluster("L40", 16))[0] > longest(run, make_cluster("L40", 8))[0]
    points = scaling(Run(preset("tiny"), 8, 16), make_cluster("H100", 8))
    assert [num for num, _ in points] == [2**i for i in range(11)]
    assert points[-1][1] is not None


def test_divisors_of_a_large_number_take_a_moment() -> None:
    for number in (1, 2, 12, 36, 97):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert len(divisors(10**12)) == 13 * 13  # 2^12 5^12; trying each number would take hours


def test_ulysses_saves_a_kv_head_on_every_rank() -> None:
    model = preset("llama-3-8b")  # 32 heads on 8
    run = Run(model, 1, 2**17)
    held = {
        (num, strategy): ledger(run, ParallelConfig(context=num, strategy=strategy)).activations
        for num in (8, 32)
        for strategy in ("ring", "ulysses")
    }
    assert held[8, "ulysses"] == held[8, "ring"]
    more = model.num_layers * 2 * (32 - 8) * model.head_dim * 2  # bytes per token: k and v of 24 more heads
    assert held[32, "ulysses"] - held[32, "ring"] == pytest.approx(2**17 / 32 * more)


def test_recomputing_trades_time_for_memory() -> None:
    run, cluster = Run(preset("llama-3-8b"), 1, 16384), make_cluster("H200", 1)
    kinds = ("none", "attention", "full")
    memory = [ledger(run, ParallelConfig(recompute=kind)).activations for kind in kinds]  # type: ignore[arg-type]
    time = [step_time(run, ParallelConfig(recompute=kind), cluster).total for kind in kinds]  # type: ignore[arg-type]
    assert memory == sorted(memory, reverse=True)
    assert time == sorted(time)


def test_every_device_has_a_usual_link() -> None:
    assert set(USUAL_LINK) == set(DEVICES)
    assert set(USUAL_LINK.values()) <= set(LINKS)


@pytest.mark.parametrize("fused", [False, True])
def test_the_planner_counts_the_memory_of_the_loss(fused: bool) -> None:
    model, num = LlamaConfig(3000, 16, 2, 4, 4, 64), 256
    x, weight = torch.randn(num, model.width), torch.randn(model.vocab_size, model.width, requires_grad=True)
    targets = torch.randint(model.vocab_size, (num,))

    def in_place(logits: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(len(logits)), logits  # what the kernel allocates

    losses_and_gradients = in_place if fused else losses_and_gradients_in_parts
    measured, _ = peak_of(
        lambda: linear_cross_entropy(x, weight, targets, losses_and_gradients=losses_and_gradients), torch.device("cpu")
    )
    run = Run(model, 1, num, "float32", plain_loss=not fused)
    assert ledger(run, ParallelConfig()).logits == pytest.approx(measured, rel=0.03)
    if fused:  # not without a GPU, nor with the vocabulary split
        assert ledger(replace(run, fused_norms=False), ParallelConfig()).logits > 2 * measured
        assert not run.fused_loss(tensor=2)


def test_the_time_of_the_loss_kernel_is_that_of_an_h200() -> None:
    run, device = Run(preset("llama-3-8b"), 1, 4096), DEVICES["H200"]
    moved = run.tokens * run.model.vocab_size * moved_per_logit(run, 1)
    assert 1e3 * moved / (device.bandwidth * device.traffic_share) == pytest.approx(
        0.78, rel=0.15
    )  # ops/kernels/cross_entropy.py


def test_users_extend_the_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[devices.toy]\nflops=1e12\nflops32=1e12\nmemory=1e9\nbandwidth=1e11\n[links.string]\nlatency=1\nbandwidth=10\n"
    )
    devices, links = load_table(file)
    assert devices["toy"].memory == 1e9
    assert links["string"].seconds(20) == 3
    file.write_text("[devices.toy]\nflops=1e12\nspeed=3\n")
    with pytest.raises(ValueError, match="speed"):
        load_table(file)
    file.write_text('[devices.H100]\nflops="fast"\n')
    with pytest.raises(ValueError, match="flops of H100 must be a number: got 'fast'"):
        load_table(file)
    file.write_text("devices=3\n")
    with pytest.raises(ValueError, match="devices must be tables"):
        load_table(file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("[devices.H100]\nflops=inf", "flops must be positive and finite: H100 has inf"),
        ("[devices.H100]\nmemory=0", "memory must be positive and finite: H100 has 0"),
        ("[devices.H100]\nproduct_share=5", "product_share must be above 0 and at most 1: H100 has 5"),
        ("[devices.H100]\ntraffic_share=nan", "traffic_share must be above 0 and at most 1: H100 has nan"),
        ("[devices.H100]\ninterference=-1", "interference must be from 0 to 1: H100 has -1"),
        ("[devices.H100]\nreserve=-5e12", "reserve must be 0 or more and finite: H100 has -5"),
        ("[links.pcie4]\nbandwidth=inf", "both finite: pcie4 has 1e-05, inf"),
        (f"[devices.H100]\nflops=1{'0' * 400}", "too large"),
    ],
)
def test_impossible_numbers_of_a_device_are_refused(entry: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(entry)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}: .*{re.escape(message)}"):
        load_table(file)


def test_the_command_ranks_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.2-1b", "--tokens", "65536", "--devices", "8", "--device", "L40", "--batch", "1"]
    assert main([*words, "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("parallelism configs fit", "Longest context", "GB per device", "context"):
        assert part in text
    assert "The best: flashspan train --model.preset llama-3.2-1b --data.sequence 65536 --train.batch 1" in text
    assert "<svg" in (tmp_path / "plan-timeline.svg").read_text()


@pytest.mark.parametrize(
    ("devices", "start"), [(12, "--nnodes 2 --nproc-per-node 6"), (7, "--nnodes 7 --nproc-per-node 1")]
)
def test_partly_used_nodes_start_equally_many_ranks(devices: int, start: str) -> None:
    command = train_command(
        "tiny", Run(preset("tiny"), devices, 64), ParallelConfig(data=devices), 8 if devices == 12 else 4
    )
    assert command.startswith(f"torchrun {start} -m flashspan.train ")


def test_the_trainer_accepts_the_command_of_every_parallel_config() -> None:
    run, cluster = Run(preset("llama-3.2-1b"), 16, 65536, "bfloat16"), make_cluster("H100", 32, per_node=4)
    seen, configs = set(), list(parallel_configs(run, cluster))
    one_of_each = {(c.strategy, c.layout, c.recompute, c.sharded_optimizer): c for c in configs if c.context > 1}
    for parallel in [*one_of_each.values(), *random.Random(0).sample(configs, 10)]:
        command = train_command("llama-3.2-1b", run, parallel, 4)
        start = "torchrun --nnodes 8 --nproc-per-node 4 -m flashspan.train "
        assert command.startswith(start)
        config = parse(command.removeprefix(start).split())
        degrees = config.parallel.degrees(32)
        assert degrees == {name: getattr(parallel, name) for name in degrees}
        assert (config.train.recompute, config.optimizer.sharded) == (parallel.recompute, parallel.sharded_optimizer)
        if parallel.context > 1:
            assert (config.parallel.strategy, config.parallel.layout) == (parallel.strategy, parallel.layout)
            seen.add(parallel.strategy)
    assert {"ring", "double_ring", "ulysses"} <= seen


def test_the_table_fits_a_terminal_and_keeps_its_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cluster = Run(preset("llama-3-8b"), 8, 131072), make_cluster("H100", 8)
    parallel = ParallelConfig(2, 2, 2, strategy="ulysses", layout="contiguous", recompute="attention")
    answer = Answer(parallel, ledger(run, parallel), step_time(run, parallel, cluster))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    found = []
    for terminal in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", terminal)
        show([answer, answer], run, cluster)
        text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        found.append(text[: text.index("Best, ")])
    whole, cut = found  # lines are not wrapped in a file
    assert max(map(len, whole.splitlines())) > 130
    assert max(map(len, cut.splitlines())) <= 80
    words = [re.findall(r"[^\W_]\S*", table) for table in found]
    assert sorted(words[0]) == sorted(words[1])


def test_small_models_are_shown_in_mb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--device", "cpu-core", "--devices", "4", "--tokens", "256", "--batch", "1"]) == 0
    text = capsys.readouterr().out
    assert "tiny, 1 sample of 256 tokens, on 4" in text
    assert "context at 1 sample:" in text
    assert "MB/device" in text
    column = [float(line.split("│")[2].replace(",", "")) for line in text.splitlines() if line.startswith("│ ")]
    assert len(column) == 10
    assert all(1 < cell < 100 for cell in column)
    best = re.search(r"Best, MB per device: parameters (\d+\.\d\d), .*; peak (\d+\.\d\d) of 12,\d{3}\.", text)
    assert best is not None
    assert float(best[2]) == pytest.approx(column[0], abs=0.06)


def test_help_names_the_command_that_draws(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "flashspan plan draw --ranks 8 --strategy helper --layout contiguous" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["draw", "--ranks", "2", "--tokens", "64"], "ring-zigzag-2-timeline.svg"),
        pytest.param(
            ["tiny", "--tokens", "256", "--devices", "2", "--scale"], "plan-scaling.svg", marks=pytest.mark.slow
        ),
    ],
)
def test_a_folder_that_is_not_writable_is_explained(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()  # a file in its place: permissions do not apply to root
    assert main(["plan", *words, "--folder", str(tmp_path)]) == 2
    said = f"flashspan: pictures cannot be written to {tmp_path}: Is a directory; choose another with --folder\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-9"], "unknown model"),
        (["tiny", "--device", "H20"], "did you mean"),
        (["tiny", "--network", "string"], "unknown link"),
        (["tiny", "--tokens", "0"], "1 or more tokens"),
        (["tiny", "--devices", "0"], "1 or more devices"),
        (["tiny", "--devices", "1000000000000"], "at most 1,000,000 devices: got 1,000,000,000,000"),
        (["tiny", "--calibrate", "nowhere"], "no rows to calibrate"),
        (["tiny", "--table", "nowhere.toml"], "nowhere.toml is missing: give --table a TOML file"),
        (["tiny", "--tokens", "64", "--folder", "/dev/null/x"], "cannot be made: Not a directory; choose another with"),
        (["tiny", "--top", "0"], "top must be 1 or more"),
    ],
)
def test_bad_input_is_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
