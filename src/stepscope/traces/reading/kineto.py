"""Kineto's JSON, as ``torch.profiler`` exports it, and other Chrome traces to columns and metadata.

Pieces of text are decoded to events, which become columns at once. Only ranges that are still open (``B`` without its
``E``) are kept as events. Where the scanner in C was built, it reads ordinary pieces instead (``scanned.py``).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.records.text import count_text
from stepscope.traces.model.collector import collector_paused
from stepscope.traces.model.columns import (
    DEVICE_KINDS,
    HOST_KINDS,
    Ints,
    Kind,
    Numbering,
    Trace,
    TraceBuilder,
    TraceMeta,
    kind_of,
)
from stepscope.traces.reading.kineto_events import (
    LATEST_NS,
    NO_ARGS,
    Args,
    Begin,
    End,
    EventDecoder,
    EventText,
    FlowEnd,
    FlowStart,
    Instant,
    Metadata,
    NoEvent,
    OldInstant,
    Piece,
    Slice,
    ns_of_us,
)
from stepscope.traces.reading.scanned import Batch, Scanned, Scanner, or_missing, scanner_function, text_codes

__all__ = ["read_kineto"]


# -- columns ----------------------------------------------------------------------------------------------------------
# Which fields are kept for each kind of slice, and in which form.


def _one_of(*kinds: Kind) -> Any:
    """Build a lookup table to be indexed with a column of kinds."""
    return np.isin(np.arange(256), [int(kind) for kind in kinds])


ON_DEVICE = _one_of(*DEVICE_KINDS)
WITH_DETAILS = _one_of(Kind.OP, Kind.ANNOTATION)
SIZED = _one_of(Kind.MEMCPY, Kind.MEMSET)
KERNEL = _one_of(Kind.KERNEL)
SYNC = _one_of(Kind.SYNC)
PYTHON = _one_of(Kind.PYTHON)
NO_STREAM = 2**31 - 1
"""CUPTI writes 2³² − 1 for none, or for all."""
MAX_DEVICE = 1024
LARGEST = 2**63 - 1
DIGITS = re.compile(r"\d{1,9}")
NAN = float("nan")
SETTINGS = re.compile("conv|attention")
UNKNOWN = np.uint8(2)


class Kinds(dict[str | None, int]):
    """Kinds by category."""

    def __missing__(self, category: str | None) -> int:
        kind = self[category] = int(kind_of(category))
        return kind


class Process(dict[int | str, int]):
    """Thread numbers of a process by the file's spelling: "17" equals 17, and old files use both."""

    def __init__(self, builder: TraceBuilder, pid: int | str) -> None:
        super().__init__()
        self._builder = builder
        self._pid = _plain(pid)

    def __missing__(self, tid: int | str) -> int:
        number = self[tid] = self._builder.threads[self._pid, _plain(tid)]
        return number


class Processes(dict[int | str, Process]):
    def __init__(self, builder: TraceBuilder) -> None:
        super().__init__()
        self._builder = builder

    def __missing__(self, pid: int | str) -> Process:
        process = self[pid] = Process(self._builder, pid)
        return process


class Texts(dict[bytes, int]):
    """Codes of JSON texts."""

    def __init__(self, builder: TraceBuilder) -> None:
        super().__init__({b"": -1})
        self._builder = builder

    def __missing__(self, text: bytes) -> int:
        code = self[text] = self._builder.strings[text.decode(errors="replace")]
        return code


