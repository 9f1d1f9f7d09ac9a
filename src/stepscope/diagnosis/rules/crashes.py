"""Crashes: which rank died first, of what and where, and which ranks only followed.

There are four sources, none of them complete: the exception that a process left behind, the launcher's list of exit
codes, the state of the ring (``vanished`` if a process ended silently), and the agent, which asks the kernel whether it
killed a process because memory ran out.  When one rank dies the others follow: gloo and NCCL raise in them ("connection
closed by peer"), the launcher sends them SIGTERM.  Those are victims, and a victim leads only if there is no culprit.

A script that starts the ranks and does not train may fail as well: its error leads if no rank failed before it.

For a restarted job the last attempt counts; each earlier one gets one line.

A job that ends with exit code 0 has not crashed.  Frameworks kill their workers when these are done, which leaves no
trace either: a rank that was idle, and has made as many steps as any other, is not a failure.  One that was ended in
the middle of something is a remark.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stepscope.diagnosis.engine.attempts import Attempt, attempts_of, from_launcher
from stepscope.diagnosis.engine.samples import number, of_kind
from stepscope.diagnosis.rules.out_of_memory import FEWER_COPIES, OutOfMemory, out_of_memory
from stepscope.flight.stacks import is_user_file, lost_peer
from stepscope.flight.wording import ranks_text
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.records.collectives import OPS, group_name
from stepscope.records.finding import Finding
from stepscope.records.series import ALIVE, RankError, RankSeries, RunData
from stepscope.records.text import bytes_text, memory_cause, named_ranks

__all__ = [
    "STOPPED_BY_HAND",
    "Failure",
    "call_mismatch",
    "crash_text",
    "failures_in",
    "failures_of",
    "find_crashes",
    "memory_low",
    "message_shown",
    "ran_out_of_memory",
    "ranks_of",
]


# -- advice -----------------------------------------------------------------------------------------------------------

DESTROY_GROUP = (
    "Call torch.distributed.destroy_process_group() on every rank before the script ends, and first delete DeviceMesh "
    "objects: they keep their groups alive."
)
ABORTED = (
    "Native code aborted: an assertion, NCCL's watchdog, or gloo, when ranks call a collective with different sizes; "
)
CRASH_ADVICE = (
    say(
        "Close what runs native threads before the script ends: process groups, data readers, loggers.",
        at_exit=True,
        alone=True,
    ),
    say(
        DESTROY_GROUP,
        "This is a known problem of torch (pytorch issue 190489): a thread of gloo was still running when Python "
        "destroyed its process group. A torch release that fixes it avoids it too.",
        at_exit=True,
        threads=True,
    ),
    say(DESTROY_GROUP, at_exit=True),
    say(
        "The device ran out of memory: a smaller batch, gradient accumulation, checkpointing, autocast.",
        "Reserved far above allocated means fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        cause="oom_cuda",
    ),
    say(
        "The host, or a limit on the process (ulimit -v, a cgroup), had no memory left.",
        FEWER_COPIES,
        cause="oom_host",
    ),
    say(
        "The memory of the host, or of the job's cgroup, was used up: dmesg lists each process's usage.",
        FEWER_COPIES,
        cause="oom_kernel",
    ),
    say(
        "The host had hardly any memory left: the kernel's out-of-memory killer is the likely sender (see dmesg).",
        FEWER_COPIES,
        signal="SIGKILL",
        memory_low=True,
    ),
    say(
        "Nothing in Python sends SIGKILL: look for the out-of-memory killer (dmesg), a limit, or a user.",
        signal="SIGKILL",
    ),
    say("A crash in native code: run again with PYTHONFAULTHANDLER=1 to see the line.", signal="SIGSEGV"),
    say(ABORTED + "its last lines, shown below, say which.", signal="SIGABRT", native=True),
    say(
        ABORTED + "its last lines on stderr say which (`stepscope run --native-output` keeps them in the log).",
        signal="SIGABRT",
    ),
    say(
        "Usually a full /dev/shm: fewer DataLoader workers, or more shared memory (docker --shm-size).",
        signal="SIGBUS",
    ),
    say("It was asked to stop, by the scheduler (preemption, time limit) or the launcher.", signal="SIGTERM"),
    say("The whole traceback is in its log and in summary.json.", cause="exception", alone=True),
    say(
        "Start with the traceback; the errors of the other ranks came after it.",
        cause="exception",
        others=True,
    ),
    say("Start with the traceback.", cause="exception"),
    say(
        "It exited on its own, with sys.exit() or in native code: its log has its last output.",
        cause="exit_code",
    ),
    say("It left no message: check {log} and the kernel log (dmesg) of its host."),
)
SIGNALS_EXPLAINED = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM")


# -- last calls -------------------------------------------------------------------------------------------------------
# The last calls of ranks before they died: whether one of them called something else than the others.
#
# gloo does not wait forever when ranks give a collective different sizes: it aborts the process that receives more than
# it expected, often a healthy one, and the rest lose their connection.  Their rings outlive them, so the agent writes
# the last collective of each into its ``rank_end``.  The odd one is found by majority or, of two, by what each called
# in the steps before.

ANY_SIZE = ("broadcast", "scatter", "gather", "all_to_all", "send", "recv", "unknown")
"""Ranks may give these different sizes."""


@dataclass(frozen=True, kw_only=True)
class LastCall:
    op: str
    group: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CallMismatch:
    """Last calls of the ranks of an attempt that do not match."""

    sides: dict[LastCall, tuple[int, ...]]
    odd: tuple[int, ...]
    """Empty if it cannot be decided."""

    @property
    def text(self) -> str:
        """``Rank 1 called all_reduce with 4.0 KiB where rank 0 called it with 2.0 KiB``, the odd ones first."""
        first, *rest = sorted(self.sides.items(), key=lambda side: (side[1][0] not in self.odd, side[1]))
        same_op = len({call.op for call in self.sides}) == 1
        text = f"{ranks_text(first[1], start=True)} called {first[0].op} with {bytes_text(first[0].bytes)}"
        others = [
            f"{ranks_text(ranks)} called {'it' if same_op else call.op} with {bytes_text(call.bytes)}"
            for call, ranks in rest
        ]
        return f"{text} {'where' if self.odd else 'and'} {' and '.join(others)}"


def call_mismatch(run: RunData, attempt: Attempt) -> CallMismatch | None:
    """None if the last calls agree, or are not known for all ranks."""
    calls = last_calls(run, attempt)
    if len(calls) < 2 or len(calls) < len(attempt.series) or len({call.group for call in calls.values()}) != 1:
        return None
    if {call.op for call in calls.values()} & set(ANY_SIZE) or len(set(calls.values())) == 1:
        return None
    sides: dict[LastCall, tuple[int, ...]] = {}
    for rank in sorted(calls):
        sides[calls[rank]] = (*sides.get(calls[rank], ()), rank)
    most = max(sides.values(), key=len)
    tied = sum(len(ranks) == len(most) for ranks in sides.values()) > 1
    odd = _unlike_before(calls, attempt.series) if tied else [rank for rank in sorted(calls) if rank not in most]
    return CallMismatch(sides=sides, odd=tuple(odd) if len(odd) < len(calls) else ())


def _rank_ends(run: RunData, attempt: Attempt) -> dict[int, Mapping[str, object]]:
    by_pid = {series.identity.pid: series.rank for series in attempt.series}
    return {
        by_pid[event["pid"]]: event
        for event in run.events
        if event.get("event") == "rank_end" and event.get("pid") in by_pid
    }


def last_calls(run: RunData, attempt: Attempt) -> dict[int, LastCall]:
    """By rank, for those whose ring recorded it."""
    found = {}
    for rank, end in _rank_ends(run, attempt).items():
        call = end.get("collective")
        if not isinstance(call, dict):
            continue
        op, group, size = (call.get(key) for key in ("op", "group", "bytes"))
        if isinstance(op, str) and isinstance(group, str) and isinstance(size, int):
            found[rank] = LastCall(op=op, group=group, bytes=size)
    return found


def call_group_name(call: LastCall, series: Sequence[RankSeries]) -> str:
    """The usual name of its group."""
    known = (group.description for rank_series in series for group in rank_series.groups if group.name == call.group)
    return group_name(call.group, next(known, ""))


def _unlike_before(calls: Mapping[int, LastCall], series: Sequence[RankSeries]) -> list[int]:
    """Ranks that never made such a call in a recorded step."""
    return [
        rank_series.rank
        for rank_series in series
        if calls[rank_series.rank].bytes not in _sizes_before(rank_series, calls[rank_series.rank])
    ]


def _sizes_before(rank_series: RankSeries, call: LastCall) -> set[int]:
    slots = [group.slot for group in rank_series.groups if group.name == call.group]
    if rank_series.collectives is None or not slots or call.op not in OPS:
        return set()
    rows = rank_series.collectives
    same = np.isin(rows["group"], slots) & (rows["op"] == OPS.index(call.op))
    return {int(size) for size in rows["bytes"][same]}


# -- failures ---------------------------------------------------------------------------------------------------------

ASKED_TO_STOP = ("SIGTERM", "SIGINT", "SIGHUP")
STOPPED_BY_HAND = ("KeyboardInterrupt", "SignalException")
SHELL_SIGNAL_BASE = 128
"""A shell reports death by signal n as 128 + n."""
Cause = Literal["exception", "signal", "exit_code", "oom_kernel", "oom_cuda", "oom_host", "vanished"]
MESSAGE_SHOWN = 120
_INSIDE = "Original Traceback (most recent call last):"
"""Begins the traceback that a DataLoader worker puts into the message."""
_FRAME = re.compile(r'File "(?P<file>[^"\n]{1,4096})", line (?P<line>[0-9]{1,9}), in (?P<function>[^\n]{1,200})')
_NAMED = frozenset(int(number) for number in signal.Signals)
FOLLOWERS_SHOWN = 16
SCRIPT = "The script"
THREADS_LEFT = "terminate called without an active exception"
"""What the C++ runtime prints when a thread is still running as its owner is destroyed."""
WENT_ON = "the job continued and ended with exit code 0"
NATIVE_CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
NOTHING_LOST: dict[str, Any] = {"share": 0.0, "seconds": 0.0, "rank_hours": 0.0, "if_fixed": None}


@dataclass(frozen=True, kw_only=True)
class Failure:
    rank: int | None
    """None: the script that started the ranks."""
    type: str
    """Exception type; empty if there was none."""
    message: str
    signal: str
    """``SIGKILL`` …; empty if unknown."""
    exit_code: int | None
    wall_ns: int
    """When it was noticed; 0 if unknown."""
    last_step: int | None
    """Last completed step."""
    phase: str | None
    victim: bool
    """Whether another process's death is to blame, as far as known."""
    taken: bool = False
    """Whether its own message says so."""
    oom_killed: bool = False
    """By the kernel, because memory ran out."""
    at_exit: bool = False
    """Whether its script had ended: native code crashed while Python shut down."""
    place: str = ""
    """``train_step, train.py:121``: the innermost line of the user's own code in the traceback; empty if unknown."""

    @property
    def cause(self) -> Cause:
        if self.oom_killed:
            return "oom_kernel"
        if self.type:
            return memory_cause(self.type, self.message) or "exception"
        if self.signal:
            return "signal"
        return "exit_code" if self.exit_code else "vanished"


