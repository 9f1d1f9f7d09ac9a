"""The clock: whatever the ways take, the truth lies within half of the round trip; set clocks are noticed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.agent.shipping.sender import DRIFT, WINDOW_NS, HubClock

MS = 1_000_000
S = 1_000_000_000


class World:
    """Two machines, and the only one who knows the true time."""

    def __init__(self, ahead_ns: int) -> None:
        self.now_ns = 5 * S
        self.ahead_ns = ahead_ns
        """Our wall clock, of the hub's."""
        self.hub_ns = 1_700_000_000 * S
        """The hub's wall clock, of the true time."""
        self.clock = HubClock(wall_ns=lambda: self.now_ns + self.hub_ns + self.ahead_ns, mono_ns=lambda: self.now_ns)

    def trip(self, there_ns: int, at_hub_ns: int, back_ns: int) -> None:
        sent = self.now_ns
        received = sent + there_ns + self.hub_ns
        answered = received + at_hub_ns
        self.now_ns += there_ns + at_hub_ns + back_ns
        self.clock.heard(
            sent_mono_ns=sent, received_wall_ns=received, answered_wall_ns=answered, heard_mono_ns=self.now_ns
        )

    def estimate(self) -> tuple[int, int]:
        found = self.clock.estimate()
        assert found is not None
        return found.offset_ns, found.rtt_ns


delays = st.integers(0, 300 * MS)
trips = st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=30)


@given(st.integers(-3600 * S, 3600 * S), trips)
def test_the_truth_is_within_half_of_the_round_trip(ahead_ns: int, ways: list[tuple[int, int, int]]) -> None:
    world = World(ahead_ns)
    for there, at_hub, back in ways:
        world.trip(there, at_hub, back)
    offset_ns, rtt_ns = world.estimate()
    assert rtt_ns == min(there + back for there, _, back in ways)
    assert abs(offset_ns - ahead_ns) <= rtt_ns // 2 + 1


def test_noise_is_seen_through() -> None:
    """A minute of round trips of two to sixty milliseconds, mostly one way: the quickest tells within one."""
    world, chance = World(ahead_ns=90 * S), random.Random(7)
    for _ in range(120):
        world.now_ns += S // 2
        world.trip(MS + int(chance.expovariate(1 / (30 * MS))), chance.randrange(5 * MS), MS)
    offset_ns, rtt_ns = world.estimate()
    assert 2 * MS <= rtt_ns < 4 * MS
    assert abs(offset_ns - 90 * S) <= rtt_ns // 2


def test_a_round_trip_is_forgotten_after_a_while() -> None:
    world = World(ahead_ns=0)
    assert world.clock.estimate() is None
    world.trip(MS, 0, MS)
    world.now_ns += WINDOW_NS // 2
    world.trip(5 * MS, 0, 5 * MS)
    assert world.estimate()[1] == 2 * MS
    world.now_ns += WINDOW_NS // 2 + MS
    assert world.estimate()[1] == 10 * MS
    world.now_ns += WINDOW_NS
    assert world.clock.estimate() is None


def test_our_clock_is_set() -> None:
    """Nothing has to be heard again: round trips are kept on a clock that nobody sets."""
    world = World(ahead_ns=0)
    world.trip(MS, 0, MS)
    world.ahead_ns = 600 * S
    assert world.estimate() == (600 * S, 2 * MS)


@pytest.mark.parametrize("set_ns", [-600 * S, S])
def test_the_hub_s_clock_is_set(set_ns: int) -> None:
    world = World(ahead_ns=0)
    world.trip(MS, 0, MS)
    world.hub_ns += set_ns
    world.ahead_ns -= set_ns
    world.trip(40 * MS, 0, 20 * MS)
    offset_ns, rtt_ns = world.estimate()
    assert rtt_ns == 60 * MS
    assert offset_ns + set_ns == -10 * MS


def test_a_clock_that_drifts_is_not_taken_for_one_that_was_set() -> None:
    world = World(ahead_ns=0)
    world.trip(MS, 0, MS)
    world.now_ns += 100 * S
    world.hub_ns += int(100 * S * DRIFT)
    world.trip(3 * MS, 0, 3 * MS)
    assert world.estimate()[1] == 2 * MS


def test_stamps_that_cannot_be_are_not_believed() -> None:
    world = World(ahead_ns=0)
    world.clock.heard(sent_mono_ns=0, received_wall_ns=0, answered_wall_ns=10, heard_mono_ns=5)
    world.clock.heard(sent_mono_ns=0, received_wall_ns=10, answered_wall_ns=0, heard_mono_ns=5)
    assert world.clock.estimate() is None
