"""What the ranks exchange, as tables: sums by group and operation, who waited for whom, DDP's own exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, Death, slow_at
from fakes.records import edited
from fakes.traffic import Exchange, Traffic
from numpy.typing import NDArray

from stepscope.diagnosis import build_window
from stepscope.diagnosis.engine.communication import Communication, bus_factor
from stepscope.diagnosis.engine.view import view_of
from stepscope.records.collectives import COLLECTIVE_ROW, FLAG_ASYNC, FLAG_MISSED, FLAG_WAITED, OPS, ProcessGroup
from stepscope.records.series import RankSeries, RunData

MS = 1_000_000
MIB = 1 << 20
MESH = Traffic(
    mesh={"dp": 2, "tp": 2},
    exchanges=(
        Exchange(dimension="tp", count=3, mb=8.0, ms=1.0),
        Exchange(dimension="dp", op="reduce_scatter", mb=16.0, ms=2.0),
    ),
    noise=0.0,
)
EVEN = Cluster(ranks=4, steps=60, noise=0.0, traffic=replace(MESH, work_ms=0.0))


def seen(run: RunData, **window: Any) -> Communication:
    found = build_window(run, **window).communication
    assert found is not None
    return found


def test_flows_are_summed_by_group_and_operation() -> None:
    found = seen(EVEN.run())
    assert [(group.name, group.kind, group.ranks, group.size) for group in found.groups] == [
        ("0", "world", (0, 1, 2, 3), 4),
        ("dp0", "data", (0, 2), 2),
        ("tp0", "tensor", (0, 1), 2),
        ("dp1", "data", (1, 3), 2),
        ("tp2", "tensor", (2, 3), 2),
    ]
    assert [(flow.group.name, flow.op, flow.count, flow.bytes / MIB, flow.exposed_ns / MS) for flow in found.flows] == [
        ("dp0", "reduce_scatter", 1.0, 16.0, 2.0),
        ("tp0", "all_reduce", 3.0, 24.0, 3.0),
        ("dp1", "reduce_scatter", 1.0, 16.0, 2.0),
        ("tp2", "all_reduce", 3.0, 24.0, 3.0),
    ]
    assert all(flow.overlapped_ns == 0 for flow in found.flows)
    assert found.siblings == [[1, 3], [2, 4]]


def test_the_first_collective_waits_for_a_late_rank_and_only_the_others_do() -> None:
    found = seen(replace(EVEN, faults=(slow_at(3, "forward", 5.0),)).run())
    arrivals = found.arrivals
    steps = len(np.unique(arrivals.place))
    assert steps == 33  # 1 to 31, 32 and 48
    assert len(arrivals.group) == steps * 2 * 4
    assert np.allclose(np.unique(arrivals.transfer_ns), [MS, 2 * MS], atol=1000)
    members = {
        (found.groups[group].name, row): (waited / steps / MS, int(last), late / MS)
        for group, row, waited, last, late in zip(
            arrivals.member_group,
            arrivals.member_row,
            arrivals.waited_ns,
            arrivals.last,
            arrivals.late_ns,
            strict=True,
        )
    }
    # Rank 2 waits in their first all-reduce, ranks 0 and 1 in the exchange with ranks that were held up by it.
    assert members["tp2", 2] == pytest.approx((5.0, 0, 0.0), abs=0.001)
    assert members["tp2", 3] == pytest.approx((0.0, steps, 5.0 * steps), abs=0.1)
    assert members["tp0", 0] == members["tp0", 1] == pytest.approx((0.0, 0, 0.0), abs=0.001)
    assert members["dp0", 0] == pytest.approx((5.0, 0, 0.0), abs=0.001)
    assert members["dp1", 3] == pytest.approx((0.0, steps, 5.0 * steps), abs=0.1)
    least = {flow.group.name: float(np.nanmedian(flow.least_ns)) for flow in found.flows}
    assert least == pytest.approx({"dp0": 2 * MS, "tp0": 3 * MS, "dp1": 2 * MS, "tp2": 3 * MS}, rel=1e-4)


def shifted(series: RankSeries, by_ns: int) -> RankSeries:
    rows = None if series.collectives is None else series.collectives.copy()
    for name in ("start_ns", "end_ns") if rows is not None else ():
        rows[name] += np.uint64(by_ns)
    return replace(series, collectives=rows)


def test_clocks_are_never_compared() -> None:
    run = replace(EVEN, traffic=MESH).run()
    moved = replace(run, ranks=tuple(shifted(series, 10**12 * series.rank) for series in run.ranks))
    first, other = seen(run).arrivals, seen(moved).arrivals
    for name in vars(first):
        assert np.array_equal(getattr(first, name), getattr(other, name)), name


def test_what_runs_beside_the_computation_is_as_long_as_what_shows_of_it() -> None:
    exchange = Exchange(dimension="dp", op="all_gather", ms=10.0, hidden_ms=7.0)
    mesh = Traffic(mesh={"dp": 2}, exchanges=(exchange,), noise=0.0, work_ms=0.0)
    found = seen(Cluster(ranks=2, steps=40, noise=0.0, traffic=mesh).run())
    (flow,) = found.flows
    assert flow.flags == FLAG_ASYNC | FLAG_WAITED
    assert (flow.exposed_ns / MS, flow.overlapped_ns / MS) == pytest.approx((3.0, 7.0), abs=0.001)
    assert found.arrivals.transfer_ns == pytest.approx(np.full(len(found.arrivals.group), 3.0 * MS), abs=1000)


def rows(*entries: tuple[int, str, int, int]) -> np.ndarray[Any, Any]:
    """step, operation, number and milliseconds."""
    made = np.zeros(len(entries), np.dtype(COLLECTIVE_ROW))
    for row, (step, op, nth, ms) in zip(made, entries, strict=True):
        row["step"], row["op"], row["nth"], row["flags"] = step, OPS.index(op), nth, FLAG_WAITED
        row["start_ns"], row["end_ns"] = 7 * MS, (7 + ms) * MS
    return made


def two_ranks(*collectives: np.ndarray[Any, Any], **group: Any) -> RunData:
    run = Cluster(ranks=2, steps=20, noise=0.0).run()
    world = ProcessGroup(slot=0, name="0", kind="world", backend="gloo", ranks=(0, 1), size=2)
    ranks = [
        replace(series, groups=(replace(world, **group),), comm=SUMS, collectives=own)
        for series, own in zip(run.ranks, collectives, strict=True)
    ]
    return replace(run, ranks=tuple(ranks))


SUMS = (
    Cluster(ranks=2, steps=20, traffic=Traffic(mesh={"dp": 2}, exchanges=(Exchange(dimension="dp"),)))
    .run()
    .ranks[0]
    .comm
)
assert SUMS is not None
SUMS["group"] = 0


def test_sends_between_do_not_shift_what_is_compared() -> None:
    first = rows((5, "send", 0, 9), (5, "all_reduce", 1, 3), (5, "recv", 2, 9), (5, "barrier", 3, 4))
    other = rows((5, "all_reduce", 0, 2), (5, "barrier", 1, 6))
    found = seen(two_ranks(first, other)).arrivals
    assert [OPS[op] for op in found.op] == ["all_reduce", "barrier"]
    assert (found.transfer_ns / MS).tolist() == [2.0, 4.0]
    assert (found.skew_ns / MS).tolist() == [1.0, 2.0]
    assert (found.waited_ns / MS).tolist() == [1.0, 2.0]
    assert found.last.tolist() == [1, 1]


@pytest.mark.parametrize(
    "other",
    [
        rows((5, "all_gather", 0, 2)),  # they do not do the same
        rows((6, "all_reduce", 0, 2)),  # nor in the same step
        rows((5, "broadcast", 0, 2)),
        rows(),
    ],
    ids=["operation", "step", "rooted", "none"],
)
def test_what_not_all_ranks_were_seen_in_is_not_compared(other: np.ndarray[Any, Any]) -> None:
    found = seen(two_ranks(rows((5, "all_reduce", 0, 3)), other)).arrivals
    assert len(found.group) == len(found.waited_ns) == 0


def test_without_knowing_who_belongs_to_a_group_nothing_is_compared() -> None:
    both = rows((5, "all_reduce", 0, 3)), rows((5, "all_reduce", 0, 2))
    assert len(seen(two_ranks(*both)).arrivals.group) == 1
    assert len(seen(two_ranks(*both, ranks=(0, 1, 2), size=3)).arrivals.group) == 0


def test_waits_that_do_not_block_the_host_say_nothing() -> None:
    run = two_ranks(rows((5, "all_reduce", 0, 3)), rows((5, "all_reduce", 0, 2)), backend="nccl")
    assert len(seen(run).arrivals.group) == 1
    on_device = tuple(replace(rank, identity=replace(rank.identity, device="cuda")) for rank in run.ranks)
    found = seen(replace(run, ranks=on_device))
    assert not found.groups[0].timed
    assert len(found.arrivals.group) == 0
    assert found.flows[0].count == 1.0


def test_a_slot_of_which_nobody_spoke_is_left_out() -> None:
    run = EVEN.run()
    ranks = tuple(replace(series, groups=series.groups[:2]) for series in run.ranks)
    found = seen(replace(run, ranks=ranks))
    assert {flow.group.kind for flow in found.flows} == {"data"}


def test_one_rank_or_nothing_seen_is_none() -> None:
    assert build_window(Cluster(ranks=1, steps=20).run()).communication is None
    assert build_window(Cluster(ranks=4, steps=20).run()).communication is None
    assert build_window(Cluster(ranks=0, steps=0).run()).communication is None


def test_only_the_window_counts_and_a_rank_that_died_is_there_while_it_lived() -> None:
    run = replace(EVEN, steps=100, deaths=(Death(rank=3, step=50),)).run()
    whole, last = seen(run), seen(run, last=20)
    assert len(whole.flows[0].least_ns) == 100
    assert len(last.flows[0].least_ns) == 20
    (left,) = [group for group in last.groups if group.name == "dp1"]
    assert not left.whole
    (tp2,) = [flow for flow in whole.flows if flow.group.name == "tp2"]
    assert not np.isnan(tp2.least_ns).any()


def test_ddp_is_known_by_its_own_figures() -> None:
    facts = {"ddp": {"gradient_mb": 48.0, "bucket_mb": 25.0}}
    found = seen(Cluster(ranks=2, steps=40, noise=0.0, comm_ms=6.0, ddp_hidden_ms=9.0, facts=facts).run())
    (reducer,) = found.reducers
    assert (reducer.buckets_bytes, reducer.bytes) == ((), 48 * MIB)
    assert reducer.exposed_ns[1:] == pytest.approx(np.full(39, 6.0 * MS))
    assert reducer.span_ns[1:] == pytest.approx(np.full(39, 15.0 * MS))
    assert reducer.compute_ns[1:] == pytest.approx(np.full(39, 20.0 * MS))
    assert found.flows == ()


def test_what_blocks_in_other_collectives_is_not_ddps() -> None:
    (reducer,) = seen(replace(EVEN, comm_ms=6.0, ddp_hidden_ms=9.0).run()).reducers
    assert reducer.exposed_ns[1:] == pytest.approx(np.full(59, 6.0 * MS), abs=5)
    assert (reducer.buckets_bytes, reducer.bytes) == ((), 0)


@pytest.mark.parametrize(
    ("ddp", "expected"),
    [
        ({"bucket_sizes_mb": [1.0, 24], "gradient_mb": 25, "buckets": 2}, (2, (MIB, 24 * MIB), 25 * MIB)),
        ({"bucket_sizes_mb": [1.0, 24], "gradient_mb": 99.0, "buckets": 40}, (40, (MIB, 24 * MIB), 99 * MIB)),
        ({"bucket_sizes_mb": [3]}, (1, (3 * MIB,), 3 * MIB)),
        ({"bucket_sizes_mb": [], "gradient_mb": 2, "buckets": 0}, (0, (), 2 * MIB)),
        ({"bucket_sizes_mb": ["1"], "buckets": 1}, (0, (), 0)),
        ({"bucket_sizes_mb": [float("inf")]}, (0, (), 0)),
        ({"gradient_mb": "x"}, (0, (), 0)),
        (7, (0, (), 0)),
    ],
)
def test_buckets_as_far_as_they_are_known(ddp: Any, expected: Any) -> None:
    (reducer,) = seen(Cluster(ranks=2, steps=20, ddp_hidden_ms=1.0, facts={"ddp": ddp}).run()).reducers
    assert (reducer.buckets, reducer.buckets_bytes, reducer.bytes) == expected


def test_figures_that_ddp_gives_now_and_then_are_not_taken_for_every_step() -> None:
    run = Cluster(ranks=2, steps=100, ddp_hidden_ms=1.0).run()

    def seldom(_: RankSeries, steps: NDArray[Any]) -> None:
        steps["ddp_comm_ns"][steps["step"] % 10 > 0] = 0

    assert build_window(edited(run, seldom)).communication is None


def test_of_a_large_job_fewer_steps_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.diagnosis.engine import communication

    run = EVEN.run()
    every = np.unique(seen(run).arrivals.place)
    monkeypatch.setattr(communication, "LOOKED_AT", 300)  # of 4 ranks with 34 steps of 4 each
    assert np.unique(seen(run).arrivals.place).tolist() == every[::2].tolist()


# -- NCCL: the times are the device's -------------------------------------------------------------------------------


def on_device(run: RunData, missed: dict[int, list[int]]) -> RunData:
    """Without the rows of some steps, by rank, and with a row that says so."""
    ranks = []
    for series in run.ranks:
        assert series.comm is not None and series.collectives is not None
        lost = missed.get(series.rank, [])
        marks = np.zeros(len(lost), series.comm.dtype)
        marks["step"], marks["group"], marks["flags"] = lost, 63, FLAG_MISSED
        comm = np.concatenate([series.comm[~np.isin(series.comm["step"], lost)], marks])
        calls = series.collectives[~np.isin(series.collectives["step"], lost)]
        ranks.append(replace(series, comm=comm[np.argsort(comm["step"], kind="stable")], collectives=calls))
    return replace(run, ranks=tuple(ranks))


def test_on_the_device_steps_that_were_overwritten_are_left_out_of_every_figure() -> None:
    nccl = replace(EVEN, device_timed=True, traffic=replace(MESH, work_ms=0.0, backend="nccl", device=True))
    job = replace(nccl, faults=(slow_at(3, "forward", 5.0),)).run()
    found = seen(on_device(job, {0: [4, 5, 40], 2: [5, 41]}))
    assert found.measured is not None
    assert np.flatnonzero(~found.measured.places).tolist() == [4, 5, 40, 41]
    assert (found.measured.missed, found.measured.last_unread) == (4, 0)
    assert all(group.device and group.timed for group in found.groups if group.name != "0")
    flows = {(flow.group.name, flow.op): flow for flow in found.flows}
    tp2 = flows["tp2", "all_reduce"]
    assert (tp2.count, tp2.bytes / MIB, tp2.exposed_ns) == (3.0, 24.0, 0.0)
    assert tp2.transfer_ns / MS == pytest.approx(3.0, abs=0.001)
    assert (tp2.waited_by_row / MS).tolist() == pytest.approx([5.0, 0.0], abs=0.01)
    assert np.flatnonzero(np.isnan(tp2.least_ns)).tolist() == [5, 41]
    window = build_window(on_device(job, {0: [4, 5, 40], 2: [5, 41]}))
    waited = view_of(window).waited_ns
    assert waited is not None
    at = {step: column for column, step in enumerate(view_of(window).steps.tolist())}
    assert (waited[:, at[10]] / MS).tolist() == pytest.approx([5.0, 5.0, 5.0, 0.0], abs=0.01)
    # Ranks 1 and 3 have all their groups in step 4, but of dp0 and tp0 rank 0 is missing.
    assert np.isnan(waited[:, at[4]]).tolist() == [True, True, True, False]
    assert np.isnan(waited[:, at[33]]).all()  # not kept one by one


def test_on_the_device_a_rank_that_was_never_read_spoils_its_groups_alone() -> None:
    nccl = replace(EVEN, device_timed=True, traffic=replace(MESH, work_ms=0.0, backend="nccl", device=True))
    job, host = nccl.run(), replace(nccl, traffic=replace(MESH, work_ms=0.0, backend="nccl")).run()
    found = seen(replace(job, ranks=(*job.ranks[:3], host.ranks[3])))
    assert found.measured is not None and not found.measured.places.any()
    flows = {flow.group.name: flow for flow in found.flows}
    assert [(name, flow.device, len(flow.rows)) for name, flow in flows.items()] == [
        ("dp0", True, 2),
        ("tp0", True, 2),
        ("dp1", True, 1),
        ("tp2", True, 1),
    ]
    assert np.isnan(flows["tp2"].least_ns).all() and flows["tp2"].transfer_ns == 0.0
    assert flows["tp0"].transfer_ns / MS == pytest.approx(3.0, abs=0.001)
    assert {found.groups[group].name for group in found.arrivals.group.tolist()} == {"dp0", "tp0"}


def test_the_bandwidth_of_the_bus_is_that_of_nccl_tests() -> None:
    assert [bus_factor(op, 4) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")] == [
        1.5, 0.75, 0.75, 0.75, 1.0,
    ]  # fmt: skip
    assert bus_factor("all_reduce", 1) == bus_factor("barrier", 4) == bus_factor("unknown", 4) == 0.0
