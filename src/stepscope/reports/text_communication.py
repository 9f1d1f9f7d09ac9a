"""The table of what the ranks exchange, as lines of text: sibling groups in one line, the longest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.collectives import group_name
from stepscope.records.units import bytes_text, count_text, ms_text, rate_text

__all__ = ["communication_lines", "measured_text"]

SENT_COLUMNS, TIME_COLUMNS, LAST_COLUMNS = 15, 10, 12
NARROW = 76
"""Below it there is no room for who comes last."""
LINES = 8
OFTEN = 0.6
"""Of a group's collectives: a rank that comes last this often is named …"""
COLLECTIVES = 8
"""… if so many were seen: of five, some rank comes last in most by chance."""


def measured_text(communication: Mapping[str, Any]) -> str:
    """How it was measured, where that was on the device; empty otherwise, and in summaries of earlier versions."""
    measured = communication.get("measured")
    if not measured:
        return ""
    steps, of, missed = measured["steps"], measured["of"], measured["missed"]
    text = f"Communication measured on the device (NCCL's Flight Recorder) in {steps:,} of {count_text(of, 'step')}"
    if missed:
        were, they = ("was", "it") if missed == 1 else ("were", "they")
        text += f"; {count_text(missed, 'step')} {were} overwritten before {they} could be read"
    if last := measured["last_unread"]:
        text += "; the last step was not read" if last == 1 else f"; the last {last:,} steps were not read"
    return f"{text}."


def communication_lines(communication: Mapping[str, Any], width: int) -> list[str]:
    """The heading first; nothing for a table without rows."""
    alike: dict[tuple[str, str, str], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for group in communication["groups"]:
        for op in group["ops"]:
            alike.setdefault((group["kind"], group["description"], op["op"]), []).append((group, op))
    if not alike:
        return []
    last = LAST_COLUMNS if width >= NARROW else 0
    columns = width - 2 - SENT_COLUMNS - 2 * TIME_COLUMNS - last
    shown = sorted(alike.values(), key=lambda rows: -(_mean(rows, "exposed_ms") or _mean(rows, "transfer_ms") or 0.0))
    exposed = any(op["exposed_ms"] is not None for rows in shown for _, op in rows)
    cells = [
        ("exchange", "per step", *(("exposed", "hidden") if exposed else ("transfer", "bus")), "often last"),
        *(_cells(rows, columns - 1, exposed=exposed) for rows in shown[:LINES]),
    ]
    lines = [
        (
            f"  {_cut(what, columns - 1).ljust(columns)}{sent.rjust(SENT_COLUMNS)}{exposed.rjust(TIME_COLUMNS)}"
            f"{hidden.rjust(TIME_COLUMNS)}{whose.rjust(last) if last else ''}"
        ).rstrip()
        for what, sent, exposed, hidden, whose in cells
    ]
    if len(shown) > LINES:
        lines.append(f"  … and {count_text(len(shown) - LINES, 'more')} in summary.json")
    return lines


def _cells(
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], columns: int, *, exposed: bool
) -> tuple[str, str, str, str, str]:
    """``columns``: for what it is; a long name makes room for the operation.

    ``exposed``: whether what blocks is known of any; else it is how long it takes, and how fast that is.
    """
    group, op = rows[0]
    several = f" ×{len(rows)}" if len(rows) > 1 else ""
    count, size = _mean(rows, "count"), _mean(rows, "bytes")
    sent = f"{count:.3g} × {bytes_text((size or 0.0) / count)}" if count else bytes_text(size)
    if exposed:
        first, second = (ms_text(_mean(rows, name)) for name in ("exposed_ms", "overlapped_ms"))
    else:
        bus = _mean(rows, "bus_bytes_per_s")
        first, second = ms_text(_mean(rows, "transfer_ms")), rate_text(bus) if bus else ""
    who = group_name("" if several else group["name"], group["description"]) or group["kind"]
    what = f"{several} {op['op']}"
    return f"{_cut(who, columns - len(what))}{what}", sent, first, second, _often_last(rows)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "…"


def _often_last(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The rank that its group waited for longest, if that was most of the time."""
    candidates = [
        (row["late_ms"] * row["last"], row["rank"], row["last"] / group["arrivals"]["collectives"])
        for group, _ in rows
        if group["arrivals"] and group["arrivals"]["collectives"] >= COLLECTIVES
        for row in group["arrivals"]["ranks"]
    ]
    _, rank, share = max(candidates, default=(0.0, None, 0.0))
    return f"r{rank} {share:.0%}" if share >= OFTEN else ""


def _mean(rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> float | None:
    values = [op[name] for _, op in rows if op.get(name) is not None]
    return sum(values) / len(values) if values else None
