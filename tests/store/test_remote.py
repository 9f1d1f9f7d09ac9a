"""Runs with what other nodes sent: clocks, lost nodes, equal pids, late data, huge runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rings import write_steps

from stepscope.errors import RunError
from stepscope.records.paths import helper_environment
from stepscope.records.steps import COMM, FORWARD, INPUT, STEP, STEP_SLOT
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run, read_meta, read_nodes, write_meta
from stepscope.store.inbox import journal, parts, remote
from stepscope.store.inbox.journal import journal_path, read_positions
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.liveness import processes_alive
from stepscope.store.load import open_run
from stepscope.store.paths import ring_key
from stepscope.store.sealed.seal import needs_seal, seal
from stepscope.store.sealed.sql import query
from stepscope.wire.frames import pack_block, part_of, ring_id

AHEAD = 300_200_000_000


def received(run_dir: Path, send: Any, *senders: Any, nnodes: int | None = None) -> None:
    """A run to which each of these sent everything, and which is over."""
    inbox = Inbox(run_dir)
    for node in senders:
        inbox.introduce(node.spool, node=node.node, host=node.host, address="10.0.0.1")
        send(inbox, node.everything())
    inbox.save_nodes()
    inbox.close()
    if nnodes is not None:
        write_meta(run_dir, {**read_meta(run_dir), "nnodes": nnodes})
    end_run(run_dir, exit_code=0, status="finished", wall_ns=9)


def warnings_of(run_dir: Path) -> list[str]:
    """The notices, but for those of a run without agent."""
    return [notice for notice in open_run(run_dir).notices if not notice.startswith("No agent wrote")]


def test_every_clock_is_the_hubs(paths: RunPaths, sender: Any, send: Any) -> None:
    straight, ahead = sender(1, offset_ns=0), sender(2, offset_ns=AHEAD)
    hang = {
        "schema": 1, "number": 1, "host": "host2", "kind": "hang_host", "title": "T.", "threshold_s": 1.0,
        "declared_wall_ns": 90 + AHEAD, "stopped_wall_ns": 80 + AHEAD, "over": "recovered", "over_wall_ns": 99 + AHEAD,
    }  # fmt: skip
    inbox = Inbox(paths.run_dir)
    send(inbox, straight.everything(), ahead.everything())
    send(inbox, ahead.frame([part_of("file", json.dumps(hang).encode(), name="hangs/host2-1.json")]))
    inbox.close()
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    data = open_run(paths.run_dir)
    assert [(rank.rank, rank.anchor_wall_ns, rank.ended_wall_ns) for rank in data.ranks] == [
        (10, 10_000, 10_900),
        (11, 10_000, 10_900),
        (20, 10_000, 10_900),
        (21, 10_000, 10_900),
    ]
    assert [event["wall_ns"] for event in data.events if event["event"] == "warning"] == [
        10_001, 10_002, 10_011, 10_012, 10_021, 10_022, 10_031, 10_032,
    ]  # fmt: skip
    assert [(sample["wall_ns"], sample["node"]) for sample in data.samples[:3]] == [
        (10_001, "host1"),
        (10_002, "host2"),
        (10_011, "host1"),
    ]
    assert [(stack["wall_ns"], stack["rank"]) for stack in data.stacks] == [
        (10_001, 10),
        (10_002, 20),
        (10_011, 10),
        (10_012, 20),
    ]
    assert [(error.wall_ns, error.rank) for error in data.errors] == [(10_500, 10), (10_500, 20)]
    assert [(h.stopped_wall_ns, h.declared_wall_ns, h.over_wall_ns) for h in data.hangs] == [(80, 90, 99)]
    notes = [event for event in data.events if event["event"] == "note"]
    assert {note["wall_ns"] for note in notes} == {10_000 + 100 + sum((7 + slot * 3) % 11 for slot in range(9))}
    assert "Node 2 (host host2): its clock is 5 min ahead; times are shown by this host's clock." in data.notices


def test_equal_pids_on_two_nodes(paths: RunPaths, rings: Any, sender: Any, send: Any) -> None:
    """And on this one: each error finds its own rank."""
    write_steps(rings(0, pid=70), 3)
    (paths.run_dir / "errors" / "70.json").write_text(json.dumps({"pid": 70, "rank": 5, "type": "Own", "wall_ns": 1}))
    received(paths.run_dir, send, sender(1), sender(2))
    data = open_run(paths.run_dir)
    assert [(error.type, error.rank) for error in data.errors] == [("Own", 0), ("E", 10), ("E", 20)]
    assert sorted(rank.rank for rank in data.ranks) == [0, 10, 11, 20, 21]


def test_a_node_that_said_goodbye_is_as_it_said(paths: RunPaths, sender: Any, send: Any) -> None:
    received(paths.run_dir, send, sender(1), nnodes=2)
    data = open_run(paths.run_dir)
    assert [rank.state for rank in data.ranks] == ["exited", "exited"]
    assert warnings_of(paths.run_dir) == []
    assert [(node["node"], node["host"], node["bye"]["status"]) for node in data.nodes] == [(1, "host1", "finished")]


def test_lost_absent_and_refused_are_told(
    paths: RunPaths, sender: Any, send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    node = sender(1)
    node.offset_ns = -2_500_000_000
    inbox = Inbox(paths.run_dir, clock=lambda: 1_700_000_000 * 10**9)
    inbox.introduce(node.spool, node=1, host="b")
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [3, 4])]))
    inbox.refuse(node.spool)
    inbox.save_nodes(refused={"token": 3, "frame": 1})
    inbox.close()
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "nnodes": 5})
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    assert [rank.state for rank in open_run(paths.run_dir).ranks] == ["vanished", "vanished"]
    expected = [
        "Nodes 2, 3, 4 never joined; their data is missing.",
        "Node 1 (host b) was lost: it last sent data at 2023-11-14 22:13:20 and never reported how it ended.",
        "Node 1 (host b): its clock is 2.50 s behind; times are shown by this host's clock.",
        "Node 1 (host b): 1 frame refused.",
        "The hub refused 4 requests: wrong tokens (3), invalid frames (1).",
    ]
    assert warnings_of(paths.run_dir) == expected
    seal(paths.run_dir)
    assert warnings_of(paths.run_dir) == expected
    monkeypatch.undo()
    time.tzset()


def test_a_node_that_sends_keeps_the_run_alive(paths: RunPaths, sender: Any, send: Any) -> None:
    node = sender(1)
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "launcher": None})
    inbox = Inbox(paths.run_dir)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [3, 4])]))
    inbox.save_nodes()
    assert processes_alive(paths.run_dir)
    assert [rank.state for rank in open_run(paths.run_dir).ranks] == ["running", "running"]
    with pytest.raises(RunError, match="its hub is still receiving data"):
        seal(paths.run_dir)
    inbox.close()
    with pytest.raises(RunError, match="its processes are still running"):
        seal(paths.run_dir)
    end_run(paths.run_dir, exit_code=0, status="finished")
    assert not processes_alive(paths.run_dir)


def test_sealed_it_reads_the_same(paths: RunPaths, rings: Any, drain: Any, sender: Any, send: Any, plain: Any) -> None:
    own = rings(0)
    write_steps(own, 5)
    drain(own, ended=7)
    received(paths.run_dir, send, sender(1, offset_ns=AHEAD), sender(2))
    before = open_run(paths.run_dir)
    seal(paths.run_dir)
    assert plain(open_run(paths.run_dir)) == plain(before)
    assert {path.name for path in paths.run_dir.iterdir()} == {
        *("errors", "events.jsonl", "logs", "rings", "run.json", "ranks.json", "samples.parquet", "steps.parquet"),
        *(".lock", "stacks.jsonl", "nodes.json", "positions.json"),
    }
    assert not needs_seal(paths.run_dir)
    assert query(paths.run_dir, "select count(*) from steps").rows == ((5 + 4 * 6,),)


def test_late_data_are_loaded_and_sealed_with_the_rest(paths: RunPaths, sender: Any, send: Any, plain: Any) -> None:
    """A node is lost, the run is sealed, the node comes back; what it sent before is recognized."""
    node, other = sender(1, offset_ns=AHEAD), sender(2)
    inbox = Inbox(paths.run_dir)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [4, 2]), node.stretch("samples.jsonl", 0, 3)]))
    inbox.save_nodes()
    inbox.close()
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    seal(paths.run_dir)
    assert [(rank.state, len(rank.steps)) for rank in open_run(paths.run_dir).ranks] == [
        ("vanished", 4),
        ("vanished", 2),
    ]
    late = Inbox(paths.run_dir)
    assert late.positions(node.spool).rings == {node.rings[0].about.key: 64, node.rings[1].about.key: 32}
    send(late, node.frame([node.block([2, 2], [6, 5])]))
    late.close()
    assert needs_seal(paths.run_dir)
    assert [(rank.state, len(rank.steps)) for rank in open_run(paths.run_dir).ranks] == [
        ("vanished", 6),
        ("vanished", 5),
    ]
    late = Inbox(paths.run_dir)
    send(late, node.everything(), other.everything())
    late.save_nodes()
    late.close()
    data = open_run(paths.run_dir)
    assert [(rank.rank, rank.state, rank.steps["step"].tolist()) for rank in data.ranks] == [
        (rank, "exited", [0, 1, 2, 3, 4, 5]) for rank in (10, 11, 20, 21)
    ]
    assert [rank.anchor_wall_ns for rank in data.ranks] == [10_000] * 4
    assert len(data.samples) == 10
    assert len([event for event in data.events if event["event"] == "note"]) == 4
    seal(paths.run_dir)
    assert plain(open_run(paths.run_dir)) == plain(data)
    assert not needs_seal(paths.run_dir)
    repeated = Inbox(paths.run_dir)
    parts_sent = send(repeated, node.everything())
    assert (parts_sent.rows, parts_sent.duplicate_parts) == (0, 8)
    repeated.close()
    assert not needs_seal(paths.run_dir)


class Killed(BaseException):
    """What a SIGKILL is to the code."""


@pytest.mark.few(1)
@pytest.mark.faults
@pytest.mark.parametrize("times", [1, 4, 6])
def test_a_second_seal_killed_at_any_point(
    paths: RunPaths, sender: Any, send: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    node = sender(1)
    inbox = Inbox(paths.run_dir)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [4, 2])]))
    inbox.close()
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    seal(paths.run_dir)
    late = Inbox(paths.run_dir)
    send(late, node.everything())
    late.close()
    expected = plain(open_run(paths.run_dir))
    real, calls = Path.replace, []

    def dies(self: Path, target: Path) -> Path:
        calls.append(target)
        if self.parent.name == ".sealed" and [call for call in calls if call] and _moves(calls) == times:
            raise Killed
        return real(self, target)

    def _moves(seen: list[Path]) -> int:
        return sum(path.parent == paths.run_dir for path in seen)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", dies)
        seal(paths.run_dir)
    assert plain(open_run(paths.run_dir)) == expected
    seal(paths.run_dir)
    assert plain(open_run(paths.run_dir)) == expected


@pytest.fixture
def filled(paths: RunPaths, sender: Any, send: Any) -> Path:
    """Two full journals and one that is being written."""
    inbox = Inbox(paths.run_dir, journal_bytes=1)
    for node in (sender(1), sender(2), sender(3)):
        send(inbox, node.everything())
    assert inbox.journal == 3
    inbox.save_nodes()
    inbox.close()
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    return paths.run_dir


def test_a_part_reads_as_the_journal_did(filled: Path, plain: Any) -> None:
    expected = plain(open_run(filled))
    command = [sys.executable, "-m", "stepscope.store.inbox.parts", str(filled), "1"]
    subprocess.run(command, check=True, env=helper_environment(os.environ))
    assert not journal_path(filled, 1).exists()
    assert sorted(path.name.partition("-0-")[0] for path in (filled / "parts").iterdir()) == [
        ".lock",
        "rest-000001.frames",
        "samples-000001-000001",
        "steps-000001.0.parquet",
    ]
    assert plain(open_run(filled)) == expected
    parts.seal_journal(filled, 1)
    with pytest.raises(RunError, match=r"000002\.frames comes first"):
        parts.seal_journal(filled, 3)
    parts.seal_journal(filled, 2)
    assert plain(open_run(filled)) == expected
    assert read_positions(filled).steps == 2 * 2 * 6
    Inbox(filled).close()
    seal(filled)
    parts.seal_journal(filled, 2)  # a helper that comes too late
    assert plain(open_run(filled)) == expected


@pytest.mark.faults
def test_a_journal_that_becomes_a_part_under_our_eyes_is_read_once(
    filled: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a reader, and by a hub that begins while a helper of the one before is still at work.

    Each knows what is sealed, and has not yet looked which journals there are.
    """
    expected = plain(open_run(filled))
    far = {spool: known.positions() for spool, known in journal.recover(filled).spools.items()}
    real, left = journal.journals, [1]

    def sealed_first(run_dir: Path, *, after: int) -> list[int]:
        for number in left[:]:
            left.clear()
            parts.seal_journal(run_dir, number)
        return real(run_dir, after=after)

    monkeypatch.setattr(journal, "journals", sealed_first)
    assert plain(open_run(filled)) == expected
    left.append(2)
    found = journal.recover(filled)
    assert {spool: known.positions() for spool, known in found.spools.items()} == far
    assert (found.sealed.through, found.last, left) == (2, 3, [])


