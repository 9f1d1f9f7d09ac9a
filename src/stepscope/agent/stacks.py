"""Stacks of the ranks: requested by signal when that is safe, and sampled to show where a rank spends its time.

Which stacks can be requested depends on what the process is doing (``recorder/stacks.py`` says why):

    no thread can run Python: the GIL is held, or all threads wait      the stacks of all threads
    the main thread waits, another thread is working                    the main thread's stack
    the main thread runs, or another thread trains                      the training thread's, by a Python handler
    the process is stopped                                              nothing

faulthandler answers the first two. It is C code and needs no GIL. The condition that allows it is checked again right
before the signal: a main thread that resumes just then would be between two frames when the signal arrives. The other
checks are also repeated for each request (see "Signals" below).

Whichever thread gets the signal for all threads writes all stacks. While the main thread waits, the signal goes to a
thread that only waits for a lock, so that it interrupts nothing in the main thread. A native sleep, which a signal
would end, is never interrupted.

A forked child (a DataLoader worker) inherits its parent's handler and writes to its parent's file: processes that share
a file must be asked one after the other.

Why not py-spy or ``process_vm_readv`` in general: they need a debugger's rights and knowledge of the interpreter's
internals. (py-spy is tried for ranks that do not answer.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from stepscope.agent.procfs import PROC, child_kind, descendants, read_process
from stepscope.flight.stacks import parse_frame
from stepscope.records import run_clock
from stepscope.records.files import open_file
from stepscope.records.paths import STACKS_SUFFIX, THREADS_SUFFIX, WORKERS_SUFFIX
from stepscope.records.steps import BACKWARD, BUILTIN_PHASES, CHECKPOINT, EVAL, FORWARD, INPUT, OPTIMIZER, OTHER
from stepscope.ring import RingReader, RingState
from stepscope.ring.reader import LivePhase

__all__ = [
    "MAX_QUESTIONS",
    "ROUND",
    "STOPPED",
    "STRETCH_NS",
    "SamplingPace",
    "StackOffers",
    "StackSampler",
    "StacksQuestion",
    "ThreadActivity",
    "WorkerSampler",
    "ask_stacks",
    "parse_stack",
    "sleeps_in_native_code",
    "waits_on",
    "watch_threads",
]


# -- Thread activity --------------------------------------------------------------------------------------------------
# Which threads of a process wait in the kernel and which run decides which stacks may be requested. faulthandler reads
# the frames of threads from memory, and a thread that runs Python may be between two frames (``recorder/stacks.py``),
# so it must not be used while one runs. A waiting thread may resume at any moment, so this is checked again right
# before the signal.

WATCH_S = 0.1
BUSY_TICKS = 2
"""CPU ticks of 10 ms each within ``WATCH_S``. A thread that only polls occasionally is not busy."""
WAITING = ("S", "D")
RUNS = "R"


@dataclass(frozen=True, kw_only=True)
class ThreadActivity:
    state: str
    """The kernel's state letter for the main thread."""
    waits: bool
    """The main thread waits in the kernel and waited the whole time."""
    switches: str
    """The number of voluntary context switches so far."""
    others_run: bool
    """Another thread is working and may run Python."""


@dataclass(frozen=True, kw_only=True)
class _ThreadReading:
    state: str
    switches: str
    """The main thread's voluntary context switches so far."""
    ticks: dict[int, int]
    """CPU time so far of the other threads without a name. torch, NCCL and gloo name theirs."""
    others_run: bool
    """One of them is running or runnable."""


def watch_threads(pids: Iterable[int], proc: Path = PROC) -> dict[int, ThreadActivity]:
    """Return the activity of those processes that exist. Takes a tenth of a second for any number of them."""
    first = {pid: threads for pid in pids if (threads := _read_threads(proc / str(pid))) is not None}
    time.sleep(WATCH_S)
    found = {}
    for pid, before in first.items():
        now = _read_threads(proc / str(pid))
        if now is None:
            continue
        waits = before.state in WAITING and now.state in WAITING and before.switches == now.switches
        busy = any(ticks - before.ticks.get(thread, ticks) >= BUSY_TICKS for thread, ticks in now.ticks.items())
        others_run = busy or before.others_run or now.others_run
        found[pid] = ThreadActivity(state=now.state, waits=waits, switches=now.switches, others_run=others_run)
    return found


def waits_on(process: Path, posture: ThreadActivity, *, all_threads: bool) -> bool:
    """Return whether the main thread is still in the same wait and, with ``all_threads``, no other thread runs.

    ``process`` is its folder in ``/proc``.
    """
    if all_threads and ((now := _read_threads(process)) is None or now.others_run):
        return False
    try:
        state, switches, _ = _main_thread(process)
    except OSError:
        return False
    return posture.waits and state in WAITING and switches == posture.switches


