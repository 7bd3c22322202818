"""A page made of rows: its sections in order, each saying what is missing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashspan.bench import plots, record, writeup_jobs
from flashspan.bench.record import Row
from flashspan.bench.tables import Table, model_size

Section = tuple[str, tuple[str, ...], Callable[[Sequence[Row]], None]]
"""Its title, the parts of the sweep it is made from (none: it has a command of its own), who writes it."""


def in_order(row: Row) -> tuple[float, ...]:
    """By head size in studies, by tokens, by model: parts share jobs, so the order of measuring is none to read."""
    return (row.more.get("head_dim", 0), row.more.get("tokens", 0), model_size(row)[0])


def same_visit(*rows: Row) -> bool:
    """Whether these were measured with the same code: on another day, on another host, a small model's step may take
    half as long again."""
    return len({row.commit for row in rows}) == 1


def ends(found: Sequence[tuple[float, str]]) -> str:
    """The least and the most of some ratios, each with what it is of."""
    (least, lowest), (most, highest) = min(found), max(found)
    return f"{least:.2f} ({lowest}) to {most:.2f} ({highest})"


class Page:
    """Makes the page. A section says what is missing of it, and which command would give it."""

    def __init__(self, rows: Sequence[Row], folder: Path) -> None:
        self.rows, self.folder = sorted(record.newest(rows), key=in_order), folder
        self.lines: list[str] = []
        self.parts = writeup_jobs.sections(torch.device("cpu"))  # for what they measure, wherever that was done

    def pick(self, what: str, *kinds: str, test: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        return [row for row in self.rows if row.what == what and (not kinds or row.kind in kinds) and test(row)]

    def say(self, *text: str) -> None:
        self.lines += [*text, ""]

    def table(self, table: Table) -> None:
        self.say(table.markdown().strip())

    def picture(self, name: str, figure: object, alt: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(plots.to_svg(figure, alt), encoding="utf-8")  # type: ignore[arg-type]
        self.say(f"![{alt}](benchmarks/writeup/{name})")

    def section(self, parts: Sequence[str], write: Callable[[Sequence[Row]], None]) -> None:
        jobs = list({job.expected[0].key: job for part in parts for job in self.parts[part]}.values())
        about = {row.subject for job in jobs for row in job.expected}
        rows = [row for row in self.rows if row.subject in about]
        known = {row.subject for row in rows if row.ok or row.status == record.OUT_OF_MEMORY}
        missing = [job.name for job in jobs if not all(row.subject in known for row in job.expected)]
        if not any(row.ok for row in rows):
            self.say("Not measured yet: `python -m flashspan.bench.writeup measure` on a GPU gives the rows.")
            return
        write(rows)
        if missing:
            named = "; ".join(missing[:4]) + ("; ..." if len(missing) > 4 else "")
            self.say(f"Not measured yet: {len(missing)} of {len(jobs)} jobs of this section ({named}).")

    def page(self) -> str:
        places = dict.fromkeys(f"{row.device}, torch {row.torch}, Triton {row.triton}" for row in self.rows)
        self.say(
            "# Write-up",
            "",
            "Answers to the written questions of CS336's assignment 2 (systems), from measured rows: "
            f"{'; '.join(places) or 'none yet'}. Made by `python -m flashspan.bench.writeup write`; "
            "rows by `python -m flashspan.bench.writeup measure --minutes 8.5`, run until nothing is left.",
        )
        for title, parts, write in self.outline():
            self.say(f"## {title}")
            if parts:
                self.section(parts, write)
            else:
                write(self.rows)
        return "\n".join(self.lines).rstrip() + "\n"

    def outline(self) -> list[Section]:
        """The page's sections in order."""
        raise NotImplementedError
