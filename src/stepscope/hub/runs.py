"""The runs that a hub can answer for: the live one that it is fed, or a folder of runs, past and live.

    runs = Runs.of_one(run_dir, live)        # the hub of a run: others put into ``live`` what comes
    runs = Runs.of_folder(Path("runs"))      # ``stepscope serve``: opened when somebody asks, one ahead (``ahead.py``)

A run of a folder is opened in a thread, through ``store.open_run``, and put into the same model that a live one is kept
in (``past.py``); while it still goes on it is followed instead (``tail.py``, ``inbox_tail.py``), as long as somebody
looks.  A few stay open, the longest unasked goes first; one that changed on disk is opened again.  Everything else is
used from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun, RunError, UsageError
from stepscope.hub.late_samples import bring_samples
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.looks import keep_up
from stepscope.hub.open_run import CHECK_S, READING_SHARE, Final, OpenRun, Poll, stamp_of
from stepscope.hub.past import past_run
from stepscope.records.naming import checked_name
from stepscope.records.series import RunData
from stepscope.reports import summarise
from stepscope.store.catalog import Known, RunEntry, list_runs, run_entry
from stepscope.store.load import load_run, open_run
from stepscope.store.meta import read_meta
from stepscope.store.nodes import read_nodes
from stepscope.store.paths import EVENTS, INBOX, META, NODES, STEPS, SUMMARY
from stepscope.store.processes import processes_alive
from stepscope.store.results import load_summary, printed

__all__ = ["Runs", "final_of"]

MOST_OPEN = 4
LOOKED_AT_S = 30.0
"""A run that goes on is followed for so long after it was last asked about."""
_WATCHED = (META, SUMMARY, EVENTS, STEPS, INBOX, NODES)


class Runs:
    def __init__(self, root: Path, *, one: OpenRun | None, names: frozenset[str] = frozenset()) -> None:
        self.root = root
        self._one = one
        self._names = names
        self._opened: OrderedDict[str, OpenRun] = OrderedDict()
        self._opening: dict[str, asyncio.Task[OpenRun | None]] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._listed = Known()
        self._listing: asyncio.Task[list[RunEntry]] | None = None

    @classmethod
    def of_one(cls, run_dir: Path, live: LiveRun, *, wanted: str = "") -> Runs:
        """A run that is fed by its hub; ``wanted`` is what it was to be called."""
        one = OpenRun(run_dir, live, fed=True)
        return cls(run_dir.parent, one=one, names=frozenset({run_dir.name, wanted} - {""}))

    @classmethod
    def of_past(cls, run_dir: Path, data: RunData, document: Mapping[str, Any]) -> Runs:
        """A run that is over and was read already, with its summary."""
        return cls(run_dir.parent, one=_past(run_dir, data, document), names=frozenset({run_dir.name}))

    @classmethod
    def of_folder(cls, root: Path) -> Runs:
        """All runs right under ``root``; or ``root`` itself, if it is one."""
        if (root / META).is_file():
            return cls(root.resolve().parent, one=None, names=frozenset({root.resolve().name}))
        return cls(root, one=None)

    def live(self) -> list[OpenRun]:
        """Those that are open: what metrics are told of."""
        return [self._one] if self._one is not None else list(self._opened.values())

    async def entries(self) -> list[RunEntry]:
        """Newest first.  However many ask at once, the folder is gone through once."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(asyncio.to_thread(self._list))
        return await asyncio.shield(self._listing)

    async def open(self, name: str) -> OpenRun | None:
        """The run of that name; None when there is none.  ApiError-free: whatever is wrong with it, it is none."""
        if self._one is not None:
            if name not in self._names:
                return None
            self._one.asked()
            self._one.live.settle()
            return self._one
        if not self._may_be(name):
            return None
        opened = self._opened.get(name)
        now_s = time.monotonic()
        if opened is not None and opened.poll is None and now_s - opened.checked_s > self._pause_s(opened):
            opened.checked_s = now_s
            if opened.stamp != await asyncio.to_thread(_changed_of, opened.path):
                opened = None
        if opened is None:
            opened = await self._open_once(name)
        if opened is not None:
            opened.asked()
            opened.live.settle()
            if self._opened.get(name) is opened:
                self._opened.move_to_end(name)
        return opened

    def path_of(self, name: str) -> Path | None:
        """Of a run that is there."""
        path = self.root / name
        return path if self._may_be(name) and (path / META).is_file() else None

    async def close(self) -> None:
        """End what runs in the background."""
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

    @staticmethod
    def _pause_s(opened: OpenRun) -> float:
        return max(CHECK_S, opened.took_s / READING_SHARE)

    async def _open_once(self, name: str) -> OpenRun | None:
        """However many ask at once, it is opened once."""
        task = self._opening.get(name)
        if task is None:
            task = self._opening[name] = asyncio.create_task(self._open(name))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(task)

    async def _open(self, name: str) -> OpenRun | None:
        try:
            opened = await asyncio.to_thread(_load, self.root / name)
        except (RunError, OSError):
            self._opened.pop(name, None)
            return None
        opened.asked()
        self._opened[name] = opened
        self._opened.move_to_end(name)
        while len(self._opened) > MOST_OPEN:
            self._opened.popitem(last=False)
        if opened.poll is not None:
            self._in_background(self._follow(opened, opened.poll))
        elif opened.unsampled:
            opened.sampling = self._in_background(bring_samples(opened.path, opened.live, _node_names(opened.path)))
        return opened

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return task

    async def _follow(self, run: OpenRun, poll: Poll) -> None:
        """Keep up with a run that goes on, as long as somebody looks; then it is closed."""
        keeping = asyncio.create_task(keep_up(run.live, poll=poll))
        try:
            while self._opened.get(run.name) is run and time.monotonic() - run.live.asked_s < LOOKED_AT_S:
                await asyncio.wait((keeping,), timeout=CHECK_S)
                if keeping.done() or not await asyncio.to_thread(_goes_on, run.path):
                    break
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            if self._opened.get(run.name) is run:
                del self._opened[run.name]

    def _list(self) -> list[RunEntry]:
        if self._one is not None:
            return [run_entry(self._one.path)]
        if self._names:
            return [run_entry(self.root / name) for name in sorted(self._names)]
        return list_runs(self.root, known=self._listed)[0]


