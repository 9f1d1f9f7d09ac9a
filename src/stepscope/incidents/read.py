"""Reads what a document about an incident needs: the run's files, logs around the onset, other runs of the folder, git.

Everything is bounded, and a file that is missing or damaged only leaves its part out: a run may come from anyone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from stepscope.alerts.conditions import code_line, topic_of
from stepscope.alerts.incident_file import incident_changes, incidents_of
from stepscope.alerts.model import Incident, Message
from stepscope.alerts.outbox import Delivery, read_deliveries
from stepscope.comparison.comparison import context_changes
from stepscope.comparison.inputs import context_of
from stepscope.errors import NotARun
from stepscope.incidents.git import git_changes
from stepscope.incidents.inputs import EarlierIncident, GitChanges, GoodRun, Inputs, LogPiece, Onset, Source
from stepscope.incidents.onset import hosts_of, onset_of, series_of
from stepscope.records.dataclass_json import decoded
from stepscope.records.files import open_file
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.paths import log_of_rank
from stepscope.records.redaction import kept_environment
from stepscope.records.series import RunData
from stepscope.records.text import LAUNCHER_MODULES, count_text, ns_text
from stepscope.reports.goodput_text import goodput_line
from stepscope.store.captures import read_captures
from stepscope.store.documents import load_summary, read_meta
from stepscope.store.file_io import bounded_lines, record_in
from stepscope.store.live.logs import data_at, plain_line
from stepscope.store.paths import FINDING_HISTORY, INCIDENTS, SUMMARY

__all__ = ["Known", "OtherRuns", "incidents_of_findings", "inputs_of", "known_incidents"]


# -- the run's incidents ----------------------------------------------------------------------------------------------

MOST_FILE_BYTES = 16 << 20
MOST_LINES = 50_000
MOST_INCIDENT_BYTES = 256 << 20
MOST_INCIDENT_LINES = 1_000_000
"""Of ``incidents.jsonl``, whose last lines count; of other files the first 16 MiB are read."""
SHOWN_CHANGES = ("state", "severity", "title", "also")
"""What a timeline says about a change of an incident."""
LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Known:
    """The incidents of a run."""

    incidents: tuple[Incident, ...]
    made_from: str
    """``incidents.jsonl`` or ``summary.json``."""
    changes: tuple[tuple[int, Incident], ...] = ()
    """Lines of ``incidents.jsonl`` with their numbers: those that a timeline shows, and the last of each incident."""


def known_incidents(
    run_dir: Path, run: RunData, findings: Sequence[Mapping[str, Any]], *, over: bool, ended_wall_ns: int | None
) -> Known:
    """The incidents as the run's hub recorded them; of a run without a hub, its final ``findings``."""
    lines = _incident_lines(run_dir / INCIDENTS)
    if lines is not None or (run_dir / FINDING_HISTORY).exists():
        changes = tuple((number, change) for number, line in lines or () for change in incident_changes([line]))
        return Known(incidents=incidents_of(line for _, line in lines or ()), made_from=INCIDENTS, changes=changes)
    made = incidents_of_findings(findings, run, over=over, ended_wall_ns=ended_wall_ns)
    return Known(incidents=made, made_from=SUMMARY)


