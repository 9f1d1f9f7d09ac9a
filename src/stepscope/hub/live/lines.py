"""Lines from agents: events, parsed on arrival; samples, stacks and layers, parsed only on request.  Noted values.

A hundred thousand ranks make more samples a second than one process can parse.  The newest samples and stacks are kept
as raw bytes, by node, and the rules read only the few nodes whose ranks they judge.  Parsing a line shifts its wall
times by the node's offset, onto the hub's clock.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.layers import FIRST_SHARED_STEP, SHARED_STEPS
from stepscope.records.series import SEEN_EVENT, logged_by_script, note_event, noted_health, noted_numbers
from stepscope.records.steps import NOTE_SLOT, SEEN
from stepscope.store.live.sample_files import Thinner, strides
from stepscope.store.paths import EVENTS as EVENTS_FILE
from stepscope.store.paths import LAYERS, SAMPLES
from stepscope.store.sealed.sample_source import whose_of

__all__ = ["LayerLines", "Line", "Lines", "Noted", "Raw", "of_kind", "parse_raw"]

Line = bytes | dict[str, Any]
"""A line as received; or of a finished run, whose lines were parsed when it was loaded, the record itself."""
Raw = tuple[str, Line, int]
"""A line, its node, and how far the node's clock is ahead."""

EVENTS = 20_000
KEPT_BYTES = 48 << 20
"""The limit for samples and stacks together."""
MOST_OF_NODE = 20_000
"""The limit for samples from one node: every evaluation of the rules and every curve on the page scans them all."""
LINE_BYTES = 64 << 10
"""Agents send no longer line."""
LAYERS_KEPT_BYTES = 8 << 20
"""The same for layers, which every evaluation of the rules parses."""
LAYERS_LINE_BYTES = 2 << 20
MOST_MODELS = 64
LARGEST_STRIDE = SHARED_STEPS << 24
_LAYER_HEAD = re.compile(
    rb'\{(?:"rank":\d+,"attempt":\d+,(?:"pid":\d+,)?)?'
    rb'"kind":"(?:model","model":"(?P<model>[0-9a-f]{1,64})"|sample","step":(?P<step>\d{1,18}),)'
)
_OVERHEAD = 64
_STRETCHES = range(63)
"""Lengths of a stretch of time, as powers of two in nanoseconds."""
_WALLS = ("wall_ns", "started_wall_ns", "ended_wall_ns")


