"""A hang as people read it: the finding, the advice, the lines for a terminal, the state of each rank.

The sentence is the same in the terminal, in ``findings.json`` and in the summary.

The finding's evidence: ``number`` and ``host`` (which name its file), ``hosts`` (judged together), ``culprits``
(``rank``, ``reason``, ``file``, ``line``, ``function``), ``victims``, ``undecidable``, ``group``, ``sequence``, ``op``
and ``sizes`` of the collective that they wait in, ``cycle``, ``stopped_wall_ns`` (last sign of any rank), ``stood_s``
(from then until the end, or the declaration), ``threshold_s``, ``over``, ``action``, ``told_by`` (sentences).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from stepscope.flight.stacks import is_hook_file, is_user_file, main_thread
from stepscope.flight.wording import (
    SOURCE_CHARS,
    collective_text,
    file_name,
    group_text,
    more_than_text,
    one_line,
    place_text,
    ranks_text,
    steps_text,
)
from stepscope.hangs.activity import BLOCKED, WAITS
from stepscope.hangs.thresholds import SURE, UNSURE
from stepscope.records.collectives import group_name
from stepscope.records.finding import Finding
from stepscope.records.hang import Culprit, Frame, HangRecord, RankThere, StackGroup
from stepscope.records.text import duration_text, hang_name

__all__ = [
    "HUNG",
    "finding_of",
    "hang_lines",
    "hang_state_by_rank",
    "past_if_over",
    "past_text",
    "past_title",
    "since_text",
    "stalled_s",
    "steps_of",
    "title_of",
]


# -- advice -----------------------------------------------------------------------------------------------------------
# What to do about a hang, by its kind and what is known about its culprits.

FETCHING = "torch/utils/data/_utils/fetch.py"

BY_KIND = {
    "hang_missing_collective": (
        "All ranks of a group have to make the same calls in the same order.",
        "Look for a branch, an early return or an exception handler that only some ranks take.",
    ),
    "hang_mismatch": (
        "Compare what determines this call (shapes, dtypes, a condition) on a culprit and on another rank.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL checks each call against the other ranks', at some cost.",
    ),
    "hang_deadlock": (
        "The ranks enter their groups in different orders: make all of them use the groups in the same order.",
        "Or a rank skipped a call: look for a branch, an early return or an exception handler that only some take.",
    ),
    "hang_device": (
        "dmesg shows the Xid errors of a GPU that failed; CUDA_LAUNCH_BLOCKING=1 shows which kernel does not end.",
    ),
    "rank_crashed": ("The others wait for a rank that is gone: end the job, and check its log for the reason.",),
    "rank_lost": ("Look at the hosts of those ranks: what their own watchdog found is in hangs/ if it arrived.",),
    "hang_unknown": ("py-spy dump --native --pid PID shows where the ranks are in C, if permitted here.",),
}


def advice_for(record: HangRecord) -> tuple[str, ...]:
    if record.over == "recovered":
        return (*_where(record), "If this is expected, raise --hang-after to avoid this report.")
    if record.kind == "hang_input":
        return (*_where(record), *_of_input(record))
    if record.kind == "hang_host":
        return (*_where(record), *_of_host(record))
    if record.kind == "hang_deadlock" and (left_out := _left_out(record)):
        return left_out
    if record.kind == "hang_missing_collective" and (stuck := _stuck_before_call(record)):
        return (*_where(record), *stuck)
    if record.kind == "rank_crashed" and record.over is not None:
        return (*_where(record), "Check its log for the reason.")
    if record.kind == "rank_lost" and record.culprits:
        return (*_where(record), "Check that host and its connection: power, kernel log, network.")
    return (*_where(record), *BY_KIND.get(record.kind, ()))


def _where(record: HangRecord) -> tuple[str, ...]:
    at = next((culprit.at for culprit in record.culprits if culprit.at is not None), None)
    if at is None or not at.line:
        return ()
    return (f"Begin at {file_name(at.file)}:{at.line} in {at.function}.",)


def _left_out(record: HangRecord) -> tuple[str, ...]:
    """Advice if ranks are in a later step than those that wait for them in a call: they skipped it."""
    there = {rank.rank: rank for rank in record.ranks}
    for row in record.flight.get("wait_for", ()):
        waiters, waited = ([there[rank] for rank in row[side] if rank in there] for side in ("waiters", "waited"))
        early, late = ([rank.step for rank in side if rank.step is not None] for side in (waiters, waited))
        if not early or len(early) < len(waiters) or len(late) < len(row["waited"]) or max(early) >= min(late):
            continue
        at = next((place_text(rank.at, {}) for rank in waiters if rank.at is not None), "")
        call = f"{row['op']} number {row['sequence']} of {group_name(row['group'], row['description'])}"
        wait = "waited" if record.over is not None else "waits" if len(waiters) == 1 else "wait"
        text = (
            f"{ranks_text(row['waited'], start=True)} continued to step {min(late):,} without {call}, in which "
            f"{ranks_text(row['waiters'])} {wait} in step {max(early):,}"
            f"{f', at {at}' if at else ''}: look for a branch that only some ranks take."
        )
        return text, "If it comes later there by design, make all ranks use the groups in the same order."
    return ()


def _stuck_before_call(record: HangRecord) -> tuple[str, ...]:
    """Advice if the culprits wait at a line of their own: no branch leads around the call, they do not get to it."""
    if not record.culprits or not all(_waits_alone(culprit.reason) for culprit in record.culprits):
        return ()
    ranks = ranks_text([culprit.rank for culprit in record.culprits], start=True)
    its = "its" if len(record.culprits) == 1 else "a rank's"
    past = "did not get" if record.over is not None else "does not get" if len(record.culprits) == 1 else "do not get"
    return (
        f"{ranks} {past} to the call: find out what that line waits for.",
        f"What failed before is often in {its} log, and who should wake it in the stacks of its other threads.",
    )


def _waits_alone(reason: str) -> bool:
    does = reason.partition("; it ")[2]
    return does.startswith(("sleeps", BLOCKED, *(words for _, words in WAITS)))


def _of_input(record: HangRecord) -> tuple[str, ...]:
    reasons = " ".join(culprit.reason for culprit in record.culprits)
    if "SIGSTOP" in reasons:
        resumes = "resumes" if record.over is None else "would have resumed"
        return (f"The worker process was stopped: kill -CONT its pid {resumes} it.",)
    if "died" in reasons or "are gone" in reasons or "were gone" in reasons:
        return ("A worker that died silently was often killed for lack of memory (dmesg) or by a full /dev/shm.",)
    if _makes_batches_itself(record):
        return (
            "The training process makes its batches itself (num_workers=0): look at what that line waits for.",
            "DataLoader(num_workers=1, timeout=…) turns a batch that never comes into an exception.",
        )
    return ("DataLoader(timeout=…) turns a worker that never answers into an exception; look at what it reads from.",)


def _makes_batches_itself(record: HangRecord) -> bool:
    """Whether a culprit fetches samples itself, without workers: then a DataLoader refuses a timeout."""
    culprits = {culprit.rank for culprit in record.culprits}
    return any(
        frame.file.endswith(FETCHING)
        for group in record.stacks
        if not group.workers_of and culprits.intersection(group.ranks)
        for thread in group.threads
        if thread.main
        for frame in thread.frames
    )


def _of_host(record: HangRecord) -> tuple[str, ...]:
    pids = {rank.rank: rank.pid for rank in record.ranks}
    first = record.culprits[0] if record.culprits else None
    reason = first.reason if first is not None else ""
    if first is not None and "stopped" in reason:
        if record.over is not None:
            return ("SIGSTOP is sent by a user or a debugger; kill -CONT would have resumed it.",)
        return (f"kill -CONT {pids.get(first.rank, 'PID')} resumes it; SIGSTOP is sent by a user or a debugger.",)
    if "GIL" in reason:
        return ("The C call at that line never releases the GIL: it blocks all threads of the process.",)
    if "disk" in reason:
        return ("The disk or network file system does not answer: look at dmesg and at its server.",)
    return ()


# -- past tense -------------------------------------------------------------------------------------------------------
# The judge writes in the present tense, and the record keeps that; once the hang is over it is put in the past tense.
#
#     past_if_over(record, over=True).title  # "Rank 1 never called …: it slept at a.py:41 (…); rank 0 waited for it."
#
# The judge uses few verbs, so a table covers them all. Text that is not the judge's stays unchanged: lines of code in
# brackets after their place, names after ``in``, ``of``, ``at`` and ``on``, and the words of a rank that died.

PAST = {
    "is": "was",
    "are": "were",
    "has": "had",
    "have": "had",
    "does": "did",
    "do": "did",
    "waits": "waited",
    "wait": "waited",
    "disagree": "disagreed",
    "sleeps": "slept",
    "sleep": "slept",
    "stands": "stood",
    "hangs": "hung",
    "holds": "held",
    "uses": "used",
    "answers": "answered",
    "need": "needed",
    "says": "said",
    "comes": "came",
    "computes": "computed",
    "imports": "imported",
    "compiles": "compiled",
    "evaluates": "evaluated",
    "reads": "read",
    "writes": "wrote",
}
_CODE = re.compile(r":\d+ \(")
"""A line of code begins after its number …"""
_GOES_ON = re.compile(r"\)(?=[;,.:]|$| (?:has|have|had|called|left|never|raised)\b)")
"""… and ends with a bracket after which a sentence can continue."""
_VERB = re.compile(
    rf"(?<![\w./:'\"-])(?<!\bin )(?<!\bof )(?<!\bat )(?<!\bon )(?<!\bhost )({'|'.join(PAST)})(?![\w(='\"-]|[./:]\w)"
)
_WAITERS = re.compile(r"(; ranks? [\d, –and…]+?) waits? (for (?:it|them)\b)(?!.*; ranks? [\d, –and…]+? waits? for)")


def past_if_over(record: HangRecord, *, over: bool = False) -> HangRecord:
    """The record in the past tense if the hang is over, else unchanged.

    ``over``: whether the job is over, if the end of the hang was not observed.
    """
    if record.over is None and not over:
        return record
    parts = tuple(replace(part, title=past_title(part.kind, part.title)) for part in record.parts)
    record = replace(record, title=past_title(record.kind, record.title), parts=parts, flight=_flight(record.flight))
    if record.kind == "rank_crashed":
        return record
    return replace(
        record,
        culprits=tuple(replace(culprit, reason=past_text(culprit.reason)) for culprit in record.culprits),
        cycle=tuple(map(past_text, record.cycle)),
        evidence=tuple(map(past_text, record.evidence)),
    )


def past_text(text: str) -> str:
    """Put a sentence of the judge in the past tense; one that is in it already stays."""
    code = _CODE.search(text)
    if code is None:
        return _VERB.sub(lambda verb: PAST[verb[1]], text)
    end = _end_of_code(text, code.end() - 1)
    return past_text(text[: code.start()]) + text[code.start() : end] + past_text(text[end:])


def _end_of_code(text: str, begin: int) -> int:
    """Where its brackets close; for code that was cut, or is unbalanced, the first possible end."""
    depth = 0
    for at in range(begin, min(len(text), begin + SOURCE_CHARS + 2)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0 and _GOES_ON.match(text, at):
            return at + 1
    cut = text.find("…)", begin, begin + SOURCE_CHARS + 2)
    if cut >= 0:
        return cut + 2
    first = _GOES_ON.search(text, begin)
    return first.end() if first is not None else len(text)


def past_title(kind: str, title: str) -> str:
    """Of a death, change only the part about waiting ranks: the rest has the words of an exception."""
    return _WAITERS.sub(r"\1 waited \2", title) if kind == "rank_crashed" else past_text(title)


def _flight(flight: dict[str, Any]) -> dict[str, Any]:
    title = flight.get("title")
    return {**flight, "title": past_title(str(flight.get("kind")), title)} if isinstance(title, str) else flight


# -- finding ----------------------------------------------------------------------------------------------------------

RANKS_LISTED = 64
"""Culprits whose reasons are in the evidence; the record has all."""


def finding_of(record: HangRecord, *, over: bool = False) -> Finding:
    """The finding for a hang; a ``stall`` if the job recovered. ``over``: see ``past_if_over``."""
    record = past_if_over(record, over=over)
    back = record.over == "recovered"
    seconds = stalled_s(record)
    there = {rank.rank: rank for rank in record.ranks}
    of_culprits = [there[culprit.rank] for culprit in record.culprits if culprit.rank in there]
    phases = {rank.phase for rank in of_culprits}
    return Finding(
        kind="stall" if back else record.kind,
        severity="warning" if back else "critical",
        title=title_of(record),
        ranks=tuple(sorted({culprit.rank for culprit in record.culprits})),
        phase=phases.pop() or None if len(phases) == 1 else None,
        steps=steps_of(record),
        cost={
            "share": 0.0,
            "seconds": round(seconds, 3),
            "rank_hours": round(seconds * len(record.ranks) / 3600, 4),
            "if_fixed": None,
        },
        evidence=_evidence(record, seconds),
        advice=advice_for(record),
        confidence=UNSURE if record.undecidable else SURE,
    )


def title_of(record: HangRecord) -> str:
    """The record's title, with the duration if no rank waits and nothing else says that something is wrong."""
    seconds, record = stalled_s(record), past_if_over(record)
    if record.over == "recovered":
        then = record.title.replace(" never called ", " had not called ", 1)
        return f"The job hung for {duration_text(seconds, whole=True)} and recovered. {then}"
    if record.victims or record.kind not in ("hang_host", "hang_input"):
        return record.title
    # Written once and read while it lasts: for a hang that continues, say only what stays true.
    ended = record.over is not None
    long = duration_text(seconds, whole=True) if ended else more_than_text(seconds)
    return f"{record.title.removesuffix('.')}; no progress for {long}."