def test_a_part_that_cannot_be_made_is_one_line(filled: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert parts.main([str(filled), "2"]) == 1
    assert "journal 2 was not sealed" in capfd.readouterr().err


@pytest.mark.few(2)
@pytest.mark.faults
@pytest.mark.parametrize("name", ["_write_chunk", "write_positions"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_part_killed_half_way_is_made_again(
    filled: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, name: str, before: bool
) -> None:
    expected = plain(open_run(filled))
    real = getattr(parts, name)

    def dies(*args: Any) -> Any:
        if not before:
            real(*args)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(parts, name, dies)
        parts.seal_journal(filled, 1)
    assert plain(open_run(filled)) == expected
    Inbox(filled).close()
    parts.seal_journal(filled, 1)
    assert plain(open_run(filled)) == expected
    assert not journal_path(filled, 1).exists()


def test_nodes_outlive_the_journal(filled: Path) -> None:
    seal(filled)
    assert [(node.node, node.frames) for node in read_nodes(filled)] == [(1, 1), (2, 1), (3, 1)]


def many_ranks(node: Any, count: int, slow: dict[int, int]) -> bytes:
    """A frame of so many ranks, two steps each, made quickly; ``slow``: by rank, the phase in which it is."""
    (ring,) = node.rings
    usual = list(ring.rows(0, 2).slots)
    first = (node.node - 1) * count + 1
    abouts, rows = [], []
    text = json.dumps(ring.about.to_dict())
    for rank in range(first, first + count):
        abouts.append(
            text.replace(f'"rank": {node.node * 10}', f'"rank": {rank}').replace('"pid": 70', f'"pid": {rank}')
        )
        key = ring_key(node.host, rank, ring.about.anchor_wall_ns)
        slots = [slowed(slot, slow[rank]) for slot in usual] if rank in slow else usual
        rows.append(replace(ring.rows(0, 2), ring=ring_id(key), slots=slots))
    sidecars = part_of("rings", f"[{','.join(abouts)}]".encode())
    return node.frame([sidecars, part_of("steps", pack_block(rows)), node.stretch("samples.jsonl", 0, 5)])


def slowed(slot: bytes, phase: int) -> bytes:
    kind, *fields = STEP_SLOT.unpack(slot)
    if kind != STEP:
        return slot
    fields[4] += 10**9  # wall_ns
    fields[5 + phase] += 10**9
    return STEP_SLOT.pack(kind, *fields)


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.soak)])
def test_of_a_huge_run_the_ranks_that_matter_are_loaded(
    paths: RunPaths, rings: Any, drain: Any, sender: Any, send: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Five such nodes; one rank is slow in forward, one in comm and one in input; SQL still sees all."""
    for name, value in (("MOST_STEPS", 15 * count // 2), ("RANKS", 40), ("WORST", 2)):
        monkeypatch.setattr(remote, name, value)
    monkeypatch.setattr(parts, "CHUNK_ROWS", 9 * count // 4)
    own = rings(0)
    write_steps(own, 5)
    drain(own, ended=7)
    slow = {count + 8: FORWARD, 4 * count: COMM, 4 * count + 1: INPUT}
    inbox = Inbox(paths.run_dir, journal_bytes=1)
    for number in range(1, 6):
        send(inbox, many_ranks(sender(number, rings=1, steps=2, offset_ns=3), count, slow))
    inbox.save_nodes()
    inbox.close()
    for number in range(1, 5):
        parts.seal_journal(paths.run_dir, number)
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    before = open_run(paths.run_dir)
    assert {0, count + 8, 4 * count} <= {rank.rank for rank in before.ranks}
    text = f"This run has {8 * count:,} steps of {4 * count:,} ranks on other nodes: 40 ranks were analyzed"
    assert text in before.notices[-1]
    seal(paths.run_dir)
    assert not (paths.run_dir / "inbox").exists()
    assert not needs_seal(paths.run_dir)
    data = open_run(paths.run_dir)
    assert {0, *slow} <= {rank.rank for rank in data.ranks}
    assert len(data.ranks) == 41
    assert {len(rank.steps) for rank in data.ranks if rank.rank} == {2}
    assert {sample["node"] for sample in data.samples} <= {f"host{number}" for number in range(1, 6)}
    result = query(
        paths.run_dir,
        "select count(*), count(distinct rank), list(distinct rank order by rank) filter (wall_ns >= 1000000000), "
        f"(select (host, steps, anchor_wall_ns) from ranks where rank = {4 * count + 1}), "
        "(select count(*) from ranks) from steps",
    )
    ranks = 5 * count + 1
    assert result.rows == ((10 * count + 5, ranks, [*slow], ("host5", 2, 10_000), ranks),)
