"""What is collected: everything after the hub's positions, within the limits, and nothing that is not whole yet."""

from __future__ import annotations

import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.agent.shipping import outgoing as module
from stepscope.agent.shipping.outgoing import Batch, Outgoing
from stepscope.store.file_io import lines_from, read_jsonl
from stepscope.store.inbox.receiver import Gap, Inbox
from stepscope.store.live.ring_files import parts_from, read_segment
from stepscope.store.paths import segment_path
from stepscope.wire.frames import (
    FILE_BYTES,
    LINES_BYTES,
    FrameHead,
    RingRows,
    inflate_part,
    pack_frame,
    read_block,
    read_frame,
    ring_id,
    rows_of,
)
from stepscope.wire.handshake import Positions

SPOOL = "ab" * 16


def sent_parts(batch: Batch) -> list[tuple[str, str, int, bytes]]:
    assert len(pack_frame(FrameHead(node=1, spool=SPOOL, sent_wall_ns=0), batch.parts)) > 0
    return [(part.kind, part.name, part.offset, inflate_part(part)) for part in batch.parts]


def rows(batch: Batch) -> list[RingRows]:
    return [row for part in batch.parts if part.kind == "steps" for row in rows_of(read_block(part.data))]


def test_sidecars_go_first_and_again_when_more_than_their_whereabouts_changed(spool: Any) -> None:
    outgoing = Outgoing(spool.run_dir)
    spool.ring(0, live_step=3, live_since_ns=9, live_phase=2)
    spool.steps(0, 2, lost=7)
    batch = outgoing.collect()
    assert [part.kind for part in batch.parts] == ["rings", "steps"]
    assert json.loads(sent_parts(batch)[0][3]) == [spool.about(0)]
    (row,) = rows(batch)
    assert (row.after_seq, row.last_seq, len(row.slots), row.lost) == (0, 20, 2, 7)
    assert (row.live_step, row.live_since_ns, row.live_phase, row.state) == (3, 9, 2, 1)
    assert sent_parts(outgoing.collect()) == sent_parts(batch)  # until it was acknowledged
    outgoing.acked(batch)
    assert outgoing.collect().parts == []
    spool.ring(0, live_step=4, heard_wall_ns=5)
    batch = outgoing.collect()
    (row,) = rows(batch)
    assert ([part.kind for part in batch.parts], row.after_seq, row.last_seq, row.slots) == (["steps"], 20, 20, [])
    outgoing.acked(batch)
    spool.ring(0, state="exited", ended_wall_ns=8)
    batch = outgoing.collect()
    assert [part.kind for part in batch.parts] == ["rings", "steps"]
    assert rows(batch)[0].state == 2
    outgoing.acked(batch)
    spool.ring(0, heard_wall_ns=9)
    assert outgoing.collect().parts == []
    assert json.loads(sent_parts(outgoing.collect(final=True))[0][3]) == [spool.about(0)]


def test_what_the_hub_has_is_passed(spool: Any) -> None:
    spool.ring(0)
    for _ in range(3):
        spool.steps(0, 4)
    outgoing = Outgoing(spool.run_dir)
    outgoing.rewind(Positions(rings={spool.key(0): 80}, files={}))
    assert [(row.after_seq, row.last_seq, len(row.slots)) for row in rows(outgoing.collect())] == [(80, 120, 4)]
    outgoing.rewind(Positions(rings={spool.key(0): 60}, files={}))  # within a frame
    assert [(row.after_seq, row.last_seq, len(row.slots)) for row in rows(outgoing.collect())] == [(60, 120, 6)]
    outgoing.rewind(Positions(rings={spool.key(0): 120, "gone-1-1": 7}, files={}))
    batch = outgoing.collect(final=True)
    assert [(row.after_seq, row.last_seq) for row in rows(batch)] == [(120, 120)]
    assert json.loads(sent_parts(batch)[0][3]) == [spool.about(0)]  # nothing is said of what only the hub has


