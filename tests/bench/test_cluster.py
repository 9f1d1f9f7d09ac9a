"""The synthetic cluster: what its options promise about the records."""

from __future__ import annotations

import numpy as np
from fakes.cluster import Cluster, slow_at

PHASES = {"forward": 10.0, "backward": 20.0, "optimizer": 5.0, "other": 2.0}


def test_other_lies_between_steps_but_for_the_first() -> None:
    (series,) = Cluster(ranks=1, steps=5, noise=0.1, phases_ms=PHASES).series()
    other = series.steps.phase("other")
    assert other.min() > 1_000_000
    assert series.steps["between_ns"].tolist() == [0, *other[1:].tolist()]


def test_what_is_inside_is_other_and_not_between() -> None:
    plain = Cluster(ranks=2, steps=6, phases_ms=PHASES)
    odd = Cluster(ranks=2, steps=6, phases_ms=PHASES, faults=(slow_at(1, "inside", 3.0, range(4, 6)),))
    for rank, extra in ((0, [0, 0]), (1, [3_000_000, 3_000_000])):
        before, after = plain.series()[rank].steps, odd.series()[rank].steps
        assert after["between_ns"].tolist() == before["between_ns"].tolist()
        assert (after.phase("other")[4:] - before.phase("other")[4:]).tolist() == extra
        assert (sum(map(after.phase, after.table.phases)) == after["wall_ns"]).all()
    assert "inside" not in odd.series()[0].phase_names


def test_a_phase_of_every_step_may_be_inside() -> None:
    (series,) = Cluster(ranks=1, steps=4, noise=0.0, phases_ms={**PHASES, "inside": 7.0}).series()
    assert series.steps.phase("other").tolist() == [9_000_000] * 4
    assert series.steps["between_ns"].tolist() == [0, *[2_000_000] * 3]


def test_waiting_for_a_device_is_not_between() -> None:
    (series,) = Cluster(ranks=1, steps=4, phases_ms=PHASES, device_timed=True).series()
    assert (series.steps["between_ns"] < 3_000_000).all()
    assert (series.steps.phase("other") > 20_000_000).all()
    assert np.all(series.steps["device_wall_ns"] == sum(map(series.steps.device, series.steps.table.phases)))


def test_a_fault_may_grow_and_keep_to_some_steps() -> None:
    fault = slow_at(0, "forward", 40.0, range(5, 10, 2), ramp=True)
    cluster = Cluster(ranks=1, steps=10, noise=0.0, warmup_ms=0.0, phases_ms={"forward": 10.0}, faults=(fault,))
    (series,) = cluster.run().ranks
    extra_ms = series.steps.phase("forward") / 1e6 - 10.0
    assert extra_ms.tolist() == [0, 0, 0, 0, 0, 20, 0, 28, 0, 36]