class Columns:
    """Fills a builder with columns."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.processes = Processes(builder)
        self._kinds = Kinds()
        self._texts = Texts(builder)
        self._text_codes = text_codes(builder)
        self._settings = np.empty(0, np.uint8)
        """By code of the name."""

    def slices(self, events: Sequence[Any], start_ns: Ints, dur_ns: Ints) -> None:
        builder, strings, processes, kinds = self.builder, self.builder.strings, self.processes, self._kinds
        args = [event.args for event in events]
        kind = np.fromiter([kinds[event.cat] for event in events], np.uint8, len(events))
        name = np.fromiter([strings[event.name] for event in events], np.int32, len(events))
        external = integers([each.external for each in args])
        for at in np.flatnonzero(external < 0).tolist():
            external[at] = min(args[at].external_old, LARGEST)
        device, stream = _places(events, args, kind)
        base = builder.count
        builder.add(
            "slices",
            start_ns=start_ns,
            dur_ns=dur_ns,
            kind=kind,
            name=name,
            thread=np.fromiter([processes[event.pid][event.tid] for event in events], np.int32, len(events)),
            device=device,
            stream=stream,
            correlation=integers([each.correlation for each in args]),
            external=external,
        )
        self._device_side(base, args, kind)
        self._ops(base, args, kind, name)
        self._python(base, args, kind)
        names = [each.collective for each in args]
        if any(names):
            described = [at for at, text in enumerate(names) if text]
            self._collectives(base + np.array(described), [args[at] for at in described])

    def _device_side(self, base: int, args: list[Args], kind: Any) -> None:
        builder = self.builder
        rows, some = _of(args, KERNEL[kind])
        if some:
            builder.add(
                "kernels",
                row=base + rows,
                occupancy=reals([each.occupancy for each in some]),
                blocks_per_sm=reals([each.blocks_per_sm for each in some]),
                warps_per_sm=reals([each.warps_per_sm for each in some]),
                registers=integers([each.registers for each in some]),
                shared_bytes=integers([each.shared_bytes for each in some]),
                graph=integers([each.graph for each in some]),
            )
        rows, some = _of(args, SIZED[kind])
        if some:
            builder.add("copies", row=base + rows, bytes=np.maximum(integers([each.bytes for each in some]), -1))
        rows, some = _of(args, SYNC[kind])
        if some:
            on_stream = integers([each.on_stream for each in some])
            builder.add(
                "syncs",
                row=base + rows,
                on_stream=np.where(on_stream < NO_STREAM, on_stream, -1),
                record_correlation=integers([each.record_correlation for each in some]),
            )

    def _ops(self, base: int, args: list[Args], kind: Any, name: Any) -> None:
        """Add operators with details besides the name."""
        strings = self.builder.strings
        rows, some = _of(args, WITH_DETAILS[kind])
        if not some:
            return
        concrete = np.full(len(rows), -1, np.int32)
        which, with_settings = _of(some, self._with_settings(name[rows]))
        concrete[which] = self._codes([each.concrete for each in with_settings])
        columns = {
            "row": base + rows,
            "dims": self._codes([each.dims for each in some]),
            "types": self._codes([each.types for each in some]),
            "concrete": concrete,
            "stack": np.array([strings[each.stack] if each.stack else -1 for each in some], np.int32),
            "module": np.array([strings[each.module] if each.module else -1 for each in some], np.int32),
            "sequence": integers([each.sequence for each in some]),
            "forward_thread": integers([each.forward_thread for each in some]),
        }
        self._known_ops(columns)

    def _known_ops(self, columns: dict[str, Any]) -> None:
        known = (columns["dims"] >= 0) | (columns["stack"] >= 0) | (columns["module"] >= 0) | (columns["sequence"] >= 0)
        self.builder.add("ops", **{column: values[known] for column, values in columns.items()})

    def _codes(self, texts: list[msgspec.Raw]) -> Any:
        """Encode texts in one go, joined by a byte that JSON never contains: one by one takes twice as long."""
        apart = b"\0".join(texts).split(b"\0") if texts else []
        return np.fromiter(map(self._texts.__getitem__, apart), np.int32, len(texts))

    def _with_settings(self, names: Any) -> Any:
        """Test whether FLOPs of an operator need more than its shapes, [names]."""
        known = self._settings
        if len(known) < len(self.builder.strings):
            known = self._settings = np.concatenate([known, np.full(2 * len(self.builder.strings), UNKNOWN)])
        for code in set(names[known[names] == UNKNOWN].tolist()):
            known[code] = SETTINGS.search(self.builder.strings.keys_in_order[code]) is not None
        return known[names] == 1

    def _python(self, base: int, args: list[Args], kind: Any) -> None:
        rows, some = _of(args, PYTHON[kind])
        if some:
            self.builder.add(
                "pythons",
                row=base + rows,
                id=integers([each.python for each in some]),
                parent=integers([-1 if each.python_parent is None else each.python_parent for each in some]),
                module=integers([-1 if each.python_module is None else each.python_module for each in some]),
            )

    def _collectives(self, rows: Any, args: list[Args]) -> None:
        strings = self.builder.strings
        self.builder.add(
            "collectives",
            row=rows,
            op=[strings[each.collective] for each in args],
            group=[strings[each.group] if each.group else -1 for each in args],
            description=[strings[each.description] if each.description else -1 for each in args],
            ranks=[self._texts[bytes(each.ranks)] for each in args],
            size=integers([each.group_size for each in args]),
            sequence=integers([each.seq for each in args]),
            in_elements=integers([each.in_elements for each in args]),
            out_elements=integers([each.out_elements for each in args]),
            dtype=[strings[each.dtype] if each.dtype else -1 for each in args],
        )

    def scanned(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Add the slices and the allocator's events of scanned pieces; return the columns."""
        columns = batch.columns()
        if "kind" in columns:
            self._scanned_slices(columns, batch.places)
        if "memory_ns" in columns:
            self._scanned_memory(columns)
        return columns

    def _scanned_slices(self, columns: dict[str, NDArray[Any]], places: Sequence[tuple[int | str, int | str]]) -> None:
        builder = self.builder
        base, kind, place = builder.count, columns["kind"], columns["place"]
        on_device = ON_DEVICE[kind]
        device = np.where(on_device, or_missing(columns["device"], MAX_DEVICE), -1)
        stream = np.where(on_device, or_missing(columns["stream"], NO_STREAM), -1)
        rows = np.flatnonzero(on_device & (device < 0))
        device[rows] = np.array([_device(pid) for pid, _ in places])[place[rows]]
        rows = np.flatnonzero(on_device & (columns["stream"] < 0))
        stream[rows] = np.array([_stream(tid) for _, tid in places])[place[rows]]
        names = ("start_ns", "dur_ns", "kind", "name", "thread", "correlation", "external")
        builder.add("slices", device=device, stream=stream, **{name: columns[name] for name in names})
        if "kernel_row" in columns:
            reals = ("occupancy", "blocks_per_sm", "warps_per_sm")
            builder.add(
                "kernels",
                row=base + columns["kernel_row"],
                **{name: _narrow(columns[name].copy()) for name in reals},
                **{name: columns[name] for name in ("registers", "shared_bytes", "graph")},
            )
        if "copy_row" in columns:
            builder.add("copies", row=base + columns["copy_row"], bytes=np.maximum(columns["copy_bytes"], -1))
        if "sync_row" in columns:
            on_stream = columns["on_stream"]
            builder.add(
                "syncs",
                row=base + columns["sync_row"],
                on_stream=np.where(on_stream < NO_STREAM, on_stream, -1),
                record_correlation=columns["record_correlation"],
            )
        if "op_row" in columns:
            details = ("dims", "types", "concrete", "stack", "module", "sequence", "forward_thread")
            self._known_ops({"row": base + columns["op_row"], **{name: columns[name] for name in details}})
        if "python_row" in columns:
            numbers = {name: columns[f"python_{name}"] for name in ("id", "parent", "module")}
            builder.add("pythons", row=base + columns["python_row"], **numbers)
        if "collective_row" in columns:
            about = ("group", "description", "ranks", "in_elements", "out_elements", "dtype")
            builder.add(
                "collectives",
                row=base + columns["collective_row"],
                op=columns["collective"],
                size=columns["group_size"],
                sequence=columns["seq"],
                **{name: columns[name] for name in about},
            )

    def _scanned_memory(self, columns: dict[str, NDArray[Any]]) -> None:
        address = columns["memory_address"]
        self.builder.add(
            "memory",
            time_ns=columns["memory_ns"],
            thread=columns["memory_thread"],
            device_type=or_missing(columns["memory_device_type"], MAX_DEVICE),
            device=or_missing(columns["memory_device"], MAX_DEVICE),
            bytes=columns["memory_bytes"],
            allocated=columns["memory_allocated"],
            reserved=columns["memory_reserved"],
            address=np.where(address > 0, address, -1),
        )

    def new_batch(self) -> Batch:
        return Batch(self._text_codes, lambda pid, tid: self.processes[pid][tid])

    def memory(self, events: Sequence[Any], time_ns: Ints) -> None:
        args = [event.args for event in events]
        self.builder.add(
            "memory",
            time_ns=time_ns,
            thread=[self.processes[event.pid][event.tid] for event in events],
            device_type=_small([each.device_type for each in args]),
            device=_small([each.device for each in args]),
            bytes=integers([each.bytes for each in args]),
            allocated=integers([each.allocated for each in args]),
            reserved=integers([each.reserved for each in args]),
            address=integers([each.address & LARGEST if each.address > 0 else -1 for each in args]),
        )

    def name_thread(self, pid: int | str, tid: int | str, name: str) -> None:
        self.builder.thread_names[_plain(pid), _plain(tid)] = name