def ran_out_of_memory(crash: Finding) -> bool:
    return str(crash.evidence.get("cause")).startswith("oom_")


def find_crashes(run: RunData, *, alive: bool = False) -> list[Finding]:
    """``alive``: whether the job is still running.  A remark (``info``) if the job ended well nevertheless."""
    attempt = attempts_of(run)[-1]
    failures = failures_in(run, attempt, alive=alive)
    culprits = [failure for failure in failures if not failure.victim]
    if not culprits:
        return []
    lead = culprits[0]
    together = _together(culprits)
    victims = [failure for failure in failures if failure not in together]
    ranks = ranks_of(together)
    steps = [failure.last_step for failure in together if failure.last_step is not None]
    swallowed = _finished(run) and not lead.type
    complete = _complete(attempt, failures)
    call = _last_call(run, attempt, lead)
    native, of_rank = _native(run, lead, together)
    memory = _memory_of(attempt, lead)
    return [
        Finding(
            kind="rank_crashed",
            severity="info" if swallowed else "warning" if complete else "critical",
            title=crash_text(failures, attempt) + (f"; {WENT_ON}." if swallowed else "."),
            ranks=ranks,
            phase=lead.phase,
            steps=(min(steps), max(steps)) if steps else None,
            cost=NOTHING_LOST if swallowed or complete else _cost(attempt),
            evidence={
                **_evidence(attempt, lead, victims),
                "last_call": call,
                "native": list(native),
                "native_rank": lead.rank if of_rank else None,
                "memory": None if memory is None else memory.evidence,
            },
            advice=(memory.advice if memory is not None else ())
            or _advice(
                lead,
                others=bool(victims),
                memory_low=memory_low(run, attempt, lead),
                alone=_alone(attempt, failures),
                last_call=call,
                native=native,
            ),
            confidence=0.97 if lead.cause not in ("vanished", "exit_code") else 0.7,
        )
    ]