def _load(path: Path) -> OpenRun:
    started_s = time.monotonic()
    stamp = _changed_of(path)
    meta = read_meta(path)
    if meta.get("sealed") is not True and _goes_on(path):
        live = LiveRun(name=path.name, run_dir=path, meta=meta)
        poll = _poll_of(path, live)
        opened = OpenRun(path, live, poll=poll)
        poll()
        live.tick()
    else:
        summary = load_summary(path)
        loaded = load_run(path, samples=summary is None)
        opened = _past(path, loaded.data, summary or summarise(loaded.data, logs=printed(path)))
        opened.unsampled = loaded.samples_left_out
    opened.stamp = stamp
    opened.checked_s = time.monotonic()
    opened.took_s = opened.checked_s - started_s
    return opened


def final_of(path: Path) -> Final:
    """What is said of a run whose processes have ended, before anybody sealed it.  RunError when it cannot be read."""
    data = open_run(path)
    return summarise(data, logs=printed(path)), data.hangs


def _poll_of(path: Path, live: LiveRun) -> Poll:
    """What this node writes and, of a job of several, what the others send."""
    # Whoever makes report.html beside a job has no use for these, and no memory to spare.
    from stepscope.hub.inbox_tail import InboxTail
    from stepscope.hub.tail import Tail

    here, others = Tail(path, live), InboxTail(path, live)
    return lambda: (here.poll(), others.poll())


def _past(path: Path, data: RunData, document: Mapping[str, Any]) -> OpenRun:
    live = past_run(data, _node_names(path))
    return OpenRun(path, live, document=document, hangs=data.hangs, ended=run_entry(path).status)


def _node_names(path: Path) -> dict[str, str]:
    """By host, what its node was called while the run went on."""
    return {node.host: str(node.node) for node in read_nodes(path)}


def _goes_on(path: Path) -> bool:
    try:
        return processes_alive(path)
    except NotARun:
        return False


def _changed_of(path: Path) -> tuple[Any, ...]:
    return tuple(stamp_of(path / name) for name in _WATCHED)
