from __future__ import annotations

from stepscope.recorder.recorder import StepBoundaries


class Optimizer:
    pass


D, G = Optimizer(), Optimizer()


def closed(sequence: list[Optimizer]) -> list[bool]:
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


def test_three_optimizers_make_one_step_per_round() -> None:
    assert closed([D, Optimizer(), G] * 4)[3:] == [False, False, True] * 3


def test_a_new_optimizer_closes_its_steps_although_it_has_the_id_of_one_that_is_gone() -> None:
    """As in scripts that make one for each epoch or fold, while another one is alive."""
    boundaries = StepBoundaries()
    seen = set()
    for _ in range(50):
        boundaries.closes(D)
        optimizer = Optimizer()
        seen.add(id(optimizer))
        assert [boundaries.closes(optimizer) for _ in range(3)] == [True] * 3
        del optimizer
        assert boundaries.closes(D), "the one that closed is gone"
    assert len(seen) < 50, "some had the same id"
