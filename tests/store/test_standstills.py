"""Hangs as a run tells them: what nodes sent, on the hub's clock, with what the run knows of their ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.cluster import Cluster
from hang_jobs import Job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.hangs.evidence import EvidenceFile
from stepscope.hangs.judge import judge
from stepscope.records.hang import HangRecord
from stepscope.records.series import RankError, RankSeries
from stepscope.store.documents import NodeInfo
from stepscope.store.inbox.receiver import signed_file
from stepscope.store.live.failures import read_hangs, read_joined_hangs, write_evidence, write_hang
from stepscope.store.paths import hang_path

S = 10**9
AHEAD_NS = 300 * S
JOB = Job(ranks=4).alone(3)
SPOOL = "b0" * 8


def write(run_dir: Path, host: str, ranks: range, *, spool: str = "", ahead_ns: int = 0) -> None:
    """Both files of a host, as they lie in the hub's folder."""
    whole = JOB.evidence()
    own = replace(whole, host=host, ranks=tuple(rank for rank in whole.ranks if rank.rank in ranks))
    instants = {"declared_wall_ns": 112 * S + ahead_ns, "stopped_wall_ns": 100 * S + ahead_ns}
    record = judge(own, number=1, **instants)
    assert isinstance(record, HangRecord)
    write_hang(run_dir, record)
    evidence_file = EvidenceFile(
        number=1,
        stopped_wall_ns=instants["stopped_wall_ns"],
        gathered_wall_ns=instants["declared_wall_ns"],
        evidence=own,
    )
    write_evidence(run_dir, evidence_file)
    for path in (run_dir / "hangs").glob(f"{host}-*") if spool else ():
        path.write_bytes(signed_file(f"hangs/{path.name}", path.read_bytes(), spool=spool, host=host))


def series(*hosts: str) -> list[RankSeries]:
    """A rank on each, with the pids of the job that stands still."""
    found = Cluster(ranks=len(hosts), steps=8).series()
    return [
        replace(
            rank_series,
            state="running",
            ended_wall_ns=None,
            identity=replace(rank_series.identity, host=host, pid=1000 + rank_series.rank),
        )
        for rank_series, host in zip(found, hosts, strict=True)
    ]


def node(**more: object) -> NodeInfo:
    fields = {"node": 1, "host": "b", "spool": SPOOL, "offset_ns": AHEAD_NS, "heard_wall_ns": 130 * S, **more}
    return NodeInfo(**fields)  # type: ignore[arg-type]


def test_clocks_that_differ_by_minutes_are_one(tmp_path: Path) -> None:
    write(tmp_path, "a", range(2))
    write(tmp_path, "b", range(2, 4), spool=SPOOL, ahead_ns=AHEAD_NS)
    (hang,), bad = read_joined_hangs(tmp_path, series(*"aabb"), (), [node()])
    assert ([culprit.rank for culprit in hang.culprits], hang.stopped_wall_ns, bad) == ([3], 100 * S, ())
    assert hang.title.startswith("Rank 3 on b never called")


def test_ranks_of_different_attempts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    write(tmp_path, "a", range(2))
    write(tmp_path, "b", range(2, 4))
    ranks = series(*"aabb")
    ranks[2:] = [replace(rank, identity=replace(rank.identity, attempt=1)) for rank in ranks[2:]]
    assert len(read_joined_hangs(tmp_path, ranks, (), [])[0]) == 2
    assert len(read_joined_hangs(tmp_path, [], (), [])[0]) == 1  # nothing is known of their processes


def test_ranks_that_are_gone_are_known_to_the_run(tmp_path: Path) -> None:
    write(tmp_path, "a", range(2))
    ranks = series(*"aabb")
    ranks[2:] = [replace(rank, state="exception", ended_wall_ns=99 * S) for rank in ranks[2:]]
    error = RankError(rank=3, pid=1003, type="ValueError", message="bad", wall_ns=99 * S)
    followed = RankError(rank=2, pid=1002, type="RuntimeError", message="Connection closed by peer", wall_ns=99 * S)
    (hang,), _ = read_joined_hangs(tmp_path, ranks, (error, followed), [])
    assert (hang.kind, hang.title.partition(";")[0]) == ("rank_crashed", "Rank 3 on b raised ValueError: bad in step 8")


