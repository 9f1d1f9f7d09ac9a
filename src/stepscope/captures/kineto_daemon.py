"""Capture processes that Stepscope did not start, in place of Kineto's daemon (Dynolog).

A process with ``KINETO_USE_DAEMON=1`` asks its daemon for work (``kineto_protocol.py``).  ``capture_processes`` opens
the daemon's socket (``kineto_socket.py``), waits until each of the requested processes asks, and answers with a
configuration for one trace.  Other processes get no answer, and notice no difference to a machine without a daemon.
libkineto writes the trace into our temporary folder, from where it is packed; everything else is removed.
"""

from __future__ import annotations

import gzip
import json
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from stepscope.captures.kineto_process import TracedProcess
from stepscope.captures.kineto_protocol import (
    POLL_S,
    WARMUP_S,
    TraceOptions,
    config_text,
    pack_message,
    parse_message,
)
from stepscope.captures.kineto_socket import DaemonSocket, Datagram, listen
from stepscope.errors import CaptureError
from stepscope.records.files import open_file, replaced
from stepscope.records.text import bytes_text, duration_text

__all__ = ["CaptureLimits", "CapturedProcess", "ProcessCapture", "capture_processes", "pack_trace"]

State = Literal["waiting", "recording", "written", "failed"]
ASK_S = 4 * POLL_S
"""A process that has not asked after this time has no libkineto that does."""
START_S = 3.0
"""From an answer to the start of the warm-up: libkineto looks at what it received once a second, and adds two."""
COMMON_START_S = POLL_S + WARMUP_S + 3.0
"""Several processes begin together, this long after the first of them asked: libkineto asks every 5 seconds, and looks
at what it received once a second."""
SAMPLE_S = 0.2
_STEP = b'"Optimizer.step#'
MOST_RETRIES = 2
"""libkineto drops a trace without a word if it begins after its end, as it does on a machine that is too busy."""


@dataclass(frozen=True, kw_only=True)
class CaptureLimits:
    ask_s: float = ASK_S
    write_s: float = 60.0
    """From the end of the recorded time, or the last growth of the file, to the end of the file."""
    steps_s: float = 120.0
    """For the recorded steps."""
    most_bytes: int = 4 << 30
    """A larger trace is not packed."""


@dataclass(frozen=True, kw_only=True)
class CapturedProcess:
    process: TracedProcess
    path: Path | None
    """Its trace, or None."""
    problem: str = ""
    notice: str = ""
    """What differs in the trace from what was requested."""


Report = Callable[[TracedProcess, str], None]
"""Called with what a process does now."""


