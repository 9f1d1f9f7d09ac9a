"""The ranks side by side: how much each computed, communicated and waited, and how its steps varied.

*overlap share*: of the time in which the rank communicated, the part in which it computed as well; *exposed*: the rest.
*wait* and *transfer* are of the collectives that were matched over ranks: the rank's own durations, summed, so that two
collectives at a time count twice; *comm* counts instants.  Device times are those of ``temporal``; a rank without
device work is told by its host (``host_times``).  *pace* is how long a step takes (``pace``); the other
step times are of the profiler's steps that count, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.traces.model.table import Table, table_of

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis
    from stepscope.traces.ranks.collectives import CollectivesAnalysis

__all__ = ["distributed_table"]

COLUMNS = (
    *("rank", "measured", "span_ns", "compute_ns", "comm_ns", "overlap_ns", "overlap_share", "exposed_comm_ns"),
    *("memory_ns", "idle_ns", "collectives", "wait_ns", "transfer_ns", "last_count"),
    *("steps", "pace_ns", "step_mean_ns", "step_median_ns", "step_std_ns", "step_min_ns", "step_max_ns"),
)


def distributed_table(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> Table:
    """One row per rank, all of them."""
    rows = [(*_times(each), *_exchanged(each, collectives), *_steps(each)) for each in analyses]
    note = (
        "overlap_share: of communication, how much was hidden behind compute; wait and transfer: of collectives that"
        " other ranks' traces have too; pace: of a step, on the device where that takes longer; step…: on the host"
    )
    return table_of("distributed", "Ranks side by side", COLUMNS, rows, limit=len(rows), note=note)


def _times(analysis: RankAnalysis) -> tuple[Any, ...]:
    host, device = analysis.exchanges.host, analysis.temporal
    figures, measured = (device, "device") if host is None else (host, "host")
    share = figures.overlap_ns / figures.comm_ns if figures.comm_ns else None
    return (
        *(analysis.rank, measured, figures.span_ns, figures.compute_ns, figures.comm_ns, figures.overlap_ns, share),
        *(figures.comm_ns - figures.overlap_ns, device.memory_ns if host is None else None, figures.idle_ns),
    )


def _exchanged(analysis: RankAnalysis, collectives: CollectivesAnalysis) -> tuple[Any, ...]:
    rank = analysis.rank
    return (
        *(len(analysis.exchanges), collectives.wait_ns[rank], collectives.own_transfer_ns[rank]),
        collectives.last_counts[rank],
    )


def _steps(analysis: RankAnalysis) -> tuple[Any, ...]:
    times = np.array([step.end_ns - step.start_ns for step in analysis.steps if step.name], np.int64)
    if not len(times):
        return 0, None, None, None, None, None, None
    return (
        len(times),
        analysis.pace.step_ns,
        *(round(float(each(times))) for each in (np.mean, np.median, np.std, np.min, np.max)),
    )