def _main_thread(process: Path) -> tuple[str, str, str]:
    """Return its state, its voluntary context switches so far, and its name."""
    lines = (process / "status").read_text(errors="replace").splitlines()
    fields = dict(line.partition(":\t")[::2] for line in lines)
    return fields.get("State", "")[:1], fields.get("voluntary_ctxt_switches", ""), fields.get("Name", "")


def _read_threads(process: Path) -> _ThreadReading | None:
    try:
        state, switches, name = _main_thread(process)
        threads = os.listdir(process / "task")  # noqa: PTH208 - names, quickly
    except OSError:
        return None
    ticks, others_run = {}, False
    for thread in threads:
        try:
            stat = (process / "task" / thread / "stat").read_text(errors="replace")
        except OSError:
            continue  # it just ended
        before, _, rest = stat.rpartition(")")
        spent = rest.split()
        if thread != process.name and before.partition("(")[2] == name and len(spent) > 12:
            ticks[int(thread)] = int(spent[11]) + int(spent[12])
            others_run = others_run or spent[0] == RUNS
    return _ThreadReading(state=state, switches=switches, ticks=ticks, others_run=others_run)


# -- Signals ----------------------------------------------------------------------------------------------------------
# Whether a process can be asked to write its stack by a signal that it offered, according to the kernel.
#
# An uncaught signal would end the process, so a ring header alone never justifies sending one. A caught signal ends a
# native sleep early. Python's own sleep resumes, but ``sleep(3)`` does not: such a thread is never signaled. Another
# thread gets the signal if any will do.

SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}
"""Numbers of the system calls nanosleep and clock_nanosleep."""
SERVER_THREAD = "pt_workerserver"
"""The worker server's threads do nothing else, so they are preferred."""


def listens(process: Path, number: int, fd: int, answers: Path) -> bool:
    """Return whether the main thread catches the signal, has none pending, and its descriptor is the file ``answers``.

    ``process`` is its folder in ``/proc``. Raise OSError if it is gone, ValueError if its files make no sense.
    """
    masks = _masks(process)
    if number < signal.SIGRTMIN or not all(name in masks for name in ("SigCgt", "SigBlk", "SigPnd", "ShdPnd")):
        return False
    bit = 1 << (number - 1)
    if not masks["SigCgt"] & bit or (masks["SigBlk"] | masks["SigPnd"] | masks["ShdPnd"]) & bit:
        return False
    theirs, ours = (process / "fd" / str(fd)).stat(), answers.stat()
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def awaits_delivery(process: Path, number: int) -> bool:
    """Return whether a signal that was sent is still pending."""
    try:
        masks = _masks(process)
    except (OSError, ValueError):
        return False
    return bool((masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)) >> (number - 1) & 1)


def sleeps_in_native_code(process: Path) -> bool:
    """Return whether the main thread is in a sleep that a signal would end; False if the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        words = (process / "syscall").read_text().split()
        plain, by_clock = SLEEPS.get(platform.machine(), (-1, -1))
        # Python sleeps until an absolute time (flag 1) or, before 3.11, in select; both resume after a signal.
        return words[0] == str(plain) or (words[0] == str(by_clock) and int(words[2], 16) == 0)
    return False


def waiting_thread(process: Path, number: int) -> int | None:
    """Return a thread other than the main one that waits for a lock and accepts the signal, which will not disturb it.

    None if there is no such thread, or the kernel does not say what threads wait for.
    """
    found: int | None = None
    try:
        threads = sorted(int(name) for name in os.listdir(process / "task"))  # noqa: PTH208 - names, quickly
    except OSError:
        return None
    for thread in threads:
        folder = process / "task" / str(thread)
        with suppress(OSError, ValueError):
            if str(thread) == process.name or "futex" not in (folder / "wchan").read_text():
                continue
            if _masks(folder).get("SigBlk", -1) >> (number - 1) & 1:
                continue
            if (folder / "comm").read_text().strip() == SERVER_THREAD:
                return thread
            found = found or thread
    return found


def send_to_thread(pid: int, thread: int, number: int) -> bool:
    """Send a signal to a thread of that process; return whether it was sent."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    return tgkill is not None and tgkill(pid, thread, number) == 0


def _masks(process: Path) -> dict[str, int]:
    lines = (line.partition(":\t") for line in (process / "status").read_text(errors="replace").splitlines())
    return {name: int(mask, 16) for name, _, mask in lines if name[:3] in ("Sig", "Shd") and name != "SigQ"}


# -- Stack requests ---------------------------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)
SignalOffer = tuple[int, int]
"""A signal and the descriptor that its handler writes to."""

