"""Runs to read: made like a launcher makes them, their rings written without a training script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.records import records_of
from rings import RingStream

from stepscope.records.identity import RankIdentity
from stepscope.records.paths import RING_SUFFIX
from stepscope.records.series import RunData
from stepscope.records.steps import BUILTIN_PHASES, DEVICE, DEVICE_SLOT, NOTE, NOTE_SLOT, PHASE_SLOTS, STEP, STEP_SLOT
from stepscope.ring import RingReader, RingState
from stepscope.ring.layout import note_words
from stepscope.ring.reader import split
from stepscope.store.create import RunPaths, create_run
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import FRAME_SLOTS, RingSidecar, SegmentWriter, sidecar_of, write_sidecar
from stepscope.store.paths import segment_path
from stepscope.wire.frames import FrameHead, Part, RingRows, pack_block, pack_frame, part_of, read_frame, ring_id

CAPACITY = 1 << 14
"""Words of a ring: room for some hundred steps."""
GONE = 1 << 30
"""A pid that no process has; counting up from here gives more."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path / "runs", "test", ["python", "train.py"], environ={}, sessions=tmp_path / "sessions")


class Stream(RingStream):
    """A ring as these tests want it: its header and its stream in one."""

    @property
    def path(self) -> Path:
        return self.ring.path

    def set_state(self, state: RingState) -> None:
        self.ring.set_state(state)

    def set_phase_name(self, slot: int, name: str) -> None:
        self.ring.set_phase_name(slot, name)

    def note(self, step: int, text: bytes) -> None:
        self.ledger.put(*note_words(step, text))


class Rings:
    """Makes rings in the session of a run; all are closed when the test is over."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.writers: list[Stream] = []

    def __call__(
        self, rank: int = 0, *, pid: int | None = None, capacity: int = CAPACITY, **identity: object
    ) -> Stream:
        pid = GONE + len(self.writers) if pid is None else pid
        import platform

        who = RankIdentity(host=platform.node(), pid=pid, rank=rank, **identity)  # type: ignore[arg-type]
        writer = Stream(self.paths.session / f"{pid}{RING_SUFFIX}", who, capacity=capacity)
        writer.set_state(RingState.RUNNING)
        self.writers.append(writer)
        return writer


@pytest.fixture
def rings(paths: RunPaths) -> Iterator[Rings]:
    rings = Rings(paths)
    yield rings
    for writer in rings.writers:
        writer.close()


@pytest.fixture
def drain(paths: RunPaths) -> Callable[..., SegmentWriter]:
    """What the agent does with a ring: segment and sidecar; with ``ended`` the ring is removed as well."""

    def drain(ring: Stream, *, ended: int | None = None, limit: int = FRAME_SLOTS) -> SegmentWriter:
        reader = RingReader(ring.path)
        about = sidecar_of(reader.header(), heard_wall_ns=1)
        segment = SegmentWriter(segment_path(paths.run_dir, about.key))
        segment.append(next(split(reader.read(segment.last_seq), limit)))
        write_sidecar(paths.run_dir, replace(about, ended_wall_ns=ended))
        reader.close()
        if ended is not None:
            ring.path.unlink()
        return segment

    return drain


@pytest.fixture
def bystander() -> Iterator[int]:
    """The pid of a process that lives as long as the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


class SentRing:
    """One ring of another node: who it is, and its records as the agent there made them."""

    def __init__(self, rank: int, *, host: str, pid: int, steps: int, anchor_wall_ns: int = 1_000, **more: Any) -> None:
        identity = RankIdentity(host=host, pid=pid, rank=rank, world_size=8, **more)
        names = (*BUILTIN_PHASES, *[""] * (PHASE_SLOTS - len(BUILTIN_PHASES)))
        self.about = RingSidecar(
            identity=identity,
            pid=pid,
            start_ticks=1,
            anchor_mono_ns=500,
            anchor_wall_ns=anchor_wall_ns,
            phase_names=names,
            state="running",
            live_phase=3,
            live_since_ns=7,
            live_step=steps,
            hook_failures=0,
            heard_wall_ns=anchor_wall_ns + 10,
        )
        self.ended = replace(
            self.about, state="exited", heard_wall_ns=anchor_wall_ns + 900, ended_wall_ns=anchor_wall_ns + 900
        )
        self.groups = [self._records(step) for step in range(steps)]
        """By step: records of the same seq stay together."""

    def _records(self, step: int) -> list[bytes]:
        seq = 16 * (step + 1)
        phases = [(step * 7 + slot * 3) % 11 for slot in range(9)] + [0] * 7
        first = 500 + 100 * step
        rest = (0, 0, step, 1, 1, 0, 0, 1, 0, 0, 0)
        records = [STEP_SLOT.pack(STEP, step % 4, seq, step, first, sum(phases), *phases, *rest)]
        if step % 3 == 1:
            records.append(DEVICE_SLOT.pack(DEVICE, 0, seq, step, sum(phases), *phases))
        if step % 5 == 2:
            text = b'{"loss":1.5}'
            records.append(NOTE_SLOT.pack(NOTE, 0, seq, step, len(text), text))
        return records

    def rows(self, first: int, last: int, **more: int) -> RingRows:
        """The steps from ``first`` up to but not including ``last``."""
        return RingRows(
            ring=ring_id(self.about.key),
            after_seq=16 * first,
            last_seq=16 * last,
            slots=[record for group in self.groups[first:last] for record in group],
            live_step=last,
            live_since_ns=500 + 100 * last,
            live_phase=2,
            state=1,
            **more,
        )


