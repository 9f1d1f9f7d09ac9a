"""Rounds of an elastic job, told from what its processes claim and when they came and went."""

from __future__ import annotations

from dataclasses import replace

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.store.attempts import SLACK_NS, RankClaim, settle_attempts

S = 10**9


def claim(rank: int, began: float, until: float | None, *, world: int = 2, **more: object) -> RankClaim:
    fields = {"host": f"host{rank}", "restarts": 0, **more}
    until_ns = None if until is None else round(until * S)
    return RankClaim(rank=rank, world_size=world, began_ns=round(began * S), until_ns=until_ns, **fields)  # type: ignore[arg-type]


def test_nothing_and_one() -> None:
    assert settle_attempts([]) == []
    assert settle_attempts([claim(0, 1, None, world=1)]) == [0]
    assert settle_attempts([claim(0, 1, None, world=1, restarts=3)]) == [3]


def test_a_launcher_that_counts_is_believed() -> None:
    """All ranks restart together, as under ``torchrun --max-restarts``."""
    first = [claim(rank, 10 + rank, 20) for rank in range(2)]
    second = [claim(rank, 25 + rank, 40, restarts=1) for rank in range(2)]
    third = [claim(rank, 45 + rank, None, restarts=2) for rank in range(2)]
    assert settle_attempts([*third, *first, *second]) == [2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize("noticed", [99.9, 101.5, 250.0])
def test_an_end_that_was_noticed_late_begins_no_round(noticed: float) -> None:
    """Starting a rank takes two seconds, and the agent was not there to see rank 1 end."""
    before = [claim(0, 10, 99.5, host="a", restarts=12), claim(1, 10.1, noticed, host="a", restarts=12)]
    after = [claim(0, 100, None, host="a", restarts=13), claim(1, 102, None, host="a", restarts=13)]
    assert settle_attempts([*before, *after]) == [12, 12, 13, 13]


def test_two_that_begin_in_the_same_instant() -> None:
    together = [claim(0, 10, 20, host="a"), claim(0, 10, 20, host="a", restarts=1)]
    assert settle_attempts(together) == [1, 1]


def test_two_launchers_on_one_host_count_apart() -> None:
    """The second one's workers were at work long after the first one had counted."""
    first = [claim(0, 10, 20, host="a"), claim(1, 10.1, 20, host="a")]
    second = [claim(1, 25, 60, host="a", active_ns=59 * S), claim(0, 25.5, 60, host="a", restarts=1, active_ns=59 * S)]
    third = [claim(0, 65, None, host="a", restarts=1), claim(1, 65.5, None, host="a", restarts=1)]
    assert settle_attempts([*first, *second, *third]) == [0, 0, 1, 1, 2, 2]


def test_a_last_round_that_is_shorter_than_the_slack_is_one_round() -> None:
    """Recorded from torchrun on an idle machine: both of its ranks lived for 0.3 s, and count differently."""
    claims = [
        claim(0, 69.02, 70.81, world=1, host="a", restarts=1),
        claim(0, 73.172, 73.482, host="a", restarts=1),
        claim(1, 73.198, 73.476, host="a"),
    ]
    assert settle_attempts(claims) == [1, 2, 2]


def test_short_lives_of_one_rank_are_rounds() -> None:
    """The end of the first was noticed when the second was at work."""
    claims = [claim(0, 10.0, 10.3, world=1, in_order=True), claim(0, 10.02, 10.4, world=1, in_order=True)]
    assert settle_attempts(claims) == [0, 1]


def test_what_two_torchruns_really_said() -> None:
    """Recorded from torchrun of torch 2.13, ``--nnodes 1:2``: host b was killed, host c took its place.

    Host a counted once, for the failure that b's death was to it, and not when c joined; c counted from nought.
    """
    claims = [
        claim(0, 155.51, 159.42, host="a"),
        claim(1, 155.53, 159.24, host="b"),
        claim(0, 166.83, 177.0, world=1, host="a", restarts=1),
        claim(0, 179.27, 205.25, host="a", restarts=1),
        claim(1, 179.34, 205.25, host="c"),
    ]
    assert settle_attempts(claims) == [0, 0, 1, 2, 2]
    one_host = [replace(each, host="a") for each in claims]
    assert settle_attempts(one_host) == [0, 0, 1, 2, 2]


def test_a_node_joins_and_nothing_is_counted() -> None:
    before = [claim(rank, 10, 30) for rank in range(2)]
    after = [claim(rank, 36 + rank, None, world=4) for rank in range(4)]
    assert settle_attempts([*before, *after]) == [0, 0, 1, 1, 1, 1]


def test_a_node_is_replaced_and_nothing_is_counted() -> None:
    """The ranks change places, too: the newcomer may become rank 0."""
    before = [claim(0, 10, 30, host="a"), claim(1, 10, 29, host="b")]
    after = [claim(0, 36, None, host="c"), claim(1, 37, None, host="a")]
    assert settle_attempts([*before, *after]) == [0, 0, 1, 1]


@pytest.mark.parametrize("until", [None, 31, 60], ids=["never seen to end", "last heard of", "ended much later"])
def test_a_node_that_was_cut_off_lives_on_in_its_own_round(until: float | None) -> None:
    lost = claim(1, 10, until, host="b")
    rest = [claim(0, 10, 30, host="a"), claim(0, 36, None, host="a"), claim(1, 40, None, host="c")]
    assert settle_attempts([lost, *rest]) == [0, 0, 1, 1]


def test_one_that_lost_touch_with_nobody_left_to_compare() -> None:
    """Of the first round nothing is known but when it was last heard of."""
    before = [claim(rank, 10, 30) for rank in range(2)]
    after = [claim(rank, 60, None) for rank in range(2)]
    assert settle_attempts(before + after) == [0, 0, 1, 1]


def test_two_at_the_same_time_are_of_one_attempt() -> None:
    claims = [claim(0, 10, 50), claim(0, 12, 40), claim(1, 10, 50)]
    assert settle_attempts(claims) == [0, 0, 0]


def test_two_jobs_at_the_same_time_are_of_one_attempt() -> None:
    assert settle_attempts([claim(rank, 10 + later, 90) for later in (0, 30) for rank in range(4)]) == [0] * 8


def test_an_end_that_was_noticed_late() -> None:
    first = [claim(0, 10, 20), claim(1, 10, 20)]
    second = [claim(0, 20.0, 30), claim(1, 19.5, 30)]
    assert settle_attempts(first + second) == [0, 0, 1, 1]
    assert SLACK_NS >= 0.5 * S


def test_who_came_late_and_went_at_once_is_still_of_the_round_that_failed() -> None:
    """Rank 0 failed before rank 1 had even begun; the launcher then ended rank 1."""
    first = [claim(0, 10, 12), claim(1, 14, 15)]
    second = [claim(0, 20, None), claim(1, 26, None)]
    assert settle_attempts(first + second) == [0, 0, 1, 1]


def test_a_launcher_that_counted_needs_no_end() -> None:
    """The agent was gone: nobody saw the first process end."""
    assert settle_attempts([claim(0, 10, None), claim(0, 20, None, restarts=1)]) == [0, 1]
    assert settle_attempts([claim(0, 10, None, host="a"), claim(0, 20, None, host="b", restarts=1)]) == [0, 1]


def test_counts_of_one_host_tell_rounds_whose_other_ranks_left_nothing() -> None:
    claims = [
        claim(0, 10, 20, host="a"),
        claim(1, 30, 40, host="a", restarts=1),
        claim(0, 50, 60, host="a", restarts=2),
    ]
    assert settle_attempts(claims) == [0, 1, 2]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_script_that_prepares_or_evaluates_is_no_attempt(order: str) -> None:
    train = [claim(rank, 20, 40, in_order=True) for rank in range(2)]
    at = 10 if order == "before" else 50
    other = claim(0, at, at + 5, world=1, made_steps=False, in_order=True)
    assert settle_attempts([*train, other]) == [0, 0, 0]


def test_two_trainings_one_after_the_other_are_two() -> None:
    assert settle_attempts([claim(0, at, at + 5, world=1, in_order=True) for at in (10, 20, 30)]) == [0, 1, 2]


def test_a_round_that_never_came_to_a_step_is_one_if_it_follows_a_broken_one() -> None:
    before = [claim(rank, 10, 20) for rank in range(2)]
    after = [claim(rank, 30, None, made_steps=False) for rank in range(2)]
    assert settle_attempts(before + after) == [0, 0, 1, 1]


@st.composite
def schedules(draw: st.DrawFn) -> list[list[RankClaim]]:
    """The rounds of an elastic job: nodes fail, leave, are cut off and join, under one clock each may miss a little."""
    sizes = {"n0": draw(st.integers(1, 3))}
    counts = {"n0": 0}
    rounds: list[list[RankClaim]] = []
    now = 100.0
    seconds = st.floats(0, 20)
    cut_off = False
    for _ in range(draw(st.integers(1, 6))):
        for _ in range(draw(st.integers(0, 2))):
            name = f"n{len(counts)}"
            sizes[name], counts[name] = draw(st.integers(1, 3)), 0
        order = draw(st.permutations(sorted(sizes)))
        staying = draw(st.sets(st.sampled_from(sorted(sizes)), min_size=1))
        begins = {(name, local): now + draw(seconds) for name in order for local in range(sizes[name])}
        stop = max(begins.values()) + 1 + draw(seconds)
        early = not cut_off and draw(st.booleans())  # some end before others have begun
        members = []
        for rank, (name, local) in enumerate((n, i) for n in order for i in range(sizes[n])):
            began = begins[name, local]
            ended: float | None = draw(st.floats(began, stop)) if early else stop - draw(st.floats(0, 0.5))
            if name not in staying and not early:
                ended = draw(st.sampled_from([ended, None, stop + 1000]))
            world = sum(sizes[n] for n in order)
            members.append(claim(rank, began, ended, world=world, host=name, restarts=counts[name]))
        rounds.append(members)
        cut_off = any(member.until_ns is None or member.until_ns > stop * S for member in members)
        failed = draw(st.sets(st.sampled_from(sorted(staying))))
        sizes = {name: size for name, size in sizes.items() if name in staying}
        counts = {name: count + (name in failed) for name, count in counts.items()}
        now = stop + 2 + draw(seconds)
    return rounds


@settings(max_examples=examples(150), deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_any_schedule_of_rounds_gives_back_the_rounds(rounds: list[list[RankClaim]], random: object) -> None:
    claims_of_attempts = [(index, member) for index, members in enumerate(rounds) for member in members]
    random.shuffle(claims_of_attempts)  # type: ignore[attr-defined]
    found = settle_attempts([claim for _, claim in claims_of_attempts])
    numbers: dict[int, set[int]] = {}
    for (index, _), number in zip(claims_of_attempts, found, strict=True):
        numbers.setdefault(index, set()).add(number)
    assert all(len(these) == 1 for these in numbers.values()), numbers
    in_order = [min(numbers[index]) for index in range(len(rounds))]
    assert in_order == sorted(set(in_order))
    assert all(claim.restarts <= number for (_, claim), number in zip(claims_of_attempts, found, strict=True))


CLAIMS = st.builds(
    RankClaim,
    rank=st.integers(0, 3),
    world_size=st.integers(1, 4),
    host=st.sampled_from("ab"),
    restarts=st.integers(0, 3),
    began_ns=st.integers(0, 60 * S),
    until_ns=st.none() | st.integers(-5, 90 * S),
    made_steps=st.booleans(),
    in_order=st.booleans(),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(CLAIMS, max_size=12))
def test_whatever_was_claimed_numbers_grow_with_time(claims: list[RankClaim]) -> None:
    found = settle_attempts(claims)
    by_time = sorted(zip(claims, found, strict=True), key=lambda pair: pair[0].began_ns)
    assert [number for _, number in by_time] == sorted(found)
    for attempt, number in by_time:
        assert number >= attempt.restarts
        for other, another in by_time:
            ended = attempt.until_ns is not None and max(attempt.until_ns, attempt.began_ns + 1) <= other.began_ns
            if ended and attempt.rank == other.rank and attempt.made_steps and other.made_steps:
                assert number < another
