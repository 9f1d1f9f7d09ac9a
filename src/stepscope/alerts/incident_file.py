"""``incidents.jsonl``: one line per change of an incident, written by the run's hub; the last line is its state.

Readers (the engine after a restart, the page, ``stepscope incident``) fold it.  Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepscope.alerts.model import Incident
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.store.file_io import append_jsonl, fsync_file, read_jsonl
from stepscope.store.paths import INCIDENTS

__all__ = ["append_incident", "incident_changes", "incidents_of", "read_incidents"]


def append_incident(run_dir: Path, incident: Incident) -> None:
    """Append the state of an incident durably; OSError if the disk refuses."""
    path = run_dir / INCIDENTS
    append_jsonl(path, [{"schema": 1, **encoded(incident)}])
    fsync_file(path)


def read_incidents(run_dir: Path) -> tuple[Incident, ...]:
    """Return the incidents of a run, by number."""
    return incidents_of(read_jsonl(run_dir / INCIDENTS)[0])


def incidents_of(lines: Iterable[object]) -> tuple[Incident, ...]:
    """Return the last state of each incident, by number; lines that are not valid are skipped."""
    found = {incident.number: incident for incident in incident_changes(lines)}
    return tuple(found[number] for number in sorted(found))


def incident_changes(lines: Iterable[Any]) -> list[Incident]:
    """Return every line as it was written, in order: the timeline of all incidents."""
    found = []
    for line in lines:
        try:
            found.append(decoded(Incident, line))
        except (ValueError, RecursionError):
            continue
    return found
