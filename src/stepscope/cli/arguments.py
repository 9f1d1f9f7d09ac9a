"""Arguments that several commands share: the RUN, a folder or an archive of runs, types of option values."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import NotARun, UsageError
from stepscope.records.text import bytes_text, did_you_mean, say
from stepscope.store.paths import META

if TYPE_CHECKING:
    from stepscope.archive.location import ArchiveUrl
    from stepscope.store.catalog import KnownRuns, RunEntry

__all__ = [
    "RUNS_FOLDER",
    "RUN_HELP",
    "RUN_OR_URL_HELP",
    "age",
    "amount",
    "count",
    "existing",
    "locate_run",
    "names_in",
    "port_number",
    "run_or_url",
    "run_path",
    "runs_in",
    "runs_of_folder",
    "served_folder",
    "size",
    "whole_number",
]


# -- names ------------------------------------------------------------------------------------------------------------


def names_in(folder: Path) -> list[str]:
    """Names of a folder's entries; none if it cannot be read."""
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def existing(path: Path) -> Path:
    """The path; UsageError with the nearest name in its folder if it does not exist."""
    if os.path.lexists(path):
        return path
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise UsageError(f"{path} does not exist{where}{did_you_mean(path.name, names_in(path.parent))}")


# -- RUN --------------------------------------------------------------------------------------------------------------

RUN_HELP = "a run directory, or the name of one in runs/ (default: the newest run in runs/)"
RUN_OR_URL_HELP = "a run directory, the name of one in runs/, or an archived run (default: the newest run in runs/)"
RUNS_FOLDER = Path("runs")


_SHORTENED_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")
"""What ``Path`` makes of an address."""


def run_or_url(text: str) -> Path | ArchiveUrl:
    """Type of a path that may also be the address of an archive, or of a run in it."""
    from stepscope.archive.location import is_url, parse_url

    return parse_url(text) if is_url(text) else Path(text)


def locate_run(path: Path | ArchiveUrl | None, *, prefer_live: bool = False) -> Path:
    """The path, or the run of that name in ``runs/``; without a path the newest run there, which is printed.

    Of an archived run, a copy on this disk.
    """
    from stepscope.store.catalog import newest_run  # the launcher loads this module, and looks for no run

    if path is None:
        newest = newest_run(RUNS_FOLDER, prefer_live=prefer_live)
        if newest is None:
            where = RUNS_FOLDER.absolute()
            raise UsageError(f"no runs in {where} yet; name a run directory, or record one with `stepscope run`")
        say(f"using {newest}, the newest run")
        return newest
    found = run_path(path)
    if found.is_dir() and not (found / META).exists() and (newest := newest_run(found)) is not None:
        raise NotARun(f"{found} is a folder of runs, not a run; name one of them, such as {newest}")
    return found


def run_path(path: Path | ArchiveUrl) -> Path:
    """The path, or the run of that name in ``runs/``; NotARun if neither exists.  Of an archived run, a copy."""
    if not isinstance(path, Path):
        return _fetched(path)
    if path.exists():
        return path
    if _SHORTENED_URL.match(str(path)):
        raise UsageError(
            f"{path}: this command reads runs on disk; list, report, compare, history, sql and serve take URLs"
        )
    named = RUNS_FOLDER / path
    if named.is_dir():
        return named
    if path.parent != Path():
        runs = [str(path.parent / name) for name in runs_in(path.parent)]
        raise NotARun(f"{path} does not exist{did_you_mean(str(path), runs)}")
    runs = [*runs_in(RUNS_FOLDER), *runs_in(Path())]
    hint = did_you_mean(str(path), runs) or ("; `stepscope list` shows all runs" if runs else "")
    raise NotARun(f"no run named {path}: looked for {path} and {named} in {Path.cwd()}{hint}")


def _fetched(url: ArchiveUrl) -> Path:
    """An archived run, copied to this disk as far as it is not there."""
    from stepscope.archive.cache import Archive
    from stepscope.cli.output import progress_bar

    with progress_bar(f"fetching {url.name}", bytes_text) as progress:
        return Archive(url.parent, os.environ).run(url.name, progress=progress)


