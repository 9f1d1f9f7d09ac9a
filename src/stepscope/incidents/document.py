"""The incidents of a run and one of them as documents: the front door of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.incidents.builder import NOT_RECORDED, build_document, list_document
from stepscope.incidents.read import Known, OtherRuns, inputs_of, known_incidents
from stepscope.records.redaction import Redactor
from stepscope.records.series import RunData
from stepscope.records.text import count_text
from stepscope.reports import summarize
from stepscope.store.catalog import is_active
from stepscope.store.documents import load_summary, log_names
from stepscope.store.load import load_run
from stepscope.store.paths import INCIDENTS

__all__ = ["Incidents", "current_summary", "incident_document", "incidents_document", "incidents_in", "open_incidents"]


@dataclass(frozen=True, kw_only=True)
class Incidents:
    """A loaded run and its incidents."""

    run_dir: Path
    run: RunData
    summary: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    over: bool
    known: Known
    other_runs: Callable[[], OtherRuns]
    """Reads the other runs of the folder when it is first called."""

    @property
    def status_text(self) -> str:
        text = self.summary.get("status_text")
        return text if isinstance(text, str) else "finished" if self.over else "running"

    def list(self) -> dict[str, Any]:
        notice = NOT_RECORDED if self.known.made_from != INCIDENTS and self.known.incidents else ""
        return list_document(
            self.known.incidents, made_from=self.known.made_from, notice=notice, run=self.run.name, over=self.over
        )

    def document(self, number: int, *, logs: bool = True, others: bool = True) -> dict[str, Any] | None:
        """One incident; None if no incident has that number.  ``logs`` and ``others``: with them (``inputs_of``)."""
        inputs = inputs_of(
            self.run_dir,
            self.run,
            self.known,
            number,
            findings=self.findings,
            summary=self.summary,
            over=self.over,
            status_text=self.status_text,
            ended_wall_ns=_ended(self.summary, self.run),
            logs=logs,
            others=self.other_runs() if others else None,
        )
        return None if inputs is None else build_document(inputs)

    def redacted(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document without host names, users, paths, addresses and values of the command line."""
        shown: dict[str, Any] = Redactor(self.run.meta, self.summary, document).document(document)
        return shown


def incidents_in(
    run_dir: Path,
    run: RunData,
    summary: Mapping[str, Any],
    *,
    over: bool,
    other_runs: Callable[[], OtherRuns] | None = None,
) -> Incidents:
    """The incidents of a run that is loaded, with its summary; ``other_runs``: of the same run loaded earlier."""
    rows = summary.get("findings")
    findings = [finding for finding in rows if isinstance(finding, Mapping)] if isinstance(rows, list | tuple) else []
    known = known_incidents(run_dir, run, findings, over=over, ended_wall_ns=_ended(summary, run))
    return Incidents(
        run_dir=run_dir,
        run=run,
        summary=summary,
        findings=findings,
        over=over,
        known=known,
        other_runs=other_runs or cache(partial(OtherRuns.read, run_dir, run.meta)),
    )


def open_incidents(run_dir: Path) -> Incidents:
    """Load a run in whatever state it is; NotARun if the folder is not a run."""
    run = load_run(run_dir).data
    summary, active = current_summary(run_dir, run)
    return incidents_in(run_dir, run, summary, over=not active)


def current_summary(run_dir: Path, run: RunData) -> tuple[dict[str, Any], bool]:
    """Return the summary of a run that was just loaded, read or else computed, and whether the run is active."""
    active = run.meta.get("sealed") is not True and is_active(run_dir)
    summary = None if active else load_summary(run_dir)
    if summary is None or summary.get("schema") != 1:
        summary = summarize(run, alive=active, logs=log_names(run_dir))
    return summary, active


def incidents_document(run_dir: Path, *, redact: bool = False) -> dict[str, Any]:
    """The list of a run's incidents; ``redact`` as for one of them."""
    incidents = open_incidents(run_dir)
    document = incidents.list()
    return incidents.redacted(document) if redact else document


def incident_document(run_dir: Path, number: int, *, redact: bool = False) -> dict[str, Any]:
    """One incident; UsageError if the run has none of that number.

    ``redact``: without host names, users, paths, addresses and values of the command line.
    """
    incidents = open_incidents(run_dir)
    document = incidents.document(number)
    if document is None:
        raise UsageError(
            f"{run_dir} has {count_text(len(incidents.known.incidents), 'incident')}; there is no number {number}"
        )
    return incidents.redacted(document) if redact else document


def _ended(summary: Mapping[str, Any], run: RunData) -> int | None:
    about = summary.get("run")
    ended = about.get("ended_wall_ns") if isinstance(about, Mapping) else None
    if type(ended) is int:
        return ended
    end = run.meta.get("end")
    wall_ns = end.get("wall_ns") if isinstance(end, Mapping) else None
    return wall_ns if type(wall_ns) is int else None
