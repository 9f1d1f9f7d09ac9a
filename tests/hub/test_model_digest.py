"""Digests and planes against a recomputation by hand, on random data that comes in any order."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from digest_parts import StepDigest
from fakes.cluster import Cluster
from fakes.records import records_of, timed_at
from hub_feed import sidecar_of, taken_of
from numpy.typing import NDArray

from stepscope.hub.live import live_run
from stepscope.hub.live.digests import METRICS, QUANTILES, WORST, Bins, DigestLog, digest_block, digest_step
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Heat, Planes, Rows
from stepscope.hub.past_run import past_run
from stepscope.records.series import RankSeries
from stepscope.records.steps import BACKWARD, COMM
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.rank_series import book_waiting


def introduce(live: LiveRun, series: tuple[RankSeries, ...]) -> None:
    for rank_series in series:
        live.ring(RingSidecar.from_dict(sidecar_of(rank_series, state="running")), node="0")


def by_hand(series: tuple[RankSeries, ...], step: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Wall and work of the ranks that made the step."""
    rows = [rank_series.steps.part(rank_series.steps["step"] == step) for rank_series in series]
    wall = np.concatenate([row["wall_ns"] for row in rows]).astype(np.float32)
    return wall, wall - np.concatenate([row.phase("comm") for row in rows]).astype(np.float32)


@pytest.mark.few(1)
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
    steps = live.steps(0, 59, bins=100)
    assert steps["first"] == list(range(60))
    for place, step in enumerate(steps["first"]):
        wall, work = by_hand(series, step)
        for name, values in (("wall", wall), ("work", work)):
            expected = np.quantile(values.astype(float), QUANTILES)
            np.testing.assert_allclose(steps["ns"][name][place], expected, rtol=1e-6)
            assert steps["ns"][name][place][-1] == round(float(values.max()))
        assert steps["ranks"][place] == len(wall)
        means = {name: column[place] for name, column in steps["mean_ns"].items()}
        assert abs(means["wall"] - wall.mean()) <= 64
        assert abs(sum(means.values()) - 2 * means["wall"] - means["work"]) <= 64
        assert [row["work"] for row in steps["worst"][place]] == [
            round(float(value)) for value in np.sort(work)[::-1][:WORST]
        ]


def test_worst_ranks_have_their_phases_in_full() -> None:
    series = Cluster(ranks=20, steps=3).series()
    live = LiveRun()
    introduce(live, series)
    live.rows(taken_of(series, range(3)))
    worst = live.steps()["worst"][2][0]
    assert worst["step"] == 2
    for name in series[0].phase_names[:9]:
        assert worst.get(name, 0) == round(float(np.float32(series[worst["rank"]].steps.phase(name)[2])))


def test_waiting_is_booked_as_the_store_does_it() -> None:
    """DDP tells what a step waited for only in the next one, which may come in another batch."""
    series = Cluster(ranks=3, steps=12).series()
    random = np.random.default_rng(1)
    records = [records_of(rank_series) for rank_series in series]
    for rows, _ in records:
        rows["ddp_compute_ns"] = random.integers(1, 9_000_000, 12)
        rows["ddp_compute_ns"][[0, 7]] = 0
        rows["ddp_exposed_ns"] = random.integers(0, 30_000_000, 12)
        rows["ddp_comm_ns"] = random.integers(0, 30_000_000, 12)
    live = LiveRun()
    introduce(live, series)
    for steps in (range(5), range(5, 6), range(6, 12)):
        live.rows(taken_of(series, steps, records=records))
        live.tick()
    live.tick()
    planes = live.planes
    rows = planes.row_of(np.arange(12))
    for column, (recorded, _) in enumerate(records):
        booked = book_waiting(recorded.copy())
        for name, slot in (("backward", BACKWARD), ("comm", COMM)):
            expected = booked["phase_ns"][:, slot].astype(np.float32)
            assert np.allclose(planes.arrays[f"phase:{name}"][rows, column], expected, rtol=1e-6)
        assert np.allclose(planes.arrays["ddp_compute_ns"][rows, column], booked["ddp_compute_ns"], rtol=1e-6)
        work = booked["wall_ns"].astype(float) - booked["phase_ns"][:, COMM]
        assert np.allclose(live.map.work_ns[column, :12], work, rtol=1e-5)
    said = live.steps()
    for step in range(12):
        works = [float(recorded["wall_ns"][step]) for recorded, _ in records]
        assert said["ns"]["wall"][step][-1] == round(float(np.float32(max(works))))
        most = max(live.map.work_ns[:3, step])
        assert abs(said["ns"]["work"][step][-1] - most) <= 64


