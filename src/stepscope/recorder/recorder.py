"""The recorder: decides when a step ends, and writes one record per step to the ring.

Each training process has one recorder.  It owns the ring and the ledger.

Nothing is created until the process trains: a launcher, a DataLoader worker or a compile worker that merely imports
torch leaves no ring behind.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, Literal, Protocol

from stepscope.errors import RingNoSpace
from stepscope.recorder import guard, identity
from stepscope.recorder.device import DeviceTimer, device_timer
from stepscope.recorder.facts import LiveObjects
from stepscope.recorder.layers.growth import GrowthWatch
from stepscope.recorder.layers.memory_dump import SnapshotRequests
from stepscope.recorder.ledger import NOBODY, NOT_NOW, Ledger
from stepscope.recorder.process_groups import GroupTable
from stepscope.recorder.stacks import StackOffer
from stepscope.recorder.worker_server import ServerOffer
from stepscope.records.files import folder_mode
from stepscope.records.identity import RankIdentity
from stepscope.records.paths import ring_paths
from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    FIRST_USER_SLOT,
    FLAG_CAPTURED,
    FLAG_COMPILED,
    FLAG_EPOCH_START,
    FLAG_FIRST,
    FLAG_SAMPLED,
    FLAG_SKIPPED,
    INPUT,
    OPTIMIZER,
    OTHER,
    PHASE_SLOTS,
)
from stepscope.ring import RingState, RingWriter
from stepscope.ring.layout import (
    DEFAULT_CAPACITY,
    HEAD_WORD,
    HOOK_FAILURES_WORD,
    STEP_DATA,
    STEP_END,
    TIME_SHIFT,
    note_words,
)

__all__ = ["Oddity", "Recorder", "StepBoundaries"]


# -- Step boundaries --------------------------------------------------------------------------------------------------
# A step ends when the optimizer that closes the loop's cycle returns.
#
# With one optimizer that is every ``step()``.  With several, a training iteration steps them in turn (GAN: D, G; or D
# five times, then G; or one for the embeddings and one for the rest) and ends with the last one in the cycle: the
# optimizer that appeared last is the closer.  If the closer is not stepped for ``PATIENCE`` steps of the others (the
# script moved to another stage), the one that steps now becomes the closer.


class StepBoundaries:
    PATIENCE = 16

    def __init__(self) -> None:
        self.sole = 0
        """The id of the only optimizer seen so far, for the fast path; 0 when there are several (or none)."""
        self._known: dict[int, weakref.ref[object]] = {}
        """By id: a new optimizer may get the id of one that is gone."""
        self._closer = 0
        self._since_closer = 0

    def closer(self) -> object | None:
        """The optimizer that ended the last step, if it is still there."""
        known = self._known.get(self._closer)
        return None if known is None else known()

    def hold(self) -> None:
        """Disable the fast path until ``release``: callers must use ``closes``."""
        self.sole = 0

    def release(self) -> None:
        (self.sole,) = self._known if len(self._known) == 1 else (0,)

    def closes(self, optimizer: object) -> bool:
        """Whether the ``step()`` of this optimizer that just returned ends a training step."""
        key = id(optimizer)
        known = self._known.get(key)
        if known is None or known() is not optimizer:
            self._known = {key: ref for key, ref in self._known.items() if ref() is not None}
            self._known[key] = weakref.ref(optimizer)
            self.release()
        elif key != self._closer:
            self._since_closer += 1
            if self._since_closer < self.PATIENCE and self._known[self._closer]() is not None:
                return False
        self._closer = key
        self._since_closer = 0
        return True


# -- Recorder ---------------------------------------------------------------------------------------------------------

IDENTITY_CHECKS = (1, 2, 3, 5, 10, 100)
"""The process checks its identity again after these steps: the process group or the device may have appeared late."""

FACT_STEPS = (1, 3, 100)
"""The facts about the live objects are updated after these steps, and whenever a new search is due."""

FIRST_NEW_CHECK = 1024
"""From this step on, search again for models that joined without any other sign."""

NEVER_NS = 1 << 62

MAX_FAILURES = 100
"""Errors of our own after which a process is no longer recorded."""


Oddity = Literal["nonfinite", "skipped", "slow", "memory"]
"""Why the next steps are sampled: a value that is not finite, a step that a GradScaler skipped, one that took long,
memory that rose suddenly."""
SLOW_TIMES = 3
"""A step is slow if it takes so many times the mean of the last stretch of …"""
SLOW_STEPS = 16
"""… at least so many steps."""
COMPILATION_NS = 15_000_000
"""A step in which something is compiled takes longer than this.  Once code has been compiled, every step is checked for
more, unless steps are so short that this one would be slow, and slow steps are checked anyway."""
LONG_ANYWAY = FLAG_SAMPLED | FLAG_EPOCH_START | FLAG_CAPTURED
"""Steps that take long because layers are sampled, the loader's workers start, or our profiler is active."""


