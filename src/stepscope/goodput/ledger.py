"""The ledger: every second of a run belongs to one part, over all its attempts.

    start_up       from the launcher to the process of the rank; then building model and data, until the first step
    imports        from the start of the process until torch was imported
    process_group  inside ``init_process_group``
    compile        first steps and steps in which something was compiled: what they took above a normal step
    training       steps that count: the useful part
    evaluation     inside and after the steps
    checkpoint     writing checkpoints inside the steps
    stalls         time of single steps far above the normal one (``goodput/accounts.py``)
    hang           the job made no progress, according to the watchdog
    lost           steps that a later attempt made again, and the step in which a process died
    restart        from the end of an attempt to the first step of the next: what is start-up in the first attempt
    shutdown       from the last step to the end of the process, and from there to the end of its attempt
    unknown        between the first and the last step, but not recorded

Each rank's time is split exactly, from the beginning of an attempt to its end; an attempt is the mean of its ranks, so
the parts add up to the wall time and a second of a part is a second of all ranks.  An attempt begins where the one
before it ended.  Goodput is the share of ``training``.

A step is *lost* if training began again from a state before it.  The next attempt's own step counter (that of the
framework or optimizer) says where it resumed; without one, the last checkpoint that the attempt was seen writing is
taken for it, and without any checkpoint all of its steps are lost.  Both of the latter are marked as estimates.  Lost
time is the number of lost steps times the attempt's mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stepscope.diagnosis.engine.attempts import attempts_of
from stepscope.goodput.accounts import STALL_TIMES, ProcessAccount, process_account, sums_of
from stepscope.records.hang import HangRecord
from stepscope.records.series import ALIVE, RankSeries, RunData

__all__ = [
    "PARTS",
    "AttemptAccount",
    "AttemptLedger",
    "Ledger",
    "LostBy",
    "Resumption",
    "RunAccount",
    "account_of",
    "evaluated_after_ns",
    "hang_stretches",
    "ledger_from",
    "ledger_of",
    "lost_steps",
    "rounded",
]

PARTS = (
    *("start_up", "imports", "process_group", "compile", "training", "evaluation", "checkpoint", "stalls", "hang"),
    *("lost", "restart", "shutdown", "unknown"),
)
MOST_RANKS = 512
"""Processes of an attempt that are averaged; of more, evenly spaced ones."""
UNTIL_FIRST_STEP = ("launch", "imports", "process_group", "setup")
LostBy = Literal["counter", "checkpoint", "no_checkpoint", ""]
"""How it is known where the next attempt resumed; empty: nothing was lost."""

Parts = dict[str, float]
Stretch = tuple[int, int]


# -- input ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttemptAccount:
    number: int
    processes: tuple[ProcessAccount, ...]
    """Empty if the attempt failed before anything was recorded."""
    failed_ns: int = 0
    """When such an attempt was last heard of."""


@dataclass(frozen=True, kw_only=True)
class RunAccount:
    created_ns: int
    until_ns: int
    """The end; of an active run, now."""
    active: bool
    attempts: tuple[AttemptAccount, ...]
    hangs: tuple[Stretch, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What decides how many steps of an attempt are lost."""

    steps: int
    unsaved: int | None
    """Steps after the last checkpoint; None: no checkpoint was seen."""
    first: int | None = None
    """The script's own count at the first step; None: it has none."""
    per_step: float = 1.0
    """How far that count moves in one of our steps."""


