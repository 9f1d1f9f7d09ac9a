"""The part of ``stepscope.toml`` about trackers and telemetry, checked before a job starts.

    [export]
    to = ["wandb", "otlp:http://collector:4318"]
    link = "https://hub.example"

The files are those of alerts (``alerts/settings_files.py``): the user's own, then the project's, whose keys replace the
user's.  ``--to`` adds destinations; ``--to off`` leaves out all that settings name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.alerts.settings_files import SettingsTable, load_tables
from stepscope.errors import UsageError
from stepscope.integrations.exporter import Destination, parse_destinations

__all__ = ["OFF", "ExportSettings", "load_export_settings"]

OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    destinations: tuple[Destination, ...] = ()
    link: str = ""
    """Address of the hub whose page is linked to, instead of the run's own."""
    notices: tuple[str, ...] = ()


def load_export_settings(project_dir: Path, words: Sequence[str], environ: Mapping[str, str]) -> ExportSettings:
    """Return what the files and the words of ``--to`` say; UsageError of one line for the first mistake."""
    tables, notices = load_tables("export", project_dir, environ)
    chosen: tuple[Destination, ...] = ()
    link = ""
    for table in tables:
        chosen = _destinations(table, chosen)
        link = table.address("link") or link
        table.close()
    given = [part.strip() for word in words for part in word.split(",")]
    if OFF in given:
        chosen, given = (), [word for word in given if word != OFF]
    if not link:
        alerts, _ = load_tables("alerts", project_dir, environ)
        link = next((found for table in reversed(alerts) if (found := table.address("link"))), "")
    return ExportSettings(
        destinations=tuple(dict.fromkeys((*chosen, *parse_destinations(given)))), link=link, notices=tuple(notices)
    )


def _destinations(table: SettingsTable, before: tuple[Destination, ...]) -> tuple[Destination, ...]:
    words = table.names("to")
    if words is None:
        return before
    try:
        return parse_destinations(words)
    except UsageError as error:
        table.fail("to", str(error))
