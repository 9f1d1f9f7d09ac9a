"""How much of a run goes into a copy: as much as its size allows.

A plan is made for a size that mail takes (``MOST_BYTES``).  What a run needs most room for is known before anything is
asked: bins of steps, cells of the map, curves of ranks and machines, logs.  Should the file come out too large all the
same, the next plan has half of everything.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_BYTES", "Plan", "plans"]

MOST_BYTES = 3_000_000
"""Of the whole file."""
_COARSEST = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    step_bins: int
    worst: int
    """Ranks told of each bin of steps."""
    cells: int
    """Of the map of ``work``."""
    other_cells: int
    """Of the map of each other value."""
    ranks: int
    """With curves of their own."""
    rank_points: int
    """Of all those curves together, of each phase."""
    rank_rows: int
    """Of the table of ranks."""
    sample_values: int
    """Of each kind of samples."""
    events: int
    log_bytes: int
    """Of the start and of the end of one log."""
    all_log_bytes: int
    document_bytes: int
    """Of a document that cannot be thinned out: hangs, stacks, nodes."""


def plans() -> list[Plan]:
    """The best first."""
    return [_plan(part) for part in (1, 2, 4, 8, 16, _COARSEST)]


def _plan(part: int) -> Plan:
    return Plan(
        step_bins=4096 // part,
        worst=4 if part == 1 else 2,
        cells=(1 << 18) // part,
        other_cells=(1 << 16) // part,
        ranks=64 // part,
        rank_points=12_288 // part,
        rank_rows=4096 // part,
        sample_values=80_000 // part,
        events=2000 // part,
        log_bytes=(64 << 10) // part,
        all_log_bytes=(2 << 20) // part,
        document_bytes=(1 << 20) // part,
    )
