"""One per training process: owns the ring and the ledger, and turns the end of a step into a record.

Nothing is created until the process trains: a launcher, a DataLoader worker or a compile worker that merely imports
torch leaves no ring behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

from stepscope.errors import RingNoSpace
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import (
    BACKWARD,
    BUILTIN_PHASES,
    COMM,
    FIRST_USER_SLOT,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    PHASE_SLOTS,
)
from stepscope.records.places import ring_paths
from stepscope.records.slot import FLAG_COMPILED, FLAG_EPOCH_START, FLAG_FIRST, STEP, STEP_BODY
from stepscope.recorder import guard, identity
from stepscope.recorder.device import DeviceTimer, device_timer
from stepscope.recorder.ledger import NOT_NOW, Ledger
from stepscope.recorder.steps import StepBoundaries
from stepscope.ring import RingState, RingWriter
from stepscope.ring.layout import DEFAULT_SLOTS, HOOK_FAILURES_WORD, LIVE_STEP_WORD

__all__ = ["BackwardFigures", "Recorder", "RootSearch"]

IDENTITY_CHECKS = (1, 2, 3, 5, 10, 100)
"""After these steps the process looks again who it is: the process group or the device may have come late."""

QUICKEST_COMPILE_NS = 20_000_000
"""A step shorter than this compiled nothing; it is not asked."""

MAX_FAILURES = 100
"""Errors of our own after which a process is left alone."""


class RootSearch(Protocol):
    """Looks for the modules that are the model."""

    def after_step(self, *, forwards: int, backwards: int) -> bool:
        """A step has ended; whether to be asked again after the very next one."""


class BackwardFigures(Protocol):
    """Knows how much of the last backward was this rank's own work."""

    def read(self) -> tuple[int, int]: ...