def incidents_of_findings(
    findings: Iterable[Mapping[str, Any]], run: RunData, *, over: bool, ended_wall_ns: int | None
) -> tuple[Incident, ...]:
    """One incident for each finding of severity warning or critical, numbered in their order."""
    found: list[Incident] = []
    attempt = max((series.identity.attempt for series in run.ranks), default=0)
    for finding in findings:
        severity = finding.get("severity")
        if severity not in ("warning", "critical"):
            continue
        kind, evidence = str(finding.get("kind", "")), finding.get("evidence")
        evidence = evidence if isinstance(evidence, dict) else {}
        ranks = tuple(rank for rank in _list(finding.get("ranks")) if type(rank) is int)
        steps, cost, phase = finding.get("steps"), finding.get("cost"), finding.get("phase")
        # A step that a crashed rank did not complete is the one after the last that the finding names.
        first = steps[0] if isinstance(steps, list) and steps and type(steps[0]) is int else None
        first = first + 1 if kind == "rank_crashed" and first is not None else first
        recorded = [evidence.get(name) for name in ("stopped_wall_ns", "wall_ns")]
        since = next((wall for wall in recorded if type(wall) is int and 0 < wall < LARGEST), 0)
        found.append(
            Incident(
                number=len(found) + 1,
                topic=topic_of(kind),
                state="resolved" if over else "open",
                kind=kind,
                severity=severity,
                title=str(finding.get("title", "")),
                ranks=ranks,
                phase=phase if isinstance(phase, str) else None,
                hosts=_evidence_hosts(finding) or (hosts_of(run, ranks, attempt) if ranks else ()),
                line=code_line(finding),
                since_step=first,
                since_wall_ns=since,
                resolved_wall_ns=ended_wall_ns if over else None,
                resolved_why="the run ended" if over else "",
                cost=cost if isinstance(cost, dict) else {},
                advice=tuple(str(line) for line in _list(finding.get("advice"))),
                attempt=attempt,
            )
        )
    return tuple(found)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _incident_lines(path: Path) -> list[tuple[int, dict[str, Any]]] | None:
    """The lines that change what a timeline shows, and the last line of each incident; None without a file.

    Most lines of an incident that is open for days only continue its cost.
    """
    shown: dict[int, list[Any]] = {}
    changes: dict[int, dict[str, Any]] = {}
    last: dict[int, tuple[int, dict[str, Any]]] = {}
    try:
        for line, record in _records(path, most_bytes=MOST_INCIDENT_BYTES, most_lines=MOST_INCIDENT_LINES):
            number = record.get("number")
            if type(number) is not int or (number not in last and len(last) >= MOST_LINES):
                continue
            last[number] = line, record
            values = [record.get(name) for name in SHOWN_CHANGES]
            if values != shown.get(number) and len(changes) < MOST_LINES:
                shown[number], changes[line] = values, record
    except FileNotFoundError:
        return None
    return sorted({**changes, **dict(last.values())}.items())


def _numbered_lines(path: Path) -> list[tuple[int, dict[str, Any]]] | None:
    """The JSON objects of a file with the numbers of their lines, up to a limit; None without a file."""
    try:
        return list(_records(path, most_bytes=MOST_FILE_BYTES, most_lines=MOST_LINES))
    except FileNotFoundError:
        return None


