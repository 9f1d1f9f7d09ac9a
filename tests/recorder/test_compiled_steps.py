"""``torch.compile`` of a step, or of parts of one: no graph break more, the same numbers, and every step counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.records import records_of

from stepscope.records.steps import BACKWARD, FORWARD, OPTIMIZER
from stepscope.store.load import open_run
from tests.conftest import Completed

JOB = Path(__file__).with_name("compiled_job.py")
STEPS = 5
"""Of each case."""


@pytest.mark.soak  # near: test_a_compiled_model_is_timed_and_its_graph_is_whole in test_loops.py
def test_a_recorded_program_is_compiled_like_any_other(
    run_stepscope: Callable[..., Completed], run_python: Callable[..., Completed]
) -> None:
    bare = _made(run_python(JOB, timeout_s=300))
    done = run_stepscope("run", JOB, timeout_s=300)
    recorded = _made(done)
    cases = list(bare)
    assert list(recorded) == cases
    assert len(cases) == 18
    for case, ours in recorded.items():
        theirs = bare[case]
        assert ours["losses"] == theirs["losses"], case
        assert ours["breaks"] <= theirs["breaks"], case
        assert ours["graphs"] <= theirs["graphs"], case
        assert ours["frames"] <= theirs["frames"], case

    assert done.run_dir is not None
    (rank,) = open_run(done.run_dir).ranks
    assert len(rank.steps) == STEPS * len(cases)
    seen = (records_of(rank)[0]["phase_ns"] > 0).reshape(len(cases), STEPS, -1)
    for case, phases in zip(cases, seen[:, -1], strict=True):  # by the last step the model has been found
        assert phases[BACKWARD], case
        # What is part of a compiled graph together with other things has no time of its own.
        assert phases[FORWARD] == (not case.startswith(("whole", "until_backward"))), case
        assert phases[OPTIMIZER] == (not case.endswith(", own")), case


def _made(done: Completed) -> dict[str, Any]:
    assert done.code == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}