def test_a_backlog_longer_than_the_window_is_digested_step_by_step() -> None:
    series = Cluster(ranks=4, steps=400, device_timed=True).series()
    live = LiveRun(planes=Planes(most_steps=32))
    introduce(live, series)
    live.rows(taken_of(series, range(400)))
    live.tick()
    steps = live.steps(bins=1000)
    assert steps["first"] == list(range(400))
    assert set(steps["ranks"]) == {4}
    wall, _ = by_hand(series, 7)
    assert steps["ns"]["wall"][7][-1] == round(float(wall.max()))
    assert None not in steps["device_mean_ns"]["forward"]


def test_the_window_shrinks_with_the_ranks_and_keeps_the_newest() -> None:
    planes = Planes(budget_bytes=1 << 20)
    planes.add_columns(8)
    planes.advance(299)
    assert planes.width == 1024
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


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 3, 16, 40])
def test_a_block_is_what_its_steps_are_one_by_one(ranks: int) -> None:
    """Also through folds, and with memory that was sampled now and then."""
    run = Cluster(
        ranks=ranks,
        steps=300,
        device_timed=ranks > 1,
        allocated_mb=lambda rank, steps: 10.0 * rank + steps,
        memory_every=3,
    ).run()
    live = past_run(run)
    alone, together = DigestLog(64), DigestLog(64)
    steps = np.arange(300, dtype=np.int64)
    for step in steps.tolist():
        digested = digest_step(live.planes, step)
        assert digested is not None
        alone.put(digested[0])
    while len(steps):
        block = digest_block(live.planes, steps[:70])
        assert block is not None
        together.extend(block)
        steps = steps[len(block) :]
    assert together.count == alone.count
    mine, theirs = vars(together.bins(0, 299, 64)), vars(alone.bins(0, 299, 64))
    for name, column in theirs.items():
        np.testing.assert_array_equal(mine[name], column, name)


def thinned(series: tuple[RankSeries, ...], every: int) -> tuple[RankSeries, ...]:
    """Timed on the device now and then, as the recorder does it with short steps; rank 1 misses some of those too."""
    found = []
    for rank_series in series:
        step = rank_series.steps["step"][rank_series.steps.timed]
        found.append(timed_at(rank_series, (step % every == 0) & ((rank_series.rank != 1) | (step % (3 * every) > 0))))
    return tuple(found)


