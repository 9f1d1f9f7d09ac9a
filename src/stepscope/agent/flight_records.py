"""Turns dumps of NCCL's Flight Recorder into the COMM and COLLECTIVE records of a rank's steps.

Every dump holds the last entries of a ring buffer in the rank. Each entry has an increasing number (``record_id``), the
wall-clock time of its call and, shortly after it ended, how long its kernel took on NCCL's stream. Dumps overlap; new
entries are kept until the steps that called them were drained from the ring and all their collectives are over. Then
the step's records are made, in the same form as gloo's (``records/collectives.py``), with FLAG_DEVICE.

If an entry of a step was overwritten before it was read, the step gets no times at all, because a partial sum is worse
than none: a single row with FLAG_MISSED says so. The same applies if only some collectives of a kind have a time. A
kind without any times (a group without timing) is left out and does not affect the rest.

In a coalesced call each operation has an entry without times, and a last one, ``coalesced``, has the times of all. They
share a sequence number and count as one collective here.

Dumps are untrusted input: they are decoded into bounded fields, and only complete dumps count.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Annotated

import msgspec

from stepscope.flight.dump import operation_name, parse_ranks
from stepscope.records.collectives import (
    FLAG_DEVICE,
    FLAG_MISSED,
    MAX_GROUPS,
    OPS,
    PHASE_SHIFT,
    ProcessGroup,
    group_kind,
    kept_by_itself,
)
from stepscope.records.steps import (
    COLLECTIVE,
    COLLECTIVE_ENTRIES,
    COLLECTIVE_ENTRY,
    COMM_ENTRIES,
    COMM_ENTRY,
    COMM_RECORD,
    STEP,
    STEP_HEAD,
)
from stepscope.ring.decoder import MAX_CALLS_KEPT, pack_entries

__all__ = ["Dump", "FlightRecords", "RecordLimits", "read_dump"]

COALESCED = "coalesced"
OTHERS = ("gloo", "mpi", "ucc")
"""Backends whose recorders answer instead of NCCL's in torch versions that do not distinguish recorders."""
SHARED = MAX_GROUPS - 1
"""The slot shared by groups that came too late for a separate one (as in the recorder)."""
FIRST_FOUND = MAX_GROUPS // 2
"""Groups that only the Flight Recorder knows get slots from the end down to this one; the rank's start at 0."""
NAME_CHARS = 80
PATIENCE_NS = 60_000_000_000
"""How long after a step's end a missing time may still arrive."""
CLOCK_STEP_NS = 50_000_000
"""If the wall clock moved by more than this against the rings' clock, it was set."""
DOUBT_NS = 1_000_000_000
"""The time of an entry is invalid if it is this long before the previous entry or after the dump's arrival."""
MOST_NS = 1 << 50
MOST_BYTES = (1 << 55) - 1
U32 = (1 << 32) - 1
_MISSED = COMM_ENTRY.pack(0, SHARED, FLAG_MISSED, 0, 0, 0, 0)

_WIDTHS = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "UInt16": 2, "UInt32": 4, "UInt64": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes per element by torch's type name. The eight-bit floats, and new types, count as one."""

_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, gc=False):
    """The required fields of a dump entry."""

    record_id: _Word
    profiling_name: str
    time_created_ns: _Word
    process_group: tuple[str, str] = ("", "")
    collective_seq_id: _Word = 0
    p2p_seq_id: _Word = 0
    is_p2p: bool = False
    retired: bool = False
    duration_ms: float | None = None
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []


class _Config(msgspec.Struct):
    ranks: str | list[int] = ""


class Dump(msgspec.Struct):
    pg_config: dict[str, _Config] = {}
    entries: list[Entry] = []


_DECODER = msgspec.json.Decoder(Dump)


def read_dump(body: bytes) -> Dump | None:
    """Return a dump with its entries in order; None if it is invalid. A dump of another backend counts as empty."""
    try:
        dump = _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None
    if dump.entries and operation_name(dump.entries[0].profiling_name)[0] in OTHERS:
        return Dump()
    dump.entries.sort(key=lambda entry: entry.record_id)
    return dump