def steps_of(record: HangRecord) -> tuple[int, int] | None:
    """First and last of the steps that were active at the stop, over the ranks involved."""
    involved = {*(culprit.rank for culprit in record.culprits), *record.victims}
    known = {rank.rank: rank.step for rank in record.ranks if rank.step is not None}
    steps = [step for rank, step in known.items() if rank in involved] or list(known.values())
    return (min(steps), max(steps)) if steps else None


def stalled_s(record: HangRecord) -> float:
    """Seconds without progress, as far as known."""
    until_ns = record.over_wall_ns if record.over_wall_ns is not None else record.declared_wall_ns
    return max(until_ns - record.stopped_wall_ns, 0) / 1e9


def _evidence(record: HangRecord, seconds: float) -> dict[str, Any]:
    waiting = record.collective
    return {
        "number": record.number,
        "host": record.host,
        "hosts": list(record.hosts),
        "culprits": [
            {
                "rank": culprit.rank,
                "reason": culprit.reason,
                "file": culprit.at.file if culprit.at else None,
                "line": culprit.at.line if culprit.at else None,
                "function": culprit.at.function if culprit.at else None,
            }
            for culprit in record.culprits[:RANKS_LISTED]
        ],
        "victims": list(record.victims),
        "undecidable": record.undecidable,
        "group": group_text(waiting) or None if waiting else None,
        "sequence": waiting.sequence if waiting else None,
        "op": waiting.op or None if waiting else None,
        "sizes": waiting.sizes or None if waiting else None,
        "cycle": list(record.cycle),
        "stopped_wall_ns": record.stopped_wall_ns,
        "stood_s": round(seconds, 3),
        "threshold_s": record.threshold_s,
        "over": record.over,
        "action": record.action or None,
        "told_by": list(record.evidence),
    }


