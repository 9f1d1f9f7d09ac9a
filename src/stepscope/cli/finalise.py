"""From a run directory to its summary: seal what is over, diagnose, write the results beside it.

Used at the end of ``stepscope run`` and by ``stepscope report``, which does the same for a run whose launcher died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.errors import RunError, RunUnwritable
from stepscope.reports import render_text, summarise
from stepscope.store.hub_file import remove_hub_file
from stepscope.store.load import open_run
from stepscope.store.processes import processes_alive
from stepscope.store.results import save_summary
from stepscope.store.seal import needs_seal, seal

__all__ = ["finalise"]

FILE_WIDTH = 80
"""Of ``summary.txt``, whatever the terminal."""


def finalise(
    run_dir: Path, *, end: Mapping[str, Any] | None = None, color: bool = False, width: int = FILE_WIDTH
) -> tuple[dict[str, Any], str]:
    """The summary as document and as text; ``end`` says how the run ended if ``run.json`` could not be told.

    A run that is over is sealed and its results are saved; where the directory cannot be written they are only
    returned, and a notice says so.  A run that still goes on is left as it is.  NotARun when it is none.
    """
    problems = []
    alive = processes_alive(run_dir)
    if not alive and needs_seal(run_dir):
        try:
            seal(run_dir)
        except RunError as error:
            problems.append(f"Not sealed: {error}.")
    run = open_run(run_dir)
    if run.meta.get("end") is None and end is not None:
        run = replace(run, meta={**run.meta, "end": dict(end)})
    summary = summarise(run, alive=alive, logs=_logs(run_dir))
    summary["notices"] += [*_part(run_dir, run.meta), *problems]
    saved = not alive
    if saved:
        remove_hub_file(run_dir)  # of a launcher that could not do it itself any more
        try:
            save_summary(run_dir, summary, render_text(summary, width=FILE_WIDTH, saved=True))
        except RunUnwritable as error:
            saved = False
            summary["notices"].append(f"Not saved: {error}.")
    return summary, render_text(summary, width=width, color=color, saved=saved)


def _part(run_dir: Path, meta: Mapping[str, Any]) -> list[str]:
    """That a spool is not the whole run."""
    hub = meta.get("hub")
    if not isinstance(hub, Mapping):
        return []
    whole = f"This is only what node {hub.get('node')} of the run {hub.get('run')} recorded"
    return [f"{whole}, and it is not delivered yet: `stepscope send {run_dir}`."]


def _logs(run_dir: Path) -> list[str]:
    """What the ranks printed, as paths inside the run."""
    return sorted((str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("*.log")), key=_natural)


def _natural(name: str) -> tuple[int, str]:
    return len(name), name
