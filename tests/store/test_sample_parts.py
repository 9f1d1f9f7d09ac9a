"""The samples that a hub keeps thin out with age: flat after weeks, each one there once, whatever was killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from stepscope.hub.ingest.tail import InboxTail
from stepscope.store.documents import write_meta
from stepscope.store.inbox import parts
from stepscope.store.inbox.journal import journals, read_journal, read_positions
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.inbox.remote import read_remote
from stepscope.wire.frames import FrameHead, inflate_part, pack_frame, part_of, read_frame

SPOOLS = ("ab" * 16, "cd" * 16)
EVERY_S = 60
FRAME_S = 1800


class Days:
    """A hub whose nodes send every half hour; a journal is full after about half a day of both."""

    def __init__(self, run_dir: Path, **more: Any) -> None:
        self.run_dir = run_dir
        self.now_s = 1_000_000
        self.at = dict.fromkeys(SPOOLS, 0)
        self.sent: Counter[str] = Counter()
        write_meta(run_dir, {"schema": 1, "name": "weeks", **more})
        self.inbox = Inbox(run_dir, journal_bytes=30_000, clock=lambda: self.now_s * 10**9)
        for node, spool in enumerate(SPOOLS, start=1):
            self.inbox.introduce(spool, node=node, host=f"host{node}")

    def hours(self, hours: int) -> None:
        for _ in range(0, hours * 3600, FRAME_S):
            for node, spool in enumerate(SPOOLS, start=1):
                self._send(node, spool)
            self.now_s += FRAME_S
            for number in journals(self.run_dir, after=0):
                if number < self.inbox.journal:
                    parts.seal_journal(self.run_dir, number)

    def _send(self, node: int, spool: str) -> None:
        rows = [_sample(self.now_s + at, node) for at in range(0, FRAME_S, EVERY_S)]
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
        part = part_of("lines", lines, name="samples.jsonl", offset=self.at[spool])
        raw = pack_frame(FrameHead(node=node, spool=spool, sent_wall_ns=1, offset_ns=0), [part])
        self.inbox.accept(read_frame(raw), raw)
        self.at[spool] += len(lines)
        self.sent[f"host{node}"] += len(rows)

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.run_dir.rglob("*") if path.is_file())


def _sample(second: int, node: int) -> dict[str, Any]:
    power = 900.0 if second == 1_000_060 else 300.0 + second // EVERY_S % 3
    return {"wall_ns": second * 10**9, "node": f"host{node}", "kind": "gpu", "index": 0, "power_w": power}


def _read(run_dir: Path) -> list[dict[str, Any]]:
    return read_remote(run_dir, read_positions(run_dir), lost=lambda node: False).records("samples.jsonl")


def _stood_for(samples: list[dict[str, Any]]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for sample in samples:
        counted[sample["node"]] += sample["over"]["samples"] if "over" in sample else 1
    return counted


@pytest.fixture
def days(tmp_path: Path) -> Any:
    hub = Days(tmp_path)
    yield hub
    hub.inbox.close()


def test_killed_between_the_new_file_and_the_old_ones_nothing_is_there_twice(
    days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    days.hours(20)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.file_io, "fsync_folder", killed)
        parts._thin(days.run_dir, parts.sample_parts(days.run_dir, read_positions(days.run_dir).parts), 60)
    names = [path.name for path in (days.run_dir / "parts").glob("samples-*")]
    assert {name.split("-")[3] for name in names} == {"0", "60"}
    assert _stood_for(_read(days.run_dir)) == days.sent
    days.hours(24)
    assert _stood_for(_read(days.run_dir)) == days.sent


def test_killed_half_way_there_is_no_file_and_the_old_ones_count(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    days.hours(20)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(parts.JournalWriter, "append", _no_room)
        parts._thin(days.run_dir, parts.sample_parts(days.run_dir, read_positions(days.run_dir).parts), 60)
    assert _stood_for(_read(days.run_dir)) == days.sent
    assert not (days.run_dir / "parts" / "samples.unfinished").exists()


def _no_room(*args: Any, **kwargs: Any) -> None:
    raise OSError("no room")


def test_the_rest_of_a_part_has_no_samples(days: Days) -> None:
    days.hours(24)
    sealed = read_positions(days.run_dir)
    assert len(sealed.parts) > 0
    for number in sealed.parts:
        assert list(read_journal(parts.rest_path(days.run_dir, number))) == []
    (first, *_) = parts.sample_parts(days.run_dir, sealed.parts)
    frame = read_frame(next(read_journal(first.path(days.run_dir))).raw)
    assert [part.name for part in frame.parts] == ["samples.jsonl"]
    assert inflate_part(frame.parts[0]).endswith(b"\n")


def test_a_hub_near_its_limit_keeps_less(tmp_path: Path) -> None:
    hub = Days(tmp_path, max_disk=100_000)
    hub.hours(24 * 4)
    hub.inbox.close()
    sealed = read_positions(tmp_path)
    assert {part.span_s for part in parts.sample_parts(tmp_path, sealed.parts)} == {0, 3600}
    assert _stood_for(_read(tmp_path)) == hub.sent


class _Heard:
    """A live model that remembers the samples it was told."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []

    def lines(self, name: str, lines: list[bytes], *, node: str, offset_ns: int) -> None:
        self.samples += [json.loads(line) for line in lines]

    def tick(self) -> None:
        pass

    def rows(self, rows: Any) -> None:
        assert len(rows.slots) == 0


@pytest.mark.parametrize("frames_before_part", [0, 3, 9])
def test_a_tail_that_a_part_overtakes_hears_each_sample_once(days: Days, frames_before_part: int) -> None:
    """``told``: how many frames it had read when their journal was sealed."""
    now_s = iter(range(10_000))
    tail = InboxTail(days.run_dir, cast("Any", heard := _Heard()), clock=lambda: float(next(now_s)))
    days.hours(5)
    for _ in range(frames_before_part):
        tail.poll()
    assert len(heard.samples) == frames_before_part * FRAME_S // EVERY_S
    days.hours(12)
    assert read_positions(days.run_dir).through == 1
    for _ in range(80):
        tail.poll()
    assert _stood_for(heard.samples) == days.sent
    late = _Heard()
    InboxTail(days.run_dir, cast("Any", late)).catch_up()
    assert _stood_for(late.samples) == days.sent