POLL_S = 0.01
CALM_POLLS = 4
"""An answer that has not grown for this many looks is complete."""
MAX_BYTES = 1 << 20
STOPPED = ("T", "t", "Z", "X", "")


@dataclass(frozen=True, kw_only=True)
class StackOffers:
    """What a process offers; None for what it does not."""

    ring: Path
    """The files that it writes are next to its ring."""
    threads: SignalOffer | None = None
    stacks: SignalOffer | None = None
    running: SignalOffer | None = None
    trains: int = 0
    """The number of the training thread; 0 for the main one."""


@dataclass(frozen=True, kw_only=True)
class StacksQuestion:
    """The process to ask."""

    pid: int
    pidfd: int
    offers: StackOffers
    gil_held: Callable[[], bool] = lambda: False
    """Returns whether the GIL is held right now. If so, no thread runs Python."""


class _StackAnswer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._calm = 0

    def whole(self) -> bool:
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        self._calm = self._calm + 1 if size and size == self._size else 0
        self._size = size
        return self._calm >= CALM_POLLS

    def text(self) -> str:
        """Return the complete lines of what was written."""
        try:
            with open_file(self._path) as file:
                written = file.read(MAX_BYTES)
        except OSError:
            return ""
        return written[: written.rfind(b"\n") + 1].decode(errors="replace")


def ask_stacks(questions: Mapping[Key, StacksQuestion], *, patience_s: float, proc: Path = PROC) -> dict[Key, str]:
    """Ask all processes at once, then wait. Return what was written by those that answered in time.

    No two questions may share a file.
    """
    found = watch_threads((question.pid for question in questions.values()), proc)
    answers = {}
    for key, question in questions.items():
        posture = found.get(question.pid)
        if posture is not None and (path := _ask(question, posture, proc / str(question.pid))) is not None:
            answers[key] = _StackAnswer(path)
    waiting = dict(answers)
    deadline = time.monotonic() + patience_s
    while waiting and time.monotonic() < deadline:
        time.sleep(POLL_S)
        waiting = {key: answer for key, answer in waiting.items() if not answer.whole()}
    return {key: text for key, answer in answers.items() if (text := answer.text())}


def _ask(question: StacksQuestion, posture: ThreadActivity, process: Path) -> Path | None:
    """Ask a process if possible; return the file that it will write."""
    if posture.state in STOPPED:
        return None
    offers = question.offers
    quiet = posture.waits and not posture.others_run
    gil_held = not quiet and offers.threads is not None and question.gil_held()
    any_thread = (quiet or gil_held) and offers.threads is not None
    offer = (offers.stacks if posture.waits else None) or offers.running
    if any_thread:
        offer = offers.threads
    path = offers.ring.with_suffix(THREADS_SUFFIX if any_thread else STACKS_SUFFIX)
    if offer is None:
        return None

    def unchanged() -> bool:
        if gil_held:
            return question.gil_held()
        return offer is offers.running or waits_on(process, posture, all_threads=any_thread)

    try:
        return path if _send(question, offer, path, process, any_thread=any_thread, unchanged=unchanged) else None
    except (OSError, ValueError):
        return None  # it just ended, or its offer is not a valid signal


def _send(
    question: StacksQuestion,
    offer: SignalOffer,
    path: Path,
    process: Path,
    *,
    any_thread: bool,
    unchanged: Callable[[], bool],
) -> bool:
    number, fd = offer
    if not listens(process, number, fd, path):
        return False
    thread = waiting_thread(process, number) if any_thread else None
    if thread is None and sleeps_in_native_code(process):
        return False
    os.truncate(path, 0)
    if not unchanged():
        return False
    if thread is None or not send_to_thread(question.pid, thread, number):
        signal.pidfd_send_signal(question.pidfd, number)
    return True


