"""The outbox on disk: each message once and in order, whatever was cut off, repeated or written by somebody else."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from alert_messages import lifecycle, message

from stepscope.alerts.outbox import (
    MOST_FILE_BYTES,
    Delivery,
    OutboxTail,
    SentLog,
    append_messages,
    read_deliveries,
    read_messages,
)
from stepscope.store.paths import ALERTS, OUTBOX, SENT


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    folder.mkdir(mode=0o700)
    return folder


def test_messages_come_back_as_they_were_written(run_dir: Path) -> None:
    append_messages(run_dir, lifecycle())
    assert list(read_messages(run_dir)) == lifecycle()
    assert stat.S_IMODE((run_dir / ALERTS).stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / OUTBOX).stat().st_mode) == 0o600


def test_a_message_written_again_after_a_kill_counts_once(run_dir: Path) -> None:
    begun, changed, ended = lifecycle()
    append_messages(run_dir, [begun])
    append_messages(run_dir, [begun, changed])
    append_messages(run_dir, [changed, ended])
    assert list(read_messages(run_dir)) == [begun, changed, ended]


def test_a_tail_returns_only_what_is_new_and_complete(run_dir: Path) -> None:
    begun, changed, ended = lifecycle()
    tail = OutboxTail(run_dir, "hook")
    assert tail.read() == []
    append_messages(run_dir, [begun, message(1, receiver="other")])
    assert tail.read() == [begun]
    whole = (run_dir / OUTBOX).read_bytes()
    append_messages(run_dir, [changed])
    line = (run_dir / OUTBOX).read_bytes()[len(whole) :]
    (run_dir / OUTBOX).write_bytes(whole + line[:100])  # the hub is killed in the middle of a line
    assert tail.read() == []
    append_messages(run_dir, [changed, ended])
    assert tail.read() == [changed, ended]


def test_lines_that_are_not_messages_are_skipped(run_dir: Path) -> None:
    begun = lifecycle()[0]
    append_messages(run_dir, [begun])
    line = json.loads((run_dir / OUTBOX).read_text())
    hostile = [
        b"\x00\xff garbage",
        b"[]",
        b'{"id": 1}',
        json.dumps({**line, "id": "x", "status": "gone"}).encode(),
        json.dumps({**line, "id": "y", "created_wall_ns": 1 << 80}).encode(),
        json.dumps(line).encode().replace(b'"cost":', b'"cost":{"a":' + b"[" * 900 + b"]" * 900 + b'},"x":'),
        b'{"id": "' + b"z" * (1 << 20) + b'"}',
    ]
    (run_dir / OUTBOX).write_bytes(b"\n".join(hostile) + b"\n")
    append_messages(run_dir, [begun])
    assert list(read_messages(run_dir)) == [begun]


def test_texts_of_a_message_are_bounded(run_dir: Path) -> None:
    large = message(title="x" * 100_000, also=("y" * 100_000,) * 1000, ranks=tuple(range(100_000)))
    large = replace(large, incident=replace(large.incident, evidence={"z": "z" * 400_000}))
    append_messages(run_dir, [large])
    (read,) = read_messages(run_dir)
    assert len(read.incident.title) == 2000
    assert len(read.incident.also) == 32
    assert read.incident.ranks == tuple(range(4096))
    assert read.incident.evidence == {}


def test_a_full_outbox_refuses_more(run_dir: Path) -> None:
    append_messages(run_dir, lifecycle())
    with (run_dir / OUTBOX).open("r+b") as file:
        file.truncate(MOST_FILE_BYTES + 1)
    with pytest.raises(OSError, match="64 MiB"):
        append_messages(run_dir, lifecycle())
    assert list(read_messages(run_dir)) == lifecycle()


def test_deliveries_show_the_last_state_of_each_message(run_dir: Path) -> None:
    begun, changed, ended = lifecycle()
    append_messages(run_dir, [begun, changed, ended])
    log = SentLog(run_dir)
    log.append(Delivery(id=begun.id, state="sending", tries=1, wall_ns=1))
    log.append(Delivery(id=begun.id, state="sent", tries=1, wall_ns=2, receipt={"ts": "1.2"}))
    log.append(Delivery(id=changed.id, state="failed", tries=1, wall_ns=3, why="HTTP 500"))
    with (run_dir / SENT).open("ab") as file:
        file.write(b'{"id":"cut off')
    expected = [
        (begun, Delivery(id=begun.id, state="sent", tries=1, wall_ns=2, receipt={"ts": "1.2"})),
        (changed, Delivery(id=changed.id, state="failed", tries=1, wall_ns=3, why="HTTP 500")),
        (ended, Delivery(id=ended.id, state="waiting", wall_ns=ended.created_wall_ns)),
    ]
    assert list(read_deliveries(run_dir)) == expected
    SentLog(run_dir).append(Delivery(id=changed.id, state="given_up", tries=2, wall_ns=4, why="HTTP 404"))
    assert [delivery.state for _, delivery in read_deliveries(run_dir)] == ["sent", "given_up", "waiting"]


def test_what_a_full_disk_refused_is_written_later(run_dir: Path, small_disk: Path) -> None:
    run_dir = small_disk / "run-1"
    run_dir.mkdir()
    log = SentLog(run_dir)
    log.append(Delivery(id="a", state="sending"))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    padding = "p" * 8192
    log.append(Delivery(id="a", state="sent", why=padding))
    assert log.state_of("a") == Delivery(id="a", state="sent", why=padding)
    filler.unlink()
    log.append(Delivery(id="b", state="sending"))
    fresh = SentLog(run_dir)
    assert [fresh.state_of(name).state for name in "ab"] == ["sent", "sending"]  # type: ignore[union-attr]
