"""Thousands of mutated frames: no crash, no 500, no memory that stays, and nothing changes but by what was taken."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from example_counts import examples

from stepscope.hub.ingest.auth import SenderLimits
from stepscope.hub.live.live_run import LiveRun
from stepscope.store.inbox.receiver import Inbox
from stepscope.wire.frames import FrameHead, Part, inflate_part, pack_frame, part_of, read_frame
from stepscope.wire.handshake import write_join
from tests.hub.gate_parts import KEY, Agent, HubProcess, Parts, bent, join_of, ring_of, rings_part, steps_part, summed

SEED = 20_260_806
MUTANTS = examples(10_000)
OVER_SOCKETS = 300
FREE = SenderLimits(frames=10**9, bytes=10**12, again=10**9, joins=10**9)
NUMBERS = (0, 1, -1, 255, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**30)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, 1.5, "", "x", [], {}, [[]], {"a": 1}, "9" * 300, "\ud800")


def samples(node: int, spool: str) -> list[bytes]:
    """Valid frames of all kinds, to begin with."""
    head = FrameHead(node=node, spool=spool, sent_wall_ns=5, offset_ns=-7, rtt_ns=1000)
    rings = [ring_of(node, rank) for rank in range(3)]
    event = json.dumps({"schema": 1, "wall_ns": 5, "event": "note", "rank": 0}).encode() + b"\n"
    return [
        pack_frame(head, [rings_part(*rings)]),
        pack_frame(head, [rings_part(*rings), *(steps_part(ring, 0, 4) for ring in rings)]),
        pack_frame(head, [steps_part(rings[0], 4, 2)]),
        pack_frame(
            head, [part_of("lines", event * 3, name="events.jsonl"), part_of("lines", event, name="samples.jsonl")]
        ),
        pack_frame(
            head, [part_of("log", b"hello\n", name="logs/rank-0.log"), part_of("file", b"{}", name="errors/1.json")]
        ),
        pack_frame(FrameHead(node=node, spool=spool, sent_wall_ns=6, bye={"exit_code": 0}), []),
        pack_frame(head, []),
    ]


class Mutator:
    """Bends bytes, headers, and what is packed inside; most of the time with a checksum that is right."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.kinds: tuple[Callable[[bytes], bytes], ...] = (
            self.flip,
            self.cut,
            self.grow,
            self.splice,
            self.head,
            self.head,
            self.part_head,
            self.part_head,
            self.inside,
            self.inside,
            self.inside,
        )

    def __call__(self, frame: bytes) -> bytes:
        for _ in range(self.random.choice((1, 1, 2, 3))):
            frame = self.random.choice(self.kinds)(frame)
        return summed(frame) if len(frame) > 12 and self.random.random() < 0.9 else frame

    def flip(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        for _ in range(self.random.choice((1, 2, 8))):
            if data:
                data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data)

    def cut(self, frame: bytes) -> bytes:
        return frame[: self.random.randrange(len(frame) + 1)]

    def grow(self, frame: bytes) -> bytes:
        return frame + self.random.randbytes(self.random.choice((1, 7, 300)))

    def splice(self, frame: bytes) -> bytes:
        at, size = self.random.randrange(len(frame) + 1), self.random.randrange(60)
        return frame[:at] + frame[at + self.random.randrange(size + 1) :] + frame[at : at + size]

    def head(self, frame: bytes) -> bytes:
        def change(said: dict[str, Any]) -> None:
            key = self.random.choice(("node", "spool", "sent_wall_ns", "offset_ns", "rtt_ns", "bye", "parts", "more"))
            said[key] = self.random.choice(VALUES)

        return self._bent(frame, change)

    def part_head(self, frame: bytes) -> bytes:
        def change(said: dict[str, Any]) -> None:
            part = self.random.choice(said["parts"])
            key = self.random.choice(("kind", "bytes", "size", "name", "offset", "more"))
            names = ("steps", "rings", "lines", "log", "file", "events.jsonl", "logs/a.log", "errors/../a.json", "../a")
            part[key] = self.random.choice((*VALUES, *names, part.get("size"), part.get("bytes")))

        return self._bent(frame, change)

    def inside(self, frame: bytes) -> bytes:
        """What is packed, unpacked, bent and packed again."""
        try:
            read = read_frame(summed(frame))
            parts = [self._part(part) for part in read.parts]
            return pack_frame(read.head, parts)
        except Exception:  # noqa: BLE001  # bent too much before
            return frame

    def _part(self, part: Part) -> Part:
        if part.kind == "steps":
            raw = bytearray(zlib.decompress(part.data[20:]))
            for _ in range(self.random.choice((0, 1, 4))):
                raw[self.random.randrange(min(len(raw), 200))] = self.random.randrange(256)
            packed = zlib.compress(bytes(raw))
            counts = struct.unpack_from("<II", part.data, 8)
            if self.random.random() < 0.2:
                counts = (self.random.choice((0, 1, 4096, 5000)), self.random.choice((0, 12, 65_536, 1 << 30)))
            data = part.data[:8] + struct.pack("<III", *counts, len(packed)) + packed
            return Part(kind="steps", data=data, size=len(data))
        raw_text = inflate_part(part)
        if part.kind == "rings" and self.random.random() < 0.7:
            raw_text = json.dumps(self._bend(json.loads(raw_text))).encode()
        else:
            raw_text = self.flip(raw_text)
        return part_of(part.kind, raw_text, name=part.name, offset=part.offset)

    def _bend(self, said: Any) -> Any:
        """One value, somewhere deep in it, replaced."""
        if isinstance(said, dict) and said and self.random.random() < 0.8:
            key = self.random.choice(sorted(said))
            return {**said, key: self._bend(said[key])}
        if isinstance(said, list) and said and self.random.random() < 0.9:
            at = self.random.randrange(len(said))
            return [*said[:at], self._bend(said[at]), *said[at + 1 :]]
        return self.random.choice(VALUES)

    def _bent(self, frame: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
        try:
            return bent(frame, change)
        except (ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError):
            return frame


def state_of(parts: Parts, spool: str) -> tuple[Any, ...]:
    """Everything that a frame could change, and that a refused one must not."""
    figures = parts.ingest.figures
    journal = (parts.run_dir / "inbox" / "000001.frames").stat().st_size
    return parts.inbox.positions(spool), figures.frames, figures.rows, figures.duplicates, journal


@pytest.mark.seeds
def test_ten_thousand_mutants(tmp_path: Path) -> None:
    parts = Parts(tmp_path, limits=FREE)
    live = LiveRun(name="night")
    parts.ingest._live = live
    chance = random.Random(SEED)
    mutate = Mutator(chance)
    found: Counter[int] = Counter()

    async def attack() -> None:
        for turn in range(MUTANTS):
            if turn % 500 == 0:  # another node: what the last one had taken would hide what comes
                join = join_of(turn // 500, run="night")
                token = parts.welcome(join).token
                valid = samples(join.node, join.spool)
                headers = {"Authorization": f"Bearer {token}"}
                before = state_of(parts, join.spool)
            status, said, _ = await parts.ask("frames", mutate(chance.choice(valid)), headers)
            found[status] += 1
            if status == 200:
                before = state_of(parts, join.spool)
            else:
                assert ("positions" in said) if status == 409 else isinstance(said["why"], str)
                assert state_of(parts, join.spool) == before
            if turn % 100 == 0:
                live.tick()

    memory = psutil.Process().memory_info
    before_bytes = memory().rss
    asyncio.run(attack())
    assert memory().rss - before_bytes < 96 << 20
    parts.close()
    assert set(found) <= {200, 400, 403, 409}
    assert found.total() == MUTANTS
    assert min(found[status] for status in (200, 400, 403, 409)) > MUTANTS // 500, found
    assert parts.refusals.by_reason()["frame"] == found[400]
    inbox = Inbox(tmp_path)
    for node in inbox.nodes():
        had, has = parts.inbox.positions(node.spool), inbox.positions(node.spool)
        assert (has.rings, has.files.keys()) == (had.rings, had.files.keys()), "all that was taken can be read again"
    inbox.close()
    inside = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert inside <= {"inbox", "logs", "errors", "hangs", "flight", "nodes.json"}


def test_mutants_of_joins(tmp_path: Path) -> None:
    parts = Parts(tmp_path, limits=FREE)
    chance = random.Random(SEED)
    mutate = Mutator(chance)
    for _ in range(300):
        join = parts.challenged(join_of(3))
        bearer = {"Authorization": f"Bearer {join.challenge}"}
        body, proof = write_join(join, KEY, b"")
        sent = mutate.flip(body) if chance.random() < 0.5 else mutate.cut(body)
        assert parts.asked("join", sent, {"X-Stepscope-Proof": proof, **bearer}) in (403, 200 if sent == body else 403)
        mangled = mutate.flip(proof.encode()).decode("latin-1").replace("\n", "")
        assert parts.asked("join", body, {"X-Stepscope-Proof": mangled, **bearer}) in (
            403,
            200 if mangled == proof else 403,
        )
    parts.close()


@pytest.mark.faults
def test_mutants_over_sockets(tmp_path: Path) -> None:
    """The same on a real hub, whose process must neither die, nor fail, nor grow."""
    chance = random.Random(SEED + 1)
    mutate = Mutator(chance)
    hub = HubProcess(tmp_path / "run", limits={"senders": {"frames": 10_000}})
    with Agent(hub, 1) as bad, Agent(hub, 2) as good:
        valid = samples(1, bad.join.spool)
        before = hub.rss_bytes()
        for turn in range(OVER_SOCKETS):
            assert bad.send(mutate(chance.choice(valid)))[0] in (200, 400, 403, 409)
            assert turn % 20 or good.send()[0] == 200
        assert hub.rss_bytes() - before < 32 << 20
        assert hub.counters()["refused"]["fault"] == 0
    assert hub.stop() == ""