def _advice(
    lead: Failure,
    *,
    others: bool,
    memory_low: bool,
    alone: bool,
    last_call: Mapping[str, Any] | None,
    native: Sequence[str],
) -> tuple[str, ...]:
    """``alone``: a job of one process; ``last_call``: the collective that native code ended it in; ``native``: the last
    output of native code."""
    advice = advice_for(
        CRASH_ADVICE,
        cause=lead.cause,
        signal=lead.signal,
        others=others,
        memory_low=memory_low,
        alone=alone,
        native=native,
        at_exit=lead.at_exit,
        threads=any(THREADS_LEFT in line for line in native),
        log="its log" if alone else "the rank's log",
    )
    by_signal = not lead.at_exit and lead.signal in SIGNALS_EXPLAINED and len(advice) == 1
    if last_call is None or not by_signal:
        return advice
    call = f"{last_call['op']} of {last_call['group']} with {bytes_text(last_call['bytes'])}"
    return *advice, f"Its last call was {call}: look for a branch that only some ranks take, there or just before."


def _memory_of(attempt: Attempt, lead: Failure) -> OutOfMemory | None:
    """What held the memory of the rank that ran out of it; None if that was not the cause."""
    if lead.cause not in ("oom_host", "oom_cuda"):
        return None
    error = _by_rank(attempt).get(lead.rank) if lead.rank is not None else None
    series = next((series for series in attempt.series if series.rank == lead.rank), None)
    return out_of_memory(
        lead.message,
        None if error is None else error.memory,
        host=lead.cause == "oom_host",
        world_size=1 if series is None else series.identity.world_size,
        facts={} if series is None else series.facts,
    )


