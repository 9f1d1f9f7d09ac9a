"""What the job's environment gets so that collectives on NCCL are timed: nothing that the user has settled."""

from __future__ import annotations

import pytest

from stepscope.records.paths import timed_collectives

TIMING, SIZE = "TORCH_NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE"


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        ({}, {TIMING: "1", SIZE: "2000"}),
        ({TIMING: "0"}, {SIZE: "2000"}),
        ({SIZE: "0"}, {}),  # nothing is recorded that could be timed
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),
        ({"NCCL_ENABLE_TIMING": "0"}, {}),  # torch's other name for it
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}, {TIMING: "1"}),
        ({TIMING: "1", SIZE: "20000"}, {}),
        ({"STEPSCOPE_SERVER": "0"}, {}),
    ],
)
def test_the_users_own_settings_stay(environ: dict[str, str], added: dict[str, str]) -> None:
    assert timed_collectives(environ) == added