# -- text -------------------------------------------------------------------------------------------------------------
# A hang as lines for a terminal: culprits, places, waiting ranks and their collective; then the stacks, equal ones
# once.
#
# This is not among the reports because the agent, which reports first, must not load their dependencies.

LABEL = 10
"""Width of the labels at the left."""
NARROWEST = 60
CULPRITS_SHOWN = 4
CYCLE_SHOWN = 8
GROUPS_SHOWN = 6
FRAMES_SHOWN = 6
SIZES_CHARS = 60
FILES_SHOWN = 3
DURATION = "{duration}"
ENDINGS = {"recovered": "then continued", "ended": "until the job ended", "aborted": "until the job was aborted"}


def hang_lines(
    record: HangRecord,
    width: int = 80,
    *,
    title: bool = True,
    now_wall_ns: int | None = None,
    steps: tuple[int, int] | None = None,
) -> list[str]:
    """The lines for one hang.

    ``title``: whether to include the title; a page that leads with it need not repeat it. ``now_wall_ns``: the current
    time, for a job known to be running; without it, an unfinished hang is described as of its declaration. ``steps``:
    the result of ``steps_of``, for a record without its ranks.
    """
    width = max(width, NARROWEST)
    lines = textwrap.wrap(one_line(record.title, 600), width, break_on_hyphens=False) if title else []
    lines += _labeled("culprit", _culprits(record), width)
    lines += _labeled("waiting", _waiting(record), width)
    lines += _labeled("cycle", _cycle(record), width)
    lines += _labeled("evidence", record.evidence, width)
    since = since_text(
        record, ongoing=now_wall_ns is not None, steps=steps or steps_of(record), now_wall_ns=now_wall_ns
    )
    lines += _labeled("since", [since], width)
    lines += _labeled("done", [record.action] if record.action else (), width)
    for number, group in enumerate(record.stacks[:GROUPS_SHOWN]):
        lines += _labeled("" if number else "stacks", [_whose(group)], width)
        lines += [_cut(f"  {'':{LABEL}}  {line}", width) for line in _frames(group)]
    left = len(record.stacks) - GROUPS_SHOWN
    more = (
        f"{left} more kinds of stacks and all threads"
        if left > 0
        else "all threads of all ranks"
        if record.stacks
        else ""
    )
    lines += _labeled("", [f"{more}: {_files(record)}"] if more else (), width)
    return lines


