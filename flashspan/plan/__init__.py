"""Memory and time of a run before it is launched: a cost model of the schedules that the executor runs."""

from .devices import Cluster, Device, Link, load_table
from .memory import Ledger, ParallelConfig, Run, ledger
from .search import Answer, longest, rank
from .simulate import Simulation, simulate
from .step import StepTime, step_time

__all__ = [
    "Answer",
    "Cluster",
    "Device",
    "Ledger",
    "Link",
    "ParallelConfig",
    "Run",
    "Simulation",
    "StepTime",
    "ledger",
    "load_table",
    "longest",
    "rank",
    "simulate",
    "step_time",
]
