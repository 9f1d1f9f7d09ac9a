"""Captures of this process: what to do at the end of each step for the orders that it gets.

An order comes from the agent (``PID.capture`` next to the ring, after the ring's request word has changed) or from the
schedule of ``run --profile``.  From the end of the step before its first warm-up step on, this is called after every
step; outside of captures it is called about twice a second, and reads one word.

    waiting     the order is known; its steps have not come, or something was compiled a few steps ago
    profiling   torch's profiler warms up, then records
    written     the trace is next to the ring
    failed      given up: the report says why, and training is as if nothing had been ordered

A capture is given up rather than disturb the job: when the script uses torch's profiler itself, when it takes too long,
when there is no room for the trace.  If something is compiled or a CUDA graph is captured in its steps, they are
discarded, and it is tried once more.

``FLAG_CAPTURED`` marks the steps from the one before the first warm-up step to the one after the last step, also on the
ranks that are not profiled: they wait for the others.  Starting, stopping and writing happen right after the end of a
step, outside all phases; so their time is in marked steps and in no phase of the script.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.recorder.capture.labels import Labels
from stepscope.recorder.capture.profiler import ProfilerUse, TorchProfiler, danger_of_unloading
from stepscope.recorder.guard import Patches, failsafe, immortal, warn
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.requests import RequestWord
from stepscope.records.capture import CaptureOrder, CaptureReport, CaptureSchedule, CaptureState, parse_schedule
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.files import open_file
from stepscope.records.identity import RankIdentity
from stepscope.records.paths import (
    CAPTURE_SUFFIX,
    CAPTURED_SUFFIX,
    ENV_NVTX,
    ENV_PROFILE,
    TRACE_SUFFIX,
)
from stepscope.records.steps import FLAG_CAPTURED
from stepscope.ring import RingWriter

__all__ = ["CaptureLimits", "Captures"]

SETTLED_STEPS = 3
"""Steps without compiling before a capture begins."""
MOST_ORDER_BYTES = 1 << 20
PROBLEM_CHARS = 300
NEVER = 1 << 62
PARTIAL = ".partial"
SCRIPT_PROFILES = "the script started torch's profiler"
GIVES_WAY_S = 5.0
"""So long a thread of the script that starts a profiler waits for the end of a step, where ours stops."""


@dataclass(frozen=True, kw_only=True)
class CaptureLimits:
    """How much room a trace may take."""

    least_room: int = 16 << 20
    """Free where the trace is written, or no capture begins."""
    room_share: float = 0.5
    """Of what is free there a trace may take: rings need room, and so do NCCL and the loader's workers."""
    plenty: int = 8
    """With room for so many of the largest traces, its size is not estimated before it is written."""
    event_bytes: int = 500
    """An event takes 300 to 450 bytes of a trace."""
    stop_s: float = 1.0
    """A capture that nobody requested ends early if stopping the profiler would take longer …"""
    requested_stop_s: float = 5.0
    """… and this is for the others."""
    stop_per_cpu_s: float = 20.0
    """How long stopping takes per second of CPU that recording takes: an event costs 1 µs in its step and 20 µs then.
    A loop in Python with 100,000 calls a step would have stopped a job for 11 s after six steps."""


@dataclass(kw_only=True)
class _Capture:
    """The order in progress."""

    order: CaptureOrder
    profiled: bool
    first: int
    """The first step to profile; later than ordered if the rank was past it, or was not ready."""
    postponed_s: float | None = None
    """When it could have begun if nothing had been compiled."""
    profiler: TorchProfiler | None = None
    recording: bool = False
    retried: bool = False
    problem: str = ""
    """Why it has to be given up at the end of this step."""
    began_s: float = 0.0
    start_ms: float = 0.0
    cpu_s: float = 0.0
    """CPU of the training thread when the warm-up began, then when recording began."""
    usual_cpu_s: float = 0.0
    """Of a step in the warm-up."""

    @property
    def warmup_step(self) -> int:
        return self.first - self.order.warmup

    @property
    def end_step(self) -> int:
        """The step after the last profiled one."""
        return self.first + self.order.steps