def failures_of(run: RunData, *, alive: bool = False) -> list[Failure]:
    """Every rank of the last attempt that did not end well; culprits first, each group by time."""
    return failures_in(run, attempts_of(run)[-1], alive=alive)


def failures_in(run: RunData, attempt: Attempt, *, alive: bool = False) -> list[Failure]:
    last = attempt.is_last
    errors = _by_rank(attempt)
    codes = _exit_codes(run, attempt) if last else _launcher_exit_codes(attempt)
    interrupted = last and _interrupted(run, attempt)
    found = []
    by_rank = {series.rank: series for series in attempt.series}
    for rank in sorted({*by_rank, *codes, *errors}):
        series = by_rank.get(rank)
        oom_killed = rank in attempt.oom_killed
        native = run.native.get(rank, ()) if last else ()
        failure = _failure(rank, series, errors.get(rank), codes.get(rank), native, oom_killed=oom_killed)
        if failure is not None and not (interrupted and _ended_by_hand(failure)):
            found.append(failure)
    script = _script_failure(attempt)
    if script is not None and not (interrupted and _ended_by_hand(script)):
        found = _with_script(found, script)
    elif last and (_finished(run) or (alive and _all_gone(attempt))):
        found = [failure for failure in found if not _was_done(failure, attempt)]
    if found and all(failure.victim for failure in found):
        # There is no other culprit.  Ranks that got a stop signal remain victims if any rank left an error.
        spoke = any(failure.type and failure.type not in STOPPED_BY_HAND for failure in found)
        found = [failure if spoke and not failure.type else replace(failure, victim=False) for failure in found]
    elif any(failure.type or failure.signal for failure in found if not failure.victim):
        # With a cause known, ranks that merely vanished after it were ended by the launcher.
        first_ns = min(failure.wall_ns for failure in found if not failure.victim and (failure.type or failure.signal))
        found = [replace(failure, victim=True) if _silent_after(failure, first_ns) else failure for failure in found]
    found = _in_order_of_time(found)
    return sorted(found, key=_in_order)


