"""From dumps of NCCL's Flight Recorder to the COMM and COLLECTIVE records of a rank's steps.

Every dump holds the last entries of a ring buffer in the rank, each with a number (``record_id``) that counts up, the
wall clock at its call and, a moment after it was over, how long its kernel took on NCCL's stream.  Dumps overlap; what
is new is kept until the steps it was called in were drained from the ring and all of it is over.  Then the step's
records are made, in the form in which gloo's are (``records/collectives.py``), with FLAG_DEVICE.

A step of which an entry was overwritten before anybody read it has no times at all, since a part of a sum is worse than
none: one row with FLAG_MISSED says so.  The same for a step in which only some collectives of a kind have a time; a
kind of which none has one (a group without timing) is left out, and spoils nothing.

In a coalesced call each operation has an entry without times, and a last one, ``coalesced``, has the times of all.
They share the sequence number, and are one collective here.

What comes in is foreign: it is decoded into bounded fields, and nothing but a whole dump counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

__all__ = ["Dump", "FlightRecords", "read_dump"]

COALESCED = "coalesced"
OTHERS = ("gloo", "mpi", "ucc")
"""Backends whose recorders answer in the place of NCCL's in versions of torch that do not tell recorders apart."""
SHARED = MAX_GROUPS - 1
"""The slot of groups that came too late to get one of their own (as in the recorder)."""
FIRST_FOUND = MAX_GROUPS // 2
"""Groups that only the Flight Recorder knows get slots from the end down to this one; the rank's own begin at 0."""
NAME_CHARS = 80
MAX_CALLS = 200_000
MAX_STEPS = 50_000
MAX_CHANGES = 100_000
MAX_GAPS = 1_000
PATIENCE_NS = 60_000_000_000
"""So long after a step ended, what of it has no time yet never gets one."""
CLOCK_STEP_NS = 50_000_000
"""When the wall clock moved by more than this against the rings', somebody set it."""
DOUBT_NS = 1_000_000_000
"""An entry so long before the one before it, or after the dump that it came in, has no time that could be right."""
MOST_NS = 1 << 50
MOST_BYTES = (1 << 55) - 1
U32 = (1 << 32) - 1
_MISSED = COMM_ENTRY.pack(0, SHARED, FLAG_MISSED, 0, 0, 0, 0)

_WIDTHS = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "UInt16": 2, "UInt32": 4, "UInt64": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes of an element by torch's name of its type; the eight-bit floats, and what is new, have one."""

_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, gc=False):
    """Of one entry of a dump, what is needed."""

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
    """A dump, its entries in order; None for anything that is none, or is that of another backend."""
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
        """How long it took; -1: not known."""
        self.over = False
        """Nothing more will be heard of it."""
        self.lost = False
        """It was overwritten before it was over."""


