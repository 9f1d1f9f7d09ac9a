"""How far this machine's clock is ahead of the hub's, told by round trips.

A round trip gives four instants: we sent, the hub received, the hub answered, we heard.  The true offset lies within
half of the time that the two ways took, however unevenly they share it; so the quickest of the last minutes tells most.
Ours are taken on the monotonic clock: a wall clock that is set while we run, here or there, makes no mean of before and
after.  A hub whose clock was set is recognised by two round trips that cannot both be true, and the later one counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.records import run_clock

__all__ = ["ClockEstimate", "HubClock"]

WINDOW_NS = 120 * 10**9
"""Clocks drift apart: after so long a round trip is forgotten."""
DRIFT = 5e-4
"""The most that two clocks may drift apart, one of them being pulled by NTP: seconds a second."""


@dataclass(frozen=True, kw_only=True)
class ClockEstimate:
    offset_ns: int
    """Our wall clock is ahead of the hub's by this …"""
    rtt_ns: int
    """… give or take half of this."""


@dataclass(frozen=True, kw_only=True)
class _Trip:
    heard_mono_ns: int
    hub_ahead_ns: int
    """The hub's wall clock, of our monotonic one."""
    rtt_ns: int


class HubClock:
    def __init__(
        self, *, wall_ns: Callable[[], int] = run_clock.wall_ns, mono_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._mono_ns = mono_ns
        self._trips: deque[_Trip] = deque()
        """In order of time; one that a later one outdid is gone, so the first is the quickest."""

    def heard(self, *, sent_mono_ns: int, received_wall_ns: int, answered_wall_ns: int, heard_mono_ns: int) -> None:
        """A round trip: the middle two by the hub's clock.  One that took less than no time is not believed."""
        rtt_ns = (heard_mono_ns - sent_mono_ns) - (answered_wall_ns - received_wall_ns)
        if rtt_ns < 0 or not 0 <= received_wall_ns <= answered_wall_ns < 1 << 62:
            return
        ahead_ns = ((received_wall_ns - sent_mono_ns) + (answered_wall_ns - heard_mono_ns)) // 2
        trip = _Trip(heard_mono_ns=heard_mono_ns, hub_ahead_ns=ahead_ns, rtt_ns=rtt_ns)
        if any(not _agree(earlier, trip) for earlier in self._trips):
            self._trips.clear()
        while self._trips and self._trips[-1].rtt_ns >= rtt_ns:
            self._trips.pop()
        self._trips.append(trip)

    def estimate(self) -> ClockEstimate | None:
        """None before the first round trip, and when the last is too long ago."""
        now_ns = self._mono_ns()
        while self._trips and now_ns - self._trips[0].heard_mono_ns > WINDOW_NS:
            self._trips.popleft()
        if not self._trips:
            return None
        best = self._trips[0]
        return ClockEstimate(offset_ns=self._wall_ns() - now_ns - best.hub_ahead_ns, rtt_ns=best.rtt_ns)


def _agree(earlier: _Trip, later: _Trip) -> bool:
    """Whether both can be true of clocks that nobody set in between."""
    most_ns = (earlier.rtt_ns + later.rtt_ns) / 2 + DRIFT * (later.heard_mono_ns - earlier.heard_mono_ns)
    return abs(earlier.hub_ahead_ns - later.hub_ahead_ns) <= most_ns + 1
