"""``hangs/HOST-N.evidence.json``: written by one host, read by another; bounded, and never believed unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hang_jobs import Job, entry, flight, worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.hangs.evidence import FLIGHT_BYTES, EvidenceFile, evidence_from_dict, evidence_to_dict
from stepscope.hangs.judge import judge
from stepscope.records.hang import Frame, HangRecord, ThreadStack
from stepscope.store.live.failures import read_evidence, read_hangs, write_evidence, write_hang
from stepscope.wire.frames import FILE_BYTES, FrameHead, pack_frame, part_of, read_frame

EVIDENCE = Job(ranks=4, sequence=7).alone(1, workers=(worker(),)).evidence()
FILE = EvidenceFile(number=1, stopped_wall_ns=100, gathered_wall_ns=112, evidence=EVIDENCE)


def test_it_comes_back_beside_the_record(tmp_path: Path) -> None:
    record = Job(ranks=4).alone(1).hang()
    write_hang(tmp_path, record)
    write_evidence(tmp_path, FILE)
    write_evidence(tmp_path, replace(FILE, number=2, excuse="Rank 1 compiles.", over_wall_ns=120))
    assert sorted(path.name for path in (tmp_path / "hangs").iterdir()) == [
        "node0-1.evidence.json",
        "node0-1.json",
        "node0-2.evidence.json",
    ]
    found, bad = read_evidence(tmp_path)
    assert found == [("", FILE), ("", replace(FILE, number=2, excuse="Rank 1 compiles.", over_wall_ns=120))]
    assert bad == ()
    assert read_hangs(tmp_path) == ((record,), ())
    assert read_evidence(tmp_path / "nowhere") == ([], ())


def test_of_another_node_it_is_by_the_hubs_clock(tmp_path: Path) -> None:
    write_evidence(tmp_path, FILE)
    (path,) = (tmp_path / "hangs").iterdir()
    raw = json.loads(path.read_bytes())
    path.rename(path.with_name("node0-1.evidence.node0.json"))  # as the hub names a second one of that name
    path.with_name("node0-1.evidence.node0.json").write_text(json.dumps({**raw, "spool": "ab12", "over_wall_ns": 115}))
    ((spool, file),), bad = read_evidence(tmp_path, {"ab12": 10})
    assert (spool, file, bad) == (
        "ab12",
        replace(FILE, stopped_wall_ns=90, gathered_wall_ns=102, over_wall_ns=105),
        (),
    )
    assert read_hangs(tmp_path) == ((), ())


def test_it_travels_as_a_file() -> None:
    raw = json.dumps(evidence_to_dict(FILE)).encode()
    head = FrameHead(node=1, spool="ab" * 8, sent_wall_ns=1)
    frame = read_frame(pack_frame(head, [part_of("file", raw, name="hangs/node-7.local-1.evidence.json")]))
    assert frame.parts[0].size == len(raw)


def test_what_ranks_share_stands_once() -> None:
    raw = evidence_to_dict(FILE)
    assert len(raw["groups"]) == 1
    assert len(raw["stacks"]) == 3  # in the collective, asleep, and none
    assert len(raw["ranks"]) == 4


def test_it_is_bounded() -> None:
    """Ranks with full Flight Recorders and many threads each: the newest entries and the main threads stay."""
    entries = [entry(number, retired=number < 3000) for number in range(1000, 3001)]
    text = json.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": entries}).encode()
    frames = tuple(Frame(file=f"/a/long/path/to/some/module_{n}.py", line=n, function=f"f{n}") for n in range(99))
    ranks = []
    for number, rank in enumerate(Job(ranks=16).alone(15).evidence().ranks):
        others = [ThreadStack(main=False, name=f"{number}-{n}", frames=frames) for n in range(25)]
        ranks.append(replace(rank, flight=text, threads=(*rank.threads, *others)))
    large = replace(FILE, evidence=replace(EVIDENCE, world_size=16, ranks=tuple(ranks)))
    raw = evidence_to_dict(large)
    assert len(json.dumps(raw)) < FILE_BYTES
    evidence = evidence_from_dict(json.loads(json.dumps(raw))).evidence
    assert all(len(rank.flight) <= FLIGHT_BYTES // 16 for rank in evidence.ranks)
    assert json.loads(evidence.ranks[0].flight)["entries"][-1] == json.loads(text)["entries"][-1]
    assert all(len(rank.threads) == 1 for rank in evidence.ranks)
    verdicts = [judge(source, number=1, declared_wall_ns=2, stopped_wall_ns=1) for source in (large.evidence, evidence)]
    before, after = (
        (verdict.kind, verdict.title, verdict.victims) for verdict in verdicts if isinstance(verdict, HangRecord)
    )
    assert before == after


def test_a_recorder_that_cannot_be_cut_is_left_out() -> None:
    for answer in (b"x" * (FLIGHT_BYTES + 1), b'{"entries": 3, "a": "' + b"x" * FLIGHT_BYTES + b'"}'):
        ranks = (replace(EVIDENCE.ranks[0], flight=answer),)
        assert evidence_to_dict(replace(FILE, evidence=replace(EVIDENCE, ranks=ranks)))["ranks"][0]["flight"] == ""
    empty = replace(FILE, evidence=replace(EVIDENCE, ranks=(replace(EVIDENCE.ranks[0], flight=flight()),)))
    assert evidence_from_dict(evidence_to_dict(empty)) == empty


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"world_size": 1 << 60},
        {"world_size": -1},
        {"number": 0},
        {"ranks": [{}]},
        {"ranks": None},
        {"stacks": []},
        {"groups": []},
        {"host": 3},
        {"threshold_s": float("inf")},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    raw = json.loads(json.dumps(evidence_to_dict(FILE)))
    with pytest.raises(ValueError, match=r"."):
        evidence_from_dict({**raw, **change})


def test_ranks_and_groups_that_cannot_be_are_refused() -> None:
    for part, key, value in (("ranks", "rank", 1 << 40), ("ranks", "stack", 99), ("groups", "size", 1 << 40)):
        raw = json.loads(json.dumps(evidence_to_dict(FILE)))
        raw[part][0][key] = value
        with pytest.raises(ValueError, match="evidence"):
            evidence_from_dict(raw)
    raw = json.loads(json.dumps(evidence_to_dict(FILE)))
    with pytest.raises(ValueError, match="world"):
        evidence_from_dict({**raw, "ranks": raw["ranks"] * 2000})


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    write_evidence(tmp_path, FILE)
    folder = tmp_path / "hangs"
    (folder / "a-1.evidence.json").write_text("{")
    (folder / "b-1.evidence.json").write_text("[" * 100_000)
    (folder / "c-1.evidence.json").mkdir()
    with (folder / "d-1.evidence.json").open("wb") as file:
        file.truncate(3 * FILE_BYTES)  # not even read
    found, bad = read_evidence(tmp_path)
    assert found == [("", FILE)]
    assert bad == tuple(f"hangs/{name}-1.evidence.json" for name in "abc")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=64), st.integers(0, 6000))
def test_damaged_evidence_never_raises(tmp_path: Path, noise: bytes, at: int) -> None:
    write_evidence(tmp_path, FILE)
    (path,) = (tmp_path / "hangs").iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:at] + noise + data[at + len(noise) :])
    found, bad = read_evidence(tmp_path)
    assert len(found) + len(bad) == 1
    for _, file in found:
        judge(file.evidence, number=1, declared_wall_ns=2, stopped_wall_ns=1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PLACES = st.sampled_from(
    [(name,) for name in evidence_to_dict(FILE)]
    + [(part, 0, name) for part in ("ranks", "groups", "stacks", "source") for name in evidence_to_dict(FILE)[part][0]]
    + [("ranks", 0, "collective", name) for name in ("op", "group", "bytes", "called_s", "waiting", "peer")]
    + [("ranks", 1, "workers", 0, name) for name in ("pid", "kind", "name", "process_state", "cpu_share", "stack")]
)


@settings(max_examples=examples(150), deadline=None)
@given(PLACES, VALUES)
def test_any_value_in_any_place_is_refused_or_can_be_judged(place: tuple[Any, ...], value: Any) -> None:
    raw = json.loads(json.dumps(evidence_to_dict(FILE)))
    at = raw
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    try:
        evidence = evidence_from_dict(raw)
    except ValueError:
        return
    judge(evidence.evidence, number=1, declared_wall_ns=2, stopped_wall_ns=1)
