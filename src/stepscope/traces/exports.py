"""A traced job in other formats: a timeline for Perfetto, tables as CSV files.

The timeline shows all ranks on aligned clocks, for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``. Each
rank is one process (its pid is the rank) with a track for every thread and every stream, arrows from launches to
launched work and from forward to backward, memory counters, and additional tracks for collectives and the critical
path. Times are microseconds since the earliest instant of all files, with three decimals, so exact to the nanosecond.

Viewers expect the slices of one track to be nested or disjoint. Slices that overlap otherwise (kernels that a file
reports as concurrent on one stream, collectives of one thread) move to another track of the same name. Every column of
a slice is written. Data that the reader of the trace dropped is missing here too.

Traces are written one at a time as they are read, so memory use is that of a single trace.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from zlib_ng import gzip_ng

from stepscope.errors import UsageError
from stepscope.records.files import replaced
from stepscope.traces.across_ranks.clocks import Clocks
from stepscope.traces.collective_calls import OPS
from stepscope.traces.model.columns import Kind, Trace, side_columns
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import Window, launches_of
from stepscope.traces.path.graph import CAUSES
from stepscope.traces.path.rank_path import path_segments
from stepscope.traces.reading.files import TIMELINE

if TYPE_CHECKING:
    from stepscope.traces.across_ranks.arrivals import CollectivesAnalysis

__all__ = [
    "Bar",
    "Track",
    "apart",
    "collective_bars",
    "collective_tracks",
    "path_track",
    "tables_in",
    "write_csv",
    "write_perfetto",
    "write_run",
]


# -- slice arguments --------------------------------------------------------------------------------------------------
# The ``args`` of a Kineto event: everything known about a slice besides its times.

CATEGORIES: Final = {
    int(kind): name
    for kind, name in {
        Kind.OTHER: "other",
        Kind.OP: "cpu_op",
        Kind.ANNOTATION: "user_annotation",
        Kind.PYTHON: "python_function",
        Kind.RUNTIME: "cuda_runtime",
        Kind.KERNEL: "kernel",
        Kind.MEMCPY: "gpu_memcpy",
        Kind.MEMSET: "gpu_memset",
        Kind.SYNC: "cuda_sync",
        Kind.DEVICE_ANNOTATION: "gpu_user_annotation",
        Kind.OVERHEAD: "overhead",
    }.items()
}
"""Kineto's current names, so that the output can be read again."""

NUMBER, TEXT, JSON = "number", "text", "json"
SIDES: Final = {
    # table: column: (key in the file, form)
    "ops": {
        "dims": ("Input Dims", JSON),
        "types": ("Input type", JSON),
        "concrete": ("Concrete Inputs", JSON),
        "stack": ("Call stack", TEXT),
        "module": ("Module Hierarchy", TEXT),
        "sequence": ("Sequence number", NUMBER),
        "forward_thread": ("Fwd thread id", NUMBER),
    },
    "kernels": {
        "occupancy": ("est. achieved occupancy %", NUMBER),
        "blocks_per_sm": ("blocks per SM", NUMBER),
        "warps_per_sm": ("warps per SM", NUMBER),
        "graph": ("graph id", NUMBER),
    },
    "copies": {"bytes": ("bytes", NUMBER)},
    "collectives": {
        "op": ("Collective name", TEXT),
        "group": ("Process Group Name", TEXT),
        "description": ("Process Group Description", TEXT),
        "ranks": ("Process Group Ranks", JSON),
        "size": ("Group size", NUMBER),
        "sequence": ("Seq", NUMBER),
        "in_elements": ("In msg nelems", NUMBER),
        "out_elements": ("Out msg nelems", NUMBER),
        "dtype": ("dtype", TEXT),
    },
    "syncs": {
        "on_stream": ("wait_on_stream", NUMBER),
        "record_correlation": ("wait_on_cuda_event_record_corr_id", NUMBER),
    },
    "pythons": {
        "id": ("Python id", NUMBER),
        "parent": ("Python parent id", NUMBER),
        "module": ("Python module id", NUMBER),
    },
}
NO_STREAM: Final = 2**32 - 1
"""CUPTI's value for a synchronization that does not belong to one stream."""
SLICES: Final = {"correlation": "correlation", "external": "External id", "device": "device", "stream": "stream"}


