"""Views of traces for readers of a hub: made once by a worker process, kept on disk, served as bytes.

    desk = TraceDesk()
    await desk.expect()                                        # someone may open traces soon
    state = await desk.view(folder.files, name="traces")       # {"state": "reading", …}, or done
    state.path(PAGE)                                           # of what the worker wrote

The hub itself reads no trace and parses no view: the worker (``worker.py``) writes each answer as a file, into a folder
of the user's cache that is named after the state of the files. One worker runs at a time; others wait. A worker that
nobody asks about any more is ended. While someone reads traces, the next worker is started ahead, because loading its
modules takes as long as its work. Without a cache the views are in a temporary folder that ``close`` removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stepscope.hub.traces.folders import TraceFile
from stepscope.hub.traces.worker import PAGE, PERFETTO, TIMELINE, Task, timeline_file
from stepscope.records.files import private_folder
from stepscope.records.paths import helper_command, helper_environment

__all__ = ["DeskLimits", "TraceDesk", "ViewState"]

WORKER = "stepscope.hub.traces.worker"
LONGEST_LINE = 64 << 10
AHEAD_TICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DeskLimits:
    worker_s: float = 900.0
    """A worker that takes longer is ended."""
    unwatched_s: float = 60.0
    """So is one that nobody has asked about for this long."""
    retry_s: float = 5.0
    """How long a failure is repeated before another request tries again."""
    memory_bytes: int = 4 << 30
    """Of the worker, and of each process that it reads files in."""
    nice: int = 5
    """Its priority, lower than the hub's: a person waits for it, but training may run next to it.  With 10 a trace of
    3 MB took 52 s next to work that kept all cores busy."""
    ahead_s: float = 300.0
    """A worker that was started ahead is ended when nobody has asked about traces for this long."""
    most_views: int = 64
    most_bytes: int = 4 << 30
    """Of the views on disk; those of the longest unused traces are removed."""


@dataclass(frozen=True, kw_only=True)
class ViewState:
    folder: Path
    wanted: str
    """The file that was requested."""
    state: str
    """``waiting``, ``reading``, ``done`` or ``failed``."""
    read_bytes: int = 0
    total_bytes: int = 0
    problem: str = ""

    @property
    def done(self) -> bool:
        return self.state == "done"

    def path(self, name: str) -> Path:
        return self.folder / name

    def document(self) -> dict[str, Any]:
        progress = {"read_bytes": self.read_bytes, "total_bytes": self.total_bytes}
        return {"state": self.state, **progress, "problem": self.problem or None}


@dataclass
class _Job:
    folder: Path
    last: str
    """The file that its worker writes last."""
    total_bytes: int
    requested_s: float
    state: str = "waiting"
    read_bytes: int = 0
    problem: str = ""
    ended_s: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class TraceDesk:
    """Not thread-safe: everything runs in the hub's event loop."""

    def __init__(
        self,
        *,
        folder: Path | None = None,
        limits: DeskLimits | None = None,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = DeskLimits() if limits is None else limits
        self._command = list(command) if command is not None else None
        self._clock = clock
        self._folder = folder
        self._temporary: Path | None = None
        self._jobs: dict[tuple[Path, str], _Job] = {}
        self._working: asyncio.Lock | None = None
        self._expected_s = 0.0
        """When someone last asked about traces."""
        self._ahead: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def expect(self) -> None:
        """Start a worker ahead: someone may open traces soon."""
        self._expected_s = self._clock()
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep_ahead())

    async def view(self, files: Sequence[TraceFile], *, name: str, wanted: str = PAGE) -> ViewState:
        """The page, or another file of the view: ``rank_file``, ``raw_file``.  It is done without the file if there is
        no such rank."""
        return await self._state(files, name, "view", wanted)

    async def timeline(self, files: Sequence[TraceFile], *, name: str, rank: int | None) -> ViewState:
        """The timeline with that rank first; that of the view without a rank."""
        return await self._state(files, name, "view" if rank is None else "timeline", timeline_file(rank), rank=rank)

    async def perfetto(self, files: Sequence[TraceFile], *, name: str) -> ViewState:
        """All ranks as one timeline."""
        return await self._state(files, name, "perfetto", PERFETTO)

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        tasks += [] if self._keeping is None else [self._keeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def _state(
        self, files: Sequence[TraceFile], name: str, action: str, wanted: str, *, rank: int | None = None
    ) -> ViewState:
        await self.expect()
        folder = await asyncio.to_thread(self._folder_of, files, name)
        last = TIMELINE if action == "view" else wanted
        if await asyncio.to_thread(_is_made, folder, wanted, last):
            return ViewState(folder=folder, wanted=wanted, state="done")
        now_s = self._clock()
        key = (folder, action if rank is None else wanted)
        job = self._jobs.get(key)
        if job is not None and job.task is None and now_s - job.ended_s > self._limits.retry_s:
            job = None
        if job is None:
            total_bytes = sum(file.size_bytes for file in files)
            job = self._jobs[key] = _Job(folder=folder, last=last, total_bytes=total_bytes, requested_s=now_s)
            task = Task(
                action=action,
                files=[str(file.path) for file in files],
                name=name,
                out=str(folder),
                rank=rank,
                memory_bytes=self._limits.memory_bytes,
                nice=self._limits.nice,
            )
            job.task = asyncio.create_task(self._made(key, job, task))
        job.requested_s = now_s
        return ViewState(
            folder=folder,
            wanted=wanted,
            state=job.state,
            read_bytes=job.read_bytes,
            total_bytes=job.total_bytes,
            problem=job.problem,
        )

    def _folder_of(self, files: Sequence[TraceFile], name: str) -> Path:
        from stepscope.traces.reading.cache import Cache, code_version

        if self._folder is None:
            known = Cache.of_environment()
            if known is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="stepscope-views-"))
            self._folder = self._temporary if known is None else known.folder.with_name("views")
        words = [name, code_version(), _drawing_version()]
        for file in files:
            words += [str(file.path), str(file.size_bytes), str(file.changed_ns), str(file.inode)]
        digest = hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:32]
        assert self._folder is not None
        return self._folder / digest

    async def _made(self, key: tuple[Path, str], job: _Job, task: Task) -> None:
        if self._working is None:
            self._working = asyncio.Lock()
        try:
            async with self._working:
                job.state = "reading"
                await asyncio.to_thread(self._prepare, job.folder)
                await self._work(job, task)
            if await asyncio.to_thread(_is_made, job.folder, job.last, job.last):
                job.state = "done"
                self._jobs.pop(key, None)
            else:
                job.state = "failed"
                job.problem = job.problem or "the process that analyzes the traces ended without a result"
        except OSError as error:
            job.state, job.problem = "failed", f"the traces cannot be analyzed here: {error.strerror or error}"
        finally:
            job.task, job.ended_s = None, self._clock()

    def _prepare(self, folder: Path) -> None:
        """Make room for the views, and their folder."""
        about = private_folder(folder.parent).stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"others can write to {folder.parent}")
        found = []
        for place in folder.parent.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in place.iterdir() if file.is_file())
                found.append((place.stat().st_mtime_ns, size, place))
        total = sum(size for _, size, _ in found)
        left = len(found)
        for _, size, place in sorted(found):
            if total <= self._limits.most_bytes and left < self._limits.most_views:
                break
            if place != folder:
                shutil.rmtree(place, ignore_errors=True)
            total, left = total - size, left - 1
        folder.mkdir(mode=0o700, exist_ok=True)

    async def _start_worker(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(self._command or helper_command(WORKER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=helper_environment(os.environ),
            start_new_session=True,
            limit=LONGEST_LINE,
        )

    async def _keep_ahead(self) -> None:
        """Have a worker ready for as long as someone asks about traces."""
        try:
            while (left_s := self._expected_s + self._limits.ahead_s - self._clock()) > 0:
                working = self._working is not None and self._working.locked()
                if not working and self._ahead is None:
                    with contextlib.suppress(OSError):  # it is started when it is needed
                        self._ahead = await self._start_worker()
                await asyncio.sleep(min(left_s, AHEAD_TICK_S))
        finally:
            if self._ahead is not None:
                await _ended_worker(self._ahead)
                self._ahead = None

    async def _work(self, job: _Job, task: Task) -> None:
        process, self._ahead = self._ahead, None
        if process is None or process.returncode is not None:
            process = await self._start_worker()
        following = asyncio.create_task(_follow(process, job))
        began_s = self._clock()
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it is over already
                process.stdin.write(msgspec.json.encode(task) + b"\n")
                process.stdin.close()
            while not following.done():
                await asyncio.wait((following,), timeout=1.0)
                now_s = self._clock()
                if now_s - began_s > self._limits.worker_s:
                    job.problem = f"given up after {self._limits.worker_s:.0f} s; try `stepscope trace`"
                    return
                if now_s - job.requested_s > self._limits.unwatched_s:
                    job.problem = "ended, because nobody was waiting for it"
                    return
        finally:
            following.cancel()
            _kill(process)
            await asyncio.gather(following, process.wait(), return_exceptions=True)
        if process.returncode not in (0, None) and not job.problem:
            job.problem = _ended(process.returncode or 0)


async def _follow(process: asyncio.subprocess.Process, job: _Job) -> None:
    """Read what the worker reports, until it ends."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than a line may be
            continue
        if not line:
            break
        with contextlib.suppress(msgspec.MsgspecError):
            report = msgspec.json.decode(line)
            if isinstance(report, dict) and isinstance(report.get("problem"), str):
                job.problem = report["problem"]
            elif isinstance(report, dict) and isinstance(report.get("read"), int):
                job.read_bytes = report["read"]
    await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """End the worker and the processes that it reads files in."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _ended_worker(process: asyncio.subprocess.Process) -> None:
    """End a worker that has no task; its pipes are closed then, too."""
    _kill(process)
    await process.communicate()


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the process that analyzes the traces was killed, probably because it was out of memory"
    return f"the process that analyzes the traces ended with code {code}"


def _is_made(folder: Path, wanted: str, last: str) -> bool:
    """Whether the file is there, or the worker has written its last one without it."""
    if not (folder / wanted).is_file() and not (folder / last).is_file():
        return False
    with contextlib.suppress(OSError):
        os.utime(folder)
    return True


@cache
def _drawing_version() -> str:
    """A hash of the code that draws views from an analysis."""
    package = Path(sys.modules["stepscope"].__path__[0])
    digest = hashlib.sha256()
    for source in sorted((*(package / "reports").rglob("*.py"), *Path(__file__).parent.glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()
