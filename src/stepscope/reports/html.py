"""Building blocks of HTML reports: the page, sortable tables, SVG charts.

A page is one file without external resources, light and dark, with all text escaped. Its ``Content-Security-Policy``
allows only the styles and scripts that we wrote, by hash, so that a name in a trace could not run as code even if it
got past the escaping.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from typing import Any

from stepscope.records.kernel_names import fitted, short_name
from stepscope.reports.layout import cell_text, headings, is_number

__all__ = [
    "CHART_STYLE",
    "TABLE_SCRIPT",
    "TABLE_STYLE",
    "Bar",
    "Curve",
    "Part",
    "curves",
    "escaped",
    "legend",
    "page",
    "sortable_table",
    "stacked_bars",
    "stacked_columns",
]


# -- page -------------------------------------------------------------------------------------------------------------

BASE_STYLE = """
:root { color-scheme: light dark; --back: #fdfdfc; --text: #1f2328; --soft: #6a737d; --line: #d8dde3; --card: #f4f6f8;
  --bad: #b3261e; --good: #1a7f37; --doubt: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --back: #16191d; --text: #e4e7ea; --soft: #9aa4ae; --line: #363c44;
  --card: #1f242a; --bad: #ff8a80; --good: #6fcf87; --doubt: #e8b64c; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
.bad { color: var(--bad); } .good { color: var(--good); } .doubt { color: var(--doubt); } .soft { color: var(--soft); }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .2rem 1rem; } dt { color: var(--soft); }
dd { margin: 0; min-width: 0; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--card); padding: .6rem; overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .15rem .5rem; text-align: left; }
th { color: var(--soft); font-weight: normal; } .wide { overflow-x: auto; }
"""


def page(title: str, body: str, *, tone: str, style: str = "", script: str = "") -> str:
    """A page. ``title``: plain text; ``body``: HTML; ``tone``: the class of the headline (bad, doubt or good)."""
    styles = BASE_STYLE + style
    allowed = f"default-src 'none'; style-src {_hash(styles)}" + (f"; script-src {_hash(script)}" if script else "")
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{styles}</style></head>\n"
    )
    scripts = f"<script>{script}</script>\n" if script else ""
    return f'{head}<body>\n<h1 class="{tone}">{escaped(title)}</h1>\n{body}\n{scripts}</body></html>\n'


def escaped(text: str) -> str:
    """Escape text, also for quoted attributes; unprintable characters are replaced."""
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


# -- tables -----------------------------------------------------------------------------------------------------------
# Tables that sort on a click on a heading; without scripts they are plain tables.

LONGEST_CELL = 72

TABLE_STYLE = """
table.sortable { width: 100%; } table.sortable td, table.sortable th { border-bottom: 1px solid var(--line); }
table.sortable td { white-space: nowrap; } td.number, th.number { text-align: right; }
td.number { font-variant-numeric: tabular-nums; }
.sortable button { all: unset; cursor: pointer; color: var(--soft); }
.sortable button:hover, .sortable button:focus-visible { color: var(--text); text-decoration: underline; }
.sortable th[aria-sort=descending] button::after { content: " ▾"; }
.sortable th[aria-sort=ascending] button::after { content: " ▴"; }
"""

TABLE_SCRIPT = """
document.addEventListener("click", function (event) {
  const button = event.target.closest(".sortable button");
  if (!button) return;
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = head.cellIndex, down = head.getAttribute("aria-sort") !== "descending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = function (row) {
    const cell = row.cells[column], number = cell.getAttribute("data-value");
    return number === null ? cell.textContent : number === "" ? -Infinity : Number(number);
  };
  const rows = Array.from(body.rows).map(function (row) { return [value(row), row]; });
  rows.sort(function (one, other) {
    const order = one[0] < other[0] ? -1 : one[0] > other[0] ? 1 : 0;
    return down ? -order : order;
  });
  for (const row of rows) body.appendChild(row[1]);
});
"""


def sortable_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns that are empty in all rows are left out."""
    shown = [column for column in columns if any(row[column] is not None and row[column] != "" for row in rows)]
    numeric = {column for column in shown if all(row[column] is None or is_number(row[column]) for row in rows)}
    heads = "".join(_head(title, column in numeric) for column, title in headings(shown).items())
    lines = [f'<div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead><tbody>']
    for row in rows:
        cells = (_number(column, row[column]) if column in numeric else _text(column, row[column]) for column in shown)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _head(title: str, numeric: bool) -> str:
    look = ' class="number"' if numeric else ""
    return f'<th{look}><button type="button">{escaped(title)}</button></th>'


