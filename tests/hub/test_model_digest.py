"""Digests and planes against a recomputation by hand, on random data that comes in any order."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope.hub.model.digest import QUANTILES, WORST, Digest, DigestLog, digest_steps
from stepscope.hub.model.digest_block import digest_block
from stepscope.hub.model.heat import Heat
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.planes import Planes
from stepscope.hub.past import past_run
from stepscope.records.phases import BACKWARD, COMM
from stepscope.records.series import RankSeries
from stepscope.store.assemble import book_waiting
from stepscope.store.sidecar import RingSidecar
from stepscope.testing.cluster import Cluster
from stepscope.testing.feed import sidecar_of, taken_of


def introduce(live: LiveRun, series: tuple[RankSeries, ...]) -> None:
    for one in series:
        live.ring(RingSidecar.from_dict(sidecar_of(one, state="running")), node="0")


def by_hand(series: tuple[RankSeries, ...], step: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Wall and work of the ranks that made the step."""
    rows = [one.steps[one.steps["step"] == step] for one in series]
    found = np.concatenate([row for row in rows if len(row)])
    wall = found["wall_ns"].astype(np.float32)
    return wall, wall - found["phase_ns"][:, COMM].astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_digests_equal_a_recomputation_whatever_the_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    lost = {int(rank): set(random.integers(0, 59, 4).tolist()) for rank in random.integers(0, 40, 5)}
    series = Cluster(ranks=40, steps=60, seed=seed, noise=0.3, missing=lost).series()
    live = LiveRun()
    introduce(live, series)
    at = np.zeros(len(series), int)
    while (at < 60).any():
        rank = int(random.integers(len(series)))
        upto = int(at[rank] + random.integers(1, 12))
        live.rows(taken_of([series[rank]], range(at[rank], upto)))
        at[rank] = upto
        if random.random() < 0.3:
            live.tick()
    live.tick()
    said = live.steps(0, 59, bins=100)
    assert said["first"] == list(range(60))
    for place, step in enumerate(said["first"]):
        wall, work = by_hand(series, step)
        for name, values in (("wall", wall), ("work", work)):
            ordered = np.sort(values)
            picked = [ordered[round(q * (len(ordered) - 1))] for q in QUANTILES]
            assert said["ns"][name][place] == [round(float(value)) for value in picked]
        assert said["ranks"][place] == len(wall)
        assert [one["work"] for one in said["worst"][place]] == [
            round(float(value)) for value in np.sort(work)[::-1][:WORST]
        ]


def test_worst_ranks_have_their_phases_in_full() -> None:
    series = Cluster(ranks=20, steps=3).series()
    live = LiveRun()
    introduce(live, series)
    live.rows(taken_of(series, range(3)))
    worst = live.steps()["worst"][2][0]
    row = series[worst["rank"]].steps[2]
    assert worst["step"] == 2
    for slot, name in enumerate(series[0].phase_names[:9]):
        assert worst.get(name, 0) == round(float(np.float32(row["phase_ns"][slot])))


def test_waiting_is_booked_as_the_store_does_it() -> None:
    """DDP tells what a step waited for only in the next one, which may come in another batch."""
    series = Cluster(ranks=3, steps=12).series()
    random = np.random.default_rng(1)
    for one in series:
        one.steps["ddp_compute_ns"] = random.integers(1, 9e6, 12)
        one.steps["ddp_compute_ns"][[0, 7]] = 0
        one.steps["ddp_exposed_ns"] = random.integers(0, 3e7, 12)
        one.steps["ddp_comm_ns"] = random.integers(0, 3e7, 12)
    live = LiveRun()
    introduce(live, series)
    for steps in (range(5), range(5, 6), range(6, 12)):
        live.rows(taken_of(series, steps))
        live.tick()
    live.tick()
    planes = live.planes
    rows = planes.row_of(np.arange(12))
    for column, one in enumerate(series):
        booked = book_waiting(one.steps.copy())
        for name, slot in (("backward", BACKWARD), ("comm", COMM)):
            expected = booked["phase_ns"][:, slot].astype(np.float32)
            assert np.allclose(planes.held[f"phase:{name}"][rows, column], expected, rtol=1e-6)
        assert np.allclose(planes.held["ddp_compute_ns"][rows, column], booked["ddp_compute_ns"], rtol=1e-6)
        work = booked["wall_ns"].astype(float) - booked["phase_ns"][:, COMM]
        assert np.allclose(live.map.work_ns[column, :12], work, rtol=1e-5)
    said = live.steps()
    for step in range(12):
        works = [float(book_waiting(one.steps.copy())["wall_ns"][step]) for one in series]
        assert said["ns"]["wall"][step][-1] == round(float(np.float32(max(works))))
        most = max(live.map.work_ns[:3, step])
        assert abs(said["ns"]["work"][step][-1] - most) <= 64


def test_a_backlog_longer_than_the_window_is_digested_step_by_step() -> None:
    series = Cluster(ranks=4, steps=400).series()
    live = LiveRun(planes=Planes(most_steps=32))
    introduce(live, series)
    live.rows(taken_of(series, range(400)))
    live.tick()
    said = live.steps(bins=1000)
    assert said["first"] == list(range(400))
    assert set(said["ranks"]) == {4}
    wall, _ = by_hand(series, 7)
    assert said["ns"]["wall"][7][-1] == round(float(wall.max()))


