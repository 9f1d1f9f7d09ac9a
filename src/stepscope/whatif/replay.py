"""The job again: each operation as early as the others allow, for given lengths of the operations.

The *length* of an operation is what it takes by itself: of computing, its duration; of communication, the time from
when the last partner came until its own end, because what lies before that is waiting and will change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.whatif.dependencies import Meeting
from stepscope.whatif.operations import Floats, Trace

__all__ = ["lengths", "replay"]

SKEW_S = 0.01
"""A partner that came this long after the end cannot have been one: its clock is off, and nothing is left to count."""


def lengths(trace: Trace, meetings: Sequence[Meeting]) -> Floats:
    """What each operation took by itself, ``[operation, step, lane]``."""
    found: Floats = trace.duration_s.copy()
    for meeting in meetings:
        if meeting.communicates:
            members = list(meeting.members)
            start_s, duration_s = trace.start_s[members], trace.duration_s[members]
            came_s = start_s.max(axis=(0, 2) if meeting.all_lanes else 0, keepdims=True)
            rest_s = start_s + duration_s - came_s
            found[members] = np.where(rest_s <= -SKEW_S, 0.0, rest_s)
    return found


def replay(meetings: Sequence[Meeting], length_s: Floats) -> Floats:
    """When each operation ends, its step beginning at 0."""
    end_s = np.empty_like(length_s)
    nothing = np.zeros(length_s.shape[1:])
    for meeting in meetings:
        after = meeting.after
        begin_s = nothing if not after else end_s[after[0]] if len(after) == 1 else end_s[list(after)].max(axis=0)
        if meeting.from_start and after:
            begin_s = np.maximum(begin_s, 0.0)
        if meeting.all_lanes:
            begin_s = begin_s.max(axis=-1, keepdims=True)
        for member in meeting.members:
            np.add(begin_s, length_s[member], out=end_s[member])
    return end_s
