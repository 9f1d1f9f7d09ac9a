"""Stacks of the ranks: asked for by signal, sampled now and then, told apart by thread.

Requests stacks from stalled processes by signal: when that is safe, and which thread receives it.

Stacks of processes that stand still, by the signals that they offered.

Who can be asked for what (``recorder/stacks.py`` says why):

    nobody in there can run Python: its GIL is held, or all wait        the stacks of all threads
    the main thread waits, another is at work                           the main thread's stack
    the main thread runs, or it is another that trains                  that one's, by a handler in Python
    it is stopped                                                       nothing

The first two are answered by faulthandler, which is C code and needs no GIL.  What allows it is looked at once more as
the very last thing before the signal: a main thread that goes on just then would be between two frames when it comes.
The checks of single stacks (``agent/stacks.py``) hold here too and are made anew for each question.

Whichever thread gets the signal for all threads shows them all.  While the main thread waits, one that only waits for a
lock gets it, so that nothing the main thread is in is interrupted; a sleep of native code, which would end, is never.

A forked child (a DataLoader worker) has its parent's handler and writes to its parent's file: who shares a file must be
asked one after the other.
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

from stepscope.agent.procfs import PROC
from stepscope.flight.stacks import parse_frame
from stepscope.records import run_clock
from stepscope.records.paths import STACKS_SUFFIX, THREADS_SUFFIX
from stepscope.records.steps import BACKWARD, BUILTIN_PHASES, CHECKPOINT, EVAL, FORWARD, INPUT, OPTIMIZER, OTHER
from stepscope.ring import RingReader, RingState
from stepscope.ring.reader import LivePhase

__all__ = [
    "STOPPED",
    "StackOffers",
    "StackSampler",
    "StacksQuestion",
    "ThreadActivity",
    "ask_stacks",
    "parse_stack",
    "sleeps_in_native_code",
    "waits_on",
    "watch_threads",
]


# -- stack signals ----------------------------------------------------------------------------------------------------

# -- posture ----------------------------------------------------------------------------------------------------------
# What the threads of processes do at this moment: who waits in the kernel, who runs.
#
# It decides how a process may be asked for its stacks.  faulthandler reads the frames of threads as they lie in memory,
# and a thread that runs Python may be between two of them (``recorder/stacks.py``), so it must not be asked while one
# does; and since a thread that waits may go on at any moment, that is looked at once more when all else is ready.

WATCH_S = 0.1
BUSY_TICKS = 2
"""Of a hundredth of a second each, in that time: a thread that polls now and then is not busy."""
WAITING = ("S", "D")
RUNS = "R"


@dataclass(frozen=True, kw_only=True)
class ThreadActivity:
    state: str
    """Of the main thread, the kernel's letter."""
    waits: bool
    """The main thread waits in the kernel, and has all the while."""
    switches: str
    """How often it was made to wait so far."""
    others_run: bool
    """Another thread is at work that may well run Python."""


@dataclass(frozen=True, kw_only=True)
class _ThreadReading:
    state: str
    switches: str
    """How often the main thread was made to wait so far."""
    ticks: dict[int, int]
    """CPU time so far of the other threads that were never given a name: torch, NCCL and gloo name theirs."""
    others_run: bool
    """One of them runs at this moment, or would if there were a processor for it."""


def watch_threads(pids: Iterable[int], proc: Path = PROC) -> dict[int, ThreadActivity]:
    """By pid, of those that are there; takes a tenth of a second, however many."""
    first = {pid: look for pid in pids if (look := _read_threads(proc / str(pid))) is not None}
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
    """Whether the main thread is in the same wait as it was then, and ``all_threads`` still wait with it.

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
    """Its state, how often it was made to wait so far, and its name."""
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


# -- signals ----------------------------------------------------------------------------------------------------------
# Whether a process can be asked, by a signal that it offered, to write its stack: checked in the kernel's own words.
#
# A signal that is not caught would end the process, so nothing is sent on the word of a header alone.  And one that is
# caught ends a sleep of native code early, which Python's own sleep goes on with but ``sleep(3)`` does not: such a
# thread is left alone, and another is asked where one will do.

SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}
"""Numbers of the system calls nanosleep and clock_nanosleep."""
SERVER_THREAD = "pt_workerserver"
"""The worker server's own threads do nothing else: they are asked before any other."""