@dataclass(kw_only=True)
class ProcessCapture:
    """How far the capture of one process is.  No I/O but a look at its folder; the clock is an argument."""

    process: TracedProcess
    options: TraceOptions
    folder: Path
    """Where its trace appears, as we see it; nothing else is in it."""
    log_file: str
    """The same place as the process sees it, with a file name."""
    limits: CaptureLimits
    begun_s: float
    state: State = "waiting"
    problem: str = ""
    busy: bool = False
    """It said that its profiler is in use."""
    retries: int = 0
    deadline_s: float = field(init=False)
    _size: int = -1
    _over_s: float = field(init=False, default=float("inf"))
    """When a recording by time is over, even if libkineto took its configuration with its next request only."""

    def __post_init__(self) -> None:
        self.deadline_s = self.begun_s + self.limits.ask_s

    def answer_to(self, datagram: Datagram, *, start_wall_ms: int, delay_s: float, now_s: float) -> bytes | None:
        """What to send to the process, if anything; it gets its configuration once."""
        message = parse_message(datagram.content)
        if message is None or message.kind == "registration":
            return None
        self.busy = not message.profiler_free
        dropped = self.state == "recording" and now_s >= self._over_s and self._size <= 0
        if self.busy or (self.state != "waiting" and not (dropped and self.retries < MOST_RETRIES)):
            return None
        self.retries += dropped
        self.state = "recording"
        if self.options.steps is None:
            lasts_s = max(delay_s, START_S) + POLL_S + WARMUP_S + self.options.duration_ms / 1e3
            self._over_s = now_s + lasts_s
            self.deadline_s = now_s + lasts_s + self.limits.write_s
        else:
            self.deadline_s = now_s + POLL_S + self.limits.steps_s
        return pack_message("req", config_text(self.options, self.log_file, start_wall_ms=start_wall_ms).encode())

    def withdraw(self, now_s: float) -> None:
        """The answer could not be sent: the process will ask again."""
        self.state = "waiting"
        self.deadline_s = now_s + self.limits.ask_s

    def update(self, now_s: float) -> None:
        """Look for the file, and for reasons why there will be none."""
        if self.state not in ("waiting", "recording"):
            return
        if self.trace() is not None:
            self.state = "written"
            return
        if not self.process.alive:
            self._fail(f"{self.process.name} ended before its trace was written")
            return
        size = self._written_bytes()
        if size > self.limits.most_bytes:
            self._fail(
                f"the trace of {self.process.name} has more than {bytes_text(self.limits.most_bytes)}; record less, or "
                f"without stacks (--no-stacks)"
            )
        elif size > max(0, self._size):
            self.deadline_s = max(self.deadline_s, now_s + self.limits.write_s)
        self._size = size
        if self.state in ("waiting", "recording") and now_s >= self.deadline_s:
            self._fail(self._timeout_text())

    def _written_bytes(self) -> int:
        """Of the unfinished file, which may be renamed at any time."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self.folder.glob("*.tmp"))
        return max(0, self._size)

    def trace(self) -> Path | None:
        """The finished file: libkineto renames it at the end."""
        return next(iter(sorted(self.folder.glob("*.json"))), None)

    def _fail(self, problem: str) -> None:
        self.state, self.problem = "failed", problem

    def _timeout_text(self) -> str:
        if self.state == "waiting" and self.busy:
            return f"{self.process.name} is being profiled already, by its script or by another tool; try again later"
        if self.state == "waiting":
            return (
                f"{self.process.name} did not ask for work within {duration_text(self.limits.ask_s)}: it has not "
                f"imported torch yet, or its torch has no libkineto"
            )
        if self.options.steps is not None:
            waited = duration_text(self.limits.steps_s)
            return (
                f"{self.process.name} wrote no trace within {waited}: it made fewer than {self.options.steps} "
                f"optimizer steps, or its script uses the profiler; --ms records a time instead of steps"
            )
        return (
            f"{self.process.name} wrote no trace within {duration_text(self.limits.write_s)} after the recorded time: "
            f"it is too busy, or its script uses the profiler; with KINETO_LOG_LEVEL=0 in its environment it logs more"
        )


def capture_processes(
    processes: Sequence[TracedProcess],
    options: TraceOptions,
    output: Mapping[int, Path],
    *,
    limits: CaptureLimits | None = None,
    report: Report = lambda _process, _doing: None,
) -> list[CapturedProcess]:
    """Record all of these processes and write each trace to its path in ``output``, by pid.

    CaptureError if there is another daemon or a process writes where we cannot read; what goes wrong with one process
    is in its result.
    """
    folders: list[Path] = []
    limits = limits or CaptureLimits()
    try:
        captures: dict[int, ProcessCapture] = {}
        begun_s = time.monotonic()
        for process in processes:
            folder, log_file = _make_folder(process)
            folders.append(folder)
            captures[process.pid] = ProcessCapture(
                process=process, options=options, folder=folder, log_file=log_file, limits=limits, begun_s=begun_s
            )
        with listen(tuple(processes)) as sockets:
            for process in processes:
                report(process, "waiting until it asks for work, at most 5 s")
            _converse(sockets, captures, report)
        return [_collect(capture, output[pid]) for pid, capture in captures.items()]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _converse(sockets: Sequence[DaemonSocket], captures: Mapping[int, ProcessCapture], report: Report) -> None:
    start_wall_s = 0.0
    while any(capture.state in ("waiting", "recording") for capture in captures.values()):
        for ready in select.select(sockets, [], [], SAMPLE_S)[0]:
            for datagram in ready.datagrams():
                capture = captures.get(datagram.pid)
                if capture is None or datagram.user != capture.process.user or not capture.process.alive:
                    continue
                if len(captures) > 1 and not start_wall_s:
                    start_wall_s = time.time() + COMMON_START_S
                delay_s = start_wall_s - time.time()
                if delay_s < WARMUP_S:  # alone, or too late for the others: as soon as possible
                    delay_s = 0.0
                now_s = time.monotonic()
                start_wall_ms = int(start_wall_s * 1e3) if delay_s else 0
                answer = capture.answer_to(datagram, start_wall_ms=start_wall_ms, delay_s=delay_s, now_s=now_s)
                if answer is None:
                    continue
                if not ready.answer(datagram, answer):
                    capture.withdraw(now_s)
                else:
                    why = "; the process was too busy before" if capture.retries else ""
                    report(capture.process, _recorded_text(capture.options) + why)
        now_s = time.monotonic()
        for capture in captures.values():
            capture.update(now_s)


def _recorded_text(options: TraceOptions) -> str:
    if options.steps is not None:
        return f"recording {options.steps} optimizer steps"
    return f"recording {duration_text(options.duration_ms / 1e3)}"


def _collect(capture: ProcessCapture, output: Path) -> CapturedProcess:
    trace, process = capture.trace(), capture.process
    if capture.state != "written" or trace is None:
        return CapturedProcess(process=process, path=None, problem=capture.problem)
    try:
        with open_file(trace) as source, replaced(output) as spare, spare.open("wb") as target:
            steps = pack_trace(source, target, rank=process.rank, world_size=process.world_size)
    except OSError as error:
        problem = f"cannot write the trace of {process.name} to {output}: {error.strerror}"
        return CapturedProcess(process=process, path=None, problem=problem)
    # Until the first step libkineto takes a request for steps as one for 500 ms.
    missed = capture.options.steps is not None and not steps
    notice = f"{process.name} made no optimizer step yet, so 500 ms were recorded instead" if missed else ""
    return CapturedProcess(process=process, path=output, notice=notice)


def pack_trace(source: BinaryIO, target: BinaryIO, *, rank: int | None, world_size: int | None) -> int:
    """Compress a trace, and say whose it is: libkineto's own request leaves the rank out.

    Return the number of steps of optimizers in it.
    """
    head = source.read(1 << 16)
    with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=3, mtime=0) as packed:
        start = len(head) - len(head.lstrip())
        if rank is not None and head.startswith(b"{", start) and b'"distributedInfo"' not in head:
            about = {"rank": rank, "world_size": max(world_size or 1, rank + 1)}
            packed.write(b'{\n  "distributedInfo": ' + json.dumps(about).encode() + b",")
            head = head[start + 1 :]
        steps, end = 0, b""
        while head:
            packed.write(head)
            steps += (end + head).count(_STEP)
            end = (end + head)[1 - len(_STEP) :]
            head = source.read(1 << 20)
    return steps


# -- where the process writes -----------------------------------------------------------------------------------------

_PREFIX = "stepscope-capture-"
_FILE = "trace.json"


def _make_folder(process: TracedProcess) -> tuple[Path, str]:
    """A folder that the process can write to and we can read: as we see it, and the file in it as the process does."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if process.shares_files(folder):
        return folder, str(folder / _FILE)
    folder.rmdir()
    # The process has other files than we, such as a container's; its /tmp is ours to read by way of its root.
    inner = process.root / "tmp"
    with suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=inner))
        return folder, f"/tmp/{folder.name}/{_FILE}"
    raise CaptureError(
        f"{process.name} is in another mount namespace, such as a container's, and would write its trace where it "
        f"cannot be read from here; run this command there: `nsenter --target {process.pid} --mount "
        f"--net stepscope capture --pid {process.pid}`"
    )