class _Call:
    """One collective, which may be several operations under one sequence number."""

    __slots__ = ("created", "key", "lost", "ns", "nth", "op", "over", "size", "slot")

    def __init__(self, key: tuple[str, bool, int], slot: int, op: int, size: int, nth: int, created: int) -> None:
        self.key, self.slot, self.op, self.size, self.nth, self.created = key, slot, op, size, nth, created
        self.ns = -1
        """Its duration; -1 if unknown."""
        self.over = False
        """Whether no more information will come."""
        self.lost = False
        """Whether it was overwritten before it was over."""


@dataclass(frozen=True, kw_only=True)
class RecordLimits:
    """How much of each sort waits for something that may never come."""

    calls: int = 200_000
    steps: int = 50_000
    changes: int = 100_000
    """Changes of phase."""
    gaps: int = 1_000


class FlightRecords:
    """Combines the dumps and steps of one rank."""

    def __init__(
        self,
        *,
        known: Callable[[], Sequence[ProcessGroup]],
        found: Iterable[ProcessGroup] = (),
        world_size: int = 0,
        limits: RecordLimits | None = None,
    ) -> None:
        """``said`` returns the groups that the rank itself knows; ``found`` are those that an earlier agent added."""
        self._known_groups = known
        self._limits = limits or RecordLimits()
        self._world_size = world_size
        self.found = list(found)
        """Groups that only the Flight Recorder knows."""
        self.last_id = -1
        """The number of the last entry that was seen."""
        self._last_time_ns = -1
        """The time of that entry as given. It shows whether the recorder was reset in the meantime."""
        self._slots: dict[str, tuple[int, int]] = {}
        """Slot and size of groups with a separate slot, by shortened name."""
        self._known_now: Sequence[ProcessGroup] | None = None
        """Fetched once per dump, and only if the dump has a new group."""
        self._calls: deque[_Call] = deque()
        """Calls that no step has claimed yet, in order."""
        self._open: dict[int, _Call] = {}
        """Calls that are not over, by the number of their entry."""
        self._by_key: dict[tuple[str, bool, int], _Call] = {}
        self._steps: deque[tuple[int, int, int]] = deque()
        """Number, start and end of steps that have no records yet."""
        self._last_step = self._earlier = -1
        self._read_ns = -1
        """Everything called before this time is either known or overwritten."""
        self._last_created = -1
        self._hole = False
        """Something after ``_last_created`` was lost. The next entry shows until when."""
        self._wall_offset_ns: int | None = None
        self._gaps: list[tuple[int, int]] = []
        """Periods whose entries were overwritten before they were read; sorted and disjoint."""
        self._changes_at: list[int] = []
        self._changes_to: list[int] = []
        self._ready: deque[tuple[int, int, list[bytes], int]] = deque()
        """Kind, step, entries, and how many entries a record holds."""

    # -- input ----------------------------------------------------------------------------------------------------

    def see_steps(self, slots: Iterable[bytes]) -> None:
        """Take the steps from ring records as they were written."""
        for slot in slots:
            kind, step, start_ns, wall_ns = STEP_HEAD.unpack_from(slot)
            if kind == STEP and step > self._last_step:
                self._last_step = step
                self._steps.append((step, start_ns, start_ns + wall_ns))
        while len(self._steps) > self._limits.steps:
            step = self._steps.popleft()[0]
            if self.last_id >= 0 and step > self._earlier:  # there is a recorder, but it no longer answers
                self._ready.append((COMM_RECORD, step, [_MISSED], COMM_ENTRIES))

    def see_earlier_steps(self, slots: Iterable[bytes]) -> None:
        """Take steps from before we started; an earlier agent may have handled what is missing there."""
        self.see_steps(slots)
        self._earlier = self._last_step

    def see_phases(self, changes: Sequence[tuple[int, int]]) -> None:
        """Take the times at which the rank entered phases, in steps whose collectives are kept individually."""
        self._changes_at += [at for at, _ in changes]
        self._changes_to += [phase for _, phase in changes]
        if len(self._changes_at) > self._limits.changes:  # no step ends
            half = self._limits.changes // 2
            del self._changes_at[:-half], self._changes_to[:-half]

    def take(self, dump: Dump, *, sent_ns: int, wall_offset_ns: int, heard_ns: int | None = None) -> int:
        """Take a dump that was requested at ``asked_ns`` (monotonic) and arrived at ``heard_ns``.

        ``wall_offset_ns`` is how far wall clocks are ahead of that. Return how many entries were new.
        """
        entries = dump.entries
        before_ns, self._wall_offset_ns = self._wall_offset_ns, wall_offset_ns
        self._known_now = None
        if not entries:
            if self.last_id < 0:
                self._read_ns = sent_ns
                self.settle()
            return 0
        heard_ns = sent_ns if heard_ns is None else max(heard_ns, sent_ns)
        first, last = entries[0], entries[-1]
        if last.record_id < self.last_id or self._is_another(entries):  # the recorder was reset
            self._abandon()
            self._hole = True
            self.last_id = -1
        elif first.record_id > self.last_id + 1:
            self._hole = True
        for number in [number for number in self._open if number < first.record_id]:
            call = self._open.pop(number)
            call.lost = call.lost or not call.over
            call.over = True
        if before_ns is not None and abs(wall_offset_ns - before_ns) > CLOCK_STEP_NS:
            new = self._pass(entries, heard_ns)
        else:
            new = self._add(dump, wall_offset_ns, heard_ns + DOUBT_NS)
            if self._hole:
                self._lose(self._last_created, heard_ns)
        self._read_ns, self._last_time_ns = sent_ns, last.time_created_ns
        if len(self._calls) > self._limits.calls:  # no step claims them
            first_ns = self._calls[0].created
            while len(self._calls) > self._limits.calls:
                self._forget(self._calls.popleft())
            self._lose(first_ns, self._calls[0].created)
        self.settle()
        return new

    def _is_another(self, entries: Sequence[Entry]) -> bool:
        """Return whether a different entry now has the number of the last one that was seen."""
        at = bisect_right(entries, self.last_id, key=lambda entry: entry.record_id) - 1
        return at >= 0 and entries[at].record_id == self.last_id and entries[at].time_created_ns != self._last_time_ns

    def _pass(self, entries: Sequence[Entry], heard_ns: int) -> int:
        """Skip new and open entries after the clock was set, because they may be from before or after that."""
        new = sum(entry.record_id > self.last_id for entry in entries)
        self._abandon()
        self._lose(self._last_created, heard_ns)
        self._last_created, self._hole = max(self._last_created, heard_ns), False
        self.last_id = max(self.last_id, entries[-1].record_id)
        return new

    def _add(self, dump: Dump, wall_offset_ns: int, latest_ns: int) -> int:
        over: dict[str, int] = {}
        """The last retired entry by group: those before it are over as well."""
        last_id, new = self.last_id, 0
        for entry in dump.entries:
            number, name = entry.record_id, entry.process_group[0][:NAME_CHARS]
            if entry.retired and not entry.is_p2p:  # sends to different peers may overtake each other
                over[name] = number
            if number > last_id:
                last_id, new = number, new + 1
                created_ns = entry.time_created_ns - wall_offset_ns
                if not self._last_created - DOUBT_NS <= created_ns <= latest_ns:
                    self._hole = True
                    continue
                if self._hole:
                    self._lose(self._last_created, created_ns)
                    self._hole = False
                self._last_created = max(self._last_created, created_ns)
                call = self._meet(entry, dump, created_ns)
                self._open[number] = call
            elif (known := self._open.get(number)) is not None:
                call = known
            else:
                continue
            if entry.retired or entry.duration_ms is not None:
                if entry.duration_ms is not None and entry.duration_ms >= 0:
                    call.ns = round(min(entry.duration_ms, MOST_NS / 1e6) * 1e6)
                call.over = True
                self._open.pop(number, None)
        for number, call in list(self._open.items()):
            if call.over or (not call.key[1] and number < over.get(call.key[0], -1)):
                call.over = True  # an operation of a coalesced call, or one captured into a CUDA graph
                del self._open[number]
        self.last_id = last_id
        return new

    def _meet(self, entry: Entry, dump: Dump, created_ns: int) -> _Call:
        """Return the call of a new entry; for a coalesced one, the existing call."""
        name, description = entry.process_group
        nth = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
        key = name[:NAME_CHARS], entry.is_p2p, nth
        word, op = _operation(entry.profiling_name)
        slot, ranks = self._slot(name, description, dump)
        size = _payload(op, entry, ranks)
        known = self._by_key.get(key) if nth else None
        if known is not None and not known.over:
            if word != COALESCED:
                known.op = op if known.op in (op, _COALESCED_ALONE) else 0
                known.size = min(known.size + size, MOST_BYTES)
            elif known.op == _COALESCED_ALONE:
                known.op = 0
            return known
        call = _Call(key, slot, _COALESCED_ALONE if word == COALESCED else op, size, nth & U32, created_ns)
        self._calls.append(call)
        self._by_key[key] = call
        return call

    def _slot(self, name: str, description: str, dump: Dump) -> tuple[int, int]:
        """Return the slot and the number of ranks of a group, given its name."""
        short = name[:NAME_CHARS]
        if short in self._slots:
            return self._slots[short]
        if self._known_now is None:
            self._known_now = self._known_groups()
        known = self._known_now
        group = next((candidate for candidate in (*known, *self.found) if candidate.name == short), None)
        if group is None:
            taken = {candidate.slot for candidate in (*known, *self.found)}
            slot = next((free for free in range(SHARED - 1, FIRST_FOUND - 1, -1) if free not in taken), SHARED)
            group = self._group(slot, short, description[:NAME_CHARS], dump.pg_config.get(name))
            if slot != SHARED:
                self.found.append(group)
        if group.slot != SHARED:
            self._slots[short] = group.slot, group.size
        return group.slot, group.size

    def _group(self, slot: int, name: str, description: str, config: _Config | None) -> ProcessGroup:
        ranks = parse_ranks(config.ranks) if config is not None else ()
        kind = group_kind(description)
        if kind == "other" and len(ranks) == self._world_size:
            kind = "world"
        return ProcessGroup(
            slot=slot, name=name, description=description, kind=kind, backend="nccl", ranks=ranks, size=len(ranks)
        )

    def _lose(self, from_ns: int, to_ns: int) -> None:
        """Note a gap. Merge it with gaps that it touches, and merge the oldest ones if there are too many."""
        to_ns = max(to_ns, from_ns + 1)
        first = bisect_left(self._gaps, from_ns, key=lambda gap: gap[1])
        end = bisect_right(self._gaps, to_ns, key=lambda gap: gap[0])
        if first < end:
            from_ns, to_ns = min(from_ns, self._gaps[first][0]), max(to_ns, self._gaps[end - 1][1])
        self._gaps[first:end] = [(from_ns, to_ns)]
        if len(self._gaps) > self._limits.gaps:
            half = self._limits.gaps // 2
            self._gaps[:half] = [(self._gaps[0][0], self._gaps[half - 1][1])]

    def _abandon(self) -> None:
        for call in self._open.values():
            call.lost = call.lost or not call.over
            call.over = True
        self._open.clear()

    def _forget(self, call: _Call) -> None:
        if self._by_key.get(call.key) is call:
            del self._by_key[call.key]

    # -- output ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether another dump would add anything about known calls or steps."""
        return bool(self._open or self._steps)

    def settle(self) -> None:
        """Make records of the steps about which everything is known."""
        while self._steps and self._steps[0][2] <= self._read_ns:
            step, start_ns, end_ns = self._steps[0]
            while self._calls and self._calls[0].created < start_ns:
                self._forget(self._calls.popleft())
            own = list(takewhile(lambda call: call.created < end_ns, self._calls))  # noqa: B023 - used at once
            missed = any(call.lost for call in own) or any(a < end_ns and b > start_ns for a, b in self._gaps)
            if not missed and self._read_ns - end_ns < PATIENCE_NS and not all(call.over for call in own):
                return
            missed = missed or _partly_timed(own)
            self._steps.popleft()
            for _ in own:
                self._forget(self._calls.popleft())
            self._gaps = [gap for gap in self._gaps if gap[1] > end_ns]
            if missed and step > self._earlier:
                self._ready.append((COMM_RECORD, step, [_MISSED], COMM_ENTRIES))
            elif own and not missed:
                self._make(step, own)
            self._drop_changes(end_ns)

    def records(self, seq: int, most: int) -> tuple[list[bytes], int]:
        """Return about ``most`` records with this ``seq``, and how many ready items they cover, for ``taken``."""
        slots: list[bytes] = []
        count = 0
        for kind, step, entries, size in self._ready:
            if len(slots) >= most:
                break
            slots += pack_entries(kind, step, seq, entries, size)
            count += 1
        return slots, count

    def taken(self, count: int) -> None:
        for _ in range(count):
            self._ready.popleft()

    def _make(self, step: int, own: Sequence[_Call]) -> None:
        sums: dict[tuple[int, int], list[int]] = {}
        for call in own:
            if call.ns >= 0:
                total = sums.setdefault((call.slot, max(call.op, 0)), [0, 0, 0])
                total[0] += 1
                total[1] += call.size
                total[2] += call.ns
        rows = [
            COMM_ENTRY.pack(op, slot, FLAG_DEVICE, min(count, U32), min(size, MOST_BYTES), 0, min(ns, MOST_NS))
            for (slot, op), (count, size, ns) in sums.items()
        ]
        if not rows:
            return
        self._ready.append((COMM_RECORD, step, rows, COMM_ENTRIES))
        if kept_by_itself(step):
            timed = [call for call in own if call.ns >= 0][:MAX_CALLS_KEPT]
            calls = [
                COLLECTIVE_ENTRY.pack(
                    max(call.op, 0),
                    call.slot,
                    FLAG_DEVICE | self._phase(call.created) << PHASE_SHIFT,
                    call.nth,
                    min(call.size, MOST_BYTES),
                    call.created,
                    0,
                    call.created + call.ns,
                )
                for call in timed
            ]
            self._ready.append((COLLECTIVE, step, calls, COLLECTIVE_ENTRIES))

    def _phase(self, at_ns: int) -> int:
        before = bisect_right(self._changes_at, at_ns)
        return self._changes_to[before - 1] if before else 0

    def _drop_changes(self, end_ns: int) -> None:
        before = bisect_right(self._changes_at, end_ns) - 1
        if before > 0:  # the last one gives the phase in which the next step begins
            del self._changes_at[:before], self._changes_to[:before]


