"""Files of a job and the ranks that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import TraceError
from stepscope.store.paths import CAPTURE_ANALYSIS, CAPTURE_RECORD
from stepscope.traces.job import assign_ranks, one_per_rank
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank
from stepscope.traces.reading.files import CAPTURE_FILES, find_traces, read_trace


def analysis(rank: int | None, at: float = 0, number: int = 0) -> RankAnalysis:
    made = MadeTrace(rank=rank, world_size=8)
    made.op("aten::mm", at, 5)
    return analyze_rank(made.trace(), number if rank is None else rank)


def numbers(found: list[RankAnalysis]) -> list[tuple[int, int]]:
    return [(each.rank, each.meta.origin_ns // 1000) for each in found]


def test_each_once() -> None:
    found, chosen = one_per_rank([analysis(3, 30), analysis(1, 10)])
    assert (numbers(found), chosen.notices, chosen.mixed) == ([(1, 10), (3, 30)], [], None)


def test_the_latest_recording_counts() -> None:
    files = [analysis(0, 100), analysis(1, 101), analysis(0, 300), analysis(1, 301), analysis(0, 200), analysis(1, 201)]
    found, chosen = one_per_rank(files)
    assert numbers(found) == [(0, 300), (1, 301)]
    assert chosen.notices == ["4 files of an earlier recording of the same ranks left out: the latest is used"]


def test_a_file_without_a_rank_gets_a_free_number() -> None:
    found, chosen = one_per_rank(
        [analysis(None, 7, number=0), analysis(0, 10), analysis(None, 8, number=2), analysis(2, 12)]
    )
    assert numbers(found) == [(0, 10), (1, 7), (2, 12), (3, 8)]
    assert chosen.notices == ["2 files do not specify a rank; treated as ranks 1 and 3"]


def test_a_single_file_needs_no_word() -> None:
    found, chosen = one_per_rank([analysis(None, 7)])
    assert (numbers(found), chosen.notices) == ([(0, 7)], [])
    assert one_per_rank([])[0] == []


DAY_S = 86_400
NOON_S = 1_700_000_000


def meta(at_s: float, rank: int | None = None, *, world: int | None = None, pid: int = 7, **more: Any) -> TraceMeta:
    more = {"host": "node-1", "length_ns": 2 * 10**9} | more
    origin_ns = int((NOON_S + at_s) * 10**9)
    return TraceMeta(path=f"{at_s}.json", origin_ns=origin_ns, rank=rank, world_size=world, pid=pid, **more)


def test_recordings_of_one_process_are_of_one_rank() -> None:
    """``schedule(repeat=3)`` without a process group."""
    for host in ("node-1", None):
        chosen = assign_ranks([meta(at_s, host=host) for at_s in (5, 0, 10)])
        assert (chosen.ranks, chosen.mixed) == ([None, None, 0], None)
        assert chosen.notices == ["2 files of an earlier recording of the same process left out: the latest is used"]


def test_other_processes_are_other_ranks() -> None:
    """Another number, host, device, or the same at the same time."""
    for other in (
        meta(5, pid=8),
        meta(5, host="node-2"),
        meta(5, devices=({"name": "H200"},)),
        meta(1),
    ):
        assert assign_ranks([meta(0), other]).ranks == [0, 1]


def test_recordings_of_containers_with_the_same_numbers() -> None:
    chosen = assign_ranks([meta(0), meta(1), meta(10), meta(11)])
    assert chosen.ranks == [None, None, 0, 1]


def test_another_job_is_left_out_and_said_so() -> None:
    chosen = assign_ranks([meta(0, 3, world=8), meta(8.5 * DAY_S, 1, world=2)])
    assert (chosen.ranks, chosen.notices) == ([None, 1], [])
    assert chosen.mixed == (
        "These files do not seem to belong to one job: their world sizes are 2 and 8, and they were recorded 8 d 12 h "
        "apart. Left out: 0.json; compare two recordings with --against."
    )


def test_most_ranks_count() -> None:
    many = [meta(rank / 10, rank, world=4) for rank in range(4)]
    chosen = assign_ranks([*many, meta(20, 0, world=2), meta(20, 1, world=2), meta(1)])
    assert chosen.ranks == [0, 1, 2, 3, None, None, 4]
    assert chosen.mixed is not None
    assert "their world sizes are 2 and 4. Left out: 20.json, 20.json;" in chosen.mixed


def test_hours_apart_without_a_word_of_the_job() -> None:
    chosen = assign_ranks([meta(0, pid=1), meta(2 * 3600, pid=2)])
    assert chosen.ranks == [None, 0]
    assert "they were recorded 2 h apart" in str(chosen.mixed)
    assert assign_ranks([meta(0, pid=1), meta(600, pid=2)]).ranks == [0, 1]
    boots = [meta(-NOON_S, 0, world=2), meta(5 * DAY_S - NOON_S, 1, world=2)]
    assert assign_ranks(boots).ranks == [0, 1], "counted from when each host was started"


def test_recordings_hours_apart_are_still_of_one_job() -> None:
    files = [meta(at_s, rank, world=2) for at_s in (0, 7200) for rank in range(2)]
    chosen = assign_ranks(files)
    assert (chosen.ranks, chosen.mixed) == ([None, None, 0, 1], None)
    chosen = assign_ranks(files[:3])
    assert (chosen.ranks, chosen.mixed) == ([0, 1, None], None)
    assert chosen.notices == ["1 file of a later recording left out: it has fewer ranks"]


def test_two_real_jobs(shared_data: Path) -> None:
    """One of eight A100s, one of two V100s, days apart: nothing is compared."""
    folder = shared_data / "traces" / "hta_trace_diff"
    metas = [read_trace(path).meta for path in sorted(folder.rglob("*.gz"))]
    chosen = assign_ranks(metas)
    assert chosen.ranks == [None, 1]
    assert str(chosen.mixed).startswith(
        "These files do not seem to belong to one job: their world sizes are 2 and 8, and they were recorded 8 d 12 h "
    )


# ── ranks in names ──────────────────────────────────────────────────────────────────────────────────────────────────


def named(*names: str, ranks: tuple[int | None, ...] = (), world: int | None = None) -> list[TraceMeta]:
    """Files of processes of one host at one time."""
    ranks = ranks or (None,) * len(names)
    return [
        TraceMeta(
            path=f"traces/{name}", origin_ns=NOON_S * 10**9 + at, length_ns=10**9, rank=rank, world_size=world, pid=at
        )
        for at, (name, rank) in enumerate(zip(names, ranks, strict=True))
    ]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("rank_3.json", "rank_1.json"), [3, 1]),
        (("rank3.pt.trace.json.gz", "rank0.pt.trace.json.gz"), [3, 0]),
        (("worker5.1623143089861.pt.trace.json.gz", "worker2.16.pt.trace.json"), [5, 2]),
        (("job-Rank-7.json", "trace.rank2.json"), [7, 2]),
        (("trace_1.json", "trace_0.json"), [1, 0]),
        # Steps of one process, perhaps: no rank is missing only by chance.
        (("trace_10.json", "trace_20.json"), [0, 1]),
        (("trace_7.json",), [0]),
        (("frank_3.json", "coworker4.json"), [0, 1]),
        (("host_4242.1623143089861.pt.trace.json", "node2_17.16.pt.trace.json"), [0, 1]),
        (("rank_1694128201545.json", "rank_4.json"), [0, 4]),
    ],
)
def test_ranks_in_names(names: tuple[str, ...], ranks: list[int]) -> None:
    assert assign_ranks(named(*names)).ranks == ranks


def test_the_content_decides() -> None:
    assert assign_ranks(named("rank_3.json", "rank_1.json", ranks=(0, 2))).ranks == [0, 2]
    # Rank 1 is another file: the name must be wrong.
    chosen = assign_ranks(named("rank_1.json", "b.json", ranks=(None, 1)))
    assert chosen.ranks == [0, 1]
    assert chosen.notices == ["1 file does not specify a rank; treated as rank 0"]


def test_a_name_beyond_the_world_is_none() -> None:
    assert assign_ranks(named("rank_9.json", "rank_1.json", world=4)).ranks == [0, 1]


def test_a_note_says_so() -> None:
    assert assign_ranks(named("rank_3.json", "rank_1.json")).notices == [
        "2 files have a rank only in the name, which is used: rank_3.json is rank 3"
    ]
    assert assign_ranks(named("worker0.16.pt.trace.json")).notices == []
    assert len(assign_ranks(named("rank_2.json")).notices) == 1


def test_recordings_of_a_rank_by_name() -> None:
    first, second, other = named("rank_1.json", "rank_1.later.json", "rank_0.json")
    assert assign_ranks([first, second, other]).ranks == [None, 1, 0]


@given(st.lists(st.text(max_size=30), max_size=6))
@settings(max_examples=examples(100), deadline=None)
def test_any_names(names: list[str]) -> None:
    ranks = assign_ranks(named(*names)).ranks
    given_ranks = [rank for rank in ranks if rank is not None]
    assert len(set(given_ranks)) == len(given_ranks)


# -- Which files are traces -------------------------------------------------------------------------------------------


def small(rank: int = 0) -> MadeTrace:
    made = MadeTrace(rank=rank, world_size=2)
    made.op("aten::mm", 0, 5)
    return made


def test_a_folder_of_the_tensorboard_handler(tmp_path: Path) -> None:
    first = small(0).write(tmp_path / "node1_4000.1694128201545.pt.trace.json")
    second = small(1).write(tmp_path / "node2_4001.1694128201546.pt.trace.json.gz")
    assert find_traces([tmp_path]) == ([first, second], [])
    assert [read_trace(path).meta.rank for path in (first, second)] == [0, 1]


def test_folders_are_searched_and_foreign_files_passed_over(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    trace = small().write(tmp_path / "deep" / "er" / "a.json")
    bare = tmp_path / "b.json"
    bare.write_text(json.dumps(small().events))
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "notes.txt").write_text("x")
    found, notices = find_traces([tmp_path, trace])
    assert found == [bare, trace]
    assert notices == [f"skipped, not a trace (or a --perfetto timeline): {tmp_path / 'config.json'} and 1 more"]


def test_files_that_are_named_are_taken_as_they_are(tmp_path: Path) -> None:
    named = [tmp_path / "config.json", tmp_path / "not there"]
    assert find_traces([*named, named[0]]) == (named, [])


def test_a_file_that_cannot_be_opened_says_so_later(tmp_path: Path) -> None:
    broken = tmp_path / "a.json"
    broken.write_bytes(b"PK\x03\x04")
    assert find_traces([tmp_path]) == ([broken], [])


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    with pytest.raises(TraceError, match="no traces found in this folder"):
        find_traces([tmp_path])


def test_the_documents_beside_the_traces_of_a_capture_are_no_surprise(tmp_path: Path) -> None:
    assert set(CAPTURE_FILES) == {CAPTURE_RECORD, CAPTURE_ANALYSIS}
    MadeTrace().write(tmp_path / "rank-0.pt.trace.json.gz")
    (tmp_path / CAPTURE_ANALYSIS).write_text("{}")
    assert len(find_traces([tmp_path])[1]) == 1
    (tmp_path / CAPTURE_RECORD).write_text("{}")
    assert find_traces([tmp_path]) == ([tmp_path / "rank-0.pt.trace.json.gz"], [])
