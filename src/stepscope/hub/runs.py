"""The runs that a hub can answer for: the live one that it is fed, or a folder of runs, past and live.

    runs = Runs.of_one(run_dir, live)        # the hub of a run: others put into ``live`` what comes
    runs = Runs.of_folder(Path("runs"))      # ``stepscope serve``: opened when somebody asks

A run of a folder is opened in a thread, through ``store.open_run``, and put into the same model that a live one is kept
in (``past.py``); while it still goes on it is followed instead (``tail.py``), as long as somebody looks.  A few stay
open, the longest unasked goes first; one that changed on disk is opened again.  Everything else is used from one event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotARun, RunError, UsageError
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.model.looks import keep_up
from stepscope.hub.model.run_data import Snapshot, run_data_of, snapshot
from stepscope.hub.model.selection import MOST_JUDGED, select
from stepscope.hub.past import past_run
from stepscope.records.naming import checked_name
from stepscope.reports import summarise
from stepscope.store.catalog import RunEntry, list_runs, run_entry
from stepscope.store.load import open_run
from stepscope.store.meta import read_meta
from stepscope.store.nodes import NodeInfo, read_nodes, read_refused
from stepscope.store.paths import EVENTS, INBOX, META, NODES, STEPS, SUMMARY
from stepscope.store.processes import processes_alive
from stepscope.store.results import load_summary

if TYPE_CHECKING:
    from stepscope.hub.tail import Tail

__all__ = ["OpenRun", "Runs"]

MOST_OPEN = 4
CHECK_S = 1.0
"""Between two looks at whether a run that is over changed on disk."""
READING_SHARE = 0.2
"""Of the time at most goes into opening a run again that keeps changing."""
LOOKED_AT_S = 30.0
"""A run that goes on is followed for so long after it was last asked about."""
CONTEXT = (
    "name",
    "command",
    "cwd",
    "created_wall_ns",
    "host",
    "user",
    "python",
    "executable",
    "platform",
    "stepscope",
    "environment",
    "git",
    "end",
    "sealed",
)
"""What of ``run.json`` readers get; its ``environment`` was chosen without secrets when the run began."""
_WATCHED = (META, SUMMARY, EVENTS, STEPS, INBOX, NODES)


class OpenRun:
    """One run, open."""

    def __init__(
        self,
        path: Path,
        live: LiveRun,
        *,
        tail: Tail | None = None,
        fed: bool = False,
        document: Mapping[str, Any] | None = None,
        ended: str = "",
    ) -> None:
        self.path = path
        self.name = path.name
        self.live = live
        self.fed = fed
        """Whether somebody else puts in what comes."""
        self.tail = tail
        self.document = document
        """Of a run that is over: what ``summary.json`` says or would say."""
        self._ended = ended
        self.stamp: tuple[Any, ...] = ()
        self.checked_s = self.asked_s = self.took_s = 0.0
        self._kept: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._summary: Mapping[str, Any] | None = None
        self._summary_due_s = 0.0
        self._summing: asyncio.Task[Mapping[str, Any]] | None = None

    def meta(self) -> Mapping[str, Any]:
        """``run.json`` as it is now; what it was when it cannot be read."""
        try:
            found: Mapping[str, Any] = self._cached(META, read_meta)
        except NotARun:
            return self.live.meta
        return found

    def context(self) -> dict[str, Any]:
        meta = self.meta()
        return {name: meta.get(name) for name in CONTEXT}

    def status(self) -> str:
        """As ``stepscope list`` has it."""
        end = self.meta().get("end")
        said = end.get("status") if isinstance(end, Mapping) else None
        return self._ended or (said if isinstance(said, str) else "running")

    def nodes(self) -> list[NodeInfo]:
        found: list[NodeInfo] = self._cached(NODES, read_nodes)
        return found

    def refused(self) -> Mapping[str, int]:
        """By reason, what strangers were turned away for."""
        return read_refused(self.path)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self.fed and self.tail is None

    async def summary(self) -> Mapping[str, Any]:
        """The document of ``summary.json``; of a run that goes on, one of its last steps and the ranks that are judged.

        However many ask, it is made once, and takes a fifth of the time at most.
        """
        if self.document is not None:
            return self.document
        if self._summary is not None and time.monotonic() < self._summary_due_s:
            return self._summary
        if self._summing is None:
            self._summing = asyncio.create_task(self._summarise())
        return await asyncio.shield(self._summing)

    async def _summarise(self) -> Mapping[str, Any]:
        started_s = time.monotonic()
        try:
            copy = snapshot(self.live, select(self.live, MOST_JUDGED))
            self._summary = await asyncio.to_thread(_summary_of, copy)
        finally:
            took_s = time.monotonic() - started_s
            self._summary_due_s = started_s + took_s + max(CHECK_S, took_s / READING_SHARE)
            self._summing = None
        return self._summary

    def _cached(self, name: str, read: Callable[[Path], Any]) -> Any:
        stamp = _stamp(self.path / name)
        held = self._kept.get(name)
        if held is None or held[0] != stamp:
            held = self._kept[name] = stamp, read(self.path)
        return held[1]


class Runs:
    def __init__(self, root: Path, *, one: OpenRun | None, names: frozenset[str] = frozenset()) -> None:
        self.root = root
        self._one = one
        self._names = names
        self._opened: OrderedDict[str, OpenRun] = OrderedDict()
        self._opening: dict[str, asyncio.Task[OpenRun | None]] = {}
        self._following: set[asyncio.Task[None]] = set()

    @classmethod
    def of_one(cls, run_dir: Path, live: LiveRun, *, wanted: str = "") -> Runs:
        """A run that is fed by its hub; ``wanted`` is what it was to be called."""
        one = OpenRun(run_dir, live, fed=True)
        return cls(run_dir.parent, one=one, names=frozenset({run_dir.name, wanted} - {""}))

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
        """Newest first."""
        return await asyncio.to_thread(self._list)

    async def open(self, name: str) -> OpenRun | None:
        """The run of that name; None when there is none.  ApiError-free: whatever is wrong with it, it is none."""
        if self._one is not None:
            if name not in self._names:
                return None
            self._one.live.settle()
            return self._one
        if not self._may_be(name):
            return None
        opened = self._opened.get(name)
        now_s = time.monotonic()
        if opened is not None and opened.tail is None and now_s - opened.checked_s > self._pause_s(opened):
            opened.checked_s = now_s
            if opened.stamp != await asyncio.to_thread(_changed_of, opened.path):
                opened = None
        if opened is None:
            opened = await self._open_once(name)
        if opened is not None:
            opened.asked_s = time.monotonic()
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
        tasks = [*self._opening.values(), *self._following]
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
        opened.asked_s = time.monotonic()
        self._opened[name] = opened
        self._opened.move_to_end(name)
        while len(self._opened) > MOST_OPEN:
            self._opened.popitem(last=False)
        if opened.tail is not None:
            task = asyncio.create_task(self._follow(opened, opened.tail))
            self._following.add(task)
            task.add_done_callback(self._following.discard)
        return opened

    async def _follow(self, run: OpenRun, tail: Tail) -> None:
        """Keep up with a run that goes on, as long as somebody looks; then it is closed."""
        keeping = asyncio.create_task(keep_up(run.live, poll=tail.poll))
        try:
            while self._opened.get(run.name) is run and time.monotonic() - run.asked_s < LOOKED_AT_S:
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
        return list_runs(self.root)[0]


def _load(path: Path) -> OpenRun:
    from stepscope.hub.tail import Tail

    started_s = time.monotonic()
    stamp = _changed_of(path)
    meta = read_meta(path)
    if meta.get("sealed") is not True and not (path / INBOX).exists() and _goes_on(path):
        live = LiveRun(name=path.name, run_dir=path, meta=meta)
        opened = OpenRun(path, live, tail=Tail(path, live))
        opened.tail.poll()  # type: ignore[union-attr]  # the line above
        live.tick()
    else:
        data = open_run(path)
        document = load_summary(path) or summarise(data)
        opened = OpenRun(
            path,
            past_run(data, {node.host: str(node.node) for node in read_nodes(path)}),
            document=document,
            ended=run_entry(path).status,
        )
    opened.stamp = stamp
    opened.checked_s = time.monotonic()
    opened.took_s = opened.checked_s - started_s
    return opened


def _summary_of(copy: Snapshot) -> Mapping[str, Any]:
    return summarise(run_data_of(copy), alive=True)


def _goes_on(path: Path) -> bool:
    try:
        return processes_alive(path)
    except NotARun:
        return False


def _changed_of(path: Path) -> tuple[Any, ...]:
    return tuple(_stamp(path / name) for name in _WATCHED)


def _stamp(path: Path) -> tuple[Any, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_mtime_ns, about.st_size, about.st_ino
