"""The hub's inbox: every frame once, whole or not at all, whatever kills the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import FrameError, HubError
from stepscope.store.captures import trace_sizes
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import NodeInfo, end_run, read_nodes, read_refused, write_nodes
from stepscope.store.inbox.journal import journal_path, read_journal
from stepscope.store.inbox.parts import seal_journal
from stepscope.store.inbox.receiver import Accepted, Gap, Inbox, ReceivedFiles
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import seal
from stepscope.wire.frames import pack_block, part_of, read_frame, ring_id, rows_of
from stepscope.wire.handshake import Positions


def positions(sender: Any, steps: list[int], **files: int) -> Positions:
    rings = {ring.about.key: 16 * step for ring, step in zip(sender.rings, steps, strict=True)}
    return Positions(rings=rings, files={name.replace("__", "/"): at for name, at in files.items()})


def test_what_goes_in_comes_out(inbox: Inbox, sender: Any, send: Any) -> None:
    node = sender(1)
    accepted = send(
        inbox, node.frame([node.sidecars(), node.block([0, 0], [4, 6]), node.stretch("events.jsonl", 0, 3)])
    )
    assert accepted.new_rings == tuple(ring.about for ring in node.rings)
    (taken,) = accepted.blocks
    assert taken.rings.tobytes() == b"".join(ring_id(ring.about.key) for ring in node.rings)
    expected = [slot for ring, last in zip(node.rings, (4, 6), strict=True) for slot in ring.rows(0, last).slots]
    assert [row.tobytes() for row in taken.slots] == expected
    assert taken.rows.tolist() == [len(ring.rows(0, last).slots) for ring, last in zip(node.rings, (4, 6), strict=True)]
    assert accepted.lines == {"events.jsonl": [line[:-1] for line in node.files["events.jsonl"][:3]]}
    assert accepted.duplicate_parts == 0
    assert inbox.positions(node.spool) == positions(
        node, [4, 6], **{"events.jsonl": sum(map(len, node.files["events.jsonl"][:3]))}
    )


def test_what_comes_again_is_counted_and_not_kept(inbox: Inbox, sender: Any, send: Any, paths: RunPaths) -> None:
    node = sender(1)
    raw = node.everything()
    send(inbox, raw)
    size = journal_path(paths.run_dir, 1).stat().st_size
    repeated = send(inbox, raw)
    assert repeated == Accepted(duplicate_parts=len(read_frame(raw).parts))
    assert journal_path(paths.run_dir, 1).stat().st_size == size
    assert inbox.nodes()[0].duplicates == repeated.duplicate_parts
    assert inbox.nodes()[0].frames == 1


def test_of_an_overlap_the_new_is_taken(inbox: Inbox, sender: Any, send: Any) -> None:
    node = sender(1)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [3, 6]), node.stretch("samples.jsonl", 0, 2)]))
    accepted = send(inbox, node.frame([node.block([1, 2], [5, 6]), node.stretch("samples.jsonl", 1, 5)]))
    (taken,) = accepted.blocks
    assert [row.tobytes() for row in taken.slots] == list(node.rings[0].rows(3, 5).slots)
    assert taken.table["after_seq"].tolist() == [48]
    assert accepted.lines == {"samples.jsonl": [line[:-1] for line in node.files["samples.jsonl"][2:]]}
    assert accepted.duplicate_parts == 2


def test_a_gap_says_where_to_go_on(inbox: Inbox, sender: Any, send: Any) -> None:
    node = sender(1)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [3, 2])]))
    had = inbox.positions(node.spool)
    for early in (
        [node.block([3, 3], [4, 4])],
        [node.stretch("events.jsonl", 1, 2)],
        [node.stretch("logs/main.log", 2, 3)],
        [node.stretch("events.jsonl", 0, 1), node.block([4, 2], [5, 3])],
    ):
        with pytest.raises(Gap) as caught:
            send(inbox, node.frame(early))
        assert caught.value.positions == had
    assert inbox.positions(node.spool) == had == positions(node, [3, 2])


def test_a_ring_that_nobody_introduced_is_a_gap(inbox: Inbox, sender: Any, send: Any) -> None:
    node = sender(1)
    with pytest.raises(Gap) as caught:
        send(inbox, node.frame([node.block([0, 0], [1, 1])]))
    assert caught.value.positions == Positions()


def test_an_overlap_with_losses_in_it_is_asked_for_again(inbox: Inbox, sender: Any, send: Any) -> None:
    """Whether the lost ones were before or after what is here, only the sender knows."""
    node = sender(1, rings=1)
    (ring,) = node.rings
    send(inbox, node.frame([node.sidecars(), node.block([0], [3])]))
    with pytest.raises(Gap):
        send(inbox, node.frame([part_of("steps", pack_block([ring.rows(1, 5, lost=2)]))]))
    accepted = send(inbox, node.frame([part_of("steps", pack_block([ring.rows(3, 5, lost=2)]))]))
    assert accepted.blocks[0].table["lost"].tolist() == [2]


def test_where_a_rank_is_counts_when_it_is_new(inbox: Inbox, sender: Any, send: Any) -> None:
    node = sender(1, rings=1)
    (ring,) = node.rings
    send(inbox, node.frame([node.sidecars(), node.block([0], [3])]))
    here = replace(ring.rows(3, 3), live_phase=5, live_since_ns=900)
    assert send(inbox, node.frame([part_of("steps", pack_block([here]))])).blocks[0].table["live_phase"].tolist() == [5]
    assert send(inbox, node.frame([part_of("steps", pack_block([here]))])).blocks == ()
    before = replace(here, live_since_ns=899)
    assert send(inbox, node.frame([part_of("steps", pack_block([before]))])).blocks == ()


@pytest.mark.parametrize(
    "part",
    [
        part_of("rings", b"{}"),
        part_of("rings", b"[1]"),
        part_of("rings", b"[[["),
        part_of("steps", b"STBL"),
        part_of("lines", b'{"a":1}', name="events.jsonl"),
        replace(part_of("lines", b"x\n", name="events.jsonl"), data=b"no zlib"),
        replace(part_of("file", b"{}", name="errors/1.json"), size=1),
    ],
    ids=str,
)
def test_garbage_changes_nothing(inbox: Inbox, sender: Any, send: Any, paths: RunPaths, part: Any) -> None:
    node = sender(1)
    with pytest.raises(FrameError):
        send(inbox, node.frame([node.stretch("logs/main.log", 0, 2), node.error_part(), part]))
    assert inbox.positions(node.spool) == Positions()
    assert not list((paths.run_dir / "errors").iterdir())
    assert not list((paths.run_dir / "logs").iterdir())
    assert journal_path(paths.run_dir, 1).stat().st_size == 0


def test_files_go_to_their_places(inbox: Inbox, sender: Any, send: Any, paths: RunPaths) -> None:
    """Two nodes whose processes have the same pids, and a host that both claim to be."""
    for node in (sender(1), sender(2)):
        inbox.introduce(node.spool, node=node.node, host="twin", address="10.0.0.1")
        rank = part_of("log", b"rank\n", name="logs/rank-3.log")
        hang = part_of("file", b'{"schema":1,"host":"x"}', name="hangs/twin-1.json")
        flight = part_of("file", f'"{node.node}"'.encode(), name="flight/rank_3.json")
        send(inbox, node.frame([node.stretch("logs/main.log", 0, 5), rank, node.error_part(), hang, flight]))
    found = {str(path.relative_to(paths.run_dir)) for path in paths.run_dir.glob("*/*") if path.parent.name != "inbox"}
    assert found == {
        "errors/twin-70.json",
        "errors/70.twin.02020202.json",
        "hangs/twin-1.json",
        "hangs/twin-1.twin.json",
        "flight/rank_3.json",
        "logs/node1.main.log",
        "logs/node2.main.log",
        "logs/rank-3.log",
        "logs/rank-3.twin.log",
    }
    assert (paths.run_dir / "logs" / "node2.main.log").read_bytes() == b"".join(sender(2).files["logs/main.log"])
    assert json.loads((paths.run_dir / "errors" / "twin-70.json").read_text())["spool"] == sender(1).spool
    assert (paths.run_dir / "flight" / "rank_3.json").read_text() == '"2"'
    inbox.close()
    reopened = Inbox(paths.run_dir)
    inbox._lock = os.open(paths.run_dir, os.O_RDONLY)  # for the fixture to close
    inbox._journal = reopened._journal
    assert (
        ReceivedFiles(paths.run_dir).of(sender(2).spool, "logs/rank-3.log", node=2, host="twin")
        == "logs/rank-3.twin.log"
    )


def test_a_log_of_this_host_is_not_written_over(inbox: Inbox, sender: Any, send: Any, paths: RunPaths) -> None:
    (paths.run_dir / "logs" / "rank-3.log").write_text("own")
    node = sender(1)
    inbox.introduce(node.spool, node=1, host="b")
    send(inbox, node.frame([part_of("log", b"theirs", name="logs/rank-3.log")]))
    assert (paths.run_dir / "logs" / "rank-3.log").read_text() == "own"
    assert (paths.run_dir / "logs" / "rank-3.b.log").read_text() == "theirs"


def test_no_link_is_followed(inbox: Inbox, sender: Any, send: Any, paths: RunPaths, tmp_path: Path) -> None:
    node = sender(1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("mine")
    send(inbox, node.frame([node.stretch("logs/main.log", 0, 1)]))
    log = paths.run_dir / "logs" / "node1.main.log"
    log.unlink()
    log.symlink_to(outside / "x")
    with pytest.raises(OSError, match="symbolic links"):
        send(inbox, node.frame([node.stretch("logs/main.log", 1, 2)]))
    (paths.run_dir / "hangs").symlink_to(outside)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        send(inbox, node.frame([part_of("file", b"{}", name="hangs/a-1.json")]))
    assert (outside / "x").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["x"]


def test_what_was_sent_last_counts_even_if_it_comes_first(
    inbox: Inbox, sender: Any, send: Any, paths: RunPaths
) -> None:
    node = sender(1)
    old = node.frame([part_of("file", b'{"n":1}', name="hangs/a-1.json")])
    new = node.frame([part_of("file", b'{"n":2}', name="hangs/a-1.json")])
    assert [send(inbox, raw).duplicate_parts for raw in (new, old, new)] == [0, 1, 1]
    assert json.loads((paths.run_dir / "hangs" / "a-1.json").read_text())["n"] == 2


def test_one_hub_per_run(inbox: Inbox, paths: RunPaths) -> None:
    with pytest.raises(HubError, match="another hub is receiving"):
        Inbox(paths.run_dir)
    inbox.refuse("nobody")


def test_nodes_are_counted_and_come_back(inbox: Inbox, sender: Any, send: Any, paths: RunPaths) -> None:
    node = sender(1, offset_ns=5)
    inbox.introduce(node.spool, node=1, host="b", address="10.0.0.2", meta={"python": "3.11"})
    raw = node.everything()
    send(inbox, raw, raw)
    inbox.refuse(node.spool)
    inbox.introduce("cd" * 16, node=1, host="c")
    (first, second) = sorted(inbox.nodes(), key=lambda origin: origin.host)
    assert (first.host, first.offset_ns, first.rtt_ns, first.frames, first.refused) == ("b", 5, 2, 1, 1)
    assert first.bye == {"exit_code": 0, "status": "finished"}
    assert first.rows == sum(len(group) for ring in node.rings for group in ring.groups)
    assert (first.bytes, first.duplicates) == (len(raw), len(read_frame(raw).parts))
    assert (first.replaced_by, second.replaced_by) == ("cd" * 16, "")
    inbox.save_nodes(refused={"wrong token": 3})
    assert read_nodes(paths.run_dir) == [first, second]
    assert read_refused(paths.run_dir) == {"wrong token": 3}


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"schema":1,"nodes":3}', b'{"schema":1,"nodes":[1,{"node":"x"}]}'])
def test_nodes_of_another_hand_are_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "nodes.json").write_bytes(raw)
    assert read_nodes(tmp_path) == []
    assert read_refused(tmp_path) == {}


def test_a_node_round_trips(tmp_path: Path) -> None:
    node = NodeInfo(node=3, host="h", spool="ab" * 16, offset_ns=-5, bye={"exit_code": 1}, meta={"a": [1]})
    write_nodes(tmp_path, [node])
    assert read_nodes(tmp_path) == [node]


CHEAP = settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


class Runs:
    """New run directories, as many as hypothesis wants."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0

    def __call__(self) -> Path:
        self.count += 1
        return create_run(self.root, f"r{self.count}", ["x"], environ={}, sessions=self.root / "sessions").run_dir


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def comparable(run_dir: Path, plain: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """But for names, counts and times of the hub's own."""
    values = plain(open_run(run_dir))
    hub_only = ("frames", "bytes", "duplicates", "joined_wall_ns", "heard_wall_ns", "rows")
    nodes = [{key: value for key, value in node.items() if key not in hub_only} for node in values["nodes"]]
    for name in ("name", "path", "meta"):
        del values[name]
    return {**values, "nodes": nodes}


class Spool:
    """Sends from where the hub is, or from before; resends; the hub dies in between."""

    def __init__(self, sender: Any, send: Any, data: Any, run_dir: Path) -> None:
        self.node, self.send, self.data, self.run_dir = sender, send, data, run_dir
        self.old: list[bytes] = []
        self.inbox = Inbox(run_dir, journal_bytes=1)

    def positions(self) -> tuple[list[int], dict[str, int]]:
        had = self.inbox.positions(self.node.spool)
        steps = [had.rings.get(ring.about.key, 0) // 16 for ring in self.node.rings]
        ends = {}
        for name, lines in self.node.files.items():
            at = had.files.get(name, 0)
            ends[name] = next(n for n in range(len(lines) + 1) if sum(map(len, lines[:n])) == at)
        return steps, ends

    def some(self) -> None:
        steps, ends = self.positions()
        first = [self.data.draw(st.integers(0, have)) for have in steps]
        last = [self.data.draw(st.integers(a, len(r.groups))) for a, r in zip(first, self.node.rings, strict=True)]
        parts = [self.node.sidecars(ended=self.data.draw(st.booleans())), self.node.block(first, last)]
        for name, have in ends.items():
            begin = self.data.draw(st.integers(0, have))
            parts.append(self.node.stretch(name, begin, self.data.draw(st.integers(begin, len(self.node.files[name])))))
        if self.data.draw(st.booleans()):
            parts.append(self.node.error_part())
        self._send(self.node.frame(parts))

    def again(self) -> None:
        if self.old:
            self._send(self.data.draw(st.sampled_from(self.old)))

    def _send(self, raw: bytes) -> None:
        try:
            self.send(self.inbox, raw)
        except Gap as gap:
            assert gap.positions == self.inbox.positions(self.node.spool)
        self.old.append(raw)

    def die(self) -> None:
        """Killed anywhere in the last write; what was sealed and fsynced stays."""
        number = self.inbox.journal
        self.inbox.close()
        path = journal_path(self.run_dir, number)
        records = list(read_journal(path))
        floor = records[-2].end if len(records) > 1 else 0
        if records:
            os.truncate(path, self.data.draw(st.integers(floor, path.stat().st_size)))
        self.inbox = Inbox(self.run_dir, journal_bytes=1)

    def part(self) -> None:
        for number in range(1, self.inbox.journal):
            seal_journal(self.run_dir, number)

    def rest(self) -> None:
        steps, ends = self.positions()
        lines = [self.node.stretch(name, have, len(self.node.files[name])) for name, have in ends.items()]
        block = self.node.block(steps, [len(ring.groups) for ring in self.node.rings])
        parts = [self.node.sidecars(), block, *lines, self.node.error_part(), self.node.sidecars(ended=True)]
        self._send(self.node.frame(parts, bye=True))
        self.inbox.close()


@pytest.fixture
def expected(runs: Runs, sender: Any, send: Any, plain: Any) -> dict[str, Any]:
    """The run whose nodes sent everything at once."""
    run_dir = runs()
    inbox = Inbox(run_dir)
    send(inbox, sender(1, offset_ns=300).everything())
    inbox.close()
    end_run(run_dir, exit_code=0, status="finished", wall_ns=9)
    return comparable(run_dir, plain)


@CHEAP
@given(
    data=st.data(),
    moves=st.lists(st.sampled_from(["some", "again", "die", "part"]), min_size=3, max_size=9),
    sealed=st.integers(0, 9),
)
def test_any_split_resend_and_kill_gives_the_same_run(
    runs: Runs, sender: Any, send: Any, plain: Any, expected: Any, data: Any, moves: list[str], sealed: int
) -> None:
    run_dir = runs()
    spool = Spool(sender(1, offset_ns=300), send, data, run_dir)
    spool.some()
    for move in moves:
        getattr(spool, move)()
    spool.rest()
    end_run(run_dir, exit_code=0, status="finished", wall_ns=9)
    assert comparable(run_dir, plain) == expected
    logs = {path.name: path.read_bytes() for path in (run_dir / "logs").iterdir()}
    assert logs == {"node1.main.log": b"".join(spool.node.files["logs/main.log"])}
    if sealed == 9:
        seal(run_dir)
        assert comparable(run_dir, plain) == expected
        assert not (run_dir / "inbox").exists()
        assert not (run_dir / "parts").exists()


@CHEAP
@given(at=st.integers(0, 1 << 16), change=st.binary(min_size=1, max_size=6))
def test_fuzz_the_journal(runs: Runs, sender: Any, send: Any, at: int, change: bytes) -> None:
    run_dir = runs()
    inbox = Inbox(run_dir)
    node = sender(1)
    send(inbox, node.frame([node.sidecars(), node.block([0, 0], [2, 2])]), node.everything())
    inbox.close()
    path = journal_path(run_dir, 1)
    good = path.read_bytes()
    at %= len(good)
    path.write_bytes(good[:at] + change + good[at + len(change) :])
    open_run(run_dir)
    repeated = Inbox(run_dir)
    repeated.close()


def test_rows_of_agrees(inbox: Inbox, sender: Any, send: Any) -> None:
    """The two unpackers of blocks, with and without numpy."""
    from stepscope.store.inbox.journal import repack_block, unpack_block
    from stepscope.wire.frames import read_block

    data = sender(1).block([0, 1], [5, 3]).data
    assert rows_of(read_block(repack_block(unpack_block(data)))) == rows_of(read_block(data))


def test_all_that_a_node_sent_is_synced_before_its_bye_is_answered(
    sender: Any, send: Any, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes its copy then: rotated journals, logs, whole files and their folders, also of a hub before this."""
    synced: set[str] = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(paths.run_dir)))
        real(fd)

    node = sender(1)
    first = Inbox(paths.run_dir, journal_bytes=1)
    send(first, node.frame([node.stretch("logs/main.log", 0, 2), node.error_part()]))
    first.close()
    monkeypatch.setattr(os, "fsync", fsync)
    inbox = Inbox(paths.run_dir, journal_bytes=1)
    send(inbox, node.frame([node.stretch("events.jsonl", 0, 2)]))
    assert synced == {"inbox/000001.frames"}, "the journal that was full; nothing else yet"
    flight = part_of("file", b"{}", name="flight/rank_3.json")
    last = node.frame([node.stretch("logs/main.log", 2, 5), flight], bye=True)
    send(inbox, last)
    everything = {
        *(f"inbox/00000{number}.frames" for number in (1, 2, 3)),
        *("inbox/places.jsonl", "inbox", "."),
        *("logs", "logs/node1.main.log", "errors", "errors/node1-70.json", "flight", "flight/rank_3.json"),
    }
    assert synced == everything
    synced.clear()
    send(inbox, last)
    assert synced == everything - {"inbox/000001.frames", "inbox/000002.frames"}, "also when it says so again"
    inbox.close()


# -- traces of captures -----------------------------------------------------------------------------------------------

TRACE = "captures/step-40/rank-3.pt.trace.json.gz"


def test_a_trace_arrives_in_pieces_and_belongs_to_the_node_that_sent_it(
    inbox: Inbox, sender: Any, send: Any, paths: RunPaths
) -> None:
    one, two = sender(1), sender(2)
    send(inbox, one.frame([part_of("log", b"abc", name=TRACE, offset=0)]))
    send(inbox, one.frame([part_of("log", b"bcdef", name=TRACE, offset=1)]))
    with pytest.raises(Gap):
        send(inbox, one.frame([part_of("log", b"x", name=TRACE, offset=9)]))
    assert inbox.positions(one.spool).files[TRACE] == 6
    send(inbox, two.frame([part_of("log", b"other", name=TRACE, offset=0)]))
    folder = paths.run_dir / "captures" / "step-40"
    assert (folder / "rank-3.pt.trace.json.gz").read_bytes() == b"abcdef"
    assert trace_sizes(paths.run_dir, "step-40") == {"rank-3.pt.trace.json.gz": 6}
    assert len(list(folder.iterdir())) == 2  # the other one is kept under another name
    send(inbox, one.frame([], bye=True))
    inbox.close()
    again = Inbox(paths.run_dir)
    send(again, one.frame([part_of("log", b"g", name=TRACE, offset=6)]))
    assert (folder / "rank-3.pt.trace.json.gz").read_bytes() == b"abcdefg"


def test_a_trace_follows_no_link(inbox: Inbox, sender: Any, send: Any, paths: RunPaths, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (paths.run_dir / "captures").mkdir()
    (paths.run_dir / "captures" / "step-40").symlink_to(elsewhere)
    node = sender(1)
    with pytest.raises(OSError):
        send(inbox, node.frame([part_of("log", b"abc", name=TRACE, offset=0)]))
    assert list(elsewhere.iterdir()) == []
    assert inbox.positions(node.spool) == Positions()


def test_a_trace_has_a_limit(sender: Any, send: Any, paths: RunPaths) -> None:
    node, inbox = sender(1), Inbox(paths.run_dir, trace_bytes=4)
    send(inbox, node.frame([part_of("log", b"abc", name=TRACE, offset=0)]))
    with pytest.raises(FrameError, match="a trace is too large"):
        send(inbox, node.frame([part_of("log", b"de", name=TRACE, offset=3)]))
    inbox.close()
    assert (paths.run_dir / TRACE).read_bytes() == b"abc"
