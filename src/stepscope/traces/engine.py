"""Many files to one analysis per rank, in worker processes on this machine or on a Ray cluster, with progress.

Both engines run the same task per file (``outcome_of``), which uses the cache where possible, and return results of
bounded size. A file that cannot be read is a ``Problem`` among the results and does not stop the others. ``serve`` is
the worker process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from stepscope.errors import StepscopeError, UsageError
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank
from stepscope.traces.reading.cache import Cache, Entry, open_traces
from stepscope.traces.reading.files import read_traces

__all__ = [
    "Engine",
    "FileTask",
    "LocalEngine",
    "Options",
    "Outcome",
    "Problem",
    "RayEngine",
    "Worker",
    "analyze_paths",
    "decode_analyses",
    "encode_analyses",
    "engine_named",
    "outcome_of",
    "position_in",
    "watched",
]

# -- cached results ---------------------------------------------------------------------------------------------------
# Analyses as bytes and back: MessagePack with checked types, arrays as raw bytes. Analyzing a million events takes too
# long to repeat, so the cache also stores the results.

ARRAY: Final = 1
NUMBERS: Final = "biuf"


def encode_analyses(analyses: Sequence[RankAnalysis]) -> bytes | None:
    """Encode the analyses; None if they contain a value that cannot be stored (an integer of more than 64 bits)."""
    try:
        return msgspec.msgpack.encode(list(analyses), enc_hook=_encoded)
    except (OverflowError, UnicodeEncodeError):
        return None


def decode_analyses(data: bytes) -> list[RankAnalysis]:
    """Decode analyses; raise ValueError or a MsgspecError if the data is invalid."""
    return msgspec.msgpack.decode(data, type=list[RankAnalysis], dec_hook=_checked, ext_hook=_array)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        about = f"{value.dtype.str} {' '.join(map(str, value.shape))}"
        return msgspec.msgpack.Ext(ARRAY, about.encode() + b"\0" + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} in the results of a trace")


def _array(code: int, data: memoryview) -> Any:
    about, _, values = bytes(data).partition(b"\0")
    kind, *shape = about.decode().split()
    if code != ARRAY or kind[1] not in NUMBERS:
        raise ValueError("no array")
    return np.frombuffer(values, np.dtype(kind)).reshape([int(length) for length in shape]).copy()


def _checked(wanted: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"no {wanted}")
    return value


# -- file analysis ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    keep_last: bool = False
    """Whether the last profiler step counts too."""
    only: tuple[int, ...] = ()
    """Numbers of the profiler steps that count, ascending; empty: all."""
    cache: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class FileTask:
    path: Path
    number: int = 0
    """Its rank, if the file does not name one."""
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a file could not be analyzed."""

    path: str
    message: str
    """One line that names the file."""


Outcome = list[RankAnalysis] | Problem


def outcome_of(job: FileTask, options: Options) -> Outcome:
    try:
        return _analyses(job, options)
    except StepscopeError as error:
        return Problem(path=str(job.path), message=str(error))
    except MemoryError:
        return Problem(path=str(job.path), message=f"{job.path}: not enough memory to read it")


def _analyses(job: FileTask, options: Options) -> list[RankAnalysis]:
    entry = options.cache.entry(job.path) if options.cache is not None else None
    if entry is None:
        return _afresh(job, options, None)
    last = "-with-last" if options.keep_last else ""
    steps = f"-{options.only[0]}-to-{options.only[-1]}" if options.only else ""
    name = f"analyses{last}{steps}.msgpack"
    cached = entry.results(name, decode_analyses)
    if cached is not None:
        return [
            replace(found, rank=_rank(job, place, found.meta), meta=replace(found.meta, path=str(job.path)))
            for place, found in enumerate(cached)
        ]
    found = _afresh(job, options, entry)
    data = encode_analyses(found)
    if data is not None:
        entry.keep(name, data)
    return found


def _rank(job: FileTask, place: int, meta: TraceMeta) -> int:
    return job.number + place if meta.rank is None else meta.rank


def _afresh(job: FileTask, options: Options, entry: Entry | None) -> list[RankAnalysis]:
    traces = open_traces(job.path, None) if entry is None else entry.traces(read_traces)
    return [
        analyze_rank(trace, _rank(job, place, trace.meta), keep_last=options.keep_last, only=options.only)
        for place, trace in enumerate(traces)
    ]


