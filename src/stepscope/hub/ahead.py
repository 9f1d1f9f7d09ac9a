"""``stepscope serve`` opens, before anybody asks, what will most likely be asked for first.

The run that it was given, else the newest of the folder; whoever asks meanwhile gets the same one when it is open.  A
run that goes on is left alone: to open it is to look, and its agent works harder for those who look.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from stepscope.errors import NotARun
from stepscope.hub.runs import Runs
from stepscope.store.catalog import goes_on, newest_run
from stepscope.store.paths import META

__all__ = ["open_ahead"]


async def open_ahead(runs: Runs, folder: Path) -> None:
    """``folder``: of which ``runs`` are; whatever is wrong with it, they will hear who ask."""
    path = await asyncio.to_thread(_likely, folder)
    if path is not None:
        await runs.open(path.name)


def _likely(folder: Path) -> Path | None:
    try:
        path = folder.resolve() if (folder / META).is_file() else newest_run(folder)
        return None if path is None or goes_on(path) else path
    except (NotARun, OSError):
        return None
