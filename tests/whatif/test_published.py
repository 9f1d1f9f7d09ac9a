"""The published analysis of real traces, value by value (docs/whatif.md says where they come from)."""

from __future__ import annotations

from pathlib import Path

import pytest
from whatif_published import compared, deviations

CLOSE = 1e-4
"""Asked for is 0.01; what is left between the two is single against double precision."""


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_published_values(shared_data: Path, name: str) -> None:
    fields = []
    for field, ours, theirs in compared(shared_data / "whatif", name):
        assert dict(ours) == pytest.approx(dict(theirs), rel=CLOSE), field
        fields.append(field)
    assert fields == ["slowdown", "by_worker", "by_stage", "by_dp_rank", "by_operation", "mw", "ms"]


def test_deviations_say_the_same(shared_data: Path) -> None:
    assert all(value < CLOSE for value in deviations(shared_data / "whatif", "ST").values())
