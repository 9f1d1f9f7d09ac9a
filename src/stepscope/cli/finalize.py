"""From a run directory to its summary: seal, diagnose and save a finished run; follow a live one.

Used at the end of ``stepscope run`` and by ``stepscope report``, which does the same for a run whose launcher died.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.output import progress_bar
from stepscope.errors import RunError, RunUnwritable
from stepscope.page.assets import is_built
from stepscope.records import run_clock
from stepscope.records.files import run_umask
from stepscope.records.paths import ENV_HTML
from stepscope.records.redaction import Redactor
from stepscope.records.series import RunData
from stepscope.records.text import say
from stepscope.store.documents import TEAM_HUB, Destination, log_names, read_meta, remove_hub_file, save_summary
from stepscope.store.live.logs import copy_rest
from stepscope.store.liveness import clock_ahead_s, processes_alive, read_lease, sealing_barred
from stepscope.store.load import open_run
from stepscope.store.locks import writing_barred
from stepscope.store.paths import ARCHIVED, REPORT_FILE
from stepscope.store.sealed.seal import needs_seal, seal

if TYPE_CHECKING:
    from stepscope.diagnosis.hysteresis import Change, Watched

__all__ = ["finalize_run", "follow_run"]


# -- summary of a run -------------------------------------------------------------------------------------------------

FILE_WIDTH = 80
"""Width of ``summary.txt``, independent of the terminal."""


def finalize_run(
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
    """The summary as document and as text; ``end`` says how the run ended if ``run.json`` could not be updated.

    ``quiet``: show no progress. ``html``: where to write the page, made from the data read for the summary; RunError if
    that fails. ``redact``: the returned values and that page are safe to send away (``records/redaction.py``); the
    files of the run are unchanged. ``made_here``: whether the caller is this run's launcher.

    A finished run is sealed and its results are saved. If the directory is not writable they are only returned, and a
    notice says so. A live run is left unchanged, and so is one that is recorded on another host or belongs to another
    user. Raises NotARun if the directory is not a run.
    """
    with run_umask(run_dir):
        return _finalize(run_dir, end, color, width, quiet, html, redact=redact, made_here=made_here)


def _finalize(
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
    from stepscope.store.sealed.parquet import one_database

    problems = []
    alive = processes_alive(run_dir)
    ahead = alive and clock_ahead_s(run_dir, read_meta(run_dir)) > 0
    barred = None if alive and not ahead else _barred(run_dir, made_here=made_here, quiet=quiet)
    alive = alive and (not ahead or barred is not None)
    if barred and not (run_dir / ARCHIVED).is_file():
        problems.append(f"Nothing in {run_dir} was changed: {barred}.")
    ours = not alive and barred is None
    fresh = ours and needs_seal(run_dir)
    if ours and _ended_or_here(run_dir):
        copy_rest(run_dir)
    with one_database():
        if fresh:
            try:
                with progress_bar("sealing", None, quiet=quiet) as progress:
                    seal(run_dir, watched=read_lease(run_dir), progress=progress)
            except RunError as error:
                problems.append(f"Not sealed: {error}.")
        with progress_bar("opening", None, quiet=quiet) as progress:
            run = open_run(run_dir, progress=progress)
    # Next to a job every megabyte counts, even at its end: the rules are loaded when the database is closed.
    from stepscope.reports import render_text, summarize

    if run.meta.get("end") is None and end is not None:
        run = replace(run, meta={**run.meta, "end": dict(end)})
    summary = summarize(run, alive=alive, logs=log_names(run_dir))
    summary["notices"] += [*_spool_notice(run_dir, run.meta), *problems]
    saved, copied, own = ours, False, html == run_dir / REPORT_FILE and not redact
    if saved:
        remove_hub_file(run_dir)  # left by a launcher that died
        try:
            copied = _save_summary(run_dir, run, summary, fresh=fresh, requested=own, quiet=quiet)
        except RunUnwritable as error:
            saved = False
            summary["notices"].append(f"Not saved: {error}.")
    if html is not None and not (own and saved):
        _write_page(html, run_dir, None if alive else run, summary, redact=redact, quiet=quiet)
    if redact:
        summary = Redactor(run.meta, summary).document(summary)
    now = run_clock.now_of(run.meta) if alive else None
    return summary, render_text(summary, width=width, color=color, saved=saved, copied=copied, now_wall_ns=now)


def _save_summary(
    run_dir: Path, run: RunData, summary: dict[str, Any], *, fresh: bool, requested: bool, quiet: bool
) -> bool:
    """Save the summary; return whether ``report.html`` exists, which is made after a seal or on request.

    The summary comes first, since the page contains it. If the page fails, a notice says so and everything else stays
    as it was. RunError is raised only if the page was requested.
    """
    usual = fresh and is_built() and run.meta.get("html") is not False and os.environ.get(ENV_HTML) != "0"
    copied = usual or requested or (run_dir / REPORT_FILE).is_file()
    from stepscope.reports import render_text

    save_summary(run_dir, summary, render_text(summary, width=FILE_WIDTH, saved=True, copied=copied))
    if usual or requested:
        # The hub's resources take a quarter of a second to load: import them only where they are used.
        from stepscope.hub.app import KnownRun, add_copy

        with progress_bar(f"writing {REPORT_FILE}", None, quiet=quiet) as progress:
            why = add_copy(run_dir, KnownRun(data=run, summary=summary), progress)
        if why:
            copied = (run_dir / REPORT_FILE).is_file()
            summary["notices"].append(f"{REPORT_FILE} was not written: {why}.")
            save_summary(run_dir, summary, render_text(summary, width=FILE_WIDTH, saved=True, copied=copied))
            if requested:
                raise RunError(f"{run_dir / REPORT_FILE} was not written: {why}")
    return copied


def _write_page(
    path: Path, run_dir: Path, over: RunData | None, summary: dict[str, Any], *, redact: bool, quiet: bool
) -> None:
    """Write the page to ``path``. ``over``: data of a finished run; a live run is opened the way a hub follows it."""
    from stepscope.hub.app import KnownRun, write_copy

    known = None if over is None else KnownRun(data=over, summary=summary)
    with progress_bar(f"writing {path.name}", None, quiet=quiet) as progress:
        write_copy(run_dir, path, known=known, redact=redact, progress=progress)


def _spool_notice(run_dir: Path, meta: Mapping[str, Any]) -> list[str]:
    """Notice that a spool is not the whole run."""
    if (team := Destination.from_meta(meta, TEAM_HUB)) is not None:
        return [f"The team's hub at {team.url} does not have all of this run yet; run `stepscope send {run_dir}`."]
    hub = meta.get("hub")
    if not isinstance(hub, Mapping):
        return []
    part = f"This is only the data of node {hub.get('node')} of the run {hub.get('run')}"
    return [f"{part}, and not all of it has been sent yet; run `stepscope send {run_dir}`."]


def _barred(run_dir: Path, *, made_here: bool, quiet: bool) -> str | None:
    barred = writing_barred(run_dir, made_here=made_here)
    if barred:
        return barred
    with progress_bar("checking whether it is still being written", None, quiet=quiet) as progress:
        return sealing_barred(run_dir, read_meta(run_dir), progress=progress)


def _ended_or_here(run_dir: Path) -> bool:
    """Whether no process can still print into the run's files; processes on other hosts are unknown."""
    meta = read_meta(run_dir)
    return bool(meta.get("end")) or meta.get("host") == platform.node()


# -- follow -----------------------------------------------------------------------------------------------------------
# ``stepscope report --follow``: print a line whenever the findings of a live run change.

FOLLOW_PAUSE_S = 1.0
READING_SHARE = 0.2
"""Maximum share of the time spent on reading the run, however long it is."""


def follow_run(run_dir: Path) -> None:
    """Follow until the run is over or the user presses Ctrl-C."""
    from stepscope.diagnosis.hysteresis import evaluate

    watched: tuple[Watched, ...] = ()
    say(f"following {run_dir}; Ctrl-C stops following, not the run")
    try:
        while processes_alive(run_dir):
            started_s = time.monotonic()
            watched, changes = evaluate(open_run(run_dir), watched)
            for change in changes:
                print(_change_line(change), flush=True)
            took_s = time.monotonic() - started_s
            time.sleep(max(FOLLOW_PAUSE_S, took_s / READING_SHARE))
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _change_line(change: Change) -> str:
    from stepscope.terminal.drawing import finding_line  # loads rich, 2 MB that the summary does without

    finding = change.finding
    return finding_line(change.step, finding.severity, finding.title, withdrawn=change.what == "withdrawn")
