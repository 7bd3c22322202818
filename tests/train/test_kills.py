"""Kills at random times change no bit of the result, and leave no process or file. Campaign: `pytest -m campaign
-s`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flashspan.launch import Ranks
from flashspan.train import TrainConfig, train
from flashspan.train.loop import Trainer
from flashspan.train.metrics import read_metrics
from flashspan.train.run import run_rank
from tests.train.cases import ConfigOf, assert_same_bits, final_state
from tests.train.commands import PARENT, RANK, SERVER, Command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
STEPS = 24
STARTUP = 4.0
"""About how many seconds a command needs to start."""
OPTIONS = (
    "--parallel.ranks=2",
    "--parallel.context=2",
    "--checkpoint.every=2",
    f"--train.steps={STEPS}",
    "--train.evaluate_every=8",
    "--train.evaluate_samples=2",
)


def check_run(config: TrainConfig, want: dict[str, Tensor]) -> None:
    """Check that a completed run has the bits of an undisturbed one, and each row of metrics once."""
    assert_same_bits(final_state(config), want)
    rows = read_metrics(Path(config.checkpoint.folder) / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, config.train.steps + 1))
    assert [row["step"] for row in rows if "validation_loss" in row] == [8, 16, 24]


@dataclass(frozen=True)
class Kill:
    """The process to kill, and the time: seconds after the start, or after a step is printed."""

    kind: str
    rank: int
    step: int
    seconds: float

    @classmethod
    def draw(cls, chance: random.Random, kinds: list[str]) -> Kill:
        kind, rank, begins = chance.choice(kinds), chance.randrange(2), chance.random() < 0.3
        step, seconds = chance.randint(1, STEPS), chance.uniform(0, STARTUP if begins else 0.1)
        return cls(kind, rank, 0 if begins else step, seconds)

    def wait_and_do(self, command: Command) -> bool:
        """Wait, then kill the process. Returns whether it was killed before the run ended."""
        while command.process.poll() is None and command.last_step() < self.step:
            time.sleep(0.005)
        time.sleep(self.seconds)
        while command.process.poll() is None:
            if found := command.find(self.kind):
                os.kill(found[self.rank % len(found)], signal.SIGKILL)
                return True
            time.sleep(0.02)
        return False


CAMPAIGN = [pytest.mark.campaign, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("num_kills", "automatic", "seed"),
    [
        pytest.param(1, True, 4, id="sample", marks=pytest.mark.slow),
        pytest.param(30, True, 0, id="restarted", marks=CAMPAIGN),
        pytest.param(70, False, 1, id="run again", marks=CAMPAIGN),
    ],
)
def test_kills_at_random_moments_cost_nothing(
    config_of: ConfigOf, tmp_path: Path, num_kills: int, automatic: bool, seed: int
) -> None:
    """Kill ranks and the fork server of runs that restart automatically; or also the command, which is then rerun."""
    chance = random.Random(seed)
    whole = config_of(*OPTIONS, f"--checkpoint.folder={tmp_path / 'whole'}")
    assert train(whole) == 0
    want = final_state(whole)
    kills = runs = 0
    while kills < num_kills:
        folder = tmp_path / str(runs)
        config = config_of(*OPTIONS, f"--checkpoint.folder={folder}", f"--train.max_restarts={3 * automatic}")
        finished = False
        while not finished:
            kill = Kill.draw(chance, [RANK, SERVER] if automatic else [PARENT, RANK, SERVER])
            command = Command(config, tmp_path)
            killed = kill.wait_and_do(command)
            code = command.process.wait(100)
            left, finished = command.left(), code == 0
            kills += killed
            print(f"seed {seed} run {runs} kills {kills}: {kill}, {killed=}, exit code {code}", flush=True)
            command.close()
            assert left == []
            assert finished or (killed and not automatic), command.output.read_text()
        check_run(config, want)
        shutil.rmtree(folder)
        runs += 1


def resident_at(config: TrainConfig, steps: tuple[int, ...]) -> list[int]:
    """Run, and return the resident bytes of this rank after each of these steps."""
    seen: list[int] = []
    take_step = Trainer.take_step

    def take_and_see(self: Trainer, asked: Any = ()) -> Any:
        result = take_step(self, asked)
        if self.step in steps:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append(pages * os.sysconf("SC_PAGE_SIZE"))
        return result

    Trainer.take_step = take_and_see  # type: ignore[method-assign]
    try:
        run_rank(config)
    finally:
        Trainer.take_step = take_step  # type: ignore[method-assign]
    return seen


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("axis", ["context", "shard", "data"])
def test_memory_grows_by_less_than_1_percent_in_a_thousand_steps(config_of: ConfigOf, axis: str) -> None:
    """In new processes, after 100 steps in which code is loaded and the first evaluations and checkpoints are made."""
    degrees = {"context": 1, axis: 2}
    options = [f"--parallel.{name}={value}" for name, value in degrees.items()]
    steps = ("--train.steps=1100", "--train.evaluate_every=50", "--train.evaluate_samples=4", "--checkpoint.every=50")
    with Ranks(2, threads=1, timeout=30) as ranks:
        residents = ranks.run(resident_at, config_of(*options, *steps), (1, *range(100, 1101, 100)), timeout=1000)
    for rank, (first, *seen) in enumerate(residents):
        print(
            f"{axis}, rank {rank}: MiB resident after step 1 and each 100:",
            *(round(x / 2**20, 1) for x in (first, *seen)),
        )
        print(f"{axis}, rank {rank}: growth from step 100 to 1,100: {seen[-1] / seen[0] - 1:.2%}")
        assert seen[-1] <= 1.01 * seen[0]