def _number(column: str, value: Any) -> str:
    raw = "" if value is None else repr(value)
    return f'<td class="number" data-value="{raw}">{escaped(cell_text(column, value))}</td>'


def _text(column: str, value: Any) -> str:
    """A short cell, with the full text as its tooltip."""
    text = cell_text(column, value)
    short = fitted(short_name(text), LONGEST_CELL)
    title = f' title="{escaped(text)}"' if short != text else ""
    return f"<td{title}>{escaped(short)}</td>"


# -- charts -----------------------------------------------------------------------------------------------------------
# Charts as inline SVG: stacked bars and lines, colored by class so that they follow the page's light or dark mode.
#
# Coordinates are those of a drawing ``WIDTH`` wide, which the page scales. All text is escaped here; titles appear as
# tooltips. A chart has at most a few thousand shapes, whatever its input.

WIDTH = 960
GUTTER = 66
"""Space left of curves, for values."""
LETTER = 7
"""Width of a letter of a label."""
LONGEST_LABEL = 26
HEAD = 12
"""Space above the highest value of curves."""
FIGURES = 110
"""Space right of bars, for figures."""
ROW = 22
THICK = 15
TALL = 180
"""Height of columns and curves."""
AXIS = 20
MOST_COLUMNS = 1024
MOST_POINTS = 2000

CHART_STYLE = """
:root { --c1: #2f6fab; --c2: #74a9d8; --c3: #d9822b; --c4: #3a9679; --c5: #d3d8de; --c6: #a05195; --c7: #7a6f5d; }
@media (prefers-color-scheme: dark) { :root { --c1: #4a8fd0; --c2: #2f5f8f; --c3: #e39a4f; --c4: #4fae90; --c5: #3d444d;
  --c6: #c07ab5; --c7: #a3967f; } }
svg.chart { display: block; width: 100%; height: auto; min-width: 40rem; }
svg.chart text { fill: var(--text); font: 12px system-ui, sans-serif; } svg.chart text.soft { fill: var(--soft); }
svg.chart .axis { stroke: var(--line); stroke-width: 1; fill: none; }
.c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); } .c4 { fill: var(--c4); }
.c5 { fill: var(--c5); } .c6 { fill: var(--c6); } .c7 { fill: var(--c7); }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.line.c1 { stroke: var(--c1); fill: none; } .line.c3 { stroke: var(--c3); fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: 13px; margin: .3rem 0 .6rem; }
.legend svg { width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -1px; }
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    look: str
    """A class of ``CHART_STYLE``."""
    value: float
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str
    parts: tuple[Part, ...]
    figure: str = ""
    """Text at the end of the bar."""
    title: str = ""
    """Tooltip of the label, which may be cut."""

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Curve:
    look: str
    name: str
    points: Sequence[tuple[float, float]]
    """By time; each value holds until the next."""
    peak: str = ""
    """Text at the highest point."""


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A legend. ``entries``: class and meaning."""
    items = (
        f'<span><svg viewBox="0 0 10 10"><rect class="{look}" width="10" height="10"/></svg>{escaped(name)}</span>'
        for look, name in entries
    )
    return f'<div class="legend">{"".join(items)}</div>'


def stacked_bars(bars: Sequence[Bar]) -> str:
    """One row per bar, scaled to the longest."""
    longest = max((bar.total for bar in bars), default=0.0) or 1.0
    labels = 12 + LETTER * min(max((len(bar.label) for bar in bars), default=0), LONGEST_LABEL)
    room = WIDTH - labels - FIGURES
    lines = []
    for at, bar in enumerate(bars):
        top = at * ROW
        middle = top + ROW / 2 + 4
        name = fitted(bar.label, LONGEST_LABEL)
        title = f"<title>{escaped(bar.title or bar.label)}</title>"
        lines.append(f'<text x="{labels - 8}" y="{middle:g}" text-anchor="end">{escaped(name)}{title}</text>')
        left = float(labels)
        for part in bar.parts:
            wide = part.value / longest * room
            if wide > 0:
                lines.append(
                    f'<rect class="{part.look}" x="{left:.1f}" y="{top + 3}" width="{max(wide, 0.4):.1f}" '
                    f'height="{THICK}"><title>{escaped(part.title)}</title></rect>'
                )
            left += wide
        lines.append(f'<text class="soft" x="{left + 8:.1f}" y="{middle:g}">{escaped(bar.figure)}</text>')
    return _svg(len(bars) * ROW, lines)


