"""Recorded runs that were once judged wrongly (``shared/data/runs`` beside the checkout), with today's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.diagnosis import diagnose
from stepscope.records.series import RunData
from stepscope.store.load import open_run


def _recorded(shared_data: Path, name: str) -> RunData:
    if not (shared_data / "runs" / name).is_dir():
        pytest.skip(f"the recorded run shared/data/runs/{name} is not here")
    return open_run(shared_data / "runs" / name)


def test_a_rank_that_is_slower_in_every_step_is_not_lost_among_busy_neighbors(shared_data: Path) -> None:
    """Two ranks on two busy cores; rank 1 alone takes 25 to 400 ms in its own code, in each of 700 steps."""
    first = diagnose(_recorded(shared_data, "lost-straggler"))[0]
    assert (first.kind, first.severity, first.ranks, first.phase) == ("straggler", "critical", (1,), "other")
    assert first.evidence["place"] == "log_param_norms, gpt_ddp.py:57"
    assert first.evidence["last_in_steps"] == first.evidence["steps_used"] == 697
