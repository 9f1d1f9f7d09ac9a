"""What every tool's file provides, the tools by name, and the loop that feeds them.

    destinations = parse_destinations(["tensorboard:logs,wandb"])
    await export(feed, destinations, …)

A destination is ``TOOL`` or ``TOOL:WHERE``.  Each tool is called in its own thread, so that one that hangs delays
no other.  While a run is followed, a call that fails is repeated; what comes meanwhile waits, in bounded number.  A
tool that does not recover is left out from there on, with one message.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from stepscope.assistant.hub_api import RequestError
from stepscope.errors import ExportError, UsageError
from stepscope.integrations.run_feed import FindingChange, News, Row, RunAbout, RunFeed, Telemetry
from stepscope.records.redaction import redact_text
from stepscope.records.text import did_you_mean
from stepscope.store.paths import REPORT_FILE, SUMMARY, SUMMARY_TEXT

__all__ = [
    "TOOLS",
    "Destination",
    "Exporter",
    "Outcome",
    "TelemetryExporter",
    "Tool",
    "export",
    "make_exporter",
    "parse_destination",
    "parse_destinations",
    "thread_cpu_s",
    "tool_defaults",
]


class Exporter(Protocol):
    """Writes one run to one tool.  Methods may block and may raise whatever the tool's library raises.

    A method that raised may be called again with the same arguments.
    """

    def begin(self, run: RunAbout) -> None: ...

    def write_rows(self, rows: Sequence[Row]) -> None: ...

    def write_finding(self, change: FindingChange) -> None: ...

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The run is over; ``files``: its summary, as JSON and as text, and ``report.html``, as far as it has them."""
        ...

    def close(self) -> None:
        """Stop, whether or not ``finish`` was called."""
        ...

    @property
    def where(self) -> str:
        """Where a person finds what was written."""
        ...


@runtime_checkable
class TelemetryExporter(Exporter, Protocol):
    """Also gets what is measured outside the steps."""

    def write_telemetry(self, telemetry: Telemetry) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Tool:
    module: str
    packages: tuple[str, ...]
    """Any of these must be installed."""
    extra: str
    where: str
    """What follows the colon, for help texts; empty: nothing may follow."""
    required: bool = False
    """Whether it must follow, unless ``variable`` is set."""
    variable: str = ""
    """The tool's own variable for the same."""
    telemetry: bool = False
    """Whether its exporter is a ``TelemetryExporter``."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables of its library, set in processes that only export."""


