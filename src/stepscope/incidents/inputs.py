"""What a document about an incident is made of: values that ``read`` loads and ``builder`` arranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.alerts.model import Incident, Message
from stepscope.alerts.outbox import Delivery
from stepscope.records.capture import CaptureRecord
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.series import RunData

__all__ = [
    "Commit",
    "EarlierIncident",
    "FileChange",
    "GitChanges",
    "GoodRun",
    "Inputs",
    "LogPiece",
    "Onset",
    "Source",
    "statement",
]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a statement comes from: a file of the run, a rule, or a command."""

    file: str = ""
    """Inside the run directory, or of another run ``RUN/FILE``."""
    line: int | None = None
    """From 1."""
    last_line: int | None = None
    rule: str = ""
    command: str = ""
    about: str = ""
    """What of the file: ``rank 2, 118 samples``."""

    def to_dict(self) -> dict[str, Any]:
        known = {
            "file": self.file,
            "line": self.line,
            "last_line": self.last_line,
            "rule": self.rule,
            "command": self.command,
        }
        return {"text": self.text, **{name: value for name, value in known.items() if value not in ("", None)}}

    @property
    def text(self) -> str:
        """``incidents.jsonl:3``, ``logs/rank-2.log:120–140``, ``rule late ranks``, ``samples.parquet (host vm)``."""
        place = self.file
        if self.line is not None:
            more = f"–{self.last_line}" if self.last_line not in (None, self.line) else ""
            place += f":{self.line}{more}"
        parts = [place, f"rule {self.rule}" if self.rule else "", self.command]
        text = ", ".join(part for part in parts if part)
        return f"{text} ({self.about})" if self.about else text


def statement(text: str, source: Source, **more: Any) -> dict[str, Any]:
    """A sentence of the document with its source; ``wall_ns``: the time that it is about."""
    return {"text": text, "source": source.to_dict(), **more}


@dataclass(frozen=True, kw_only=True)
class Onset:
    """When and where an incident began."""

    wall_ns: int | None
    step: int | None
    ranks: tuple[int, ...]
    attempt: int
    end_wall_ns: int | None
    """When it was over; None: it is open."""
    by_step: bool
    """The time is the start of that step; otherwise it was recorded with the incident."""


@dataclass(frozen=True, kw_only=True)
class LogPiece:
    """Lines of one log around the onset."""

    file: str
    rank: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    """Lines up to the last size that the agent recorded before the onset, and those behind it."""
    first_line: int | None
    """The number of the first line; None: the log is too long to count."""
    offset: int
    """Position of the first line in bytes."""
    how: str
    """How the lines were chosen, as a sentence."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    hash: str
    wall_s: int
    author: str
    subject: str


@dataclass(frozen=True, kw_only=True)
class FileChange:
    path: str
    added: int | None
    """Lines; None: a binary file."""
    removed: int | None


@dataclass(frozen=True, kw_only=True)
class GitChanges:
    """What git has between two commits; ``problem``: why it has nothing."""

    before: str
    after: str
    commits: tuple[Commit, ...] = ()
    commit_count: int = 0
    backward: bool = False
    """The later run used an older commit: the commits are those that it lacks."""
    files: tuple[FileChange, ...] = ()
    file_count: int = 0
    added: int = 0
    removed: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class GoodRun:
    """The last good run of the same job, and what is different since."""

    name: str
    created_wall_ns: int
    same_command: bool
    """Whether the command is equal; otherwise only the script is."""
    step_ms: float | None
    rows: Sequence[Mapping[str, Any]]
    """Changed settings as in a comparison: ``kind``, ``name``, ``label``, ``before``, ``after``."""
    git: GitChanges | None
    runs_between: int
    """Runs of the job since then that were not good."""


@dataclass(frozen=True, kw_only=True)
class EarlierIncident:
    run: str
    number: int
    kind: str
    severity: str
    title: str
    wall_ns: int
    same: tuple[str, ...]
    """``kind``, ``host``, ``line``."""
    file: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    run: RunData
    over: bool
    """Whether the run is over."""
    status_text: str
    world_size: int
    ended_wall_ns: int | None
    incident: Incident
    count: int
    """Of the incidents of this run."""
    made_from: str
    """The file that the incidents come from: ``incidents.jsonl`` or ``summary.json``."""
    changes: Sequence[tuple[int, Incident]] = ()
    """Every state of this incident with its line."""
    episodes: Sequence[tuple[int, FindingEpisode]] = ()
    """Every state of its findings with its line in the history."""
    finding: Mapping[str, Any] | None = None
    """The finding that leads, in the form of ``summary.json``; None: the incident is about a measure."""
    finding_source: Source = field(default_factory=Source)
    deliveries: Sequence[tuple[Message, Delivery]] = ()
    """The messages about it, and what became of each."""
    onset: Onset
    logs: Sequence[LogPiece] = ()
    logs_note: str = ""
    captures: Sequence[CaptureRecord] = ()
    """Those of the run, the oldest first."""
    good: GoodRun | None = None
    good_note: str = ""
    """How it was chosen, or why none was."""
    earlier: Sequence[EarlierIncident] = ()
    scanned: int = 0
    """Runs in which earlier incidents were searched."""
    unscanned: int = 0
    ledger: str | None = None
    """How much of the run was useful training (``goodput/``), in words."""
