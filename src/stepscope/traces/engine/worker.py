"""The process that analyzes single trace files, and keeps what it found in the cache.

One file to the analyses of its ranks, from the cache where possible: the task that workers and Ray run.

One file → what is to be known of each rank in it: the piece of work that workers and Ray spread.
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


# -- file analysis ----------------------------------------------------------------------------------------------------

# -- results ----------------------------------------------------------------------------------------------------------
# What was found in a trace, as bytes and back: MessagePack with the types checked, arrays of numbers as they are.
#
# The analyses of a million events take longer than a second look may, so the cache keeps their results too.

ARRAY: Final = 1
NUMBERS: Final = "biuf"


def encode_analyses(analyses: Sequence[RankAnalysis]) -> bytes | None:
    """None where there is something in them that cannot be kept (a number of more than 64 bits)."""
    try:
        return msgspec.msgpack.encode(list(analyses), enc_hook=_encoded)
    except (OverflowError, UnicodeEncodeError):
        return None


def decode_analyses(data: bytes) -> list[RankAnalysis]:
    """ValueError or a MsgspecError where it is none."""
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


# -- analyse ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    keep_last: bool = False
    """The last profiler step counts too."""
    cache: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class FileTask:
    path: Path
    number: int = 0
    """Its rank, if the file does not say."""
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why there is nothing of a file."""

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
        return Problem(path=str(job.path), message=f"{job.path}: there is not enough memory to read it")


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


# -- worker -----------------------------------------------------------------------------------------------------------
# A process of our own that works off files one after another, and the end of it that starts and asks it.
#
# It is started as a program, not forked, so it does not matter what threads or libraries the caller has, nor whether
# the caller's script can be imported twice.  The two talk over a socket; what they exchange is pickled, which is fine
# among ourselves and nowhere else.  A worker that dies, killed for its memory or otherwise, closes the socket: that is
# noticed at once, and costs the one file it had.

PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from stepscope.traces.engine.worker import serve; serve(int(sys.argv[1]))"
)


def serve(descriptor: int) -> None:
    """What the worker runs, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends us
    with Connection(descriptor) as connection:
        while True:
            try:
                job, options = connection.recv()
                connection.send(outcome_of(job, options))
            except (EOFError, ConnectionError):
                return


class Worker:
    """The caller's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())
        """Readable when there is an outcome, or the worker is gone."""
        self.pid = self._process.pid
        self.job: FileTask | None = None
        """What it has to do."""

    @property
    def alive(self) -> bool:
        return not self.connection.closed

    def start(self, job: FileTask, options: Options) -> None:
        self.job = job
        try:
            self.connection.send((job, options))
        except ConnectionError:
            pass  # it died before it had anything to do: the outcome says so

    def outcome(self) -> Outcome:
        """Of the job it has, once ``connection`` is readable."""
        job, self.job = self.job, None
        path = str(job.path) if job else ""
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.connection.close()
            return Problem(path=path, message=f"{path}: the process that read it {_ended(self._process.wait())}")
        return outcome

    def close(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
    return f"was killed ({name}){', most likely for want of memory' if -code == signal.SIGKILL else ''}"
