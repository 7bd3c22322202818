"""The picture at the top of the README: speed of attention, ours and others, from the recorded rows.

flashspan bench attention --page
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from flashspan.bench.measure.record import Row

IMPLEMENTATIONS = {
    "flashspan": ("flashspan", "#e8590c"),
    "sdpa-cudnn": ("cuDNN", "#8f7fd6"),
    "flex": ("FlexAttention (compiled)", "#4c8fd0"),
    "sdpa-flash": ("flash-attn 2 (in PyTorch)", "#5fa56a"),
}
"""The implementations in the picture, in this order: name in the rows -> (label, colour)."""
SHAPES = {
    "1x16/16x16384x64 causal": "16,384 tokens, head size 64",
    "1x16/16x16384x128 causal": "16,384 tokens, head size 128",
    "1x32/8x8192x128 causal": "8,192 tokens, 32 heads, 8 key heads",
    "1x8/8x65536x128 causal": "65,536 tokens, head size 128",
}
"""The measured shapes in the picture -> their labels."""
TEXT = "#7d8791"
"""The colour of text: readable on a white and on a dark page, since the picture has no background."""
WIDTH, LEFT, RIGHT, TOP = 860, 284, 60, 84
BAR, GAP = 15, 20


@dataclass(frozen=True)
class Bar:
    """A speed, and the label and colour of its bar."""

    label: str
    colour: str
    tflops: float


def cases(rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """The bars of each case, from its newest rows of forward and backward together."""
    newest = {(row.shape, row.impl): row for row in rows if row.kind == "both"}
    drawn = {}
    for shape, title in SHAPES.items():
        found = [(newest.get((shape, name)), *style) for name, style in IMPLEMENTATIONS.items()]
        drawn[title] = [Bar(label, colour, row.tflops) for row, label, colour in found if row is not None]
    return {title: bars for title, bars in drawn.items() if bars}


def picture(rows: Sequence[Row]) -> str:
    """An SVG of horizontal bars, in TFLOP/s."""
    drawn = cases(rows)
    most = max(bar.tflops for bars in drawn.values() for bar in bars)
    height = TOP + sum(len(bars) * BAR + GAP for bars in drawn.values())
    device = rows[-1].device
    title = f"Attention on an {device}, forward and backward, causal, bfloat16: TFLOP/s"
    parts = [_text(8, 24, title, size=15, bold=True), *_legend()]
    y = TOP
    for name, bars in drawn.items():
        parts.append(_text(LEFT - 12, y + len(bars) * BAR / 2 + 5, name, anchor="end"))
        for bar in bars:
            width = (WIDTH - LEFT - RIGHT) * bar.tflops / most
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" rx="2" fill="{bar.colour}">'
                f"<title>{html.escape(bar.label)}: {bar.tflops:.0f} TFLOP/s</title></rect>"
            )
            parts.append(_text(LEFT + width + 6, y + BAR - 4, f"{bar.tflops:.0f}", size=12))
            y += BAR
        y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    style = 'font-family="system-ui, sans-serif"'
    return "\n".join([f'{head} {style} aria-label="{html.escape(title, quote=True)}">', *parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], 8
    for label, colour in IMPLEMENTATIONS.values():
        parts.append(f'<rect x="{x}" y="46" width="13" height="13" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 19, 57, label))
        x += 44 + 8 * len(label)
    return parts


def _text(x: float, y: float, text: str, *, size: int = 14, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{TEXT}"{weight}>{html.escape(text)}</text>'
