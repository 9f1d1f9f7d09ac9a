"""The runs of a folder: list them, label them, delete them.

A caller that lists the same folder repeatedly keeps a ``KnownRuns``: a finished run whose files are unchanged is not
read again.

Labels: a name, tags and a note that people give a run, in ``labels.json``.

The file is separate from everything that is recorded, so an active run and a sealed one are labeled in the same way.
Changes are serialized by the run's lock and replace the file as a whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun, RunError, RunUnwritable, UsageError
from stepscope.records import run_clock
from stepscope.records.finding import SEVERITIES, Severity, status_severity
from stepscope.records.text import Progress, no_progress
from stepscope.store import file_io
from stepscope.store.documents import JOINED, awaits_delivery, load_findings, load_summary, read_meta, read_nodes
from stepscope.store.live.ring_files import RingSidecar, read_sidecars
from stepscope.store.liveness import is_local, launcher_alive, processes_alive, sealing_barred, session_of
from stepscope.store.locks import LockBusy, locked, take_lock, writing_barred
from stepscope.store.paths import FINDINGS, INBOX, LABELS, META, SUMMARY

__all__ = [
    "ACTIVE",
    "KnownRuns",
    "Labels",
    "RunEntry",
    "Stamp",
    "change_labels",
    "checked_tag",
    "delete_run",
    "is_active",
    "known_stamp",
    "list_runs",
    "newest_run",
    "read_labels",
    "run_entry",
]

# -- labels -----------------------------------------------------------------------------------------------------------

SCHEMA = 1
MOST_BYTES = 64 << 10
MOST_TAGS = 32
MOST_NAME = 200
MOST_NOTE = 2000
WAIT_S = 10.0
"""A change waits this long for another process that holds the run's lock."""
_TAG = re.compile(r"[^\s,+-][^\s,]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Labels:
    name: str = ""
    """Shown instead of the name of the run's folder; empty: not renamed."""
    tags: tuple[str, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tags": list(self.tags)}


def checked_tag(text: str) -> str:
    """The tag; UsageError if it cannot be one."""
    if _TAG.fullmatch(text) is None or not text.isprintable():
        raise UsageError(f"{text!r} is not a valid tag: use 1 to 40 characters without spaces and commas")
    return text


def read_labels(run_dir: Path) -> Labels:
    """Return the labels of a run.  Whatever is missing or invalid is left out: the file may come from anyone."""
    try:
        document = json.loads(file_io.read_document(run_dir / LABELS, most=MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return Labels()
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return Labels()
    name, tags, note = document.get("name"), document.get("tags"), document.get("note")
    valid = [tag for tag in tags if isinstance(tag, str) and _TAG.fullmatch(tag)] if isinstance(tags, list) else []
    return Labels(
        name=name[:MOST_NAME] if isinstance(name, str) else "",
        tags=tuple(dict.fromkeys(valid))[:MOST_TAGS],
        note=note[:MOST_NOTE] if isinstance(note, str) else "",
    )


def change_labels(
    run_dir: Path,
    *,
    name: str | None = None,
    note: str | None = None,
    tags: Sequence[str] | None = None,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    made_here: bool = False,
) -> Labels:
    """Change what is given, and return all labels.  An empty ``name`` or ``note`` removes it; ``tags`` replaces all.

    ``made_here``: this process made the folder (``writing_barred``).
    UsageError if a value is invalid; RunError if the folder is not a run, or must not be changed.
    """
    read_meta(run_dir)
    if barred := writing_barred(run_dir, made_here=made_here):
        raise RunUnwritable(f"{run_dir} cannot be labeled: {barred}")
    removed, added = set(remove), [checked_tag(tag) for tag in add]
    try:
        with locked(run_dir, wait_s=WAIT_S):
            before = read_labels(run_dir)
            remaining = [tag for tag in (before.tags if tags is None else map(checked_tag, tags)) if tag not in removed]
            after = Labels(
                name=before.name if name is None else _checked_name(name),
                tags=tuple(dict.fromkeys([*remaining, *added])),
                note=before.note if note is None else _checked_note(note),
            )
            if len(after.tags) > MOST_TAGS:
                raise UsageError(f"a run can have at most {MOST_TAGS} tags")
            if after != before:
                file_io.write_json(run_dir / LABELS, {"schema": SCHEMA, **after.to_dict()})
    except LockBusy:
        raise RunError(f"{run_dir} is being changed by another process; try again in a moment") from None
    except OSError as error:
        raise RunUnwritable(f"cannot write {run_dir / LABELS}: {error.strerror}") from error
    return after


def _checked_name(text: str) -> str:
    text = text.strip()
    if len(text) > MOST_NAME or not text.isprintable():
        raise UsageError(f"the name must be one line of at most {MOST_NAME} characters")
    return text


def _checked_note(text: str) -> str:
    text = text.strip()
    if len(text) > MOST_NOTE or not all(c.isprintable() or c == "\n" for c in text):
        raise UsageError(f"the note must be plain text of at most {MOST_NOTE:,} characters")
    return text


# -- deleting ---------------------------------------------------------------------------------------------------------
# Only a Stepscope run that is over, and that no process works on.  The folder is first renamed, which takes effect at
# once, and then removed; what a killed process left of it is removed by the next one.

_DELETED = ".deleted-"
JOINED_SILENCE_S = 86_400.0
"""For how long the node of a run that joined by itself may be silent (its network or this hub was away) before the run
may be deleted: its agent continues when it is back."""


def delete_run(
    run_dir: Path,
    *,
    watch: bool = True,
    unless: Callable[[], str | None] = lambda: None,
    progress: Progress = no_progress,
) -> None:
    """Delete a run and its session; RunError, and nothing is changed, if it is or may be in use.

    ``unless``: returns a reason not to delete it, when nothing else can begin to change it.

    ``watch``: a run recorded on another machine that was never sealed is watched to see whether it is still recorded,
    which can take long; without it such a run is not deleted.
    """
    if run_dir.is_symlink():
        raise RunError(f"{run_dir} is a link and was not deleted")
    meta = read_meta(run_dir)
    why = writing_barred(run_dir) or _in_use(run_dir, meta, watch=watch, progress=progress)
    if why:
        raise RunError(f"{run_dir} was not deleted: {why}")
    try:
        with ExitStack() as locks:
            locks.enter_context(locked(run_dir, wait_s=0.0))
            if (run_dir / INBOX).is_dir():
                locks.callback(os.close, take_lock(run_dir / INBOX))
            # Again, now that nothing else can begin to work on it.
            if why := _in_use(run_dir, read_meta(run_dir), watch=False, progress=progress, seen=True) or unless():
                raise RunError(f"{run_dir} was not deleted: {why}")
            session = session_of(run_dir, meta)
            folder = run_dir.resolve()
            gone = folder.with_name(f"{_DELETED}{secrets.token_hex(8)}")
            folder.rename(gone)
    except LockBusy:
        raise RunError(f"{run_dir} was not deleted: another process is working on it") from None
    except OSError as error:
        raise RunUnwritable(f"{run_dir} was not deleted: {error.strerror}") from error
    if session is not None and session != run_dir / "rings":
        shutil.rmtree(session, ignore_errors=True)
    for left in gone.parent.glob(f"{_DELETED}*"):
        if left.is_dir() and not left.is_symlink():
            with suppress(OSError):
                (left / META).unlink(missing_ok=True)
            shutil.rmtree(left, ignore_errors=True)


def _in_use(run_dir: Path, meta: dict[str, Any], *, watch: bool, progress: Progress, seen: bool = False) -> str | None:
    """Why a run must not be deleted now; ``seen``: a remote run was watched before."""
    if launcher_alive(meta) or processes_alive(run_dir):
        return "it is still active"
    if awaits_delivery(meta):
        return "it has data that its hub may not have yet; `stepscope send` delivers it"
    if why := _may_continue(run_dir, meta):
        return why
    if seen or meta.get("sealed") is True or is_local(meta):
        return None
    if not watch:
        return f"it was recorded on {meta.get('host')} and never finished; use `stepscope delete`"
    return sealing_barred(run_dir, meta, progress=progress)


def _may_continue(run_dir: Path, meta: dict[str, Any]) -> str | None:
    """Why a run that joined this hub by itself may still be recorded, although nobody receives it at the moment."""
    if meta.get(JOINED) is not True or meta.get("end") is not None:
        return None
    nodes = [node for node in read_nodes(run_dir) if not node.replaced_by]
    if nodes and all(node.bye is not None for node in nodes):
        return None
    ages_ns = [run_clock.now_of(meta) - node.heard_wall_ns for node in nodes]
    if not nodes:  # it just joined
        with suppress(OSError):
            ages_ns.append(time.time_ns() - (run_dir / META).stat().st_mtime_ns)
    # A time far in the future is that of a wrong clock, and says nothing.
    if all(abs(age_ns) >= JOINED_SILENCE_S * 1e9 for age_ns in ages_ns):
        return None
    return f"{meta.get('host')} has not reported its end; it can be deleted after a day of silence"


# -- list -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    name: str
    """As it was renamed, or as it was started."""
    path: Path
    url: str = ""
    """Of an archived run; then ``path`` is where its copy on this disk is or would be."""
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
    user: str = ""
    """Who started it, as the launcher recorded it."""
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
            "path": self.url or str(self.path),
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
            "user": self.user,
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
        cached = earlier.get(path.name)
        if cached is not None and cached[0] == stamp:
            entries.append(cached[1])
            fresh[path.name] = cached
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


def known_stamp(path: Path | str) -> Stamp | None:
    """Return the state of the files that a finished run is listed from; None if the folder is not a run."""
    stamp = _stamp(path)
    return None if stamp[0] is None else stamp


def _stamp(path: Path | str) -> Stamp:
    """Return the state of these files; None for each that does not exist."""
    found: list[tuple[int, int, int] | None] = []
    folder = os.fspath(path)  # tens of thousands of runs are compared: without a Path for each file
    for file in (META, SUMMARY, FINDINGS, LABELS):
        try:
            about = os.stat(f"{folder}/{file}")  # noqa: PTH116
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


def run_entry(
    path: Path, *, meta: Mapping[str, Any] | None = None, summary: Mapping[str, Any] | None = None
) -> RunEntry:
    """The run of a folder; ``meta`` and ``summary``: its documents, if they have been read."""
    meta = read_meta(path) if meta is None else meta
    summary = (load_summary(path) or {}) if summary is None else summary
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
        user=_text(meta, "user") or "",
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
    duration = _number(run.get("duration_s")) if isinstance(run, Mapping) else None
    ended = _number(end.get("wall_ns")) if isinstance(end, Mapping) else None
    if duration is not None or ended is None or began is None:
        return duration
    return max(ended - began, 0) / 1e9


def _metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The last values, as the summary has them, and the throughput of the job.

    None of a metric that is NaN by now, for which the summary has an older value.
    """
    metrics, findings = summary.get("metrics"), summary.get("findings")
    found = [finding for finding in findings if isinstance(finding, Mapping)] if isinstance(findings, list) else []
    evidence = [finding.get("evidence") for finding in found if finding.get("kind") in ("loss_nan", "nan_gradients")]
    lost = {str(about.get("name")) for about in evidence if isinstance(about, Mapping)}
    rows = [(name, row) for name, row in metrics.items() if name not in lost] if isinstance(metrics, Mapping) else []
    lasts = {str(name): _number(row.get("last")) for name, row in rows if isinstance(row, Mapping)}
    rates = summary.get("throughput")
    rates = rates if isinstance(rates, Mapping) else {}
    job = {f"{what}/s": _number(rates.get(f"{what}_per_second")) for what in ("tokens", "samples")}
    lasts |= dict([pair for pair in job.items() if pair[1] is not None][:1])
    return {name: last for name, last in lasts.items() if last is not None}


def _usual_ms(sidecars: Iterable[RingSidecar]) -> float | None:
    """Median step time of a run without a summary: as its agent last wrote it for the newest attempt."""
    known = [about for about in sidecars if about.usual_step_ns]
    newest = max((about.identity.attempt for about in known), default=0)
    times_ns = [about.usual_step_ns for about in known if about.identity.attempt == newest]
    return statistics.median(times_ns) / 1e6 if times_ns else None


def _status(path: Path, meta: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    end = meta.get("end")
    for recorded in (summary.get("status"), end.get("status") if isinstance(end, Mapping) else None):
        if isinstance(recorded, str):
            return recorded
    return "running" if is_active(path) else "unfinished"


def _severity(severity: str | None, status: str) -> Severity:
    return next((known for known in SEVERITIES if known == severity), status_severity(status))


def _text(document: Any, name: str) -> str | None:
    value = document.get(name) if isinstance(document, Mapping) else None
    return value if isinstance(value, str) else None


def _healthy(verdict: Any) -> bool:
    """A large possible gain in a healthy run is still worth a look."""
    evidence = verdict.get("evidence") if isinstance(verdict, Mapping) else None
    large = isinstance(evidence, Mapping) and bool(evidence.get("large"))
    return _text(verdict, "kind") == "healthy" and not large


def _count(recorded: Any, seen: int) -> int | None:
    """Return the summary's value, else the observed one if it is not zero."""
    return recorded if isinstance(recorded, int) and 0 <= recorded < MOST else seen or None


def _number(value: Any) -> float | None:
    """Return a number; None if it is not one, or is too large for any clock or counter."""
    return value if isinstance(value, int | float) and -MOST < value < MOST else None
