"""Tables from rows: one set of columns, shown in a terminal, as Markdown or as HTML."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashspan.bench.measure.record import Row
from flashspan.model import preset

WIDE = 5
"""The number of columns that fit a narrow screen. There, the rows of a table with more columns are shown as blocks."""
MODEL_SHAPE = re.compile(r"(?P<preset>\S+) (?P<batch>\d+)x(?P<tokens>\d+)")
"""The form of the shape in rows of models."""


@dataclass(frozen=True)
class Table:
    """A title, headings and cells of text; the first `num_names` columns are words, the others numbers."""

    title: str
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    num_names: int = 1

    def rich(self) -> Any:
        from rich.table import Table as Rich
        from rich.text import Text

        shown = Rich()
        for i, heading in enumerate(self.headings):
            shown.add_column(Text(heading), justify="left" if i < self.num_names else "right", no_wrap=True)
        for line in self.cells:
            shown.add_row(*(Text(cell) for cell in line))
        return shown

    def width(self, columns: Iterable[int]) -> int:
        """The number of characters that these columns need in a terminal."""
        from rich.cells import cell_len

        lines = (self.headings, *self.cells)
        return 1 + sum(3 + max(cell_len(line[i]) for line in lines) for i in columns)

    def parts(self, width: int) -> list[Table]:
        """The table, split into tables of this width if possible: each has the names and some of the number columns."""
        names = list(range(self.num_names))
        groups = [names]
        for i in range(self.num_names, len(self.headings)):
            if groups[-1] != names and self.width([*groups[-1], i]) > width:
                groups.append(names)
            groups[-1] = [*groups[-1], i]
        return [
            Table(
                "continued" if number else self.title,
                tuple(self.headings[i] for i in group),
                tuple(tuple(line[i] for i in group) for line in self.cells),
                self.num_names,
            )
            for number, group in enumerate(groups)
        ]

    def markdown(self) -> str:
        rule = ["---" if i < self.num_names else "---:" for i in range(len(self.headings))]
        lines = [self.headings, rule, *self.cells]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

    def html(self) -> str:
        wide = len(self.headings) > WIDE
        style = ' class="wide"' if wide else ""

        def line(cells: Sequence[str], tag: str) -> str:
            kinds = ["" if i < self.num_names else ' class="number"' for i in range(len(cells))]
            if wide and tag == "td":  # on a narrow screen each cell shows its heading, except the first
                said = ["", *(f' data-heading="{html.escape(each, quote=True)}"' for each in self.headings[1:])]
                kinds = [kind + more for kind, more in zip(kinds, said, strict=True)]
            inside = "".join(f"<{tag}{k}>{html.escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True))
            return f"<tr>{inside}</tr>"

        body = "\n".join(line(cells, "td") for cells in self.cells)
        return (
            f'<div class="scroll"><table{style}><caption>{html.escape(self.title)}</caption>'
            f"<thead>{line(self.headings, 'th')}</thead><tbody>\n{body}\n</tbody></table></div>"
        )


def show_tables(tables: Iterable[Table], note: str = "") -> None:
    """Print tables, then a note. Tables wider than the terminal are split; in a file, tables are never split."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    room = console.width
    for table in tables:
        for part in table.parts(room) if console.is_terminal else [table]:
            console.width = max(room, part.width(range(len(part.headings))))
            # The title is printed apart from the table, which would wrap it to the width of its columns.
            console.print(Text(part.title, style="italic"), soft_wrap=not console.is_terminal)
            console.print(part.rich())
    if note:
        console.print(note, soft_wrap=True)


def make(title: str, rows: Iterable[Row], columns: dict[str, Callable[[Row], object]], num_names: int = 1) -> Table:
    """A table with a line per row; `columns` has a function that returns a row's cell for each heading."""
    cells = tuple(tuple(show(cell(row)) for cell in columns.values()) for row in rows)
    return Table(title, tuple(columns), cells, num_names)


def pivot(
    title: str,
    rows: Iterable[Row],
    *,
    line: Callable[[Row], tuple[object, ...]],
    names: Sequence[str],
    column: Callable[[Row], object],
    cell: Callable[[Row], object],
) -> Table:
    """A table with a line for every value of `line` and a column for every value of `column`. The cell of a failed row
    is its status."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    headings: dict[str, None] = {}
    for row in rows:
        heading = show(column(row))
        headings[heading] = None
        shown = show(cell(row)) if row.ok else short_status(row)
        found.setdefault(tuple(show(part) for part in line(row)), {})[heading] = shown
    cells = tuple((*key, *(values.get(heading, "") for heading in headings)) for key, values in found.items())
    return Table(title, (*names, *headings), cells, len(names))


def model_size(row: Row) -> tuple[float, int]:
    """A sort key: the parameters and tokens of a model's row; models that are not presets come last."""
    read = MODEL_SHAPE.fullmatch(row.shape)
    if read is None:
        return math.inf, 0
    try:
        return preset(read["preset"]).num_parameters, int(read["tokens"])
    except ValueError:  # the preset of another version
        return math.inf, int(read["tokens"])


def short_status(row: Row) -> str:
    return "OOM" if row.status == "out of memory" else row.status.split(":")[0]


def show(value: object) -> str:
    """A value as text: a float with about four digits, other values as they are, and nothing for None or nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        if value == 0 or abs(value) >= 1e7 or abs(value) < 1e-3:
            return f"{value:.3g}"
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{min(digits, 3)}f}"
    return str(value)
