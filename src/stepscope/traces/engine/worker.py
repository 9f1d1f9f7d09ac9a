"""The analysis of one trace file, and the worker process that runs it.

Workers and Ray run the same task (``outcome_of``); it uses the cache where possible.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from stepscope.errors import StepscopeError
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.rank import RankAnalysis, analyse_rank
from stepscope.traces.reading.cache import Cache, Entry, open_traces, read_traces

__all__ = ["FileTask", "Options", "Outcome", "Problem", "Worker", "decode_analyses", "encode_analyses", "outcome_of"]


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
    name = "analyses-with-last.msgpack" if options.keep_last else "analyses.msgpack"
    kept = entry.results(name, decode_analyses)
    if kept is not None:
        return [
            replace(found, rank=_rank(job, place, found.meta), meta=replace(found.meta, path=str(job.path)))
            for place, found in enumerate(kept)
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
        analyse_rank(trace, _rank(job, place, trace.meta), keep_last=options.keep_last)
        for place, trace in enumerate(traces)
    ]


# -- worker process ---------------------------------------------------------------------------------------------------
# A process that analyzes files one after another, and the caller's end that starts it. It is started as a program, not
# forked, so threads and libraries of the caller do not matter, nor whether the caller's script can be imported twice.
# The two exchange pickles over a socket, which is safe only because both ends are Stepscope. A worker that dies, for
# example out of memory, closes the socket: this is noticed at once and costs only the file it was working on.

PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from stepscope.traces.engine.worker import serve; serve(int(sys.argv[1]))"
)


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