def listens(process: Path, number: int, fd: int, answers: Path) -> bool:
    """Whether the main thread catches the signal, has none of it waiting, and its descriptor is the file ``answers``.

    ``process`` is its folder in ``/proc``.  OSError when it is gone, ValueError when what it says makes no sense.
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
    """Whether a signal that was sent has not reached the process yet."""
    try:
        masks = _masks(process)
    except (OSError, ValueError):
        return False
    return bool((masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)) >> (number - 1) & 1)


def sleeps_in_native_code(process: Path) -> bool:
    """Whether the main thread is in a sleep that a signal would end; False too where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        words = (process / "syscall").read_text().split()
        plain, by_clock = SLEEPS.get(platform.machine(), (-1, -1))
        # Python sleeps until an instant (the flag is 1) or, before 3.11, in select, and takes it up again.
        return words[0] == str(plain) or (words[0] == str(by_clock) and int(words[2], 16) == 0)
    return False


def waiting_thread(process: Path, number: int) -> int | None:
    """A thread, not the main one, that waits for a lock and takes the signal: to it, it waits as if nothing had been.

    None where there is none, or the kernel does not tell what threads wait for.
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
    """Whether it was sent; only to a thread of that process."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    return tgkill is not None and tgkill(pid, thread, number) == 0


def _masks(process: Path) -> dict[str, int]:
    lines = (line.partition(":\t") for line in (process / "status").read_text(errors="replace").splitlines())
    return {name: int(mask, 16) for name, _, mask in lines if name[:3] in ("Sig", "Shd") and name != "SigQ"}


# -- threads ----------------------------------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)
SignalOffer = tuple[int, int]
"""A signal and the descriptor to which its handler writes."""

LOOK_S = 0.01
CALM_LOOKS = 4
"""An answer that has not grown for so many looks, and ends with a line, is whole."""
MAX_BYTES = 1 << 20
STOPPED = ("T", "t", "Z", "X", "")


@dataclass(frozen=True, kw_only=True)
class StackOffers:
    """What a process offers; None: not that."""

    ring: Path
    """The files to which it writes lie beside its ring."""
    threads: SignalOffer | None = None
    stacks: SignalOffer | None = None
    running: SignalOffer | None = None
    trains: int = 0
    """The number of the thread that trains; 0: the main one."""


@dataclass(frozen=True, kw_only=True)
class StacksQuestion:
    """Whom to ask."""

    pid: int
    pidfd: int
    offers: StackOffers
    gil_held: Callable[[], bool] = lambda: False
    """Whether it is, at the moment of the call: then nobody in there runs Python."""


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
        return self._calm >= CALM_LOOKS

    def text(self) -> str:
        """Whole lines of what was written."""
        try:
            with self._path.open("rb") as file:
                written = file.read(MAX_BYTES)
        except OSError:
            return ""
        return written[: written.rfind(b"\n") + 1].decode(errors="replace")


def ask_stacks(questions: Mapping[Key, StacksQuestion], *, patience_s: float, proc: Path = PROC) -> dict[Key, str]:
    """Ask all at once, then wait for all: what was written, by those that answered in time.

    No two questions may share a file.
    """
    found = watch_threads((question.pid for question in questions.values()), proc)
    asked = {}
    for key, question in questions.items():
        posture = found.get(question.pid)
        if posture is not None and (path := _ask(question, posture, proc / str(question.pid))) is not None:
            asked[key] = _StackAnswer(path)
    waiting = dict(asked)
    deadline = time.monotonic() + patience_s
    while waiting and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        waiting = {key: one for key, one in waiting.items() if not one.whole()}
    return {key: text for key, one in asked.items() if (text := one.text())}


def _ask(question: StacksQuestion, posture: ThreadActivity, process: Path) -> Path | None:
    """The file to which it will write, if it could be asked."""
    if posture.state in STOPPED:
        return None
    offers = question.offers
    quiet = posture.waits and not posture.others_run
    held = not quiet and offers.threads is not None and question.gil_held()
    any_thread = (quiet or held) and offers.threads is not None
    offer = (offers.stacks if posture.waits else None) or offers.running
    if any_thread:
        offer = offers.threads
    path = offers.ring.with_suffix(THREADS_SUFFIX if any_thread else STACKS_SUFFIX)
    if offer is None:
        return None

    def still() -> bool:
        if held:
            return question.gil_held()
        return offer is offers.running or waits_on(process, posture, all_threads=any_thread)

    try:
        return path if _send(question, offer, path, process, any_thread=any_thread, still=still) else None
    except (OSError, ValueError):
        return None  # it just ended, or what it offers is no signal