# -- Stack sampler ----------------------------------------------------------------------------------------------------
# Samples a rank's stack by a signal that it offered, to show on which lines it spends its time.
#
# A rank is sampled during a phase that took a good part of its last steps, or during a long stretch outside all phases,
# in an evaluation or in a checkpoint. It is never sampled while it waits for peers or copies to the device. Phases take
# turns: next are those with fewer questions than their share of the time. Five looks a second rarely hit a callback of
# 20 ms per step, so the rank is looked at more often for a moment when a question is due. A phase that is found that
# way has just begun, and its first lines would get all questions; so the question waits for a part of the phase's usual
# length, another one each time. Phases of every step (input, forward, backward, optimizer) get a few questions, and a
# few more when they take notably longer than before; the rest are kept for what comes later. An evaluation or a
# checkpoint may come every hundredth step and take half a second, so the first few long stops of each kind get one
# question each as soon as they are seen, whether a question is due or not.
#
# Some questions are kept for a change: a rank that becomes slow after an hour must have its line in the first message
# about it. When a phase takes notably longer per step than before, at two looks in a row, it gets a round of questions
# in quick succession.
#
# The rank answers through a Python handler, into a file next to its ring. It never uses faulthandler's handler, because
# a thread that waits now may run when the signal arrives, and be between two frames (``recorder/stacks.py``); the
# interpreter runs a Python handler only where that is safe. A thread that waits in native code answers when it returns,
# at the line of that call and before it can enter a phase. So an answer counts, however late it is read, if the stretch
# was not over when the signal had been sent. If another thread than the main one trains, the main thread writes that
# thread's stack when it gets to it, with the time: the stack then belongs to the phase that the ring shows for that
# time.
#
# Before each question, the kernel must confirm that the process catches the signal in its main thread, that its
# descriptor is still that file, and that the thread is not in a native sleep, which a signal would end. The signal goes
# through the pidfd, so it cannot reach another process.

STOPS = (OTHER, EVAL, CHECKPOINT)
"""Phases that may be rare and long, so that a single long stretch is worth a question."""
STRETCH_NS = 15_000_000
"""How long such a stretch must have lasted."""
LONG_NS = 50_000_000
"""After this long, ask immediately."""
AT_ONCE = 8
"""How many immediate questions per phase. Each step gets at most one."""
ORDINARY = (INPUT, FORWARD, BACKWARD, OPTIMIZER)
"""Phases of every step."""
ROUND = 6
"""How many questions each of them gets in one round."""
RISE, MORE = 1.5, 0.05
"""A new round starts when the phase's share has grown to ``RISE`` times its last value and by at least ``MORE``."""
RESERVED_QUESTIONS = 16
"""How many questions are reserved for other phases."""
CHANGE_QUESTIONS = 2 * ROUND
"""How many of these are reserved for phases that become longer per step …"""
CHANGE_SHARE = 0.15
"""… by ``RISE`` and by this share of the step: on a busy machine smaller changes come and go."""
WORTH_SHARE = 0.03
"""The share of the last steps' time that makes a phase worth a question."""
SEEK_S = 0.005
"""Interval between looks at such a rank until it is found in that phase."""
SEEK_POLLS = 60
"""How many such looks. Then another phase gets its turn when the next question is due."""
SPREAD_AT_MOST_NS = int(SEEK_POLLS * SEEK_S * 1e9)
"""The longest that a question waits in a phase that has just begun."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, without their whole part, are spread evenly over a phase, however many questions there are."""
FIRST_QUESTIONS = 20
"""How many questions use the short pause, once the rank makes steps: a short run may have time for no others."""
MAX_QUESTIONS = 40
"""Per rank and run: enough to tell one pattern from three, and soon used up in a script that is all ``other``."""
BRIEF_S = 0.001
SOON_POLLS = 20
"""The main thread needs a few hundredths of a second to dump another thread: this many looks, ``SEEK_S`` apart."""
MAX_STACKS_BYTES = 1 << 17
MAX_FRAMES = 50

_HEAD = "Stack (most recent call first):"
_READ = re.compile(r"  read ([0-9]{1,19}) ([0-9]{1,19})")
_CUT = "  ..."
_OUR_HOOKS = "/stepscope/recorder/"
_OUTERMOST = ("<module>", "_run_module_as_main")


@dataclass(frozen=True, kw_only=True)
class SamplingPace:
    """How long to pause between questions and to wait for answers."""

    pause_s: float = 2.0
    """Between two questions to the same rank."""
    first_pause_s: float = 0.25
    """The same for the first questions (``FIRST_QUESTIONS``)."""
    brief_polls: int = 6
    """An answer usually comes immediately, so wait this often for ``BRIEF_S``; otherwise check at the next look."""
    patience_s: float = 2.0
    """Do not ask a rank again that took the signal but has not answered this long after the stretch was over."""
    worker_patience_s: float = 2.0
    """A worker in native code answers when it returns from there; after this long the rank's own stack is recorded."""


PACE = SamplingPace()


@dataclass(frozen=True, kw_only=True)
class _Question:
    live: LivePhase
    between: bool
    """Whether the question was asked between two steps."""
    wall_ns: int
    sent_ns: int
    """Time on the ring's clock after the signal had been sent."""
    signal: int


@dataclass(kw_only=True)
class _Round:
    """A few questions about a phase that every step has."""

    share: float
    """The phase's share when the round began."""
    sampled: int = 0