def runs_of_folder(folder: Path | ArchiveUrl, *, known: KnownRuns | None = None) -> list[RunEntry]:
    """The runs in it, newest first, read with a progress bar; what cannot be read is reported.

    ``known``: finished runs that need not be read if they are unchanged.
    """
    from stepscope.cli.output import progress_bar
    from stepscope.store.catalog import list_runs

    if not isinstance(folder, Path):
        return _runs_of_archive(folder)
    if folder != RUNS_FOLDER and not existing(folder).is_dir():
        raise UsageError(f"{folder} is not a folder")
    with progress_bar("reading runs") as tell:
        entries, problems = list_runs(folder, known=known, progress=tell)
    for problem in problems:
        say(problem)
    return entries


def _runs_of_archive(url: ArchiveUrl) -> list[RunEntry]:
    from stepscope.archive.cache import Archive

    archive = Archive(url, os.environ)
    entries, problems = archive.entries()
    for problem in problems:
        say(problem)
    if not entries and archive.is_run():
        raise UsageError(f"{url} is a run; `stepscope report {url}` shows it, and {url.parent} is its archive")
    return entries


def served_folder(path: Path | None, *, other_content: Callable[[Path], bool] | None = None) -> Path:
    """The folder of runs, or the run, or the run of that name in runs/; without a path ``runs/``.

    ``other_content``: whether a folder without runs has traces, for a command that shows them.
    """
    if path is None and not RUNS_FOLDER.exists():
        raise UsageError(f"there is no folder {RUNS_FOLDER.absolute()}; specify a run or a folder of runs")
    path = run_path(RUNS_FOLDER if path is None else path)
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder")
    if not any((path / name).exists() for name in (META, *(f"{child.name}/{META}" for child in path.iterdir()))):
        if other_content is None:
            say(f"no runs in {path} yet; specify a run or a folder of runs")
        elif not other_content(path):
            say(f"no runs and no traces in {path} yet; specify a run, a folder of runs, or a folder of traces")
    return path


def runs_in(folder: Path) -> list[str]:
    """Names of the runs directly in a folder."""
    return sorted(name for name in names_in(folder) if (folder / name / META).is_file())


# -- types of option values -------------------------------------------------------------------------------------------
# For argparse, which puts the option before the message.


def count(what: str) -> Callable[[str], int]:
    """Type of a whole number from 1."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise argparse.ArgumentTypeError(f"must be 1 or more {what}, not {text!r}")
        return int(text)

    return parse


def whole_number(text: str) -> int:
    """Type of a whole number from 0, such as a rank or a step."""
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def amount(what: str) -> Callable[[str], float]:
    """Type of a number from 0."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"must be 0 or more {what}, not {text!r}")
        return number

    return parse


_AGE = re.compile(r"(\d{1,6})([hdw])")
_AGE_S = {"h": 3600, "d": 86_400, "w": 604_800}


def age(text: str) -> float:
    """Type of a time in hours, days or weeks, such as ``12h``, ``90d`` or ``8w``; in seconds."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be like 12h, 90d or 8w, not {text!r}")
    return float(int(match[1]) * _AGE_S[match[2]])


_SIZE = re.compile(r"(\d{1,12})([KMGT]?)", re.IGNORECASE)


def size(text: str) -> int:
    """Type of a number of bytes, such as ``500M``, ``20G`` or ``2T``."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 500M, 20G or 2T, not {text!r}")
    return int(match[1]) << 10 * (" KMGT".index(match[2].upper()) if match[2] else 0)


def port_number(*, least: int = 1) -> Callable[[str], int]:
    """Type of a port; ``least`` is 0 where that means any free port."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) < 1 << 16):
            raise argparse.ArgumentTypeError(f"must be a port from {least} to 65535, not {text!r}")
        return int(text)

    return parse