def _send(
    question: StacksQuestion,
    offer: SignalOffer,
    path: Path,
    process: Path,
    *,
    any_thread: bool,
    still: Callable[[], bool],
) -> bool:
    number, fd = offer
    if not listens(process, number, fd, path):
        return False
    thread = waiting_thread(process, number) if any_thread else None
    if thread is None and sleeps_in_native_code(process):
        return False
    os.truncate(path, 0)
    if not still():
        return False
    if thread is None or not send_to_thread(question.pid, thread, number):
        signal.pidfd_send_signal(question.pidfd, number)
    return True


# -- stack sampler ----------------------------------------------------------------------------------------------------
# Where a rank spends its time, by line: its stack, asked for by a signal that it offered.
#
# A rank is asked while it is in a phase that took a good part of its last steps, or in a long stretch outside of all
# phases, of an evaluation or of a checkpoint.  It is never asked while it waits for peers or copies to the device. The
# phases take turns: next come those that were asked about less often than their share of the time would have it. A
# callback of 20 ms at every step is seldom met by five looks a second, so the rank is looked at more often for a
# moment, when a question is due.  What every step has (input, forward, backward, optimizer) is asked about a few
# times, and a few times more when it takes notably more than before; the other questions are kept for what comes up
# later.  An evaluation or a checkpoint may come every hundredth step and be over in half a second: the first few long
# stops of each kind are asked about as soon as they are seen, once each, whether a question is due or not.
#
# The rank answers through a handler in Python, into a file beside its ring: always that one, which the interpreter
# runs where it lets it, never faulthandler's, because a thread that waits now may run by the time the signal is there,
# and be between two frames (``recorder/stacks.py``).  Who waits in native code answers when it comes back from there,
# at the line of that very call and before it can enter a phase: so an answer counts, however late it is read, if the
# stretch was not over when the signal had been sent.  Where a thread trains that is not the main one, the main one
# writes that thread's stack when it gets to it, and when that was: then it is about the phase in which the ring says
# the rank was.
#
# Before each question is checked, in the kernel's own words, that the process catches the signal in its main thread,
# that its descriptor still is that file, and that the thread is in no sleep of native code, which a signal would end;
# the signal goes through the pidfd, so it can reach no other process.

STOPS = (OTHER, EVAL, CHECKPOINT)
"""Phases that may come seldom and take long: a single long stretch is worth a question …"""
STRETCH_NS = 15_000_000
"""… when it has lasted so long …"""
LONG_NS = 50_000_000
"""… and when so long, at once …"""
AT_ONCE = 8
"""… but only so many of one phase, and one of them in a step."""
ORDINARY = (INPUT, FORWARD, BACKWARD, OPTIMIZER)
"""Phases that every step has …"""
ROUND = 6
"""… so they are asked about so often …"""
RISE, MORE = 1.5, 0.05
"""… and again when their share has grown to that many times what it was, and by so much …"""
KEPT = 16
"""… but not with the last questions, which are for the others."""
WORTH_SHARE = 0.03
"""Of its last steps' time, what must have passed in a phase for it to be worth a question."""
SEEK_S = 0.005
"""From one look at such a rank to the next, until it is met in that phase …"""
SEEK_LOOKS = 60
"""… so often; then another phase has its turn when the next question is due."""
PAUSE_S = 2.0
"""Between two questions to the same rank …"""
FIRST_PAUSE_S = 0.25
FIRST_QUESTIONS = 20
"""… after the first ones in its steps, which may be all that a short run has."""
MAX_QUESTIONS = 40
"""To one rank in one run: enough to tell one habit from three, and over soon in a script that is all ``other``."""
BRIEF_S = 0.001
BRIEF_LOOKS = 6
"""An answer mostly comes at once, so we wait for it this often, this long; if it does not, until the next look."""
SOON_LOOKS = 20
"""What the main thread says of another takes it some hundredths of a second: so many looks, ``SEEK_S`` apart."""
PATIENCE_S = 2.0
"""A rank that did not answer so long after the stretch was over, although it took the signal, is not asked again."""
MAX_STACKS_BYTES = 1 << 17
MAX_FRAMES = 50

_HEAD = "Stack (most recent call first):"
_READ = re.compile(r"  read ([0-9]{1,19}) ([0-9]{1,19})")
_CUT = "  ..."
_OUTERMOST = ("<module>", "_run_module_as_main")


