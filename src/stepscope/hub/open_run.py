"""An open run: its model, the contents of its files, and its summary.  ``Runs`` creates and keeps it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotARun
from stepscope.hub.live.figures import rates_of
from stepscope.hub.live.live_run import LiveRun
from stepscope.records import run_clock
from stepscope.records.finding import SEVERITIES, Severity, status_severity
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.hang import HangRecord
from stepscope.records.layers import LayerRecords
from stepscope.records.series import RunData
from stepscope.reports.finding_history import history_rows
from stepscope.store.catalog import Labels, read_labels
from stepscope.store.documents import NodeInfo, read_finding_history, read_meta, read_nodes, read_refused
from stepscope.store.liveness import mark_watched
from stepscope.store.paths import FINDING_HISTORY, LABELS, META, NODES

if TYPE_CHECKING:
    from stepscope.hub.live.rules import Snapshot

__all__ = ["CHECK_S", "FIRST_S", "READING_SHARE", "FinalSummary", "OpenRun", "Poll", "stamp_of"]

Poll = Callable[[], object]
FinalSummary = tuple[Mapping[str, Any], tuple[HangRecord, ...]]
"""The document of ``summary.json``, and the complete hang records."""
CHECK_S = 1.0
"""The time between two checks whether a finished run changed on disk."""
FIRST_S = 2.0
"""For this long the hub's clients have all of the processor: they draw their first picture."""
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
        self.recorded: RunData | None = None
        """The whole run, if its caller has read it anyway: then it is not read again for incidents."""
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
        self._files: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._summary: Mapping[str, Any] | None = None
        self._summary_due_s = 0.0
        self._summing: asyncio.Task[Mapping[str, Any]] | None = None
        self.unsampled = False
        """Whether the samples still have to be read."""
        self.sampling: asyncio.Task[None] | None = None
        self.samples_requested = asyncio.Event()

    async def sampled(self) -> None:
        """Wait until the samples are loaded; without a request for them they are loaded after a while."""
        self.samples_requested.set()
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
        status = end.get("status") if isinstance(end, Mapping) else None
        return self._ended or (status if isinstance(status, str) else "running")

    def status_text(self, *, hung: bool) -> tuple[str, Severity]:
        """Return the status in words, and how bad it is; ``hung``: whether ranks make no progress now."""
        status = self.status()
        if self.document is not None and isinstance(text := self.document.get("status_text"), str):
            severity = self.document.get("status_severity")
            return text, next((known for known in SEVERITIES if known == severity), status_severity(status))
        if status == "running" and hung:
            return "hung", "critical"
        return status, status_severity(status)

    def ended_wall_ns(self) -> int | None:
        """Return when the run ended; None while that is unknown."""
        end = self.meta().get("end")
        ended = end.get("wall_ns") if isinstance(end, Mapping) else None
        return ended if isinstance(ended, int) else self._ended_wall_ns

    def nodes(self) -> list[NodeInfo]:
        found: list[NodeInfo] = self._cached(NODES, read_nodes)
        return found

    def finding_history(self) -> list[dict[str, Any]]:
        """Return when each finding was shown, changed, and was over (``reports/finding_history.py``)."""
        changes: tuple[FindingEpisode, ...] = self._cached(FINDING_HISTORY, read_finding_history)
        return history_rows(changes, over=self.over)

    def refused(self) -> Mapping[str, int]:
        """Count the refused strangers by reason."""
        return read_refused(self.path)

    @property
    def over(self) -> bool:
        """Whether no more data will come."""
        return not self.fed and self.poll is None

    def note_request(self) -> None:
        """Note that a client is looking: the run's agent then writes the state of the ranks without delay."""
        self.live.note_request()
        if not self.over and self.live.requested_s - self._noted_s >= CHECK_S:
            self._noted_s = self.live.requested_s
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
        return rates_of(self.live, table)

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
        from stepscope.hub.live.rules import MOST_JUDGED, select, snapshot  # a finished run has its verdict

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
        known = self._files.get(name)
        if known is None or known[0] != stamp:
            known = self._files[name] = stamp, read(self.path)
        return known[1]


def _summary_of(copy: Snapshot) -> tuple[Mapping[str, Any], tuple[HangRecord, ...]]:
    from stepscope.hub.live.goodput import ledger_document
    from stepscope.hub.live.rules import run_data_of
    from stepscope.reports import summarize

    data = run_data_of(copy)
    ledger = ledger_document(copy.accounts, copy.meta, data.hangs)
    return {**summarize(data, alive=True), "goodput": ledger}, data.hangs


def stamp_of(path: Path) -> tuple[Any, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_mtime_ns, about.st_size, about.st_ino