@pytest.mark.parametrize("late", [False, True])
def test_device_times_are_means_over_the_ranks_and_steps_that_were_timed(late: bool) -> None:
    """Also those that come when their step has been told: it is told again."""
    series = thinned(Cluster(ranks=3, steps=200, noise=0.3, device_timed=True).series(), 4)
    live = LiveRun()
    introduce(live, series)
    if late:
        bare = [timed_at(rank_series, slice(0)) for rank_series in series]
        live.rows(taken_of(bare, range(200)))
        assert live.steps(bins=200)["device_mean_ns"] == {}
    live.rows(taken_of(series, range(200)))
    steps = live.steps(bins=200)
    repeated = live.steps_redone(0)
    assert (repeated["first"] if repeated is not None else []) == (list(range(0, 200, 4)) if late else [])
    forward = np.array([rank_series.steps.device("forward") for rank_series in series])
    by_step = {step: np.nanmean(forward[:, step]) for step in range(0, 200, 4)}
    timed = [step for step, value in enumerate(steps["device_mean_ns"]["forward"]) if value is not None]
    assert timed == list(by_step)
    np.testing.assert_allclose(steps["device_mean_ns"]["forward"][::4], list(by_step.values()), rtol=1e-6)
    whole = np.array(
        [sum(rank_series.steps.device(name) for name in rank_series.steps.table.phases) for rank_series in series]
    )
    longest = np.nanmax(whole[:, list(by_step)], axis=0)
    np.testing.assert_allclose(steps["device_slowest_ns"][::4], longest, rtol=1e-6)
    assert steps["device_slowest_ns"][1:4] == [None, None, None]
    assert max(live.steps(bins=9)["device_slowest_ns"]) == max(steps["device_slowest_ns"][::4])
    if repeated is not None:
        assert repeated["device_mean_ns"]["forward"] == steps["device_mean_ns"]["forward"][::4]
    binned = live.steps(bins=9)
    for first, last, mean in zip(binned["first"], binned["last"], binned["device_mean_ns"]["forward"], strict=True):
        assert mean == pytest.approx(np.mean([by_step[step] for step in by_step if first <= step <= last]), rel=1e-6)


def test_a_job_without_device_times_keeps_and_tells_nothing_of_them() -> None:
    live = past_run(Cluster(ranks=3, steps=300).run())
    assert live.digests.bins(0, 299, 300).device.nbytes == 0
    assert live.steps()["device_mean_ns"] == {}
    digested = digest_step(live.planes, 7)
    assert digested is not None and digested[0].device.nbytes == 0


def test_a_step_that_a_rank_lacks_makes_no_block() -> None:
    live = past_run(Cluster(ranks=3, steps=50, missing={1: [20]}).run())
    assert digest_block(live.planes, np.arange(20, dtype=np.int64)) is not None
    assert digest_block(live.planes, np.arange(21, dtype=np.int64)) is None
    assert digest_block(live.planes, np.arange(60, dtype=np.int64)) is None
    assert live.digests.count == 50


@pytest.mark.parametrize("missing", [{}, {1: [203, 204]}], ids=["all there", "some lost"])
def test_a_stretch_of_the_past_is_as_fine_as_its_steps(missing: dict[int, list[int]]) -> None:
    """The log has folded them; the window has not."""
    run = Cluster(ranks=3, steps=2000, missing=missing).run()
    live = past_run(run, log_room=128)
    assert live.digests.coarsest(200, 299) > 16
    found = live.steps(200, 299, bins=100)
    assert found["first"] == found["last"] == list(range(200, 300))
    assert found["ranks"] == [2 if step in missing.get(1, ()) else 3 for step in range(200, 300)]
    steps = run.ranks[2].steps
    walls = dict(zip(steps["step"].tolist(), steps["wall_ns"].tolist(), strict=True))
    assert all(
        abs(next(row["wall"] for row in worst if row["rank"] == 2) / walls[step] - 1) < 1e-6
        for step, worst in zip(found["first"], found["worst"], strict=True)
    )
    coarse = live.steps(0, 1999, bins=50)
    assert (coarse["first"][0], coarse["last"][-1], sum(coarse["steps"])) == (0, 1999, 2000)
    assert len(coarse["first"]) <= 50


def test_too_much_to_digest_anew_stays_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "UNFOLDED_CELLS", 299)
    live = past_run(Cluster(ranks=3, steps=2000).run(), log_room=128)
    assert live.steps(200, 299, bins=100)["steps"][0] > 1
    assert live.steps(200, 298, bins=100)["steps"] == [1] * 99


