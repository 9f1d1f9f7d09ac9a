"""Arguments that several commands share: the RUN, types of option values, and the nearest name for one not found."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from stepscope.errors import NotARun, UsageError
from stepscope.records.text import say
from stepscope.store.catalog import newest_run
from stepscope.store.paths import META

__all__ = [
    "RUNS_FOLDER",
    "RUN_HELP",
    "amount",
    "count",
    "did_you_mean",
    "existing",
    "locate_run",
    "names_in",
    "nearest",
    "port_number",
    "run_path",
    "runs_in",
    "whole_number",
]


# -- names ------------------------------------------------------------------------------------------------------------

ALIKE = 0.65
"""Similarity from which a name is suggested for a mistyped one (``difflib``)."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known name that was probably meant; empty if none is similar."""
    names = list(known)
    begun = [name for name in names if word.strip("-") and name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    bare = {name.lstrip("-").lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lstrip("-").lower(), bare, n=1, cutoff=ALIKE)
    return bare[close[0]] if close else ""


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """``; did you mean NAME?`` for the end of a message, or nothing; ``form`` is how the name is shown."""
    name = nearest(word, known)
    return f"; did you mean {form.format(name)}?" if name else ""


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
RUNS_FOLDER = Path("runs")


def locate_run(path: Path | None, *, prefer_live: bool = False) -> Path:
    """The path, or the run of that name in ``runs/``; without a path the newest run there, which is printed."""
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


def run_path(path: Path) -> Path:
    """The path, or the run of that name in ``runs/``; NotARun if neither exists."""
    if path.exists():
        return path
    named = RUNS_FOLDER / path
    if named.is_dir():
        return named
    if path.parent != Path():
        runs = [str(path.parent / name) for name in runs_in(path.parent)]
        raise NotARun(f"{path} does not exist{did_you_mean(str(path), runs)}")
    runs = [*runs_in(RUNS_FOLDER), *runs_in(Path())]
    hint = did_you_mean(str(path), runs) or ("; `stepscope list` shows all runs" if runs else "")
    raise NotARun(f"no run named {path}: looked for {path} and {named} in {Path.cwd()}{hint}")


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


def port_number(*, least: int = 1) -> Callable[[str], int]:
    """Type of a port; ``least`` is 0 where that means any free port."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) < 1 << 16):
            raise argparse.ArgumentTypeError(f"must be a port from {least} to 65535, not {text!r}")
        return int(text)

    return parse
