"""The nodes of a job in the summary: rows of ``summary.json``, and from those the lines of its text.

Only where there are several: a job of one node has no such rows.  Of many nodes those are named that something is odd
about; the others are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.series import RankSeries, RunData
from stepscope.records.units import count_text, ms_text

__all__ = ["node_items", "nodes_table"]

LISTED = 1024
"""Rows in ``summary.json``; of more the odd ones and the first."""
SHOWN = 8
"""Lines in the text."""
CLOCK_OFF_MS = 1000.0
"""From here on a clock is odd."""
CLOCK_SHOWN_MS = 10.0
"""From here on it is worth a word."""


def nodes_table(run: RunData, *, alive: bool) -> list[dict[str, Any]]:
    """One row a node, by number; several where it was started more than once."""
    if not run.nodes:
        return []
    series = {(one.identity.attempt, one.rank): one for one in run.ranks}
    sent = {node["spool"]: [series.pop(pair) for pair in node["series"] if pair in series] for node in run.nodes}
    hosts = {node["spool"]: node["host"] for node in run.nodes}
    # What nobody sent was recorded here, by an agent that said hello to the hub or never got to it.
    own = {"node": 0, "host": run.meta.get("host"), "offset_ns": 0, "rtt_ns": 0, "bye": run.meta.get("end")}
    here = next((node for node in run.nodes if node["here"]), own)
    rows = [_row({**here, "bye": own["bye"]}, list(series.values()), hosts, lost=False)]
    rows += [
        _row(node, sent[node["spool"]], hosts, lost=node["bye"] is None and not alive)
        for node in run.nodes
        if not node["here"]
    ]
    odd = [row for row in rows if _is_odd(row)][:LISTED]
    kept = [*odd, *[row for row in rows if not _is_odd(row)][: LISTED - len(odd)]]
    return sorted(kept, key=lambda row: (row["node"], row["joined_wall_ns"] or 0))


def node_items(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Per line a label and what there is to say."""
    if len(rows) <= SHOWN:
        return [(f"node {row['node']}", _facts(row)) for row in rows]
    odd = [row for row in rows if _is_odd(row)]
    items = [(f"node {row['node']}", _facts(row)) for row in odd[:SHOWN]]
    if len(odd) > SHOWN:
        items.append(("", [f"… and {len(odd) - SHOWN:,} more of which something was lost or is odd"]))
    rest = [row for row in rows if not _is_odd(row)]
    if rest:
        steps = sorted({row["steps"] for row in rest if row["ranks"]}) or [0]
        words = count_text(steps[0], "step") if len(steps) == 1 else f"{steps[0]:,}–{steps[-1]:,} steps"
        worst = max(abs(row["clock_offset_ms"] or 0.0) for row in rest)
        items.append(
            ("nodes", [f"{len(rest):,} {'others' if odd else 'in all'}", words, f"clocks within {ms_text(worst)}"])
        )
    return items


def _row(
    node: Mapping[str, Any], series: Sequence[RankSeries], hosts: Mapping[str, str], *, lost: bool
) -> dict[str, Any]:
    ranks = sorted({one.rank for one in series})
    bye = node["bye"]
    offset_ns, rtt_ns = node["offset_ns"], node["rtt_ns"]
    return {
        "node": node["node"],
        "host": node["host"],
        "address": node.get("address") or None,
        "ranks": len(ranks),
        "first_rank": ranks[0] if ranks else None,
        "last_rank": ranks[-1] if ranks else None,
        "steps": max((len(one.steps) for one in series), default=0),
        "clock_offset_ms": None if offset_ns is None else round(offset_ns / 1e6, 3),
        "clock_error_ms": None if rtt_ns is None else round(rtt_ns / 2e6, 3),
        "joined_wall_ns": node.get("joined_wall_ns") or None,
        "heard_wall_ns": node.get("heard_wall_ns") or None,
        "status": str(bye["status"]) if isinstance(bye, Mapping) and "status" in bye else None,
        "lost": lost,
        "replaced_by": hosts.get(node.get("replaced_by", "")),
        "duplicates": node.get("duplicates", 0),
        "refused": node.get("refused", 0),
    }


def _is_odd(row: Mapping[str, Any]) -> bool:
    clock_off = abs(row["clock_offset_ms"] or 0.0) > CLOCK_OFF_MS
    return bool(row["lost"] or row["replaced_by"] or row["refused"] or clock_off)


def _facts(row: Mapping[str, Any]) -> list[str]:
    first, last = row["first_rank"], row["last_rank"]
    facts = [str(row["host"])]
    if first is not None:
        facts.append(f"rank {first}" if first == last else f"ranks {first}–{last}")
        facts.append(count_text(row["steps"], "step"))
    offset, error = row["clock_offset_ms"], row["clock_error_ms"]
    if offset is not None and abs(offset) >= CLOCK_SHOWN_MS:
        way = "ahead" if offset > 0 else "behind"
        facts.append(f"clock {ms_text(abs(offset))} {way} (± {ms_text(error)})")
    if row["lost"]:
        facts.append("lost")
    if row["replaced_by"]:
        facts.append(f"replaced by {row['replaced_by']}")
    if row["refused"]:
        facts.append(f"{count_text(row['refused'], 'frame')} refused")
    return facts
