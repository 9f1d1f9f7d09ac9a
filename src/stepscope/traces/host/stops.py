"""Where the main thread ran Python, or slept, for so long that it counts: *stops*, by place.

A stop is a stretch of a step, of a millisecond or more, in which neither the main thread nor autograd's were inside an
operator or a call of the runtime, and that nothing else explains: no loading, no collection of garbage, no compiling,
no collective under way.  Shorter ones are the interpreter's way from one operator to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.traces.host.compiling import compile_rows
from stepscope.traces.host.loading import loader_rows
from stepscope.traces.host.pauses import Pause, untold
from stepscope.traces.model import intervals
from stepscope.traces.model.calls import innermost_at
from stepscope.traces.model.columns import Rows
from stepscope.traces.model.window import Window

__all__ = ["PythonStop", "stops_of"]

MIN_STOP_NS = 1_000_000
MAX_PLACES = 100
BUILT_IN = "<built-in "


@dataclass(frozen=True, kw_only=True)
class PythonStop:
    place: str | None
    """``train.py(31): augment``; None: no line and no name is known."""
    call: str | None
    """The function of Python itself that ran, ``sleep``; None: another, or not known."""
    count: int
    total_ns: int

    @property
    def named(self) -> str | None:
        """``sleep at train.py(31): step``."""
        return f"{self.call} at {self.place}" if self.call and self.place else self.call or self.place


def stops_of(window: Window, pauses: tuple[Pause, ...], exchanged: Rows) -> tuple[PythonStop, ...]:
    """The longest first; ``exchanged``: slices of collectives."""
    trace, slices = window.trace, window.trace.slices
    loaders = loader_rows(window)
    loaders = loaders[slices.thread[loaders] == window.host.main_thread]
    known = np.concatenate([loaders, compile_rows(window), exchanged])
    start_ns = np.append(slices.start_ns[known], [pause.start_ns for pause in pauses]).astype(np.int64)
    end_ns = np.append(slices.end_ns[known], [pause.start_ns + pause.dur_ns for pause in pauses]).astype(np.int64)
    starts, ends = untold(window, intervals.merge(start_ns, end_ns), MIN_STOP_NS)
    if not len(starts):
        return ()
    main = np.full(len(starts), window.host.main_thread, np.int32)
    inside = innermost_at(trace, window.calls, window.host_rows, main, (starts + ends) // 2)
    found: dict[tuple[str | None, str | None], tuple[int, int]] = {}
    for row, dur_ns in zip(inside.tolist(), (ends - starts).tolist(), strict=True):
        place = _place(window, row)
        count, total_ns = found.get(place, (0, 0))
        found[place] = (count + 1, total_ns + dur_ns)
    stops = (
        PythonStop(place=place, call=call, count=count, total_ns=total_ns)
        for (place, call), (count, total_ns) in found.items()
    )
    return tuple(sorted(stops, key=lambda stop: -stop.total_ns)[:MAX_PLACES])


def _place(window: Window, row: int) -> tuple[str | None, str | None]:
    """The line and the built-in function, as far as they are known."""
    if row < 0:
        return None, None
    name = window.trace.name(row)
    source = window.host.sources.text(row)
    if name.startswith(BUILT_IN):
        return source, name.removeprefix(BUILT_IN).removesuffix(">").rpartition(" ")[2]
    return source or (None if name.startswith("ProfilerStep") else name), None