class Captures:
    """Owned by the recorder; called on the training thread, except for ``_script_prepares``."""

    def __init__(
        self,
        torch: Any,
        ledger: Ledger,
        labels: Labels,
        environ: Mapping[str, str],
        *,
        now_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._torch = torch
        self._ledger = ledger
        self._labels = labels
        self.cpu_s = cpu_s
        self.limits = CaptureLimits()
        self.make_profiler: Callable[..., TorchProfiler] = TorchProfiler
        self._now_s = now_s
        self._schedule = _schedule_of(environ)
        self._use = ProfilerUse(
            torch,
            prepares=self._script_prepares,
            starts=lambda: labels.begin("script"),
            stops=lambda: labels.end("script"),
        )
        if environ.get(ENV_NVTX) == "1":
            labels.use_nvtx()
        self._stopped = False
        self._kineto_used = False
        """Whether this process, or one that it was forked from, has had one of our profilers."""
        self._current: _Capture | None = None
        self.forget()

    def install(self, patches: Patches) -> None:
        self._use.install(patches)

    def forget(self) -> None:
        """Start over: initially, and in a forked child, which must not continue with the parent's profiler."""
        if self._current is not None and self._current.profiler is not None:
            _leave_profiler(self._torch, reads_frames=self._current.profiler.reads_frames)
        if self._kineto_used:
            _skip_destructors()
        immortal(self._current)
        self._current = None
        self._running = False
        """Whether torch's profiler is ours now."""
        self._overtaken = False
        """Whether a thread of the script started a profiler before ours could be stopped: that was the last capture."""
        self._turn = allocate_lock()
        """Held while ours stops, or another thread decides not to wait for that any longer."""
        self._use.forget()
        self._labels.forget()
        self._word: RequestWord | None = None
        self._ring: Path | None = None
        self._who = RankIdentity(host="", pid=0)
        self._step = -1
        """The last step that ended."""
        self._compiled_at = -SETTLED_STEPS
        self._number = 0
        """Of the next capture of the schedule."""
        self._last_id = ""
        """Of the last order: a request of another kind leaves it where it is."""
        self._marked_until = -1
        self.due_at = 0
        """After this step, call ``after_step`` again."""

    def hurry(self) -> None:
        """Steps take longer than before: see now whether something was requested."""
        if self._word is not None and self._word.hurry():
            self.due_at = 0

    @property
    def busy(self) -> bool:
        """Whether steps are marked now, so that nothing else should be measured."""
        return self._step + 1 <= self._marked_until

    # -- Steps ----------------------------------------------------------------------------------------------------

    @failsafe
    def after_step(self, step: int, ring: RingWriter, who: RankIdentity, *, compiled: bool, graph: bool) -> int:
        """Do what is due between this step, which has ended, and the next; return flags for the next.

        ``compiled``: something was compiled, or a CUDA graph captured, in this step; ``graph``: one is being captured.
        """
        self._step, self._who, self._ring = step, who, ring.path
        if self._stopped:
            self.due_at = NEVER
            return 0
        if self._word is None:
            self._word = RequestWord(ring.header, now_s=self._now_s)
        if compiled:
            self._compiled_at = step
        if step >= self._word.due_at and self._word.changed(step):
            self._read_order()
        if self._current is None:
            self._take_from_schedule()
        current = self._current
        if current is not None:
            try:
                self._advance(current, step + 1, compiled=compiled, graph=graph)
            except OSError:  # the session's folder is gone
                self._discard(current)
                self._current = None
            if step + 1 >= current.warmup_step - 1:
                self._marked_until = max(self._marked_until, step + 1)
        self.due_at = self._next_due(step)
        return FLAG_CAPTURED if step + 1 <= self._marked_until else 0

    def _next_due(self, step: int) -> int:
        assert self._word is not None
        due = self._word.due_at
        if self._current is not None:
            due = min(due, max(self._current.warmup_step - 2, step + 1))
        elif self._schedule is not None:
            at = self._schedule.first_step(self._number)
            due = due if at is None else min(due, max(at - self._schedule.warmup - 2, step + 1))
        return max(due, step + 1) if step + 1 > self._marked_until else step + 1

    def _advance(self, current: _Capture, coming: int, *, compiled: bool, graph: bool) -> None:
        """``coming`` is the step that begins."""
        if current.recording and self._is_expensive(current, coming - current.first):
            current.order = replace(current.order, steps=max(coming - current.first, 1))
        order = current.order
        if current.profiler is not None:
            if current.problem:
                self._discard(current)
                self._fail(current, current.problem)
            elif compiled or graph:
                self._discard(current)
                if current.retried:
                    self._fail(current, "something was compiled in each of the two attempts")
                else:
                    current.retried = True
                    current.first = coming + SETTLED_STEPS + order.warmup
            elif self._now_s() - current.began_s > order.most_s:
                self._discard(current)
                self._fail(current, f"the steps took longer than {order.most_s:g} s")
            elif coming > current.end_step or (coming == current.end_step and not self._labels.active):
                self._finish(current)
            elif coming == current.end_step:
                self._labels.at_next_phase = lambda: self._finish(current)
            elif coming >= current.first and not current.recording:
                self._start(current)
        elif not current.profiled:
            if coming >= current.end_step:
                self._current = None
        elif coming >= current.warmup_step:
            self._begin(current, coming, graph=graph)

    def _is_expensive(self, current: _Capture, steps: int) -> bool:
        """Whether so much was recorded in these steps that stopping the profiler would hold up the job.

        CPU time is compared, not time: other processes and other ranks must not end a capture.
        """
        if not current.order.warmup or not 1 <= steps < current.order.steps:
            return False
        more_s = self.cpu_s() - current.cpu_s - steps * current.usual_cpu_s
        requested = current.order.reason == "request"
        most_s = self.limits.requested_stop_s if requested else self.limits.stop_s
        return more_s * self.limits.stop_per_cpu_s > most_s

    def _begin(self, current: _Capture, coming: int, *, graph: bool) -> None:
        unsettled = coming - 1 - self._compiled_at < SETTLED_STEPS
        if graph or unsettled:
            current.first = coming + 1 + current.order.warmup
            if current.postponed_s is None:
                current.postponed_s = self._now_s()
            awaited = current.order.reason in ("request", "finding")
            if awaited and self._now_s() - current.postponed_s > current.order.most_s:
                self._fail(current, f"the script was compiling for more than {current.order.most_s:g} s")
            return
        problem = self._obstacle(current)
        if problem:
            self._fail(current, problem)
            return
        current.first = coming + current.order.warmup
        current.began_s = self._now_s()
        self._report(current, "profiling")
        if failsafe(self._prepare)(current) is None:
            self._discard(current)
            self._fail(current, "torch's profiler could not be started")
        elif not current.order.warmup:
            self._start(current)

    def _obstacle(self, current: _Capture) -> str:
        """Why the capture must not begin; empty: nothing."""
        if self._overtaken or self._use.active:
            return "the script uses torch's profiler itself"
        if not self._use.supported:
            return "this version of torch is not supported"
        if self._room() < self.limits.least_room:
            return f"less than {self.limits.least_room >> 20} MiB are free in {self._path('').parent}"
        if self._path(TRACE_SUFFIX).exists():
            return "the trace of the capture before it has not been collected"
        if current.order.reason == "finding" and self._who.device == "cuda":
            return danger_of_unloading(self._torch.version.cuda, os.environ)
        return ""

    def _prepare(self, current: _Capture) -> bool:
        begun_s = self._now_s()
        self._kineto_used = True
        cuda = self._who.device == "cuda"
        current.profiler = self.make_profiler(self._torch, current.order, cuda=cuda, use=self._use)
        self._running = True
        current.profiler.prepare()
        current.start_ms = 1e3 * (self._now_s() - begun_s)
        current.cpu_s = self.cpu_s()
        return True

    def _start(self, current: _Capture) -> None:
        if failsafe(self._record)(current) is None:
            self._discard(current)
            self._fail(current, "torch's profiler could not be started")

    def _record(self, current: _Capture) -> bool:
        assert current.profiler is not None
        begun_s = self._now_s()
        order, who = current.order, self._who
        current.usual_cpu_s = (self.cpu_s() - current.cpu_s) / max(order.warmup, 1)
        about = {"capture": order.id, "rank": who.rank, "world_size": who.world_size, "host": who.host}
        current.profiler.start({**about, "first_step": current.first, "steps": order.steps, "reason": order.reason})
        current.recording = True
        self._labels.numbers_steps = True
        self._labels.begin("capture")
        current.start_ms += 1e3 * (self._now_s() - begun_s)
        current.cpu_s = self.cpu_s()
        return True

    def _finish(self, current: _Capture) -> None:
        self._current = None
        first, last = current.first, current.end_step - 1
        self._end_labels()
        result = failsafe(self._write)(current)
        if isinstance(result, dict):
            self._report(current, "written", first_step=first, last_step=last, **result)
        else:
            self._path(PARTIAL).unlink(missing_ok=True)
            self._report(current, "failed", problem=result or "torch's profiler failed")

    def _write(self, current: _Capture) -> dict[str, Any] | str:
        """Stop the profiler and write the trace; figures for the report, or why there is no trace."""
        assert current.profiler is not None
        begun_s = self._now_s()
        if not self._stop(current.profiler):
            return SCRIPT_PROFILES
        stopped_s = self._now_s()
        order, room = current.order, self._room()
        if room < self.limits.plenty * order.most_bytes:
            about = current.profiler.events() * self.limits.event_bytes
            if about > room:
                return f"there is no room for about {about >> 20} MiB in {self._path('').parent}"
        partial = self._path(PARTIAL)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        try:
            current.profiler.write(partial)
            size = partial.stat().st_size
        except OSError as error:
            return f"cannot write the trace: {error.strerror or error}"
        if size > order.most_bytes:
            return f"the trace has {size >> 20} MiB, more than {order.most_bytes >> 20} MiB"
        partial.replace(self._path(TRACE_SUFFIX))
        written_s = self._now_s()
        return {"trace_bytes": size, "stop_ms": 1e3 * (stopped_s - begun_s), "write_ms": 1e3 * (written_s - stopped_s)}

    def _discard(self, current: _Capture) -> None:
        """Stop the profiler, without a trace."""
        self._end_labels()
        profiler, current.profiler, current.recording = current.profiler, None, False
        if profiler is not None:
            failsafe(self._stop)(profiler)

    def _stop(self, profiler: TorchProfiler) -> bool:
        """Return whether it has a trace."""
        with self._turn:
            try:
                if not self._overtaken:
                    profiler.stop()
            finally:
                self._running = False
        if self._overtaken:  # torch's profiler belongs to the script now: stopping ours would end the process
            immortal(profiler)
            _leave_profiler(self._torch, reads_frames=profiler.reads_frames)
        return not self._overtaken

    def _end_labels(self) -> None:
        self._labels.end("capture")
        self._labels.numbers_steps = False

    def _fail(self, current: _Capture, problem: str) -> None:
        self._current = None
        self._report(current, "failed", problem=problem)

    def _script_prepares(self) -> None:
        """The script is about to start its own profiler: ours gives way.

        Ours can only be stopped by the training thread.  Another thread waits for that, since two profilers in a
        process end in a crash; if the training thread waits for it in turn, not forever.
        """
        current = self._current
        if get_ident() == self._ledger.thread:
            if current is not None and current.profiler is not None:
                self._discard(current)
                self._fail(current, SCRIPT_PROFILES)
            return
        if current is not None:
            current.problem = SCRIPT_PROFILES
        until_s = self._now_s() + GIVES_WAY_S
        while self._running and self._now_s() < until_s:
            time.sleep(0.001)
        with self._turn:
            self._overtaken = self._overtaken or self._running

    def end(self) -> None:
        """The process ends: of a capture in progress, the steps so far are written.

        With a GPU, the profiler is not stopped: that would wait for a device which may never finish its work.
        """
        current = self._current
        if current is None or current.profiler is None or get_ident() != self._ledger.thread:
            return
        steps = self._step - current.first + 1
        if self._who.device != "cuda" and current.recording and steps >= 1:
            current.order = replace(current.order, steps=min(steps, current.order.steps))
            self._finish(current)
            return
        if self._who.device == "cuda":
            immortal(current.profiler)
        else:
            self._discard(current)
        self._fail(current, "the process ended before its trace was written")

    def withdraw(self) -> None:
        """Stop for good; the hooks are removed."""
        current = self._current
        if current is not None and current.profiler is not None:
            self._discard(current)
        self._current, self._stopped = None, True
        self._labels.forget()

    # -- Orders ---------------------------------------------------------------------------------------------------

    def _read_order(self) -> None:
        try:
            with open_file(self._path(CAPTURE_SUFFIX)) as file:
                order = decoded(CaptureOrder, json.loads(file.read(MOST_ORDER_BYTES)))
        except (OSError, ValueError):
            return
        if order.id == self._last_id or order.steps < 1 or order.warmup < 0:
            return
        if self._current is not None and self._current.profiler is not None:
            return  # the hub orders one at a time; this one is of a schedule, or the hub has started again
        self._last_id = order.id
        self._take(order)
        if self._current is not None:
            self._report(self._current, "waiting")

    def _take_from_schedule(self) -> None:
        """Take the next capture of the schedule once its steps are near."""
        if self._schedule is None:
            return
        at, coming = self._schedule.first_step(self._number), self._step + 1
        if at is not None and coming >= at - self._schedule.warmup - 1:
            self._number += 1
            if coming <= at or self._number == 1:  # else the one before it took too long
                self._take(self._schedule.order(at, self._who.world_size))

    def _take(self, order: CaptureOrder) -> None:
        first = max(order.at_step, self._step + 1 + order.warmup)
        self._current = _Capture(order=order, profiled=self._who.rank in order.ranks, first=first)

    # -- Files ----------------------------------------------------------------------------------------------------

    def _path(self, suffix: str) -> Path:
        assert self._ring is not None
        return self._ring.with_suffix(suffix)

    def _room(self) -> int:
        about = os.statvfs(self._path("").parent)
        return int(about.f_bavail * about.f_frsize * self.limits.room_share)

    @failsafe
    def _report(self, current: _Capture, state: CaptureState, *, problem: str = "", **figures: Any) -> None:
        if state != "written" and self._path(TRACE_SUFFIX).exists():
            return  # the report on that trace has not been read
        report = CaptureReport(
            id=current.order.id,
            rank=self._who.rank,
            pid=self._who.pid,
            state=state,
            problem=problem[:PROBLEM_CHARS],
            reason=current.order.reason,
            start_ms=current.start_ms,
            **figures,
        )
        partial = self._path(PARTIAL)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(json.dumps(encoded(report)).encode())
        partial.replace(self._path(CAPTURED_SUFFIX))


def _schedule_of(environ: Mapping[str, str]) -> CaptureSchedule | None:
    text = environ.get(ENV_PROFILE, "")
    if not text:
        return None
    try:
        return parse_schedule(text)
    except ValueError as error:
        warn(f"{ENV_PROFILE}: {error}; nothing is captured on schedule")
        return None


@failsafe
def _leave_profiler(torch: Any, *, reads_frames: bool) -> None:
    """Make a forked child of a process that is being profiled run without that.

    The profiler itself must not be stopped there: that would talk to a device which the child does not have.
    """
    if reads_frames:  # else the interpreter's profile function is the script's
        sys.setprofile(None)
    torch._C._autograd._enable_record_function(False)


@failsafe
def _skip_destructors() -> None:
    """Let this forked child end without C++'s destructors of static objects, as children of multiprocessing do.

    From its first use on, torch's profiler has a thread that waits on a condition; a forked child that destroys its
    copy of the condition waits forever for a thread which it does not have.  Python's own exit handlers have run by
    then, and the streams of C are flushed.
    """
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)  # runs after what is registered later, and gets the exit code
    library.__cxa_atexit(library.fflush, None, None)