def _files(record: HangRecord) -> str:
    """The files with all details; one per host if several hosts saw the hang."""
    names = [hang_name(part.host, part.number) for part in record.parts] or [hang_name(record.host, record.number)]
    left = len(names) - FILES_SHOWN
    return ", ".join(f"hangs/{name}" for name in names[:FILES_SHOWN]) + (f" and {left} more" if left > 0 else "")


def _labeled(label: str, texts: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for text in texts:
        for part in textwrap.wrap(" ".join(text.split()), width - 2 - LABEL, break_on_hyphens=False):
            lines.append(f"  {label:{LABEL}}{part}")
            label = ""
    return lines


def _culprits(record: HangRecord) -> list[str]:
    """Culprits with the same reason together."""
    alike: dict[tuple[str, Frame | None], list[Culprit]] = {}
    for culprit in record.culprits:
        alike.setdefault((culprit.reason, culprit.at), []).append(culprit)
    texts = []
    for (reason, at), culprits in list(alike.items())[:CULPRITS_SHOWN]:
        each = ": each" if len(culprits) > 1 else ""
        who = ranks_text(culprit.rank for culprit in culprits)
        texts.append(f"{who}{_on_host(record, culprits)}{each} {reason}")
        if at is not None and at.line:
            texts.append(f"{at.file}, line {at.line}, in {at.function}")
    if len(alike) > CULPRITS_SHOWN:
        texts.append(f"… and {len(alike) - CULPRITS_SHOWN} more places")
    if not texts and record.undecidable:
        texts.append("cannot be determined from what is known here")
    return texts


def _on_host(record: HangRecord, culprits: Sequence[Culprit]) -> str:
    """The host, if several hosts were judged together."""
    hosts = {rank.rank: rank.host for rank in record.ranks}
    own = {hosts.get(culprit.rank, "") for culprit in culprits}
    return f" on {own.pop()}" if len(record.hosts) > 1 and len(own) == 1 and "" not in own else ""


def _waiting(record: HangRecord) -> list[str]:
    if not record.victims:
        return []
    waiting = record.collective
    details = [waiting.sizes, waiting.dtypes] if waiting is not None else []
    about = one_line(" ".join(detail for detail in details if detail), SIZES_CHARS)
    call = f" in {collective_text(waiting)}" if waiting is not None else ""
    return [f"{ranks_text(record.victims)}{call}{f', {about}' if about else ''}"]


def _cycle(record: HangRecord) -> list[str]:
    shown = list(record.cycle[:CYCLE_SHOWN])
    return [*shown, f"… {len(record.cycle) - CYCLE_SHOWN} more"] if len(record.cycle) > CYCLE_SHOWN else shown


def since_text(
    record: HangRecord, *, ongoing: bool, steps: tuple[int, int] | None, now_wall_ns: int | None = None
) -> str:
    """For how long the job makes no progress, without capital and full stop.

    ``ongoing``: the hang lasts, so the duration grows: until ``now_wall_ns``, or, without it, a reader that counts puts
    it in place of ``DURATION``.
    """
    where = f" in {steps_text(*steps)}" if steps else ""
    usual = f"; a step usually takes {duration_text(record.step_s)}" if record.step_s else ""
    stalled = duration_text(stalled_s(record), whole=True)
    if record.over is not None:
        return f"it hung for {stalled}{where}, {ENDINGS[record.over]}{usual}"
    if not ongoing:
        return f"no progress for {stalled}{where} when this was written; how it ended is not known{usual}"
    if now_wall_ns is None:
        return f"no progress for {DURATION}{where}{usual}"
    long_s = max(stalled_s(record), (now_wall_ns - record.stopped_wall_ns) / 1e9)
    return f"no progress for {duration_text(long_s, whole=True)}{where}{usual}"


def _whose(group: StackGroup) -> str:
    threads = len(group.threads)
    more = f" (main thread; {threads} threads)" if threads > 1 else ""
    return ("DataLoader workers of " if group.workers_of else "") + ranks_text(group.ranks) + more


def _frames(group: StackGroup) -> list[str]:
    """Frames of the main thread: the innermost, then the user's lines; those in between are left out."""
    main = main_thread(group.threads)
    frames: Sequence[Frame] = (
        [frame for frame in main.frames if not is_hook_file(frame.file)] if main is not None else ()
    )
    own = [frame for frame in frames if is_user_file(frame.file)]
    shown = [*([frames[0]] if frames and frames[0] not in own else []), *own] or list(frames)
    lines = [f"{_short(frame)}:{frame.line or '?'} in {frame.function}" for frame in shown[:FRAMES_SHOWN]]
    return [*lines, f"… {len(shown) - FRAMES_SHOWN} more"] if len(shown) > FRAMES_SHOWN else lines


def _short(frame: Frame) -> str:
    """A library file from its package on; a user file with its last folder."""
    _, found, inside = frame.file.rpartition("-packages/")
    return inside if found else "/".join(frame.file.split("/")[-2:])


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"


# -- state of a rank --------------------------------------------------------------------------------------------------
# What a rank does during a hang: its process still runs, and "running" would say nothing about it.

HUNG = "hung"
"""A rank that blocks the others, or that is not in a collective while no rank can be blamed."""


def hang_state_by_rank(hangs: Iterable[HangRecord]) -> dict[int, str]:
    """By rank: ``hung``, ``waits in all_reduce`` or ``waits``; for ongoing hangs and live ranks."""
    found: dict[int, str] = {}
    for hang in hangs:
        if hang.over is None:
            guilty, victims = {culprit.rank for culprit in hang.culprits}, set(hang.victims)
            found |= {rank.rank: _hang_state(rank, guilty, victims) for rank in hang.ranks if rank.alive}
    return found


def _hang_state(rank: RankThere, guilty: Collection[int], victims: Collection[int]) -> str:
    if rank.rank in guilty:
        return HUNG
    if rank.waiting_in is not None and rank.waiting_in.op:
        return f"waits in {rank.waiting_in.op}"
    return "waits" if rank.rank in victims else HUNG