class Lines:
    def __init__(
        self,
        *,
        events: int = EVENTS,
        most_bytes: int = KEPT_BYTES,
        most_of_node: int = MOST_OF_NODE,
        layers: LayerLines | None = None,
    ) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=events)
        self.events_seen = 0
        """Count of all events received; the number of the last one."""
        self.bad = 0
        self.dropped = 0
        """Samples and stacks dropped for lack of room."""
        self._most_bytes = most_bytes
        self.most_of_node = most_of_node
        self._bytes = 0
        self._lines: dict[tuple[str, str], deque[tuple[Line, int]]] = {}
        self._order: deque[tuple[str, str]] = deque()
        self.layers = LayerLines() if layers is None else layers

    def put(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None:
        if file == EVENTS_FILE:
            self._put_events(lines, node, offset_ns)
            return
        if file == LAYERS:
            self.layers.put(lines, node=node, offset_ns=offset_ns)
            return
        key = (file, node)
        fitting = [(line, offset_ns) for line in lines if len(line) <= LINE_BYTES]
        self._lines.setdefault(key, deque()).extend(fitting)
        self._order.extend(itertools.repeat(key, len(fitting)))
        self._bytes += sum(len(line) + _OVERHEAD for line, _ in fitting)
        while file == SAMPLES and len(self._lines[key]) > self.most_of_node:
            self._thin(key)
        while self._bytes > self._most_bytes:
            oldest, _ = self._lines[self._order.popleft()].popleft()
            self._bytes -= len(oldest) + _OVERHEAD
            self.dropped += 1

    def put_records(self, file: str, records: Sequence[dict[str, Any]], *, node: str) -> None:
        """Take the records of a finished run: events, samples or stacks, which are thinned already."""
        if file == EVENTS_FILE:
            for record in records:
                self._put_event(record, node)
        else:
            self._lines.setdefault((file, node), deque()).extend((record, 0) for record in records)

    def _thin(self, key: tuple[str, str]) -> None:
        """Thin the older half of a node's lines, evenly in time for each source: older data becomes coarser.

        One line in each stretch of time stays, so lines that were thinned before are spared until the others are as
        far apart.
        """
        lines = self._lines[key]
        older = [lines.popleft() for _ in range(len(lines) // 2)]
        numbers: Counter[Hashable] = Counter()
        at: list[tuple[Hashable, int]] = []
        for line, _ in older:
            source, wall_ns = _source_and_time(line)
            numbers[source] += 1
            at.append((source, numbers[source] if wall_ns is None else wall_ns))
        enough = len(older) * 2 // 3
        bits = bisect_left(_STRETCHES, True, key=lambda bits: len({(who, when >> bits) for who, when in at}) <= enough)
        kept = []
        before: set[tuple[Hashable, int]] = set()
        for entry, (who, when) in zip(older, at, strict=True):
            if (who, when >> bits) not in before:
                before.add((who, when >> bits))
                kept.append(entry)
            else:
                self._bytes -= len(entry[0]) + _OVERHEAD
        lines.extendleft(reversed(kept))
        gone = len(older) - len(kept)
        if not gone:
            self.most_of_node *= 2  # every line has a different source: keep them all
        self._order = deque(self._without_first(key, gone))

    def _without_first(self, key: tuple[str, str], count: int) -> Iterator[tuple[str, str]]:
        for each in self._order:
            if count and each == key:
                count -= 1
            else:
                yield each

    def events(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the events after number ``after``, the oldest first; each has its ``number`` and ``node``."""
        missing = max(0, min(len(self._events), self.events_seen - after))
        start = len(self._events) - missing
        return [self._events[i] for i in range(start, min(len(self._events), start + limit))]

    def parsed(
        self, file: str, *, nodes: Collection[str] | None = None, since_wall_ns: int = 0, limit: int = 1 << 62
    ) -> list[dict[str, Any]]:
        """Return samples or stacks, by node and in order; the newest of each node if there are more than ``limit``."""
        chosen = [key for key in self._lines if key[0] == file and (nodes is None or key[1] in nodes)]
        share = max(1, limit // max(1, len(chosen)))
        found: list[dict[str, Any]] = []
        for key in chosen:
            own: list[dict[str, Any]] = []
            for line, offset_ns in reversed(self._lines[key]):
                record = _parse(line, offset_ns)
                if record is None:
                    continue
                if len(own) >= share or _wall_ns(record) < since_wall_ns:
                    break
                own.append(record)
            found += reversed(own)
        return found

    def raw(self, file: str, nodes: Collection[str]) -> Iterator[Raw]:
        """Yield node, line and offset, unparsed: for parsing in a thread."""
        for node in nodes:
            for line, offset_ns in self._lines.get((file, node), ()):
                yield node, line, offset_ns

    def nodes(self, file: str) -> list[str]:
        """List the nodes whose lines are kept."""
        return [node for name, node in self._lines if name == file]

    def newest(self, file: str, most: int) -> list[tuple[str, list[tuple[Line, int]]]]:
        """Return the last lines of each node, unparsed and the newest first, with how far its clock is ahead."""
        return [
            (node, list(itertools.islice(reversed(own), most)))
            for (name, node), own in self._lines.items()
            if name == file
        ]

    def last(self, file: str, node: str, kind: str, *, among: int) -> dict[str, Any] | None:
        """Return the newest sample of that kind among the last ``among`` lines of a node."""
        mark = b'"' + kind.encode() + b'"'
        newest = itertools.islice(reversed(self._lines.get((file, node), ())), among)
        for line, offset_ns in newest:
            record = _parse(line, offset_ns) if isinstance(line, dict) or mark in line else None
            if record is not None and record.get("kind") == kind:
                return record
        return None

    def _put_events(self, lines: Sequence[bytes], node: str, offset_ns: int) -> None:
        for line in lines:
            record = _parse(line, offset_ns) if len(line) <= LINE_BYTES else None
            if record is None:
                self.bad += 1
                continue
            self._put_event(record, node)

    def _put_event(self, record: Mapping[str, Any], node: str) -> None:
        self.events_seen += 1
        self._events.append({**record, "node": node, "number": self.events_seen})


class LayerLines:
    """Lines of ``layers.jsonl`` as received, in bounded memory: if there are too many, every second step is dropped."""

    def __init__(self, most_bytes: int = LAYERS_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._models: dict[bytes, Raw] = {}
        self._samples: deque[tuple[int, Raw]] = deque()
        self._every = 1
        """Only samples of steps that are a multiple of this above the place of the shared ones are kept."""

    def put(self, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None:
        for line in lines:
            head = _LAYER_HEAD.match(line) if len(line) <= LAYERS_LINE_BYTES else None
            if head is None:
                continue
            raw = (node, line, offset_ns)
            if head["model"] is not None:
                if len(self._models) < MOST_MODELS:
                    self._models.setdefault(head["model"], raw)
            elif self._fits(int(head["step"])):
                self._samples.append((int(head["step"]), raw))
                self._bytes += len(line) + _OVERHEAD
        while self._bytes > self._most_bytes and self._every < LARGEST_STRIDE:
            self._every = SHARED_STEPS if self._every == 1 else 2 * self._every
            first = self._samples[0][0]
            kept = [(step, raw) for step, raw in self._samples if step == first or self._fits(step)]
            self._samples = deque(kept)
            self._bytes = sum(len(raw[1]) + _OVERHEAD for _, raw in kept)

    def _fits(self, step: int) -> bool:
        return (step - FIRST_SHARED_STEP) % self._every == 0

    def raw(self, nodes: Collection[str] | None = None) -> list[Raw]:
        """Return the models, then the samples of these nodes, unparsed."""
        samples = [raw for _, raw in self._samples if nodes is None or raw[0] in nodes]
        return [*self._models.values(), *samples] if samples else []


def _source_and_time(line: Line) -> tuple[Hashable, int | None]:
    """Return the identity of the line's host, process, GPU or probe within its node, and its time; None if absent."""
    whose = whose_of(line)
    if whose is None:
        return None, None
    return (whose.kind, whose.pid, whose.index, whose.peer), whose.wall_ns if type(whose.wall_ns) is int else None


def of_kind(raw: Sequence[Raw], kind: str, span_ns: tuple[int | None, int | None], most: int) -> list[Raw]:
    """Return samples of that kind and time; beyond ``most``, some of each source.  Parses little of each."""
    mark = b'"' + kind.encode() + b'"'
    first, last = span_ns[0] or 0, span_ns[1]
    found: list[tuple[Hashable, int, Raw]] = []
    for node, line, offset_ns in raw:
        whose = whose_of(line) if isinstance(line, dict) or mark in line else None
        if whose is None or whose.kind != kind:
            continue
        wall_ns = whose.wall_ns - offset_ns if type(whose.wall_ns) is int else 0
        if first <= wall_ns and (last is None or wall_ns <= last):
            sample = (node, line, offset_ns)
            found.append(((node, whose.pid, whose.index, whose.peer), whose.seconds, sample))
    if len(found) <= most:
        return [sample for _, _, sample in found]
    thinner: Thinner[Raw] = Thinner(strides(Counter(span_s for _, span_s, _ in found), most))
    for source, span_s, sample in found:
        thinner.add(source, span_s, sample)
    return thinner.chosen()


def parse_raw(raw: Sequence[Raw]) -> list[dict[str, Any]]:
    """Parse lines.  ``node`` becomes the node's name in the run; ``host`` is the node's own name for itself."""
    parsed = ((node, _parse(line, offset_ns)) for node, line, offset_ns in raw)
    return [{**record, "host": record.get("node"), "node": node} for node, record in parsed if record is not None]


def _parse(line: Line, offset_ns: int) -> dict[str, Any] | None:
    if isinstance(line, dict):
        return line
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


# -- noted values -----------------------------------------------------------------------------------------------------
# The numbers that the script gave to ``stepscope.note()``, by name over steps, in bounded memory: when a curve is full,
# pairs of its bins are merged.

MOST_NAMES = 24
CURVE_ROOM = 2048
HEALTH_ROOM = 4096
"""The newest losses and gradient norms, which the rules judge."""


class Noted:
    def __init__(self, room: int = CURVE_ROOM) -> None:
        self._room = room
        self._curves: dict[str, tuple[int, dict[int, tuple[float, int]]]] = {}
        """By name, steps per bin, and by bin the sum of its values and their number."""
        self.left_out: set[str] = set()
        """Names beyond the limit, some of them."""
        self.health: deque[dict[str, Any]] = deque(maxlen=HEALTH_ROOM)
        """Notes with a loss or a gradient norm, as events."""
        self.seen: deque[dict[str, Any]] = deque(maxlen=HEALTH_ROOM)
        """The same as the recorder saw it."""
        self.not_finite = False
        """Whether any of these values was NaN or infinite."""

    def clear(self) -> None:
        self._curves.clear()
        self.left_out.clear()
        self.health.clear()
        self.seen.clear()
        self.not_finite = False

    def add(self, step: int, values: Mapping[str, float], *, seen: bool = False) -> None:
        """Add the values of one rank at a step; ``seen``: by the recorder, not noted by the script."""
        for plain, value in values.items():
            name = SEEN + plain if seen else plain
            if name not in self._curves and len(self._curves) >= MOST_NAMES:
                self.left_out = {*list(self.left_out)[:MOST_NAMES], name}
                continue
            span, bins = self._curves.get(name, (1, {}))
            while True:
                total, count = bins.get(step // span, (0.0, 0))
                if count or len(bins) < self._room:
                    break
                merged: dict[int, tuple[float, int]] = {}
                for at, (own, many) in bins.items():
                    before, number = merged.get(at // 2, (0.0, 0))
                    merged[at // 2] = before + own, number + many
                span, bins = span * 2, merged
            bins[step // span] = total + value, count + 1
            self._curves[name] = span, bins

    def take(self, slots: NDArray[np.uint8], whose: Sequence[tuple[int, int]]) -> None:
        """Add the notes in received slots, [n, 256], with the rank and the process that each is from."""
        for slot, (rank, pid) in zip(slots, whose, strict=True):
            _, _, _, step, length, text = NOTE_SLOT.unpack(slot.tobytes())
            try:
                values = msgspec.json.decode(text[:length])
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                continue
            event = {**note_event(values), "rank": rank, "pid": pid, "step": step}
            seen = event["event"] == SEEN_EVENT
            self.add(step, noted_numbers(event), seen=seen)
            if values := noted_health(event):
                self.not_finite = self.not_finite or not all(map(math.isfinite, values.values()))
                (self.seen if seen else self.health).append(event)

    def latest(self) -> dict[str, float]:
        """Return the newest value of each name, the mean over the ranks; the names are those of ``curves``."""
        own = logged_by_script(self.names())
        found = {}
        for stored, (_, bins) in self._curves.items():
            name = stored.removeprefix(SEEN)
            if bins and (name == stored or name not in own):
                total, count = bins[max(bins)]
                found[name] = total / count
        return found

    def names(self) -> list[str]:
        """The names of what the script noted itself."""
        return [name for name in self._curves if not name.startswith(SEEN)]

    def curves(self, first: int, last: int, bins: int) -> list[dict[str, Any]]:
        """Return ``name``, ``step`` (the first of each bin) and ``value`` (the mean over ranks and steps) of each.

        What the recorder saw is shown unless the script notes the same itself.
        """
        found = []
        own = logged_by_script(self.names())
        for stored, (span, bins_of) in self._curves.items():
            name = stored.removeprefix(SEEN)
            if name != stored and name in own:
                continue
            inside = sorted(at for at in bins_of if first <= at * span + span - 1 and at * span <= last)
            size = max(1, -(-len(inside) // max(1, bins)))
            groups = [inside[at : at + size] for at in range(0, len(inside), size)]
            sums = [[sum(bins_of[at][place] for at in group) for place in (0, 1)] for group in groups]
            found.append(
                {
                    "name": name,
                    "step": [group[0] * span for group in groups],
                    "value": [total / count for total, count in sums],
                }
            )
        return found
