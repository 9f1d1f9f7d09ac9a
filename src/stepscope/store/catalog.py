"""List the runs in a folder, from their summaries where they exist, otherwise from their files.

A caller that lists the same folder repeatedly keeps a ``KnownRuns``: a finished run whose files are unchanged is not
read again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.records.finding import SEVERITIES, Severity, status_severity
from stepscope.records.text import Progress, no_progress
from stepscope.store.documents import load_findings, load_summary, read_meta
from stepscope.store.labels import Labels, read_labels
from stepscope.store.live.ring_files import RingSidecar, read_sidecars
from stepscope.store.liveness import launcher_alive, processes_alive
from stepscope.store.paths import FINDINGS, LABELS, META, SUMMARY

__all__ = ["KnownRuns", "RunEntry", "is_active", "list_runs", "newest_run", "run_entry"]


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    name: str
    """As it was renamed, or as it was started."""
    path: Path
    created_wall_ns: int
    status: str
    """finished, failed, crashed, interrupted, ``running``, or ``unfinished``: it ended without reporting how."""
    status_text: str
    """How it ended, in words: ``killed (SIGKILL)``; the status itself without a summary that says more."""
    status_severity: Severity
    ranks: int | None
    steps: int | None
    median_step_ms: float | None
    """Over all steps; over the last steps if the run has no summary."""
    verdict: str
    severity: str | None = None
    """Severity of the verdict; None without a verdict."""
    healthy: bool = False
    """Whether the verdict is that nothing is wrong."""
    cost_share: float | None = None
    """Share of the step time that the verdict costs; None: it has no price."""
    duration_s: float | None = None
    """From the start to the end; None while it is active."""
    host: str = ""
    command: tuple[str, ...] = ()
    commit: str = ""
    """The git commit; empty if not known."""
    branch: str = ""
    dirty: bool = False
    """Whether the working tree had changes that were not committed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each number that the script gave to ``stepscope.note()``."""
    labels: Labels = field(default_factory=Labels)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "created_wall_ns": self.created_wall_ns,
            "status": self.status,
            "status_text": self.status_text,
            "status_severity": self.status_severity,
            "ranks": self.ranks,
            "steps": self.steps,
            "median_step_ms": self.median_step_ms,
            "verdict": self.verdict,
            "severity": self.severity,
            "cost_share": self.cost_share,
            "duration_s": self.duration_s,
            "host": self.host,
            "command": list(self.command),
            "commit": self.commit,
            "branch": self.branch,
            "dirty": self.dirty,
            "metrics": dict(self.metrics),
            "tags": list(self.labels.tags),
            "note": self.labels.note,
        }


Stamp = tuple[tuple[int, int, int] | None, ...]
KnownRuns = dict[str, tuple[Stamp, RunEntry]]
"""By folder name: the entry of each finished run, and the stamp of the files it was read from."""
MOST = 1 << 62
ACTIVE = ("running", "unfinished")


def list_runs(
    root: Path, *, known: KnownRuns | None = None, progress: Progress = no_progress
) -> tuple[list[RunEntry], list[str]]:
    """Return the runs directly under ``root``, newest first, and a line for each that cannot be read.

    ``known`` holds the result of an earlier call; it is used and updated.
    """
    entries: list[RunEntry] = []
    problems: list[str] = []
    earlier, fresh = dict(known or {}), KnownRuns()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    for place, path in enumerate(folders):
        progress(place, len(folders))
        stamp = _stamp(path)
        if stamp[0] is None or path.name.startswith("."):  # being created or deleted
            continue
        held = earlier.get(path.name)
        if held is not None and held[0] == stamp:
            entries.append(held[1])
            fresh[path.name] = held
            continue
        try:
            entry = run_entry(path)
        except NotARun as error:
            problems.append(str(error))
            continue
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others are listed
            problems.append(f"{path} cannot be read: {type(error).__name__}: {error}")
            continue
        entries.append(entry)
        if stamp[1] is not None and entry.status not in ACTIVE:
            fresh[path.name] = stamp, entry
    if known is not None:
        known.clear()
        known.update(fresh)
    return sorted(entries, key=lambda entry: entry.created_wall_ns, reverse=True), problems


def _stamp(path: Path) -> Stamp:
    """Return the state of the files that a finished run is listed from; None for each that does not exist."""
    found: list[tuple[int, int, int] | None] = []
    for file in (META, SUMMARY, FINDINGS, LABELS):
        try:
            about = (path / file).stat()
        except OSError:
            found.append(None)
        else:
            found.append((about.st_mtime_ns, about.st_size, about.st_ino))
    return tuple(found)


def newest_run(root: Path, *, prefer_live: bool = False) -> Path | None:
    """Return the most recently started run directly under ``root``; None if no run can be read.

    ``prefer_live``: choose among the active runs, if there are any.
    """
    begun: list[tuple[float, str, Path, bool]] = []
    for path in root.iterdir() if root.is_dir() else ():
        with suppress(NotARun):
            meta = read_meta(path)
            begun.append((_number(meta.get("created_wall_ns")) or 0, path.name, path, meta.get("end") is None))
    begun.sort(reverse=True)
    live = (path for *_, path, open_end in begun if open_end and is_active(path)) if prefer_live else iter(())
    return next(live, begun[0][2] if begun else None)


def is_active(path: Path) -> bool:
    """Whether the run's launcher or a process of its job is alive.  NotARun if the folder is not a run."""
    return launcher_alive(dict(read_meta(path))) or processes_alive(path)