def _in_order(failure: Failure) -> tuple[bool, float, int]:
    return failure.victim, failure.wall_ns or float("inf"), -1 if failure.rank is None else failure.rank


def ranks_of(failures: Sequence[Failure]) -> tuple[int, ...]:
    return tuple(sorted(failure.rank for failure in failures if failure.rank is not None))


def _finished(run: RunData) -> bool:
    end = run.meta.get("end")
    return isinstance(end, dict) and end.get("status") == "finished"


def _complete(attempt: Attempt, failures: Sequence[Failure]) -> bool:
    """Whether every rank had ended its script, so that those that died afterwards lost nothing."""
    return all(failure.at_exit for failure in failures) and all(series.state == "exited" for series in attempt.series)


def _all_gone(attempt: Attempt) -> bool:
    return not any(series.state in ALIVE for series in attempt.series)


def _was_done(failure: Failure, attempt: Attempt) -> bool:
    """Whether a rank that ended silently was idle, with as many steps as any other: its job ended it."""
    if failure.cause != "vanished" or failure.last_step is None:
        return False
    furthest = max(step for series in attempt.series if (step := _last_step(series)) is not None)
    return failure.phase in (None, "other") and failure.last_step == furthest


def _script_failure(attempt: Attempt) -> Failure | None:
    """The failure of the script that started the ranks of this attempt; its first exception, if there are several."""
    error = next((error for error in attempt.errors if attempt.series and error.script), None)
    if error is None or from_launcher(error):
        return None
    steps = [step for series in attempt.series if (step := _last_step(series)) is not None]
    by_hand = error.type in STOPPED_BY_HAND
    return Failure(
        rank=None,
        type=error.type,
        message=error.message,
        signal="",
        exit_code=None,
        wall_ns=error.wall_ns,
        last_step=max(steps, default=None),
        phase=None,
        victim=by_hand,
        taken=by_hand,
        place=_place(error),
    )


def _with_script(found: list[Failure], script: Failure) -> list[Failure]:
    """The script's error leads unless a rank failed before it; it ended the ranks that left no error."""
    if any(_says_something(failure) and failure.wall_ns <= script.wall_ns for failure in found):
        return [*found, replace(script, victim=True)]
    return [*(replace(failure, victim=True) for failure in found), script]


def _says_something(failure: Failure) -> bool:
    return bool(failure.type or failure.signal or failure.oom_killed or failure.exit_code)


def _in_order_of_time(found: list[Failure]) -> list[Failure]:
    """Ranks that raised long before any rank vanished did not raise because of it, whatever they say about peers."""
    spoke = [
        failure
        for failure in found
        if failure.victim and failure.type and failure.type not in STOPPED_BY_HAND and failure.wall_ns
    ]
    began = [failure for failure in found if not failure.victim]
    if not spoke or not began or any(failure.cause != "vanished" or not failure.wall_ns for failure in began):
        return found
    first_ns = min(failure.wall_ns for failure in spoke)
    if first_ns + thresholds.DEATH_LEAD_S * 1e9 >= min(failure.wall_ns for failure in began):
        return found
    return [replace(failure, victim=failure not in spoke) for failure in found]