def test_sums_of_rows_follow_every_change() -> None:
    """Sums of blocks of rows are kept between calls; steps, their waits and new ranks must show at once."""
    random = np.random.default_rng(3)
    planes = Planes(most_steps=64)
    planes.add_columns(3)
    for step in range(200):
        planes.advance(step)
        ranks = np.arange(planes.columns)
        wall, late = random.integers(1, 100, len(ranks)), max(0, step - 40)
        values = {"wall_ns": wall, "phase:backward": wall}
        planes.take(Rows(ring=ranks, step=np.full(len(ranks), step), values=values), ranks)
        waits = Rows(ring=ranks[:1], step=np.array([late]), values={"ddp_exposed_ns": np.array([1.0], np.float32)})
        planes.take_waits(waits, ranks[:1])
        if step == 120:
            planes.add_columns(70)
        rows = planes.row_of(planes.complete())
        count, totals = planes.sums(rows, ["wall_ns", "phase:comm", "phase:eval"])
        n = planes.columns
        np.testing.assert_array_equal(count, planes.have[rows, :n].sum(axis=0))
        for name in ("wall_ns", "phase:comm"):
            np.testing.assert_array_equal(totals[name], planes.arrays[name][rows, :n].sum(axis=0, dtype=np.float64))
        assert not totals["phase:eval"].any()


# -- The log of digests against one that is a plain list of bins, folded pair by pair ---------------------------------


def test_the_log_folds_its_past_and_loses_no_step_and_no_extreme() -> None:
    random = np.random.default_rng(0)
    log = DigestLog(room=64)
    most, mean = np.zeros(1000, np.float32), np.zeros(1000)
    for step in range(1000):
        values = np.sort(random.random(8)).astype(np.float32)
        digest = one_digest(step, values)
        most[step], mean[step] = values[-1], values.mean()
        log.put(digest.bins())
    n = log.count
    assert n <= 64
    bins = log.bins(0, 999, 64)
    assert len(bins) == n
    assert bins.first[0] == 0
    assert bins.last[-1] == log.last_step == 999
    assert (bins.first[1:] == bins.last[:-1] + 1).all()
    assert bins.steps.sum() == 1000
    assert (bins.steps[-32:] == 1).all()
    assert bins.steps.max() <= 4 * 1000 / 32  # the past is coarse, but evenly so
    for at in range(n):
        assert bins.quantiles[at, 0, -1] == most[bins.first[at] : bins.last[at] + 1].max()
        assert bins.values[at, 0, 1] == bins.quantiles[at, 1, -1]
        assert abs(bins.mean[at, 0] - mean[bins.first[at] : bins.last[at] + 1].mean()) < 1e-5
    folded = log.bins(0, 999, 5)
    assert len(folded) <= 5
    assert folded.steps.sum() == 1000


def test_a_log_with_several_steps_per_bin_merges_steps_that_come_together() -> None:
    random = np.random.default_rng(0)
    values = np.sort(random.random((10, 8)).astype(np.float32), axis=1)
    plain, log = DigestLog(room=64), DigestLog(room=64, steps_per_bin=4)
    for step, own in enumerate(values):
        plain.put(one_digest(step, own).bins())
    log.extend(plain.bins(0, 9, 64))
    log.put(one_digest(10, values[0]).bins())
    bins = log.bins(0, 10, 64)
    assert bins.first.tolist() == [0, 4, 8, 9, 10]
    assert bins.last.tolist() == [3, 7, 8, 9, 10]
    assert bins.steps.tolist() == [4, 4, 1, 1, 1]
    assert bins.quantiles[:3, 0, -1].tolist() == [values[:4].max(), values[4:8].max(), values[8].max()]
    assert bins.quantiles[0, 0, 0] == values[:4].min()
    assert np.allclose(bins.mean[:2, 0], [values[:4].mean(), values[4:8].mean()])
    assert bins.values[0, 0, 1] == values[:4].max()


def test_a_log_that_forgets_has_the_last_steps_one_by_one() -> None:
    random = np.random.default_rng(0)
    whole, log = DigestLog(room=512), DigestLog(room=64, forgets=True)
    for first in range(0, 300, 25):
        for step in range(first, first + 25):
            whole.put(one_digest(step, np.sort(random.random(8).astype(np.float32))).bins())
        log.extend(whole.bins(first, first + 24, 64))
        newest = first + 24
        own, expected = (each.bins(max(0, newest - 31), newest, 64) for each in (log, whole))
        for column in fields(own):
            assert np.array_equal(getattr(own, column.name), getattr(expected, column.name), equal_nan=True)
    assert log.count <= 64