def integers(values: list[int]) -> Ints:
    """Convert to int64; −1 for values beyond 64 bits."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except OverflowError:
        return np.array([value if -LARGEST <= value <= LARGEST else -1 for value in values], np.int64)


def reals(values: list[Any]) -> Any:
    """Convert to float32; NaN for None and for values out of range."""
    try:
        wide = np.array([NAN if value is None else value for value in values], np.float64)
    except OverflowError:
        wide = np.array([NAN if value is None or abs(value) > LARGEST else value for value in values], np.float64)
    return _narrow(wide)


def _narrow(wide: NDArray[np.float64]) -> Any:
    wide[np.abs(wide) > np.finfo(np.float32).max] = NAN
    return wide.astype(np.float32)


def _small(values: list[int]) -> Ints:
    return or_missing(integers(values), MAX_DEVICE)


def _of(args: list[Args], which: Any) -> tuple[Any, list[Args]]:
    rows = np.flatnonzero(which)
    return rows, [args[at] for at in rows.tolist()]


def _places(events: Sequence[Any], args: list[Args], kind: Any) -> tuple[Any, Any]:
    """Return device and stream of slices that run on one, else −1; [slices]."""
    device = np.full(len(events), -1, np.int16)
    stream = np.full(len(events), -1, np.int32)
    rows = np.flatnonzero(ON_DEVICE[kind])
    places = [(args[at].device, args[at].stream) for at in rows.tolist()]
    device[rows] = [
        number if 0 <= number < MAX_DEVICE else _device(events[at].pid)
        for (number, _), at in zip(places, rows.tolist(), strict=True)
    ]
    stream[rows] = [
        number if 0 <= number < NO_STREAM else -1 if number >= NO_STREAM else _stream(events[at].tid)
        for (_, number), at in zip(places, rows.tolist(), strict=True)
    ]
    return device, stream


def _device(pid: int | str) -> int:
    """Derive the device from the process number, if the event does not name it."""
    device = _plain(pid)
    return device if isinstance(device, int) and 0 <= device < MAX_DEVICE else 0


def _stream(tid: int | str) -> int:
    """Derive the stream from the thread (``stream 7``), if the event does not name it; −1 is all streams."""
    stream = _plain(tid)
    if isinstance(stream, str):
        digits = DIGITS.search(stream)
        return int(digits.group()) if digits else 0
    return stream if 0 <= stream < NO_STREAM else -1


def _plain(spelt: int | str) -> int | str:
    return int(spelt) if isinstance(spelt, str) and spelt.isascii() and spelt.isdigit() and len(spelt) < 20 else spelt


# -- metadata ---------------------------------------------------------------------------------------------------------


def meta_of(header: dict[str, Any], path: str) -> TraceMeta:
    """Read the file's header; values of a wrong type are ignored."""
    world = _dict(header.get("distributedInfo"))
    return TraceMeta(
        path=path,
        rank=_count(world.get("rank")),
        world_size=_count(world.get("world_size")),
        backend=_text(world.get("backend")),
        host=_text(header.get("hostname")) or _text(header.get("host_name")),
        origin_ns=_int(header.get("baseTimeNanoseconds")) or 0,
        devices=_dicts(header.get("deviceProperties")),
        groups=_dicts(world.get("pg_config")),
        with_stack=bool(header.get("with_stack")),
        record_shapes=bool(header.get("record_shapes")),
        profile_memory=bool(header.get("profile_memory")),
    )


