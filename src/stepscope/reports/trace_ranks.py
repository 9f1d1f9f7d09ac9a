"""The ranks of a trace's document side by side: one row each, and which of them to look at first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["RANKS_SHOWN", "rank_rows", "rank_shown", "worst_ranks"]

Document = Mapping[str, Any]

RANKS_SHOWN = 16


def rank_rows(document: Document) -> list[dict[str, Any]]:
    """By rank; times over all steps that count, ``last`` is how often the others waited for this one."""
    collectives = document["collectives"]
    compared = collectives["count"] > 0
    rows = []
    for rank, analysis in document["ranks"].items():
        temporal = analysis["temporal"]
        comm_ns = temporal["comm_ns"]
        rows.append(
            {
                "rank": int(rank),
                "steps_ns": sum(step["dur_ns"] for step in analysis["steps"]),
                "compute_ns": temporal["compute_ns"],
                "comm_ns": comm_ns,
                "hidden_share": temporal["overlap_ns"] / comm_ns if comm_ns else None,
                "copies_ns": temporal["exposed_memory_ns"],
                "idle_ns": temporal["idle_ns"],
                "waits_ns": collectives["wait_ns"].get(rank) if compared else None,
                "last": collectives["last_counts"].get(rank) if compared else None,
            }
        )
    return rows


def worst_ranks(rows: Sequence[Mapping[str, Any]], count: int = RANKS_SHOWN) -> list[Mapping[str, Any]]:
    """All where they are few, else those that were last most often, then those that took longest."""
    if len(rows) <= count:
        return list(rows)
    return sorted(rows, key=lambda row: (-(row["last"] or 0), -row["steps_ns"], row["rank"]))[:count]


def rank_shown(document: Document) -> str | None:
    """Whose tables to show where there is room for one rank's: the first culprit's, else the lowest."""
    named = [str(rank) for finding in document["findings"] for rank in finding["ranks"]]
    return next((rank for rank in [*named, *document["ranks"]] if rank in document["ranks"]), None)