def _records(path: Path, *, most_bytes: int, most_lines: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield JSON objects with the numbers of their lines, up to a limit or an error of the disk."""
    try:
        with open_file(path) as file:
            for number, line in enumerate(bounded_lines(file, most_bytes=most_bytes, most_lines=most_lines), 1):
                record = record_in(line)
                if record is not None:
                    yield number, record
    except FileNotFoundError:
        raise
    except OSError:
        return  # what was read until then


# -- inputs -----------------------------------------------------------------------------------------------------------


def inputs_of(
    run_dir: Path,
    run: RunData,
    known: Known,
    number: int,
    *,
    findings: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    over: bool,
    status_text: str,
    ended_wall_ns: int | None,
    logs: bool = True,
    others: OtherRuns | None,
) -> Inputs | None:
    """Everything about one incident; None if no incident has that number.

    ``summary``: of the run, as far as it has one.  ``logs``: with lines of logs.  ``others``: the other runs of the
    folder, which not every reader may see.
    """
    incident = next((each for each in known.incidents if each.number == number), None)
    if incident is None:
        return None
    episodes = _episodes(run_dir, incident.findings)
    finding, source = _finding(incident, known, episodes, findings)
    onset = onset_of(run, incident, ended_wall_ns=ended_wall_ns)
    pieces, note = _logs(run_dir, run, onset) if logs else ((), "")
    world = summary.get("world_size")
    world_size = world if type(world) is int else max((each.identity.world_size for each in run.ranks), default=0)
    good, good_note = (None, "") if others is None else others.good_run(incident, summary, world_size)
    earlier = [] if others is None else others.earlier(incident)
    return Inputs(
        run=run,
        over=over,
        status_text=status_text,
        world_size=world_size,
        ended_wall_ns=ended_wall_ns,
        incident=incident,
        count=len(known.incidents),
        made_from=known.made_from,
        changes=[(line, change) for line, change in known.changes if change.number == number],
        episodes=episodes,
        finding=finding,
        finding_source=source,
        deliveries=_deliveries(run_dir, number),
        onset=onset,
        logs=pieces,
        logs_note=note,
        captures=read_captures(run_dir, most=MOST_CAPTURES),
        good=good,
        good_note=good_note,
        earlier=earlier,
        scanned=0 if others is None else len(others.runs),
        unscanned=0 if others is None else others.left_out,
        ledger=_goodput(summary),
    )


def _goodput(summary: Mapping[str, Any]) -> str | None:
    """The line of the run's ledger; None if the summary has none, or an invalid one."""
    ledger = summary.get("goodput")
    names = ("goodput", "seconds", "restarts", "lost_steps")
    good = isinstance(ledger, Mapping) and all(isinstance(ledger.get(name), int | float) for name in names)
    if not isinstance(ledger, Mapping) or not good or not all(abs(ledger[name]) < 1e12 for name in names):
        return None
    try:
        return goodput_line(ledger)
    except (LookupError, TypeError, ValueError):
        return None


def _episodes(run_dir: Path, numbers: Sequence[int]) -> list[tuple[int, FindingEpisode]]:
    found = []
    for line, record in _numbered_lines(run_dir / FINDING_HISTORY) or () if numbers else ():
        if record.get("number") in numbers:
            try:
                found.append((line, decoded(FindingEpisode, record)))
            except (ValueError, RecursionError):
                continue
    return found


def _finding(
    incident: Incident,
    known: Known,
    episodes: Sequence[tuple[int, FindingEpisode]],
    findings: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any] | None, Source]:
    """The finding that leads, as last shown, and where it is."""
    if known.made_from == SUMMARY:
        serious = [finding for finding in findings if finding.get("severity") in ("warning", "critical")]
        finding = serious[incident.number - 1] if incident.number <= len(serious) else None
        place = next((at for at, each in enumerate(findings, 1) if each is finding), 0)
        return finding, Source(file=SUMMARY, about=f"finding {place}")
    lead = incident.findings[0] if incident.findings else None
    own = [(line, episode) for line, episode in episodes if episode.number == lead]
    # Once it is resolved, the line before has the finding as it was.
    shown = [pair for pair in own if pair[1].change != "resolved"] or own
    if not shown:
        lines = [line for line, change in known.changes if change.number == incident.number]
        return None, Source(file=INCIDENTS, line=lines[-1] if lines else None)
    line, episode = shown[-1]
    return episode.finding, Source(file=FINDING_HISTORY, line=line)


MOST_DELIVERIES = 200


MOST_CAPTURES = 100


def _deliveries(run_dir: Path, number: int) -> list[tuple[Message, Delivery]]:
    try:
        own = (pair for pair in read_deliveries(run_dir) if pair[0].incident.number == number)
        return list(islice(own, MOST_DELIVERIES))
    except OSError:
        return []


# -- logs -------------------------------------------------------------------------------------------------------------
# Lines have no times.  But the agent records the size of each log with every sample of its process (``log_bytes``),
# about once a second: what lies below the last size recorded before the onset was printed before it.

MOST_LOGS = 4
LINES_BEFORE = 20
LINES_AFTER = 30
READ_BYTES = 32 << 10
COUNTED_BYTES = 8 << 20
"""Of a longer log the numbers of lines are not known."""


def _logs(run_dir: Path, run: RunData, onset: Onset) -> tuple[list[LogPiece], str]:
    """Pieces of the logs of the affected ranks; if none is named, of the ranks that failed and of the lowest."""
    own = series_of(run, onset.attempt)
    failed = [error.rank for error in run.errors if error.rank is not None]
    wanted = list(onset.ranks) or list(dict.fromkeys([*failed, *(series.rank for series in own[:1])]))
    pieces = []
    for rank in wanted[:MOST_LOGS]:
        series = next((each for each in own if each.rank == rank), None)
        marks = [] if series is None else _marks(run, series.identity.pid)
        path = log_of_rank(run_dir, rank=rank, attempt=onset.attempt)
        piece = _log_piece(path, rank, marks, onset, run_dir)
        if piece is not None:
            pieces.append(piece)
    left = len(wanted) - MOST_LOGS
    if not pieces:
        return [], "The affected ranks printed nothing that was recorded."
    return pieces, f"The logs of {count_text(left, 'further rank')} are left out." if left > 0 else ""