def crash_text(failures: Sequence[Failure], attempt: Attempt) -> str:
    """Which ranks began it, of what and where; a sentence without its full stop."""
    culprits = [failure for failure in failures if not failure.victim]
    lead, together = culprits[0], _together(culprits)
    ranks = ranks_of(together)
    if lead.rank is None or _alone(attempt, failures):
        who = SCRIPT
    elif len(ranks) > 1 and len(ranks) == len(attempt.series):
        who = f"All {len(ranks)} ranks"
    else:
        who = named_ranks(ranks)
    if lead.at_exit:
        after = "the training itself was complete" if _complete(attempt, failures) else "other ranks had not ended yet"
        ended = "ended" if who == SCRIPT else "ended the script"
        return f"{who} {ended} and died by {lead.signal} while Python shut down; {after}"
    if lead.oom_killed:
        what = ("was" if len(ranks) == 1 else "were") + " killed by the kernel for lack of memory"
    elif lead.type:
        shown = message_shown(lead.message)
        what = f"raised {lead.type}" + (f": {shown}" if shown else "")
    elif lead.signal:
        what = ("was" if len(ranks) == 1 else "were") + f" killed by {lead.signal}"
    elif lead.exit_code:
        what = f"exited with code {lead.exit_code}"
    else:
        hosts = {series.rank: series.identity.host for series in attempt.series}
        where = sorted({hosts[rank] for rank in ranks if rank in hosts}) if len(set(hosts.values())) > 1 else []
        what = "vanished" + (f" on {where[0]}" if len(where) == 1 else "")
    return f"{who} {what}{_where(lead)}"


def message_shown(message: str) -> str:
    """The message of an exception as a title shows it: in one line, without the traceback that a worker put into it."""
    before, found, inside = message.partition(_INSIDE)
    last_line = inside.rstrip().splitlines()[-1:] if found else []
    text = " ".join(" ".join((before, *last_line)).split())
    return text if len(text) <= MESSAGE_SHOWN else text[: MESSAGE_SHOWN - 1] + "…"


def _together(culprits: Sequence[Failure]) -> list[Failure]:
    """Those that died of the same thing: one finding for a fault that hit several ranks alike (a bug hits all)."""
    lead = culprits[0]
    same = (lead.cause, lead.type, lead.signal, lead.at_exit)
    alike = [culprit for culprit in culprits if (culprit.cause, culprit.type, culprit.signal, culprit.at_exit) == same]
    return [failure for failure in alike if (failure.rank is None) == (lead.rank is None)]


def _alone(attempt: Attempt, failures: Sequence[Failure]) -> bool:
    """Whether this is a job of one process, which users would not call a rank."""
    if attempt.world_size is not None:
        return attempt.world_size == 1 and len(attempt.series) <= 1
    return {failure.rank for failure in failures} == {0} and not _launcher_exit_codes(attempt)


def _by_rank(attempt: Attempt) -> dict[int, RankError]:
    """One error per rank: that of its recorded process, else the first (later ones may follow from it)."""
    pids = {series.identity.pid for series in attempt.series}
    errors: dict[int, RankError] = {}
    secondary = [error for error in attempt.errors if from_launcher(error) or (attempt.series and error.script)]
    own = [error for error in attempt.errors if error not in secondary]
    for error in sorted(own, key=lambda error: error.pid not in pids):
        if error.rank is not None:
            errors.setdefault(error.rank, error)
    return errors


def _launcher_exit_codes(attempt: Attempt) -> dict[int, int]:
    """Exit codes by rank, from the launchers."""
    return {rank: code for error in attempt.errors for rank, code in error.exit_codes.items()}