# -- output -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttemptLedger:
    number: int
    began_wall_ns: int
    ended_wall_ns: int
    ranks: int
    parts: Mapping[str, float]
    """Seconds."""
    until_first_step: Mapping[str, float]
    """Seconds by ``UNTIL_FIRST_STEP``: what start-up or restart consists of."""
    step_s: float
    resumption: Resumption
    lost_steps: int = 0
    lost_by: LostBy = ""

    @property
    def seconds(self) -> float:
        return (self.ended_wall_ns - self.began_wall_ns) / 1e9

    def to_dict(self) -> dict[str, Any]:
        from_ = self.resumption
        return {
            "attempt": self.number,
            "began_wall_ns": self.began_wall_ns,
            "ended_wall_ns": self.ended_wall_ns,
            "seconds": round(self.seconds, 3),
            "goodput": _share(self.parts, self.seconds),
            "ranks": self.ranks,
            "parts": dict(self.parts),
            "until_first_step": dict(self.until_first_step),
            "steps": from_.steps,
            "step_s": round(self.step_s, 6),
            "resumed_at": from_.first,
            "count_per_step": from_.per_step,
            "unsaved_steps": from_.unsaved,
            "lost_steps": self.lost_steps,
            "lost_by": self.lost_by,
        }


@dataclass(frozen=True, kw_only=True)
class Ledger:
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part, in the order of ``PARTS``; they add up to ``seconds``."""
    attempts: tuple[AttemptLedger, ...]
    active: bool

    @property
    def goodput(self) -> float | None:
        """The share of useful training; None for a run without any duration."""
        return _share(self.parts, self.seconds)

    @property
    def unsaved(self) -> AttemptLedger | None:
        """The last attempt, if its last steps are in no checkpoint that was seen: what a failure now would lose."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.resumption.steps and last.resumption.unsaved != 0 else None

    def to_dict(self) -> dict[str, Any]:
        """The document of ``stepscope goodput --json``, the summary and the API (docs/goodput.md)."""
        return {
            "seconds": self.seconds,
            "goodput": self.goodput,
            "parts": dict(self.parts),
            "restarts": max(len(self.attempts) - 1, 0),
            "lost_steps": sum(attempt.lost_steps for attempt in self.attempts),
            "estimated": any(attempt.lost_by in ("checkpoint", "no_checkpoint") for attempt in self.attempts),
            "active": self.active,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
        }


def _share(parts: Mapping[str, float], seconds: float) -> float | None:
    return round(parts["training"] / seconds, 4) if seconds > 0 else None


# -- accounts of a run ------------------------------------------------------------------------------------------------


def ledger_of(run: RunData, *, now_ns: int | None = None) -> Ledger | None:
    """The ledger of a run in any state; ``now_ns``: until when, if it is active.  None: its times are unknown."""
    account = account_of(run, now_ns=now_ns)
    return None if account is None else ledger_from(account)


def account_of(run: RunData, *, now_ns: int | None = None) -> RunAccount | None:
    created = run.meta.get("created_wall_ns")
    if type(created) is not int:
        return None
    ages = {(event.get("pid"), event.get("host")): event.get("age_s") for event in run.events if _is_start(event)}
    attempts = tuple(
        AttemptAccount(
            number=attempt.number,
            processes=tuple(_account(run, series, ages) for series in _averaged(attempt.series)),
            failed_ns=max((error.wall_ns for error in attempt.errors), default=0),
        )
        for attempt in attempts_of(run)
    )
    until_ns = _until(run, attempts) if now_ns is None else now_ns
    return RunAccount(
        created_ns=created,
        until_ns=max(until_ns, created),
        active=now_ns is not None,
        attempts=attempts,
        hangs=hang_stretches(run.hangs),
    )


def hang_stretches(hangs: Iterable[HangRecord]) -> tuple[Stretch, ...]:
    """From the last progress to the recovery, or without end: an attempt ends its own (``_hangs_in``)."""
    return tuple(
        (hang.stopped_wall_ns, hang.over_wall_ns if hang.over == "recovered" and hang.over_wall_ns else LATER_NS)
        for hang in hangs
    )


LATER_NS = 1 << 62


