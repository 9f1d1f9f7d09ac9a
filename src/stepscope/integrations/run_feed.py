"""What is new in a run: rows of figures by step, findings that appeared or are over, and the end.

    feed = RunFeed(api, run)
    news = await feed.news(most_rows=20)      # again and again until ``news.over``

Every step of an attempt is in exactly one row.  A row of several steps has the number of the last one; its times are
means over these steps.  A job that is restarted makes some steps anew: they are new rows with numbers as before.  The
figures are those that the page draws, from the same documents of the hub's API.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.assistant.hub_api import HubApi

__all__ = [
    "PREFIX",
    "FindingChange",
    "FindingState",
    "GpuRow",
    "News",
    "Row",
    "RunAbout",
    "RunFeed",
    "Stretch",
    "Telemetry",
    "finding_line",
    "run_text",
]

PREFIX = "stepscope/"
"""Of every name, so that ours are apart from those that the script logs itself."""
MEDIAN, WORST = 3, 7
"""Columns of the quantiles in the document of steps."""
NS_PER_MS = 1e6
BYTES_PER_GIB = 1 << 30
RATES = {
    "samples/s": "samples_per_s",
    "tokens/s": "tokens_per_s",
    "TFLOP/s per device": "tflops_per_device",
    "MFU": "mfu",
}
"""Throughput in the document of metrics, and what it is called elsewhere.  What the script notes itself is left out:
the script logs that to its tracker, too."""
MEMORY = {"allocated": "memory/allocated_gib", "peak_allocated": "memory/peak_gib"}
MOST_BINS = 4096
"""That the API serves at once."""
MOST_GPUS = 64
"""Those of the first nodes; Prometheus reads the others from their own exporters."""
GPU_BINS = 240
"""Of a run that is over."""
MOST_RANKS = 64
"""Listed with a finding or hang."""


@dataclass(frozen=True, kw_only=True)
class RunAbout:
    """What identifies a run to a tool."""

    name: str
    command: str
    world_size: int
    created_wall_ns: int
    settings: Mapping[str, str] = field(default_factory=dict)
    """What was run: command, host, commit, versions."""
    tags: tuple[str, ...] = ()
    page: str = ""
    """The address of its page, without a token; empty: no hub shows it."""
    folder: str = ""
    """Where it was started; empty: not known."""


@dataclass(frozen=True, kw_only=True)
class Row:
    step: int
    wall_ns: int
    """When its first step began; 0 if that is not known."""
    values: Mapping[str, float]


FindingState = Literal["opened", "resolved"]


@dataclass(frozen=True, kw_only=True)
class FindingChange:
    """A finding was first shown, or is over."""

    number: int
    state: FindingState
    kind: str
    severity: str
    title: str
    step: int
    wall_ns: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class News:
    rows: tuple[Row, ...] = ()
    findings: tuple[FindingChange, ...] = ()
    over: bool = False
    """Nothing more will come."""
    status: str = "running"


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """A GPU over some seconds: means of what its agent sampled, by name as in samples (docs/schema.md)."""

    host: str
    index: int
    uuid: str
    model: str
    wall_ns: int
    """The end of these seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Something that lasted, and is over: a hang, or a capture."""

    name: Literal["hang", "capture"]
    title: str
    begin_wall_ns: int
    end_wall_ns: int
    failed: bool
    attributes: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What trackers do not get, but telemetry does."""

    gpus: tuple[GpuRow, ...] = ()
    stretches: tuple[Stretch, ...] = ()


