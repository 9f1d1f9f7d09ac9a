"""All ranks on one timeline, their clocks aligned, for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

One process per rank (its pid is the rank), in it a track for every thread and every stream, arrows from launches to
what they launched and from forward to backward, memory as counters, and tracks of our own.  Times are microseconds from
the earliest instant of all files, with three decimals, so exact to the nanosecond.

Viewers want slices of one track to lie inside each other or apart; what overlaps otherwise (kernels of one stream that
a file says ran at once, collectives of one thread) moves to a further track of the same name.  Everything that the
columns hold of a slice is written: nothing is left out.  What a reader of the trace did not keep is not here either.

Written as it is read, one trace at a time, so that memory is that of a single trace.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from zlib_ng import gzip_ng

from stepscope.traces.model.columns import Trace
from stepscope.traces.model.links import launches_of
from stepscope.traces.ranks.clocks import Clocks
from stepscope.traces.reading.read import TIMELINE
from stepscope.traces.timeline.perfetto_args import CATEGORIES, Values, args_of

__all__ = ["Bar", "Track", "write_perfetto"]

BATCH = 20_000
PACKED = 6
"""Of gzip: half the time of its best, and hardly larger."""
MAX_LANES = 256
"""Of one thread or stream; what overlaps still more is written, but a viewer may not show it."""
DEVICE_TYPES = {0: "host memory", 1: "device memory"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    start_ns: int
    """Absolute, as the rank's own clock has it."""
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Track:
    """One of our own, of a rank: matched collectives, a critical path."""

    rank: int
    name: str
    bars: Sequence[Bar]
    """By start."""


def write_perfetto(
    traces: Iterable[tuple[int, Trace]], clocks: Clocks, out: Path, *, tracks: Iterable[Track] = ()
) -> int:
    """``traces``: each with its rank; may read them one by one.  Packed where the name ends in ``.gz``.  → events."""
    own: dict[int, list[Track]] = {}
    for track in tracks:
        own.setdefault(track.rank, []).append(track)
    shifts = clocks.shifts
    packed = out.suffix == ".gz"
    with gzip_ng.open(out, "wt", PACKED, encoding="utf-8") if packed else out.open("w", encoding="utf-8") as file:
        file.write(TIMELINE.decode() + ',"displayTimeUnit":"ns","traceEvents":[\n')
        writer = _Writer(file)
        for rank, trace in traces:
            writer.rank(rank, trace, clocks.zero_ns + shifts.get(rank, 0), own.get(rank, ()))
        file.write("\n]}\n")
    return writer.written