def test_the_window_shrinks_with_the_ranks_and_keeps_the_newest() -> None:
    planes = Planes(budget_bytes=1 << 20)
    planes.add_columns(8)
    planes.advance(299)
    assert planes.width == 256
    planes.have[planes.row_of(np.arange(290, 300))] = True
    planes.expect(50_000)
    assert planes.width == 32
    assert planes.complete().tolist() == list(range(268, 300))
    kept = planes.have[planes.row_of(np.arange(268, 300)), 0]
    assert kept.tolist() == [step >= 290 for step in range(268, 300)]


def test_a_stride_keeps_every_so_many_steps() -> None:
    planes = Planes(most_steps=32)
    planes.add_columns(1)
    planes.advance(31)
    planes.have[planes.row_of(np.arange(32)), 0] = True
    planes.set_stride(4)
    planes.advance(100)
    assert planes.complete().tolist() == list(range(0, 101, 4))
    assert planes.have[planes.row_of(np.arange(0, 101, 4)), 0].tolist() == [step < 32 for step in range(0, 101, 4)]
    assert (planes.row_of(np.array([5, 99, 101])) == -1).all()


def test_the_log_folds_its_past_and_loses_no_step_and_no_extreme() -> None:
    random = np.random.default_rng(0)
    log = DigestLog(room=64)
    most = np.zeros(1000, np.float32)
    for step in range(1000):
        values = np.sort(random.random(8)).astype(np.float32)
        digest = one_digest(step, values)
        most[step] = values[-1]
        log.put(digest)
    n = log.count
    assert n <= 64
    assert log.first[0] == 0
    assert log.last[n - 1] == 999
    assert (log.first[1:n] == log.last[: n - 1] + 1).all()
    assert log.steps[:n].sum() == 1000
    assert (np.diff(log.steps[:n]) <= 0).all()
    for at in range(n):
        assert log.quantiles[at, 0, -1] == most[log.first[at] : log.last[at] + 1].max()
        assert log.values[at, 0, 1] == log.quantiles[at, 1, -1]
    folded = log.bins(0, 999, 5)
    assert folded.count <= 5
    assert folded.steps[: folded.count].sum() == 1000


def one_digest(step: int, values: NDArray[np.float32]) -> Digest:
    from stepscope.hub.model.digest import METRICS

    quantiles = np.zeros((METRICS, 8), np.float32)
    quantiles[:2] = values
    worst = np.zeros((1, METRICS), np.float32)
    worst[0, 1] = values[-1]
    return Digest(step=step, ranks=8, quantiles=quantiles, worst=np.array([3]), values=worst)


def test_the_map_folds_and_keeps_every_sum() -> None:
    random = np.random.default_rng(2)
    heat = Heat(bins=16, least_bins=8, budget_bytes=16 * 64 * 12)
    work = random.random((300, 100)).astype(np.float32)
    for step in range(100):
        if step == 50:
            heat.make_room(300)
        columns = np.arange(64 if step < 50 else 300)
        heat.add(columns, np.full(len(columns), step), work[columns, step], 2 * work[columns, step])
    assert heat.bins == 8
    assert heat.span == 16
    for column in (0, 63, 200, 299):
        first = 0 if column < 64 else 50
        expected = [work[column, max(first, at * 16) : (at + 1) * 16].sum() for at in range(8)]
        assert np.allclose(heat.work_ns[column], expected, rtol=1e-5)
        assert np.allclose(heat.wall_ns[column], 2 * np.array(expected), rtol=1e-5)
        assert heat.count[column].sum() == 100 - first


@pytest.mark.parametrize("ranks", [1, 3, 16, 40])
def test_a_block_is_what_its_steps_are_one_by_one(ranks: int) -> None:
    """Also through folds, and with memory that was sampled now and then."""
    run = Cluster(ranks=ranks, steps=300, allocated_mb=lambda rank, steps: 10.0 * rank + steps, memory_every=3).run()
    live = past_run(run)
    alone, together = DigestLog(64), DigestLog(64)
    steps = np.arange(300, dtype=np.int64)
    for digest in digest_steps(live.planes, steps.tolist()):
        alone.put(digest, digest.start_ns)
    while len(steps):
        block = digest_block(live.planes, steps[:70])
        assert block is not None
        together.extend(block)
        steps = steps[block.count :]
    assert together.count == alone.count
    for mine, theirs in zip(together._arrays(), alone._arrays(), strict=True):
        np.testing.assert_array_equal(mine[: alone.count], theirs[: alone.count])


def test_a_step_that_a_rank_lacks_makes_no_block() -> None:
    live = past_run(Cluster(ranks=3, steps=50, missing={1: [20]}).run())
    assert digest_block(live.planes, np.arange(20, dtype=np.int64)) is not None
    assert digest_block(live.planes, np.arange(21, dtype=np.int64)) is None
    assert digest_block(live.planes, np.arange(60, dtype=np.int64)) is None
    assert live.digests.count == 50