class RunFeed:
    def __init__(self, api: HubApi, run: str) -> None:
        """``run``: its ID."""
        self._api = api
        self._path = f"/api/v1/runs/{run}"
        self._next: dict[int, int] = {}
        """The first step that was not reported, by attempt of the job."""
        self._reported: dict[int, str] = {}
        """The last state of each finding that was reported, by number."""
        self._next_gpus_ns: int | None = None
        self._stretches: set[str] = set()

    async def about(self) -> RunAbout:
        document = await self._api.get(self._path)
        context = document.get("context") or {}
        git = context.get("git") or {}
        settings = {
            "host": context.get("host"),
            "commit": git.get("commit"),
            "branch": git.get("branch"),
            "python": context.get("python"),
            "stepscope": context.get("stepscope"),
        }
        command = context.get("command") or ""
        return RunAbout(
            name=str(document.get("name") or document.get("label") or ""),
            command=command if isinstance(command, str) else " ".join(map(str, command)),
            world_size=int(document.get("world_size") or 0),
            created_wall_ns=int(context.get("created_wall_ns") or 0),
            settings={name: str(value) for name, value in settings.items() if value},
            tags=tuple(map(str, document.get("tags") or ())),
            folder=str(context.get("cwd") or ""),
        )

    async def news(self, *, most_rows: int) -> News:
        """Return what is new since the last call, in at most so many rows."""
        run = await self._api.get(self._path)
        over = bool(run.get("over"))
        newest = run.get("newest_step") if over else run.get("step")
        attempt = int(run.get("attempt") or 0)
        first = self._next.get(attempt, 0)
        rows: tuple[Row, ...] = ()
        read_to: dict[int, int] = {}
        if isinstance(newest, int) and newest >= first:
            read_to[attempt] = newest + 1
            rows = await self._rows(first, newest, min(most_rows, MOST_BINS))
        findings = await self._findings(over=over)
        self._next.update(read_to)  # now that all requests were answered: otherwise the next call returns these rows
        return News(rows=rows, findings=findings, over=over, status=str(run.get("status") or "running"))

    async def summary(self) -> Mapping[str, Any]:
        """The document of ``summary.json``."""
        document: Mapping[str, Any] = (await self._api.get(f"{self._path}/summary"))["summary"]
        return document

    async def telemetry(self, *, over: bool) -> Telemetry:
        """Return what is new since the last call; ``over``: as ``News.over``."""
        return Telemetry(gpus=await self._gpus(over=over), stretches=await self._over_stretches())

    async def _gpus(self, *, over: bool) -> tuple[GpuRow, ...]:
        bins = GPU_BINS if over and self._next_gpus_ns is None else 1
        span = {"kind": "gpu", "first_ns": self._next_gpus_ns, "bins": bins, "limit": MOST_GPUS}
        samples = await self._api.get(f"{self._path}/samples", **span)
        ends = [start + samples["bin_ns"] for start in samples["wall_ns"]]
        if ends:
            self._next_gpus_ns = ends[-1]
        rows = []
        for series in samples["series"]:
            for at, wall_ns in enumerate(ends):
                found = {name: column[at] for name, column in series["values"].items() if column[at] is not None}
                if found:
                    rows.append(
                        GpuRow(
                            host=str(series.get("host") or series.get("node") or ""),
                            index=int(series.get("index") or 0),
                            uuid=str(series.get("uuid") or ""),
                            model=str(series.get("name") or ""),
                            wall_ns=wall_ns,
                            values=found,
                        )
                    )
        return tuple(rows)

    async def _over_stretches(self) -> tuple[Stretch, ...]:
        hangs = (await self._api.get(f"{self._path}/hangs"))["hangs"]
        captures = (await self._api.get(f"{self._path}/captures"))["captures"]
        found = [(f"hang/{row['host']}/{row['number']}", _hang(row)) for row in hangs if row["over_wall_ns"]]
        found += [(f"capture/{row['id']}", _capture(row)) for row in captures if row["done_wall_ns"]]
        fresh = [(key, stretch) for key, stretch in found if key not in self._stretches]
        self._stretches.update(key for key, _ in fresh)
        return tuple(stretch for _, stretch in fresh)

    async def _rows(self, first: int, newest: int, most: int) -> tuple[Row, ...]:
        span = {"first": first, "last": newest, "bins": most}
        steps = await self._api.get(f"{self._path}/steps", **span)
        metrics = await self._api.get(f"{self._path}/metrics", **span)
        values: list[dict[str, float]] = [{} for _ in steps["last"]]
        for name, quantiles in steps["ns"].items():
            _put_times(values, name, quantiles)
        for name, to in MEMORY.items():
            for at, size in enumerate(steps["memory_bytes"].get(name) or ()):
                _put(values[at], to, size, BYTES_PER_GIB)
        _put_rates(values, steps["first"], steps["last"], metrics["metrics"])
        began = steps.get("start_wall_ns") or [0] * len(values)
        return tuple(
            Row(step=step, wall_ns=int(wall_ns or 0), values=row)
            for step, wall_ns, row in zip(steps["last"], began, values, strict=True)
            if row
        )

    async def _findings(self, *, over: bool) -> tuple[FindingChange, ...]:
        history = (await self._api.get(f"{self._path}/findings/history"))["history"]
        if over and not history:
            return await self._final_findings()
        changes = []
        for episode in history:
            number, state = episode["number"], "opened" if episode["open"] else "resolved"
            known = self._reported.get(number)
            self._reported[number] = state
            if known is None:
                changes.append(_change(episode, "opened"))
            if state == "resolved" and known != "resolved":
                changes.append(_change(episode, "resolved"))
        return tuple(changes)

    async def _final_findings(self) -> tuple[FindingChange, ...]:
        """Of a run that no hub judged while it was active: what its summary says."""
        findings = (await self._api.get(f"{self._path}/findings"))["findings"]
        changes = []
        for number, finding in enumerate(findings, start=1):
            if finding["severity"] != "info" and number not in self._reported:
                self._reported[number] = "opened"
                span = finding.get("steps")
                step = span[0] if isinstance(span, list) and span else 0
                changes.append(_change({**finding, "number": number, "first_step": step, "first_wall_ns": 0}, "opened"))
        return tuple(changes)


