"""Tables of a page that sort themselves when somebody clicks on a heading; without scripts they are plain tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.short_names import fitted, short_name
from stepscope.reports.cells import cell_text, headings, is_number
from stepscope.reports.html import escaped

__all__ = ["TABLE_SCRIPT", "TABLE_STYLE", "sortable_table"]

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
    """Short, with all of it to be seen on pointing at it."""
    text = cell_text(column, value)
    short = fitted(short_name(text), LONGEST_CELL)
    title = f' title="{escaped(text)}"' if short != text else ""
    return f"<td{title}>{escaped(short)}</td>"
