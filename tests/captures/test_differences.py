"""Which difference between ranks is named: the innermost that explains enough, on made-up figures and traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.traces import MadeTrace
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
        "in_steps": 5,
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


def test_the_layer_with_half_of_the_difference_is_named() -> None:
    block, linear = ("Block_2",), ("Block_2", "Linear_5")
    peer = times(0, 30.0, piece("aten::mm", 10.0, 8, layers={("Block_0",): 9 * MS, linear: MS}))

    def named(layers: dict[tuple[str, ...], int], name: str = "aten::mm", **about: Any) -> tuple[str, str]:
        first = differences_of([peer, times(1, 60.0, piece(name, 40.0, 8, layers=layers, **about))])[0]
        return first.layer, first.text.split(" in backward")[1].split(", from")[0]

    assert named({("Block_0",): 10 * MS, block: 5 * MS, linear: 25 * MS}) == ("Linear_5", " of layer Linear_5")
    assert named({block: 10 * MS, linear: 10 * MS, ("Block_2", "Linear_4"): 10 * MS}) == (
        "Block_2",
        " of layer Block_2",
    )
    assert named({("Block_0",): 19 * MS, block: 10 * MS, ("Block_1",): 11 * MS}) == ("", ""), "no layer has half of it"
    assert named({}) == ("", "")
    region = "Torch-Compiled Region: 0/1"
    for around, place in (((), region), (("Block_1",), f"{region} in layer Block_1"), ((f"{region[:-1]}0",), region)):
        layers = {(*around, region): 40 * MS}
        assert named(layers, "CompiledFunctionBackward") == (region, f" of {place}")
    assert named({("Block_1", region): 40 * MS}, region) == ("Block_1", " of layer Block_1"), "not of itself"


def made_step(rank: int, slow_us: float, *, layer: str = "Linear_2", stacks: bool = True) -> RankTimes:
    """Six steps of a model with two layers; in the backward of one, each of three operators takes so long."""
    made = MadeTrace(rank=rank, world_size=2)
    length = 70_000 + 3 * slow_us
    for step in range(6):
        at = step * length
        made.annotation(f"stepscope.step {step}", at, length)
        made.annotation("stepscope.forward", at + 10, 10_000)
        made.annotation("stepscope.backward", at + 20_000, length - 30_000)
        if stacks:
            made.python("nn.Module: Net_0", at + 20, 9_000)
        for number in (1, 2):
            start = at + number * 1_000
            if stacks:
                made.python(f"nn.Module: Linear_{number}", start, 900)
            elif layer:
                made.op(f"Torch-Compiled Region: 0/{number}", start, 900)
            made.op("aten::linear", start + 10, 800, **{"Sequence number": step * 10 + number})
        for number, start in ((2, at + 21_000), (1, at + 55_000)):
            dur_us = slow_us if layer == f"Linear_{number}" else 100
            about = {"Sequence number": step * 10 + number, "Fwd thread id": 1}
            made.op("LinearBackward0", start, 3 * dur_us + 100, **about)
            for place, name in enumerate(("aten::mm", "aten::sum", "aten::mul")):
                made.op(name, start + 10 + place * (dur_us + 10), dur_us)
    window = window_of(made.trace())
    return rank_times_of(window, exchanges_of(window, rank), rank)


def test_a_layer_is_named_in_backward_if_no_operator_explains_enough() -> None:
    slow, peer = made_step(1, 10_000), made_step(0, 100)
    first, *others = differences_of([slow, peer])
    assert first.text == (
        "Rank 1 spends 29.7 ms more per step than rank 0 in LinearBackward0 in backward of layer Linear_2."
    )
    assert ("layer", "Linear_2", "backward", "") in {
        (each.what, each.name, each.phase, each.layer) for each in others
    }, "as much as the operator that is around all of it"
    assert {
        piece.name: (piece.work_ns, piece.calls)
        for piece in slow.pieces
        if piece.phase == "backward" and piece.what == "layer"
    } == {
        "Linear_1": (400_000, 5),
        "Linear_2": (30_100_000, 5),
    }
    (mm,) = (piece for piece in slow.pieces if piece.name == "aten::mm")
    assert mm.layers == {("Linear_1",): 100_000, ("Linear_2",): 10_000_000}


def test_compiled_code_is_named_without_stacks() -> None:
    first = differences_of([made_step(1, 10_000, stacks=False), made_step(0, 100, stacks=False)])[0]
    assert first.text == (
        "Rank 1 spends 29.7 ms more per step than rank 0 in LinearBackward0 in backward of Torch-Compiled Region: 0/2."
    )


@pytest.mark.parametrize("sampled", [(0, 1, 2, 3, 4), (2,)])
def test_labels_of_layers_count_if_all_steps_have_them(sampled: tuple[int, ...]) -> None:
    made = MadeTrace()
    for step in range(6):
        at = step * 1_000.0
        made.annotation(f"stepscope.step {step}", at, 1_000)
        made.annotation("stepscope.forward", at + 10, 500)
        if step in sampled:
            made.annotation("stepscope.layer Net", at + 15, 300)
            made.annotation("stepscope.layer parts.0", at + 16, 120)
            made.annotation("stepscope.layer parts.1", at + 200, 100)
        made.op("aten::linear", at + 20, 100)
    window = window_of(made.trace())
    (linear,) = (each for each in rank_times_of(window, exchanges_of(window, 0), 0).pieces if each.what == "operator")
    assert linear.layers == ({("parts.0",): 100_000} if len(sampled) == 5 else {})
    assert linear.phase == "forward", "a layer's label is not one of a phase"


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


def test_a_layer_that_is_all_of_backward_says_no_more_than_backward() -> None:
    """A backbone beside a small head on a rank that is slow everywhere, and one that is large on the slow rank only."""
    names = [f"aten::op{number}" for number in range(10)]

    def rank_of(rank: int, times_as_long: float, backbone_ms: float) -> RankTimes:
        parts = [piece(name, 3.0 * times_as_long, 8) for name in names]
        phase = piece("backward", 30.0 * times_as_long, 3, what="phase")
        return times(rank, 36.0 * times_as_long, phase, piece("Sequential_0", backbone_ms, 4, what="layer"), *parts)

    uniform = differences_of([rank_of(0, 1.0, 29.5), rank_of(1, 2.0, 59.0)])[0]
    assert uniform.what == "phase"
    assert "everywhere" in uniform.text
    assert differences_of([rank_of(0, 1.0, 10.0), rank_of(1, 2.0, 59.0)])[0].name == "Sequential_0"


def test_small_differences_and_single_steps_are_chance() -> None:
    assert differences_of([times(0, 50.0), times(1, 54.9)]) == ()
    assert differences_of([times(0, 50.0)]) == ()
    assert differences_of([]) == ()
    even = times(0, 50.0)
    stalled = times(1, 70.0)
    stalled = RankTimes(**{**vars(stalled), "work_by_step_ns": (150 * MS, *(50 * MS,) * 4)})
    assert differences_of([even, stalled]) == ()


def test_what_only_a_single_rank_runs_is_named_even_if_all_work_equally_long() -> None:
    """Load on the machine evens out how long they work; on made-up figures of three ranks."""
    outer, svd = piece("aten::linalg_svdvals", 20.0, 7, own_ns=0), piece("aten::_linalg_svd", 19.8, 8)

    def found(alone: Piece = svd, *instead: Piece, on: int = 1) -> list[str]:
        ranks = [
            times(rank, 52.0 - rank, piece("aten::mm", 30.0, 8), *(instead if rank != on else ())) for rank in range(3)
        ]
        ranks[on] = replace(ranks[on], pieces=(*ranks[on].pieces, replace(outer, in_steps=alone.in_steps), alone))
        return [each.text for each in differences_of(ranks)]

    (text,) = found()
    assert text == (
        "Rank 1 spends 19.8 ms more per step than rank 2 in aten::_linalg_svd in backward, from train.py:24 (backward);"
        " rank 2 does not run it there."
    )
    assert found(on=0)[0].startswith("Rank 0 spends 19.8 ms more per step than rank 2 in aten::_linalg_svd in backward")
    assert found(replace(svd, in_steps=4)) == [], "not in every step"
    assert found(svd, outer, svd) == [], "another rank runs it"
    assert found(svd, piece("aten::_linalg_eigh", 10.1, 8)) == [], "the others run something in its place"
    assert len(found(svd, piece("aten::_linalg_eigh", 9.9, 8))) == 1
    small = times(1, 50.0, piece("aten::_linalg_svd", 9.9, 8)), times(0, 50.0)
    assert differences_of(small) == ()
    once = [
        replace(each, steps=(0,), pieces=tuple(replace(own, in_steps=1) for own in each.pieces))
        for each in (times(1, 50.0, svd), times(0, 50.0))
    ]
    assert differences_of(once) == (), "a single step"


def test_the_last_stage_of_a_pipeline_is_no_difference() -> None:
    """Stages call what they share more or less often; a rank with one more operator calls the rest equally often."""

    def found(*calls: int, steps: tuple[int, int, int] = (5, 5, 5), copies: int = 50) -> list[str]:
        mm_ms = [often / of / 2 for often, of in zip(calls, steps, strict=True)]
        own = {0: [piece("aten::embedding", 12.0, 8)], 2: [piece("aten::log_softmax", 30.0, 8)]}
        ranks = [
            times(
                *(rank, 80.0),
                *(
                    piece("aten::mm", mm_ms[rank], 8, phase=phase, calls=calls[rank])
                    for phase in ("forward", "backward")
                ),
                piece("aten::copy_", 3.0, 8, calls=copies if rank == 2 else 50),
                *own.get(rank, []),
                steps=steps[rank],
            )
            for rank in range(3)
        ]
        return [each.name for each in differences_of(ranks)]

    assert found(150, 210, 150) == [], "the middle stage has more layers"
    assert found(150, 150, 155) == [], "the head is one more in each step"
    assert found(150, 150, 150) == ["aten::log_softmax"]
    assert found(150, 150, 150, copies=100) == ["aten::log_softmax"], "a small share of the work"
    assert found(120, 150, 150, steps=(4, 5, 5)) == ["aten::log_softmax"]
    assert found(150, 150, 150, steps=(4, 5, 5)) == []
    assert found(150, 150, 149) == ["aten::log_softmax"], "the edge of the steps"


def test_kernels_count_where_the_device_decides() -> None:
    svd = piece("gesvd", 20.0, 1e6, what="kernel")
    ranks = [times(0, 50.0), times(1, 50.0, svd)]
    assert differences_of(ranks) == ()
    assert [each.name for each in differences_of([replace(each, on_device=True) for each in ranks])] == ["gesvd"]


def made_svd(rank: int, svd: set[int], step_us: float) -> RankTimes:
    """Four steps of equal length, with an SVD in some."""
    made = MadeTrace(rank=rank, world_size=2)
    for step in range(5):
        at = step * 100_000.0
        made.annotation(f"stepscope.step {step}", at, step_us)
        made.op("aten::mm", at + 10, 50_000)
        if step in svd:
            made.op("aten::linalg_svd", at + 60_000, 20_000)
            made.op("aten::_linalg_svd", at + 60_010, 19_980)
    window = window_of(made.trace())
    return rank_times_of(window, exchanges_of(window, rank), rank)


def test_it_is_counted_in_how_many_steps_an_operator_runs() -> None:
    (first,) = differences_of([made_svd(0, {0, 1, 2, 3}, 98_000), made_svd(1, set(), 99_000)])
    assert (first.what, first.name, first.rank, first.peer, first.extra_ns) == (
        "operator",
        "aten::_linalg_svd",
        0,
        1,
        19_980_000,
    )
    assert differences_of([made_svd(0, {0, 1, 2}, 98_000), made_svd(1, set(), 99_000)]) == ()


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
