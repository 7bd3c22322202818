"""Benchmarks measure what their rows state, on the CPU, and refuse sizes that they cannot measure."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashspan.bench.measure import memory, record, sweep
from flashspan.bench.report import tables
from flashspan.bench.suites import collectives, context, context_rank, model, study
from flashspan.bench.suites.context import KINDS, Pool
from flashspan.bench.suites.context_rank import ALONE, Workload
from flashspan.bench.suites.model import Setting
from flashspan.cli import main
from flashspan.launch import RankError
from flashspan.model import preset


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Ranks for all tests of this file."""
    ranks = Pool("cpu")
    yield ranks
    ranks.close()


def test_context_compares_strategies_with_one_device(pool: Pool, tmp_path: Path) -> None:
    work = Workload(32, 1, 4, 2, 64, "float32")
    cases = (("ring", "zigzag"), ("ulysses", "contiguous"))
    jobs = context.jobs_of(work, cases, (1, 2), 2, pool)
    outcome = sweep.run(jobs, tmp_path / "context.jsonl")
    rows = {(row.impl, row.ranks, row.kind, row.more["tokens"]): row for row in outcome.rows}
    assert len(rows) == len(outcome.rows) == 2 * 4  # two cases, one device, and one device with half of the tokens
    for row in outcome.rows:
        assert row.ok, row.status
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.more["mfu"] > 0
        assert row.peak_mib > 0
        assert 0 < row.more["product_share"] <= 1
        assert (row.bytes > 0) == (row.impl != ALONE)
        assert row.more["wire_ms"] > 0 or row.impl == ALONE
    # A ring of two sends its keys and values once: 2 x 32 tokens x 2 heads x 8 x 4 bytes per rank.
    assert rows["ring zigzag", 2, "forward", 64].bytes == 2 * 32 * 2 * 8 * 4
    alone, ring = (rows[impl, ranks, KINDS[1], 64] for impl, ranks in ((ALONE, 1), ("ring zigzag", 2)))
    assert ring.peak_mib < alone.peak_mib
    assert context.table(outcome.rows).cells


def test_other_settings_are_measured_again(pool: Pool, tmp_path: Path) -> None:
    place = record.find_device("cpu")
    where = record.environment(place)
    work, larger = Workload(32, 1, 4, 2, 16, "float32"), Pool("cpu")
    larger.threads = pool.threads + 1  # counts as another device

    def contexts(repeats: int, chosen: Pool = pool) -> list[sweep.Job]:
        return context.jobs_of(work, (), (1,), repeats, chosen)

    def primitives(repeats: int) -> list[sweep.Job]:
        return [collectives.job(where, "broadcast", (64, 128), 2, repeats, pool)]

    def studies(repeats: int) -> list[sweep.Job]:
        [both] = study.jobs("eager", (16,), (16,), place, repeats)
        return [both.part(both.expected[:2])]  # the other implementation compiles

    for jobs in (contexts, primitives, studies):
        path = tmp_path / f"{jobs.__name__}.jsonl"
        assert all(row.ok for row in sweep.run(jobs(2), path).rows)
        assert not sweep.left(jobs(2), path)
        assert len(sweep.left(jobs(3), path)) == 1
    assert len(sweep.left(contexts(2, larger), tmp_path / "contexts.jsonl")) == 1


def test_noise_is_not_reported_as_hidden() -> None:
    assert context.hidden_share(8.0, 4.0, 10.0) == 0.5
    assert context.hidden_share(8.0, 4.0, 14.0) == 0.0
    assert context.hidden_share(10.4, 4.0, 10.0) == 1.0
    assert math.isnan(context.hidden_share(10.6, 4.0, 10.0))
    assert math.isnan(context.hidden_share(10.0, 0.0, 10.0))