def _marks(run: RunData, pid: int) -> list[tuple[int, int]]:
    """Time and size of the log of a process, in order."""
    found = [
        (sample["wall_ns"], sample["log_bytes"])
        for sample in run.samples
        if sample.get("kind") == "process"
        and sample.get("pid") == pid
        and type(sample.get("wall_ns")) is int
        and type(sample.get("log_bytes")) is int
    ]
    return sorted(found)


def _log_piece(path: Path, rank: int, marks: Sequence[tuple[int, int]], onset: Onset, run_dir: Path) -> LogPiece | None:
    file_name = path.relative_to(run_dir).as_posix()
    earlier = [mark for mark in marks if onset.wall_ns is not None and mark[0] <= onset.wall_ns]
    try:
        with open_file(path) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            if not size:
                return None
            if onset.wall_ns is None or not marks:
                at = size
                how = "The size of the log over time was not recorded, so these are its last lines."
            elif not earlier:
                at = 0
                how = "No size of the log was recorded before the onset, so these are its first lines."
            else:
                at = min(earlier[-1][1], size)
                age = ns_text(onset.wall_ns - earlier[-1][0])
                how = (
                    f"Lines have no times. {age} before the onset the agent recorded that the log had "
                    f"{earlier[-1][1]:,} bytes; the lines before the mark are below that size."
                )
            begin, _ = data_at(fd, max(0, at - READ_BYTES))
            begin = min(begin, at)
            head = os.pread(fd, at - begin, begin)
            if at < size:  # a line that was being printed belongs to what came after
                at -= len(head) - (head.rfind(b"\n") + 1)
                head = head[: at - begin]
            before = _whole_lines(head, cut_first=begin > 0)[-LINES_BEFORE:]
            after_from, _ = data_at(fd, at)
            raw = os.pread(fd, READ_BYTES, after_from)
            after = _whole_lines(raw, cut_last=after_from + len(raw) < size)[:LINES_AFTER]
            first = at - sum(map(len, before))
            whole = size <= COUNTED_BYTES and begin == max(0, at - READ_BYTES)
            number = os.pread(fd, first, 0).count(b"\n") + 1 if whole else None
    except OSError:
        return None
    if not before and not after:
        return None
    return LogPiece(
        file=file_name,
        rank=rank,
        before=tuple(map(_shown_line, before)),
        after=tuple(map(_shown_line, after)),
        first_line=number,
        offset=first,
        how=how,
    )


def _whole_lines(data: bytes, *, cut_first: bool = False, cut_last: bool = False) -> list[bytes]:
    lines = data.splitlines(keepends=True)
    if cut_first and len(lines) > 1:
        lines = lines[1:]
    return lines[:-1] if cut_last and len(lines) > 1 else lines


def _shown_line(line: bytes) -> str:
    """The line with its indent, without escapes, and without what looks like a password."""
    text = line.decode(errors="replace").rstrip()
    text = text.rpartition("\r")[2]  # of a progress bar, its last state
    indent = len(text) - len(text.lstrip(" \t"))
    return " " * min(indent, 40) + plain_line(text)


# -- other runs of the folder -----------------------------------------------------------------------------------------

MOST_RUNS = 100
"""Runs before this one that are read, newest first."""
MOST_FOLDERS = 5000
MOST_SUMMARY_BYTES = 8 << 20
MOST_READ_BYTES = 128 << 20
MOST_EARLIER = 12
NEEDED = ("world_size", "status", "step_time", "run", "facts", "findings")
NEEDED_OF_RANKS = ("device_name", "torch", "backend")
"""Of the summary of another run, for ``context_of`` and what is below; the rest does not stay in memory."""
MOST_OF_RUN = 200
"""Incidents of one other run, the last ones: they stay in memory for all incidents of this run."""


@dataclass(frozen=True, kw_only=True)
class _OtherRun:
    name: str
    path: Path
    meta: Mapping[str, Any]
    created_wall_ns: int
    summary: Mapping[str, Any]

    @cached_property
    def incidents(self) -> list[tuple[Incident, str]]:
        """Its incidents, each with the file that has it."""
        return _incidents_of_other(self)[-MOST_OF_RUN:]


