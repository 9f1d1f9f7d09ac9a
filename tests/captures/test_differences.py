"""Which difference between ranks is named: the innermost that explains enough, on made-up figures and traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trace_jobs import MadeJob

from stepscope.captures.differences import changes_of, differences_of
from stepscope.captures.rank_times import Piece, RankTimes, rank_times_of
from stepscope.traces.collective_calls import exchanges_of
from stepscope.traces.model.window import is_user_frame, window_of

MS = 1_000_000


def piece(name: str, work_ms: float, depth: float, **about: Any) -> Piece:
    values: dict[str, Any] = {
        "what": "operator",
        "phase": "backward",
        "line": "train.py:24",
        "function": "backward",
        "own_ns": int(work_ms * MS),
        "calls": 30,
    }
    return Piece(name=name, work_ns=int(work_ms * MS), depth=depth, **{**values, **about})


def times(rank: int, work_ms: float, *pieces: Piece, step_ms: float = 100.0, steps: int = 5) -> RankTimes:
    return RankTimes(
        rank=rank,
        steps=tuple(range(steps)),
        step_ns=int(step_ms * MS),
        wait_ns=int((step_ms - work_ms) * MS),
        work_by_step_ns=(int(work_ms * MS),) * steps,
        on_device=False,
        exchanges=True,
        pieces=pieces,
    )


def test_the_innermost_that_explains_half_is_named() -> None:
    slow = times(
        *(2, 60.0),
        piece("backward", 45.0, 3, what="phase", own_ns=0),
        piece("aten::matmul", 40.1, 7, own_ns=0),
        piece("aten::mm", 40.1, 8),
        piece("aten::fill_", 4.0, 9),
    )
    peer = times(0, 30.0, piece("aten::mm", 10.0, 8), piece("aten::matmul", 10.0, 7, own_ns=0))
    first, *others = differences_of([times(1, 31.0), slow, peer, times(3, 20.0), times(4, 30.5)])
    # Of ranks 0, 1, 3 and 4, rank 0 and 4 are in the middle.
    assert (first.what, first.rank, first.name, first.line) == ("operator", 2, "aten::mm", "train.py:24")
    first, *others = differences_of([slow, peer])
    assert (
        first.text
        == "Rank 2 spends 30.1 ms more per step than rank 0 in aten::mm in backward, from train.py:24 (backward)."
    )
    assert [each.text for each in others] == [
        (
            "Rank 2 spends 4.00 ms more per step than rank 0 in aten::fill_ in backward, from train.py:24 (backward); "
            "rank 0 does not run it there."
        ),
        "Rank 0 waits 30.0 ms longer per step for others than rank 2.",
    ]


def test_more_calls_are_another_cause_than_longer_ones() -> None:
    slow = times(1, 60.0, piece("aten::mm", 40.0, 8, calls=60))
    peer = times(0, 30.0, piece("aten::mm", 10.0, 8, calls=15))
    assert differences_of([peer, slow])[0].text == (
        "Rank 1 spends 30.0 ms more per step than rank 0 in aten::mm in backward, from train.py:24 (backward); "
        "it runs 12 times instead of 3."
    )


SINCE = "the baseline of steps 20 to 29"


def test_a_rank_is_compared_with_itself_in_the_baseline() -> None:
    before = times(2, 30.0, piece("aten::mm", 10.0, 8), piece("aten::add", 3.0, 8))
    now = times(2, 60.0, piece("aten::mm", 40.1, 8), piece("aten::fill_", 4.0, 9), piece("aten::add", 3.0, 8))
    first, *others = changes_of([times(0, 35.0), now], [times(0, 29.0), before], SINCE)
    assert (first.what, first.name, first.rank, first.peer, first.extra_ns) == (
        "operator",
        "aten::mm",
        2,
        2,
        30_100_000,
    )
    assert [first.text, *(each.text for each in others)] == [
        (
            "Rank 2 spends 30.1 ms more per step in aten::mm in backward, from train.py:24 (backward), than in the "
            "baseline of steps 20 to 29."
        ),
        (
            "Rank 2 spends 4.00 ms more per step in aten::fill_ in backward, from train.py:24 (backward), than in the "
            "baseline of steps 20 to 29; the baseline does not run it there."
        ),
    ]


def test_a_rank_that_the_baseline_lacks_is_compared_with_a_median_rank() -> None:
    before = [times(rank, 30.0 + rank, piece("aten::mm", 10.0 + rank, 8)) for rank in (0, 1, 3)]
    now = times(2, 60.0, piece("aten::mm", 40.0, 8, line="", function="", phase=""))
    assert changes_of([now], before, SINCE)[0].text == (
        "Rank 2 spends 40.0 ms more per step in aten::mm than rank 1 in the baseline of steps 20 to 29; "
        "the baseline does not run it there."
    )


def test_what_did_not_change_or_cannot_be_compared_says_nothing() -> None:
    before = times(2, 30.0, piece("aten::mm", 10.0, 8))
    slower = times(2, 60.0, piece("aten::mm", 40.0, 8))
    assert changes_of([times(2, 31.0)], [before], SINCE) == ()
    assert changes_of([slower], [], SINCE) == ()
    assert changes_of([replace(slower, stacked=True)], [before], SINCE) == ()
    # One long step of five is chance.
    once = replace(slower, work_by_step_ns=(30 * MS, 30 * MS, 30 * MS, 30 * MS, 180 * MS))
    assert changes_of([once], [before], SINCE) == ()


def test_what_is_spread_over_everything_is_a_slower_processor() -> None:
    names = [f"aten::op{number}" for number in range(10)]
    slow = times(1, 60.0, piece("backward", 50.0, 3, what="phase"), *(piece(name, 5.0, 8) for name in names))
    peer = times(0, 36.0, piece("backward", 30.0, 3, what="phase"), *(piece(name, 3.0, 8) for name in names))
    first = differences_of([peer, slow])[0]
    assert (first.what, first.name) == ("phase", "")
    assert first.text == (
        "Rank 1 spends 24.0 ms more per step than rank 0; the same calls take 1.7 times as long, everywhere: "
        "its processor or device is slower, or shared."
    )


def test_small_differences_and_single_steps_are_chance() -> None:
    assert differences_of([times(0, 50.0), times(1, 54.9)]) == ()
    assert differences_of([times(0, 50.0)]) == ()
    assert differences_of([]) == ()
    even = times(0, 50.0)
    stalled = times(1, 70.0)
    stalled = RankTimes(**{**vars(stalled), "work_by_step_ns": (150 * MS, *(50 * MS,) * 4)})
    assert differences_of([even, stalled]) == ()


def test_a_slow_kernel_is_named_and_not_its_launch() -> None:
    made = MadeJob(
        world=2,
        layers=8,
        slower=lambda rank, step, layer: 300.0 if rank == 1 else 0.0,
        dims=lambda rank: [[64, 64]] * 2,
    )
    windows = [window_of(each.trace()) for each in made.ranks()]
    ranks = [rank_times_of(window, exchanges_of(window, rank), rank) for rank, window in enumerate(windows)]
    assert all(each.on_device for each in ranks)
    first = differences_of(ranks)[0]
    assert first.text == "Rank 1 spends 4.80 ms more per step than rank 0 in kernel gemm_bf16."


def test_a_slow_host_is_named_where_kernels_are_alike() -> None:
    made = MadeJob(world=2, layers=8, load=lambda rank, step, layer: 20_000.0 if rank == 1 else 0.0)
    windows = [window_of(each.trace()) for each in made.ranks()]
    ranks = [rank_times_of(window, exchanges_of(window, rank), rank) for rank, window in enumerate(windows)]
    first = differences_of(ranks)[0]
    assert (first.what, first.rank, first.phase, first.extra_ns) == ("phase", 1, "input", 20 * MS)


@pytest.mark.parametrize(
    ("frame", "of_user"),
    [
        ("train.py(31): step", True),
        ("/srv/job/model.py(7): forward", True),
        ("/opt/venv/src/stepscope/recorder/hooks/forward.py(307): timed", False),
        ("stepscope/recorder/hooks/forward.py(307): timed", False),
        ("/srv/stepscope/train.py(3): main", True),
    ],
)
def test_what_the_recorder_adds_is_not_the_users_line(frame: str, of_user: bool) -> None:
    assert is_user_frame(frame) == of_user


def test_a_function_between_phases_is_named_and_one_around_the_step_is_not() -> None:
    between = {"what": "line", "phase": "", "line": "train.py:5"}
    around = piece("train_step", 58.0, 1, **{**between, "function": "train_step", "own_ns": 2 * MS})
    phase = piece("forward", 20.0, 4, what="phase", phase="forward", own_ns=0)
    smooth = piece("smooth", 28.0, 3, **{**between, "function": "smooth"})
    (first,) = differences_of([times(1, 60.0, around, phase, smooth), times(0, 30.0, phase)])[:1]
    assert (first.what, first.name, first.line) == ("line", "smooth", "train.py:5")
    (first,) = differences_of([times(1, 60.0, around, phase), times(0, 30.0, phase)])[:1]
    assert (first.what, first.line) == ("phase", "")
