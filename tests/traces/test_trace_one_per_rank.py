"""Files of a job and the ranks that they stand for."""

from __future__ import annotations

from stepscope.testing.traces import MadeTrace
from stepscope.traces.one_per_rank import one_per_rank
from stepscope.traces.rank import RankAnalysis, analyse_rank


def analysis(rank: int | None, at: float = 0, number: int = 0) -> RankAnalysis:
    made = MadeTrace(rank=rank, world_size=8)
    made.op("aten::mm", at, 5)
    return analyse_rank(made.trace(), number if rank is None else rank)


def numbers(found: list[RankAnalysis]) -> list[tuple[int, int]]:
    return [(each.rank, each.meta.origin_ns // 1000) for each in found]


def test_each_once() -> None:
    found, notices = one_per_rank([analysis(3, 30), analysis(1, 10)])
    assert (numbers(found), notices) == ([(1, 10), (3, 30)], [])


def test_the_latest_recording_counts() -> None:
    files = [analysis(0, 100), analysis(1, 101), analysis(0, 300), analysis(1, 301), analysis(0, 200), analysis(1, 201)]
    found, notices = one_per_rank(files)
    assert numbers(found) == [(0, 300), (1, 301)]
    assert notices == ["4 files of an earlier recording of the same ranks left out: the latest count"]


def test_a_file_without_a_rank_gets_a_free_number() -> None:
    found, notices = one_per_rank(
        [analysis(None, 7, number=0), analysis(0, 10), analysis(None, 8, number=2), analysis(2, 12)]
    )
    assert numbers(found) == [(0, 10), (1, 7), (2, 12), (3, 8)]
    assert notices == ["2 files name no rank: counted as ranks 1 and 3"]


def test_a_single_file_needs_no_word() -> None:
    found, notices = one_per_rank([analysis(None, 7)])
    assert (numbers(found), notices) == ([(0, 7)], [])
    assert one_per_rank([]) == ([], [])