class Values(dict[tuple[str, int], str]):
    """Strings of the trace as JSON, by form and code."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __missing__(self, key: tuple[str, int]) -> str:
        form, code = key
        text = self.trace.text(code)
        out = self[key] = text if form == JSON and _is_json(text) else json.dumps(text)
        return out


def args_of(trace: Trace, part: slice, values: Values) -> list[str]:
    """Return the contents of the ``args`` objects of consecutive rows."""
    out: list[list[str]] = [[] for _ in range(*part.indices(len(trace)))]
    for name, key in SLICES.items():
        column = getattr(trace.slices, name)[part]
        for at in np.flatnonzero(column >= 0).tolist():
            out[at].append(f'"{key}":{column[at]}')
    for at in np.flatnonzero((trace.slices.device[part] >= 0) & (trace.slices.stream[part] < 0)).tolist():
        out[at].append(f'"stream":{NO_STREAM}')
    for side, keys in SIDES.items():
        table = side_columns(getattr(trace, side))
        begin, end = np.searchsorted(table["row"], [part.start, part.start + len(out)])
        places = (table["row"][begin:end] - part.start).tolist()
        for name, (key, form) in keys.items():
            for at, value in zip(places, table[name][begin:end].tolist(), strict=True):
                if value >= 0:  # neither −1 nor NaN
                    out[at].append(f'"{key}":{value if form == NUMBER else values[form, value]}')
    return [",".join(each) for each in out]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# -- Perfetto timeline ------------------------------------------------------------------------------------------------

BATCH = 20_000
PACKED = 6
"""gzip level: half the time of the best, and hardly larger."""
MAX_LANES = 256
"""Per thread or stream; further overlapping slices are written, but a viewer may not show them."""
DEVICE_TYPES = {0: "host memory", 1: "device memory"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    start_ns: int
    """Absolute, on the rank's own clock."""
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Track:
    """An additional track of a rank: matched collectives or a critical path."""

    rank: int
    name: str
    bars: Sequence[Bar]
    """Sorted by start."""


def write_perfetto(
    traces: Iterable[tuple[int, Trace]], clocks: Clocks, out: Path, *, tracks: Iterable[Track] = ()
) -> int:
    """Write the timeline and return the number of events.

    ``traces`` yields ranks with their traces and may read them lazily. The file is compressed if its name ends in
    ``.gz``.
    """
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


def write_run(
    tracks: Sequence[Track], hosts: Mapping[int, str], traces: Iterable[tuple[int, Trace]], out: Path, *, zero_ns: int
) -> int:
    """Write the timeline of a recorded run and return the number of events; it counts time from ``zero_ns``.

    Each rank is a process with its tracks, and rank −1 the process of the whole run, which comes first. ``traces`` are
    profiled steps of some ranks, on the same clock; their threads and streams follow the tracks of their rank.
    """
    of_run = 1 + max((track.rank for track in tracks), default=0)
    packed = out.suffix == ".gz"
    with gzip_ng.open(out, "wt", PACKED, encoding="utf-8") if packed else out.open("w", encoding="utf-8") as file:
        file.write(TIMELINE.decode() + ',"displayTimeUnit":"ns","traceEvents":[\n')
        writer = _Writer(file)
        for rank in sorted({track.rank for track in tracks}):
            pid = rank if rank >= 0 else of_run
            writer.process(pid, _rank_name(rank, hosts.get(rank)) if rank >= 0 else "run", rank)
            for place, track in enumerate(track for track in tracks if track.rank == rank):
                tid = writer.track(pid, track.name, place)
                writer.events(_bar(pid, tid, bar, zero_ns) for bar in track.bars)
        for rank, trace in traces:
            writer.trace(rank, trace, zero_ns)
        file.write("\n]}\n")
    return writer.written


def _rank_name(rank: int, host: str | None) -> str:
    return f"rank {rank} · {host}" if host else f"rank {rank}"