def stacked_columns(bars: Sequence[Bar], words: Callable[[float], str]) -> str:
    """One thin column per bar, for many bars; ``words`` formats a value. The axis names the first and the last."""
    per_column = -(-len(bars) // MOST_COLUMNS) or 1
    groups = [bars[at : at + per_column] for at in range(0, len(bars), per_column)]
    longest = max((bar.total for bar in bars), default=0.0) or 1.0
    wide = (WIDTH - GUTTER) / max(len(groups), 1)
    paths: dict[str, list[str]] = {}
    for at, group in enumerate(groups):
        tops: dict[str, float] = {}
        for bar in group:
            for part in bar.parts:
                tops[part.look] = tops.get(part.look, 0.0) + part.value / len(group)
        bottom = float(TALL)
        for look, value in tops.items():
            height = value / longest * (TALL - HEAD)
            if height > 0:
                x, gap = at * wide, 1.0 if wide > 4 else 0.0
                paths.setdefault(look, []).append(
                    f"M{x:.1f} {bottom:.1f}h{wide - gap:.1f}v{-height:.1f}h{gap - wide:.1f}z"
                )
            bottom -= height
    lines = [*_scale(longest, words), *(f'<path class="{look}" d="{"".join(d)}"/>' for look, d in paths.items())]
    return _svg(TALL + AXIS, [*lines, *_ends(bars[0].label, bars[-1].label)])


def curves(series: Sequence[Curve], words: Callable[[float], str], first: str, last: str) -> str:
    """Step curves that start at zero; ``words`` formats a value."""
    points = [point for curve in series for point in curve.points]
    if not points:
        return ""
    begin, end = min(at for at, _ in points), max(at for at, _ in points)
    highest = max((value for _, value in points), default=0.0) or 1.0
    lines = list(_scale(highest, words))
    for curve in series:
        path = "".join(_steps(curve.points, begin, max(end - begin, 1e-12), highest))
        lines.append(f'<path class="line {curve.look}" d="{path}"><title>{escaped(curve.name)}</title></path>')
        if curve.peak and curve.points:
            lines += _peak(curve, begin, max(end - begin, 1e-12), highest)
    return _svg(TALL + AXIS, [*lines, *_ends(first, last)])


def _steps(points: Sequence[tuple[float, float]], begin: float, length: float, highest: float) -> Iterator[str]:
    every = -(-len(points) // MOST_POINTS) or 1
    for group in range(0, len(points), every):
        # Keep the highest of several points, so that a peak is not lost.
        at, value = max(points[group : group + every], key=lambda point: point[1])
        x, y = _placed(at, value, begin, length, highest)
        yield f"M{x:.1f} {y:.1f}" if group == 0 else f"H{x:.1f}V{y:.1f}"


def _placed(at: float, value: float, begin: float, length: float, highest: float) -> tuple[float, float]:
    return GUTTER + (at - begin) / length * (WIDTH - GUTTER), HEAD + (1 - value / highest) * (TALL - HEAD)


def _peak(curve: Curve, begin: float, length: float, highest: float) -> Iterator[str]:
    at, value = max(curve.points, key=lambda point: point[1])
    x, y = _placed(at, value, begin, length, highest)
    anchor = "end" if x > WIDTH / 2 else "start"
    yield f'<circle class="{curve.look}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="{anchor}">{escaped(curve.peak)}</text>'


def _scale(highest: float, words: Callable[[float], str]) -> Iterator[str]:
    for share in (0.0, 0.5, 1.0):
        y = HEAD + (1 - share) * (TALL - HEAD)
        yield f'<path class="axis" d="M{GUTTER} {y:.1f}H{WIDTH}"/>'
        value = escaped(words(highest * share)) if share else "0"
        yield f'<text class="soft" x="{GUTTER - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>'


def _ends(first: str, last: str) -> list[str]:
    y = TALL + AXIS - 5
    return [
        f'<text class="soft" x="{GUTTER}" y="{y}">{escaped(first)}</text>',
        f'<text class="soft" x="{WIDTH}" y="{y}" text-anchor="end">{escaped(last)}</text>',
    ]


def _svg(height: float, lines: Sequence[str]) -> str:
    return (
        f'<div class="wide"><svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img">'
        + "".join(lines)
        + "</svg></div>"
    )
