"""The history of a run's findings as rows: when each was first shown, changed, and was over, and that in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.finding import SEVERITIES, highest
from stepscope.records.finding_history import ENDED, FindingEpisode, episodes_of
from stepscope.records.text import duration_text
from stepscope.reports.finding_text import kind_name

__all__ = ["history_rows"]

MOST_ROWS = 200
"""Of a summary: the worst, in order of numbers."""


def history_rows(changes: Sequence[FindingEpisode], *, over: bool) -> list[dict[str, Any]]:
    """Return a row per episode.  ``over``: the run has ended, and so has every finding."""
    by_number: dict[int, list[FindingEpisode]] = {}
    for change in changes:
        by_number.setdefault(change.number, []).append(change)
    rows = [_row(last, by_number[last.number], over=over) for last in episodes_of(changes)]
    worst = sorted(rows, key=lambda row: -SEVERITIES.index(row["severity"]))[:MOST_ROWS]
    return sorted(worst, key=lambda row: row["number"])


def _row(last: FindingEpisode, changes: Sequence[FindingEpisode], *, over: bool) -> dict[str, Any]:
    finding = last.finding
    known = [own for change in changes for own in SEVERITIES if own == change.finding.get("severity")] or ["info"]
    severities = [own for place, own in enumerate(known) if not place or own != known[place - 1]]
    is_open = last.open and not over
    why = last.why or (ENDED if last.open and over else "")
    ranks = finding.get("ranks")
    row = {
        "number": last.number,
        "kind": str(finding.get("kind")),
        "name": kind_name(str(finding.get("kind"))),
        "severity": highest("info", *severities),
        "title": str(finding.get("title")),
        "ranks": ranks if isinstance(ranks, list) else [],
        "phase": finding.get("phase"),
        "attempt": last.attempt,
        "open": is_open,
        "first_step": last.first_step,
        "first_wall_ns": last.first_wall_ns,
        "last_step": last.step,
        "last_wall_ns": last.wall_ns,
        "why": why,
        "changes": [
            {
                "change": change.change,
                "severity": change.finding.get("severity"),
                "step": change.step,
                "wall_ns": change.wall_ns,
            }
            for change in changes
        ],
    }
    return {**row, "text": _text(row, severities)}


def _text(row: dict[str, Any], severities: Sequence[str]) -> str:
    severity = ", then ".join(severities if len(severities) <= 3 else [*severities[:2], severities[-1]])
    if row["open"]:
        return f"Since step {row['first_step']:,}: {severity}."
    took = duration_text(max(0, row["last_wall_ns"] - row["first_wall_ns"]) / 1e9, whole=True)
    ended = f" It ended because {row['why']}." if row["why"] else ""
    return f"Steps {row['first_step']:,} to {row['last_step']:,}, {took}: {severity}.{ended}"