def us(ns: int) -> str:
    """With three decimals, whatever the size."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


class _Writer:
    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.written = 0
        self.tids = itertools.count(1)
        """Of all ranks: no two tracks share one."""
        self.arrows = itertools.count(1)

    def events(self, events: Iterable[str]) -> None:
        events = iter(events)
        while batch := list(itertools.islice(events, BATCH)):
            self.file.write((",\n" if self.written else "") + ",\n".join(batch))
            self.written += len(batch)

    def rank(self, rank: int, trace: Trace, zero_ns: int, tracks: Sequence[Track]) -> None:
        """``zero_ns``: the instant of this rank's clock that is the timeline's beginning."""
        host = trace.meta.host
        name = f"rank {rank} · {host}" if host else f"rank {rank}"
        self.events([_meta(rank, 0, "process_name", name=name), _meta(rank, 0, "process_sort_index", sort_index=rank)])
        for place, track in enumerate(tracks):
            tid = self.track(rank, track.name, place)
            self.events(_bar(rank, tid, bar, zero_ns) for bar in track.bars)
        first_ns = trace.meta.origin_ns - zero_ns
        tids = self.slices(rank, trace, first_ns)
        self.events(self.launches(rank, trace, tids, first_ns))
        self.events(self.flows(rank, trace, tids, first_ns))
        self.events(_memory(rank, trace, first_ns))

    def track(self, rank: int, name: str, place: int) -> int:
        tid = next(self.tids)
        self.events(
            [_meta(rank, tid, "thread_name", name=name), _meta(rank, tid, "thread_sort_index", sort_index=place)]
        )
        return tid

    def slices(self, rank: int, trace: Trace, first_ns: int) -> list[int]:
        """→ [slices]; the track that each is on."""
        slices = trace.slices
        tids = [0] * len(trace)
        several = len(np.unique(slices.device[slices.device >= 0])) > 1
        on_device = slices.device >= 0
        key = np.where(on_device, len(trace.threads) + slices.device.astype(np.int64), slices.thread)
        key = key * (1 << 32) + np.where(on_device, slices.stream, -1) + 1
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order])) + 1
        place = 100
        for rows in np.split(order, bounds) if len(order) else ():
            name = _track_name(trace, int(rows[0]), several)
            lanes = _lanes(slices.start_ns[rows].tolist(), slices.end_ns[rows].tolist())
            names = [name, *(f"{name} ({lane + 1})" for lane in range(1, max(lanes) + 1))]
            lane_tids = [self.track(rank, each, place + lane) for lane, each in enumerate(names)]
            place += len(names)
            for row, lane in zip(rows.tolist(), lanes, strict=True):
                tids[row] = lane_tids[lane]
        self.events(_slices(rank, trace, tids, first_ns))
        return tids

    def launches(self, rank: int, trace: Trace, tids: list[int], first_ns: int) -> Iterator[str]:
        slices, launch = trace.slices, launches_of(trace)
        rows = np.flatnonzero(launch >= 0)
        starts = (slices.start_ns + first_ns).tolist()
        for row, call in zip(rows.tolist(), launch[rows].tolist(), strict=True):
            yield from self.arrow(rank, "ac2g", tids[call], starts[call], tids[row], starts[row])

    def flows(self, rank: int, trace: Trace, tids: list[int], first_ns: int) -> Iterator[str]:
        """From forward to backward; arrows that begin or end on no slice of their thread have no track to be on."""
        first_of: dict[int, int] = {}
        for thread, tid in zip(trace.slices.thread.tolist(), tids, strict=True):
            first_of.setdefault(thread, tid)
        flows = trace.flows
        for one, start, other, end in zip(
            *(column.tolist() for column in (flows.from_thread, flows.from_ns, flows.to_thread, flows.to_ns)),
            strict=True,
        ):
            if one in first_of and other in first_of:
                yield from self.arrow(rank, "fwdbwd", first_of[one], start + first_ns, first_of[other], end + first_ns)

    def arrow(self, rank: int, name: str, tid: int, start: int, to_tid: int, end: int) -> Iterator[str]:
        number = next(self.arrows)
        common = f'"cat":"{name}","name":"{name}","id":{number},"pid":{rank}'
        yield f'{{"ph":"s",{common},"tid":{tid},"ts":{us(start)}}}'
        yield f'{{"ph":"f","bp":"e",{common},"tid":{to_tid},"ts":{us(end)}}}'


def _meta(rank: int, tid: int, kind: str, **args: Any) -> str:
    return f'{{"ph":"M","pid":{rank},"tid":{tid},"name":"{kind}","args":{json.dumps(args)}}}'


def _bar(rank: int, tid: int, bar: Bar, zero_ns: int) -> str:
    times = f'"ts":{us(bar.start_ns - zero_ns)},"dur":{us(bar.end_ns - bar.start_ns)}'
    return (
        f'{{"ph":"X","cat":"stepscope","name":{json.dumps(bar.name)},"pid":{rank},"tid":{tid},{times},'
        f'"args":{json.dumps(bar.args)}}}'
    )


def _track_name(trace: Trace, row: int, several: bool) -> str:
    slices = trace.slices
    device, stream = int(slices.device[row]), int(slices.stream[row])
    if device < 0:
        thread = trace.threads[int(slices.thread[row])]
        return thread.name or f"thread {thread.tid}"
    where = f"stream {stream}" if stream >= 0 else "all streams"
    return f"device {device} · {where}" if several else where


def _lanes(starts: list[int], ends: list[int]) -> list[int]:
    """Of slices of one track, sorted by start, the longer first: the first lane in which each lies inside or apart."""
    out = []
    lanes: list[list[int]] = [[]]
    for start, end in zip(starts, ends, strict=True):
        lane = 0
        while True:
            open_ends = lanes[lane]
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or open_ends[-1] >= end or lane == MAX_LANES - 1:
                break
            lane += 1
            if lane == len(lanes):
                lanes.append([])
        open_ends.append(end)
        out.append(lane)
    return out


def _slices(rank: int, trace: Trace, tids: list[int], first_ns: int) -> Iterator[str]:
    slices = trace.slices
    names = [json.dumps(text) for text in trace.strings]
    values = Values(trace)
    for begin in range(0, len(trace), BATCH):
        part = slice(begin, begin + BATCH)
        columns = (slices.start_ns[part] + first_ns, slices.dur_ns[part], slices.kind[part], slices.name[part])
        rows = zip(*(column.tolist() for column in columns), tids[part], args_of(trace, part, values), strict=True)
        for start, dur, kind, name, tid, args in rows:
            yield (
                f'{{"ph":"X","cat":"{CATEGORIES[kind]}","name":{names[name]},"pid":{rank},"tid":{tid},'
                f'"ts":{us(start)},"dur":{us(dur)},"args":{{{args}}}}}'
            )


def _memory(rank: int, trace: Trace, first_ns: int) -> Iterator[str]:
    memory = trace.memory
    columns = (memory.time_ns, memory.device_type, memory.device, memory.bytes, memory.allocated, memory.reserved)
    total: dict[str, int] = {}
    for time_ns, device_type, device, size, allocated, reserved in zip(*(c.tolist() for c in columns), strict=True):
        name = DEVICE_TYPES.get(device_type, f"memory of device type {device_type}")
        name = f"{name} {device}" if device_type and device >= 0 else name
        # Some files say only what was taken and given back.
        total[name] = allocated if allocated >= 0 else total.get(name, 0) + size
        values = {"allocated": total[name]} | ({"reserved": reserved} if reserved >= 0 else {})
        head = f'{{"ph":"C","pid":{rank},"tid":0,"name":"{name}","ts":{us(time_ns + first_ns)}'
        yield f'{head},"args":{json.dumps(values)}}}'
