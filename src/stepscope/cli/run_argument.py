"""The RUN argument of commands and of stepscope.show(): from a path, a name or nothing to a run directory."""

from __future__ import annotations

from pathlib import Path

from stepscope.errors import UsageError
from stepscope.records.text import say
from stepscope.store.catalog import newest_run

__all__ = ["RUN_HELP", "locate_run"]

RUN_HELP = "a run directory, or the name of one in runs/ (default: the newest run in runs/)"
RUNS_FOLDER = Path("runs")


def locate_run(path: Path | None, *, prefer_live: bool = False) -> Path:
    """The path, or the run of that name in ``runs/``; without a path the newest run there, which is printed."""
    if path is None:
        newest = newest_run(RUNS_FOLDER, prefer_live=prefer_live)
        if newest is None:
            raise UsageError(f"no runs in {RUNS_FOLDER} yet; name a run directory, or record one with `stepscope run`")
        say(f"using {newest}, the newest run")
        return newest
    named = RUNS_FOLDER / path
    return named if not path.exists() and named.is_dir() else path
