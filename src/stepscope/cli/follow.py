"""``stepscope report --follow``: say what is found while a run goes on, a line when something changes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from stepscope.diagnosis.live import Change, Watched, look
from stepscope.records.messages import say
from stepscope.store.load import open_run
from stepscope.store.processes import processes_alive
from stepscope.terminal.lines import finding_line

__all__ = ["follow_run"]

PAUSE_S = 1.0
READING_SHARE = 0.2
"""Of the time at most goes into reading the run, however long it is."""


def follow_run(run_dir: Path) -> None:
    """Until the run is over or somebody presses Ctrl-C."""
    watched: tuple[Watched, ...] = ()
    say(f"following {run_dir}; Ctrl-C ends this, not the run")
    try:
        while processes_alive(run_dir):
            started_s = time.monotonic()
            watched, changes = look(open_run(run_dir), watched)
            for change in changes:
                print(_line(change), flush=True)
            took_s = time.monotonic() - started_s
            time.sleep(max(PAUSE_S, took_s / READING_SHARE))
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _line(change: Change) -> str:
    finding = change.finding
    return finding_line(change.step, finding.severity, finding.title, withdrawn=change.what == "withdrawn")