def _hang(row: Mapping[str, Any]) -> Stretch:
    culprits = ",".join(str(culprit["rank"]) for culprit in row["culprits"][:MOST_RANKS])
    return Stretch(
        name="hang",
        title=str(row["title"]),
        begin_wall_ns=int(row["stopped_wall_ns"]),
        end_wall_ns=int(row["over_wall_ns"]),
        failed=True,
        attributes={"stepscope.hang.kind": str(row["kind"]), "stepscope.ranks": culprits},
    )


def _capture(row: Mapping[str, Any]) -> Stretch:
    return Stretch(
        name="capture",
        title=str(row["verdict"] or row["problem"] or row["state"]),
        begin_wall_ns=int(row["requested_wall_ns"]),
        end_wall_ns=int(row["done_wall_ns"]),
        failed=row["state"] == "failed",
        attributes={"stepscope.capture.reason": str(row["reason"]), "stepscope.capture.id": str(row["id"])},
    )


def _put_times(values: list[dict[str, float]], name: str, quantiles: Sequence[Sequence[float | None] | None]) -> None:
    """Put the median and the worst rank's time of a phase, of the step, or of the work in it."""
    to = {"wall": "step_ms", "work": "work_ms"}.get(name, f"phase/{name}_ms")
    for at, row in enumerate(quantiles):
        if row:
            _put(values[at], to, row[MEDIAN], NS_PER_MS)
            _put(values[at], to.replace("_ms", "_worst_ms"), row[WORST], NS_PER_MS)


def _put_rates(
    values: list[dict[str, float]], first: Sequence[int], last: Sequence[int], metrics: Sequence[Mapping[str, Any]]
) -> None:
    """Throughput is known of some steps only: the last value in the steps of a row."""
    for metric in metrics:
        to = RATES.get(str(metric.get("name")))
        if to is None:
            continue
        for step, value in zip(metric["step"], metric["value"], strict=True):
            for at, (low, high) in enumerate(zip(first, last, strict=True)):
                if low <= step <= high:
                    _put(values[at], f"throughput/{to}", value, 1.0)


def _put(row: dict[str, float], name: str, value: float | None, unit: float) -> None:
    if isinstance(value, int | float) and math.isfinite(value):
        row[PREFIX + name] = value / unit


def _change(row: Mapping[str, Any], state: FindingState) -> FindingChange:
    when = "first" if state == "opened" else "last"
    return FindingChange(
        number=int(row["number"]),
        state=state,
        kind=str(row["kind"]),
        severity=str(row["severity"]),
        title=str(row["title"]),
        step=int(row[f"{when}_step"]),
        wall_ns=int(row[f"{when}_wall_ns"]),
        ranks=tuple(row.get("ranks") or ()),
    )


# -- texts of runs and findings, the same for all tools ---------------------------------------------------------------


def finding_line(change: FindingChange) -> str:
    if change.state == "resolved":
        return f"Over since step {change.step:,}: {change.title}"
    return f"{change.severity}, step {change.step:,}: {change.title}"


def run_text(run: RunAbout) -> str:
    """The run as a list in Markdown."""
    rows = {"command": run.command, "ranks": str(run.world_size), **run.settings}
    lines = [f"- {name}: `{value}`" for name, value in rows.items() if value]
    return "\n".join([*lines, *([f"- page: <{run.page}>"] if run.page else [])])