def _int(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    number = _int(value)
    return number if number is not None and 0 <= number < 2**31 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(each for each in value if isinstance(each, dict)) if isinstance(value, list) else ()


# -- reader -----------------------------------------------------------------------------------------------------------

ARROWS = (FlowStart, FlowEnd)
FORWARD_BACKWARD = "fwdbwd"
LONGEST_NOTHING = 4 << 20
"""Maximum bytes of a part of the list without any event."""
BATCH = 16
"""Scanned pieces that become columns together."""


@collector_paused()
def read_kineto(blocks: Iterable[bytes], path: str) -> Trace:
    """Read a trace; ``blocks``: the decompressed text, ``path``: for messages."""
    reader = _Reader()
    text = EventText(blocks, reader.decode_piece)
    for piece in text:
        reader.add(piece)
    if not reader.read_events and (text.truncated or text.lost):
        raise TraceError(f"has no readable event: {text.truncated or 'they are not valid JSON'}")
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
        """Open ranges by thread, the innermost last."""
        self._arrows = _Arrows()
        self._nothing = 0
        scan = scanner_function()
        self._scanner = Scanner(scan, SETTINGS.search) if scan else None
        self._batch = self.columns.new_batch()

    def decode_piece(self, text: bytes) -> Piece | Scanned:
        """Decode a JSON array; raise one of ``UNREADABLE`` if the text is not one."""
        scanned = self._scanner(text) if self._scanner else None
        return self.decode(text) if scanned is None else scanned

    def add(self, piece: Piece | Scanned) -> None:
        if isinstance(piece, Scanned):
            self._add_scanned(piece)
        else:
            self._flush()
            self._add_piece(piece)

    def _add_scanned(self, piece: Scanned) -> None:
        self.read_events += piece.events
        self._batch.add(piece)
        for event in piece.metadata:
            if event.name == "thread_name":
                self.columns.name_thread(event.pid, event.tid, event.args.name)
        if piece.slices < piece.events:
            self._nothing = 0
        if len(self._batch) == BATCH:
            self._flush()

    def _flush(self) -> None:
        """Add the scanned pieces that are waiting."""
        if not len(self._batch):
            return
        columns = self.columns.scanned(self._batch)
        if "arrow_ns" in columns:
            threads = columns["arrow_thread"].astype(np.int64)
            self._arrows.add_columns(columns["arrow_end"] == 1, columns["arrow_id"], threads, columns["arrow_ns"])
        self._batch = self.columns.new_batch()

    def _add_piece(self, piece: Piece) -> None:
        events = piece.events
        self.read_events += len(events)
        slices = [event for event in events if type(event) is Slice]
        if slices:
            self._slices(piece, slices)
        if len(slices) == len(events):
            return
        # Most other events are arrows from launches to kernels, which correlations show as well.
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
        """Pair begin and end events."""
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
            raise TraceError(f"is not a trace: {LONGEST_NOTHING >> 20} MiB of its list contain no event")

    def finish(self) -> None:
        self._flush()
        self.unpaired += sum(map(len, self._open.values()))
        self._arrows.finish(self.columns.builder)


class _Arrows:
    """Arrows from forward to backward operators, by id: the last start and end of each id count."""

    def __init__(self) -> None:
        self._words: Numbering[Any] = Numbering()
        self._pieces: list[tuple[NDArray[np.bool_], Ints, Ints, Ints]] = []

    def add(self, events: Sequence[Any], threads: list[int], times_ns: Ints) -> None:
        ids = [e.id if isinstance(e.id, int) and 0 <= e.id <= LATEST_NS else -1 - self._words[e.id] for e in events]
        ends = np.array([type(event) is FlowEnd for event in events])
        self.add_columns(ends, np.array(ids, np.int64), np.array(threads, np.int64), times_ns)

    def add_columns(self, ends: NDArray[np.bool_], ids: Ints, threads: Ints, times_ns: Ints) -> None:
        self._pieces.append((ends, ids, threads, times_ns))

    def finish(self, builder: TraceBuilder) -> None:
        if not self._pieces:
            return
        ends, ids, threads, times_ns = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
        # Reversed, so that the first of each id is the last one in the file.
        starts, finishes = np.flatnonzero(~ends)[::-1], np.flatnonzero(ends)[::-1]
        from_ids, first = np.unique(ids[starts], return_index=True)
        to_ids, last = np.unique(ids[finishes], return_index=True)
        _, starting, ending = np.intersect1d(from_ids, to_ids, assume_unique=True, return_indices=True)
        start, finish = starts[first[starting]], finishes[last[ending]]
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
        yield f"left out {count_text(text.lost, 'event')}: not valid JSON"
    if text.mended:
        yield f"repaired {count_text(text.mended, 'piece')} of text that was not valid JSON"
    if reader.decode.wrong:
        yield f"ignored fields of the wrong type in {count_text(reader.decode.wrong, 'event')}"
    if reader.unplaced:
        yield f"left out {count_text(reader.unplaced, 'event')}: no usable time"
    if reader.negative:
        yield f"counted {count_text(reader.negative, 'event')} with a negative duration as zero"
    if reader.unpaired:
        yield f"left out {reader.unpaired:,} range starts and ends without their other half"


def _with_process(trace: Trace) -> Trace:
    """Set the traced process: the one with most host slices."""
    threads = trace.slices.thread[trace.rows_of(HOST_KINDS)]
    slices: Counter[int] = Counter()
    for thread, count in enumerate(np.bincount(threads).tolist() if len(threads) else ()):
        pid = trace.threads[thread].pid
        if isinstance(pid, int):
            slices[pid] += count
    most = next((pid for pid, count in slices.most_common(1) if count), None)
    length_ns = int(trace.slices.end_ns.max()) if len(trace) else 0
    return replace(trace, meta=replace(trace.meta, pid=most, length_ns=length_ns))