def us(ns: int) -> str:
    """Format microseconds with three decimals at any magnitude."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


class _Writer:
    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.written = 0
        self.tids = itertools.count(1)
        """Unique over all ranks: no two tracks share one."""
        self.arrows = itertools.count(1)

    def events(self, events: Iterable[str]) -> None:
        events = iter(events)
        while batch := list(itertools.islice(events, BATCH)):
            self.file.write((",\n" if self.written else "") + ",\n".join(batch))
            self.written += len(batch)

    def rank(self, rank: int, trace: Trace, zero_ns: int, tracks: Sequence[Track]) -> None:
        """Write one rank; ``zero_ns``: the start of the timeline on this rank's clock."""
        self.process(rank, _rank_name(rank, trace.meta.host), rank)
        for place, track in enumerate(tracks):
            tid = self.track(rank, track.name, place)
            self.events(_bar(rank, tid, bar, zero_ns) for bar in track.bars)
        self.trace(rank, trace, zero_ns)

    def process(self, pid: int, name: str, place: int) -> None:
        self.events([_meta(pid, 0, "process_name", name=name), _meta(pid, 0, "process_sort_index", sort_index=place)])

    def trace(self, rank: int, trace: Trace, zero_ns: int) -> None:
        """Write what the file has, without other tracks."""
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
        """Write the slices and return the track of each, [slices]."""
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
        """Draw arrows from forward to backward, except on threads without slices, which have no track."""
        first_of: dict[int, int] = {}
        for thread, tid in zip(trace.slices.thread.tolist(), tids, strict=True):
            first_of.setdefault(thread, tid)
        flows = trace.flows
        for source, start, target, end in zip(
            *(column.tolist() for column in (flows.from_thread, flows.from_ns, flows.to_thread, flows.to_ns)),
            strict=True,
        ):
            if source in first_of and target in first_of:
                yield from self.arrow(
                    rank, "fwdbwd", first_of[source], start + first_ns, first_of[target], end + first_ns
                )

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
    """Assign each slice (sorted by start, longer first) the first lane in which it is nested or disjoint."""
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
        # Some files contain only allocated and freed sizes.
        total[name] = allocated if allocated >= 0 else total.get(name, 0) + size
        values = {"allocated": total[name]} | ({"reserved": reserved} if reserved >= 0 else {})
        head = f'{{"ph":"C","pid":{rank},"tid":0,"name":"{name}","ts":{us(time_ns + first_ns)}'
        yield f'{head},"args":{json.dumps(values)}}}'


# -- collective tracks ------------------------------------------------------------------------------------------------
# One track per rank shows when it waited in matched collectives, for which rank, and for how long.


def collective_tracks(collectives: CollectivesAnalysis) -> list[Track]:
    """Build one track per rank with collectives; overlapping collectives move to further tracks."""
    pairs, split = collectives.pairs, collectives.split
    out = []
    order = np.lexsort((pairs.start_ns, pairs.rank))
    order = order[split.counts[pairs.whole[order]]]
    ranks = pairs.rank[order]
    for parts in np.split(order, np.flatnonzero(np.diff(ranks)) + 1) if len(order) else ():
        rank = pairs.ranks[pairs.rank[parts[0]]]
        for lane, own in enumerate(apart(pairs.start_ns[parts].tolist(), pairs.end_ns[parts].tolist())):
            name = "collectives: waiting and transfer" + (f" ({lane + 1})" if lane else "")
            bars = [bar for at in own for bar in collective_bars(collectives, int(parts[at]))]
            out.append(Track(rank=rank, name=name, bars=bars))
    return out