def one_digest(step: int, values: NDArray[np.float32]) -> StepDigest:
    quantiles = np.zeros((METRICS, 8), np.float32)
    quantiles[:2] = values
    worst = np.zeros((1, METRICS), np.float32)
    worst[0, 1] = values[-1]
    mean = np.full(METRICS, values.mean(), np.float32)
    return StepDigest(step=step, ranks=8, quantiles=quantiles, mean=mean, worst=np.array([3]), values=worst)


@dataclass(frozen=True, kw_only=True)
class Bin:
    first: int
    last: int
    steps: int
    ranks: int
    quantiles: NDArray[np.float32]
    mean: NDArray[np.float32]
    worst: list[tuple[int, int, NDArray[np.float32]]]
    """Column, step and values."""
    memory: NDArray[np.float32]
    device: NDArray[np.float32]
    start_wall_ns: int


class ListLog:
    """What a log is to do, as its words say."""

    def __init__(self, room: int) -> None:
        self.room, self.bins = room, list[Bin]()

    def put(self, digest: StepDigest, start_wall_ns: int) -> None:
        inside = [one for one in self.bins if one.first <= digest.step <= one.last]
        if any(one.first != one.last for one in inside):
            return
        if not inside and len(self.bins) == self.room:
            fold(self.bins, self.room // 2, self.room // 8)
            if any(one.first <= digest.step <= one.last for one in self.bins):
                return
        worst = [(int(c), digest.step, v) for c, v in zip(digest.worst, digest.values, strict=True)]
        one = Bin(
            first=digest.step,
            last=digest.step,
            steps=1,
            ranks=digest.ranks,
            quantiles=digest.quantiles,
            mean=digest.mean,
            worst=worst,
            memory=digest.memory,
            device=digest.device,
            start_wall_ns=start_wall_ns,
        )
        others = [kept for kept in self.bins if kept.first != digest.step]
        self.bins = sorted([*others, one], key=lambda kept: kept.first)


def fold(bins: list[Bin], among: int, least: int) -> None:
    """Join pairs among the first, the shortest first, until so many are freed."""
    freed, longest = 0, 2
    while freed < least:
        upto = among - freed
        joined = pairs(bins, upto, longest)
        freed += joined
        longest *= 1 if joined else 2


def pairs(bins: list[Bin], upto: int, longest: int) -> int:
    made = []
    for at in range(0, upto - 1, 2):
        pair = bins[at : at + 2]
        made += [joined(*pair)] if pair[0].steps + pair[1].steps <= longest else pair
    freed = upto - upto % 2 - len(made)
    bins[: upto - upto % 2] = made
    return freed


def joined(one: Bin, other: Bin) -> Bin:
    weight = one.steps / (one.steps + other.steps)

    def between(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
        exact: NDArray[np.float32] = (mine * np.float64(weight) + theirs * np.float64(1 - weight)).astype(np.float32)
        return exact

    quantiles = between(one.quantiles, other.quantiles)
    quantiles[:, 0] = np.minimum(one.quantiles[:, 0], other.quantiles[:, 0])
    quantiles[:, -1] = np.maximum(one.quantiles[:, -1], other.quantiles[:, -1])
    return replace(
        one,
        last=other.last,
        steps=one.steps + other.steps,
        ranks=max(one.ranks, other.ranks),
        quantiles=quantiles,
        mean=between(one.mean, other.mean),
        worst=sorted([*one.worst, *other.worst], key=lambda entry: -entry[2][1])[:WORST],
        memory=np.fmax(one.memory, other.memory),
        device=joined_device(one.device, other.device),
    )


def joined_device(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean over the steps that were timed, of which there may be none; and the longest of them."""
    timed = one[0] + other[0]
    share = one[0] / max(timed, np.float32(1))
    return np.array([timed, max(one[1], other[1]), *(one[2:] * share + other[2:] * (1 - share))], np.float32)


def same(found: Bins, expected: list[Bin]) -> None:
    """To the last bit."""
    assert len(found) == len(expected)
    for at, one in enumerate(expected):
        for name in ("first", "last", "steps", "ranks", "quantiles", "mean", "memory", "device", "start_wall_ns"):
            np.testing.assert_array_equal(getattr(found, name)[at], getattr(one, name), name)
        k = len(one.worst)
        assert (found.worst[at, k:] == -1).all()
        assert list(zip(found.worst[at, :k], found.worst_step[at, :k], strict=True)) == [w[:2] for w in one.worst]
        for place, (_, _, values) in enumerate(one.worst):
            np.testing.assert_array_equal(found.values[at, place], values)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 5, 20])
def test_the_log_is_the_plain_list_whatever_the_order(ranks: int) -> None:
    """Steps come late, come again, and bring new phases and device times once the log has folded: none is mixed up."""
    random = np.random.default_rng(ranks)
    log, plain = DigestLog(room=32), ListLog(32)
    late: list[int] = []
    for newest in range(0, 400, 2):
        late.append(newest)
        number = late.pop(int(random.integers(len(late)))) if random.random() < 0.7 or len(late) > 5 else newest
        if random.random() < 0.1:
            number = max(0, number - int(random.integers(9)))
        digest = random_digest(random, number, ranks, metrics=4 if number < 250 else 6)
        log.put(digest.bins(1000 + number))
        plain.put(padded(digest, 6), 1000 + number)
        assert log.last_step == plain.bins[-1].last
    same(log.bins(0, 400, 32), plain.bins)
    chosen = [one for one in plain.bins if one.last >= 50 and one.first <= 390]
    longest = 2
    while len(chosen) > 7:
        longest *= 1 if pairs(chosen, len(chosen), longest) else 2
    same(log.bins(50, 390, 7), chosen)
    while len(chosen) > 1:
        longest *= 1 if pairs(chosen, len(chosen), longest) else 2
    at_once = log.bins(50, 390, 1)  # merged in one go: sums in another order, so the last bits may differ
    for name in ("first", "last", "steps", "ranks", "quantiles", "mean", "memory", "device", "start_wall_ns"):
        np.testing.assert_allclose(getattr(at_once, name)[0], getattr(chosen[0], name), rtol=1e-5, err_msg=name)
    assert at_once.worst[0].tolist()[: len(chosen[0].worst)] == [column for column, _, _ in chosen[0].worst]
    assert log.bins(0, 400, 5, metrics=9).metrics == 9


def padded(digest: StepDigest, metrics: int) -> StepDigest:
    """With nothing in the phases that it does not know."""
    more = 0, metrics - len(digest.mean)
    return replace(
        digest,
        quantiles=np.pad(digest.quantiles, (more, (0, 0))),
        mean=np.pad(digest.mean, more),
        values=np.pad(digest.values, ((0, 0), more)),
        device=np.pad(digest.device, (0, metrics - 1 - len(digest.device))),
    )


def random_digest(random: np.random.Generator, step: int, ranks: int, metrics: int) -> StepDigest:
    values = random.integers(0, 50, (ranks, metrics)).astype(np.float32) / 3
    worst = np.lexsort((np.arange(ranks), -values[:, 1]))[:WORST]
    return StepDigest(
        step=step,
        ranks=ranks,
        quantiles=np.quantile(values, QUANTILES, axis=0).T.astype(np.float32),
        mean=values.mean(axis=0),
        worst=worst,
        values=values[worst],
        memory=np.where(random.random(4) < 0.3, np.nan, random.random(4)).astype(np.float32),
        device=random_device(random, 0 if step < 150 else metrics - 1),
    )


def random_device(random: np.random.Generator, width: int) -> NDArray[np.float32]:
    """Every other step or so was timed."""
    if not width or random.random() < 0.5:
        return np.zeros(width, np.float32)
    return np.array([1, *random.integers(0, 50, width - 1) / 3], np.float32)
