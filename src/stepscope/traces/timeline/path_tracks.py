"""The critical path on the timeline: of a rank a track that says, instant by instant, what its steps were due to."""

from __future__ import annotations

from stepscope.traces.model.window import Window
from stepscope.traces.path.causes import CAUSES
from stepscope.traces.path.rank_path import path_segments
from stepscope.traces.timeline.perfetto import Bar, Track

__all__ = ["path_track"]


def path_track(rank: int, window: Window) -> Track:
    """What follows itself without a break is one bar."""
    trace, segments = window.trace, path_segments(window)
    origin_ns = trace.meta.origin_ns
    columns = (segments.start_ns + origin_ns, segments.end_ns + origin_ns, segments.cause, segments.name)
    bars: list[Bar] = []
    for start_ns, end_ns, cause, code in zip(*(column.tolist() for column in columns), strict=True):
        name, args = trace.text(code) or CAUSES[cause], {"cause": CAUSES[cause]}
        goes_on = bars and (bars[-1].end_ns, bars[-1].name, bars[-1].args) == (start_ns, name, args)
        first_ns = bars.pop().start_ns if goes_on else start_ns
        bars.append(Bar(name=name, start_ns=first_ns, end_ns=end_ns, args=args))
    return Track(rank=rank, name="critical path", bars=bars)