def run_entry(path: Path) -> RunEntry:
    meta = read_meta(path)
    summary = load_summary(path) or {}
    sidecars = list(read_sidecars(path)[0].values())
    # In an active run the watchdog appends each hang it finds; the last one counts.
    verdict = summary.get("verdict") or next(reversed(load_findings(path)), None)
    step_time, steps = summary.get("step_time"), summary.get("steps")
    median = _number(step_time.get("p50_ms")) if isinstance(step_time, Mapping) else None
    total = steps.get("total") if isinstance(steps, Mapping) else None
    status = _status(path, meta, summary)
    git, command = meta.get("git"), meta.get("command")
    labels = read_labels(path)
    return RunEntry(
        name=labels.name or meta["name"],
        path=path,
        created_wall_ns=int(_number(meta.get("created_wall_ns")) or 0),
        status=status,
        status_text=_text(summary, "status_text") or status,
        status_severity=_severity(_text(summary, "status_severity"), status),
        ranks=_count(summary.get("world_size"), len({about.identity.rank for about in sidecars})),
        steps=_count(total, max((about.live_step for about in sidecars), default=0)),
        median_step_ms=_usual_ms(sidecars) if median is None else median,
        verdict=_text(verdict, "title") or "",
        severity=_text(verdict, "severity"),
        healthy=_healthy(verdict),
        cost_share=_cost_share(summary),
        duration_s=None if status in ACTIVE else _duration_s(meta, summary),
        host=_text(meta, "host") or "",
        command=tuple(map(str, command)) if isinstance(command, list) else (),
        commit=_text(git, "commit") or "",
        branch=_text(git, "branch") or "",
        dirty=isinstance(git, Mapping) and git.get("dirty") is True,
        metrics=_metrics(summary),
        labels=labels,
    )


def _cost_share(summary: Mapping[str, Any]) -> float | None:
    findings = summary.get("findings")
    first = findings[0] if isinstance(findings, list) and findings else None
    cost = first.get("cost") if isinstance(first, Mapping) else None
    return _number(cost.get("share")) if isinstance(cost, Mapping) else None


def _duration_s(meta: Mapping[str, Any], summary: Mapping[str, Any]) -> float | None:
    run, end, began = summary.get("run"), meta.get("end"), _number(meta.get("created_wall_ns"))
    said = _number(run.get("duration_s")) if isinstance(run, Mapping) else None
    ended = _number(end.get("wall_ns")) if isinstance(end, Mapping) else None
    if said is not None or ended is None or began is None:
        return said
    return max(ended - began, 0) / 1e9


def _metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The last values, as the summary has them; none of a metric that is NaN by now, for which it has an older one."""
    said, findings = summary.get("metrics"), summary.get("findings")
    found = [one for one in findings if isinstance(one, Mapping)] if isinstance(findings, list) else []
    evidence = [one.get("evidence") for one in found if one.get("kind") in ("loss_nan", "nan_gradients")]
    lost = {str(about.get("name")) for about in evidence if isinstance(about, Mapping)}
    rows = [(name, row) for name, row in said.items() if name not in lost] if isinstance(said, Mapping) else []
    lasts = ((str(name), _number(row.get("last"))) for name, row in rows if isinstance(row, Mapping))
    return {name: last for name, last in lasts if last is not None}


def _usual_ms(sidecars: Iterable[RingSidecar]) -> float | None:
    """Median step time of a run without a summary: as its agent last wrote it for the newest attempt."""
    known = [about for about in sidecars if about.usual_step_ns]
    newest = max((about.identity.attempt for about in known), default=0)
    times_ns = [about.usual_step_ns for about in known if about.identity.attempt == newest]
    return statistics.median(times_ns) / 1e6 if times_ns else None


def _status(path: Path, meta: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    end = meta.get("end")
    for said in (summary.get("status"), end.get("status") if isinstance(end, Mapping) else None):
        if isinstance(said, str):
            return said
    return "running" if is_active(path) else "unfinished"


def _severity(said: str | None, status: str) -> Severity:
    return next((known for known in SEVERITIES if known == said), status_severity(status))


def _text(document: Any, name: str) -> str | None:
    said = document.get(name) if isinstance(document, Mapping) else None
    return said if isinstance(said, str) else None


def _healthy(verdict: Any) -> bool:
    """A large possible gain in a healthy run is still worth a look."""
    evidence = verdict.get("evidence") if isinstance(verdict, Mapping) else None
    large = isinstance(evidence, Mapping) and bool(evidence.get("large"))
    return _text(verdict, "kind") == "healthy" and not large


def _count(said: Any, seen: int) -> int | None:
    """Return the summary's value, else the observed one if it is not zero."""
    return said if isinstance(said, int) and 0 <= said < MOST else seen or None


def _number(value: Any) -> float | None:
    """Return a number; None if it is not one, or is too large for any clock or counter."""
    return value if isinstance(value, int | float) and -MOST < value < MOST else None
