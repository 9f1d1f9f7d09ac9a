"""The runs that a hub serves: opened from their files, followed while they continue, and summarized.

    runs = Runs.of_one(run_dir, live)        # the hub of a run: ingest feeds ``live``
    runs = Runs.of_folder(Path("runs"))      # ``stepscope serve``: opened on request, one ahead (``open_ahead``)
    runs = Runs.of_user(folders)             # ``stepscope serve --all``: the runs of several folders

A run in a folder is opened in a thread, through ``store.open_run``, and put into the same model as a live run
(``past_run``).  While it is still active it is followed instead (``ingest/tail.py``) until clients stop asking for it.
A few runs stay open; the least recently used is closed first.  A run that changed on disk is reopened.  Not
thread-safe: everything else runs in one event loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.window import last_attempt
from stepscope.errors import NotARun, RunError, UsageError
from stepscope.hub.live.digests import LOG_ROOM, DigestLog
from stepscope.hub.live.lines import LayerLines
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import BACKLOG_S, MOST_JUDGED, Snapshot, keep_up, run_data_of, select, snapshot
from stepscope.hub.live.step_arrays import Planes
from stepscope.records import run_clock
from stepscope.records.finding import SEVERITIES, Severity, status_severity
from stepscope.records.hang import HangRecord
from stepscope.records.layers import LayerRecords, layer_lines
from stepscope.records.series import NOTED, SEEN_EVENT, RankSeries, RunData, noted_numbers
from stepscope.records.steps import SLOT_BYTES
from stepscope.records.text import checked_name
from stepscope.records.throughput import named_rates
from stepscope.reports import summarize
from stepscope.ring.layout import RingState
from stepscope.store import catalog
from stepscope.store.catalog import KnownRuns, Labels, RunEntry, list_runs, read_labels, run_entry
from stepscope.store.documents import NodeInfo, load_summary, log_names, read_meta, read_nodes, read_refused
from stepscope.store.inbox.journal import TABLE_DTYPE, BlockRows
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.liveness import mark_watched, processes_alive
from stepscope.store.load import load_run, open_run
from stepscope.store.paths import EVENTS, INBOX, LABELS, LAYERS, META, NODES, SAMPLES, STACKS, STEPS, SUMMARY
from stepscope.wire.frames import ring_id

__all__ = [
    "CHECK_S",
    "READING_SHARE",
    "FinalSummary",
    "OpenRun",
    "Runs",
    "changed_of",
    "final_of",
    "open_ahead",
    "past_run",
    "recent_run",
    "whole_run",
]


# -- open run ---------------------------------------------------------------------------------------------------------
# An open run: its model, the contents of its files, and its summary.  ``Runs`` creates and keeps it.

Poll = Callable[[], object]
FinalSummary = tuple[Mapping[str, Any], tuple[HangRecord, ...]]
"""The document of ``summary.json``, and the complete hang records."""
CHECK_S = 1.0
"""The time between two checks whether a finished run changed on disk."""
READING_SHARE = 0.2
"""The largest share of the time spent on reopening a run that keeps changing."""
CONTEXT = (
    "name",
    "command",
    "cwd",
    "created_wall_ns",
    "host",
    "user",
    "python",
    "executable",
    "platform",
    "stepscope",
    "environment",
    "git",
    "end",
    "sealed",
)
"""The fields of ``run.json`` that readers get; its ``environment`` was chosen without secrets when the run began."""


class OpenRun:
    """One open run."""

    def __init__(
        self,
        path: Path,
        live: LiveRun,
        *,
        poll: Poll | None = None,
        fed: bool = False,
        document: Mapping[str, Any] | None = None,
        hangs: Sequence[HangRecord] = (),
        layers: LayerRecords | None = None,
        ended: str = "",
    ) -> None:
        self.path = path
        self.name = path.name
        self.id = path.name
        """Names the run in the API: in a hub of several folders the name alone is ambiguous."""
        self.live = live
        self.fed = fed
        """Whether rows are pushed into the model (by ingest)."""
        self.poll = poll
        """Fetches new rows of an active run that is not fed."""
        self.document = document
        """The contents of ``summary.json``, existing or computed, if the run is over."""
        self._hangs = tuple(hangs)
        self._layers = layers
        self._reading_layers: asyncio.Task[LayerRecords] | None = None
        self._layers_due_s = 0.0
        self.leaving = False
        """Whether the hub is about to exit together with this run."""
        self._ended = ended
        self._ended_wall_ns: int | None = None
        self.stamp: tuple[Any, ...] = ()
        self.checked_s = self.took_s = self._noted_s = 0.0
        self._kept: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._summary: Mapping[str, Any] | None = None
        self._summary_due_s = 0.0
        self._summing: asyncio.Task[Mapping[str, Any]] | None = None
        self.unsampled = False
        """Whether the samples still have to be read."""
        self.sampling: asyncio.Task[None] | None = None

    async def sampled(self) -> None:
        """Wait until the samples are loaded."""
        if self.sampling is not None:
            await asyncio.shield(self.sampling)

    def meta(self) -> Mapping[str, Any]:
        """Return the current ``run.json``, or its earlier contents if it cannot be read."""
        try:
            found: Mapping[str, Any] = self._cached(META, read_meta)
        except NotARun:
            return self.live.meta
        return found

    def context(self) -> dict[str, Any]:
        meta = self.meta()
        return {name: meta.get(name) for name in CONTEXT}

    def labels(self) -> Labels:
        found: Labels = self._cached(LABELS, read_labels)
        return found

    def status(self) -> str:
        """Return the status, one word of a fixed set (docs/api.md)."""
        end = self.meta().get("end")
        said = end.get("status") if isinstance(end, Mapping) else None
        return self._ended or (said if isinstance(said, str) else "running")

    def status_text(self, *, hung: bool) -> tuple[str, Severity]:
        """Return the status in words, and how bad it is; ``hung``: whether ranks make no progress now."""
        status = self.status()
        if self.document is not None and isinstance(said := self.document.get("status_text"), str):
            severity = self.document.get("status_severity")
            return said, next((known for known in SEVERITIES if known == severity), status_severity(status))
        if status == "running" and hung:
            return "hung", "critical"
        return status, status_severity(status)

    def ended_wall_ns(self) -> int | None:
        """Return when the run ended; None while that is unknown."""
        end = self.meta().get("end")
        said = end.get("wall_ns") if isinstance(end, Mapping) else None
        return said if isinstance(said, int) else self._ended_wall_ns

    def nodes(self) -> list[NodeInfo]:
        found: list[NodeInfo] = self._cached(NODES, read_nodes)
        return found

    def refused(self) -> Mapping[str, int]:
        """Count the refused strangers by reason."""
        return read_refused(self.path)

    @property
    def over(self) -> bool:
        """Whether no more data will come."""
        return not self.fed and self.poll is None

    def asked(self) -> None:
        """Note that a client is looking: the run's agent then writes the state of the ranks without delay."""
        self.live.asked()
        if not self.over and self.live.asked_s - self._noted_s >= CHECK_S:
            self._noted_s = self.live.asked_s
            mark_watched(Path(str(self.live.meta.get("session", ""))))

    def conclude(self, status: str, final: FinalSummary | None = None) -> None:
        """End a run that was fed: its followers learn the status and the final summary before the hub exits."""
        self._ended, self.fed, self.leaving = status, False, True
        self._ended_wall_ns = run_clock.wall_ns()
        if final is not None:
            self.document, self._hangs = final
        self._layers = None  # the last samples may have come since
        self.live.touch()

    async def summary(self) -> Mapping[str, Any]:
        """Return the document of ``summary.json``; for an active run, of its last steps and the judged ranks.

        Concurrent requests share one computation, which takes at most a fifth of the time.
        """
        if self.document is not None:
            return self.document
        if self._summary is not None and time.monotonic() < self._summary_due_s:
            return self._summary
        if self._summing is None:
            self._summing = asyncio.create_task(self._summarize())
        return await asyncio.shield(self._summing)

    def throughput(self) -> dict[str, Any]:
        """Return the table of ``summary.json``, without what the script notes itself; {} if nothing is known."""
        table = self.live.judged.throughput if self.document is None else self.document.get("throughput")
        said = {rate for name in self.live.noted.names() for rate in named_rates(name)}
        return {name: value for name, value in table.items() if name not in said} if isinstance(table, Mapping) else {}

    async def hangs(self) -> tuple[HangRecord, ...]:
        """Return the complete hang records of the summary: with the ranks and the Flight Recorder data."""
        await self.summary()
        return self._hangs

    async def layers(self) -> LayerRecords:
        """Return the samples of the layers: of a run that is over all of them, of an active one those that are kept.

        Concurrent requests share one reading, which takes at most a fifth of the time.
        """
        if self._layers is not None and (self.over or time.monotonic() < self._layers_due_s):
            return self._layers
        if self._reading_layers is None:
            self._reading_layers = asyncio.create_task(self._read_layers())
        return await asyncio.shield(self._reading_layers)

    async def _read_layers(self) -> LayerRecords:
        started_s = time.monotonic()
        try:
            found: LayerRecords = await asyncio.to_thread(self.live.layers)
            self._layers = found
        finally:
            took_s = time.monotonic() - started_s
            self._layers_due_s = started_s + took_s + max(CHECK_S, took_s / READING_SHARE)
            self._reading_layers = None
        return found

    async def _summarize(self) -> Mapping[str, Any]:
        started_s = time.monotonic()
        try:
            copy = snapshot(self.live, select(self.live, MOST_JUDGED))
            summary, self._hangs = await asyncio.to_thread(_summary_of, copy)
            self._summary = summary
        finally:
            took_s = time.monotonic() - started_s
            self._summary_due_s = started_s + took_s + max(CHECK_S, took_s / READING_SHARE)
            self._summing = None
        return summary

    def _cached(self, name: str, read: Callable[[Path], Any]) -> Any:
        stamp = stamp_of(self.path / name)
        held = self._kept.get(name)
        if held is None or held[0] != stamp:
            held = self._kept[name] = stamp, read(self.path)
        return held[1]