@dataclass(frozen=True, kw_only=True)
class OtherRuns:
    """The runs next to this one that began before it, newest first; read once for all incidents of this run."""

    meta: Mapping[str, Any]
    """Of this run."""
    run_dir: Path
    runs: tuple[_OtherRun, ...]
    left_out: int
    _git: dict[str, GitChanges | None] = field(default_factory=dict, init=False, repr=False)
    """By the name of the other run: git is a handful of processes."""

    @classmethod
    def read(cls, run_dir: Path, meta: Mapping[str, Any]) -> OtherRuns:
        created = _int(meta.get("created_wall_ns"))
        begun: list[tuple[int, str, Path, Mapping[str, Any]]] = []
        try:
            own = run_dir.resolve()
            with os.scandir(own.parent) as entries:
                for entry in islice(entries, MOST_FOLDERS):
                    path = Path(entry.path)
                    if entry.name.startswith(".") or path == own or not entry.is_dir(follow_symlinks=False):
                        continue
                    try:
                        found = read_meta(path)
                    except NotARun:
                        continue
                    started = _int(found.get("created_wall_ns"))
                    if started < created:
                        begun.append((started, path.name, path, found))
        except OSError:
            begun = []
        begun.sort(key=lambda row: (-row[0], row[1]))
        runs, size = [], 0
        for started, name, path, about in begun[:MOST_RUNS]:
            summary, length = _summary(path) if size < MOST_READ_BYTES else ({}, 0)
            size += length
            runs.append(_OtherRun(name=name, path=path, meta=about, created_wall_ns=started, summary=_needed(summary)))
        return cls(meta=meta, run_dir=run_dir, runs=tuple(runs), left_out=len(begun) - len(runs))

    def good_run(self, incident: Incident, summary: Mapping[str, Any], world_size: int) -> tuple[GoodRun | None, str]:
        """The newest good run of the job, and what differs; otherwise why none was found."""
        if not self.runs:
            return None, "There is no earlier run in the folder to compare with."
        command = _words(self.meta)
        alike = [
            other
            for other in self.runs
            if other.summary.get("world_size") == world_size and _script(_words(other.meta)) == _script(command)
        ]
        # The same command is a better comparison than the same script with other arguments.
        for exact in (True, False):
            jobs = [other for other in alike if not exact or _words(other.meta) == command]
            place = next((at for at, other in enumerate(jobs) if _is_good(other.summary, incident.kind)), None)
            if place is not None:
                return self._compared(jobs[place], summary, exact=exact, between=place), ""
        runs = count_text(len(self.runs), "earlier run")
        if not alike:
            return None, f"None of {runs} in the folder is of the same script with {count_text(world_size, 'rank')}."
        return (
            None,
            f"None of {count_text(len(alike), 'earlier run')} of the same script finished without a finding like it.",
        )

    def _compared(self, good: _OtherRun, summary: Mapping[str, Any], *, exact: bool, between: int) -> GoodRun:
        here = summary or _summary(self.run_dir)[0]
        if good.name not in self._git:
            self._git[good.name] = _git_of(good.meta, self.meta)
        before, after = (
            context_of(document, {**meta, "environment": _environment(meta)})
            for document, meta in ((good.summary, good.meta), (here, self.meta))
        )
        hidden = ("git.commit", "git.diff_stat", "world_size")
        rows = [row for row in context_changes([before], after) if row["name"] not in hidden]
        step_time = good.summary.get("step_time")
        median = step_time.get("p50_ms") if isinstance(step_time, Mapping) else None
        return GoodRun(
            name=good.name,
            created_wall_ns=good.created_wall_ns,
            same_command=exact,
            step_ms=float(median) if isinstance(median, int | float) and 0 < median < 1e12 else None,
            rows=rows,
            git=self._git[good.name],
            runs_between=between,
        )

    def earlier(self, incident: Incident) -> list[EarlierIncident]:
        """Incidents of other runs that share the kind, a host or the line; those that share more first, then newest."""
        found: list[EarlierIncident] = []
        for other in self.runs:
            for each, file in other.incidents:
                same = _same(incident, each)
                if same:
                    wall_ns = each.since_wall_ns or each.opened_wall_ns or other.created_wall_ns
                    found.append(
                        EarlierIncident(
                            run=other.name, number=each.number, kind=each.kind, severity=each.severity,
                            title=each.title, wall_ns=wall_ns, same=same, file=file,
                        )
                    )  # fmt: skip
        found.sort(key=lambda each: (-len(each.same), -each.wall_ns, each.run, each.number))
        return found[:MOST_EARLIER]


