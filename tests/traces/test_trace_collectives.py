"""Collectives compared over ranks, against waits that are known, and against the simplest rule written out."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_ranks import SlimRank, slim_rank

from stepscope.traces.across_ranks.arrivals import CollectivesAnalysis, match
from stepscope.traces.job import distributed_table
from stepscope.traces.reading.files import read_trace

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
GATHER = "ncclDevKernel_AllGather_RING_LL()"


def analyzed(made: Sequence[MadeTrace], **more: Any) -> list[SlimRank]:
    return [slim_rank(each.trace(), rank, **more) for rank, each in enumerate(made)]


def described(name: str, ranks: Sequence[int], **more: Any) -> dict[str, Any]:
    members = str(list(ranks))
    return {
        "Collective name": "allreduce",
        "Process Group Name": name,
        "Process Group Ranks": members,
        "Group size": len(ranks),
        **more,
    }


def job(arrivals: Sequence[Sequence[int]], transfers: Sequence[int], later: Sequence[int] | None = None) -> list[Any]:
    """``arrivals``: by rank and collective, µs after the one before was done; ``later``: by how much clocks are."""
    made = [MadeTrace(rank=rank, world_size=len(arrivals)) for rank in range(len(arrivals))]
    now = 100
    for at, transfer in enumerate(transfers):
        begin = [now + own[at] for own in arrivals]
        now = max(begin) + transfer
        for rank, each in enumerate(made):
            offset = later[rank] if later else 0
            each.kernel(REDUCE, begin[rank] + offset, now - begin[rank], stream=20)
    return analyzed(made)


clusters = st.integers(2, 5).flatmap(
    lambda ranks: st.integers(1, 6).flatmap(
        lambda count: st.tuples(
            st.lists(st.lists(st.integers(0, 50), min_size=count, max_size=count), min_size=ranks, max_size=ranks),
            st.lists(st.integers(1, 30), min_size=count, max_size=count),
            st.lists(st.sampled_from([0, 5000, -7000, 1_000_000]), min_size=ranks, max_size=ranks),
        )
    )
)


@settings(max_examples=examples(100), deadline=None)
@given(clusters)
def test_known_arrivals_give_exact_waits_on_any_clocks(cluster: Any) -> None:
    arrivals, transfers, later = cluster
    found = match(job(arrivals, transfers, later))
    ranks = range(len(arrivals))
    columns = list(zip(*arrivals, strict=True))
    assert found.count == len(transfers)
    assert found.transfer_ns == found.least_ns == 1000 * sum(transfers)
    for rank in ranks:
        assert found.wait_ns[rank] == 1000 * sum(max(column) - column[rank] for column in columns)
        assert found.own_transfer_ns[rank] == 1000 * sum(transfers)
        assert found.last_counts[rank] == sum(column.index(max(column)) == rank for column in columns)
        cost = sum(max(column) - min(column) for column in columns if column.index(max(column)) == rank)
        assert found.cost_by_rank_ns[rank] == 1000 * cost
        alone = sum(max(column) - sorted(column)[-2] for column in columns if column.index(max(column)) == rank)
        assert found.alone_by_rank_ns[rank] == 1000 * alone
    assert found.cost_ns == sum(found.cost_by_rank_ns.values())
    assert found.notices == ()
    consistent(found)


def consistent(found: CollectivesAnalysis) -> None:
    """What must hold whatever is in the traces."""
    split, pairs = found.split, found.pairs
    dur_ns = pairs.end_ns - pairs.start_ns
    assert ((split.wait_ns >= 0) & (split.own_transfer_ns >= 0)).all()
    assert (split.wait_ns + split.own_transfer_ns == dur_ns).all()
    assert (split.transfer_ns >= 0).all()
    assert (split.alone_ns >= 0).all()
    assert sum(found.last_counts.values()) == found.count == int(split.counts.sum())
    kinds, ranks = found.tables["collectives"].to_rows(), found.tables["stragglers"].to_rows()
    assert sum(row["count"] for row in kinds) == found.count
    assert sum(row["wait_ns"] for row in kinds) == sum(found.wait_ns.values())
    assert sum(row["transfer_ns"] for row in kinds) == found.transfer_ns
    assert sum(row["least_ns"] for row in kinds) == found.least_ns
    assert all(row["total_ns"] >= row["wait_ns"] for row in kinds)
    assert {row["rank"]: row["wait_ns"] for row in ranks} == (found.wait_ns if found.pairs.first.size else {})
    listed = found.tables["collective_list"]
    assert len(listed.rows) + listed.left_out == found.count


anything = st.lists(
    st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 40), st.sampled_from([REDUCE, GATHER]), st.sampled_from("aab")),
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(100), deadline=None)
@given(anything)
def test_anything_against_the_rule_written_out(ranks: Any) -> None:
    """On one host, where no clock is touched; what is counted is the n-th of a group and an operation."""
    made, lists = [], []
    for rank, events in enumerate(ranks):
        each = MadeTrace(header={"distributedInfo": {"rank": rank, "world_size": 4}, "hostname": "one"})
        own: dict[Any, list[Any]] = {}
        for start, dur, kind, group in sorted(events, key=lambda event: (event[0], -event[1])):
            more = described(group, (0, 1, 2, 3))
            more["Collective name"] = "allreduce" if kind == REDUCE else "allgather"
            each.kernel(kind, start, dur, stream=20, **more)
            own.setdefault((kind, group), []).append((start, start + dur))
        made.append(each)
        lists.append(own)
    found = match(analyzed(made))
    consistent(found)
    waits, transfer, count = Counter[int](), 0, 0
    for key in {key for own in lists for key in own}:
        lengths = {len(own[key]) for own in lists if key in own}
        if len(lengths) > 1:
            return  # how uneven lists are laid beside each other has a test of its own
        for at in range(lengths.pop()):
            parts = {rank: own[key][at] for rank, own in enumerate(lists) if key in own}
            last, end = max(start for start, _ in parts.values()), max(end for _, end in parts.values())
            if len(parts) < 2 or any(end + 20 < last for _, end in parts.values()):
                continue
            count += 1
            transfer += end - last
            for rank, (start, done) in parts.items():
                waits[rank] += min(last, done) - start
    assert (found.count, found.transfer_ns) == (count, 1000 * transfer)
    assert found.wait_ns == {rank: 1000 * waits[rank] for rank in range(len(ranks))}


def test_the_eight_ranks_of_param(shared_data: Path) -> None:
    """Transfer is 225 µs in all and rank 7 the cause; recomputed from the JSON."""
    paths = sorted((shared_data / "traces" / "param_dlrm_8rank").iterdir())
    analyses, events = [], []
    for rank, path in enumerate(paths):
        analyses.append(slim_rank(read_trace(path), rank))
        with gzip.open(path) as file:
            own = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"]]
        events.append(sorted((event["ts"], event["ts"] + event["dur"]) for event in own))
    found = match(analyses)
    assert found.transfer_ns == 225_000
    assert found.least_ns == 217_000
    assert found.last_counts == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 0, 7: 5}
    columns = list(zip(*events, strict=True))
    waits = [sum(max(s for s, _ in column) - column[rank][0] for column in columns) for rank in range(8)]
    assert found.wait_ns == {rank: wait * 1000 for rank, wait in enumerate(waits)}
    assert found.transfer_ns == 1000 * sum(max(e for _, e in c) - max(s for s, _ in c) for c in columns)
    assert found.notices == ()
    assert found.clocks.shifts == dict.fromkeys(range(8), 0)
    kinds = {row["op"]: row for row in found.tables["collectives"].to_rows()}
    assert kinds["all_reduce"]["bytes"] == 2_485_252
    assert kinds["all_reduce"]["bus_gbps"] == pytest.approx(2_485_252 / 179_000 * 2 * 7 / 8)
    consistent(found)
    table = distributed_table(analyses, found)
    for row, analysis in zip(table.to_rows(), analyses, strict=True):
        temporal = analysis.temporal
        assert row["overlap_share"] == temporal.overlap_ns / temporal.comm_ns
        assert row["exposed_comm_ns"] == temporal.exposed_comm_ns
        assert row["wait_ns"] + row["transfer_ns"] == temporal.comm_ns  # one stream, one at a time


def test_groups_of_the_same_name_are_told_apart_by_their_ranks() -> None:
    made = [MadeTrace(rank=rank, world_size=4) for rank in range(4)]
    for rank, (start, members) in enumerate([(0, (0, 1)), (10, (0, 1)), (500, (2, 3)), (530, (2, 3))]):
        made[rank].kernel(REDUCE, start, {0: 20, 10: 10, 500: 40, 530: 10}[start], **described("tp", members))
    found = match(analyzed(made))
    assert found.count == 2
    assert found.wait_ns == {0: 10_000, 1: 0, 2: 30_000, 3: 0}
    assert found.clocks.unaligned == (2, 3)
    assert any("cannot be aligned" in notice for notice in found.notices)


def test_a_rank_that_is_missing_is_said() -> None:
    made = [MadeTrace(rank=rank, world_size=3) for rank in range(2)]
    for rank in range(2):
        made[rank].kernel(REDUCE, 10 * rank, 30 - 10 * rank, **described("0", (0, 1, 2)))
    found = match(analyzed(made))
    assert (found.count, found.wait_ns) == (1, {0: 10_000, 1: 0})
    assert any("traces are missing or do not contain them: 1 collective;" in notice for notice in found.notices)


def test_sequence_numbers_decide_where_they_are_told() -> None:
    """Rank 1's trace begins two collectives later, and nothing but the numbers says so."""
    made = [MadeTrace(rank=rank, world_size=2) for rank in range(2)]
    for number in range(5):
        for rank in range(2):
            if rank == 0 or number >= 2:
                late = 3 if rank == 1 else 0
                args = described("0", (0, 1), Seq=number)
                made[rank].kernel(REDUCE, 100 * number + late, 10 - late, **args)
    found = match(analyzed(made))
    assert (found.count, found.wait_ns, found.last_counts) == (3, {0: 9000, 1: 0}, {0: 0, 1: 3})
    assert found.tables["collective_list"].to_rows()[0]["sequence"] == 2
    assert any("and not compared: 2 collectives (most of them, 2, on rank 0)" in notice for notice in found.notices)


