"""The runs of an archive, for a hub: listed from the archive's catalog, copied to this disk when they are opened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stepscope.archive.cache import Archive
from stepscope.errors import ArchiveError, RunError
from stepscope.hub.runs import Runs
from stepscope.records.text import say
from stepscope.store.catalog import Labels, RunEntry

__all__ = ["ArchivedRuns"]


class ArchivedRuns(Runs):
    """Archived runs are only read.  Concurrent requests for a run share one copy."""

    def __init__(self, archive: Archive) -> None:
        super().__init__(Path(), single=None)
        self._archive = archive
        self._fetched: dict[str, Path] = {}
        self._fetching: dict[str, asyncio.Task[Path | None]] = {}
        self._problem = ""

    def folders(self) -> list[Path]:
        return []

    def path_of(self, name: str) -> Path | None:
        return None

    @property
    def may_delete(self) -> bool:
        return False

    async def label(self, run: str, **change: Any) -> Labels | None:
        raise RunError("an archived run does not change")

    async def where(self, id_: str) -> Path | None:
        """Return the copy of a run; None if it cannot be copied, which is reported once."""
        if not self._may_be(id_):
            return None
        path = self._fetched.get(id_)
        if path is not None and await asyncio.to_thread(path.is_dir):
            return path
        task = self._fetching.get(id_)
        if task is None:
            task = self._fetching[id_] = asyncio.create_task(asyncio.to_thread(self._fetch, id_))
            task.add_done_callback(lambda _: self._fetching.pop(id_, None))
        path = await asyncio.shield(task)
        if path is not None:
            self._fetched[id_] = path
        return path

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)
        self._archive.close()

    def _fetch(self, name: str) -> Path | None:
        try:
            return self._archive.run(name)
        except ArchiveError as error:
            self._report(str(error))
            return None

    def _list(self) -> list[RunEntry]:
        try:
            entries, problems = self._archive.entries()
        except ArchiveError as error:
            self._report(str(error))
            return []
        self._report("; ".join(problems))
        return entries

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            say(problem)
        self._problem = problem
