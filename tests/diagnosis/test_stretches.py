"""A rank that is late for a part of the run only: from when to when, and how soon it is known."""

from __future__ import annotations

import pytest
from example_counts import seeds
from fakes.cluster import Cluster, slow_at
from fakes.cut import cut

from stepscope.diagnosis import diagnose
from stepscope.records.finding import Finding


def late(cluster: Cluster, *, until: int | None = None) -> list[Finding]:
    run = cluster.run() if until is None else cut(cluster.run(), until)
    return [finding for finding in diagnose(run) if finding.kind.endswith("straggler")]


@pytest.mark.seeds
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_ten_per_cent_from_a_step_on_are_known_ten_steps_later(ranks: int, phase: str) -> None:
    for seed in seeds(3):
        fault = slow_at(1, phase, 3.9, range(40, 100))
        (found,) = late(Cluster(ranks=ranks, steps=100, seed=seed, faults=(fault,)), until=49)
        assert (found.ranks, found.phase) == ((1,), phase)
        assert found.steps is not None and abs(found.steps[0] - 40) <= 2
        assert found.steps[1] == 49
        assert "from step" in found.title


def test_it_says_from_when_to_when() -> None:
    (found,) = late(Cluster(ranks=4, steps=200, faults=(slow_at(2, "forward", 20.0, range(80, 120)),)))
    assert found.steps is not None
    assert abs(found.steps[0] - 80) <= 1 and abs(found.steps[1] - 119) <= 1
    assert f"in steps {found.steps[0]} to {found.steps[1]}" in found.title
    assert found.cost["seconds"] == pytest.approx(40 * 0.02, rel=0.1)


def test_one_that_grows_is_found_with_the_time_it_took() -> None:
    (found,) = late(Cluster(ranks=4, steps=100, faults=(slow_at(3, "backward", 40.0, ramp=True),)))
    assert (found.ranks, found.phase) == ((3,), "backward")
    assert found.cost["seconds"] == pytest.approx(100 * 0.02, rel=0.15)


def test_seven_steps_are_too_few_to_say() -> None:
    assert late(Cluster(ranks=4, steps=100, faults=(slow_at(2, "forward", 4.0, range(50, 56)),))) == []