@pytest.mark.parametrize("missing", ["first", "last"])
def test_uneven_lists_are_laid_where_they_fit(missing: str) -> None:
    starts = [0, 130, 210, 380, 420, 590]
    present = starts[2:] if missing == "first" else starts[:-2]
    made = [MadeTrace(rank=rank, world_size=2) for rank in range(2)]
    for start in starts:
        made[0].kernel(REDUCE, start, 10)
    for start in present:
        made[1].kernel(REDUCE, 70_000 + start + 4, 6)
    found = match(analyzed(made))
    assert (found.count, found.wait_ns) == (4, {0: 16_000, 1: 0})
    assert found.clocks.clocks[1].offset_ns == 70_000_000


def test_steps_are_matched_by_their_number() -> None:
    """Rank 0 was traced in steps 3 to 5, rank 1 in 4 to 6; the last of each is left out."""
    made = [MadeTrace(rank=rank, world_size=2) for rank in range(2)]
    for rank in range(2):
        for number in range(3 + rank, 6 + rank):
            made[rank].step(number, 1000 * number, 1000)
            made[rank].kernel(REDUCE, 1000 * number + 100 + 7 * rank, 20 - 7 * rank)
    found = match(analyzed(made))
    assert (found.count, found.wait_ns) == (1, {0: 7000, 1: 0})
    assert found.tables["collective_list"].to_rows()[0]["step"] == 4
    both = match(analyzed(made, keep_last=True))
    assert (both.count, both.wait_ns) == (2, {0: 14_000, 1: 0})


