"""How much of a backward was waiting for peers: DDP says it one step later."""

from __future__ import annotations

import numpy as np

from stepscope.records.steps import BACKWARD, COMM, STEP_FIELDS
from stepscope.store.rank_series import book_waiting


def booked(*rows: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    """Of (step, backward, computing and waiting as read at its end): backward, comm and what DDP said of the step."""
    steps = np.zeros(len(rows), np.dtype(STEP_FIELDS))
    for index, (step, backward, compute, exposed) in enumerate(rows):
        steps[index]["step"], steps[index]["ddp_compute_ns"], steps[index]["ddp_exposed_ns"] = step, compute, exposed
        steps[index]["phase_ns"][BACKWARD] = backward
    done = book_waiting(steps)
    assert (done["ddp_exposed_ns"] == 0).all()
    return [(int(row["phase_ns"][BACKWARD]), int(row["phase_ns"][COMM]), int(row["ddp_compute_ns"])) for row in done]


def test_what_is_read_at_the_end_of_a_step_is_of_the_one_before() -> None:
    rows = [(0, 100, 0, 0), (1, 100, 90, 10), (2, 180, 30, 70), (3, 100, 170, 10)]
    # Step 0 is known from step 1 although nothing had been measured by its own end; of the last there is a guess.
    assert booked(*rows) == [(90, 10, 90), (30, 70, 30), (170, 10, 170), (90, 10, 170)]


def test_what_the_script_does_before_backward_changes_nothing() -> None:
    """DDP's computing begins when forward ends, so it may be longer than all of backward."""
    assert booked((0, 100, 400, 60), (1, 100, 400, 60)) == [(40, 60, 400), (40, 60, 400)]


def test_across_a_gap_the_steps_own_figure_is_the_best_guess() -> None:
    assert booked((0, 100, 80, 20), (5, 100, 30, 70)) == [(80, 20, 80), (30, 70, 30)]


def test_a_sample_of_another_step_moves_nothing() -> None:
    """On a GPU DDP measures one step in a hundred, on the device's clock."""
    assert booked((0, 100, 40, 0), (1, 100, 0, 0)) == [(100, 0, 40), (100, 0, 0)]


def test_nothing_and_garbage() -> None:
    assert booked() == []
    huge = (1 << 64) - 1
    assert booked((0, 10, huge, 5), (1, 10, 20, huge)) == [(0, 10, 20), (0, 10, 20)]