class StackSampler:
    """Samples the stacks of one rank. Call ``look`` whenever its ring is checked."""

    def __init__(
        self,
        reader: RingReader,
        pid: int,
        *,
        sampled: int = 0,
        proc: Path = PROC,
        pace: SamplingPace = PACE,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._pace = pace
        self._now_ns = now_ns
        """The ring's clock."""
        self._reader = reader
        self._pid = pid
        self._proc = proc / str(pid)
        self._path = reader.path.with_suffix(STACKS_SUFFIX)
        self._left = MAX_QUESTIONS - sampled
        self._workers = WorkerSampler(reader, pid, proc, pace)
        self._paused_s = float("-inf")
        self._polls_left: int | None = None
        """Looks left at a rank that is worth a question, while one is due; None if that is not known."""
        self._wanted: tuple[int, ...] = ()
        """The phases whose turn it is."""
        self._sought_s = 0.0
        """Until when they are sought: on a busy machine a look takes longer than it should."""
        self._found_ns = 0
        """The start of the stretch that was found by seeking …"""
        self._wait_ns = 0
        """… how long after that to ask; 0: at once …"""
        self._found = 0
        """… how many were found so far …"""
        self._ended_early = 0
        """… and how many of them ended before that moment, since the last question."""
        self._sampled: Counter[int] = Counter()
        """Questions by phase."""
        self._missed: Counter[int] = Counter()
        """How often a phase was sought and missed since the last question."""
        self._rounds: dict[int, _Round] = {}
        self._levels: tuple[float, ...] = ()
        """How long each phase took in a step when that was last noted, in ns."""
        self._grown: tuple[int, ...] = ()
        """The phases that took notably longer at the last look."""
        self._change: dict[int, int] = {}
        """By phase that became longer: questions left about it."""
        self._stops: dict[int, set[int]] = {phase: set() for phase in STOPS}
        """Steps in which a phase was asked about immediately."""
        self._question: _Question | None = None
        self._over_s: float | None = None
        """When the stretch of the question was first found to be over."""
        self._seen = b""
        self._soon_left = 0

    @property
    def pending(self) -> bool:
        """Whether a question has not been answered yet."""
        return self._question is not None

    @property
    def seeks(self) -> bool:
        """Whether to look again in ``SEEK_S``: a phase has its turn, and the rank was not in it.

        Or a thread other than the main one trains, and the answer has not arrived yet.
        """
        return bool(self._polls_left) if self._question is None else self._soon_left > 0

    def sample(self, pidfd: int | None) -> dict[str, Any] | None:
        """Return a new stack if there is one, without the rank's number, which the caller knows."""
        if pidfd is None:
            return None
        if self._workers.pending:
            return self._workers.collect()
        stack = self._own_stack(pidfd)
        return self._workers.request(stack) if stack is not None and waits_for_workers(stack) else stack

    def _own_stack(self, pidfd: int) -> dict[str, Any] | None:
        if self._question is None:
            if not self._ask(pidfd):
                return None
            for _ in range(self._pace.brief_polls):
                time.sleep(BRIEF_S)
                if (answer := self._answer(at_once=True)) is not None or self._question is None:
                    return answer
            return None
        self._soon_left -= 1
        return self._answer(at_once=False)

    def _ask(self, pidfd: int) -> bool:
        """Ask the rank if a question is due and the rank listens; return whether it was asked."""
        if self._reader.running_offer() is None or self._left <= 0 or self._reader.state() is not RingState.RUNNING:
            self._polls_left = None
            return False
        live = self._reader.live()
        if self._stops_long(live):
            self._stops[live.phase].add(live.step)
        elif not self._is_due(live):
            self._polls_left = None
            return False
        elif not self._is_worth_it(live):
            return False
        between = self._reader.is_between_steps(live.since_ns)
        self._pause()
        try:
            offer = self._reader.running_offer()
            if offer is None or not self._listens(*offer) or sleeps_in_native_code(self._proc):
                return False
            os.truncate(self._path, 0)
            signal.pidfd_send_signal(pidfd, offer[0])
        except (OSError, ValueError):
            return False  # it just ended, or its offer is not a valid signal
        self._note_question(live.phase)
        self._seen, self._over_s = b"", None
        self._soon_left = SOON_POLLS if self._reader.training_thread() else 0
        sent_ns = self._now_ns()
        self._question = _Question(
            live=live, between=between, wall_ns=run_clock.wall_ns(), sent_ns=sent_ns, signal=offer[0]
        )
        return True

    def _note_question(self, phase: int) -> None:
        self._left -= 1
        self._sampled[phase] += 1
        self._missed.clear()
        self._found_ns = self._ended_early = 0
        if phase in self._change:
            self._count_down((phase,))
        elif phase in self._rounds:
            self._rounds[phase].sampled += 1

    def _move_question(self, wanted: int, answered: int) -> None:
        """Count a question for the phase that the answer is about instead."""
        self._sampled[wanted] -= 1
        self._sampled[answered] += 1
        for phase, more in ((wanted, -1), (answered, 1)):
            if phase in self._rounds:
                self._rounds[phase].sampled += more

    def _is_worth_it(self, live: LivePhase) -> bool:
        """Return whether the rank is in a phase whose turn it is."""
        if self._polls_left is None:
            self._watch_changes(self._reader.latest_phase_ns())
            self._wanted = tuple(self._change) or self._whose_turn(self._reader.recent_shares())
            self._polls_left = SEEK_POLLS if self._wanted else 0
            self._sought_s = time.monotonic() + SEEK_POLLS * SEEK_S
        if live.since_ns > 0 and (live.phase in self._wanted or self._is_long_stop(live)):
            return live.phase not in ORDINARY or self._polls_left == SEEK_POLLS or self._is_moment(live)
        if not self._polls_left:
            self._polls_left = None  # by the next look its recent steps may differ
            if self._left <= CHANGE_QUESTIONS:
                self._pause()
            return False
        self._polls_left -= 1
        if not self._polls_left or time.monotonic() > self._sought_s:
            self._missed.update(self._wanted)
            self._count_down(self._wanted)  # it may be over
            self._pause()
        return False

    def _is_moment(self, live: LivePhase) -> bool:
        """Return whether to ask now in a phase that was found by seeking: not always at its start."""
        if live.since_ns != self._found_ns:
            self._ended_early += self._found_ns > 0
            self._found_ns = live.since_ns
            self._found += 1
            took_ns = self._reader.latest_phase_ns()
            usual_ns = took_ns[live.phase] if took_ns else 0.0
            # A phase may come in several stretches per step: each that was missed halves the wait.
            spread_ns = min(usual_ns, SPREAD_AT_MOST_NS) / 2**self._ended_early
            self._wait_ns = int(self._found * GOLDEN % 1.0 * spread_ns) if spread_ns > SEEK_S * 1e9 else 0
        return not self._wait_ns or self._now_ns() >= live.since_ns + self._wait_ns

    def _stops_long(self, live: LivePhase) -> bool:
        """Return whether it is in a long stop that was not asked about yet and is one of the first few."""
        steps = self._stops.get(live.phase)
        if steps is None or not live.step or live.step in steps or len(steps) >= AT_ONCE:
            return False
        return 0 < live.since_ns <= self._now_ns() - LONG_NS

    def _is_long_stop(self, live: LivePhase) -> bool:
        """Return whether it is in a long stretch of a phase that is not in every step, and others had their turns."""
        if live.phase not in STOPS or live.since_ns > self._now_ns() - STRETCH_NS or self._left <= CHANGE_QUESTIONS:
            return False
        return all(self._sampled[live.phase] <= self._sampled[phase] + self._missed[phase] for phase in self._wanted)

    def _whose_turn(self, shares: Sequence[float]) -> tuple[int, ...]:
        """Return the phases with a good part of the last steps' time that had fewer questions than their share."""
        if self._left <= CHANGE_QUESTIONS:
            return ()
        worth = [phase for phase in (*STOPS, *ORDINARY) if shares[phase] >= WORTH_SHARE]
        worth = [phase for phase in worth if phase in STOPS or self._has_questions(phase, shares[phase])]
        turns = {phase: self._sampled[phase] + self._missed[phase] for phase in worth}
        next_turn, total = 1 + sum(turns.values()), sum(shares[phase] for phase in worth)
        return tuple(phase for phase in worth if turns[phase] * total < next_turn * shares[phase])

    def _has_questions(self, phase: int, share: float) -> bool:
        """Return whether any questions are left for a phase of every step."""
        last = self._rounds.get(phase)
        if last is None or (share >= RISE * last.share and share >= last.share + MORE):
            last = self._rounds[phase] = _Round(share=share)
        return last.sampled < ROUND and self._left > RESERVED_QUESTIONS

    def _watch_changes(self, took_ns: Sequence[float]) -> None:
        """Begin a round of questions about phases that take notably longer per step than before."""
        if not took_ns or not self._levels:
            self._levels = tuple(took_ns)
            return
        more_ns = CHANGE_SHARE * sum(took_ns)
        levels = list(self._levels)
        grown = []
        for phase in (OTHER, *ORDINARY):
            if took_ns[phase] >= max(RISE * levels[phase], levels[phase] + more_ns):
                grown.append(phase)
            elif RISE * took_ns[phase] <= levels[phase]:
                levels[phase] = took_ns[phase]
        for phase in grown:
            if phase in self._grown:
                self._change[phase] = ROUND
                levels[phase] = took_ns[phase]
        self._grown, self._levels = tuple(grown), tuple(levels)

    def _count_down(self, phases: Sequence[int]) -> None:
        self._change = {phase: left - (phase in phases) for phase, left in self._change.items()}
        self._change = {phase: left for phase, left in self._change.items() if left > 0}

    def _pause(self) -> None:
        """Ask nothing until the next question is due."""
        self._paused_s = time.monotonic()
        self._polls_left = None

    def _is_due(self, live: LivePhase) -> bool:
        """Return whether the pause is over. It is shorter once the rank makes steps."""
        early = live.step > 0 and (self._left > MAX_QUESTIONS - FIRST_QUESTIONS or bool(self._change))
        pause_s = min(self._pace.pause_s, self._pace.first_pause_s) if early else self._pace.pause_s
        return time.monotonic() >= self._paused_s + pause_s

    def _listens(self, number: int, fd: int) -> bool:
        return listens(self._proc, number, fd, self._path)

    def _answer(self, *, at_once: bool) -> dict[str, Any] | None:
        """Return the answer once it is complete: unchanged between two looks, and ending like a main thread's stack."""
        question = self._question
        if question is None:
            return None
        over = self._reader.live() != question.live  # check first, so that earlier output is read below
        written = self._read()
        whole = bool(written) and written == self._seen
        self._seen = written
        if not whole:
            if over and not written:
                self._give_up(question)
            return None
        text, read = _when_read(written.decode(errors="replace"))
        frames = parse_stack(text)
        if at_once and (not frames or (read is None and frames[-1]["function"] not in _OUTERMOST)):
            return None
        self._question = None
        if not frames or _OUR_HOOKS in frames[0]["file"]:  # our own work says nothing about the script
            return None
        live, between = question.live, question.between
        if read is not None:
            found = self._reader.stretch_at(*read)
            if found is None or found[0].phase not in (*STOPS, *ORDINARY):
                return None
            live, between = found
            self._move_question(question.live.phase, live.phase)
        elif over and not self._lasted(question):
            return None
        about: dict[str, Any] = {"pid": self._pid, "wall_ns": question.wall_ns, "step": live.step}
        about |= {"phase": BUILTIN_PHASES[live.phase], "between": between}
        return {**about, "frames": frames[:MAX_FRAMES]}

    def _lasted(self, question: _Question) -> bool:
        """Return whether the stretch was still in progress when the signal had been sent."""
        end_ns = self._reader.stretch_end_ns(question.live.since_ns)
        return end_ns is not None and end_ns > question.sent_ns

    def _read(self) -> bytes:
        try:
            with open_file(self._path) as file:
                return file.read(MAX_STACKS_BYTES)
        except OSError:
            return b""

    def _give_up(self, question: _Question) -> None:
        """Handle a changed phase without an answer: keep waiting if the signal is pending, else stop asking this rank.

        Within phases, other threads also write to the ring (backward on a device) while the main thread waits. It
        answers when it resumes; until then it gets no other question.
        """
        if question.live.phase not in STOPS:
            return
        now_s = time.monotonic()
        self._over_s = now_s if self._over_s is None else self._over_s
        if now_s - self._over_s >= self._pace.patience_s and not awaits_delivery(self._proc, question.signal):
            self._question, self._left = None, 0


def _when_read(text: str) -> tuple[str, tuple[int, int] | None]:
    """Split off the last line if it says from when to when another thread's stack was read."""
    above, _, last = text.removesuffix("\n").rpartition("\n")
    found = _READ.fullmatch(last) if text.endswith("\n") else None
    return (f"{above}\n", (int(found[1]), int(found[2]))) if found else (text, None)


# -- DataLoader workers -----------------------------------------------------------------------------------------------
# A rank that waits for its DataLoader workers says nothing about the line that makes it wait. So when a sampled stack
# shows that it waits for them, one of its workers is asked, and what that worker does is recorded in place of the wait.
# Workers are therefore sampled as rarely as their rank, and never in a run whose ranks do not wait for input.
#
# Only a worker that was forked from the rank can answer: it inherits the rank's handler and descriptor. All workers of
# a rank write to one file, so they are asked one at a time. The same checks as for ranks are made before each
# signal; a child that exec'd, set its own handlers or was not forked as a worker does not pass them.

WORKER_TRIES = 4
"""How many workers are asked in a row: some of them may be waiting for work themselves."""
WAITS_FOR_WORKERS = ("_try_get_data", "_get_data")
"""Functions of torch's DataLoader in which a rank waits for its workers."""
WORKER_LOOP = "_worker_loop"
"""The outermost function of a worker; beyond it are the frames that were inherited from the rank."""
FETCH_FILE = "/_utils/fetch.py"
"""torch's file in which a worker that has work calls the dataset."""


def waits_for_workers(stack: Mapping[str, Any]) -> bool:
    """Return whether a sampled stack of a rank shows that it waits for its DataLoader workers."""
    if stack["phase"] != BUILTIN_PHASES[INPUT]:
        return False
    return any(frame["function"].rpartition(".")[2] in WAITS_FOR_WORKERS for frame in stack["frames"])


class WorkerSampler:
    """Asks the DataLoader workers of one rank for their stacks, one at a time."""

    def __init__(self, reader: RingReader, pid: int, proc: Path = PROC, pace: SamplingPace = PACE) -> None:
        self._pace = pace
        self._reader = reader
        self._rank_pid = pid
        self._proc = proc
        self._path = reader.path.with_suffix(WORKERS_SUFFIX)
        self._last_pid = 0
        """The worker that was asked last; the next one has its turn."""
        self._waiting: dict[str, Any] | None = None
        """The rank's stack, while a worker has not answered."""
        self._deadline_s = 0.0

    @property
    def pending(self) -> bool:
        return self._waiting is not None

    def request(self, stack: dict[str, Any]) -> dict[str, Any] | None:
        """Return a worker's stack in place of the rank's; the rank's if no worker is at work; None: not known yet."""
        for pid in self._next_workers():
            if not self._send(pid):
                continue
            self._last_pid = pid
            frames = self._wait()
            if frames is None:
                self._waiting, self._deadline_s = stack, time.monotonic() + self._pace.worker_patience_s
                return None
            if found := _work_frames(frames):
                return _of_worker(stack, found)
        return stack

    def collect(self) -> dict[str, Any] | None:
        """Return what ``request`` could not return yet; None while the worker has not answered."""
        stack = self._waiting
        if stack is None:
            return None
        frames = self._read()
        if frames is None and time.monotonic() < self._deadline_s:
            return None
        self._waiting = None
        found = _work_frames(frames or [])
        return _of_worker(stack, found) if found else stack

    def _next_workers(self) -> list[int]:
        """Return the workers whose turn it is."""
        if self._reader.worker_offer() is None:
            return []
        children = descendants([self._rank_pid])[self._rank_pid]
        workers = [pid for pid in children if child_kind(pid, self._rank_pid) == "dataloader"]
        later = [pid for pid in workers if pid > self._last_pid]
        return [*later, *(pid for pid in workers if pid <= self._last_pid)][:WORKER_TRIES]

    def _send(self, pid: int) -> bool:
        """Ask a worker if the kernel confirms that it can answer; return whether it was asked."""
        process, offer = self._proc / str(pid), self._reader.worker_offer()
        if offer is None:
            return False
        try:
            pidfd = os.pidfd_open(pid)  # before the checks: the signal reaches the process that passed them, or none
        except (OSError, AttributeError):
            return False
        try:
            reading = read_process(pid)
            if reading is None or reading.parent != self._rank_pid or reading.state in STOPPED:
                return False
            os.truncate(self._path, 0)
            if not listens(process, *offer, self._path) or sleeps_in_native_code(process):
                return False
            signal.pidfd_send_signal(pidfd, offer[0])
        except (OSError, ValueError):
            return False  # it just ended, or the offer is not a valid signal
        finally:
            os.close(pidfd)
        return True

    def _wait(self) -> list[dict[str, Any]] | None:
        """Return the answer if it comes at once."""
        for _ in range(self._pace.brief_polls):
            time.sleep(BRIEF_S)
            if (frames := self._read()) is not None:
                return frames
        return None

    def _read(self) -> list[dict[str, Any]] | None:
        """Return the frames of the last answer, or None. An answer is written in one piece."""
        try:
            with open_file(self._path) as file:
                written = file.read(MAX_STACKS_BYTES).decode(errors="replace")
        except OSError:
            return None
        return parse_stack(_HEAD + written.rpartition(_HEAD)[2]) or None


def _work_frames(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a worker's own frames, innermost first; empty if it was not at work."""
    outermost = next((at for at, frame in enumerate(frames) if frame["function"] == WORKER_LOOP), 0)
    own = frames[:outermost]
    return own if any(frame["file"].endswith(FETCH_FILE) for frame in own) else []


def _of_worker(stack: Mapping[str, Any], frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {**stack, "worker": True, "frames": frames[:MAX_FRAMES]}


def parse_stack(text: str) -> list[dict[str, Any]]:
    """Return the frames that faulthandler wrote, innermost first; none if any line has another format."""
    lines = text.split("\n")
    if len(lines) < 3 or lines[0] != _HEAD or lines[-1]:
        return []
    frames = lines[1:-1]
    if frames[-1] == _CUT:
        frames.pop()
    found = [parse_frame(line) for line in frames]
    return [] if None in found else [asdict(frame) for frame in found if frame]