def test_what_does_not_belong_together_is_left_out() -> None:
    made = [MadeTrace(header={"distributedInfo": {"rank": rank, "world_size": 2}, "hostname": "a"}) for rank in (0, 1)]
    for rank in range(2):
        made[rank].kernel(REDUCE, 500 * rank, 10)
        made[rank].kernel(GATHER, 1000, 10)
    found = match(analyzed(made))
    assert (found.count, found.transfer_ns) == (1, 10_000)
    assert any("do not belong together" in notice for notice in found.notices)
    consistent(found)


def test_two_threads_may_take_up_two_collectives_in_either_order() -> None:
    made = [MadeTrace(header={"distributedInfo": {"rank": rank, "world_size": 2}, "hostname": "a"}) for rank in (0, 1)]
    small, large = {"Input Dims": [[10]], "Input type": ["float"]}, {"Input Dims": [[99]], "Input type": ["float"]}
    for rank, order in enumerate([(small, large), (large, small)]):
        for place, shape in enumerate(order):
            made[rank].annotation("gloo:all_reduce", 10 * place, 100 if shape is small else 50, tid=20 + place)
            made[rank].events[-1]["args"] = shape
    found = match(analyzed(made))
    assert {row["bytes"]: row["wait_ns"] for row in found.tables["collective_list"].to_rows()} == {
        40: 10_000,
        396: 10_000,
    }


def test_waits_at_the_same_time_cost_once() -> None:
    made = [MadeTrace(rank=rank, world_size=2) for rank in range(2)]
    for rank in range(2):
        for stream in (20, 21):
            made[rank].kernel(REDUCE, 100 * rank, 110 - 100 * rank, stream=stream, **described(str(stream), (0, 1)))
    found = match(analyzed(made))
    assert found.wait_ns == {0: 200_000, 1: 0}
    assert (found.cost_ns, found.cost_by_rank_ns, found.alone_by_rank_ns) == (
        100_000,
        {0: 0, 1: 100_000},
        {0: 0, 1: 100_000},
    )


def test_sends_and_receives_are_not_compared() -> None:
    made = [MadeTrace(rank=rank, world_size=2) for rank in range(2)]
    for rank in range(2):
        made[rank].annotation("gloo:send" if rank else "gloo:recv", 0, 10)
    found = match(analyzed(made))
    assert found.count == 0
    assert found.notices == ("2 sends and receives are not compared: traces do not say between which ranks",)
    consistent(found)


def test_nothing_to_compare() -> None:
    for analyses in ([], analyzed([MadeTrace()]), analyzed([MadeTrace(), MadeTrace()])):
        found = match(analyses)
        assert (found.count, found.transfer_ns, found.cost_ns, found.notices) == (0, 0, 0, ()) or len(analyses) > 1
        assert distributed_table(analyses, found).columns[0] == "rank"
        consistent(found)


def test_steps_side_by_side() -> None:
    made = MadeTrace(rank=0)
    for number, (start, dur) in enumerate([(0, 100), (100, 140), (240, 120), (360, 50)]):
        made.step(number, start, dur)
    (row,) = distributed_table(analyses := analyzed([made]), match(analyses)).to_rows()
    assert (row["steps"], row["step_mean_ns"], row["step_median_ns"]) == (3, 120_000, 120_000)
    assert (row["step_std_ns"], row["step_min_ns"], row["step_max_ns"]) == (16_330, 100_000, 140_000)
    assert row["measured"] == "host"
