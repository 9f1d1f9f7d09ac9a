"""The map rank × step: the same cells as one by one, however ranks lie in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster
from fakes.records import records_of, timed_at, with_records
from hub_feed import sidecar_of, taken_of
from numpy.typing import NDArray

from stepscope.hub.api.steps import HEAT_HEAD, Statistic, heat_map, pack_heat, rank_series
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Planes
from stepscope.hub.past_run import past_run
from stepscope.records.steps import FLAG_SAMPLED
from stepscope.store.live.ring_files import RingSidecar

RANKS, STEPS, KEPT = 7, 300, 256
SERIES = Cluster(ranks=RANKS, steps=STEPS).series()
LATE = 3
"""This rank has not made the last steps."""


@pytest.fixture(scope="module", params=["in order", "mixed"])
def live(request: Any) -> LiveRun:
    series = SERIES if request.param == "in order" else tuple(SERIES[rank] for rank in (4, 0, 6, 3, 1, 5, 2))
    found = LiveRun(planes=Planes(most_steps=KEPT))
    for one in series:
        found.ring(RingSidecar.from_dict(sidecar_of(one, state="running")), node="0")
    for first in range(0, STEPS, 50):
        others = [one for one in series if one.identity.rank != LATE or first + 50 < STEPS]
        found.rows(taken_of(others, range(first, first + 50)))
    found.tick()
    return found


def truth(value: str, first: int, last: int) -> NDArray[np.float64]:
    steps = [one.steps.part(slice(first, last + 1)) for one in SERIES]
    whole = np.array([own["wall_ns"] for own in steps])
    forward, comm = (np.array([own.phase(name) for own in steps]) for name in ("forward", "comm"))
    found = {"wall": whole, "work": whole - comm, "forward": forward}[value]
    found[LATE, max(0, STEPS - 50 - first) :] = np.nan
    return found


def cells_of(plane: NDArray[np.float64], shape: tuple[int, int], statistic: Statistic) -> list[list[float]]:
    tall, wide = (-(-count // most) for count, most in zip(plane.shape, shape, strict=True))

    def one(cell: NDArray[np.float64]) -> float:
        known = cell[~np.isnan(cell)]
        return float("nan") if not len(known) else float(known.max() if statistic == "max" else known.mean())

    columns, rows = range(0, plane.shape[1], wide), range(0, plane.shape[0], tall)
    return [[one(plane[row : row + tall, column : column + wide]) for column in columns] for row in rows]


@pytest.mark.parametrize("value", ["work", "wall", "forward"])
@pytest.mark.parametrize("shape", [(RANKS, KEPT), (3, 11), (1, 1)])
def test_a_cell_is_the_highest_of_what_is_known_in_it(live: LiveRun, value: str, shape: tuple[int, int]) -> None:
    found = heat_map(live, value, "max", None, (STEPS - KEPT, None), shape)
    assert found is not None
    assert found.exact
    np.testing.assert_allclose(found.cells, cells_of(truth(value, STEPS - KEPT, STEPS - 1), shape, "max"), rtol=1e-6)


def test_a_mean_is_of_the_ranks_that_have_made_the_step(live: LiveRun) -> None:
    found = heat_map(live, "wall", "mean", (2, 4), (STEPS - 60, STEPS - 1), (1, 60))
    assert found is not None
    expected = cells_of(truth("wall", STEPS - 60, STEPS - 1)[2:5], (1, 60), "mean")
    np.testing.assert_allclose(found.cells, expected, rtol=1e-6)


def test_of_bins_each_rank_has_its_mean(live: LiveRun) -> None:
    found = heat_map(live, "wall", "max", (0, 5), (0, None), (6, 512))
    assert found is not None
    assert (found.exact, live.map.span) == (False, 1)
    np.testing.assert_allclose(found.cells, truth("wall", 0, STEPS - 1)[:6], rtol=1e-6)
    assert found.first_ranks.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", ["forward", "work"])
def test_a_stretch_of_which_nothing_is_known_is_a_whole_answer(live: LiveRun, value: str) -> None:
    asked = (0, 20) if value == "forward" else (STEPS + 100, STEPS + 200)
    found = heat_map(live, value, "max", None, asked, (3, 11))
    assert found is not None
    assert found.known_from == (STEPS - KEPT if value == "forward" else 0)
    packed = pack_heat(found)
    rows, columns = HEAT_HEAD.unpack_from(packed)[3:]
    assert (rows, columns) == (3, 0) == (len(found.first_ranks), len(found.first_steps))
    assert len(packed) == HEAT_HEAD.size + 8 * rows


def test_times_on_the_device() -> None:
    """Of the steps that were timed there; of the others nothing is known."""
    run = Cluster(ranks=2, steps=40, device_timed=True).run()
    thinned = tuple(timed_at(rank, slice(None, None, 4)) for rank in run.ranks)
    live = past_run(replace(run, ranks=thinned))
    heat = heat_map(live, "device:forward", "max", None, (0, None), (2, 40))
    assert heat is not None
    expected = np.array([one.steps.device("forward") for one in thinned])
    np.testing.assert_allclose(heat.cells, expected, rtol=1e-6)
    assert heat.unit == "ns"
    coarse = heat_map(live, "device:forward", "mean", None, (0, None), (1, 10))
    assert coarse is not None
    np.testing.assert_allclose(coarse.cells[0], np.nanmean(expected.reshape(2, 10, 4), axis=(0, 2)), rtol=1e-6)
    assert heat_map(live, "device:nothing", "max", None, (0, None), (2, 40)) is None
    for value in ("device:wall", "device:work"):
        whole = heat_map(live, value, "max", None, (0, None), (2, 40))
        assert whole is not None
        skipped = "comm" if value == "device:work" else ""
        phases = [name for name in thinned[0].steps.table.phases if name != skipped]
        expected = np.array([sum(one.steps.device(name) for name in phases) for one in thinned])
        np.testing.assert_allclose(whole.cells, expected, rtol=1e-6)
    assert heat_map(past_run(Cluster(ranks=2, steps=4).run()), "device:forward", "max", None, (0, None), (2, 4)) is None


def test_a_sampled_step_is_shown_as_the_one_before_it() -> None:
    """Looking at the layers takes time that the job would not have spent."""
    sampled = []
    for series in Cluster(ranks=2, steps=40).series():
        steps, device = records_of(series)
        steps["flags"][[0, 20]] |= FLAG_SAMPLED
        steps["wall_ns"][[0, 20]] *= 9
        sampled.append(with_records(series, steps, device))
    found = LiveRun(planes=Planes(most_steps=KEPT))
    for one in sampled:
        found.ring(RingSidecar.from_dict(sidecar_of(one, state="running")), node="0")
    found.rows(taken_of(sampled, range(40)))
    found.tick()
    heat = heat_map(found, "wall", "max", None, (0, None), (2, 40))
    assert heat is not None
    wall = np.array([one.steps["wall_ns"] for one in sampled], np.float64)
    wall[:, 0], wall[:, 20] = wall[:, 1], wall[:, 19]
    np.testing.assert_allclose(heat.cells, wall, rtol=1e-6)
    assert 20 not in rank_series(found, 1, 0, None, 64)["steps"]["first"]