class Recorder:
    """The hooks call ``enter``/``leave`` around phases and ``end_step`` at the end of a step.

    Not thread safe; the ledger answers only the thread that trains.  After a fork the child must call ``forget``.
    """

    enter: Callable[[int], int]
    """Begin a phase; the outer phase for ``leave``, or NOT_NOW.  Once there is a ledger this is the ledger's own."""
    leave: Callable[[int], None]

    def __init__(
        self, session: Path, run_dir: Path, *, now: Callable[[], int] = time.perf_counter_ns, slots: int = DEFAULT_SLOTS
    ) -> None:
        self._session = session
        self._run_dir = run_dir
        self._now = now
        self._slots = slots
        self._search: RootSearch | None = None
        self.forget(forked=False)

    def forget(self, *, forked: bool = True) -> None:
        """Start anew with no ring: at the beginning, and in a forked child, whose parent goes on owning the old one."""
        self.ring: RingWriter | None = None
        self.ledger: Ledger | None = None
        self.boundaries = StepBoundaries()
        self.explicit = False
        self.identity = RankIdentity(host="", pid=0)
        self.flags = FLAG_FIRST
        self.step = 0
        self.ddp: BackwardFigures | None = None
        self._device: DeviceTimer | None = None
        self._names: dict[str, int] = {name: slot for slot, name in enumerate(BUILTIN_PHASES)}
        self._start_ns = 0
        self._cpu_ns = 0
        self._compiled = 0
        self._asked_at = 0
        self._forked = forked
        self._broken = False
        self.enter = self._first_enter
        self.leave = _leave_nothing

    # -- phases ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> int:
        return self.ledger.phase if self.ledger is not None else OTHER

    def slot_of(self, name: str) -> int:
        """The slot of a phase by name; a new name takes a free one, and when none is left its time stays ``other``."""
        slot = self._names.get(name)
        if slot is None:
            slot = len(self._names)
            if slot >= PHASE_SLOTS:
                guard.warn(f"more than {PHASE_SLOTS - FIRST_USER_SLOT} phase names: {name!r} is booked as other")
                return OTHER
            self._names[name] = slot
            if self.ring is not None:
                self.ring.set_phase_name(slot, name)
        return slot

    # -- steps ----------------------------------------------------------------------------------------------------

    @guard.failsafe
    def end_optimizer(self, optimizer: object, flags: int = 0) -> None:
        """An outermost ``optimizer.step()`` returned (or was skipped): a step ends if that optimizer closes it."""
        if not self.explicit and self.boundaries.closes(id(optimizer)):
            self.end_step(flags)

    def end_step(self, flags: int = 0) -> None:
        ledger, ring = self.ledger, self.ring
        if ledger is None or ring is None:
            return
        if get_ident() != ledger.thread and not self._take_over(ledger):
            return
        totals, now = ledger.close()
        cpu_ns = time.thread_time_ns()
        wall_ns = now - self._start_ns
        if wall_ns > QUICKEST_COMPILE_NS:
            flags |= self._compile_flag()
        entries = totals.entries
        backwards = entries[BACKWARD]
        compute = comm = 0
        if self.ddp is not None and backwards:
            compute, comm = self.ddp.read()
            if compute:
                totals.move(BACKWARD, COMM, totals.last_backward - compute)
        device = self._device
        memory = (0, 0, 0) if device is None else device.memory(now)
        step = self.step
        ring.append(
            STEP_BODY.pack(
                STEP,
                flags | self.flags,
                ring.head + 1,
                step,
                self._start_ns,
                wall_ns,
                max(cpu_ns - self._cpu_ns, 0),
                *totals.ns,
                *memory,
                backwards,
                entries[FORWARD],
                compute,
                comm,
                entries[INPUT],
                0,
            )
        )
        self._start_ns = now
        self._cpu_ns = cpu_ns
        self.flags = 0
        self.step = ring.words[LIVE_STEP_WORD] = step + 1
        if device is not None:
            device.end_step(step, ring)
        if step >= self._asked_at or (backwards and not entries[FORWARD]):
            self._look_around(entries[FORWARD], backwards)

    def ask_after_steps(self, search: RootSearch | None) -> None:
        """From now on ``search`` is asked after steps, as often as it wishes."""
        self._search = search
        self._asked_at = 0

    def epoch_starts(self) -> None:
        self.flags |= FLAG_EPOCH_START

    def note(self, text: bytes) -> None:
        if self.ring is not None:
            self.ring.append_note(self.step, text)

    def set_state(self, state: RingState) -> None:
        if self.ring is not None and self.identity.pid == os.getpid():
            self.ring.set_state(state)

    # -- starting -------------------------------------------------------------------------------------------------

    def _first_enter(self, phase: int) -> int:
        """``enter`` until there is a ledger: makes it on the first sign of training."""
        self._start(phase)
        return NOT_NOW if self.ledger is None else self.ledger.enter(phase)

    @guard.failsafe
    def _start(self, phase: int) -> None:
        """In a forked child only autograd or an optimizer is a sign: DataLoader workers are forked children too."""
        signs = (BACKWARD, OPTIMIZER) if self._forked else (BACKWARD, OPTIMIZER, INPUT)
        if self._broken or (phase not in signs and not self.explicit):
            return
        self.identity = identity.of_this_process()
        ring = self._make_ring()
        if ring is None:
            self._broken = True
            return
        for name, slot in self._names.items():
            if slot >= FIRST_USER_SLOT:
                ring.set_phase_name(slot, name)
        guard.on_failure(self._count_failure)
        ring.words[HOOK_FAILURES_WORD] = guard.failures()
        ring.set_state(RingState.RUNNING)
        self.ring = ring
        self.ledger = ledger = Ledger(self._now, ring.words)
        self._start_ns = ledger.mark
        self._cpu_ns = time.thread_time_ns()
        self._compiled = _compile_count()
        self.enter, self.leave = ledger.enter, ledger.leave

    def _make_ring(self) -> RingWriter | None:
        first, fallback = ring_paths(self._session, self._run_dir, os.getpid())
        try:
            return RingWriter(first, self.identity, slots=self._slots)
        except (RingNoSpace, OSError) as error:
            reason = error
        try:
            fallback.parent.mkdir(exist_ok=True)
            ring = RingWriter(fallback, self.identity, slots=self._slots)
        except (RingNoSpace, OSError) as error:
            guard.warn(f"this process is not recorded: {reason}; and the fallback: {error}")
            return None
        guard.warn(f"{reason}; its steps are recorded on disk instead, at {fallback}")
        return ring

    def _take_over(self, ledger: Ledger) -> bool:
        """Steps are taken on another thread than the one that was seen first: before the first step, that one trains."""
        if self.step:
            return False
        ledger.thread = get_ident()
        self._cpu_ns = time.thread_time_ns()
        return True

    def _look_around(self, forwards: int, backwards: int) -> None:
        """Now and then, after a step: who are we, on which device, and are the roots still the roots?"""
        step = self.step
        asked_again = self._search is not None and self._search.after_step(forwards=forwards, backwards=backwards)
        if step in IDENTITY_CHECKS:
            self._look_at_identity()
        later = [check for check in IDENTITY_CHECKS if check > step]
        periodic = 1 << max(step.bit_length(), 10)  # ever more rarely: 1024, 2048, 4096 …
        self._asked_at = step if asked_again else min([*later, periodic]) - 1

    def _look_at_identity(self) -> None:
        found = identity.of_this_process()
        if self._device is None and self.ledger is not None:
            self._device = device_timer(found, self._now)
            self.ledger.device = self._device
        if found != self.identity and self.ring is not None:
            self.identity = found
            self.ring.set_identity(found)

    def _count_failure(self, count: int) -> None:
        if self.ring is not None:
            self.ring.words[HOOK_FAILURES_WORD] = count
        if count >= MAX_FAILURES and not self._broken:
            guard.warn("too many failures of our own: this process is not recorded any further")
            self._broken = True
            self.ledger = None
            self.enter = self._first_enter

    def _compile_flag(self) -> int:
        count = _compile_count()
        if count == self._compiled:
            return 0
        self._compiled = count
        return FLAG_COMPILED


def _leave_nothing(outer: int) -> None:
    pass


def _compile_count() -> int:
    """How many graphs dynamo compiled so far; 0 while nobody uses it."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(module, "counters", None)
    return counters["stats"]["unique_graphs"] if counters else 0
