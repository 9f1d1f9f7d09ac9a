from __future__ import annotations

import pytest

from stepscope.recorder.recorder import StepBoundaries

D, G = 1, 2


def closed(sequence: list[int]) -> list[bool]:
    boundaries = StepBoundaries()
    return [boundaries.closes(optimizer) for optimizer in sequence]


def test_one_optimizer_closes_every_step() -> None:
    assert closed([D] * 4) == [True] * 4


def test_two_optimizers_in_turn_are_one_step_that_ends_with_the_second() -> None:
    # The very first D cannot know that a G will follow.
    assert closed([D, G, D, G, D, G]) == [True, True, False, True, False, True]


def test_a_critic_stepped_five_times_does_not_end_the_iteration() -> None:
    assert closed([*[D] * 5, G] * 2)[6:] == [False] * 5 + [True]


def test_a_stage_that_drops_an_optimizer_is_noticed() -> None:
    answers = closed([D, G] * 3 + [D] * (StepBoundaries.PATIENCE + 3))
    assert answers[6:] == [False] * (StepBoundaries.PATIENCE - 1) + [True] * 4


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_three_optimizers_make_one_step_per_round(order: list[int]) -> None:
    assert closed(order * 4)[3:] == [False, False, True] * 3