class RootSearch(Protocol):
    """Searches for the modules that are the model."""

    def after_step(self, *, found: bool, due: bool) -> bool:
        """Handle the end of a step; ``found``: a root was called in it, ``due``: a new search may start.

        Returns whether to call this again after the very next step.
        """
        ...


class BackwardFigures(Protocol):
    """Knows how much of a backward was this rank's own work."""

    every_step: bool
    """Whether to ask at the end of each step, or only when there are other reasons to check."""

    def words(self) -> list[int]:
        """Figures for the step that ends, as data words."""
        ...


class LayerSamples(Protocol):
    """Looks at the layers of the model in some steps."""

    def finish(self, step: int, flags: int, optimizers: Sequence[Any], ring: RingWriter | None) -> int:
        """The sampled step is over; return a flag for it."""
        ...

    def after_step(self, step: int, roots: Callable[[], Sequence[Any]], *, compiled: bool, busy: bool) -> int:
        """Begin the next step; return the step at whose end to call this again."""
        ...

    def watch(self, model: Any, *, activations: bool, gradients: bool) -> None: ...

    def drop_step(self) -> None:
        """Stop looking at the current step, because a graph is being captured."""
        ...

    def suspect(self, step: int, why: Oddity) -> bool:
        """Something odd was seen in this step; return whether the next steps will be sampled because of it."""
        ...

    def write_trail(
        self,
        trail: Any,
        roots: Callable[[], Sequence[Any]],
        ring: RingWriter | None,
        *,
        compiled: bool,
        at_end: bool,
    ) -> None:
        """Write where the gradients of the last steps stopped being numbers; ``at_end``: the process is ending."""
        ...

    def forget(self) -> None: ...

    def activations_of(self, tree: Any) -> tuple[int, list[int]] | None:
        """A sampled step, and the bytes that the modules of a model with this tree kept for backward then."""
        ...

    def keep_sizes(self, step: int, trees: Sequence[Any], sizes: Sequence[Any], ring: RingWriter | None) -> None:
        """Write what the layers hold as memory runs out in this step."""
        ...

    @property
    def sampling(self) -> bool:
        """Whether the step in progress is sampled."""
        ...