def test_a_frame_that_is_being_written_waits(spool: Any) -> None:
    spool.ring(0)
    spool.steps(0, 3)
    path = segment_path(spool.run_dir, spool.key(0))
    first = path.stat().st_size
    spool.steps(0, 3)
    whole = path.read_bytes()
    for cut in range(first + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert parts_from(path, 0, most_slots=100)[1] == first
    path.write_bytes(whole)
    parts, offset = parts_from(path, first, after_seq=30, most_slots=100)
    assert ([part.last_seq for part in parts], offset) == ([60], len(whole))
    assert parts_from(path, offset, after_seq=60, most_slots=100) == ([], offset)


def test_a_damaged_frame_is_passed_as_by_who_reads_the_whole_segment(spool: Any) -> None:
    spool.ring(0)
    path = segment_path(spool.run_dir, spool.key(0))
    ends = []
    for _ in range(3):
        spool.steps(0, 2)
        ends.append(path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[ends[0] + 50] ^= 255
    path.write_bytes(data)
    parts, offset = parts_from(path, 0, most_slots=100)
    assert b"".join(part.slots for part in parts) == read_segment(path).slots
    assert offset == ends[2]
    path.write_bytes(data[: ends[0]] + bytes(3 << 20) + data[ends[1] :])
    assert b"".join(part.slots for part in parts_from(path, 0, most_slots=100)[0]) == read_segment(path).slots
    (row,) = rows(Outgoing(spool.run_dir).collect())
    assert (row.after_seq, row.last_seq, len(row.slots)) == (0, 60, 4)


def test_what_was_read_is_not_read_again(spool: Any) -> None:
    """What comes before the offsets may as well be gone."""
    outgoing = Outgoing(spool.run_dir)
    spool.ring(0)
    spool.steps(0, 5)
    spool.lines("events.jsonl", {"a": 1})
    spool.write("logs/main.log", b"one")
    outgoing.acked(outgoing.collect())
    files = [segment_path(spool.run_dir, spool.key(0)), spool.run_dir / "events.jsonl", spool.run_dir / "logs/main.log"]
    spool.steps(0, 5)
    spool.lines("events.jsonl", {"b": 2})
    spool.write("logs/main.log", b"two")
    sizes = [len(read_segment(files[0]).slots) // 512]
    assert sizes == [5]
    for path, keep in zip(files, (16, 8, 3), strict=True):
        data = path.read_bytes()
        path.write_bytes((b"\n" * keep) + data[keep:])
    batch = outgoing.collect()
    assert [(row.after_seq, len(row.slots)) for row in rows(batch)] == [(50, 5)]
    assert [one for one in sent_parts(batch) if one[0] != "steps"] == [
        ("lines", "events.jsonl", 8, b'{"b":2}\n'),
        ("log", "logs/main.log", 3, b"two"),
    ]


def test_a_line_that_is_being_written_waits(spool: Any) -> None:
    outgoing = Outgoing(spool.run_dir)
    spool.write("stacks.jsonl", b'{"a"')
    assert outgoing.collect(final=True).parts == []
    spool.write("stacks.jsonl", b": 1}\n{")
    batch = outgoing.collect()
    assert sent_parts(batch) == [("lines", "stacks.jsonl", 0, b'{"a": 1}\n')]
    outgoing.acked(batch)
    assert outgoing.collect().parts == []


def test_a_line_that_is_too_long_becomes_blanks(spool: Any, tmp_path: Path) -> None:
    long = json.dumps({"long": "x" * (2 * LINES_BYTES + 100)}).encode()
    text = b'{"a": 1}\n' + long + b'\n{"b": 2}\n' + json.dumps({"c": "y" * (LINES_BYTES - 100)}).encode() + b"\n"
    spool.write("events.jsonl", text)
    outgoing = Outgoing(spool.run_dir)
    received = b""
    while (batch := outgoing.collect(final=True)).parts:
        for _, _, offset, raw in sent_parts(batch):
            assert offset == len(received)
            received += raw
        outgoing.acked(batch)
    assert not batch.more
    assert len(received) == len(text)
    assert outgoing.long_lines == 1
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(received)
    records, bad = read_jsonl(copy)
    assert ([next(iter(record)) for record in records], bad) == (["a", "b", "c"], 0)
    assert b"long" not in received


@given(st.binary(max_size=60).map(lambda raw: raw.replace(b"\x00", b"\n")), st.integers(1, 12), st.integers(0, 12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_in_pieces_are_the_lines(tmp_path: Path, text: bytes, most: int, more: int) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(text)
    longest = most + more
    received, too_long = b"", 0
    while True:
        raw, count = lines_from(path, len(received), most_bytes=most, longest=longest)
        assert len(raw) <= longest
        assert raw == b"" or raw.endswith(b"\n")
        received += raw
        too_long += count
        if not raw:
            break
    whole = text[: text.rfind(b"\n") + 1]
    lines = whole.split(b"\n")[:-1]
    assert too_long <= sum(len(line) + 1 > longest for line in lines)
    parts = [line for line in received.split(b"\n") if line.strip(b" ")]
    expected = [line for line in lines if len(line) + 1 <= longest and line.strip(b" ")]
    assert parts == expected
    assert len(received) >= len(whole)  # of a line without an end, what is too long already may be passed


def test_whole_files_when_they_change_and_unless_they_are_too_large(spool: Any) -> None:
    spool.write("errors/7.json", b"{}")
    spool.write("errors/8.tmp", b"half")
    spool.write("flight/rank_0.json", bytes(FILE_BYTES))
    spool.write("flight/rank_1.json", bytes(FILE_BYTES + 1))
    spool.write("hangs/what is this", b"")
    (spool.run_dir / "errors/9.json").symlink_to("/etc/hostname")
    outgoing = Outgoing(spool.run_dir)
    batch = outgoing.collect()
    assert [part.name for part in batch.parts] == ["errors/7.json", "flight/rank_0.json"]
    outgoing.acked(batch)
    assert outgoing.collect().parts == []
    assert outgoing.unsent == {"flight/rank_1.json", "hangs/what is this"}
    spool.write("errors/7.json", b'{"a": 1}', mode="wb")
    assert sent_parts(outgoing.collect()) == [("file", "errors/7.json", 0, b'{"a": 1}')]
    outgoing.rewind(Positions(rings={}, files={"errors/7.json": zlib.crc32(b'{"a": 1}')}))
    assert [part.name for part in outgoing.collect().parts] == ["flight/rank_0.json"]


def test_files_that_are_large_unpacked_go_one_after_the_other(spool: Any) -> None:
    names = [f"flight/rank_{rank}.json" for rank in range(5)]
    for name in names:
        spool.write(name, bytes(FILE_BYTES))
    outgoing = Outgoing(spool.run_dir)
    seen = []
    while (batch := outgoing.collect(final=True)).parts:
        assert sum(part.size for part in batch.parts) <= 16 << 20
        seen.append([part.name for part in batch.parts])
        assert batch.more == (len(seen) < 3)
        outgoing.acked(batch)
    assert seen == [names[:2], names[2:4], names[4:]]


def test_a_file_that_does_not_pack_is_left_out(spool: Any) -> None:
    spool.write("flight/rank_1.json", random.Random(1).randbytes(FILE_BYTES))
    outgoing = Outgoing(spool.run_dir)
    assert outgoing.collect().parts == []
    assert outgoing.unsent == {"flight/rank_1.json"}


def test_batches_are_bounded_and_nobody_waits_for_the_others(spool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 80)
    monkeypatch.setattr(module, "LOG_BYTES", 1000)
    for rank in range(4):
        spool.ring(rank)
        for _ in range(20):
            spool.steps(rank, 10)
        spool.write(f"logs/rank-{rank}.log", bytes(3000))
    outgoing = Outgoing(spool.run_dir)
    left = outgoing.left_bytes()
    seen: dict[bytes, int] = {}
    logs: list[str] = []
    turns = 0
    while (batch := outgoing.collect(final=True)).parts:
        assert sum(len(row.slots) for row in rows(batch)) <= 80
        assert sum(part.size for part in batch.parts if part.kind == "log") <= 1000
        for row in rows(batch):
            assert row.after_seq == seen.get(row.ring, 0)
            seen[row.ring] = row.last_seq
        logs += [part.name for part in batch.parts if part.kind == "log"]
        outgoing.acked(batch)
        assert outgoing.left_bytes() < left
        left = outgoing.left_bytes()
        turns += 1
        if turns == 1:
            assert sorted(seen.values()) == [200] * 4
    assert (sorted(seen.values()), turns, left, batch.more) == ([2000] * 4, 12, 0, False)
    assert len(set(logs[:4])) == 4


def test_it_shrinks_and_grows(spool: Any) -> None:
    spool.write("logs/main.log", bytes(4 << 20))
    outgoing = Outgoing(spool.run_dir)

    def size() -> int:
        return sum(part.size for part in outgoing.collect().parts)

    assert size() == 1 << 20
    outgoing.shrink()
    assert size() == 1 << 19
    outgoing.acked(outgoing.collect())
    assert size() == 1 << 20
    outgoing.shrink(for_good=True)
    outgoing.acked(outgoing.collect())
    assert size() == 1 << 19
    for _ in range(20):
        outgoing.shrink()
    assert size() == 1 << 14


def test_a_segment_without_a_sidecar_goes_in_the_end_under_its_name(spool: Any) -> None:
    spool.ring(0)
    spool.steps(0, 2)
    (spool.run_dir / "steps" / f"{spool.key(0)}.json").unlink()
    outgoing = Outgoing(spool.run_dir)
    assert outgoing.collect().parts == []
    batch = outgoing.collect(final=True)
    assert [document["pid"] for document in json.loads(sent_parts(batch)[0][3])] == [100]
    assert len(rows(batch)[0].slots) == 2


def test_a_sidecar_as_large_as_a_part_goes_without_its_groups(spool: Any) -> None:
    spool.ring(0, facts={"a": "x" * (LINES_BYTES // 2)})
    (about,) = json.loads(sent_parts(Outgoing(spool.run_dir).collect())[0][3])
    assert (about["facts"], about["groups"], about["pid"]) == ({}, [], 100)


class InboxHub:
    """The real store of a hub, without the network before it."""

    def __init__(self, spool: Any) -> None:
        self.run_dir = spool.run_dir.parent / "hub"
        self.run_dir.mkdir()
        self.inbox = Inbox(self.run_dir)
        self.inbox.introduce(SPOOL, node=1, host="b")
        self.received: dict[bytes, bytes] = {}
        self._frames = 0

    def restart(self) -> None:
        self.inbox.close()
        self.inbox = Inbox(self.run_dir)

    def take(self, outgoing: Outgoing, *, final: bool = False, ack: bool = True) -> bool:
        """Whether there was anything."""
        self._frames += 1
        batch = outgoing.collect(final=final)
        raw = pack_frame(FrameHead(node=1, spool=SPOOL, sent_wall_ns=self._frames), batch.parts)
        try:
            accepted = self.inbox.accept(read_frame(raw), raw)
        except Gap as gap:
            outgoing.rewind(gap.positions)
            return True
        for block in accepted.blocks:
            ends = [0, *block.rows.cumsum().tolist()]
            for ring, begin, end in zip(block.rings.tolist(), ends, ends[1:], strict=False):
                self.received[ring] = self.received.get(ring, b"") + block.slots[begin:end].tobytes()
        if ack:
            outgoing.acked(batch)
        return bool(batch.parts)


def write_something(spool: Any, what: str, number: int) -> None:
    if what in ("steps", "more steps"):
        spool.ring(number % 3, heard_wall_ns=number + 1)
        spool.steps(number % 3, number if what == "steps" else 100 * number, lost=number % 2)
    elif what == "lines":
        spool.lines("events.jsonl", {"n": number}, {"x": "y" * number})
    elif what == "log":
        spool.write("logs/main.log", b"z" * number)
    elif what == "file":
        spool.write("hangs/node-1.json", b"%d" % number, mode="wb")
    elif what == "live":
        spool.ring(0, live_step=number, heard_wall_ns=number + 1)


deeds = st.lists(
    st.sampled_from(["steps", "more steps", "lines", "log", "file", "live", "send", "lose ack", "forget", "restart"]),
    max_size=40,
)


@given(deeds)
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_real_inbox_ends_up_with_the_same(new_spool: Any, deeds: list[str]) -> None:
    spool = new_spool()
    hub, outgoing = InboxHub(spool), Outgoing(spool.run_dir)
    for number, deed in enumerate(deeds):
        if deed == "forget":
            outgoing = Outgoing(spool.run_dir)
            outgoing.rewind(hub.inbox.positions(SPOOL))
        elif deed == "restart":
            hub.restart()
        elif deed in ("send", "lose ack"):
            hub.take(outgoing, ack=deed == "send")
        else:
            write_something(spool, deed, number)
    while hub.take(outgoing, final=True):
        pass
    has = hub.inbox.positions(SPOOL)
    hub.inbox.close()
    for path in (spool.run_dir / "steps").glob("*.seg"):
        segment = read_segment(path)
        assert has.rings[path.stem] == segment.last_seq
        assert hub.received.get(ring_id(path.stem), b"") == segment.slots
    for name in ("events.jsonl", "logs/main.log"):
        path = spool.run_dir / name
        assert has.files.get(name, 0) == (path.stat().st_size if path.exists() else 0)
    if "file" in deeds:
        assert has.files["hangs/node-1.json"] == zlib.crc32((spool.run_dir / "hangs/node-1.json").read_bytes())


def test_traces_of_captures_go_last_and_in_pieces(spool: Any) -> None:
    trace = "captures/step-40/rank-1.pt.trace.json.gz"
    data = os.urandom(5 << 20)
    for name in (trace, "captures/step-40/.rank-1.pt.trace.json.gz.ab.tmp", "captures/step-40/notes", "captures/x.log"):
        (spool.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (spool.run_dir / name).write_bytes(data)
    (spool.run_dir / "captures" / "linked").symlink_to(spool.run_dir / "captures" / "step-40")
    spool.write("logs/main.log", b"x")
    outgoing, taken = Outgoing(spool.run_dir), b""
    assert outgoing.left_bytes() == len(data) + 1
    while (batch := outgoing.collect()).parts:
        part = batch.parts[-1]
        assert (part.name, part.offset) == (trace, len(taken))
        assert part.size <= 2 << 20
        taken += inflate_part(part)
        outgoing.acked(batch)
    assert taken == data
    assert outgoing.left_bytes() == 0
    assert outgoing.unsent == set()