class FlightRecords:
    """What one rank's dumps and steps come to."""

    def __init__(
        self, *, said: Callable[[], Sequence[ProcessGroup]], found: Iterable[ProcessGroup] = (), world_size: int = 0
    ) -> None:
        """``said``: the groups that the rank itself knows by now; ``found``: those an agent before us added."""
        self._said = said
        self._world_size = world_size
        self.found = list(found)
        """Groups that only the Flight Recorder knows."""
        self.last_id = -1
        """Of the last entry that was seen …"""
        self._last_time_ns = -1
        """… and its time as it was given, by which a recorder that was reset meanwhile is told."""
        self._slots: dict[str, tuple[int, int]] = {}
        """By the name of a group, shortened, those that have a slot of their own."""
        self._said_now: Sequence[ProcessGroup] | None = None
        """Asked once for each dump, and only when it has a group that is new."""
        self._calls: deque[_Call] = deque()
        """In order, those that no step has claimed yet."""
        self._open: dict[int, _Call] = {}
        """By the number of their entry, those that are not over."""
        self._by_key: dict[tuple[str, bool, int], _Call] = {}
        self._steps: deque[tuple[int, int, int]] = deque()
        """Number, start and end of steps that are still to be made records of."""
        self._last_step = self._earlier = -1
        self._read_ns = -1
        """What was called before this instant is known, or was overwritten."""
        self._last_created = -1
        self._hole = False
        """After ``_last_created`` something was lost; the next entry says until when."""
        self._wall_offset_ns: int | None = None
        self._gaps: list[tuple[int, int]] = []
        """From when to when entries were overwritten before they were read; in order, and apart from one another."""
        self._changes_at: list[int] = []
        self._changes_to: list[int] = []
        self._ready: deque[tuple[int, int, list[bytes], int]] = deque()
        """Kind, step, entries and how many of them a record holds."""

    # -- what comes in --------------------------------------------------------------------------------------------

    def see_steps(self, slots: Iterable[bytes]) -> None:
        """Records of the ring as they were written; those that are steps count."""
        for slot in slots:
            kind, step, start_ns, wall_ns = STEP_HEAD.unpack_from(slot)
            if kind == STEP and step > self._last_step:
                self._last_step = step
                self._steps.append((step, start_ns, start_ns + wall_ns))
        while len(self._steps) > MAX_STEPS:
            step = self._steps.popleft()[0]
            if self.last_id >= 0 and step > self._earlier:  # there is a recorder, which does not answer any more
                self._ready.append((COMM_RECORD, step, [_MISSED], COMM_ENTRIES))

    def see_earlier_steps(self, slots: Iterable[bytes]) -> None:
        """Those from before we looked: of what is missing there somebody else may have taken care."""
        self.see_steps(slots)
        self._earlier = self._last_step

    def see_phases(self, changes: Sequence[tuple[int, int]]) -> None:
        """When the rank came into which phase, in steps whose collectives are kept one by one."""
        self._changes_at += [at for at, _ in changes]
        self._changes_to += [phase for _, phase in changes]
        if len(self._changes_at) > MAX_CHANGES:  # no step ends
            del self._changes_at[: -MAX_CHANGES // 2], self._changes_to[: -MAX_CHANGES // 2]

    def take(self, dump: Dump, *, asked_ns: int, wall_offset_ns: int, heard_ns: int | None = None) -> int:
        """A dump that was asked for at ``asked_ns`` (monotonic) and came at ``heard_ns``.

        Wall clocks are ahead of that by so much.  Returns how many entries were new.
        """
        entries = dump.entries
        before_ns, self._wall_offset_ns = self._wall_offset_ns, wall_offset_ns
        self._said_now = None
        if not entries:
            if self.last_id < 0:
                self._read_ns = asked_ns
                self.settle()
            return 0
        heard_ns = asked_ns if heard_ns is None else max(heard_ns, asked_ns)
        first, last = entries[0], entries[-1]
        if last.record_id < self.last_id or self._is_another(entries):  # the recorder was reset, and counts anew
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
        self._read_ns, self._last_time_ns = asked_ns, last.time_created_ns
        if len(self._calls) > MAX_CALLS:  # no step claims them
            first_ns = self._calls[0].created
            while len(self._calls) > MAX_CALLS:
                self._forget(self._calls.popleft())
            self._lose(first_ns, self._calls[0].created)
        self.settle()
        return new

    def _is_another(self, entries: Sequence[Entry]) -> bool:
        """Whether the last entry that was seen has become another one, under the same number."""
        at = bisect_right(entries, self.last_id, key=lambda entry: entry.record_id) - 1
        return at >= 0 and entries[at].record_id == self.last_id and entries[at].time_created_ns != self._last_time_ns

    def _pass(self, entries: Sequence[Entry], heard_ns: int) -> int:
        """The clock was set: of what is new nobody knows on which side of that it was called, nor of what is open."""
        new = sum(entry.record_id > self.last_id for entry in entries)
        self._abandon()
        self._lose(self._last_created, heard_ns)
        self._last_created, self._hole = max(self._last_created, heard_ns), False
        self.last_id = max(self.last_id, entries[-1].record_id)
        return new

    def _add(self, dump: Dump, wall_offset_ns: int, latest_ns: int) -> int:
        over: dict[str, int] = {}
        """By group, the last entry that was retired: those before it are over as well."""
        last_id, new = self.last_id, 0
        for entry in dump.entries:
            number, name = entry.record_id, entry.process_group[0][:NAME_CHARS]
            if entry.retired and not entry.is_p2p:  # sends to different peers overtake one another
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
                call.over = True  # an operation of a coalesced call, or one that was captured into a CUDA graph
                del self._open[number]
        self.last_id = last_id
        return new

    def _meet(self, entry: Entry, dump: Dump, created_ns: int) -> _Call:
        """The call of an entry that was not seen before; of a coalesced one, what is there of it already."""
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
        """Of a group by its name: its slot and how many ranks it has."""
        short = name[:NAME_CHARS]
        if short in self._slots:
            return self._slots[short]
        if self._said_now is None:
            self._said_now = self._said()
        said = self._said_now
        group = next((one for one in (*said, *self.found) if one.name == short), None)
        if group is None:
            taken = {one.slot for one in (*said, *self.found)}
            slot = next((one for one in range(SHARED - 1, FIRST_FOUND - 1, -1) if one not in taken), SHARED)
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
        """Note a gap; those that it touches become one with it, and the oldest when there are very many."""
        to_ns = max(to_ns, from_ns + 1)
        first = bisect_left(self._gaps, from_ns, key=lambda gap: gap[1])
        end = bisect_right(self._gaps, to_ns, key=lambda gap: gap[0])
        if first < end:
            from_ns, to_ns = min(from_ns, self._gaps[first][0]), max(to_ns, self._gaps[end - 1][1])
        self._gaps[first:end] = [(from_ns, to_ns)]
        if len(self._gaps) > MAX_GAPS:
            self._gaps[: MAX_GAPS // 2] = [(self._gaps[0][0], self._gaps[MAX_GAPS // 2 - 1][1])]

    def _abandon(self) -> None:
        for call in self._open.values():
            call.lost = call.lost or not call.over
            call.over = True
        self._open.clear()

    def _forget(self, call: _Call) -> None:
        if self._by_key.get(call.key) is call:
            del self._by_key[call.key]

    # -- what comes out -------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether another dump would tell something of what is already there."""
        return bool(self._open or self._steps)

    def settle(self) -> None:
        """Make records of the steps of which everything is known."""
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
        """Up to about ``most`` records with this ``seq``, and how many of what is ready they are: for ``taken``."""
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
                one = sums.setdefault((call.slot, max(call.op, 0)), [0, 0, 0])
                one[0] += 1
                one[1] += call.size
                one[2] += call.ns
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
        if before > 0:  # the last of them says in which phase the next step begins
            del self._changes_at[:before], self._changes_to[:before]


_OP = {name: number for number, name in enumerate(OPS)}
_COALESCED_ALONE = -1
"""Operation of a coalesced call of which no operation was seen."""
_FROM_OUTPUT = (_OP["all_gather"], _OP["scatter"], _OP["recv"])
_OF_ALL = (_OP["gather"], _OP["scatter"])
"""Of these an entry has this rank's part only."""


def _partly_timed(own: Sequence[_Call]) -> bool:
    """Whether a sum of these would be one of a part: some of a kind have no time, or one is not over even now."""
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
    """As ``records/collectives.py`` counts bytes: the same on all ranks."""
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