class GradientNorms(Protocol):
    """Keeps the norms of the last steps' gradients on the device."""

    due: int
    """The next step of which gradients may be read."""
    wanted: bool
    """Whether the norms should be written at the end of this step."""

    def forget(self) -> None: ...

    def clip(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``clip_grad_norm_``, and keep the norms that it computes."""
        ...

    def before_exchange(self, ddp: Any) -> None: ...

    def before_update(self, optimizer: Any) -> None: ...

    def given_to_collective(self, buffer: Any) -> None: ...

    def see_forward(self, loss: Any) -> None:
        """Backward is about to begin with this loss, which is not finite."""
        ...

    def skip(self, step: int) -> None:
        """A GradScaler has skipped this step."""
        ...

    def suspect(self, step: int) -> bool | None:
        """A value is not finite; return whether the norms should be written at the end of the step."""
        ...


class StepCaptures(Protocol):
    """Profiles a few steps on request or on schedule (``capture/captures.py``)."""

    due_at: int
    """After this step, call ``after_step`` again."""

    def after_step(self, step: int, ring: RingWriter, who: RankIdentity, *, compiled: bool, graph: bool) -> int | None:
        """Do what is due between this step, which has ended, and the next; return flags for the next."""
        ...

    @property
    def busy(self) -> bool:
        """Whether steps are profiled now, on this rank or another."""
        ...

    def forget(self) -> None: ...

    def hurry(self) -> None:
        """Steps take longer than before: see now whether something was requested."""
        ...

    def end(self) -> None: ...


class StepLabels(Protocol):
    """Labels steps and phases for a profiler (``capture/labels.py``)."""

    @property
    def active(self) -> bool: ...

    def attach(self) -> None:
        """Continue in the next step."""
        ...

    def step_ends(self, step: int) -> None: ...


class HooksInC(Protocol):
    """Makes hooks of which ordinary calls are handled in C; all others by the given hooks in Python."""

    def forward(
        self,
        recorder: Recorder,
        original: Callable[..., Any],
        python: Callable[..., Any],
        is_compiling: Callable[[], bool],
        roots: dict[int, Any],
        frozen: dict[int, bool],
        grad_enabled: Callable[[], bool],
    ) -> Callable[..., Any]: ...

    def optimizer(
        self,
        recorder: Recorder,
        python_before: Callable[..., Any],
        python_after: Callable[..., Any],
        under_way: list[tuple[int, int]],
        is_compiling: Callable[[], bool],
        traced: Any,
    ) -> tuple[Callable[..., Any], Callable[..., Any]]: ...


NOT_FINITE = (b':"nan"}', b':"inf"}', b':"-inf"}')
"""How a note of such a value ends."""


class Recorder:
    """Receives ``enter``/``leave`` around phases and ``end_step`` at the end of a step from the hooks.

    Not thread safe; the ledger only serves the training thread.  After a fork the child must call ``forget``.
    """

    ledger_class: ClassVar[type[Ledger]] = Ledger
    native: ClassVar[HooksInC | None] = None
    """Set in the subclass of ``hooks/native.py``, whose hooks are in C."""

    def __init__(
        self,
        session: Path,
        run_dir: Path,
        *,
        now: Callable[[], int] = time.perf_counter_ns,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        self._session = session
        self._run_dir = run_dir
        self._now = now
        self._capacity = capacity
        self._search: RootSearch | None = None
        self.stacks: StackOffer | None = None
        self.server: ServerOffer | None = None
        self.layers: LayerSamples | None = None
        self.trail: GradientNorms | None = None
        self.captures: StepCaptures | None = None
        self.labels: StepLabels | None = None
        self._forgetting: list[Callable[[], None]] = []
        self._ending: list[Callable[[], None]] = []
        self._known: Callable[[RankIdentity], None] | None = None
        self.ledger = self.ledger_class(now, self._start)
        self.optimizer_returns = 0
        """How often an optimizer's outermost ``step`` has returned."""
        self.searching = False
        """Whether calls of modules are searched for a model."""
        self.groups = GroupTable()
        self.forget(forked=False)

    def forget(self, *, forked: bool = True) -> None:
        """Start over without a ring: initially, and in a forked child, whose parent still owns the old ring."""
        self.ledger.let_go()
        self.ring: RingWriter | None = None
        self.boundaries = StepBoundaries()
        self.objects = LiveObjects()
        self._growth = GrowthWatch()
        self.groups.forget()
        self.explicit = False
        self.identity = RankIdentity(host="", pid=0)
        self.flags = FLAG_FIRST
        self.step = 0
        self.forward_seen = False
        """Set when a root is called; a step without any such call is a reason to search for roots."""
        self._attend_at = 0
        """Before this step, the end of a step needs no extra work."""
        self._ddp: BackwardFigures | None = None
        self._device: DeviceTimer | None = None
        self._snapshots: SnapshotRequests | None = None
        self._names: dict[str, int] = {name: slot for slot, name in enumerate(BUILTIN_PHASES)}
        self._compiled = 0
        self._check_at = 0
        self._ended_ns = 0
        """When the last step ended."""
        self._slow_ns = NEVER_NS
        """A step that takes longer is slow."""
        self._stretch = (0, 0)
        """The step and the time since which steps are counted, to know how long they usually take."""
        self._captured: list[object] | None = None
        """The optimizers that stepped during the current CUDA graph capture; None outside a capture."""
        self._counting = False
        self._noted = (-1, False)
        """What the ledger had written after the last note, and whether it was at rest before it."""
        self._published_facts: dict[str, Any] = {}
        self._forked = forked
        self._broken = False
        if self.stacks is not None:
            self.stacks.forget()
        if self.server is not None:
            self.server.forget()
        # First the labels: the layers would end a range of the parent.
        if self.captures is not None:
            self.captures.forget()
        if self.layers is not None:
            self.layers.forget()
        if self.trail is not None:
            self.trail.forget()
        for forget in self._forgetting:
            forget()

    def when_known(self, tell: Callable[[RankIdentity], None]) -> None:
        """Call ``tell`` when this process begins to train, and when its rank changes."""
        self._known = tell

    def when_forked(self, forget: Callable[[], None]) -> None:
        """Call ``forget`` in forked children, for hooks that remember calls in progress."""
        self._forgetting.append(forget)

    def when_ending(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the process ends in order, or with an exception."""
        self._ending.append(end)

    # -- Phases ---------------------------------------------------------------------------------------------------

    def slot_of(self, name: str) -> int:
        """The slot of a phase by name; a new name takes a free slot.  If none is left, its time counts as ``other``."""
        slot = self._names.get(name)
        if slot is None:
            slot = len(self._names)
            if slot >= PHASE_SLOTS:
                guard.warn(f"more than {PHASE_SLOTS - FIRST_USER_SLOT} phase names: {name!r} counts as other")
                self._names[name] = OTHER  # warn only once
                return OTHER
            self._names[name] = slot
            if self.ring is not None:
                self.ring.set_phase_name(slot, name)
        return slot

    def phase_name(self, slot: int) -> str:
        return next((name for name, at in self._names.items() if at == slot), str(slot))

    # -- Steps ----------------------------------------------------------------------------------------------------

    def end_step(self, flags: int = 0, outer: int = NOT_NOW, optimizer: object = None) -> None:
        """End a step; if ``outer`` is given, the current phase ends too and ``outer`` continues.

        With an ``optimizer`` (its outermost ``step()`` has returned), only if that one closes the step.
        """
        ledger, step = self.ledger, self.step
        closes = optimizer is None or (id(optimizer) == self.boundaries.sole and not self.explicit)
        if closes and outer != NOT_NOW and step < self._attend_at and self.forward_seen:
            # The common case, also in ``hooks/native_hooks.c``.  ``Ledger.end_step`` is inlined, since every call costs
            # microseconds here.
            at, body, now_ns = ledger.at, ledger.body, ledger.now()
            if now_ns - self._ended_ns < self._slow_ns:
                body[at] = (now_ns << TIME_SHIFT) + STEP_END
                body[at + 1] = STEP_DATA | step << 20 | outer << 16 | flags | self.flags
                ledger.phase, ledger.at = outer, at + 2
                self.step, self.flags, self.forward_seen, self._ended_ns = step + 1, 0, False, now_ns
                if at > ledger.limit:
                    ledger.turn()
                else:
                    ledger.header[HEAD_WORD] = ledger.rounds + at + 2
                return
            self._attend_at = step
        if not closes and not self._closes(optimizer):
            if outer != NOT_NOW:
                ledger.leave(outer)
            if step >= self._check_at:
                self.objects.meet_optimizer(optimizer)
            return
        if outer == NOT_NOW:
            if get_ident() != ledger.thread and not self._take_over():
                return
            outer = ledger.phase
        self.step = step + 1
        now_ns = ledger.now()
        usual = now_ns - self._ended_ns < self._slow_ns and not flags & FLAG_SKIPPED
        if usual and step < self._attend_at and self.forward_seen:
            ledger.end_step(outer, step, flags | self.flags)
            self.flags, self._ended_ns = 0, now_ns
        else:
            self._end_step_with_figures(outer, step, flags, optimizer)
            ledger.phase = outer
        self.forward_seen = False

    def _closes(self, optimizer: object) -> bool:
        """Whether the ``step()`` of this optimizer that just returned ends a training step."""
        if self._captured is not None:
            if self._is_capturing():
                self._captured.append(optimizer)
                return False
            self.capture_ends()  # the capture was abandoned without notice
        return not self.explicit and self.boundaries.closes(optimizer)

    def closing_optimizer(self) -> object | None:
        """The optimizer that ends steps; if the script marks them itself, one that was seen."""
        closer = self.boundaries.closer()
        return next(iter(self.objects.optimizers()), None) if closer is None else closer

    def capture_starts(self, is_capturing: Callable[[], bool | None]) -> None:
        """A CUDA graph capture begins: the script's calls are not executed, and no optimizer ends a step.

        This lasts until ``capture_ends``, or until ``is_capturing`` returns false.
        """
        self._captured, self._is_capturing = [], is_capturing
        self.boundaries.hold()
        if self._device is not None:
            self._device.drop_step(self.ledger)
        if self.layers is not None:
            self.layers.drop_step()

    def capture_ends(self) -> object | None:
        """Return the optimizer whose step was captured, the last one if there were several; None if there was none."""
        captured, self._captured = self._captured, None
        self.boundaries.release()
        return captured[-1] if captured else None

    @guard.failsafe
    def _end_step_with_figures(self, outer: int, step: int, flags: int, optimizer: object) -> None:
        """End a step, add the figures that others have about it, and run the checks that are due."""
        self._attend_at = step + 1
        if self.layers is not None and self.layers.sampling:
            self.ledger.leave(outer)  # reading the layers is not the optimizer's time
            self._finish_layers(self.layers, step, flags, optimizer)
        self._judge_length(step, flags)
        ended = self.ledger.phase
        flags |= self.flags | self._compile_flag()
        self.ledger.end_step(outer, step, flags, self._figures() or ())
        self.flags = 0
        device_at = None if self._device is None else self._device.end_step(step, ended, self.ledger)
        if step >= self._check_at or not self.forward_seen:
            self._check_surroundings(optimizer)
        if step >= self._growth.due_at:
            self._check_growth(step)
        due = [self._check_at, self._growth.due_at]
        if self._snapshots is not None:
            if step >= self._snapshots.due_at:
                self._check_requests(self._snapshots, step)
            due.append(self._snapshots.due_at)
        if device_at is not None:
            due.append(device_at)
        self._write_trail()
        if self.labels is not None and self.labels.active:
            self.labels.attach()
            self.labels.step_ends(step)
            due.append(step + 1)
        if self.captures is not None:
            due.append(self._check_captures(self.captures, step, compiled=bool(flags & FLAG_COMPILED)))
        if self.layers is not None:
            busy = self.capturing or (self.captures is not None and self.captures.busy)
            compiled = self._compiled > 0
            due.append(self.layers.after_step(step, self.objects.roots, compiled=compiled, busy=busy))
        may_hide = self._compiled and self._slow_ns > COMPILATION_NS
        if not (may_hide or (self._ddp is not None and self._ddp.every_step)):
            self._attend_at = min(due)

    def _check_captures(self, captures: StepCaptures, step: int, *, compiled: bool) -> int:
        """Let captures do what is due; return the step at whose end to call this again."""
        ring = self._ring_in_memory()
        if ring is None:
            return NEVER_NS
        if step >= captures.due_at or compiled:
            self.flags |= captures.after_step(step, ring, self.identity, compiled=compiled, graph=self.capturing) or 0
        return captures.due_at

    def attend(self) -> None:
        """Run the checks at the end of the current step."""
        self._attend_at = 0

    @property
    def capturing(self) -> bool:
        """Whether the script is capturing a CUDA graph."""
        return self._captured is not None

    def _judge_length(self, step: int, flags: int) -> None:
        """Notice a step that took long, or that was skipped, and how long steps usually take."""
        now_ns = self.ledger.now()
        if flags & FLAG_SKIPPED:
            self.suspect("skipped", step)
            if self.trail is not None:
                self.trail.skip(step)
        elif now_ns - self._ended_ns >= self._slow_ns:
            if not self.flags & LONG_ANYWAY:
                self.suspect("slow", step)
            for requests in (self.captures, self._snapshots):
                if requests is not None:
                    requests.hurry()
        self._ended_ns = now_ns
        since, since_ns = self._stretch
        if self.flags & FLAG_CAPTURED:
            self._stretch = step, now_ns
        elif step - since >= SLOW_STEPS:
            self._slow_ns = SLOW_TIMES * (now_ns - since_ns) // (step - since) if since else NEVER_NS
            self._stretch = step, now_ns

    def suspect(self, why: Oddity, step: int | None = None) -> None:
        """Something odd was seen in the current step, or another: sample the next ones, if that is affordable."""
        if self.layers is not None and self.layers.suspect(self.step if step is None else step, why):
            self._attend_at = 0
        if why == "nonfinite" and self.trail is not None and self.trail.suspect(self.step):
            self._attend_at = 0

    def _write_trail(self, *, at_end: bool = False) -> None:
        """Write where the gradients of the last steps stopped being numbers, if such a value was seen."""
        if self.trail is not None and self.trail.wanted and self.layers is not None and not self.capturing:
            ring, compiled = self._ring_in_memory(), self._compiled > 0
            self.layers.write_trail(self.trail, self.objects.roots, ring, compiled=compiled, at_end=at_end)

    @guard.failsafe
    def _finish_layers(self, layers: LayerSamples, step: int, flags: int, optimizer: object) -> None:
        self.flags |= layers.finish(step, flags, self.objects.optimizers(optimizer), self._ring_in_memory())

    @property
    def has_compiled(self) -> bool:
        """Whether code was compiled in this process while it was recorded."""
        return self._compiled > 0

    def activations_of(self, tree: Any) -> tuple[int, list[int]] | None:
        return None if self.layers is None else self.layers.activations_of(tree)

    def keep_layers(self, trees: Sequence[Any], sizes: Sequence[Any]) -> None:
        """Memory has run out: write what each layer holds, like a sample of this step."""
        if self.layers is not None and self.ring is not None:
            self.layers.keep_sizes(self.step, trees, sizes, self._ring_in_memory())

    def begin(self) -> None:
        """Create the ring now unless it exists: the script itself says that it trains."""
        self.explicit = True
        if self.ledger.thread == NOBODY:
            self._start(OTHER)

    def appear(self, who: RankIdentity, *, serve: bool) -> None:
        """Become visible to the agent before the first step, which still begins with the first activity.

        ``serve``: the other ranks are there too, so the agent may ask about them.
        """
        if self._broken:
            return
        ring = self._open_ring(who) if self.ring is None else self.ring
        if ring is not None:
            self._set_identity(who)
            if serve:
                self._offer_server(ring)

    def ask_after_steps(self, search: RootSearch | None) -> None:
        """Call ``search`` after steps from now on, as often as it wants."""
        self._search = search
        self._check_at = self._attend_at = 0

    def watch_backward(self, figures: BackwardFigures) -> None:
        self._ddp = figures
        self._attend_at = 0

    def epoch_starts(self) -> None:
        self.flags |= FLAG_EPOCH_START
        self._growth.floors.epoch_begins(self.step)

    def note(self, text: bytes, *, ended: bool = False) -> None:
        """Store a note with the current step, or with the one that just ended if nothing of the next was recorded.

        ``ended``: the note is about the step that ended, whatever was recorded since, unless a model was called.
        """
        ledger = self.ledger
        if get_ident() == ledger.thread:
            # Another note right after one belongs where that one does.
            rests = self._noted[1] if ledger.written == self._noted[0] else ledger.rests
            between = self.step > 0 and not self.forward_seen and (rests or ended)
            ledger.put(*note_words(self.step - between, text))
            self._noted = ledger.written, rests
            if text.endswith(NOT_FINITE):
                self.suspect("nonfinite")

    def note_at(self, step: int, text: bytes) -> None:
        """Store a note with this step; on the training thread only."""
        self.ledger.put(*note_words(step, text))

    def set_state(self, state: RingState) -> None:
        if self.ring is not None and self.identity.pid == os.getpid():
            for end in self._ending:
                end()
            if get_ident() == self.ledger.thread:
                self._write_trail(at_end=True)
            self.ring.set_state(state)
            self._tell_last_facts(self.ring, in_order=state is RingState.EXITED)

    # -- Start ----------------------------------------------------------------------------------------------------

    @guard.failsafe
    def _start(self, phase: int) -> bool:
        """Create the ring on the first sign of training; return whether this was one.

        In a forked child only autograd or an optimizer is a sign: DataLoader workers are forked children too.
        """
        signs = (BACKWARD, OPTIMIZER) if self._forked else (BACKWARD, OPTIMIZER, INPUT)
        if self._broken or (phase not in signs and not self.explicit):
            return False
        ring = self._open_ring(identity.of_this_process()) if self.ring is None else self.ring
        if ring is None:
            return False
        ring.set_state(RingState.RUNNING)
        self.ledger.open(ring)
        self._offer_stacks(ring)
        self._compiled = _compile_count()
        return True

    def _open_ring(self, who: RankIdentity) -> RingWriter | None:
        """Create the ring and what goes with it; the agent sees this process from here on."""
        self.identity = who
        ring = self._make_ring()
        if ring is None:
            self._broken = True
            return None
        for name, slot in self._names.items():
            if slot >= FIRST_USER_SLOT:
                ring.set_phase_name(slot, name)
        guard.on_failure(self._count_failure)
        ring.header[HOOK_FAILURES_WORD] = guard.failures()
        self.ring = ring
        self._offer_stacks(ring)
        if self._known is not None:
            self._known(who)
        return ring

    def _make_ring(self) -> RingWriter | None:
        first, fallback = ring_paths(self._session, self._run_dir, os.getpid())
        try:
            return RingWriter(first, self.identity, capacity=self._capacity)
        except (RingNoSpace, OSError) as error:
            reason = error
        try:
            fallback.parent.mkdir(mode=folder_mode(self._run_dir), exist_ok=True)
            ring = RingWriter(fallback, self.identity, capacity=self._capacity)
        except (RingNoSpace, OSError) as error:
            guard.warn(f"this process is not recorded: {reason}; the fallback failed too: {error}")
            return None
        guard.warn(f"{reason}; steps are recorded on disk instead, at {fallback}")
        return ring

    def _offer_stacks(self, ring: RingWriter) -> None:
        # Only in memory: a signal handler must not wait for a disk.
        if self.stacks is not None and ring.path.parent == self._session:
            self.stacks.open(ring)

    def _ring_in_memory(self) -> RingWriter | None:
        """None also for a ring on disk: writing next to it could block."""
        return self.ring if self.ring is not None and self.ring.path.parent == self._session else None

    def _offer_server(self, ring: RingWriter) -> None:
        if self.server is not None and ring.path.parent == self._session:
            self.server.open(ring, ranks_here=identity.ranks_here(os.environ) or self.identity.world_size)

    def _take_over(self) -> bool:
        """Switch to the calling thread if it ends the first step: then it trains, not the thread seen first."""
        if self.step or self.ring is None or self.ledger.thread == NOBODY:
            return False
        self.ledger.thread = get_ident()
        self._offer_stacks(self.ring)
        return True

    def _check_surroundings(self, optimizer: object) -> None:
        """Check now and then, after a step: our rank, the device, and whether the roots are still the roots."""
        step = self.step
        due = step & (step - 1) == 0 and step >= FIRST_NEW_CHECK  # ever more rarely: 1024, 2048, 4096 …
        searching = self._search is not None and self._search.after_step(found=self.forward_seen, due=due)
        if step in IDENTITY_CHECKS:
            self._check_identity()
        if due or self._counting or step in FACT_STEPS:
            self._counting = self._check_objects(optimizer) is True
            searching = searching or self._counting
        later = [check for check in IDENTITY_CHECKS if check > step]
        self._check_at = step if searching else min([*later, max(1 << step.bit_length(), FIRST_NEW_CHECK)]) - 1

    @guard.failsafe
    def _figures(self) -> list[int]:
        """What others know about the step that ends, as data words; if they fail, the step ends without."""
        words: list[int] = []
        if self._ddp is not None:
            words += self._ddp.words()
        if self._device is not None:
            words += self._device.memory()
        return words

    def _check_identity(self) -> None:
        found = identity.of_this_process()
        if self._device is None:
            self._device = device_timer(found, self._now)
        ring = self._ring_in_memory()
        if self._snapshots is None and ring is not None and found.device == "cuda":
            self._snapshots = SnapshotRequests(sys.modules["torch"], ring.path, ring.header)
        self._set_identity(found)

    def _set_identity(self, found: RankIdentity) -> None:
        if found != self.identity and self.ring is not None:
            named, self.identity = self.identity, found
            self.ring.set_identity(found)
            if self._known is not None and (found.rank, found.attempt) != (named.rank, named.attempt):
                self._known(found)

    @guard.failsafe
    def _check_objects(self, optimizer: object) -> bool:
        if optimizer is not None:
            self.objects.meet_optimizer(optimizer)
        unfinished = self.objects.update_facts(self.step, optimizer)
        if self.ring is not None:
            self._tell_facts(self.ring)
        return unfinished

    @guard.failsafe
    def _check_requests(self, snapshots: SnapshotRequests, step: int) -> None:
        snapshots.check(step, busy=self.capturing)

    def stop_snapshots(self) -> None:
        snapshots, self._snapshots = self._snapshots, None
        if snapshots is not None:
            snapshots.stop()

    def _check_growth(self, step: int) -> None:
        self._growth.floors.world_size = self._growth.malloc_free.world_size = self.identity.world_size
        found = self._growth.check(step)
        if self._growth.counted:
            self.flags |= FLAG_SAMPLED  # the time that it took is in the step that begins
        if self._growth.jumped:
            self.suspect("memory", step)
        if found is None:
            self._growth.due_at = sys.maxsize  # it failed on the script's objects, and would fail again
        elif found and self.ring is not None:
            self.objects.facts = {**self.objects.facts, **found}
            self._tell_facts(self.ring)

    @guard.failsafe
    def _tell_last_facts(self, ring: RingWriter, *, in_order: bool) -> None:
        self.objects.update_at_end(self.step, in_order=in_order)
        self._tell_facts(ring)

    def _tell_facts(self, ring: RingWriter) -> None:
        if self.objects.facts != self._published_facts:
            self._published_facts = self.objects.facts
            ring.set_facts(self._published_facts)

    def _count_failure(self, count: int) -> None:
        if self.ring is not None:
            self.ring.header[HOOK_FAILURES_WORD] = count
        if count >= MAX_FAILURES and not self._broken:
            guard.warn("too many internal failures: recording of this process has stopped")
            self._broken = True
            self.ledger.close()

    def _compile_flag(self) -> int:
        count = _compile_count()
        if count == self._compiled:
            return 0
        self._compiled = count
        return FLAG_COMPILED


def _compile_count() -> int:
    """Number of graphs that dynamo has compiled so far; 0 while it is not used."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(module, "counters", None)
    return counters["stats"]["unique_graphs"] if counters else 0
