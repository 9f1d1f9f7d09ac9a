"""One replay: when does everything end if some of it takes another time, and everything still waits for the same?

Activities come together in *meetings*: the members of one begin together, as soon as all that they wait for has ended.
Lengths and ends are plain numbers, or arrays of the same shape that hold many replays at once.

Who uses it:

    whatif/replay.py               operations of a pipeline, as arrays of steps and data-parallel ranks
    traces/across_ranks/replay.py  the ways of ranks from one collective to the next, as nanoseconds
    judge/late_ranks.py            ``savings_ns``: all ranks meet once per interval, so that the end is the longest way.
                                   That is one maximum over an array, for 10,000 ranks and all intervals at once

``traces/path/whatif.py`` cannot use it: a kernel starts after its launch, its stream and an event, each with its own
lag, and a thread that waits continues at a point of its line whose time is interpolated.  As meetings, every kernel
would be four activities, and the loop over them is nearly all of the time that a replay of a trace takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Meeting", "replay"]


class Meeting(NamedTuple):
    """Activities that begin together, by index; most meetings have one member."""

    members: tuple[int, ...]
    after: tuple[int, ...] = ()
    """What the members wait for; empty: the start."""
    from_start: bool = False
    """At least one member waits for nothing: they do not begin before the start either."""
    all_lanes: bool = False
    """The same activities of all data-parallel ranks also take part."""


def replay(meetings: Iterable[Meeting], lengths: Any, ends: Any, begins: Callable[[list[Any], Meeting], Any]) -> Any:
    """Return when each activity ends; ``meetings`` come after those that they wait for.

    ``ends``: where to put the result; contains the ends of activities that take part in no meeting.  ``begins`` returns
    when a meeting begins, from the ends of what it waits for.
    """
    for meeting in meetings:
        begin = begins([ends[activity] for activity in meeting.after], meeting)
        for member in meeting.members:
            ends[member] = begin + lengths[member]
    return ends