def test_what_is_compared_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a busy machine slows one device, a strategy, its computation and its communication equally often."""
    clock = iter(range(1, 100))
    monkeypatch.setattr(context_rank, "timed", lambda call, *_, **__: (float(next(clock)), call()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        work, shorter = (Workload(32, 1, 4, 2, tokens, "float32") for tokens in (16, 8))
        entries = ((work, (ALONE, "")), (work, ("ring", "zigzag")), (shorter, (ALONE, "")))
        found = context_rank.run_on_rank(entries, KINDS[:1], 3, "cpu")
    finally:
        dist.destroy_process_group()
    alone, ring, weak = (found[entry]["forward"] for entry in entries)
    assert (alone.steps, alone.computing, alone.communication) == ([1.0, 6.0, 11.0], 6.0, 0.0)
    assert (ring.steps, ring.computing, ring.communication) == ([2.0, 7.0, 12.0], 8.0, 9.0)
    assert weak.steps == [5.0, 10.0, 15.0]
    assert weak.peak_mib < alone.peak_mib


class Picky(Pool):
    """A stand-in for ranks: it answers with the entries that it was asked for, and raises for an unknown layout."""

    def get(self, num: int) -> Any:
        self.num = num
        return self

    def run(self, *asked: Any, **_: float) -> Any:
        _, entries, kinds, *_ = asked
        if ("ring", "spiral") in [case for _, case in entries]:
            raise RankError("rank 0: ValueError: no layout is called spiral")
        answer = dict.fromkeys(kinds, context_rank.Measured([2.0], 1.0, 1.0, 1.0, 1.0, 0.5, 1e9))
        return [dict.fromkeys(entries, answer)] * self.num


def test_one_device_takes_turns_with_the_most_ranks_whole_and_for_weak_scaling(tmp_path: Path) -> None:
    work, path = Workload(32, 1, 4, 2, 64, "float32"), tmp_path / "context.jsonl"
    jobs = context.jobs_of(work, [("ring", "zigzag")], (1, 2, 4), 1, Picky("cpu"))
    ring, rows = "ring zigzag", [job.measure() for job in jobs]
    found = [{(row.impl, row.more["tokens"]): row.more["scaling"] for row in measured} for measured in rows]
    assert found == [
        {(ALONE, 64): "strong", (ring, 64): "strong", (ALONE, 16): "weak"},
        {(ring, 64): "strong", (ring, 32): "weak"},
    ]
    record.append(rows[0][:4], path)  # interrupted: one device with fewer tokens is left
    left = sweep.left(jobs[:1], path)
    assert [job.num_in_turns for job in (*jobs, *left)] == [3, 2, 1]
    assert jobs[0].name == "context 1x32, 4/2 heads, 64 tokens 3 in turns float32 on 4 ranks"
    assert [{(row.impl, row.shape) for row in job.expected} for job in left] == [
        {(ALONE, "1x32, 4/2 heads, 16 tokens")}
    ]


def test_one_that_fails_does_not_cost_those_it_takes_turns_with(tmp_path: Path) -> None:
    work, path = Workload(32, 1, 4, 2, 16, "float32"), tmp_path / "context.jsonl"
    cases = (("ring", "zigzag"), ("ring", "spiral"))
    jobs = context.jobs_of(work, cases, (2,), 1, Picky("cpu"))
    assert jobs[0].name == "context 1x32, 4/2 heads, 16 tokens 2 in turns float32 on 2 ranks"
    outcome = sweep.run(jobs, path)
    assert {row.impl: row.ok for row in outcome.rows} == {"ring zigzag": True, "ring spiral": False}
    assert (outcome.num_measured, outcome.num_left) == (2, 0)
    assert [{row.impl for row in job.expected} for job in sweep.left(jobs, path)] == [{"ring spiral"}]


def test_a_model_is_timed_phase_by_phase(tmp_path: Path) -> None:
    place = record.find_device("cpu")
    rows = model.measure(Setting("tiny", 1, 16, "bfloat16", warmup=1, steps=3), place)
    by = {row.kind: row for row in rows}
    assert list(by) == list(model.KINDS)
    assert all(row.p20_ms > 0 and not math.isnan(row.std_ms) for row in rows)
    assert by["training"].mean_ms == pytest.approx(
        sum(by[kind].mean_ms for kind in ("forward", "backward", "optimizer")), rel=1e-3
    )
    assert by["training"].peak_mib > by["inference"].peak_mib
    # 16 bytes per parameter: the weight, its gradient, two moments. Inference has the weight and its bfloat16 cast.
    assert by["training"].peak_mib * 2**20 > 16 * model.preset("tiny").num_parameters
    assert by["inference"].peak_mib * 2**20 < 8 * model.preset("tiny").num_parameters
    record.append(rows, tmp_path / "model.jsonl")
    from flashspan.plan.command import measurements

    assert not measurements([])
    assert len(model.table(rows).cells) == 1


def test_inference_alone_is_measured_where_a_step_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting("tiny", 1, 16, attention="plain")
    step, inference = model.needed_bytes(setting), model.needed_bytes(setting, model.FORWARD_ONLY)
    assert inference < step / 2
    monkeypatch.setattr(memory, "free_bytes", lambda _: (step + inference) / 2)
    options = {"presets": ("tiny",), "tokens": (16,), "batch": 1, "dtypes": ("float32",), "attentions": ("plain",)}
    shared: dict[str, Any] = {**options, "warmups": (0,), "steps": 2, "device": "cpu", "folder": tmp_path}
    model.bench_model(**shared)
    model.bench_model(**shared, forward_only=True, again=True)
    rows = record.read(tmp_path / "model.jsonl")
    assert [row.status for row in rows if row.kind == "inference"] == [record.OUT_OF_MEMORY, "ok"]
    assert {row.kind for row in rows if row.ok} == {"inference"}
    assert "inference" in capsys.readouterr().out


def test_studies_know_what_plain_attention_needs(tmp_path: Path) -> None:
    place = record.find_device("cpu")
    plain = study.eager_rows(32, 16, ["eager"], 2, place)
    assert {row.kind for row in plain} == {"forward", "backward"}
    assert all(row.p50_ms > 0 and row.peak_mib > 0 for row in plain)
    ours = study.flash_rows(33, 16, "bfloat16", ["flashspan"], place)
    assert {row.kind for row in ours} == {"forward", "backward", "both"}
    assert study.footprint(8, 16384, 64, 4) == 4 * 8 * (4 * 16384**2 + 8 * 16384 * 64)
    assert len(study.jobs("flash", study.FLASH_LENGTHS, study.HEAD_DIMS, place, 1)) == 10 * 4 * 2
    assert len(study.jobs("eager", study.EAGER_LENGTHS, study.HEAD_DIMS, place, 1)) == 5 * 4
    assert study.table(plain).cells
    assert study.memory_table(plain).cells == (("8x32x16", tables.show(plain[1].peak_mib)),)


def test_eager_and_compiled_take_turns_and_do_not_cost_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter(range(1, 100))
    monkeypatch.setattr(study, "timed", lambda call, *_: (float(next(clock)), call()))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    [job] = study.jobs("eager", (16,), (16,), record.find_device("cpu"), 3)
    found = {(row.impl, row.kind): row.p50_ms for row in job.measure()}
    # One warm-up round of all four, then three rounds: 5 to 8, 9 to 12, 13 to 16.
    assert found == {
        ("eager", "forward"): 9.0,
        ("eager", "backward"): 10.0,
        ("compiled", "forward"): 11.0,
        ("compiled", "backward"): 12.0,
    }

    def does_not_fit(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "compile", does_not_fit)
    outcome = sweep.run([job], tmp_path / "study.jsonl")
    assert {(row.impl, row.status) for row in outcome.rows} == {("eager", "ok"), ("compiled", record.OUT_OF_MEMORY)}
    assert {row.impl for row in job.part(job.expected[:2]).expected} == {"eager"}


def test_ours_and_plain_attention_take_turns_and_do_not_cost_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter(range(1, 100))
    monkeypatch.setattr(study, "timed", lambda call, *_: (float(next(clock)), call()))
    [job] = study.jobs("flash", (16,), (16,), record.find_device("cpu"), 1)[1:]
    assert [row.p50_ms for row in job.measure()] == [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]  # three rounds of six

    def does_not_fit(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(study, "plain", does_not_fit)
    outcome = sweep.run([job], tmp_path / "study.jsonl")
    assert {(row.impl, row.status) for row in outcome.rows} == {("flashspan", "ok"), ("pytorch", record.OUT_OF_MEMORY)}
    assert not sweep.left([job], tmp_path / "study.jsonl")
    assert {row.impl for row in job.part(job.expected[3:]).expected} == {"pytorch"}


def test_what_a_cpu_cannot_hold_is_recorded_and_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system may grant memory that it does not have, and later kill the process, which would end the sweep."""
    monkeypatch.setattr(memory, "free_bytes", lambda _: 20e3)
    place, some = record.find_device("cpu"), partial(Setting, "tiny", 1, 16, warmup=0, steps=1)
    jobs = [
        *study.jobs("eager", (64,), (16,), place, 1),
        *study.jobs("flash", (64,), (16,), place, 1)[1:],
        model.job(some(), place),
    ]
    outcome = sweep.run(jobs, tmp_path / "rows.jsonl")
    assert {(row.impl, row.status) for row in outcome.rows} == {
        ("eager", record.OUT_OF_MEMORY),
        ("compiled", record.OUT_OF_MEMORY),
        ("pytorch", record.OUT_OF_MEMORY),
        ("flashspan", "ok"),
        ("flashspan, eager", record.OUT_OF_MEMORY),
    }
    config = preset("tiny")
    scores = model.needed_bytes(some(attention="plain")) - model.needed_bytes(some())
    assert scores == config.num_layers * config.num_heads * 16**2 * 4