class Sender:
    """Another node, whose whole spool is known beforehand; sends any stretch of it."""

    def __init__(
        self,
        node: int,
        *,
        rings: int = 2,
        steps: int = 6,
        offset_ns: int | None = 0,
        pid: int = 70,
    ) -> None:
        self.node, self.host, self.spool = node, f"host{node}", f"{node:02x}" * 16
        self.offset_ns = offset_ns
        ahead = offset_ns or 0
        self.rings = [
            SentRing(node * 10 + number, host=self.host, pid=pid + number, steps=steps, anchor_wall_ns=10_000 + ahead)
            for number in range(rings)
        ]
        self.files = {
            "events.jsonl": self._lines(4, ahead, event="warning", message="m"),
            "samples.jsonl": self._lines(5, ahead, kind="host", node=self.host, cpu_percent=1.5),
            "stacks.jsonl": self._lines(
                2, ahead, rank=9, pid=pid, step=1, phase="other", frames=[{"file": "f", "line": 1, "function": "g"}]
            ),
            "logs/main.log": [f"line {n} of {self.host}\n".encode() for n in range(5)],
        }
        self.error = {
            "schema": 1,
            "rank": node * 10,
            "pid": pid,
            "type": "E",
            "message": "m",
            "wall_ns": 10_500 + ahead,
        }
        self.sent = 0

    def _lines(self, count: int, ahead: int, **fields: Any) -> list[bytes]:
        wall = [10_000 + ahead + 10 * n + self.node for n in range(count)]
        return [json.dumps({"wall_ns": at, **fields}).encode() + b"\n" for at in wall]

    def frame(self, parts: Sequence[Part], *, bye: bool = False) -> bytes:
        self.sent += 1
        outcome = {"exit_code": 0, "status": "finished"} if bye else None
        head = FrameHead(
            node=self.node,
            spool=self.spool,
            sent_wall_ns=self.sent,
            offset_ns=self.offset_ns,
            rtt_ns=2,
            bye=outcome,
        )
        return pack_frame(head, parts)

    def sidecars(self, *, ended: bool = False) -> Part:
        abouts = [ring.ended if ended else ring.about for ring in self.rings]
        return part_of("rings", json.dumps([about.to_dict() for about in abouts]).encode())

    def block(self, first: Sequence[int], last: Sequence[int]) -> Part:
        rows = [ring.rows(a, b) for ring, a, b in zip(self.rings, first, last, strict=True)]
        return part_of("steps", pack_block(rows))

    def stretch(self, name: str, first: int, last: int) -> Part:
        lines = self.files[name]
        offset = sum(map(len, lines[:first]))
        return part_of(
            "log" if name.startswith("logs") else "lines", b"".join(lines[first:last]), name=name, offset=offset
        )

    def error_part(self) -> Part:
        return part_of("file", json.dumps(self.error).encode(), name=f"errors/{self.error['pid']}.json")

    def everything(self) -> bytes:
        """All of it in one frame."""
        steps = [len(ring.groups) for ring in self.rings]
        lines = [self.stretch(name, 0, len(own)) for name, own in self.files.items()]
        block = self.block([0] * len(steps), steps)
        return self.frame([self.sidecars(), block, *lines, self.error_part(), self.sidecars(ended=True)], bye=True)


@pytest.fixture
def sender() -> type[Sender]:
    return Sender


@pytest.fixture
def send() -> Callable[..., Any]:
    """Hand frames to an inbox as the hub does."""

    def send(inbox: Inbox, *raws: bytes) -> Any:
        accepted = None
        for raw in raws:
            accepted = inbox.accept(read_frame(raw), raw)
        return accepted

    return send


@pytest.fixture
def inbox(paths: RunPaths) -> Iterator[Inbox]:
    inbox = Inbox(paths.run_dir)
    yield inbox
    inbox.close()


@pytest.fixture
def plain() -> Callable[[RunData], dict[str, Any]]:
    """A run as values that can be compared."""

    def plain(data: RunData) -> dict[str, Any]:
        values = {**vars(data), "meta": {**data.meta, "sealed": None}}
        values["ranks"] = [
            {
                **vars(rank),
                "steps": [rows.tobytes() for rows in records_of(rank)],
                "comm": None if rank.comm is None else rank.comm.tobytes(),
                "collectives": None if rank.collectives is None else rank.collectives.tobytes(),
            }
            for rank in data.ranks
        ]
        return values

    return plain
