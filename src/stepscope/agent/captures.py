"""The agent's side of captures: it passes orders on to the ranks of its node and moves their traces out of memory.

    <session>/capture.json          the order, from the run's hub (of another node: from its acknowledgments)
      → <pid>.capture               for each rank, and its ring's request word
      ← <pid>.captured, <pid>.trace how far the rank is, and its trace in memory
      → captures/ID/rank-R.…        the trace, compressed in a thread with the lowest priority
      → events.jsonl                ``capture_rank``: what became of each profiled rank

A process may also capture by itself (``run --profile``): its traces are moved in the same way.  A trace is opened and
unlinked as soon as it is written, so that its memory is free when it is compressed, whatever happens to the process.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from stepscope.agent.drain import RingDrain
from stepscope.agent.journal import Journal
from stepscope.errors import RingError
from stepscope.records.capture import CaptureOrder, CaptureReport
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.files import file_mode, open_file
from stepscope.records.paths import CAPTURE_SUFFIX, CAPTURED_SUFFIX, SESSION_CAPTURE, TRACE_SUFFIX
from stepscope.records.text import bytes_text
from stepscope.ring.requests import announce_request
from stepscope.store.captures import is_capture_id, make_capture_folder, prune_traces, trace_name
from stepscope.store.file_io import read_document, write_bytes

__all__ = ["CaptureCourier"]

DOCUMENT_BYTES = 1 << 20
"""More than any order or report: an order lists at most a few thousand ranks."""
PIECE_BYTES = 1 << 20
LEVEL = 1
"""Of gzip: level 6 takes three times as long and saves a tenth."""
NICE = 10
"""On a machine whose cores are all busy, 27 MB took 69 s at 19, by when the hub had given the trace up, 3.5 s at 10 and
0.6 s at 0."""
DISTURBED_S = 120.0
"""At most this long after its order, or its first step, a capture may keep ranks from making progress."""
AFTERWARDS_S = 15.0
"""A rank that has just written its trace has not completed a step for as long as that took."""
MOST_TRACE_BYTES = 2 << 30
"""Compressing stops there, whatever a process wrote."""


Stamp = tuple[int, int]
"""Time and inode of a file: it changed if they did."""


@dataclass(frozen=True, kw_only=True)
class _Move:
    """A trace on its way from memory to the run directory."""

    report: CaptureReport
    trace: BinaryIO
    """It has no name any more: its memory is free once this is closed."""


class CaptureCourier:
    """Call ``check`` in each turn of the agent's loop, and ``ended`` before the files of a process are removed."""

    def __init__(
        self,
        run_dir: Path,
        session: Path,
        journal: Journal,
        *,
        most_bytes: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``most_bytes``: remove the oldest traces beyond it, on a node that only passes them on."""
        self._now = now
        self._disturbed_until_s = float("-inf")
        self._profiling: dict[int, float] = {}
        """When ranks here reported that they profile, by pid."""
        self._run_dir = run_dir
        self._session = session
        self._journal = journal
        self._most_bytes = most_bytes
        self._order: CaptureOrder | None = None
        self._order_stamp: Stamp | None = None
        self._waiting: dict[int, int] = {}
        """The ranks of the order that have not finished, by pid."""
        self._reported: dict[Path, Stamp] = {}
        self._moves: list[_Move] = []
        self._moved: list[tuple[CaptureReport, int]] = []
        """Filled by the thread: the final report, and the bytes of the compressed trace."""
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a trace is being moved, or waits for that."""
        return bool(self._moves or self._moved or self._thread is not None)

    @property
    def disturbs(self) -> bool:
        """Whether ranks may make no progress because of a capture: torch's profiler stops and writes for seconds, with
        the GIL held, and all other ranks wait."""
        now_s = self._now()
        return now_s < self._disturbed_until_s or any(
            now_s < since_s + DISTURBED_S for since_s in self._profiling.values()
        )

    def check(self, drains: Iterable[RingDrain], received: CaptureOrder | None = None) -> None:
        """Pass on a new order, and take what ranks have written.  ``received``: the order that the hub sent."""
        drains = [drain for drain in drains if drain.ended_wall_ns is None]
        order = self._read_order() or received
        if order is None or self._order is None or order.id != self._order.id:
            self._give_up()
            if self._order is not None:
                self._disturbed_until_s = min(self._disturbed_until_s, self._now() + AFTERWARDS_S)
            self._order = order
            if order is not None:
                self._pass_on(order, drains)
                if set(order.ranks) - {drain.header.identity.rank for drain in drains}:
                    self._disturbed_until_s = self._now() + DISTURBED_S  # by ranks of other nodes
        for drain in drains:
            self._take_report(drain)
        self._keep_moving()

    def ended(self, drain: RingDrain) -> None:
        """The process is gone: take what it has written, or report that it will not write it."""
        self._take_report(drain)
        rank = self._waiting.pop(drain.header.pid, None)
        if rank is not None and self._order is not None:
            problem = "The process ended before its trace was written."
            failed = CaptureReport(id=self._order.id, rank=rank, pid=drain.header.pid, state="failed", problem=problem)
            self._note(failed)
        self._reported.pop(drain.reader.path, None)
        self._profiling.pop(drain.header.pid, None)
        self._keep_moving()

    def finish(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Move the last traces; give up those that take longer."""
        deadline_s = clock() + patience_s
        while self.busy and clock() < deadline_s:
            if self._thread is not None:
                self._thread.join(min(0.1, patience_s))
            self._keep_moving()
        for move in self._moves:
            move.trace.close()
            self._note(replace(move.report, state="failed", problem="The run ended before its trace was compressed."))
        self._moves.clear()

    # -- orders -------------------------------------------------------------------------------------------------------

    def _read_order(self) -> CaptureOrder | None:
        """The order in the session; it is read again when it changed."""
        path = self._session / SESSION_CAPTURE
        stamp = _stamp(path)
        if stamp is None:
            return None
        if stamp == self._order_stamp:
            return self._order
        try:
            order = decoded(CaptureOrder, json.loads(read_document(path, most=DOCUMENT_BYTES)))
        except (OSError, ValueError, RecursionError):
            return None
        self._order_stamp = stamp
        return order if is_capture_id(order.id) else None

    def _give_up(self) -> None:
        """The hub has withdrawn the order: ranks that have not answered by now are given up."""
        for pid, rank in self._waiting.items():
            if self._order is not None:
                problem = "It did not answer before the capture was given up."
                self._note(CaptureReport(id=self._order.id, rank=rank, pid=pid, state="failed", problem=problem))
        self._waiting = {}

    def _pass_on(self, order: CaptureOrder, drains: Iterable[RingDrain]) -> None:
        """Give the order to all ranks here: those that are not profiled wait for the others, and mark these steps."""
        text = json.dumps(encoded(order)).encode()
        for drain in drains:
            rank, pid, ring = drain.header.identity.rank, drain.header.pid, drain.reader.path
            before = _order_in(ring.with_suffix(CAPTURE_SUFFIX))
            try:
                # An agent that was killed may have passed it on already.
                if before is None or before.id != order.id:
                    write_bytes(ring.with_suffix(CAPTURE_SUFFIX), text)
                    if not announce_request(ring):
                        continue
            except (OSError, RingError) as error:
                if rank in order.ranks:
                    problem = f"The order could not be passed on to its process: {_why(error)}."
                    self._note(CaptureReport(id=order.id, rank=rank, pid=pid, state="failed", problem=problem))
                continue
            if rank in order.ranks:
                self._waiting[pid] = rank

    # -- reports ------------------------------------------------------------------------------------------------------

    def _take_report(self, drain: RingDrain) -> None:
        path = drain.reader.path.with_suffix(CAPTURED_SUFFIX)
        stamp = _stamp(path)
        if stamp is None or stamp == self._reported.get(drain.reader.path):
            return
        try:
            report = decoded(CaptureReport, json.loads(read_document(path, most=DOCUMENT_BYTES)))
        except (OSError, ValueError, RecursionError):
            return
        self._reported[drain.reader.path] = stamp
        if report.state == "profiling":
            self._profiling[drain.header.pid] = self._now()
        elif self._profiling.pop(drain.header.pid, None) is not None:
            self._disturbed_until_s = max(self._disturbed_until_s, self._now() + AFTERWARDS_S)
        if report.state not in ("written", "failed") or not is_capture_id(report.id):
            return
        report = replace(report, rank=drain.header.identity.rank, pid=drain.header.pid)
        order = _order_in(drain.reader.path.with_suffix(CAPTURE_SUFFIX))
        ordered = order is not None and order.id == report.id
        if not ordered and report.reason == "request":
            report = replace(report, reason="schedule")
        if self._order is not None and self._order.id == report.id:
            self._waiting.pop(report.pid, None)
        trace = drain.reader.path.with_suffix(TRACE_SUFFIX)
        if report.state == "written":
            self._take_trace(report, trace)
        elif not ordered or (order is not None and report.rank in order.ranks):
            self._note(report)
        trace.unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _take_trace(self, report: CaptureReport, trace: Path) -> None:
        try:
            file = open_file(trace, buffering=0)
        except FileNotFoundError:
            return  # a rank that was not profiled
        except OSError as error:
            self._note(replace(report, state="failed", problem=f"Its trace cannot be read: {_why(error)}."))
            return
        if not self._journal.samples_wanted:
            file.close()
            problem = "The run uses all of the disk space that --max-disk allows, so its trace was not written."
            self._note(replace(report, state="failed", problem=problem))
            return
        self._moves.append(_Move(report=report, trace=file))

    def _note(self, report: CaptureReport, file_bytes: int = 0) -> None:
        fields = encoded(replace(report, problem=_sentence(report.problem)))
        del fields["id"]
        self._journal.event("capture_rank", capture=report.id, **fields, file_bytes=file_bytes)

    # -- traces -------------------------------------------------------------------------------------------------------

    def _keep_moving(self) -> None:
        while self._moved:
            self._note(*self._moved.pop(0))
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
        if self._thread is None and self._moves:
            move = self._moves.pop(0)
            self._thread = threading.Thread(target=self._move, args=(move,), name="capture", daemon=True)
            self._thread.start()

    def _move(self, move: _Move) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        report = move.report
        try:
            with move.trace:
                size = _compress(move.trace, make_capture_folder(self._run_dir, report.id), trace_name(report.rank))
        except OSError as error:
            problem = f"Its trace could not be written to the run directory: {_why(error)}."
            self._moved.append((replace(report, state="failed", problem=problem), 0))
            return
        if self._most_bytes:
            prune_traces(self._run_dir, self._most_bytes, without=(report.id,))
        self._moved.append((report, size))


def _compress(trace: BinaryIO, folder: Path, name: str) -> int:
    """Write the trace to the folder under this name, completely or not at all; return its compressed size."""
    partial = folder / f".{name}.{os.urandom(8).hex()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    packer, taken = zlib.compressobj(LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16), 0
    try:
        with os.fdopen(os.open(partial, flags, file_mode(folder)), "wb") as file:
            while piece := trace.read(PIECE_BYTES):
                taken += len(piece)
                if taken > MOST_TRACE_BYTES:
                    raise OSError(f"larger than {bytes_text(MOST_TRACE_BYTES)}")
                file.write(packer.compress(piece))
            file.write(packer.flush())
            size = file.tell()
        partial.rename(folder / name)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return size


def _order_in(path: Path) -> CaptureOrder | None:
    try:
        return decoded(CaptureOrder, json.loads(read_document(path, most=DOCUMENT_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None


def _stamp(path: Path) -> Stamp | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino


def _sentence(problem: str) -> str:
    """``the script started torch's profiler`` as a sentence."""
    problem = problem.strip()
    return f"{problem[:1].upper()}{problem[1:]}{'' if problem.endswith(('.', '!', '?')) else '.'}" if problem else ""


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