_OP = {name: number for number, name in enumerate(OPS)}
_COALESCED_ALONE = -1
"""Operation of a coalesced call whose operations were never seen."""
_FROM_OUTPUT = (_OP["all_gather"], _OP["scatter"], _OP["recv"])
_OF_ALL = (_OP["gather"], _OP["scatter"])
"""For these an entry has only this rank's part."""


def _partly_timed(own: Sequence[_Call]) -> bool:
    """Return whether a sum would be partial: some of a kind have no time, or one is still not over."""
    kinds: dict[tuple[int, int], bool] = {}
    for call in own:
        timed = call.ns >= 0
        if not call.over or kinds.setdefault((call.slot, max(call.op, 0)), timed) != timed:
            return True
    return False


@lru_cache(maxsize=4096)
def _operation(wording: str) -> tuple[str, int]:
    word = operation_name(wording)[1]
    return word, _OP.get(word, 0)


def _payload(op: int, entry: Entry, ranks: int) -> int:
    """Return the bytes as ``records/collectives.py`` counts them: the same on all ranks."""
    if op == _OP["barrier"]:
        return 0
    given = (entry.input_sizes, entry.input_dtypes), (entry.output_sizes, entry.output_dtypes)
    first, second = reversed(given) if op in _FROM_OUTPUT else given
    size = _bytes(*first) or _bytes(*second)
    return min(size * max(ranks, 1) if op in _OF_ALL else size, MOST_BYTES)


def _bytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    total = 0
    for place, size in enumerate(sizes):
        width = _WIDTHS.get(dtypes[min(place, len(dtypes) - 1)], 1) if dtypes else 1
        total += max(0, math.prod(size[:16])) * width
    return total