def test_collectives_are_measured_and_fitted(pool: Pool) -> None:
    where = record.environment(record.find_device("cpu"))
    for name in collectives.PRIMITIVES:
        rows = collectives.job(where, name, (1024, 65536), 2, 2, pool).measure()
        assert [row.bytes for row in rows] == [1024, 65536]
        assert all(row.ok and row.more["gb_per_s"] > 0 and row.more["alpha_us"] >= 0 for row in rows)
        assert collectives.table(rows).cells


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("", {}),
        ("--ranks 1 3", {"ranks": (1, 3)}),
        ("--tokens 512 --repeats 5", {"tokens": 512, "repeats": 5}),
        ("--width 512 --layers 4", {"width": 512, "layers": 4}),  # the default without --quick, but given explicitly
    ],
)
def test_given_options_win_over_those_of_quick(
    given: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted: list[record.Row] = []

    def note(jobs: list[sweep.Job], *_: object, **__: object) -> sweep.Outcome:
        wanted.extend(row for job in jobs for row in job.expected)
        return sweep.Outcome([], 0, 0)

    monkeypatch.setattr(sweep, "run", note)
    assert main(["bench", "context", "--quick", *given.split(), "--folder", str(tmp_path)]) == 0
    asked = context.QUICK | changes
    assert {row.ranks for row in wanted} == set(asked["ranks"])
    assert {row.more["repeats"] for row in wanted} == {asked["repeats"]}
    whole = f"{asked['layers']}x{asked['width']}, 8/2 heads, {asked['tokens']} tokens"
    most = {row.impl for row in wanted if row.shape == whole and row.ranks == max(asked["ranks"])}
    assert most == {" ".join(case) for case in context.QUICK_CASES}


def test_a_preset_is_measured_as_it_is_and_its_rows_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(context, "Pool", Picky)
    words = ["bench", "context", "--quick", "--preset", "tiny", "--tokens", "64", "--folder", str(tmp_path)]
    assert main(words) == 0
    rows = record.read(tmp_path / "context.jsonl")
    assert {row.shape for row in rows} == {"tiny, 64 tokens", "tiny, 32 tokens"}
    # A row for each pass of the six strategies of --quick, and of one device with all and with half of the tokens.
    assert len(rows) == 16
    said = capsys.readouterr().out
    assert "8 measured" in said
    assert "context.jsonl, 2 rows per measurement; " in said
    # Vocabulary, feed-forward width and tied embeddings come from the preset too, not from its width.
    for name in ("llama-2-7b", "llama-3.2-1b"):
        assert Workload.of_preset(name, 8, "float32").config() == preset(name)


def test_a_preset_that_memory_cannot_hold_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(context, "Pool", lambda *_: pytest.fail("ranks were wanted"))
    monkeypatch.setattr(context, "free_bytes", lambda _: 2.0**34)
    assert main(["bench", "context", "--preset", "llama-2-7b", "--ranks", "1", "4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "llama-2-7b on 4 ranks needs 200.8 GiB for its weights and gradients, but 16.0 are available" in said
    assert "use fewer --ranks, a smaller model" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_user_gets_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert main(["bench", "context", "--quick", "--folder", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert time.monotonic() - begin < 180
    assert "is fastest" in capsys.readouterr().out
    assert main(["bench", "context", "--quick", "--folder", str(tmp_path)]) == 0
    assert "0 measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["context", "--ranks", "9"], "1 to 8 ranks"),
        (["context", "--tokens", "3"], "2 tokens per rank"),
        (["context", "--heads", "3"], "must divide"),
        (["context", "--ranks"], "1 to 8 ranks: got none"),
        (["context", "--quick", "--ranks", "9"], "1 to 8 ranks: got 9"),
        (
            ["context", "--quick", "--tokens", "3", "--repeats", "0"],
            "2 tokens per rank: got 3 tokens on 2 ranks",
        ),
        (["context", "--quick", "--width", "30"], "must divide"),
        (["context", "--preset", "llama-2-7"], "did you mean 'llama-2-7b'"),
        (["context", "--preset", "tiny", "--width", "64", "--heads", "4"], "leave out --width 64 --heads 4"),
        (["model", "--presets"], "one or more models, such as small: got none"),
        (["model", "--attentions"], "--attentions takes flashspan, plain: got none"),
        (["model", "--presets", "smal"], "did you mean 'small'"),
        (["model", "--dtypes", "float8"], "--dtypes takes float32"),
        (["model", "--tokens", "0"], "tokens must be 1 or more"),
        (["model", "--warmups", "-1"], "warmups must be 0 to 1,000,000: got -1"),
        (["model", "--device", "tpu"], "auto, cpu or cuda"),
        (["study", "eager", "--head-dims", "999"], "head sizes 1 to 256"),
        (["study", "flash", "--head-dims"], "head sizes 1 to 256: got none"),
        (["study", "eager", "--repeats", "0"], "repeats must be 1 to 1,000,000: got 0"),
        (["collectives", "--ranks", "1"], "2 to 64 ranks"),
        (["collectives", "--sizes", "8"], "two or more multiples of 4, each at least 4 bytes per rank: got 8"),
        (["collectives", "--repeats", "0"], "repeats must be 1 to 1,000,000: got 0"),
        (["data", "--only", "fastest"], "--only takes naive, flat"),
        (["data", "--folder", "/dev/null/x"], "rows cannot be written to /dev/null/x/data.jsonl"),
        (["data", "--ranks", "2", "--only"], "hybrid: got none"),
        (["data", "--width", "250"], "heads must divide the width, kv heads must divide the heads"),
        (["data", "--kv-heads", "3"], "8 heads and 3 kv heads"),
        (["data", "--layers", "0"], "--layers must be 1 or more: got 0"),
        (["data", "--window", "0"], "--window must be 1 or more: got 0"),
        (["data", "--ranks", "4", "--tokens", "7"], "2 tokens per rank or more: got 7 tokens on 4 ranks"),
        (["data", "--tokens", "129"], "the ranks must divide --tokens: got 129 tokens on 2 4 ranks"),
        (["data", "--ranks", "2", "3", "--only", "tensor"], "divides the 4 kv heads: got 3 for tensor"),
    ],
)
def test_bad_input_is_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
