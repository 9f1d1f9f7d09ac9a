"""Healthy trainings under the recorder: nothing is said about their gradients, layers, loss and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from healthy_layers import ALONE, TOGETHER, TRUE_OF, run_job
from jobs import healthy_models


def test_every_job_is_listed_once() -> None:
    names = [*ALONE, *TOGETHER]
    assert sorted(names) == sorted(healthy_models.JOBS)
    assert set(TRUE_OF) < set(names)
    assert [job.__name__ for job in healthy_models.TOGETHER] == list(TOGETHER)


@pytest.mark.soak
@pytest.mark.parametrize("job", ["fp16_with_skips", "ddp_batchnorm", "unused_head"])
def test_a_healthy_training_raises_no_alarm(job: str, tmp_path: Path) -> None:
    outcome = run_job(job, "every", 150, tmp_path)
    assert outcome.exit_code == 0
    assert outcome.samples == 149
    assert outcome.alarms(job) == []
    assert outcome.missing(job) == set()
    assert set(outcome.summary["metrics"]) >= {"loss"}
