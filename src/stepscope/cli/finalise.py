"""From a run directory to its summary: seal what is over, diagnose, write the results beside it.

Used at the end of ``stepscope run`` and by ``stepscope report``, which does the same for a run whose launcher died.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.cli.progress import progress_bar
from stepscope.errors import RunError, RunUnwritable
from stepscope.page.assets import is_built
from stepscope.records import run_clock
from stepscope.records.modes import made_as
from stepscope.records.places import ENV_HTML
from stepscope.records.redactor import Redactor
from stepscope.records.series import RunData
from stepscope.reports import render_text, summarise
from stepscope.store.hub_file import remove_hub_file
from stepscope.store.lease import clock_ahead_s, read_lease, sealing_barred
from stepscope.store.load import open_run
from stepscope.store.meta import read_meta
from stepscope.store.outputs import copy_rest
from stepscope.store.ownership import writing_barred
from stepscope.store.paths import REPORT_FILE
from stepscope.store.processes import processes_alive
from stepscope.store.results import printed, save_summary
from stepscope.store.seal import needs_seal, seal

__all__ = ["finalise"]

FILE_WIDTH = 80
"""Of ``summary.txt``, whatever the terminal."""


def finalise(
    run_dir: Path,
    *,
    end: Mapping[str, Any] | None = None,
    color: bool = False,
    width: int = FILE_WIDTH,
    quiet: bool = False,
    html: Path | None = None,
    redact: bool = False,
    made_here: bool = False,
) -> tuple[dict[str, Any], str]:
    """The summary as document and as text; ``end`` says how the run ended if ``run.json`` could not be told.

    ``quiet``: nothing is shown while it is made, however long that takes.  ``html``: where somebody asked for the page
    in one file, made from what was read for the summary; RunError when that cannot be.  ``redact``: what is returned,
    and that page, can be sent away (``records/redactor.py``); the files of the run are as ever.  ``made_here``: by the
    launcher of that very run.

    A run that is over is sealed and its results are saved; where the directory cannot be written they are only
    returned, and a notice says so.  A run that still goes on is left as it is, and so is one that is recorded
    elsewhere or belongs to somebody else.  NotARun when it is none.
    """
    with made_as(run_dir):
        return _finalise(run_dir, end, color, width, quiet, html, redact=redact, made_here=made_here)


def _finalise(
    run_dir: Path,
    end: Mapping[str, Any] | None,
    color: bool,
    width: int,
    quiet: bool,
    html: Path | None,
    *,
    redact: bool,
    made_here: bool,
) -> tuple[dict[str, Any], str]:
    problems = []
    alive = processes_alive(run_dir)
    ahead = alive and clock_ahead_s(run_dir, read_meta(run_dir)) > 0
    barred = None if alive and not ahead else _barred(run_dir, made_here=made_here, quiet=quiet)
    alive = alive and (not ahead or barred is not None)
    if barred:
        problems.append(f"Nothing in {run_dir} was changed: {barred}.")
    ours = not alive and barred is None
    fresh = ours and needs_seal(run_dir)
    if ours and _ended_or_here(run_dir):
        copy_rest(run_dir)
    if fresh:
        try:
            with progress_bar("sealing", None, quiet=quiet) as told:
                seal(run_dir, watched=read_lease(run_dir), progress=told)
        except RunError as error:
            problems.append(f"Not sealed: {error}.")
    with progress_bar("opening", None, quiet=quiet) as told:
        run = open_run(run_dir, progress=told)
    if run.meta.get("end") is None and end is not None:
        run = replace(run, meta={**run.meta, "end": dict(end)})
    summary = summarise(run, alive=alive, logs=printed(run_dir))
    summary["notices"] += [*_part(run_dir, run.meta), *problems]
    saved, copied, own = ours, False, html == run_dir / REPORT_FILE and not redact
    if saved:
        remove_hub_file(run_dir)  # of a launcher that could not do it itself any more
        try:
            copied = _save(run_dir, run, summary, fresh=fresh, asked=own, quiet=quiet)
        except RunUnwritable as error:
            saved = False
            summary["notices"].append(f"Not saved: {error}.")
    if html is not None and not (own and saved):
        _write(html, run_dir, None if alive else run, summary, redact=redact, quiet=quiet)
    if redact:
        summary = Redactor(run.meta, summary).document(summary)
    now = run_clock.now_of(run.meta) if alive else None
    return summary, render_text(summary, width=width, color=color, saved=saved, copied=copied, now_wall_ns=now)


def _save(run_dir: Path, run: RunData, summary: dict[str, Any], *, fresh: bool, asked: bool, quiet: bool) -> bool:
    """Whether ``report.html`` is there; it is made when something new was sealed or somebody asked for it.

    The summary comes first, since it is in there; should that fail, a notice says so, and all else is as it was.  Only
    who asked for it gets a RunError.
    """
    usual = fresh and is_built() and run.meta.get("html") is not False and os.environ.get(ENV_HTML) != "0"
    copied = usual or asked or (run_dir / REPORT_FILE).is_file()
    save_summary(run_dir, summary, render_text(summary, width=FILE_WIDTH, saved=True, copied=copied))
    if usual or asked:
        # The hub's resources, a quarter of a second to load: only now, and only where they are used.
        from stepscope.hub.copy.asking import Known
        from stepscope.hub.copy.making import add_copy

        with progress_bar(f"making {REPORT_FILE}", None, quiet=quiet) as told:
            why = add_copy(run_dir, Known(data=run, summary=summary), told)
        if why:
            copied = (run_dir / REPORT_FILE).is_file()
            summary["notices"].append(f"{REPORT_FILE} was not made: {why}.")
            save_summary(run_dir, summary, render_text(summary, width=FILE_WIDTH, saved=True, copied=copied))
            if asked:
                raise RunError(f"{run_dir / REPORT_FILE} was not made: {why}")
    return copied


def _write(
    path: Path, run_dir: Path, over: RunData | None, summary: dict[str, Any], *, redact: bool, quiet: bool
) -> None:
    """The page elsewhere.  ``over``: what was read of a run that is; one that goes on is opened as a hub follows it."""
    from stepscope.hub.copy.asking import Known
    from stepscope.hub.copy.making import write_copy

    known = None if over is None else Known(data=over, summary=summary)
    with progress_bar(f"making {path.name}", None, quiet=quiet) as told:
        write_copy(run_dir, path, known=known, redact=redact, progress=told)


def _part(run_dir: Path, meta: Mapping[str, Any]) -> list[str]:
    """That a spool is not the whole run."""
    hub = meta.get("hub")
    if not isinstance(hub, Mapping):
        return []
    whole = f"This is only what node {hub.get('node')} of the run {hub.get('run')} recorded"
    return [f"{whole}, and it is not delivered yet: `stepscope send {run_dir}`."]


def _barred(run_dir: Path, *, made_here: bool, quiet: bool) -> str | None:
    barred = writing_barred(run_dir, made_here=made_here)
    if barred:
        return barred
    with progress_bar("watching whether it is still written to", None, quiet=quiet) as told:
        return sealing_barred(run_dir, read_meta(run_dir), progress=told)


def _ended_or_here(run_dir: Path) -> bool:
    """Whether nobody can still print into the run's files: of processes on other hosts nothing is known."""
    meta = read_meta(run_dir)
    return bool(meta.get("end")) or meta.get("host") == platform.node()