def _incidents_of_other(other: _OtherRun) -> list[tuple[Incident, str]]:
    lines = _numbered_lines(other.path / INCIDENTS)
    if lines is not None:
        return [(incident, INCIDENTS) for incident in incidents_of(line for _, line in lines)]
    about = other.summary.get("run")
    hosts = tuple(str(host) for host in _list(about.get("hosts") if isinstance(about, Mapping) else None))
    nothing = RunData(name=other.name, path="", meta={}, ranks=())
    findings = [finding for finding in _list(other.summary.get("findings")) if isinstance(finding, Mapping)]
    made = incidents_of_findings(findings, nothing, over=True, ended_wall_ns=None)
    found = []
    for each in made:
        # Of a run on one host, that is where it was; of several, the finding may say.
        alone = hosts if len(hosts) == 1 and each.ranks else ()
        found.append((replace(each, hosts=each.hosts or alone), SUMMARY))
    return found


def _evidence_hosts(finding: Mapping[str, Any]) -> tuple[str, ...]:
    evidence = finding.get("evidence")
    return tuple(str(host) for host in _list(evidence.get("hosts") if isinstance(evidence, Mapping) else None))


def _same(incident: Incident, other: Incident) -> tuple[str, ...]:
    found = []
    if incident.kind == other.kind:
        found.append("kind")
    if set(incident.hosts) & set(other.hosts):
        found.append("host")
    if incident.line and _file_line(incident.line) == _file_line(other.line):
        found.append("line")
    # On one machine every incident has the same host, which alone says nothing.
    return () if found == ["host"] and incident.topic != other.topic else tuple(found)


def _file_line(line: str) -> str:
    return line.rpartition("/")[2]


def _is_good(summary: Mapping[str, Any], kind: str) -> bool:
    findings = [finding for finding in _list(summary.get("findings")) if isinstance(finding, Mapping)]
    bad = any(
        finding.get("severity") == "critical" or (finding.get("severity") == "warning" and finding.get("kind") == kind)
        for finding in findings
    )
    return summary.get("status") == "finished" and not bad


def _words(meta: Mapping[str, Any]) -> list[str]:
    return [str(word) for word in _list(meta.get("command"))]


def _script(words: Sequence[str]) -> str:
    """The script or module that a command runs, without its folder."""
    script = next((word.rpartition("/")[2] for word in words if word.endswith(".py")), "")
    if script:
        return script
    modules = [after for word, after in pairwise(words) if word == "-m" and after not in LAUNCHER_MODULES]
    return modules[0] if modules else (words[0] if words else "")


def _environment(meta: Mapping[str, Any]) -> dict[str, str]:
    """The recorded variables that explain a run, once more without anything that looks like a secret."""
    environment = meta.get("environment")
    known = environment.items() if isinstance(environment, Mapping) else ()
    return kept_environment({str(name): str(value) for name, value in known})


def _git_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> GitChanges | None:
    commits = []
    for meta in (before, after):
        git = meta.get("git")
        commit = git.get("commit") if isinstance(git, Mapping) else None
        if not isinstance(commit, str):
            return None
        commits.append(commit)
    folder = after.get("cwd")
    if not isinstance(folder, str) or "\0" in folder or not folder.startswith("/"):
        return None
    return git_changes(Path(folder), commits[0], commits[1])


def _summary(path: Path) -> tuple[Mapping[str, Any], int]:
    """The summary of a run and its size; empty if it has none or it is unusually large."""
    try:
        size = (path / SUMMARY).stat().st_size
    except OSError:
        return {}, 0
    return (load_summary(path) or {}, size) if size <= MOST_SUMMARY_BYTES else ({}, 0)


def _needed(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison needs of the summary of another run; rows of ranks that say the same are kept once."""
    rows = (row for row in _list(summary.get("ranks")) if isinstance(row, Mapping))
    ranks = {tuple(str(row.get(name) or "") for name in NEEDED_OF_RANKS) for row in rows}
    found = {key: summary[key] for key in NEEDED if key in summary}
    return {**found, "ranks": [dict(zip(NEEDED_OF_RANKS, rank, strict=True)) for rank in sorted(ranks)]}


def _int(value: Any) -> int:
    return value if type(value) is int and 0 <= value < LARGEST else 0