def _exit_codes(run: RunData, attempt: Attempt) -> dict[int, int]:
    """By rank; the exit code of a one-process job is that of its rank, unless the script that started it failed."""
    codes, current = _launcher_exit_codes(attempt), attempt.series
    end = run.meta.get("end")
    if (
        not codes
        and not any(error.script for error in attempt.errors)
        and len(current) == 1
        and current[0].identity.world_size == 1
        and isinstance(end, dict)
    ):
        code = end.get("exit_code")
        if isinstance(code, int):
            codes[current[0].rank] = code
    return codes


def _failure(
    rank: int,
    series: RankSeries | None,
    error: RankError | None,
    code: int | None,
    native: Sequence[str],
    *,
    oom_killed: bool,
) -> Failure | None:
    state = series.state if series is not None else None
    if error is None and code in (None, 0) and state not in ("vanished", "exception"):
        return None
    if error is not None and error.type == "SystemExit" and error.message in ("", "0", "None"):
        return None
    name = _signal_name(code)
    type_name, message = (error.type, error.message) if error is not None else ("", "")
    if not type_name and state == "exception":
        type_name = "Exception"  # all that is known if its report could not be written
    # If native code (NCCL's watchdog, gloo) ended the rank, its output may say that it only lost a peer.
    text = " ".join((message, *(native if not type_name and name == "SIGABRT" else ())))
    peers = lost_peer(type_name, text, error.traceback if error is not None else "")
    taken = peers or type_name in STOPPED_BY_HAND or (not type_name and name in ASKED_TO_STOP)
    wall_ns = error.wall_ns if error is not None else (series.ended_wall_ns or 0) if series is not None else 0
    return Failure(
        rank=rank,
        type=type_name,
        message=message,
        signal=name,
        exit_code=code,
        wall_ns=wall_ns,
        last_step=_last_step(series),
        phase=_phase(series),
        victim=taken and not oom_killed,
        taken=taken,
        oom_killed=oom_killed,
        at_exit=state == "exited" and error is None and name in NATIVE_CRASHES,
        place="" if error is None else _place(error),
    )


def _place(error: RankError) -> str:
    """Where the exception was raised; in a DataLoader worker, its own traceback is in the message."""
    text = error.message.partition(_INSIDE)[2] or error.traceback
    own = [found for found in _FRAME.finditer(text) if is_user_file(found["file"])]
    if not own:
        return ""
    where = f"{own[-1]['file'].rpartition('/')[2]}:{own[-1]['line']}"
    return where if own[-1]["function"] == "<module>" else f"{own[-1]['function']}, {where}"


def _signal_name(code: int | None) -> str:
    if code is None:
        return ""
    by = -code if code < 0 else code - SHELL_SIGNAL_BASE
    return signal.Signals(by).name if by in _NAMED else ""


def _last_step(series: RankSeries | None) -> int | None:
    return int(series.steps["step"][-1]) if series is not None and len(series.steps) else None


def _phase(series: RankSeries | None) -> str | None:
    if series is None or not 0 <= series.live_phase < len(series.phase_names):
        return None
    last = series.steps.part(slice(-1, None))
    if len(last) and 0 < series.live_since_ns < int(last["start_ns"][0]) + int(last["wall_ns"][0]):
        return None  # of a lost node: it reported this phase before it sent its last step
    return series.phase_names[series.live_phase] or None


def _interrupted(run: RunData, attempt: Attempt) -> bool:
    end = run.meta.get("end")
    if isinstance(end, dict) and end.get("status") == "interrupted":
        return True
    return any(error.type == "KeyboardInterrupt" for error in attempt.errors)


def _ended_by_hand(failure: Failure) -> bool:
    return failure.victim or (not failure.type and failure.signal in ("", "SIGKILL"))


def _silent_after(failure: Failure, first_ns: int) -> bool:
    return not failure.victim and not failure.type and not failure.signal and failure.wall_ns >= first_ns


