"""As much of a rank's analysis as the comparison of ranks asks for: quick, and independent of all the rest."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.traces.collective_calls import Exchanges, exchanges_of
from stepscope.traces.device.figures import Pace, device_figures, pace_of
from stepscope.traces.device.work import Temporal, temporal_of
from stepscope.traces.model.columns import Trace, TraceMeta
from stepscope.traces.model.window import Step, window_of

__all__ = ["SlimRank", "slim_rank"]


@dataclass(frozen=True, kw_only=True)
class SlimRank:
    """Stands for a ``RankAnalysis``."""

    rank: int
    meta: TraceMeta
    steps: tuple[Step, ...]
    pace: Pace
    temporal: Temporal
    exchanges: Exchanges


def slim_rank(trace: Trace, rank: int, *, keep_last: bool = False) -> SlimRank:
    window = window_of(trace, keep_last=keep_last)
    return SlimRank(
        rank=rank,
        meta=trace.meta,
        steps=window.steps,
        pace=pace_of(window, device_figures(window)),
        temporal=temporal_of(window),
        exchanges=exchanges_of(window, rank),
    )