@dataclass(frozen=True, kw_only=True)
class _Question:
    live: LivePhase
    between: bool
    """Whether it was asked between two steps."""
    wall_ns: int
    sent_ns: int
    """By the ring's clock, when the signal was certainly there."""
    signal: int


@dataclass(kw_only=True)
class _Round:
    """A few questions about a phase that every step has."""

    share: float
    """What the phase took when it began."""
    asked: int = 0


class StackSampler:
    """Asks one rank.  Call ``look`` at every look at its ring."""

    def __init__(self, reader: RingReader, pid: int, *, asked: int = 0, proc: Path = Path("/proc")) -> None:
        self._reader = reader
        self._pid = pid
        self._proc = proc / str(pid)
        self._path = reader.path.with_suffix(STACKS_SUFFIX)
        self._left = MAX_QUESTIONS - asked
        self._paused_s = float("-inf")
        self._looks_left: int | None = None
        """While a question is due, looks left at a rank that is worth it; None: not known to be worth it."""
        self._wanted: tuple[int, ...] = ()
        """Then: the phases whose turn it is …"""
        self._sought_s = 0.0
        """… and until when they are sought: on a busy machine a look takes longer than it should."""
        self._asked: Counter[int] = Counter()
        """Questions by phase …"""
        self._missed: Counter[int] = Counter()
        """… and how often it was sought and not met since the last question."""
        self._rounds: dict[int, _Round] = {}
        self._stops: dict[int, set[int]] = {phase: set() for phase in STOPS}
        """Steps in which a phase was asked about at once."""
        self._question: _Question | None = None
        self._over_s: float | None = None
        """When the stretch of the question was first seen to be over."""
        self._seen = b""
        self._soon_left = 0

    @property
    def seeks(self) -> bool:
        """Whether it wants to look again in ``SEEK_S``: a phase has its turn, and the rank just was not in it.

        Or another thread than the main one trains, and the answer is not there yet.
        """
        return bool(self._looks_left) if self._question is None else self._soon_left > 0

    def look(self, pidfd: int | None) -> dict[str, Any] | None:
        """A stack, when there is a new one; without the rank's number, which the caller knows."""
        if pidfd is None:
            return None
        if self._question is None:
            if not self._ask(pidfd):
                return None
            for _ in range(BRIEF_LOOKS):
                time.sleep(BRIEF_S)
                if (answer := self._answer(at_once=True)) is not None or self._question is None:
                    return answer
            return None
        self._soon_left -= 1
        return self._answer(at_once=False)

    def _ask(self, pidfd: int) -> bool:
        """Whether the rank was asked: it is due, and it listens."""
        if self._reader.running_offer() is None or self._left <= 0 or self._reader.state() is not RingState.RUNNING:
            self._looks_left = None
            return False
        live = self._reader.live()
        if self._stops_long(live):
            self._stops[live.phase].add(live.step)
        elif not self._is_due(live):
            self._looks_left = None
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
            return False  # it just ended, or what it offers is no signal
        self._note_question(live.phase)
        self._seen, self._over_s = b"", None
        self._soon_left = SOON_LOOKS if self._reader.training_thread() else 0
        sent_ns = time.perf_counter_ns()
        self._question = _Question(
            live=live, between=between, wall_ns=run_clock.wall_ns(), sent_ns=sent_ns, signal=offer[0]
        )
        return True

    def _note_question(self, phase: int) -> None:
        self._left -= 1
        self._asked[phase] += 1
        self._missed.clear()
        if phase in self._rounds:
            self._rounds[phase].asked += 1

    def _move_question(self, asked: int, answered: int) -> None:
        """It was about that phase, but the answer is about this one."""
        self._asked[asked] -= 1
        self._asked[answered] += 1
        for phase, more in ((asked, -1), (answered, 1)):
            if phase in self._rounds:
                self._rounds[phase].asked += more

    def _is_worth_it(self, live: LivePhase) -> bool:
        """Whether the rank is in a phase whose turn it is."""
        if self._looks_left is None:
            self._wanted = self._whose_turn(self._reader.recent_shares())
            self._looks_left = SEEK_LOOKS if self._wanted else 0
            self._sought_s = time.monotonic() + SEEK_LOOKS * SEEK_S
        if live.since_ns > 0 and (live.phase in self._wanted or self._is_long_stop(live)):
            return True
        if not self._looks_left:
            self._looks_left = None  # at the next look its last steps may be others
            return False
        self._looks_left -= 1
        if not self._looks_left or time.monotonic() > self._sought_s:
            self._missed.update(self._wanted)
            self._pause()
        return False

    def _stops_long(self, live: LivePhase) -> bool:
        """Whether it is in a long stop of which nothing was asked yet, one of the first few."""
        asked = self._stops.get(live.phase)
        if asked is None or not live.step or live.step in asked or len(asked) >= AT_ONCE:
            return False
        return 0 < live.since_ns <= time.perf_counter_ns() - LONG_NS

    def _is_long_stop(self, live: LivePhase) -> bool:
        """Whether it is in a long stretch of a phase that does not come in every step, and others had their turns."""
        if live.phase not in STOPS or live.since_ns > time.perf_counter_ns() - STRETCH_NS:
            return False
        return all(self._asked[live.phase] <= self._asked[phase] + self._missed[phase] for phase in self._wanted)

    def _whose_turn(self, shares: Sequence[float]) -> tuple[int, ...]:
        """Of the phases that take a good part of the last steps, those asked about less often than that part is."""
        worth = [phase for phase in (*STOPS, *ORDINARY) if shares[phase] >= WORTH_SHARE]
        worth = [phase for phase in worth if phase in STOPS or self._has_questions(phase, shares[phase])]
        turns = {phase: self._asked[phase] + self._missed[phase] for phase in worth}
        next_turn, total = 1 + sum(turns.values()), sum(shares[phase] for phase in worth)
        return tuple(phase for phase in worth if turns[phase] * total < next_turn * shares[phase])

    def _has_questions(self, phase: int, share: float) -> bool:
        """Whether there are questions left for a phase that every step has."""
        last = self._rounds.get(phase)
        if last is None or (share >= RISE * last.share and share >= last.share + MORE):
            last = self._rounds[phase] = _Round(share=share)
        return last.asked < ROUND and self._left > KEPT

    def _pause(self) -> None:
        """No question until the next is due."""
        self._paused_s = time.monotonic()
        self._looks_left = None

    def _is_due(self, live: LivePhase) -> bool:
        """Whether the pause is over; it is shorter once the rank is in its steps."""
        early = live.step > 0 and self._left > MAX_QUESTIONS - FIRST_QUESTIONS
        return time.monotonic() >= self._paused_s + min(PAUSE_S, FIRST_PAUSE_S if early else PAUSE_S)

    def _listens(self, number: int, fd: int) -> bool:
        return listens(self._proc, number, fd, self._path)

    def _answer(self, *, at_once: bool) -> dict[str, Any] | None:
        """What was written, once it is whole: the same at two looks, and ending where a main thread's stack does."""
        question = self._question
        if question is None:
            return None
        over = self._reader.live() != question.live  # looked at first: what it wrote before, is there to be read
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
        if not frames:
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
        """Whether the stretch was not over yet when the signal had been sent."""
        end_ns = self._reader.stretch_end_ns(question.live.since_ns)
        return end_ns is not None and end_ns > question.sent_ns

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_STACKS_BYTES)
        except OSError:
            return b""

    def _give_up(self, question: _Question) -> None:
        """Another phase and still no answer: who has not got the signal yet is waited for, others are asked no more.

        Within phases other threads write the ring too (backward on a device), while the main thread waits: it answers
        when it is back, and until then it is asked nothing else.
        """
        if question.live.phase not in STOPS:
            return
        now_s = time.monotonic()
        self._over_s = now_s if self._over_s is None else self._over_s
        if now_s - self._over_s >= PATIENCE_S and not awaits_delivery(self._proc, question.signal):
            self._question, self._left = None, 0


def _when_read(text: str) -> tuple[str, tuple[int, int] | None]:
    """The text without its last line, if that says from when to when the stack of another thread was read."""
    above, _, last = text.removesuffix("\n").rpartition("\n")
    found = _READ.fullmatch(last) if text.endswith("\n") else None
    return (f"{above}\n", (int(found[1]), int(found[2]))) if found else (text, None)


def parse_stack(text: str) -> list[dict[str, Any]]:
    """Frames, innermost first, of what faulthandler wrote; none when a single line is not as it writes them."""
    lines = text.split("\n")
    if len(lines) < 3 or lines[0] != _HEAD or lines[-1]:
        return []
    frames = lines[1:-1]
    if frames[-1] == _CUT:
        frames.pop()
    found = [parse_frame(line) for line in frames]
    return [] if None in found else [asdict(frame) for frame in found if frame]