@pytest.mark.parametrize(
    ("heard", "decided"),
    [
        pytest.param(node(heard_wall_ns=98 * S), True, id="lost"),
        pytest.param(node(heard_wall_ns=111 * S), False, id="heard of"),
        pytest.param(node(heard_wall_ns=98 * S, bye={"exit_code": 0}), False, id="said good-bye"),
        pytest.param(node(heard_wall_ns=98 * S, host="c"), False, id="of none of the ranks"),
    ],
)
def test_a_node_that_was_lost_is_named(tmp_path: Path, heard: NodeInfo, decided: bool) -> None:
    write(tmp_path, "a", range(2))
    (hang,), _ = read_joined_hangs(tmp_path, series(*"aabb"), (), [heard])
    assert (hang.kind, not hang.undecidable) == ("rank_lost", decided)
    assert hang.title.startswith("Host b (ranks 2 and 3) has been silent for more than 14 s") == decided


def test_of_a_node_that_joined_again_the_last_word_counts(tmp_path: Path) -> None:
    write(tmp_path, "a", range(2))
    both = [node(heard_wall_ns=98 * S), node(heard_wall_ns=111 * S, spool="b1" * 8)]
    (hang,), _ = read_joined_hangs(tmp_path, series(*"aabb"), (), both)
    assert hang.undecidable


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a", range(2))
    write(tmp_path, "b", range(2, 4))
    (tmp_path / "hangs" / "b-1.evidence.json").write_text("{")
    (tmp_path / "hangs" / "c-1.json").write_text(json.dumps([]))
    records, bad = read_joined_hangs(tmp_path, series(*"aabb"), (), [])
    assert [record.host for record in records] == ["a", "b"]
    assert sorted(bad) == ["hangs/b-1.evidence.json", "hangs/c-1.json"]
    assert read_joined_hangs(tmp_path / "nowhere", (), (), []) == ((), ())


# -- hangs/HOST-N.json: written whole, read by whoever opens the run, sealed or not -----------------------------------


@pytest.fixture
def hang() -> HangRecord:
    return Job(ranks=2).alone(1).hang()


def test_there_and_back_in_order_of_time(tmp_path: Path, hang: HangRecord) -> None:
    later = replace(hang, host="node1", stopped_wall_ns=hang.stopped_wall_ns + 5)
    second = replace(hang, number=2, stopped_wall_ns=hang.stopped_wall_ns + 9)
    for record in (second, later, hang):
        write_hang(tmp_path, record)
    assert read_hangs(tmp_path) == ((hang, later, second), ())
    assert sorted(path.name for path in (tmp_path / "hangs").iterdir()) == [
        "node0-1.json",
        "node0-2.json",
        "node1-1.json",
    ]


def test_a_hang_that_is_over_replaces_itself(tmp_path: Path, hang: HangRecord) -> None:
    path = write_hang(tmp_path, hang)
    over = replace(hang, over="recovered", over_wall_ns=5)
    assert write_hang(tmp_path, over) == path == hang_path(tmp_path, "node0", 1)
    assert read_hangs(tmp_path) == ((over,), ())


def test_a_host_with_an_odd_name_stays_in_its_folder(tmp_path: Path, hang: HangRecord) -> None:
    path = write_hang(tmp_path, replace(hang, host="../../a b-1"))
    assert path.parent == tmp_path / "hangs"
    assert read_hangs(tmp_path)[0][0].host == "../../a b-1"


def test_no_folder_is_no_hang(tmp_path: Path) -> None:
    assert read_hangs(tmp_path) == ((), ())


def test_what_is_none_is_named_and_passed(tmp_path: Path, hang: HangRecord) -> None:
    good = write_hang(tmp_path, hang)
    folder = good.parent
    (folder / "a-1.json").write_text("{")
    (folder / "b-1.json").write_bytes(b"\xff\xfe")
    (folder / "c-1.json").write_text("[" * 100_000)
    (folder / "d-1.json").mkdir()
    (folder / "e-1.json").write_text(json.dumps({**hang.to_dict(), "schema": 99}))
    (folder / ".e-2.json.77.tmp").write_text("{")
    (folder / "notes.txt").write_text("mine")
    found, bad = read_hangs(tmp_path)
    assert found == (hang,)
    assert bad == tuple(f"hangs/{name}-1.json" for name in "abcde")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2000))
def test_damaged_bytes_never_raise(tmp_path: Path, hang: HangRecord, noise: bytes, at: int) -> None:
    path = write_hang(tmp_path, hang)
    data = path.read_bytes()
    path.write_bytes(data[:at] + noise + data[at + len(noise) :])
    found, bad = read_hangs(tmp_path)
    assert len(found) + len(bad) == 1