def _where(lead: Failure) -> str:
    if lead.last_step is None:
        return " before the first step was complete"
    if lead.rank is None:
        return f" (after step {lead.last_step})"
    phase = f" in {lead.phase}" if lead.phase and lead.phase != "other" else ""
    return f" (in step {lead.last_step + 1}{',' if phase else ''}{phase})"


def _evidence(attempt: Attempt, lead: Failure, others: Sequence[Failure]) -> dict[str, Any]:
    saved = [step for series in attempt.series if (step := _checkpoint_step(series)) is not None]
    return {
        "attempt": attempt.number,
        "cause": lead.cause,
        "exception": lead.type or None,
        "message": lead.message or None,
        "signal": lead.signal or None,
        "exit_code": lead.exit_code,
        "last_step": lead.last_step,
        "died_in_phase": lead.phase,
        "at_exit": lead.at_exit,
        "place": lead.place or None,
        "checkpoint_step": max(saved, default=None),
        "wall_ns": lead.wall_ns or None,
        "followed_by": [
            {"rank": failure.rank, "exception": failure.type or None, "signal": failure.signal or None}
            for failure in others[:FOLLOWERS_SHOWN]
        ],
        "followers": len(others),
    }


def _native(run: RunData, lead: Failure, together: Sequence[Failure]) -> tuple[tuple[str, ...], bool]:
    """What native code printed last, and whether that was in the rank that began it.

    Lines found only in the job's own output cannot be assigned to a rank: they are shown for a rank that left no error
    itself.
    """
    if own := run.native.get(lead.rank):
        return own, True
    speechless = not lead.type and lead.signal not in (*ASKED_TO_STOP, "SIGKILL") and not lead.oom_killed
    return (run.native.get(None, ()) if speechless else ()), len(together) == 1 and lead.signal == "SIGABRT"


def _last_call(run: RunData, attempt: Attempt, lead: Failure) -> dict[str, Any] | None:
    """The collective that a rank was in when native code ended it."""
    call = last_calls(run, attempt).get(lead.rank) if lead.rank is not None else None
    if call is None or lead.signal != "SIGABRT" or lead.phase != "comm":
        return None
    return {"op": call.op, "group": call_group_name(call, attempt.series), "bytes": call.bytes}


def _cost(attempt: Attempt) -> dict[str, Any]:
    """What has to be repeated: the time since the last checkpoint that any rank wrote, else all of it."""
    trained = [series for series in attempt.series if len(series.steps)]
    total = max((float(series.steps["wall_ns"].sum()) for series in trained), default=0.0)
    lost = min((_since_checkpoint(series) for series in trained), default=0.0)
    seconds = lost / 1e9
    return {
        "share": round(min(lost / total, 1.0), 4) if total else 0.0,
        "seconds": round(seconds, 3),
        "rank_hours": round(seconds * len(trained) / 3600, 4),
        "if_fixed": None,
    }


def _since_checkpoint(series: RankSeries) -> float:
    saved = _checkpoint_step(series)
    since = 0 if saved is None else int(np.searchsorted(series.steps["step"], saved)) + 1
    return float(series.steps["wall_ns"][since:].sum())


def _checkpoint_step(series: RankSeries) -> int | None:
    """The last step in which this rank saved something."""
    saved = np.flatnonzero(series.steps.phase("checkpoint") > 0)
    return int(series.steps["step"][saved[-1]]) if len(saved) else None


def memory_low(run: RunData, attempt: Attempt, lead: Failure) -> bool:
    """Whether the dead rank's host was nearly out of memory shortly before."""
    host = next((series.identity.host for series in attempt.series if series.rank == lead.rank), None)
    for line in of_kind(run.samples, "host"):
        when, free, total = (number(line, key) for key in ("wall_ns", "mem_available", "mem_total"))
        near = lead.wall_ns == 0 or when is None or abs(when - lead.wall_ns) <= thresholds.DEATH_MEMORY_S * 1e9
        low = free is not None and total is not None and free < thresholds.LOW_MEMORY_SHARE * total
        if line.get("node") == host and near and low:
            return True
    return False
