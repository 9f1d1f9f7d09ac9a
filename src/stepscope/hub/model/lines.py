"""What agents said in lines: events, parsed as they come; samples and stacks, parsed only when somebody asks.

A hundred thousand ranks make more samples a second than one process can parse.  Of those, and of stacks, the newest
are kept as the bytes they came as, by node, and the rules look at the few nodes whose ranks they judge.  Wall clocks
are shifted by the node's offset, onto the hub's clock, when a line is parsed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

__all__ = ["Lines"]

EVENTS = 20_000
KEPT_BYTES = 48 << 20
"""Of samples and stacks together."""
LINE_BYTES = 64 << 10
"""A longer line is no sample of ours."""
_OVERHEAD = 64
_WALLS = ("wall_ns", "started_wall_ns", "ended_wall_ns")


class Lines:
    def __init__(self, *, events: int = EVENTS, kept_bytes: int = KEPT_BYTES) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=events)
        self.events_seen = 0
        """All that ever came; the number of the last one."""
        self.bad = 0
        self.dropped = 0
        """Samples and stacks that had to make room."""
        self._kept_bytes = kept_bytes
        self._held_bytes = 0
        self._kept: dict[tuple[str, str], deque[tuple[bytes, int]]] = {}
        self._order: deque[tuple[str, str]] = deque()

    def put(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None:
        if file == "events.jsonl":
            self._put_events(lines, node, offset_ns)
            return
        key = (file, node)
        kept = self._kept.setdefault(key, deque())
        for line in lines:
            if len(line) <= LINE_BYTES:
                kept.append((line, offset_ns))
                self._order.append(key)
                self._held_bytes += len(line) + _OVERHEAD
        while self._held_bytes > self._kept_bytes:
            oldest, _ = self._kept[self._order.popleft()].popleft()
            self._held_bytes -= len(oldest) + _OVERHEAD
            self.dropped += 1

    def events(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Those that came after number ``after``, the oldest first; each has its ``number`` and ``node``."""
        missing = max(0, min(len(self._events), self.events_seen - after))
        start = len(self._events) - missing
        return [self._events[i] for i in range(start, min(len(self._events), start + limit))]

    def parsed(
        self, file: str, *, nodes: Collection[str] | None = None, since_wall_ns: int = 0, limit: int = 1 << 62
    ) -> list[dict[str, Any]]:
        """Samples or stacks, by node and in order; of each node the newest where there are more than ``limit``."""
        chosen = [key for key in self._kept if key[0] == file and (nodes is None or key[1] in nodes)]
        share = max(1, limit // max(1, len(chosen)))
        found: list[dict[str, Any]] = []
        for key in chosen:
            own: list[dict[str, Any]] = []
            for line, offset_ns in reversed(self._kept[key]):
                record = _parse(line, offset_ns)
                if record is None:
                    continue
                if len(own) >= share or _wall_ns(record) < since_wall_ns:
                    break
                own.append(record)
            found += reversed(own)
        return found

    def raw(self, file: str, nodes: Collection[str]) -> Iterator[tuple[str, bytes, int]]:
        """Node, line and offset, unparsed: for a thread that may take its time."""
        for node in nodes:
            for line, offset_ns in self._kept.get((file, node), ()):
                yield node, line, offset_ns

    def nodes(self, file: str) -> list[str]:
        """Whose lines are kept."""
        return [node for kept, node in self._kept if kept == file]

    def last(self, file: str, node: str, kind: str, *, look_at: int) -> dict[str, Any] | None:
        """The newest sample of that kind among the last ``look_at`` lines of a node."""
        mark = b'"' + kind.encode() + b'"'
        newest = itertools.islice(reversed(self._kept.get((file, node), ())), look_at)
        for line, offset_ns in newest:
            record = _parse(line, offset_ns) if mark in line else None
            if record is not None and record.get("kind") == kind:
                return record
        return None

    def _put_events(self, lines: Sequence[bytes], node: str, offset_ns: int) -> None:
        for line in lines:
            record = _parse(line, offset_ns) if len(line) <= LINE_BYTES else None
            if record is None:
                self.bad += 1
                continue
            self.events_seen += 1
            self._events.append({**record, "node": node, "number": self.events_seen})


def parse_raw(raw: Sequence[tuple[str, bytes, int]]) -> list[dict[str, Any]]:
    return [record for _, line, offset_ns in raw if (record := _parse(line, offset_ns)) is not None]


def _parse(line: bytes, offset_ns: int) -> dict[str, Any] | None:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(record, dict):
        return None
    if offset_ns:
        for name in _WALLS:
            if type(record.get(name)) is int:
                record[name] -= offset_ns
    return record


def _wall_ns(record: dict[str, Any]) -> int:
    wall_ns = record.get("wall_ns")
    return wall_ns if isinstance(wall_ns, int) else 0