def apart(starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """Distribute intervals, sorted by start, over as few lists of indices as possible without overlap in a list."""
    lists: list[list[int]] = []
    for at, start in enumerate(starts):
        free = next((own for own in lists if ends[own[-1]] <= start), None)
        if free is None:
            free = []
            lists.append(free)
        free.append(at)
    return lists


def collective_bars(collectives: CollectivesAnalysis, part: int) -> list[Bar]:
    """One rank's waiting, if any, and transfer; ``part``: an index into the pairs."""
    pairs, split = collectives.pairs, collectives.split
    whole = int(pairs.whole[part])
    op, last = OPS[pairs.op[whole]], pairs.ranks[split.last[whole]]
    start_ns, end_ns, wait_ns = int(pairs.start_ns[part]), int(pairs.end_ns[part]), int(split.wait_ns[part])
    args = {"collective": whole, "group": pairs.groups[pairs.group[whole]].name, "last_rank": last}
    args |= {"bytes": int(pairs.bytes[whole])} if pairs.bytes[whole] >= 0 else {}
    bars = [Bar(name=f"{op}: transfer", start_ns=start_ns + wait_ns, end_ns=end_ns, args=args)]
    if wait_ns:
        bars.insert(
            0, Bar(name=f"{op}: waits for rank {last}", start_ns=start_ns, end_ns=start_ns + wait_ns, args=args)
        )
    return bars


# -- path tracks ------------------------------------------------------------------------------------------------------
# One track per rank shows the cause of its steps' length at each instant.


def path_track(rank: int, window: Window) -> Track:
    """Build the track; equal segments without a gap between them become one bar."""
    trace, segments = window.trace, path_segments(window)
    origin_ns = trace.meta.origin_ns
    columns = (segments.start_ns + origin_ns, segments.end_ns + origin_ns, segments.cause, segments.name)
    bars: list[Bar] = []
    for start_ns, end_ns, cause, code in zip(*(column.tolist() for column in columns), strict=True):
        name, args = trace.text(code) or CAUSES[cause], {"cause": CAUSES[cause]}
        goes_on = bars and (bars[-1].end_ns, bars[-1].name, bars[-1].args) == (start_ns, name, args)
        first_ns = bars.pop().start_ns if goes_on else start_ns
        bars.append(Bar(name=name, start_ns=first_ns, end_ns=end_ns, args=args))
    return Track(rank=rank, name="critical path", bars=bars)


# -- CSV files --------------------------------------------------------------------------------------------------------
# One file per table; tables of ranks are combined, with ``rank`` as the first column. The folder keeps a list of the
# written files with size and time, so that the next export can remove what is left of this one, and nothing else.

LIST = ".stepscope-tables"


def write_csv(folder: Path, of_ranks: Mapping[int, Mapping[str, Table]], of_job: Iterable[Table] = ()) -> list[Path]:
    """Write each table as ``NAME.csv``; the folder is created if needed and existing files are replaced.

    Files of an earlier export that this one does not have are removed, unless they were changed since.

    ``of_ranks``: by rank and name; if ranks have different columns, the file has all of them. A table of the job with
    the same name as a table of ranks becomes ``job_NAME.csv``.
    """
    files: dict[str, tuple[list[str], list[dict[str, Any]]]] = {}
    for rank in sorted(of_ranks):
        for name, table in of_ranks[rank].items():
            columns, rows = files.setdefault(name, (["rank"], []))
            columns += [column for column in table.columns if column not in columns]
            rows += [{**row, "rank": rank} for row in table.to_rows()]
    for table in of_job:
        name = f"job_{table.name}" if table.name in files else table.name
        files[name] = (list(table.columns), table.to_rows())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stale = _unchanged(folder)
        written = [_write(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in files.items()]
        for name in stale.difference(path.name for path in written):
            (folder / name).unlink(missing_ok=True)
        _remember(folder, written)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    return written


def tables_in(folder: Path | None) -> list[Path]:
    """List existing files that a table might replace."""
    return [] if folder is None else sorted(folder.glob("*.csv"))


def _write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> Path:
    with replaced(path) as spare, spare.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _unchanged(folder: Path) -> set[str]:
    """Return the names of files from the previous export that are unchanged."""
    try:
        listed = json.loads((folder / LIST).read_bytes())
    except (FileNotFoundError, ValueError):
        return set()
    if not isinstance(listed, dict):
        return set()
    return {
        name
        for name, recorded in listed.items()
        if name.endswith(".csv") and name == Path(name).name and _recorded(folder / name) == recorded
    }


def _remember(folder: Path, written: Iterable[Path]) -> None:
    with replaced(folder / LIST) as spare:
        spare.write_text(json.dumps({path.name: _recorded(path) for path in written}, indent=0), encoding="utf-8")


def _recorded(path: Path) -> list[int] | None:
    """Return size and modification time; None if there is no such file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
