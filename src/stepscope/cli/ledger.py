"""Ledgers and ends of runs for the command line: from the summary of a finished run, else from its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.goodput import ledger_of
from stepscope.goodput.jobs import JobRun, jobs_of
from stepscope.goodput.restart_advice import AttemptEnd, ends_of
from stepscope.records import run_clock
from stepscope.reports.summary import status_of
from stepscope.store.catalog import is_active
from stepscope.store.documents import load_summary, read_meta
from stepscope.store.load import open_run
from stepscope.store.paths import META

__all__ = ["earlier_ends", "job_runs", "ledger_document"]


def ledger_document(run_dir: Path) -> tuple[dict[str, Any], str]:
    """The ledger of a run and its status; NotARun if it is not a run, or has no times."""
    meta = read_meta(run_dir)
    active = is_active(run_dir)
    known = None if active else (load_summary(run_dir) or {})
    if known is not None and isinstance(known.get("goodput"), dict):
        return known["goodput"], str(known.get("status"))
    run = open_run(run_dir)
    ledger = ledger_of(run, now_ns=run_clock.now_of(meta) if active else None)
    if ledger is None:
        raise NotARun(f"{run_dir / META} does not say when the run began")
    return ledger.to_dict(), status_of(run, alive=active)


def job_runs(paths: Iterable[Path]) -> list[JobRun]:
    """Runs with what says which job they belong to; those that cannot be read are left out."""
    found = []
    for path in paths:
        try:
            ledger, status = ledger_document(path)
            meta = read_meta(path)
        except NotARun:
            continue
        created = meta.get("created_wall_ns")
        found.append(
            JobRun(
                name=path.name,
                job=_job(meta),
                created_wall_ns=created if type(created) is int else 0,
                status=status,
                ledger=ledger,
            )
        )
    return found


def _job(meta: Mapping[str, Any]) -> tuple[str, ...]:
    command = meta.get("command")
    return str(meta.get("cwd")), *map(str, command if isinstance(command, list) else ())


def earlier_ends(run_dir: Path) -> list[AttemptEnd]:
    """How the earlier runs of the same job ended, the last one last."""
    own = _job(read_meta(run_dir))
    others = []
    for path in run_dir.parent.iterdir():
        try:
            if path != run_dir and (path / META).is_file() and _job(read_meta(path)) == own:
                others.append(path)
        except NotARun:
            continue
    job = next(
        (job for job in jobs_of(job_runs([*others, run_dir])) if any(run.name == run_dir.name for run in job)), []
    )
    found: list[AttemptEnd] = []
    for run in job:
        if run.name == run_dir.name:
            break
        found += _ends(run_dir.parent / run.name)
    return found


def _ends(run_dir: Path) -> list[AttemptEnd]:
    listed = (load_summary(run_dir) or {}).get("attempt_ends")
    try:
        if isinstance(listed, list):
            return [AttemptEnd.from_dict(end) for end in listed]
    except ValueError:
        pass
    return list(ends_of(open_run(run_dir)))
