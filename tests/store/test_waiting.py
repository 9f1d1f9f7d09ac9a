"""How much of a backward was waiting for peers: DDP says it one step later."""

from __future__ import annotations

import numpy as np

from stepscope.records.phases import BACKWARD, COMM
from stepscope.records.slot import STEP_FIELDS
from stepscope.store.assemble import book_waiting


def booked(*rows: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    """Of (step, backward, last backward, what was read at its end): backward, comm and what DDP said of the step."""
    steps = np.zeros(len(rows), np.dtype(STEP_FIELDS))
    for index, (step, backward, last, said) in enumerate(rows):
        steps[index]["step"], steps[index]["last_backward_ns"], steps[index]["ddp_compute_ns"] = step, last, said
        steps[index]["phase_ns"][BACKWARD] = backward
    done = book_waiting(steps)
    assert (done["last_backward_ns"] == 0).all()
    return [(int(row["phase_ns"][BACKWARD]), int(row["phase_ns"][COMM]), int(row["ddp_compute_ns"])) for row in done]


def test_what_is_read_at_the_end_of_a_step_is_of_the_one_before() -> None:
    rows = [(0, 100, 100, 0), (1, 100, 100, 90), (2, 180, 180, 30), (3, 100, 100, 170)]
    # Step 0 is known from step 1 although nothing had been measured by its own end; of the last there is a guess.
    rows[0] = (0, 100, 100, 95)
    assert booked(*rows) == [(90, 10, 90), (30, 70, 30), (170, 10, 170), (100, 0, 170)]


def test_only_the_last_of_several_backwards_communicates() -> None:
    assert booked((0, 130, 100, 40), (1, 130, 100, 40)) == [(70, 60, 40), (70, 60, 40)]


def test_across_a_gap_the_steps_own_figure_is_the_best_guess() -> None:
    assert booked((0, 100, 100, 80), (5, 100, 100, 30)) == [(80, 20, 80), (30, 70, 30)]


def test_a_sample_of_another_step_moves_nothing() -> None:
    """On a GPU DDP measures one step in a hundred, on the device's clock."""
    assert booked((0, 100, 0, 40), (1, 100, 0, 0)) == [(100, 0, 40), (100, 0, 0)]


def test_nothing_and_garbage() -> None:
    assert booked() == []
    huge = (1 << 63) - 1
    assert booked((0, 10, huge, 5), (1, 10, 20, huge)) == [(10, 0, huge), (10, 0, huge)]
