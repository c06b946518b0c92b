"""Pictures as SVG, for light and dark pages: lines over logarithmic axes, bars, and steps. Pure: text out."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 56, 52
_HEIGHT = 380
# Told apart by those who do not see all colours; the first is ours.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.faint { fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 }
.mark { stroke: #57606a; stroke-width: 1.5; stroke-dasharray: 4 3 }
.step { fill: #f6f8fa; stroke: #0072b2; stroke-width: 1.5 }
.arrow { fill: #0072b2 }
.name { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .mark { stroke: #9198a1 }
  .step { fill: #161b22; stroke: #56b4e9 }
  .arrow { fill: #56b4e9 }
}
"""


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turn}>{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str = "grid") -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"/>'


def _picture(height: float, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img"',
            f' width="{WIDTH}" height="{height:.0f}" aria-label="{escape(title, quote=True)}">',
            f"<style>{_STYLE}</style>",
            _text(16, 26, title, kind="title"),
            *parts,
            "</svg>\n",
        ]
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten, from below `low` to above `high`."""
    steps = [digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)]
    first = max((step for step in steps if step <= low * 1.0001), default=steps[0])
    last = min((step for step in steps if step >= high * 0.9999), default=steps[-1])
    return [step for step in steps if first <= step <= last]


def lines(title: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Points (x, y), both above zero, joined for each of `series`; both axes are logarithmic."""
    points = [point for each in series.values() for point in each]
    columns = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    rows = _ticks(min(y for _, y in points) / 1.5, max(y for _, y in points) * 1.2)
    if len(columns) == 1:
        columns = [columns[0] / 2, columns[0], columns[0] * 2]
    bottom, right = _HEIGHT - _BOTTOM, WIDTH - _RIGHT - 190

    def place(x: float, y: float) -> tuple[float, float]:
        along = math.log(x / columns[0]) / math.log(columns[-1] / columns[0])
        height = math.log(y / rows[0]) / math.log(rows[-1] / rows[0])
        return _LEFT + along * (right - _LEFT), bottom - height * (bottom - _TOP)

    parts = []
    for tick in rows:
        y = place(columns[0], tick)[1]
        parts += [_line(_LEFT, y, right, y), _text(_LEFT - 8, y + 4, f"{tick:,g}", "end", "faint")]
    for tick in columns:
        x = place(tick, rows[0])[0]
        parts += [_line(x, bottom, x, bottom + 5), _text(x, bottom + 20, f"{tick:g}", "middle", "faint")]
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 12, across, "middle", "faint"))
    parts.append(_text(18, (_TOP + bottom) / 2, up, "middle", "faint", turned=True))
    taken: list[float] = []
    for colour, (name, each) in zip(_COLOURS, series.items(), strict=False):
        places = [place(*point) for point in sorted(each)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        label = places[-1][1]
        while any(abs(label - other) < 17 for other in taken):
            label += 4
        taken.append(label)
        parts.append(f'<circle cx="{right + 16:.1f}" cy="{label:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(right + 26, label + 4, name))
    return _picture(_HEIGHT, title, parts)


def bars(
    title: str,
    groups: Mapping[str, Sequence[tuple[str, float]]],
    mark: float = 1.0,
    notes: Mapping[tuple[str, str], str] | None = None,
    mark_name: str = "cp",
) -> str:
    """A bar for each (name, value) of each group, with its value, and a line at `mark`, called `mark_name`.

    `notes`, by group and name, stand beside the values.
    """
    notes = notes or {}
    names = list(dict.fromkeys(name for group in groups.values() for name, _ in group))
    longest = max(value for group in groups.values() for _, value in group)
    left, right = 210, WIDTH - _RIGHT - (130 if notes else 50)
    scale = (right - left) / max(longest, mark)
    parts: list[str] = []
    y = float(_TOP)
    for heading, group in groups.items():
        parts.append(_text(16, y + 12, heading, kind="faint"))
        y += 24 if notes else 0
        for name, value in group:
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(_text(left - 10, y + 14, name, "end"))
            parts.append(
                f'<rect x="{left}" y="{y:.1f}" width="{value * scale:.1f}" height="18" rx="2" fill="{colour}"/>'
            )
            said = [f"{value:.1f} ×" if value < 100 else f"{value:.0f} ×", *filter(None, [notes.get((heading, name))])]
            parts.append(_text(left + value * scale + 7, y + 14, ", ".join(said)))
            y += 24
        y += 14
    parts.append(_line(left + mark * scale, _TOP - 8, left + mark * scale, y - 10, "mark"))
    parts.append(_text(left + mark * scale, _TOP - 12, f"{mark_name}: {mark:g} ×", "middle", "faint"))
    return _picture(y + 6, title, parts)


def steps(title: str, parts: Sequence[tuple[str, str, str]]) -> str:
    """Boxes from left to right, with arrows between them: the name of each step, what it does, and a note below it."""
    gap, top, height, characters = 18, 44, 118, 15
    width = (WIDTH - 32 - gap * (len(parts) - 1)) / len(parts)
    drawn = []
    for number, (name, what, note) in enumerate(parts):
        x = 16 + number * (width + gap)
        middle = top + height / 2
        drawn.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="6" class="step"/>')
        drawn.append(_text(x + 10, top + 24, name, kind="name"))
        for line, text in enumerate(textwrap.wrap(what, characters)):
            drawn.append(_text(x + 10, top + 46 + 17 * line, text))
        for line, text in enumerate(textwrap.wrap(note, characters)):
            drawn.append(_text(x + width / 2, top + height + 22 + 17 * line, text, "middle", "faint"))
        if number:
            drawn.append(f'<path d="M{x - gap + 4:.1f} {middle - 6:.0f} l10 6 l-10 6 z" class="arrow"/>')
    return _picture(top + height + 62, title, drawn)
