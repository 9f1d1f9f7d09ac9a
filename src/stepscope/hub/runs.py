"""The runs that a hub serves: opened from their files, followed while they continue.

    runs = Runs.of_live(run_dir, live)        # the hub of a run: ingest feeds ``live``
    runs = Runs.of_folder(Path("runs"))      # ``stepscope serve``: opened on request, one ahead (``open_ahead``)
    runs = Runs.of_user(folders)             # ``stepscope serve --all``: the runs of several folders

A run in a folder is opened in a thread, through ``store.load``, and put into the same model as a live run
(``past_run``).  While it is still active it is followed instead (``active_run``) until clients stop asking for it.
A few runs stay open; the least recently used is closed first.  A run that changed on disk is reopened.  Not
thread-safe: everything else runs in one event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun, RunError, UsageError
from stepscope.hub.active_run import all_of, recent_run, whole_run
from stepscope.hub.live.figures import RunFigures, read_judged
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.open_run import CHECK_S, READING_SHARE, FinalSummary, OpenRun, Poll, stamp_of
from stepscope.hub.past_run import bring_samples, past_run
from stepscope.records.series import RunData
from stepscope.records.text import checked_name
from stepscope.store import catalog, user_runs
from stepscope.store.catalog import KnownRuns, Labels, RunEntry, list_runs, run_entry
from stepscope.store.documents import load_summary, log_names, read_meta, read_nodes
from stepscope.store.liveness import processes_alive
from stepscope.store.load import load_run, open_run
from stepscope.store.paths import EVENTS, INBOX, META, NODES, STEPS, SUMMARY
from stepscope.store.user_runs import MANY_RUNS

__all__ = ["OpenPolicy", "Runs", "changed_of", "final_of", "load_open", "open_ahead"]

MOST_UNOPENED = 256
"""Active runs that are not open and that metrics show."""
REQUESTED_S = 30.0
"""How long an active run is followed after the last request for it."""
QUICK_SCAN_S = 0.1
"""A folder that is scanned within this time is scanned for every list."""
LISTING_SHARE = 0.2
"""The share of the time that scans of a larger one may take: hundreds of active runs and viewers."""
LONGEST_LISTED_S = 5.0
_WATCHED = (META, SUMMARY, EVENTS, STEPS, INBOX, NODES)


Folders = Callable[[], Mapping[str, Path]]
"""Returns the folders to serve, by tag (``store/user_runs.py``); new ones may appear with each call."""


def load_open(path: Path) -> OpenRun:
    started_s = time.monotonic()
    stamp = changed_of(path)
    meta = read_meta(path)
    if meta.get("sealed") is not True and _goes_on(path):
        live, poll = recent_run(path, meta) or all_of(path, meta)
        opened = OpenRun(path, live, poll=poll)
        poll()
        live.tick()
    else:
        summary = load_summary(path)
        loaded = load_run(path, samples=summary is None)
        opened = _past(path, loaded.data, summary or _summary_of(path, loaded.data))
        opened.unsampled = loaded.samples_left_out
    opened.stamp = stamp
    opened.checked_s = time.monotonic()
    opened.took_s = opened.checked_s - started_s
    return opened


@dataclass(frozen=True, kw_only=True)
class OpenPolicy:
    """How runs of a folder are opened, and how long they stay open."""

    most_open: int = 4
    check_s: float = CHECK_S
    """The time between two checks whether a finished run changed on disk, or an active one ended."""
    reading_share: float = READING_SHARE
    load: Callable[[Path], OpenRun] = load_open
    """Opens a run, in a thread."""
    read_whole: Callable[[OpenRun], Coroutine[Any, Any, tuple[LiveRun, Poll]]] = whole_run
    """Reads the steps of a long active run that were left out at first."""


class Runs:
    def __init__(
        self,
        root: Path,
        *,
        single: OpenRun | None,
        names: frozenset[str] = frozenset(),
        folders: Folders | None = None,
        policy: OpenPolicy | None = None,
    ) -> None:
        self.root = root
        self._policy = OpenPolicy() if policy is None else policy
        self._single = single
        self._names = names
        self._folders = folders
        self._known_folders: dict[str, Path] = {}
        self._opened: OrderedDict[str, OpenRun] = OrderedDict()
        self._opening: dict[str, asyncio.Task[OpenRun | None]] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._listed: dict[Path, KnownRuns] = {}
        self._listing: asyncio.Task[list[RunEntry]] | None = None
        self._listed_until_s = 0.0
        """Until then a list is served again without a scan."""

    @classmethod
    def of_live(cls, run_dir: Path, live: LiveRun, *, wanted: str = "") -> Runs:
        """Serve a run that its hub feeds; ``wanted`` is its requested name."""
        single = OpenRun(run_dir, live, fed=True)
        return cls(run_dir.parent, single=single, names=frozenset({run_dir.name, wanted} - {""}))

    @classmethod
    def of_past(cls, run_dir: Path, data: RunData, document: Mapping[str, Any]) -> Runs:
        """Serve a finished run that was already read, with its summary."""
        single = _past(run_dir, data, document)
        single.recorded = data
        return cls(run_dir.parent, single=single, names=frozenset({run_dir.name}))

    @classmethod
    def of_folder(cls, root: Path, policy: OpenPolicy | None = None) -> Runs:
        """Serve all runs directly under ``root``; or ``root`` itself, if it is a run."""
        if (root / META).is_file():
            return cls(root.resolve().parent, single=None, names=frozenset({root.resolve().name}), policy=policy)
        return cls(root, single=None, policy=policy)

    @classmethod
    def of_user(cls, folders: Folders) -> Runs:
        """Serve all runs of several folders; a run's ID says in which folder it is."""
        return cls(Path(), single=None, folders=folders)

    def id_of(self, path: Path) -> str:
        """Return the ID of a listed run."""
        return path.name if self._folders is None else user_runs.run_id(path)

    def folder_of(self, path: Path) -> str | None:
        """Return the folder of a run as text; None if all runs are in one folder."""
        if self._folders is None:
            return None
        home, folder = str(Path.home()), str(path.parent)
        return f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}/") else folder

    def folders(self) -> list[Path]:
        """Return the folders of which all runs are served; none for the hub of one run.  Reads the disk."""
        if self._single is not None or self._names:
            return []
        return [self.root] if self._folders is None else list(self._folders().values())

    @property
    def of_several_folders(self) -> bool:
        """Whether the ID of a run says in which folder it is."""
        return self._folders is not None

    def live(self) -> list[OpenRun]:
        """Return the open runs; used for metrics."""
        return [self._single] if self._single is not None else list(self._opened.values())

    async def entries(self) -> list[RunEntry]:
        """List the runs, newest first.  Concurrent requests share one scan of the folder, and a long one its result."""
        if self._listing is None or (self._listing.done() and time.monotonic() >= self._listed_until_s):
            self._listed_until_s = 0.0
            self._listing = asyncio.create_task(self._scan())
        return await asyncio.shield(self._listing)

    async def _scan(self) -> list[RunEntry]:
        began_s = time.monotonic()
        entries = await asyncio.to_thread(self._list)
        ended_s = time.monotonic()
        if ended_s - began_s > QUICK_SCAN_S:
            self._listed_until_s = ended_s + min((ended_s - began_s) / LISTING_SHARE, LONGEST_LISTED_S)
        return entries

    async def judged(self) -> list[tuple[str, RunFigures]]:
        """Return the active runs that are not open here, newest first, as their own hubs judged them."""
        if self._single is not None:
            return []
        paths = [entry.path for entry in await self.entries() if entry.status == "running"]
        unopened = [path for path in paths if self.id_of(path) not in self._opened][:MOST_UNOPENED]
        found = await asyncio.to_thread(lambda: [(self.id_of(path), read_judged(path)) for path in unopened])
        return [(name, figures) for name, figures in found if figures is not None]

    async def open(self, name: str) -> OpenRun | None:
        """Open the run with that name.  None if it does not exist or cannot be read; never raises ApiError."""
        if self._single is not None:
            if name not in self._names:
                return None
            self._single.note_request()
            self._single.live.settle()
            return self._single
        if await self.where(name) is None:
            return None
        opened = self._opened.get(name)
        now_s = time.monotonic()
        if opened is not None and opened.poll is None and now_s - opened.checked_s > self._pause_s(opened):
            opened.checked_s = now_s
            if opened.stamp != await asyncio.to_thread(changed_of, opened.path):
                opened = None
        if opened is None:
            opened = await self._open_once(name)
        if opened is not None:
            opened.note_request()
            opened.live.settle()
            if self._opened.get(name) is opened:
                self._opened.move_to_end(name)
        return opened

    def path_of(self, name: str) -> Path | None:
        """Return the path of an existing run in the only folder."""
        path = self.root / name
        return path if self._folders is None and self._may_be(name) and (path / META).is_file() else None

    @property
    def may_delete(self) -> bool:
        """Whether runs of this hub can be deleted: not the only one that it serves."""
        return self._single is None and not self._names

    async def label(self, run: str, **change: Any) -> Labels | None:
        """Change the labels of a run (``change_labels``); None if it does not exist."""
        path = await self.existing(run)
        labels = None if path is None else await asyncio.to_thread(catalog.change_labels, path, **change)
        self._listed_until_s = 0.0
        return labels

    async def delete(self, run: str) -> bool:
        """Delete a run that is over; False if it does not exist.  RunError, with the reason, if it is in use."""
        path = await self.existing(run) if self.may_delete else None
        if path is None:
            return False
        await asyncio.to_thread(catalog.delete_run, path, watch=False)
        self._opened.pop(run, None)
        self._listed_until_s = 0.0
        return True

    async def existing(self, id_: str) -> Path | None:
        """Return the path of a run that exists and that this hub serves."""
        if self._single is not None:
            return self._single.path if id_ in self._names else None
        path = await self.where(id_)
        return path if path is not None and await asyncio.to_thread((path / META).is_file) else None

    async def close(self) -> None:
        """Stop all background tasks."""
        tasks = [*self._opening.values(), *self._following, *([self._listing] if self._listing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _may_be(self, name: str) -> bool:
        try:
            checked_name(name)
        except UsageError:
            return False
        return not self._names or name in self._names

    async def where(self, id_: str) -> Path | None:
        """Return where a run with that ID would be; None if it cannot be a run of this hub."""
        if self._folders is None:
            return self.root / id_ if self._may_be(id_) else None
        name, tag = user_runs.split_run_id(id_)
        if not self._may_be(name):
            return None
        if tag not in self._known_folders:
            self._known_folders.update(await asyncio.to_thread(self._folders))
        folder = self._known_folders.get(tag)
        return None if folder is None else folder / name

    def _pause_s(self, opened: OpenRun) -> float:
        return max(self._policy.check_s, opened.took_s / self._policy.reading_share)

    async def _open_once(self, name: str) -> OpenRun | None:
        """Open a run; concurrent requests share one attempt."""
        task = self._opening.get(name)
        if task is None:
            task = self._opening[name] = asyncio.create_task(self._open(name))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(task)

    async def _open(self, name: str) -> OpenRun | None:
        path = await self.where(name)
        try:
            opened = None if path is None else await asyncio.to_thread(self._policy.load, path)
        except (RunError, OSError):
            opened = None
        if opened is None:
            self._opened.pop(name, None)
            return None
        opened.id = name
        opened.note_request()
        self._opened[name] = opened
        self._opened.move_to_end(name)
        while len(self._opened) > self._policy.most_open:
            self._opened.popitem(last=False)
        if opened.poll is not None:
            self._in_background(self._follow(opened, opened.poll))
        elif opened.unsampled:
            opened.sampling = self._in_background(
                bring_samples(opened.path, opened.live, _node_names(opened.path), opened.samples_requested)
            )
        return opened

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return task

    async def _follow(self, run: OpenRun, poll: Poll) -> None:
        """Keep up with an active run while clients ask for it; then close it."""
        from stepscope.hub.live.rules import keep_up  # loads the rules, which finished runs do not need

        whole = partial(self._policy.read_whole, run) if run.live.partial else None
        keeping = asyncio.create_task(keep_up(run.live, poll=poll, whole=whole))
        try:
            while self._opened.get(run.id) is run and time.monotonic() - run.live.requested_s < REQUESTED_S:
                await asyncio.wait((keeping,), timeout=self._policy.check_s)
                if keeping.done() or not await asyncio.to_thread(_goes_on, run.path):
                    break
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            if self._opened.get(run.id) is run:
                del self._opened[run.id]

    def _list(self) -> list[RunEntry]:
        if self._single is not None:
            return [run_entry(self._single.path)]
        if self._names:
            return [run_entry(self.root / name) for name in sorted(self._names)]
        folders = self.folders()
        entries = [entry for folder in folders for entry in list_runs(folder, known=self._known(folder))[0]]
        return entries if len(folders) == 1 else sorted(entries, key=lambda one: one.created_wall_ns, reverse=True)

    def _known(self, folder: Path) -> KnownRuns:
        """What was listed before; the first time, what the user's catalog has of a large folder."""
        known = self._listed.get(folder)
        if known is None:
            many = folder.is_dir() and sum(1 for _ in folder.iterdir()) >= MANY_RUNS
            known = self._listed[folder] = _catalog_of(folder) if many else KnownRuns()
        return known


def _catalog_of(folder: Path) -> KnownRuns:
    from stepscope.fleet.catalog import known_runs  # loads DuckDB

    return known_runs(folder, os.environ)


def final_of(path: Path) -> FinalSummary:
    """Summarize a run whose processes have ended, before it is sealed.  RunError if it cannot be read."""
    data = open_run(path)
    return _summary_of(path, data), data.hangs


def _summary_of(path: Path, data: RunData) -> dict[str, Any]:
    from stepscope.reports import summarize  # loads the rules, which a run with a summary does not need

    return summarize(data, logs=log_names(path))


def _past(path: Path, data: RunData, document: Mapping[str, Any]) -> OpenRun:
    live = past_run(data, _node_names(path))
    return OpenRun(path, live, document=document, hangs=data.hangs, layers=data.layers, ended=run_entry(path).status)


def _node_names(path: Path) -> dict[str, str]:
    """Return the node name by host during the run."""
    return {node.host: str(node.node) for node in read_nodes(path)}


def _goes_on(path: Path) -> bool:
    try:
        return processes_alive(path)
    except NotARun:
        return False


def changed_of(path: Path) -> tuple[Any, ...]:
    """Return a value that differs if the run may have changed on disk."""
    return tuple(stamp_of(path / name) for name in _WATCHED)


# -- opening ahead ----------------------------------------------------------------------------------------------------
# ``stepscope serve`` opens in advance the run most likely to be requested first: the given run, otherwise the newest
# in the folder.  Requests meanwhile share that opening.  An active run is left alone: opening it counts as watching,
# and its agent works harder for watchers.


async def open_ahead(runs: Runs, folder: Path) -> None:
    """Open the likely run of ``folder``, from which ``runs`` was made; errors surface at the next request."""
    path = await asyncio.to_thread(_likely, folder)
    if path is not None:
        await runs.open(path.name)


def _likely(folder: Path) -> Path | None:
    try:
        path = folder.resolve() if (folder / META).is_file() else catalog.newest_run(folder)
        return None if path is None or catalog.is_active(path) else path
    except (NotARun, OSError):
        return None
