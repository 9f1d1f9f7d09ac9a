"""The user's catalog of all runs, for commands: which folders it covers, bringing it up to date, lists from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.arguments import RUNS_FOLDER, existing, names_in
from stepscope.cli.output import progress_bar
from stepscope.errors import UsageError
from stepscope.records.text import say
from stepscope.store.user_runs import MANY_RUNS, folder_tag, known_folders

if TYPE_CHECKING:
    from stepscope.store.catalog import KnownRuns

__all__ = ["catalog_folders", "catalog_runs", "updated_catalog"]


def catalog_folders(paths: Sequence[Path | ArchiveUrl]) -> tuple[dict[str, Path], list[ArchiveUrl]]:
    """The folders by their key in the catalog, and the archives; without paths all folders of this user's runs."""
    if not paths:
        folders = known_folders(os.environ)
        if RUNS_FOLDER.is_dir():
            folders.setdefault(folder_tag(RUNS_FOLDER), RUNS_FOLDER.resolve())
        if not folders:
            raise UsageError("no runs yet; name a folder of runs, or record one with `stepscope run`")
        return folders, []
    found: dict[str, Path] = {}
    for path in paths:
        if isinstance(path, Path):
            if not existing(path).is_dir():
                raise UsageError(f"{path} is not a folder")
            if (path / "run.json").exists():
                raise UsageError(f"{path} is a run; name the folder that it is in")
            found[folder_tag(path)] = path.resolve()
    return found, [path for path in paths if not isinstance(path, Path)]


def updated_catalog(folders: Mapping[str, Path], archives: Sequence[ArchiveUrl]) -> tuple[Any, list[str]]:
    """The user's catalog, brought up to date, and a sentence for each run that could not be read."""
    from stepscope.archive.cache import Archive
    from stepscope.fleet.catalog import RunCatalog

    catalog = RunCatalog.of_user(os.environ)
    with progress_bar("reading runs") as progress:
        update = catalog.update(folders, [Archive(url, os.environ) for url in archives], progress=progress)
    if update.rebuilt:
        say(f"the catalog was made again: {update.rebuilt}")
    return catalog, update.problems


def catalog_runs(folder: Path | ArchiveUrl) -> KnownRuns:
    """What the catalog has of a large folder, for ``runs_of_folder``; it may be out of date."""
    if not isinstance(folder, Path) or len(names_in(folder)) < MANY_RUNS:
        return {}
    from stepscope.fleet.catalog import known_runs

    return known_runs(folder, os.environ)