def _is_start(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "rank_start" and type(event.get("age_s")) in (int, float)


def _averaged(series: Sequence[RankSeries]) -> Sequence[RankSeries]:
    """Ranks that made steps, if any did: a process that only prepares or evaluates does not count."""
    trained = [each for each in series if len(each.steps)] or list(series)
    every = -(-len(trained) // MOST_RANKS) or 1
    return trained[::every]


def _account(run: RunData, series: RankSeries, ages: Mapping[Any, Any]) -> ProcessAccount:
    age_s = ages.get((series.identity.pid, series.identity.host))
    found = process_account(series, sums_of(series.steps), age_s=age_s)
    if found.last_ns is None:
        return found
    return replace(found, evaluated_ns=evaluated_after_ns(run, series, found.last_ns))


def evaluated_after_ns(run: RunData, series: RankSeries, last_ns: int) -> float:
    """What a rank evaluated after its last step, which no step contains: as the stacks sampled there show it.

    The time is until its last change of phase; of that, the share of the samples that were in an evaluation.
    """
    until_ns = series.live_since_ns - series.anchor_mono_ns + series.anchor_wall_ns
    phases = [
        stack.get("phase")
        for stack in run.stacks
        if stack.get("rank") == series.rank and last_ns < stack.get("wall_ns", 0) <= until_ns
    ]
    return (until_ns - last_ns) * phases.count("eval") / len(phases) if phases else 0.0


def _until(run: RunData, attempts: Sequence[AttemptAccount]) -> int:
    """The recorded end, or the last that was heard of a run that was cut off."""
    end = run.meta.get("end")
    if isinstance(end, dict) and type(end.get("wall_ns")) is int:
        return int(end["wall_ns"])
    return max((_heard_ns(attempt) for attempt in attempts), default=0)


# -- ledger -----------------------------------------------------------------------------------------------------------


def ledger_from(run: RunAccount) -> Ledger:
    bounds = _bounds(run)
    found: list[AttemptLedger] = []
    for place, attempt in enumerate(run.attempts):
        begin, end = bounds[place], bounds[place + 1]
        if place < len(run.attempts) - 1 and begin == end and not attempt.processes:
            continue
        own = replace(run, hangs=_hangs_in(run.hangs, begin, end))
        found.append(_attempt(attempt, begin, end, own, restarted=bool(found)))
    settled = [
        with_lost(attempt, count, by)
        for attempt, (count, by) in zip(found, lost_steps([each.resumption for each in found]), strict=True)
    ]
    sums = {part: sum(attempt.parts[part] for attempt in settled) for part in PARTS}
    return Ledger(
        seconds=round((run.until_ns - run.created_ns) / 1e9, 3),
        parts=rounded(sums),
        attempts=tuple(replace(attempt, parts=rounded(attempt.parts)) for attempt in settled),
        active=run.active,
    )


def _hangs_in(hangs: Iterable[Stretch], begin: int, end: int) -> tuple[Stretch, ...]:
    """The hangs of an attempt, without overlaps, in order: one without a recovery lasts until its end, not longer."""
    found: list[Stretch] = []
    for since, until in sorted(hang for hang in hangs if begin <= hang[0] < end):
        after = max(since, found[-1][1] if found else begin)
        if min(until, end) > after:
            found.append((after, min(until, end)))
    return tuple(found)


def with_lost(attempt: AttemptLedger, count: int, by: LostBy) -> AttemptLedger:
    """Move the mean time of so many steps from training to lost."""
    steps = attempt.resumption.steps
    moved = attempt.parts["training"] * count / steps if steps else 0.0
    parts = {**attempt.parts, "training": attempt.parts["training"] - moved, "lost": attempt.parts["lost"] + moved}
    return replace(attempt, parts=parts, lost_steps=count, lost_by=by if count else "")


def lost_steps(attempts: Sequence[Resumption]) -> list[tuple[int, LostBy]]:
    """How many steps of each attempt a later one made again, and how that is known."""
    found: list[tuple[int, LostBy]] = []
    for place, own in enumerate(attempts):
        later = [attempt for attempt in attempts[place + 1 :] if attempt.steps]
        if not later or not own.steps:
            found.append((0, ""))
            continue
        by: LostBy = "no_checkpoint"
        lost = own.steps
        counted = [attempt.first for attempt in later if attempt.first is not None]
        if own.first is not None and later[0].first is not None:
            resumed = max(min(counted), own.first)
            lost = round(own.steps - (resumed - own.first) / (own.per_step or 1.0))
            by = "counter"
        elif own.unsaved is not None:
            lost, by = own.unsaved, "checkpoint"
        found.append((min(max(lost, 0), own.steps), by))
    return found


def _bounds(run: RunAccount) -> list[int]:
    """Where the attempts begin, and the end of the last; ascending, within the run.

    A process may be found dead only after the next attempt has begun.
    """
    bounds = [run.created_ns]
    for attempt, following in zip(run.attempts, run.attempts[1:], strict=False):
        begun = [process.started_ns or process.anchor_ns for process in following.processes]
        end_ns = min([_heard_ns(attempt), *begun])
        bounds.append(min(max(end_ns, bounds[-1]), run.until_ns))
    return [*bounds, run.until_ns]


def _heard_ns(attempt: AttemptAccount) -> int:
    """When an attempt was last heard of: the end of its processes, or the error of one that was never recorded."""
    ends = [max(each.ended_ns or 0, each.last_ns or 0, each.anchor_ns) for each in attempt.processes]
    return max(ends) if ends else attempt.failed_ns


def _attempt(attempt: AttemptAccount, begin: int, end: int, run: RunAccount, *, restarted: bool) -> AttemptLedger:
    rows = [_of_process(process, begin, end, run) for process in attempt.processes]
    rows = rows or [({}, {"launch": float(end - begin)})]
    parts = {part: sum(row.get(part, 0.0) for row, _ in rows) / len(rows) / 1e9 for part in PARTS}
    until = {part: sum(row.get(part, 0.0) for _, row in rows) / len(rows) / 1e9 for part in UNTIL_FIRST_STEP}
    if restarted:
        parts["restart"] += sum(until.values())
    else:
        parts["start_up"] += until["launch"] + until["setup"]
        parts["imports"] += until["imports"]
        parts["process_group"] += until["process_group"]
    most = max(attempt.processes, key=lambda process: process.sums.steps, default=None)
    return AttemptLedger(
        number=attempt.number,
        began_wall_ns=begin,
        ended_wall_ns=end,
        ranks=len(attempt.processes),
        parts=parts,
        until_first_step={part: round(seconds, 3) for part, seconds in until.items()},
        step_s=0.0 if most is None else most.sums.step_ns / 1e9,
        resumption=Resumption(steps=0, unsaved=None) if most is None else _resumption(attempt.processes, most),
    )


def _resumption(processes: Sequence[ProcessAccount], most: ProcessAccount) -> Resumption:
    """Of the rank with most steps; usually only one rank writes the checkpoint."""
    saved = [process.sums.unsaved for process in processes if process.sums.unsaved is not None]
    counter = next((process.counter for process in (most, *processes) if process.counter), {})
    first, last, at = (counter.get(key) for key in ("first", "last", "at"))
    per_step = (last - first) / at if type(last) is type(first) is type(at) is int and at > 0 and last > first else 1.0
    return Resumption(
        steps=most.sums.steps,
        unsaved=min(saved) if saved else None,
        first=first if type(first) is int else None,
        per_step=round(per_step, 6),
    )


def _of_process(process: ProcessAccount, begin: int, end: int, run: RunAccount) -> tuple[Parts, Parts]:
    """Nanoseconds by part from the first step on, and before it."""
    alive = run.active and process.state in ALIVE and process.ended_ns is None
    gone = end if alive or process.ended_ns is None else process.ended_ns
    first = _inside(gone if process.first_ns is None else process.first_ns, begin, end)
    before = _until_first_step(process, begin, first)
    parts: Parts = dict.fromkeys(PARTS, 0.0)
    if process.first_ns is None or process.last_ns is None:
        stuck = _overlap(run.hangs, _inside(process.anchor_ns, begin, first), first)
        parts["hang"] = _take(before, stuck, ("process_group", "setup", "imports", "launch"))
        parts["shutdown"] = float(end - first)
        return parts, before
    last = _inside(process.last_ns, first, end)
    gone = _inside(gone, last, end)
    parts |= _of_steps(process, last - first, _overlap(run.hangs, first, last))
    rest = float(gone - last)
    hung = min(float(_overlap(run.hangs, last, gone)), rest)
    evaluated = min(process.evaluated_ns, rest - hung)
    parts["hang"] += hung
    parts["evaluation"] += evaluated
    rest -= hung + evaluated
    usual = STALL_TIMES * process.sums.step_ns
    if alive:
        part = {"eval": "evaluation", "checkpoint": "checkpoint"}.get(process.live_phase)
        if part is None:
            part = "training" if process.sums.plain else "compile"
        within = min(rest, usual) if part == "training" else rest
        parts[part] += within
        parts["stalls"] += rest - within
    elif process.state == "exited":
        parts["shutdown"] += rest
    else:
        parts["lost"] += min(rest, usual)
        parts["shutdown"] += max(rest - usual, 0.0)
    parts["shutdown"] += end - gone
    return parts, before


def _until_first_step(process: ProcessAccount, begin: int, first: int) -> Parts:
    started = _inside(process.started_ns or process.anchor_ns, begin, first)
    imported = started
    if process.started_ns is not None and process.imported_ns is not None:
        imported = _inside(process.imported_ns, started, first)
    # A process that has not returned from init_process_group is still in it: nothing else is recorded there.
    joining = process.joined_ns is None and process.in_group and process.first_ns is None
    enters = imported if process.joined_ns is None and not joining else _inside(process.anchor_ns, imported, first)
    joined = first if joining else enters if process.joined_ns is None else _inside(process.joined_ns, enters, first)
    return {
        "launch": float(started - begin),
        "imports": float(imported - started),
        "process_group": float(joined - enters),
        "setup": float(enters - imported + first - joined),
    }


def _of_steps(process: ProcessAccount, between_ns: int, hung_ns: int) -> Parts:
    """Between the first and the last step: what the steps took, and what is missing."""
    sums = process.sums
    compiled = max(sums.started_ns - (sums.steps - sums.plain) * sums.step_ns, 0.0)
    spent = {
        "compile": compiled,
        "training": sums.plain_ns - sums.stalled_ns + sums.started_ns - compiled,
        "evaluation": sums.eval_ns,
        "checkpoint": sums.checkpoint_ns,
        "stalls": sums.stalled_ns,
        "unknown": 0.0,
    }
    recorded = sum(spent.values())
    if recorded > between_ns:  # the clock was set, or the attempt's end is known better than the step's
        spent = {part: took_ns * between_ns / recorded for part, took_ns in spent.items()}
    else:
        spent["unknown"] = between_ns - recorded
    spent["hang"] = _take(spent, hung_ns, ("stalls", "unknown", "training", "compile"))
    return spent


def _take(parts: Parts, amount: float, order: Sequence[str]) -> float:
    """Take up to ``amount`` out of these parts, in order; return how much that was."""
    left = float(amount)
    for part in order:
        taken = min(parts[part], left)
        parts[part] -= taken
        left -= taken
    return amount - left


def _overlap(stretches: Iterable[Stretch], begin: int, end: int) -> int:
    return sum(max(min(until, end) - max(since, begin), 0) for since, until in stretches)


def _inside(at_ns: int, begin: int, end: int) -> int:
    return min(max(at_ns, begin), end)


def rounded(parts: Mapping[str, float]) -> Parts:
    """Seconds with three digits that still add up: their running sum is rounded."""
    out: Parts = {}
    before, total = 0, 0.0
    for part, seconds in parts.items():
        total += seconds
        until = round(total * 1e3)
        out[part] = max(until - before, 0) / 1e3
        before = max(until, before)
    return out