# -- worker process ---------------------------------------------------------------------------------------------------
# A process that analyzes files one after another, and the caller's end that starts it. It is started as a program, not
# forked, so threads and libraries of the caller do not matter, nor whether the caller's script can be imported twice.
# The two exchange pickles over a socket, which is safe only because both ends are Stepscope. A worker that dies, for
# example out of memory, closes the socket: this is noticed at once and costs only the file it was working on.

PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from stepscope.traces.engine import serve; serve(int(sys.argv[1]))"


def serve(descriptor: int) -> None:
    """Run the worker until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles the interrupt and ends this process
    with Connection(descriptor) as connection:
        while True:
            try:
                job, options = connection.recv()
                connection.send(outcome_of(job, options))
            except (EOFError, ConnectionError):
                return


class Worker:
    """The caller's end of a worker process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())
        """Readable when there is an outcome, or the worker has died."""
        self.pid = self._process.pid
        self.job: FileTask | None = None
        """The current task."""

    @property
    def alive(self) -> bool:
        return not self.connection.closed

    def start(self, job: FileTask, options: Options) -> None:
        self.job = job
        try:
            self.connection.send((job, options))
        except ConnectionError:
            pass  # it died before its first task: the outcome says so

    def outcome(self) -> Outcome:
        """Return the outcome of the current task, once ``connection`` is readable."""
        job, self.job = self.job, None
        path = str(job.path) if job else ""
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.connection.close()
            return Problem(path=path, message=f"{path}: the process reading it {_ended(self._process.wait())}")
        return outcome

    def close(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"was killed ({name}){', probably out of memory' if -code == signal.SIGKILL else ''}"


# -- progress within a file -------------------------------------------------------------------------------------------
# How far a process has read a file, according to the kernel, without help from the reader.

EVERY_S: Final = 0.2


def position_in(path: Path, pid: int) -> int:
    """Return the offset in the file; 0 if the process has not opened it or the offset is unknown."""
    wanted = path.resolve()
    process = Path(f"/proc/{pid}")
    furthest = 0
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return 0
    for link in links:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if link.readlink() == wanted:
                first = (process / "fdinfo" / link.name).read_text().split("\n", 1)[0]
                furthest = max(furthest, int(first.split()[1]))
    return furthest


@contextlib.contextmanager
def watched(path: Path, tell: Callable[[int], None] | None, every_s: float = EVERY_S) -> Iterator[None]:
    """Report from a thread how far this process has read ``path`` while the body runs."""
    if tell is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            tell(position_in(path, os.getpid()))

    thread = threading.Thread(target=watch, name="stepscope-position", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- engines ----------------------------------------------------------------------------------------------------------

Progress = Callable[[int, int, int, int], None]
"""Files done, total files, bytes read, total bytes; may be called from another thread, never concurrently."""
Reading = Callable[[int, int], None]
"""Index of the task, and how many bytes of its file have been read."""

WORTH_A_PROCESS: Final = 2 << 20
"""Bytes: less is read faster than another process starts."""


class Engine(Protocol):
    def run(self, jobs: Sequence[FileTask], options: Options, reading: Reading | None) -> Iterator[tuple[int, Outcome]]:
        """Yield the index of each task with its outcome, in any order."""


def analyze_paths(
    paths: Sequence[Path], options: Options, engine: Engine | None = None, progress: Progress | None = None
) -> list[RankAnalysis | Problem]:
    """Analyze files, in their order; a file with several processes yields several analyses."""
    jobs = [FileTask(path=path, number=number, size_bytes=_size(path)) for number, path in enumerate(paths)]
    meter = None if progress is None else _Meter(jobs, progress)
    outcomes: dict[int, Outcome] = {}
    for index, outcome in (engine or LocalEngine()).run(jobs, options, meter.reading if meter else None):
        outcomes[index] = outcome
        if meter:
            meter.done(index)
    found: list[RankAnalysis | Problem] = []
    for index in range(len(jobs)):
        outcome = outcomes[index]
        found += [outcome] if isinstance(outcome, Problem) else outcome
    return found


def engine_named(name: str) -> Engine:
    return ENGINES[name]()


class LocalEngine:
    """One worker process per core, or none if that does not pay off."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers
        """None: as many as there are cores and work for them."""

    def run(self, jobs: Sequence[FileTask], options: Options, reading: Reading | None) -> Iterator[tuple[int, Outcome]]:
        worth = max(1, sum(job.size_bytes for job in jobs) // WORTH_A_PROCESS)
        count = self._workers or min(_cores(), worth)
        if count > 1 and len(jobs) > 1:
            yield from _in_workers(jobs, options, reading, min(count, len(jobs)))
        else:
            yield from _here(jobs, options, reading)


def _here(jobs: Sequence[FileTask], options: Options, reading: Reading | None) -> Iterator[tuple[int, Outcome]]:
    for index, job in enumerate(jobs):
        with watched(job.path, None if reading is None else _of_job(reading, index)):
            outcome = outcome_of(job, options)
        yield index, outcome


def _of_job(reading: Reading, index: int) -> Callable[[int], None]:
    return lambda position: reading(index, position)


def _in_workers(
    jobs: Sequence[FileTask], options: Options, reading: Reading | None, count: int
) -> Iterator[tuple[int, Outcome]]:
    from multiprocessing.connection import wait

    # ``pop`` takes the largest first, so that the last to finish is a small one.
    waiting = sorted(range(len(jobs)), key=lambda index: jobs[index].size_bytes)
    busy: dict[int, Worker] = {}
    idle: list[Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < count:
                worker = idle.pop() if idle else Worker()
                index = waiting.pop()
                busy[index] = worker
                worker.start(jobs[index], options)
            ready = set(wait([worker.connection for worker in busy.values()], EVERY_S))
            for index, worker in list(busy.items()):
                if worker.connection in ready:
                    outcome = worker.outcome()
                    del busy[index]
                    if worker.alive:
                        idle.append(worker)
                    else:
                        worker.close()
                    yield index, outcome
                elif reading is not None:
                    reading(index, position_in(jobs[index].path, worker.pid))
    finally:
        for worker in (*busy.values(), *idle):
            worker.close()


class RayEngine:
    """Ray's cluster at ``$RAY_ADDRESS``, or a temporary one on this machine.

    The files must have the same paths on all nodes, as on a shared file system.
    """

    def run(self, jobs: Sequence[FileTask], options: Options, reading: Reading | None) -> Iterator[tuple[int, Outcome]]:
        del reading  # files are read elsewhere: only complete ones count
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            where = {"address": "auto"} if os.environ.get("RAY_ADDRESS") else {"address": "local"}
            ray.init(**where, log_to_driver=False, include_dashboard=False, configure_logging=False)
        try:
            yield from _on_ray(ray, jobs, options)
        finally:
            if ours:
                ray.shutdown()


def _on_ray(ray: Any, jobs: Sequence[FileTask], options: Options) -> Iterator[tuple[int, Outcome]]:
    task = ray.remote(num_cpus=1, max_retries=0)(outcome_of)
    at_once = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = sorted(range(len(jobs)), key=lambda index: jobs[index].size_bytes)
    flying: dict[Any, int] = {}
    while waiting or flying:
        while waiting and len(flying) < at_once:
            index = waiting.pop()
            flying[task.remote(jobs[index], options)] = index
        done, _ = ray.wait(list(flying), num_returns=1)
        for reference in done:
            index = flying.pop(reference)
            path = str(jobs[index].path)
            try:
                outcome: Outcome = ray.get(reference)
            except ray.exceptions.RayTaskError:
                raise  # an internal error, with its traceback
            except ray.exceptions.RayError as error:
                why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                outcome = Problem(path=path, message=f"{path}: the Ray worker reading it died: {why}")
            yield index, outcome


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray, which is not installed: pip install 'stepscope[ray]'") from None
    return ray


ENGINES: Final[dict[str, Callable[[], Engine]]] = {"local": LocalEngine, "ray": RayEngine}


class _Meter:
    """Sums how much of all files was read; never decreases."""

    def __init__(self, jobs: Sequence[FileTask], progress: Progress) -> None:
        self._sizes = [job.size_bytes for job in jobs]
        self._read = [0] * len(jobs)
        self._files = 0
        self._progress = progress

    def reading(self, index: int, position: int) -> None:
        self._read[index] = max(self._read[index], min(position, self._sizes[index]))
        self._tell()

    def done(self, index: int) -> None:
        self._files += 1
        self._read[index] = self._sizes[index]
        self._tell()

    def _tell(self) -> None:
        self._progress(self._files, len(self._sizes), sum(self._read), sum(self._sizes))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