def _summary_of(copy: Snapshot) -> tuple[Mapping[str, Any], tuple[HangRecord, ...]]:
    data = run_data_of(copy)
    return summarize(data, alive=True), data.hangs


def stamp_of(path: Path) -> tuple[Any, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_mtime_ns, about.st_size, about.st_ino


# -- past runs --------------------------------------------------------------------------------------------------------
# Loads a run from its files into the model of a live run, so that one code path serves both.
#
# Rows are fed in their original order: a stretch of steps from all ranks, then the next, so that each step is digested
# while all its rows are there.  If the whole run fits into the memory limit, every step of every rank is kept.

PLANE_BYTES = 96 << 20
"""Memory for the steps of one finished run; steps that do not fit are kept in bins."""
KEPT_STEPS = 1 << 20
LEAST_STEPS = 256
"""Steps to make room for if a run is shorter."""
LEAST_ROOM = 64
"""Bins to make room for if a run is shorter: the log cannot fold fewer."""
ROWS_AT_ONCE = 1 << 17
"""Rows to put in at once."""
_STATES = {"starting": RingState.STARTING, "running": RingState.RUNNING, "exception": RingState.EXCEPTION}


def past_run(data: RunData, nodes: Mapping[str, str] | None = None) -> LiveRun:
    """Put a finished run into the model.  ``nodes``: the node name by host during the run; the default is the host."""
    nodes = {} if nodes is None else nodes
    current = last_attempt(data.ranks)
    newest = max((int(series.steps["step"][-1]) for series in current if len(series.steps)), default=0)
    steps = max(LEAST_STEPS, min(newest + 1, KEPT_STEPS))
    planes = Planes(budget_bytes=PLANE_BYTES, most_steps=steps, room=max(1, len(current)))
    # A short run gets only the room it can use: its report is made while the job is ending.
    digests = DigestLog(min(LOG_ROOM, max(LEAST_ROOM, newest + 1)))
    live = LiveRun(name=data.name, meta=data.meta, planes=planes, digests=digests)
    live.said.most_of_node = sys.maxsize  # they are already thinned, evenly
    abouts = {id(series): _sidecar(series) for series in data.ranks}
    for series in sorted(data.ranks, key=lambda one: one.identity.attempt):
        live.ring(abouts[id(series)], node=nodes.get(series.identity.host, series.identity.host))
    trained = [series for series in current if len(series.steps)]
    for taken in _stretches(trained, np.array([ring_id(abouts[id(series)].key) for series in trained], "V16")):
        live.rows(taken)
        live.tick()
    pids = {series.identity.pid for series in current}
    for event in data.events:
        if event.get("event") in NOTED and event.get("pid") in pids and type(event.get("step")) is int:
            live.noted.add(event["step"], noted_numbers(event), seen=event["event"] == SEEN_EVENT)
    happened = [event for event in data.events if event.get("event") != SEEN_EVENT]
    for file, records in ((EVENTS, happened), (SAMPLES, data.samples), (STACKS, data.stacks)):
        for node, lines in lines_by_node(live, records, nodes).items():
            live.lines(file, lines, node=node, offset_ns=0)
    if data.layers:
        live.said.layers = LayerLines(kept_bytes=sys.maxsize)  # they are already thinned, too
        hosts = {(series.identity.attempt, series.rank): series.identity.host for series in data.ranks}
        told = [
            line | {"node": hosts.get((line["attempt"], line["rank"]), "")} if line["kind"] == "sample" else line
            for line in layer_lines(data.layers)
        ]
        for node, lines in lines_by_node(live, told, nodes).items():
            live.lines(LAYERS, lines, node=node, offset_ns=0)
    live.tick()
    return live


def lines_by_node(live: LiveRun, records: Sequence[dict[str, Any]], nodes: Mapping[str, str]) -> dict[str, list[bytes]]:
    """Encode records as their nodes would have sent them."""
    by_node: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        host = str(record.get("node") or record.get("host") or live.meta.get("host") or "")
        by_node.setdefault(nodes.get(host, host), []).append(record)
    encoder = msgspec.json.Encoder()
    return {node: encoder.encode_lines(own).splitlines() for node, own in by_node.items()}


def _stretches(trained: Sequence[RankSeries], idents: NDArray[np.void]) -> Iterator[BlockRows]:
    """Yield the steps of all ranks, one stretch at a time."""
    if not trained:
        return
    first = min(int(series.steps["step"][0]) for series in trained)
    newest = max(int(series.steps["step"][-1]) for series in trained)
    edges = np.arange(first, newest + 1 + (wide := max(1, ROWS_AT_ONCE // len(trained))), wide, dtype=np.uint64)
    cuts = [
        (np.searchsorted(series.steps["step"], edges), np.searchsorted(series.device_steps["step"], edges))
        for series in trained
    ]
    table = np.zeros(len(trained), TABLE_DTYPE)
    table["ring"] = idents
    table["state"] = [_STATES.get(series.state, RingState.EXITED) for series in trained]
    table["live_phase"] = [series.live_phase for series in trained]
    table["live_step"] = [int(series.steps["step"][-1]) + 1 for series in trained]
    for at in range(len(edges) - 1):
        for name in ("lost", "torn"):
            table[name] = [0 if at else min(getattr(series, name), 0xFFFFFFFF) for series in trained]
        parts = []
        for series, (host, device) in zip(trained, cuts, strict=True):
            parts += [series.steps[host[at] : host[at + 1]], series.device_steps[device[at] : device[at + 1]]]
        table["rows"] = [len(parts[place]) + len(parts[place + 1]) for place in range(0, len(parts), 2)]
        yield BlockRows(table=table.copy(), slots=np.concatenate([_bytes_of(part) for part in parts]))


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    bare: NDArray[np.uint8] = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, SLOT_BYTES)
    return bare


def _sidecar(series: RankSeries) -> RingSidecar:
    identity = series.identity
    return RingSidecar(
        identity=identity,
        pid=identity.pid,
        start_ticks=0,
        anchor_mono_ns=series.anchor_mono_ns,
        anchor_wall_ns=series.anchor_wall_ns,
        phase_names=series.phase_names,
        state=series.state,
        live_phase=series.live_phase,
        live_since_ns=series.live_since_ns,
        live_step=int(series.steps["step"][-1]) + 1 if len(series.steps) else 0,
        hook_failures=series.hook_failures,
        ended_wall_ns=series.ended_wall_ns,
        facts=series.facts,
        groups=series.groups,
    )


# -- deferred samples -------------------------------------------------------------------------------------------------
# The samples of a finished run are loaded last, while the page is already drawn.  A night of a large job has hundreds
# of thousands, and the stored verdict, the steps and the map do not need them.  Requests for samples wait
# (``OpenRun.sampled``).

SAMPLES_AT_ONCE = 5_000
"""Lines to put in before other tasks get a turn."""


async def bring_samples(path: Path, live: LiveRun, nodes: Mapping[str, str]) -> None:
    """Read the samples in a thread and put them in; ``nodes`` as in ``past_run``."""
    try:
        by_node = await asyncio.to_thread(_read_samples, path, live, nodes)
    except (RunError, OSError):
        return  # removed or damaged meanwhile: the next request for the run reports it
    for node, lines in by_node.items():
        for first in range(0, len(lines), SAMPLES_AT_ONCE):
            live.lines(SAMPLES, lines[first : first + SAMPLES_AT_ONCE], node=node, offset_ns=0)
            await asyncio.sleep(0)


def _read_samples(path: Path, live: LiveRun, nodes: Mapping[str, str]) -> dict[str, list[bytes]]:
    from stepscope.store.sealed.samples import sealed_samples  # loads DuckDB, which hubs of live runs do not need

    return lines_by_node(live, sealed_samples(path), nodes)


# -- runs -------------------------------------------------------------------------------------------------------------

MOST_OPEN = 4
LOOKED_AT_S = 30.0
"""How long an active run is followed after the last request for it."""
_WATCHED = (META, SUMMARY, EVENTS, STEPS, INBOX, NODES)


Folders = Callable[[], Mapping[str, Path]]
"""Returns the folders to serve, by tag (``store/catalog.py``); new ones may appear with each call."""


class Runs:
    def __init__(
        self,
        root: Path,
        *,
        one: OpenRun | None,
        names: frozenset[str] = frozenset(),
        folders: Folders | None = None,
    ) -> None:
        self.root = root
        self._one = one
        self._names = names
        self._folders = folders
        self._known_folders: dict[str, Path] = {}
        self._opened: OrderedDict[str, OpenRun] = OrderedDict()
        self._opening: dict[str, asyncio.Task[OpenRun | None]] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._listed: dict[Path, KnownRuns] = {}
        self._listing: asyncio.Task[list[RunEntry]] | None = None

    @classmethod
    def of_one(cls, run_dir: Path, live: LiveRun, *, wanted: str = "") -> Runs:
        """Serve a run that its hub feeds; ``wanted`` is its requested name."""
        one = OpenRun(run_dir, live, fed=True)
        return cls(run_dir.parent, one=one, names=frozenset({run_dir.name, wanted} - {""}))

    @classmethod
    def of_past(cls, run_dir: Path, data: RunData, document: Mapping[str, Any]) -> Runs:
        """Serve a finished run that was already read, with its summary."""
        return cls(run_dir.parent, one=_past(run_dir, data, document), names=frozenset({run_dir.name}))

    @classmethod
    def of_folder(cls, root: Path) -> Runs:
        """Serve all runs directly under ``root``; or ``root`` itself, if it is a run."""
        if (root / META).is_file():
            return cls(root.resolve().parent, one=None, names=frozenset({root.resolve().name}))
        return cls(root, one=None)

    @classmethod
    def of_user(cls, folders: Folders) -> Runs:
        """Serve all runs of several folders; a run's ID says in which folder it is."""
        return cls(Path(), one=None, folders=folders)

    def id_of(self, path: Path) -> str:
        """Return the ID of a listed run."""
        return path.name if self._folders is None else catalog.run_id(path)

    def folder_of(self, path: Path) -> str | None:
        """Return the folder of a run as text; None if all runs are in one folder."""
        if self._folders is None:
            return None
        home, folder = str(Path.home()), str(path.parent)
        return f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}/") else folder

    def folders(self) -> list[Path]:
        """Return the folders of which all runs are served; none for the hub of one run.  Reads the disk."""
        if self._one is not None or self._names:
            return []
        return [self.root] if self._folders is None else list(self._folders().values())

    def live(self) -> list[OpenRun]:
        """Return the open runs; used for metrics."""
        return [self._one] if self._one is not None else list(self._opened.values())

    async def entries(self) -> list[RunEntry]:
        """List the runs, newest first.  Concurrent requests share one scan of the folder."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(asyncio.to_thread(self._list))
        return await asyncio.shield(self._listing)

    async def open(self, name: str) -> OpenRun | None:
        """Open the run with that name.  None if it does not exist or cannot be read; never raises ApiError."""
        if self._one is not None:
            if name not in self._names:
                return None
            self._one.asked()
            self._one.live.settle()
            return self._one
        if await self.where(name) is None:
            return None
        opened = self._opened.get(name)
        now_s = time.monotonic()
        if opened is not None and opened.poll is None and now_s - opened.checked_s > self._pause_s(opened):
            opened.checked_s = now_s
            if opened.stamp != await asyncio.to_thread(changed_of, opened.path):
                opened = None
        if opened is None:
            opened = await self._open_once(name)
        if opened is not None:
            opened.asked()
            opened.live.settle()
            if self._opened.get(name) is opened:
                self._opened.move_to_end(name)
        return opened

    def path_of(self, name: str) -> Path | None:
        """Return the path of an existing run in the only folder."""
        path = self.root / name
        return path if self._folders is None and self._may_be(name) and (path / META).is_file() else None

    @property
    def may_delete(self) -> bool:
        """Whether runs of this hub can be deleted: not the only one that it serves."""
        return self._one is None and not self._names

    async def label(self, run: str, **change: Any) -> Labels | None:
        """Change the labels of a run (``change_labels``); None if it does not exist."""
        path = await self._existing(run)
        return None if path is None else await asyncio.to_thread(catalog.change_labels, path, **change)

    async def delete(self, run: str) -> bool:
        """Delete a run that is over; False if it does not exist.  RunError, with the reason, if it is in use."""
        path = await self._existing(run) if self.may_delete else None
        if path is None:
            return False
        await asyncio.to_thread(catalog.delete_run, path, watch=False)
        self._opened.pop(run, None)
        return True

    async def _existing(self, id_: str) -> Path | None:
        """Return the path of a run that exists and that this hub serves."""
        if self._one is not None:
            return self._one.path if id_ in self._names else None
        path = await self.where(id_)
        return path if path is not None and await asyncio.to_thread((path / META).is_file) else None

    async def close(self) -> None:
        """Stop all background tasks."""
        tasks = [*self._opening.values(), *self._following, *([self._listing] if self._listing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _may_be(self, name: str) -> bool:
        try:
            checked_name(name)
        except UsageError:
            return False
        return not self._names or name in self._names

    async def where(self, id_: str) -> Path | None:
        """Return where a run with that ID would be; None if it cannot be a run of this hub."""
        if self._folders is None:
            return self.root / id_ if self._may_be(id_) else None
        name, tag = catalog.split_run_id(id_)
        if not self._may_be(name):
            return None
        if tag not in self._known_folders:
            self._known_folders.update(await asyncio.to_thread(self._folders))
        folder = self._known_folders.get(tag)
        return None if folder is None else folder / name

    @staticmethod
    def _pause_s(opened: OpenRun) -> float:
        return max(CHECK_S, opened.took_s / READING_SHARE)

    async def _open_once(self, name: str) -> OpenRun | None:
        """Open a run; concurrent requests share one attempt."""
        task = self._opening.get(name)
        if task is None:
            task = self._opening[name] = asyncio.create_task(self._open(name))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(task)

    async def _open(self, name: str) -> OpenRun | None:
        path = await self.where(name)
        try:
            opened = None if path is None else await asyncio.to_thread(_load, path)
        except (RunError, OSError):
            opened = None
        if opened is None:
            self._opened.pop(name, None)
            return None
        opened.id = name
        opened.asked()
        self._opened[name] = opened
        self._opened.move_to_end(name)
        while len(self._opened) > MOST_OPEN:
            self._opened.popitem(last=False)
        if opened.poll is not None:
            self._in_background(self._follow(opened, opened.poll))
        elif opened.unsampled:
            opened.sampling = self._in_background(bring_samples(opened.path, opened.live, _node_names(opened.path)))
        return opened

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return task

    async def _follow(self, run: OpenRun, poll: Poll) -> None:
        """Keep up with an active run while clients ask for it; then close it."""
        whole = partial(whole_run, run) if run.live.partial else None
        keeping = asyncio.create_task(keep_up(run.live, poll=poll, whole=whole))
        try:
            while self._opened.get(run.id) is run and time.monotonic() - run.live.asked_s < LOOKED_AT_S:
                await asyncio.wait((keeping,), timeout=CHECK_S)
                if keeping.done() or not await asyncio.to_thread(_goes_on, run.path):
                    break
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            if self._opened.get(run.id) is run:
                del self._opened[run.id]

    def _list(self) -> list[RunEntry]:
        if self._one is not None:
            return [run_entry(self._one.path)]
        if self._names:
            return [run_entry(self.root / name) for name in sorted(self._names)]
        folders = self.folders()
        entries = [
            entry
            for folder in folders
            for entry in list_runs(folder, known=self._listed.setdefault(folder, KnownRuns()))[0]
        ]
        return entries if len(folders) == 1 else sorted(entries, key=lambda one: one.created_wall_ns, reverse=True)


def _load(path: Path) -> OpenRun:
    started_s = time.monotonic()
    stamp = changed_of(path)
    meta = read_meta(path)
    if meta.get("sealed") is not True and _goes_on(path):
        live, poll = recent_run(path, meta) or _all_of(path, meta)
        opened = OpenRun(path, live, poll=poll)
        poll()
        live.tick()
    else:
        summary = load_summary(path)
        loaded = load_run(path, samples=summary is None)
        opened = _past(path, loaded.data, summary or summarize(loaded.data, logs=log_names(path)))
        opened.unsampled = loaded.samples_left_out
    opened.stamp = stamp
    opened.checked_s = time.monotonic()
    opened.took_s = opened.checked_s - started_s
    return opened


def final_of(path: Path) -> FinalSummary:
    """Summarize a run whose processes have ended, before it is sealed.  RunError if it cannot be read."""
    data = open_run(path)
    return summarize(data, logs=log_names(path)), data.hangs


# -- long active runs -------------------------------------------------------------------------------------------------
# All steps of a day take many seconds to read.  Clients first get a model of the last steps; all of them are read into
# another model, in a thread, which then takes its place.


FIRST_S = 2.0
"""For this long the hub's clients have all of the processor: they draw their first picture."""


def recent_run(path: Path, meta: Mapping[str, Any]) -> tuple[LiveRun, Poll] | None:
    """Return a model with the last steps of a long run on one node, and its poll; None for other runs."""
    from stepscope.hub.ingest.tail import Tail, is_long

    if (path / INBOX).exists() or not is_long(path):
        return None
    live = LiveRun(name=path.name, run_dir=path, meta=meta)
    live.partial = True
    poll = Tail(path, live, recent=True).poll
    _catch_up(live, poll)
    return live, poll


async def whole_run(run: OpenRun) -> tuple[LiveRun, Poll]:
    """Read all steps of an active run; then its model is the run's, and polled from there on."""
    stop = threading.Event()
    await asyncio.sleep(FIRST_S)
    try:
        live, poll = await asyncio.to_thread(_read_all, run.path, run.live.meta, stop)
    finally:
        stop.set()  # a thread cannot be canceled
    run.live = live
    if run.poll is not None:
        run.poll = poll
    return live, poll


def _read_all(path: Path, meta: Mapping[str, Any], stop: threading.Event) -> tuple[LiveRun, Poll]:
    live, poll = _all_of(path, meta)
    _catch_up(live, poll, stop)
    return live, poll


def _catch_up(live: LiveRun, poll: Poll, stop: threading.Event | None = None) -> None:
    while stop is None or not stop.is_set():
        began_s = time.monotonic()
        poll()
        live.tick()
        if time.monotonic() - began_s < BACKLOG_S:
            return


def _all_of(path: Path, meta: Mapping[str, Any]) -> tuple[LiveRun, Poll]:
    live = LiveRun(name=path.name, run_dir=path, meta=meta)
    return live, _poll_of(path, live)


def _poll_of(path: Path, live: LiveRun) -> Poll:
    """Poll what this node writes and, in a job with several nodes, what the others send."""
    # Imported here: writing report.html during a job does not need them, and memory is scarce.
    from stepscope.hub.ingest.tail import InboxTail, Tail

    here, others = Tail(path, live), InboxTail(path, live)
    return lambda: (here.poll(), others.poll())


def _past(path: Path, data: RunData, document: Mapping[str, Any]) -> OpenRun:
    live = past_run(data, _node_names(path))
    return OpenRun(path, live, document=document, hangs=data.hangs, layers=data.layers, ended=run_entry(path).status)


def _node_names(path: Path) -> dict[str, str]:
    """Return the node name by host during the run."""
    return {node.host: str(node.node) for node in read_nodes(path)}


def _goes_on(path: Path) -> bool:
    try:
        return processes_alive(path)
    except NotARun:
        return False


def changed_of(path: Path) -> tuple[Any, ...]:
    """Return a value that differs if the run may have changed on disk."""
    return tuple(stamp_of(path / name) for name in _WATCHED)


# -- opening ahead ----------------------------------------------------------------------------------------------------
# ``stepscope serve`` opens in advance the run most likely to be requested first: the given run, otherwise the newest
# in the folder.  Requests meanwhile share that opening.  An active run is left alone: opening it counts as watching,
# and its agent works harder for watchers.


async def open_ahead(runs: Runs, folder: Path) -> None:
    """Open the likely run of ``folder``, from which ``runs`` was made; errors surface at the next request."""
    path = await asyncio.to_thread(_likely, folder)
    if path is not None:
        await runs.open(path.name)


def _likely(folder: Path) -> Path | None:
    try:
        path = folder.resolve() if (folder / META).is_file() else catalog.newest_run(folder)
        return None if path is None or catalog.is_active(path) else path
    except (NotARun, OSError):
        return None
