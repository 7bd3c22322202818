"""`flashspan report DIR`: one self-contained HTML file from the rows of a folder.

flashspan report runs/bench
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flashspan.bench.measure import record
from flashspan.bench.measure.record import Row
from flashspan.bench.report.findings import check, current, find
from flashspan.bench.report.section import Section
from flashspan.bench.report.sections import SECTIONS

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --box: #f3f6fa; --line: #d8dee4;
  --accent: #4c78a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a0a8b2; --paper: #15181c; --box: #20252c;
  --line: #3a424c; --accent: #7fa8d4; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 80rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
p { max-width: 52rem; } a { color: var(--accent); }
nav { background: var(--box); padding: .6rem 1rem; margin: 1rem 0; } nav ul { columns: 18rem auto; }
.findings { background: var(--box); border-left: 4px solid var(--accent); padding: .6rem 1rem; }
nav h2, .findings h2 { margin-top: .3rem; } nav ul, .findings ul { padding-left: 1.2rem; margin: .3rem 0; }
.findings li { margin: .35rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem 1rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: system-ui, sans-serif !important; }
figcaption, caption { font-size: .85rem; color: var(--soft); text-align: left; }
caption { padding-bottom: .3rem; }
code { font-size: .85rem; background: var(--box); padding: .1em .3em; border-radius: 3px; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .25rem .45rem; border-bottom: 1px solid var(--line); text-align: left; }
th { vertical-align: bottom; overflow-wrap: normal; } td { overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
thead th { border-bottom: 2px solid var(--soft); }
@media (max-width: 44rem) {
  body { padding: .7rem; }
  .wide, .wide caption, .wide tbody { display: block; } .wide thead { display: none; }
  .wide tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .wide td { border: 0; padding: .05rem 0; } .wide td:empty { display: none; }
  .wide td[data-heading]::before { content: attr(data-heading) " "; color: var(--soft); }
  .wide td:first-child { flex-basis: 100%; font-weight: 600; }
}
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --box: #f3f6fa; --line: #ccc; }
  body { max-width: none; font-size: 10pt; } .scroll { overflow: visible; }
  table { font-size: 7pt; } th, td { padding: 1pt 3pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def contents(rows: Sequence[Row]) -> tuple[list[str], list[Section]]:
    """The findings and the sections of the page. ValueError for rows of another version."""
    shown = current(rows)
    check(shown)
    sections = [section for make_section in SECTIONS if (section := make_section(shown)) is not None]
    return find(rows, shown), sections


def page(findings: Sequence[str], sections: Sequence[Section], title: str = "flashspan: measured") -> str:
    """The whole document."""
    listed = "".join(f"<li>{html.escape(text)}</li>" for text in findings)
    links = "".join(f'<li><a href="#{section.name}">{html.escape(section.title)}</a></li>' for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>"
        f'<section class="findings"><h2>Findings</h2><ul>{listed}</ul></section>'
        f'<nav aria-label="Contents"><h2>Contents</h2><ul>{links}</ul></nav>'
        + "".join(section.html() for section in sections)
        + "</body></html>\n"
    )


def write_figures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write every figure of the page to a separate file; return the paths."""
    written, names = list[Path](), list[str]()
    for section in sections:
        for figure in section.figures:
            label = figure.svg.split('aria-label="', 1)[1].split(":", 1)[0]
            name = "-".join("".join(c if c.isalnum() else " " for c in label).split()).lower()
            names.append(name)
            times = names.count(name)  # more than one: the same figure of another workload
            written.append(folder / f"{name}{f'-{times}' if times > 1 else ''}.svg")
            # On the page, figures have the page's colours; a separate file needs its own.
            alone = figure.svg.replace("<svg", '<svg style="color: #1b1f24; background: #fff"', 1)
            _write(written[-1], alone, "--figures")
    return written


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; give another {option}") from error


def _refuse_empty(folder: Path) -> NoReturn:
    """Raise a ValueError that says why a folder has no rows."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the folder that holds it, {folder.parent}")
    fault = f"no rows in {folder}: it needs .jsonl files that `flashspan bench` wrote" if folder.exists() else ""
    raise ValueError(
        f"{fault or f'no folder {folder}'}; measure first, for instance with `flashspan bench context --quick`"
    )


def read(folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of a folder, and a finding about the files that have no rows of this version: other programs also write
    .jsonl."""
    rows, others = list[Row](), list[str]()
    for file in record.files_of(folder):
        try:
            rows += record.read(file)
        except ValueError as error:
            line = re.search(r", (line \d+),", str(error))
            others.append(f"{file}{f' ({line[1]})' if line else ''}")
    if not others:
        return rows or _refuse_empty(folder), []
    listed = "; ".join(others[:4]) + (f"; and {len(others) - 4} more" if len(others) > 4 else "")
    only_ours = f"only rows of this version of `flashspan bench` are read, and these files hold others: {listed}"
    if not rows:
        raise ValueError(
            f"no rows in {folder}: {only_ours}; measure first, for instance with `flashspan bench context --quick`"
        )
    return rows, [f"Left out: {only_ours}. Move them away, or measure again."]


def report(folder: Path = record.FOLDER, *, output: Path | None = None, figures: Path | None = None) -> int:
    """Make one self-contained HTML page from the rows that `flashspan bench` wrote to a folder.

    It opens with findings in plain words, computed from the rows: what bounds the run, how it scales, what to change
    first; then tables and plots, each with the command that made it. It has no scripts and loads nothing from the
    network.

    Example: flashspan bench context --quick && flashspan report

    Args:
        folder: Folder of the rows.
        output: File to write; FOLDER/report.html by default.
        figures: Folder for the figures as separate SVG files.
    """
    rows, left_out = read(folder)
    path = output or folder / "report.html"
    findings, sections = contents(rows)
    findings += left_out
    _write(path, page(findings, sections), "--output")
    files = write_figures(sections, figures) if figures is not None else []
    for text in findings:
        print(f"- {text}")
    print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB) from {len(rows)} rows")
    if files:
        print(f"and {len(files)} figures in {figures}")
    return 0
