"""Kineto's JSON, as ``torch.profiler`` exports it, and other traces that Chrome would open → columns.

Pieces of text are decoded to events, these become columns at once, and nothing of them is kept but ranges that are
still open (``B`` without its ``E``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.traces.model.categories import HOST_KINDS
from stepscope.traces.model.columns import Ints, Trace
from stepscope.traces.reading.builder import Numbering, TraceBuilder
from stepscope.traces.reading.kineto_columns import Columns
from stepscope.traces.reading.kineto_decode import LATEST_NS, EventDecoder, Piece, ns_of_us
from stepscope.traces.reading.kineto_events import (
    NO_ARGS,
    Begin,
    End,
    FlowEnd,
    FlowStart,
    Instant,
    Metadata,
    NoEvent,
    OldInstant,
    Slice,
)
from stepscope.traces.reading.kineto_meta import meta_of
from stepscope.traces.reading.text import EventText

__all__ = ["read_kineto"]

ARROWS = (FlowStart, FlowEnd)
FORWARD_BACKWARD = "fwdbwd"
LONGEST_NOTHING = 4 << 20
"""Bytes of a list in which nothing is an event."""


def read_kineto(blocks: Iterable[bytes], path: str) -> Trace:
    """``blocks``: the text, inflated; ``path``: for messages."""
    reader = _Reader()
    text = EventText(blocks, reader.decode)
    for piece in text:
        reader.add(piece)
    if not reader.read_events and (text.truncated or text.lost):
        raise TraceError(f"has no event that can be read: {text.truncated or 'they are no valid JSON'}")
    reader.finish()
    meta = replace(
        meta_of(text.header, path),
        read_events=reader.read_events,
        truncated=text.truncated,
        problems=tuple(_problems(text, reader)),
    )
    return _with_process(reader.columns.builder.build(meta))


class _Reader:
    def __init__(self) -> None:
        self.columns = Columns(TraceBuilder())
        self.decode = EventDecoder()
        self.read_events = 0
        self.unplaced = 0
        self.negative = 0
        self.unpaired = 0
        self._open: defaultdict[int, list[tuple[int, Begin]]] = defaultdict(list)
        """Ranges by thread, the innermost last."""
        self._arrows = _Arrows()
        self._nothing = 0

    def add(self, piece: Piece) -> None:
        events = piece.events
        self.read_events += len(events)
        slices = [event for event in events if type(event) is Slice]
        if slices:
            self._slices(piece, slices)
        if len(slices) == len(events):
            return
        # Most of what is no slice is an arrow from a launch to its kernel, which correlations tell as well.
        rest = [e for e in events if type(e) is not Slice and (type(e) not in ARROWS or e.cat == FORWARD_BACKWARD)]
        memory = [e for e in rest if (type(e) is Instant or type(e) is OldInstant) and e.name == "[memory]"]
        if memory:
            placed, time_ns = piece.placed(memory)
            self.unplaced += len(memory) - len(placed)
            self.columns.memory(placed, time_ns)
        arrows, times_ns = piece.placed([event for event in rest if type(event) in ARROWS])
        if arrows:
            processes = self.columns.processes
            self._arrows.add(arrows, [processes[event.pid][event.tid] for event in arrows], times_ns)
        self._ranges(piece, [event for event in rest if type(event) is Begin or type(event) is End])
        for event in rest:
            if type(event) is Metadata and event.name == "thread_name":
                self.columns.name_thread(event.pid, event.tid, event.args.name)
        self._look_for_nothing(piece)

    def _slices(self, piece: Piece, slices: Sequence[Any]) -> None:
        events, start_ns = piece.placed(slices)
        dur_us = np.fromiter([event.dur for event in events], np.float64, len(events))
        there = dur_us <= LATEST_NS // 1000
        if not there.all():
            events = [event for event, ok in zip(events, there.tolist(), strict=True) if ok]
            start_ns, dur_us = start_ns[there], dur_us[there]
        self.unplaced += len(slices) - len(events)
        below = dur_us < 0
        if below.any():
            self.negative += int(below.sum())
            dur_us[below] = 0
        if events:
            self.columns.slices(events, start_ns, ns_of_us(dur_us))

    def _ranges(self, piece: Piece, events: Sequence[Any]) -> None:
        """What begins and ends in events of their own."""
        placed, times_ns = piece.placed(events)
        self.unplaced += len(events) - len(placed)
        closed: list[Slice] = []
        starts_ns, durs_ns = [], []
        for event, time_ns in zip(placed, times_ns.tolist(), strict=True):
            open_ones = self._open[self.columns.processes[event.pid][event.tid]]
            if type(event) is Begin:
                open_ones.append((time_ns, event))
            elif open_ones:
                start_ns, begin = open_ones.pop()
                args = begin.args if begin.args != NO_ARGS else event.args
                closed.append(Slice(cat=begin.cat, name=begin.name, pid=begin.pid, tid=begin.tid, args=args))
                starts_ns.append(start_ns)
                durs_ns.append(max(0, time_ns - start_ns))
                self.negative += time_ns < start_ns
            else:
                self.unpaired += 1
        if closed:
            self.columns.slices(closed, np.array(starts_ns, np.int64), np.array(durs_ns, np.int64))

    def _look_for_nothing(self, piece: Piece) -> None:
        if not all(type(event) is NoEvent for event in piece.events):
            self._nothing = 0
            return
        self._nothing += piece.size
        if self._nothing > LONGEST_NOTHING:
            raise TraceError(f"is no trace: {LONGEST_NOTHING >> 20} MiB of its events are none")

    def finish(self) -> None:
        self.unpaired += sum(map(len, self._open.values()))
        self._arrows.finish(self.columns.builder)


class _Arrows:
    """From forward operators to backward ones, by their ids: the last of each that was said."""

    def __init__(self) -> None:
        self._words: Numbering[Any] = Numbering()
        self._pieces: list[tuple[NDArray[np.bool_], Ints, Ints, Ints]] = []

    def add(self, events: Sequence[Any], threads: list[int], times_ns: Ints) -> None:
        ids = [e.id if isinstance(e.id, int) and 0 <= e.id <= LATEST_NS else -1 - self._words[e.id] for e in events]
        ends = np.array([type(event) is FlowEnd for event in events])
        self._pieces.append((ends, np.array(ids, np.int64), np.array(threads, np.int64), times_ns))

    def finish(self, builder: TraceBuilder) -> None:
        if not self._pieces:
            return
        ends, ids, threads, times_ns = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
        # Turned around, so that the first of each id is the last that was said.
        starts, finishes = np.flatnonzero(~ends)[::-1], np.flatnonzero(ends)[::-1]
        from_ids, first = np.unique(ids[starts], return_index=True)
        to_ids, last = np.unique(ids[finishes], return_index=True)
        _, one, other = np.intersect1d(from_ids, to_ids, assume_unique=True, return_indices=True)
        start, finish = starts[first[one]], finishes[last[other]]
        if len(start):
            builder.add(
                "flows",
                from_thread=threads[start],
                from_ns=times_ns[start],
                to_thread=threads[finish],
                to_ns=times_ns[finish],
            )


def _problems(text: EventText[Any], reader: _Reader) -> Iterator[str]:
    if text.truncated:
        yield f"cut off: {text.truncated}; everything before is used"
    if text.lost:
        yield f"{text.lost} events are no valid JSON and are left out"
    if text.mended:
        yield f"{text.mended} pieces are no valid JSON and were mended"
    if reader.decode.wrong:
        yield f"{reader.decode.wrong} events have fields of a wrong type, which are not used"
    if reader.unplaced:
        yield f"{reader.unplaced} events have no usable time and are left out"
    if reader.negative:
        yield f"{reader.negative} events have a negative duration, counted as none"
    if reader.unpaired:
        yield f"{reader.unpaired} beginnings or ends of ranges have no counterpart and are left out"


def _with_process(trace: Trace) -> Trace:
    """The process that was traced is the one with most slices of the host."""
    threads = trace.slices.thread[trace.rows_of(HOST_KINDS)]
    slices: Counter[int] = Counter()
    for thread, count in enumerate(np.bincount(threads).tolist() if len(threads) else ()):
        pid = trace.threads[thread].pid
        if isinstance(pid, int):
            slices[pid] += count
    most = next((pid for pid, count in slices.most_common(1) if count), None)
    length_ns = int(trace.slices.end_ns.max()) if len(trace) else 0
    return replace(trace, meta=replace(trace.meta, pid=most, length_ns=length_ns))
