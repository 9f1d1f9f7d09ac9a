"""The path over ranks, by hand and on real jobs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import TraceError
from stepscope.traces.across_ranks.arrivals import match
from stepscope.traces.across_ranks.job_path import JobPath, job_path
from stepscope.traces.across_ranks.replay import like_peers
from stepscope.traces.path.whatif import parse_change
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
DLRM = sorted((SHARED / "param_dlrm_8rank").glob("*.json.gz"))
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def rank_of(rank: int, ranks: int, works: list[int], *, begin: int = 0, after: int = 100) -> RankAnalysis:
    """Steps of: an operator that takes its time, an all-reduce that all leave together, and what comes after.

    ``works``: by rank, how long the operator takes.
    """
    made = MadeTrace(rank=rank, world_size=ranks)
    start = begin
    for number in range(3):
        arrive = start + works[rank] + 10
        done = max(begin + (start - begin) + work for work in works) + 10 + 50
        made.step(number, start, done + after - start)
        made.op("aten::mm", start + 5, works[rank] - 5)
        made.launched(NCCL, at=arrive - 5, call=2, start=arrive, dur=done - arrive, stream=20)
        made.runtime("cudaStreamSynchronize", arrive + 1, done - arrive)
        start = done + after
    return analyze_rank(made.trace(), rank)


def checked(analyses: list[RankAnalysis]) -> JobPath:
    path = job_path(analyses, match(analyses))
    by_rank = {analysis.rank: {step.number: step for step in analysis.steps} for analysis in analyses}
    for step in path.steps:
        own = by_rank[step.rank][step.number]
        assert step.length_ns == own.end_ns - own.start_ns
        assert sum(step.by_rank.values()) == sum(step.by_cause.values()) == step.length_ns
        assert sum(each.time_ns for each in step.stretches) == step.length_ns
        assert all(each.time_ns > 0 for each in step.stretches)
    assert sum(row["time_ns"] for row in path.table.to_rows()) == path.length_ns == sum(path.by_rank.values())
    assert pickle.loads(pickle.dumps(path)) == path
    return path


def test_the_path_is_at_the_rank_that_came_last() -> None:
    works = [200, 700, 300]
    path = checked([rank_of(rank, 3, works) for rank in range(3)])
    assert [step.number for step in path.steps] == [0, 1]
    for step in path.steps:
        assert step.length_ns == 860_000
        # From its start to its arrival at 710 µs; the transfer and what comes after are of the rank that is looked at.
        assert step.by_rank == {1: 710_000, 0: 150_000}
        main = step.main
        assert main is not None
        assert (main.rank, main.before, main.cause, main.name) == (1, "all_reduce 1", "host_operator", "aten::mm")
        assert main.time_ns == 695_000
        assert step.by_cause["communication"] == 50_000
    assert path.table.to_rows()[0]["rank"] == 1


def test_a_rank_like_its_peers() -> None:
    analyses = [rank_of(rank, 3, [200, 700, 300]) for rank in range(3)]
    collectives = match(analyses)
    tried = like_peers(analyses, collectives, parse_change("rank:1=peers"))
    assert tried.steps == (0, 1)
    assert tried.before_ns == (860_000, 860_000)
    # Its peers take 210 and 310 µs to the all-reduce; the lower median is 210, so rank 2 is the last then.
    assert tried.after_ns == (460_000, 460_000)
    assert like_peers(analyses, collectives, parse_change("rank:0=peers")).gain_ns == 0


def test_who_is_no_rank_or_has_no_peers() -> None:
    analyses = [rank_of(rank, 2, [200, 700]) for rank in range(2)]
    with pytest.raises(TraceError, match="no trace for rank 7"):
        like_peers(analyses, match(analyses), parse_change("rank:7=peers"))
    with pytest.raises(TraceError, match="needs the traces of several ranks"):
        like_peers(analyses[:1], match(analyses[:1]), parse_change("rank:0=peers"))


def test_one_rank_alone_is_its_own_path() -> None:
    analyses = [rank_of(0, 1, [300])]
    path = checked(analyses)
    assert [step.by_cause for step in path.steps] == [
        dict(sorted(step.causes.items(), key=lambda each: -each[1])) for step in analyses[0].path.steps
    ]


def test_no_rank_has_steps() -> None:
    analyses = [analyze_rank(MadeTrace(rank=rank, world_size=2).trace(), rank) for rank in range(2)]
    assert checked(analyses).steps == ()


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(20, 900), min_size=2, max_size=5))
def test_whoever_is_last_has_the_way_to_the_collective(works: list[int]) -> None:
    path = checked([rank_of(rank, len(works), works) for rank in range(len(works))])
    last = max(range(len(works)), key=lambda rank: (works[rank], -rank))
    for step in path.steps:
        assert step.by_rank[last] >= (works[last] + 10) * 1000
        assert sum(ns for rank, ns in step.by_rank.items() if rank not in (last, step.rank)) == 0


@pytest.mark.skipif(len(DLRM) < 8, reason="../shared/data/traces/param_dlrm_8rank is not here")
def test_rank_seven_is_the_cause(real_analysis: Callable[[Path, int], RankAnalysis]) -> None:
    analyses = [real_analysis(path, rank) for rank, path in enumerate(DLRM)]
    path = checked(analyses)
    assert max(path.by_rank, key=lambda rank: path.by_rank[rank]) == 7
    collectives = match(analyses)
    gains = {rank: like_peers(analyses, collectives, parse_change(f"rank:{rank}=peers")).gain_ns for rank in range(8)}
    assert max(gains, key=lambda rank: gains[rank]) == 7
    assert min(gains.values()) >= 0
