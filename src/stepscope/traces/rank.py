"""All analyses of one rank: a trace in, one value of bounded size out.

This is what a worker process or a Ray task returns, so it holds no columns of the trace, only figures, tables with a
limit on their rows, and what the comparison over ranks needs of each collective.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.traces.device.figures import DeviceFigures, device_figures
from stepscope.traces.device.idle import StreamIdle, idle_of
from stepscope.traces.device.pace import Pace, pace_of
from stepscope.traces.device.tables import device_tables
from stepscope.traces.device.temporal import Temporal, temporal_of
from stepscope.traces.device.work import work_of
from stepscope.traces.host.facts import host_facts
from stepscope.traces.host.figures import HostFigures, host_figures
from stepscope.traces.host.tables import host_tables
from stepscope.traces.model.columns import Trace, TraceMeta
from stepscope.traces.model.table import Table
from stepscope.traces.model.window import Step, window_of
from stepscope.traces.path.rank_path import RankPath, rank_path
from stepscope.traces.ranks.exchanges import Exchanges, exchanges_of

__all__ = ["RankAnalysis", "analyse_rank"]


@dataclass(frozen=True, kw_only=True)
class RankAnalysis:
    rank: int
    meta: TraceMeta
    steps: tuple[Step, ...]
    """Those that count."""
    left_out: Step | None
    pace: Pace
    """How long a step takes, and what the device does in it."""
    temporal: Temporal
    """Of all device work that counts, with what earlier steps had queued."""
    idle: dict[str, StreamIdle]
    """By stream; ``device:stream`` where there are several devices."""
    device: DeviceFigures
    host: HostFigures
    exchanges: Exchanges
    """Its collectives."""
    path: RankPath
    tables: dict[str, Table]
    """By their names, in the order in which people should read them."""


def analyse_rank(trace: Trace, rank: int, *, keep_last: bool = False) -> RankAnalysis:
    """``rank``: as the file says, or as the job numbers a file that does not."""
    window = window_of(trace, keep_last=keep_last)
    exchanges = exchanges_of(window, rank)
    path = rank_path(window, exchanges)
    work, facts = work_of(window), host_facts(window)
    device = device_figures(window, work)
    tables = (*device_tables(window, work), *host_tables(window, facts), *path.tables.values())
    return RankAnalysis(
        rank=rank,
        meta=trace.meta,
        steps=window.steps,
        left_out=window.left_out,
        pace=pace_of(window, device),
        temporal=temporal_of(window),
        idle=idle_of(window, work),
        device=device,
        host=host_figures(window, facts, exchanges.row),
        exchanges=exchanges,
        path=path,
        tables={table.name: table for table in tables},
    )
