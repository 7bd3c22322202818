"""One section of a report: its tables, pictures and the commands that made them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashspan.bench.report import plots
from flashspan.bench.report.tables import Table


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows, and the commands that made its rows."""

    svg: str
    caption: str
    commands: list[str]

    def html(self, commands: Sequence[str]) -> str:
        """The figure as HTML. Its commands are left out if they are those of its section, `commands`."""
        shown = [] if list(dict.fromkeys(commands)) == list(dict.fromkeys(self.commands)) else self.commands
        caption = f"{html.escape(self.caption)} {as_code(shown)}".rstrip()
        return f"<figure>{self.svg}<figcaption>{caption}</figcaption></figure>"


@dataclass
class Section:
    """A part of the page: figures and tables, the commands that made their rows, and a note about them."""

    title: str
    commands: list[str] = field(default_factory=list)
    figures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    note: str = ""
    """An explanation of the section's headings and words, shown above its figures."""

    @property
    def name(self) -> str:
        """The section's anchor on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def html(self) -> str:
        made = f"<p>Made by {as_code(self.commands)}</p>" if self.commands else ""
        figures = "".join(figure.html(self.commands) for figure in self.figures)
        grid = f'<div class="figures">{figures}</div>' if figures else ""
        tables = "".join(table.html() for table in self.tables)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f'<section id="{self.name}"><h2>{html.escape(self.title)}</h2>{made}{note}{grid}{tables}</section>'


def as_code(commands: Sequence[str]) -> str:
    return ", ".join(f"<code>{html.escape(line)}</code>" for line in dict.fromkeys(commands))


def make_picture(figure: Any, caption: str, *commands: str) -> Picture:
    return Picture(plots.to_svg(figure, f"{figure.axes[0].get_title()}: {caption}"), caption, list(commands))
