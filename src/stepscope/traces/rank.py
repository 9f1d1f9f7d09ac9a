"""All analyses of one rank: a trace in, one value of bounded size out.

This is what a worker process or a Ray task returns, so it holds no columns of the trace, only figures, tables with a
limit on their rows, and what the comparison over ranks needs of each collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope.traces.columns import Trace, TraceMeta
from stepscope.traces.exchanges import Exchanges, exchanges_of
from stepscope.traces.table import Table
from stepscope.traces.temporal import Temporal, temporal_of
from stepscope.traces.window import Step, window_of

__all__ = ["RankAnalysis", "analyse_rank"]


@dataclass(frozen=True, kw_only=True)
class RankAnalysis:
    rank: int
    meta: TraceMeta
    steps: tuple[Step, ...]
    """Those that count."""
    left_out: Step | None
    temporal: Temporal
    """Over all steps that count."""
    exchanges: Exchanges
    """Its collectives."""
    tables: dict[str, Table] = field(default_factory=dict)
    """By their names, in the order in which people should read them."""


def analyse_rank(trace: Trace, rank: int, *, keep_last: bool = False) -> RankAnalysis:
    """``rank``: as the file says, or as the job numbers a file that does not."""
    window = window_of(trace, keep_last=keep_last)
    return RankAnalysis(
        rank=rank,
        meta=trace.meta,
        steps=window.steps,
        left_out=window.left_out,
        temporal=temporal_of(window),
        exchanges=exchanges_of(window, rank),
    )