TOOLS: Mapping[str, Tool] = {
    "tensorboard": Tool(
        module="tensorboard", packages=("tensorboard",), extra="tensorboard", where="FOLDER", required=True
    ),
    "wandb": Tool(module="wandb", packages=("wandb",), extra="wandb", where="PROJECT"),
    "mlflow": Tool(
        module="mlflow",
        packages=("mlflow",),
        extra="mlflow",
        where="URI",
        # Otherwise a request to a server that does not answer takes half an hour.
        defaults={"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"},
    ),
    "trackio": Tool(module="trackio", packages=("trackio",), extra="trackio", where="PROJECT"),
    "otlp": Tool(
        module="otlp",
        packages=("opentelemetry.proto",),
        extra="otlp",
        where="URL",
        required=True,
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
        telemetry=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Destination:
    tool: str
    where: str = ""

    @property
    def text(self) -> str:
        return f"{self.tool}:{self.where}" if self.where else self.tool


def parse_destinations(words: Iterable[str]) -> tuple[Destination, ...]:
    """Return the destinations of ``--to WORD[,WORD]…``, each once; UsageError for the first mistake."""
    parts = [part.strip() for word in words for part in word.split(",")]
    return tuple(dict.fromkeys(parse_destination(part) for part in parts if part))


def parse_destination(word: str, *, installed: Callable[[str], bool] | None = None) -> Destination:
    """Return the destination that a word names.

    UsageError: no such tool, nothing where it needs something, a password where other users can read it.
    """
    name, _, where = word.partition(":")
    tool = TOOLS.get(name)
    if tool is None:
        raise UsageError(f"there is no tool {name!r}{did_you_mean(name, TOOLS)}; the tools are {', '.join(TOOLS)}")
    if tool.required and not where and not (tool.variable and os.environ.get(tool.variable)):
        also = f", or set {tool.variable}" if tool.variable else ""
        raise UsageError(f"{name} needs a place: {name}:{tool.where}{also}")
    if "@" in urlsplit(where).netloc or redact_text(where) != where:
        raise UsageError(
            f"the address of {name} contains a password or key, which every user of this machine could read; "
            "put it into the environment (docs/export.md)"
        )
    if not any(map(installed or _installed, tool.packages)):
        raise UsageError(f"{name} is not installed; install it with: pip install 'stepscope[{tool.extra}]'")
    return Destination(tool=name, where=where)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def tool_defaults(destinations: Iterable[Destination], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that a process which only exports sets for the tools' libraries; the user's own win."""
    wanted = [TOOLS[destination.tool].defaults for destination in destinations]
    return {name: value for defaults in wanted for name, value in defaults.items() if name not in environ}


def make_exporter(destination: Destination) -> Exporter:
    module = importlib.import_module(f"stepscope.integrations.{TOOLS[destination.tool].module}")
    exporter: Exporter = module.make_exporter(destination.where)
    return exporter


# -- feeding ----------------------------------------------------------------------------------------------------------

MOST_ROWS = 2000
"""Of a run that is over."""
LIVE_ROWS = 20
"""Of an active run, each time."""
ROWS_AT_ONCE = 250
"""In one call of a tool, so that progress shows."""
MOST_FAILURES = 5
"""Of requests for what is new in an active run, in a row."""
MOST_WAITING = 500
"""Calls that wait for a tool: an hour of an active run."""
PAUSES_S = (5.0, 15.0, 30.0, 60.0)
"""Between repetitions of a call that fails while a run is followed; the last one repeats."""
PATIENCE_S = 120.0
"""How long a call may wait once there is nothing more to write.  Longer: the tool hangs."""
WORK_S = 0.2
"""A call that has used so much of a processor since the last time does not wait: a library that creates the tables of a
database takes half a minute on a busy machine."""
LONGEST_S = 600.0
"""How long a call may take in all, once there is nothing more to write."""
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Outcome:
    destination: Destination
    where: str = ""
    rows: int = 0
    findings: int = 0
    problem: str = ""
    """Why it failed; empty if it did not."""
    hangs: bool = False
    """Whether a call has not returned; its thread is still there."""


_Call = Callable[["Exporter"], None]


class _Feeding:
    """One destination, and how far it is."""

    def __init__(self, destination: Destination, make: Callable[[Destination], Exporter], *, repeats: bool) -> None:
        self.destination = destination
        self.problem = ""
        self._make = make
        self._repeats = repeats
        self._exporter: Exporter | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._ending = Event()
        self._busy_since_s = 0.0
        self._worked_s = self._work_s = 0.0
        """When its thread was last seen to work, and the processor time that it had used by then."""
        self._rows = self._findings = 0
        self._thread = Thread(target=self._work, name=f"export-{destination.tool}", daemon=True)
        self._thread.start()
        self.put(lambda _: None)  # loads the library of the tool, some of which take seconds

    def put(self, call: _Call) -> None:
        if self._calls.qsize() < MOST_WAITING:
            self._calls.put(call)
        elif not self.problem:
            self.problem = "it accepts nothing, and too much waits for it"

    def write(self, news: News) -> None:
        for first in range(0, len(news.rows), ROWS_AT_ONCE):
            self.put(partial(self._write_rows, news.rows[first : first + ROWS_AT_ONCE]))
        for change in news.findings:
            self.put(partial(self._write_finding, change))

    def write_telemetry(self, telemetry: Telemetry) -> None:
        def call(exporter: Exporter) -> None:
            if isinstance(exporter, TelemetryExporter):
                exporter.write_telemetry(telemetry)

        if telemetry.gpus or telemetry.stretches:
            self.put(call)

    def end(self) -> None:
        """Nothing more comes; a call that waits for its repetition gets its last try."""
        self._calls.put(None)
        self._ending.set()

    def is_done(self, patience_s: float, longest_s: float, cpu_s: Callable[[Thread], float]) -> bool:
        """Whether it has ended, or hangs: then its thread is left alone."""
        if not self._thread.is_alive():
            return True
        busy_since_s, now_s = self._busy_since_s, time.monotonic()
        if not busy_since_s:
            return False
        used_s = cpu_s(self._thread)
        if used_s - self._work_s >= WORK_S:
            self._work_s, self._worked_s = used_s, now_s
        return now_s - max(busy_since_s, self._worked_s) > patience_s or now_s - busy_since_s > longest_s

    def outcome(self) -> Outcome:
        hangs = self._thread.is_alive()
        if hangs and not self.problem:
            self.problem = f"it does not answer, for {time.monotonic() - self._busy_since_s:.0f} s now"
        where = "" if self._exporter is None else self._exporter.where
        return Outcome(
            destination=self.destination,
            where=where,
            rows=self._rows,
            findings=self._findings,
            problem=self.problem,
            hangs=hangs,
        )

    # -- in its thread --

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._perform(call)
        if self._exporter is not None:
            self._perform(lambda exporter: exporter.close(), always=True)

    def _perform(self, call: _Call, *, always: bool = False) -> None:
        """Call the tool, if need be again; if it fails for good, never again, unless ``always``."""
        tries = 0
        while always or not self.problem:
            self._busy_since_s = time.monotonic()
            try:
                if self._exporter is None:
                    self._exporter = self._make(self.destination)
                call(self._exporter)
                return
            except Exception as error:  # noqa: BLE001 - whatever the library of a tool raises
                was_last = self._ending.is_set() and tries > 0  # even the last call of a run is repeated once
                if not self._repeats or was_last or isinstance(error, ExportError | UsageError):
                    self.problem = self.problem or redact_text(f"{type(error).__name__}: {error}")[:300]
                    return
            finally:
                self._busy_since_s = 0.0
            self._ending.wait(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def _write_rows(self, rows: Sequence[Row], exporter: Exporter) -> None:
        exporter.write_rows(rows)
        self._rows += len(rows)

    def _write_finding(self, change: FindingChange, exporter: Exporter) -> None:
        exporter.write_finding(change)
        self._findings += 1


def _begin(about: RunAbout, exporter: Exporter) -> None:
    exporter.begin(about)


def thread_cpu_s(thread: Thread) -> float:
    """Return the processor time that a thread of this process has used; 0.0 if it has ended."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_bytes()
    except OSError:
        return 0.0
    user, system = stat.rpartition(b")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _files(run_dir: Path) -> list[Path]:
    """What is uploaded.  A run may come from anyone: a link could lead to a file that nobody means to upload."""
    paths = [run_dir / name for name in (SUMMARY_TEXT, SUMMARY, REPORT_FILE)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


async def export(
    feed: RunFeed,
    destinations: Sequence[Destination],
    *,
    run_dir: Path,
    page: str = "",
    wait: Callable[[], Any] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    make: Callable[[Destination], Exporter] = make_exporter,
    patience_s: float = PATIENCE_S,
    longest_s: float = LONGEST_S,
    cpu_s: Callable[[Thread], float] = thread_cpu_s,
) -> tuple[Outcome, ...]:
    """Write a run to all destinations until it is over.

    ``page``: the address of its page, without a token.  ``wait``: awaited between two inspections of an active run;
    None: what there is now is written, and that is all.  A TimeoutError of it ends the export, as do requests that fail
    again and again: outcomes have the reason.  ``patience_s``, ``longest_s``: as ``PATIENCE_S`` and ``LONGEST_S``.
    ``cpu_s``: the processor time that a thread has used.
    """
    feeding = [_Feeding(destination, make, repeats=wait is not None) for destination in destinations]
    why = ""
    try:
        await _feed(feed, feeding, run_dir=run_dir, page=page, wait=wait, tell=tell)
    except (RequestError, TimeoutError) as error:
        if wait is None:
            raise
        why = str(error)
    finally:
        # Whatever ended it: what was read by then is written, and the tools are closed.
        for each in feeding:
            each.end()
        while not all(each.is_done(patience_s, longest_s, cpu_s) for each in feeding):
            await asyncio.sleep(POLL_S)
    outcomes = [each.outcome() for each in feeding]
    return tuple(replace(outcome, problem=outcome.problem or why) for outcome in outcomes)


async def _feed(
    feed: RunFeed,
    feeding: Sequence[_Feeding],
    *,
    run_dir: Path,
    page: str,
    wait: Callable[[], Any] | None,
    tell: Callable[[str], None],
) -> None:
    telemetry = [each for each in feeding if TOOLS[each.destination.tool].telemetry]
    begun, failures, reported = False, 0, set[str]()
    news: News | None = None
    while True:
        try:
            if news is None:
                news = await feed.news(most_rows=MOST_ROWS if wait is None else LIVE_ROWS)
            if not begun and (news.rows or news.findings or news.over or wait is None):
                # Not before: the number of ranks is not known until they have begun.
                about = replace(await feed.about(), page=page)
                begun = True
                for each in feeding:
                    each.put(partial(_begin, about))
            measured = await feed.telemetry(over=news.over) if telemetry else Telemetry()
        except RequestError:
            failures += 1
            if wait is None or failures > MOST_FAILURES:
                raise
            await wait()
            continue
        failures = 0
        for each in feeding:
            each.write(news)
        for each in telemetry:
            each.write_telemetry(measured)
        if news.over or wait is None:
            break
        news = None
        for each in feeding:
            if each.problem and each.destination.text not in reported:
                reported.add(each.destination.text)
                tell(f"{each.destination.text} failed, and gets nothing more: {each.problem}")
        await wait()
    if news.over:
        status, summary, files = news.status, await feed.summary(), _files(run_dir)
        for each in feeding:
            each.put(lambda exporter: exporter.finish(status, summary, files))
