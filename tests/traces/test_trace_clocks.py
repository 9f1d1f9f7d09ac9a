"""Offsets of clocks that were put in are found again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_ranks import SlimRank, slim_rank

from stepscope.traces.across_ranks.clocks import clocks_of

NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"


def job(
    groups: Sequence[Sequence[int]],
    later: Sequence[float],
    *,
    count: int = 5,
    noise: float = 0,
    apart: float = 1000,
    hosts: Sequence[str] = (),
    drift: Sequence[float] = (),
) -> list[SlimRank]:
    """µs; every group does ``count`` all-reduces that end together but for ``noise``, on clocks that are ``later``."""
    generator = random.Random(0)
    made = []
    for rank in range(len(later)):
        more: dict[str, Any] = {"hostname": hosts[rank]} if hosts else {}
        made.append(MadeTrace(rank=rank, world_size=len(later), header=more))
    for at, members in enumerate(groups):
        about = {
            "Collective name": "allreduce",
            "Process Group Name": str(at),
            "Process Group Ranks": str(list(members)),
        }
        about["Group size"] = len(members)  # type: ignore[assignment]
        for number in range(count):
            end = 10_000 + apart * number + 100 * at
            for rank in members:
                dur = 10 + generator.randrange(50)
                own = end + later[rank] + generator.uniform(-noise, noise)
                own += number * apart * drift[rank] / 1e6 if drift else 0
                made[rank].kernel(NAME, round(own - dur, 3), dur, stream=20 + at, **about)
    return [slim_rank(each.trace(), rank) for rank, each in enumerate(made)]


offsets = st.lists(st.integers(-10_000_000, 10_000_000), min_size=2, max_size=6)


@settings(max_examples=examples(60), deadline=None)
@given(later=offsets, count=st.integers(1, 6))
def test_where_ends_agree_offsets_are_exact(later: list[int], count: int) -> None:
    clocks = clocks_of(job([range(len(later))], [ns / 1000 for ns in later], count=count)).clocks
    assert [clock.offset_ns for clock in clocks] == [ns - later[0] for ns in later]
    assert [clock.shared for clock in clocks] == [0, *[count] * (len(later) - 1)]
    assert {clock.reference for clock in clocks} == {0}
    if count >= 3:
        assert {clock.uncertainty_ns for clock in clocks} == {0}
        assert [clock.shift_ns for clock in clocks] == [
            offset if abs(offset := ns - later[0]) > 20_000 else 0 for ns in later
        ]


@settings(max_examples=examples(40), deadline=None)
@given(later=st.lists(st.integers(-5000, 5000), min_size=6, max_size=6))
def test_from_group_to_group(later: list[int]) -> None:
    """A chain of pairs, and two ranks that nobody else meets."""
    clocks = clocks_of(job([(0, 2), (1, 2), (1, 3), (4, 5)], later)).clocks
    for clock in clocks[:4]:
        assert (clock.reference, clock.offset_ns) == (0, 1000 * (later[clock.rank] - later[0]))
    for clock in clocks[4:]:
        assert (clock.reference, clock.offset_ns) == (4, 1000 * (later[clock.rank] - later[4]))


def test_noise_stays_within_the_uncertainty() -> None:
    later = [0, 3000, -500, 77_777]
    clocks = clocks_of(job([range(4)], later, count=200, noise=20)).clocks
    for clock, true in zip(clocks, later, strict=True):
        assert abs(clock.offset_ns - 1000 * true) <= max(4 * clock.uncertainty_ns, 1)
        assert clock.uncertainty_ns < 5000
        assert clock.shift_ns == (clock.offset_ns if true else 0)


def test_one_host_is_one_clock_and_hosts_shift_as_a_whole() -> None:
    clocks = clocks_of(job([range(4)], [0, 30, 5000, 5040], hosts=["a", "a", "b", "b"]))
    assert [clock.offset_ns for clock in clocks.clocks] == [0, 30_000, 5_000_000, 5_040_000]
    assert clocks.shifts == {0: 0, 1: 0, 2: 5_000_000, 3: 5_000_000}


def test_what_could_be_the_transfer_is_no_other_clock() -> None:
    """One collective only: within its duration ends may differ on one clock; beyond, they cannot."""
    assert clocks_of(job([range(2)], [0, 9], count=1)).shifts == {0: 0, 1: 0}
    assert clocks_of(job([range(2)], [0, 900], count=1)).shifts == {0: 0, 1: 900_000}


def test_drift_is_told_where_there_is_enough() -> None:
    clocks = clocks_of(job([range(2)], [0, 0], count=40, apart=100_000, drift=[0, 25]))
    drift = clocks.clocks[1].drift_ppm
    assert drift is not None
    assert abs(drift - 25) < 0.1
    assert clocks_of(job([range(2)], [0, 0], count=5, apart=100_000, drift=[0, 25])).clocks[1].drift_ppm is None


def test_those_who_share_nothing() -> None:
    clocks = clocks_of(job([(0, 1)], [0, 0, 0]))
    assert clocks.unaligned == (2,)
    assert clocks_of([]).clocks == ()
    table = clocks.table()
    assert [row["rank"] for row in table.to_rows()] == [0, 1, 2]


def test_the_timeline_begins_with_the_earliest_file() -> None:
    analyses = job([(0, 1)], [0, 5000])
    clocks = clocks_of(analyses)
    assert clocks.shifts == {0: 0, 1: 5_000_000}
    assert clocks.zero_ns == min(analyses[0].meta.origin_ns, analyses[1].meta.origin_ns - 5_000_000)
