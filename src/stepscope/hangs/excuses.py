"""Reasons why a job is not hung: it compiles, saves, evaluates, prepares, computes; or its dumps show nothing wrong.

Every excuse of a live job expires: it holds for a multiple of the threshold, and much less if nothing about the process
moves. Only a job that is idle as a whole may rest indefinitely, and one whose collectives keep ending is working,
whatever its rings say. A process that is stopped, or whose GIL is held by a C call, has no excuse (``judge.py`` checks
these first).
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.flight.wording import collective_text, one_line, place_text, ranks_text
from stepscope.hangs.activity import FOR_PROCESS, FOR_USER, Activity, Doing, is_busy, moves_data
from stepscope.hangs.case import Case
from stepscope.hangs.evidence import RankEvidence
from stepscope.hangs.thresholds import (
    AT_REST_S,
    AT_WORK,
    BEGUN,
    BUSY,
    CHECK_AGAIN_S,
    CHILD,
    MOTIONLESS,
    RARELY_S,
)
from stepscope.hangs.wait_graph import is_p2p
from stepscope.records.text import duration_text

__all__ = ["NotAHang", "at_rest", "dumps_in_order", "excuse_of"]

CHILD_CHANNEL = "do_wait"
"""Where in the kernel a process sleeps while it waits for a child."""
FIRST = "No step has completed yet."

KNOWN: dict[Activity, str] = {
    "compile": "compiles",
    "checkpoint": "writes a checkpoint",
    "evaluation": "evaluates",
}


@dataclass(frozen=True, kw_only=True)
class NotAHang:
    reason: str
    """A sentence: which rank does what. It stays the same at every check during the same work."""
    evidence: tuple[str, ...]
    """Sentences: the evidence for it."""
    check_again_s: float = 0.0
    """When to judge a live job again, unless it resumes before."""


@dataclass(frozen=True, kw_only=True)
class _Excuse:
    what: str
    patience: float
    signs: tuple[str, ...]


def at_rest(case: Case) -> NotAHang | None:
    """No rank here has anything to do: each has ended, or is a notebook whose cells are done."""
    evidence = case.evidence
    living = [doing for doing in case.doings.values() if doing.state != "gone"]
    if not living:
        again_s = max(CHECK_AGAIN_S, evidence.threshold_s)
        return NotAHang(reason="Every rank of this host has ended.", evidence=(), check_again_s=again_s)
    if any(doing.words != FOR_USER for doing in living):
        return None
    who = "The process" if evidence.world_size <= 1 else "Every rank of this host"
    return NotAHang(
        reason=f"{who} {FOR_USER}.",
        evidence=("Its stack shows no running cell.",),
        check_again_s=max(AT_REST_S, evidence.threshold_s),
    )


def excuse_of(case: Case) -> NotAHang | None:
    """Why ranks that make no progress may still be at work."""
    return _collectives_end(case) or _best_excuse(case) or _devices_at_work(case)


def dumps_in_order(case: Case) -> NotAHang | None:
    """Dumps in which nothing waits, or only as much as in any running job."""
    recorded, dumped = case.recorded, ranks_text(case.recorded.dumps)
    if not recorded.dumps:
        return NotAHang(reason="There is no dump to analyze.", evidence=())
    in_p2p = any(is_p2p(doing.waiting_in) for doing in case.doings.values())
    if any(doing.state == "gone" for doing in case.doings.values()) or recorded.lagging or recorded.divergences:
        return None
    if case.dumps_were_taken_while_running:
        wait = recorded.graph.most_telling(recorded.graph.missing)
        ahead = ranks_text(recorded.graph.waiters, start=True)
        call = collective_text(wait.call if wait is not None else None)
        why = "as happens when dumps are not taken at the same instant; stacks would distinguish that from a hang."
        return NotAHang(reason=_not_decided(dumped), evidence=(f"{ahead} had reached {call} before the others, {why}",))
    if recorded.graph.waits or recorded.joined is not None or in_p2p:
        return None
    if recorded.waiting:
        return NotAHang(reason=_not_decided(dumped), evidence=())
    return NotAHang(reason=f"Nothing is pending: every call of {dumped} has ended.", evidence=())


def _not_decided(dumped: str) -> str:
    return f"The dumps of {dumped} do not contain enough information to decide."


def _collectives_end(case: Case) -> NotAHang | None:
    """Collectives end on some device: the job makes progress that its rings do not show (a CUDA graph)."""
    ended = {rank: queue.ended for rank, queue in case.recorded.queues.items() if queue.ended}
    if not ended:
        return None
    rank = min(ended)
    silent_s = min((rank.silent_s for rank in case.evidence.ranks), default=0.0)
    return NotAHang(
        reason=f"Rank {rank} makes progress in its collectives.",
        evidence=(f"{ended[rank]:,} were called or ended between two reads of its Flight Recorder.",),
        check_again_s=max(CHECK_AGAIN_S, case.evidence.threshold_s, min(silent_s / 4, RARELY_S)),
    )


def _devices_at_work(case: Case) -> NotAHang | None:
    """A device collective that all ranks have called: it waits for earlier work, or is in progress."""
    call, threshold_s = case.recorded.unfinished, case.evidence.threshold_s
    if call is None:
        return None
    begun = case.recorded.begun_by_all(call)
    patience_s = (BEGUN if begun else BUSY) * threshold_s
    left_s = patience_s - min((rank.silent_s for rank in case.evidence.ranks if rank.alive), default=0.0)
    if left_s <= 0:
        return None
    sign = "Every device has begun it." if begun else "It is not known whether every device has begun it."
    return NotAHang(
        reason=f"All ranks have called {collective_text(call)}, and their devices have not finished it yet.",
        evidence=(sign, f"It counts as a hang after {duration_text(patience_s, whole=True)} without progress."),
        check_again_s=max(CHECK_AGAIN_S, min(threshold_s, left_s)),
    )


def _best_excuse(case: Case) -> NotAHang | None:
    """The excuse of any rank that holds for the longest time."""
    evidence = case.evidence
    others_unknown = len(case.ranks) < evidence.world_size
    best: tuple[float, Doing, _Excuse] | None = None
    for number, doing in case.doings.items():
        rank = case.ranks[number]
        excuse = _excuse(rank, doing, alone=others_unknown) or (_child(rank) if evidence.world_size <= 1 else None)
        left_s = excuse.patience * evidence.threshold_s - rank.silent_s if excuse else 0.0
        if excuse is not None and left_s > 0 and (best is None or left_s > best[0]):
            best = left_s, doing, excuse
    if best is None:
        return None
    left_s, doing, excuse = best
    who = "The process" if evidence.world_size <= 1 else f"Rank {doing.rank}"
    place = place_text(doing.at, evidence.source_lines)
    patience = duration_text(excuse.patience * evidence.threshold_s, whole=True)
    until = f"It counts as a hang after {patience} without progress."
    return NotAHang(
        reason=f"{who} {excuse.what}{f' at {place}' if place else ''}.",
        evidence=(*excuse.signs, until),
        check_again_s=max(CHECK_AGAIN_S, min(evidence.threshold_s, left_s)),
    )


def _excuse(rank: RankEvidence, doing: Doing, *, alone: bool) -> _Excuse | None:
    """The excuse of one rank. ``alone``: whether some ranks of the job are unknown here."""
    signs = _signs(rank, doing)
    moving = bool(signs)
    if doing.state in KNOWN:
        where = f"It {KNOWN[doing.state]}: {_source_of(rank, doing)}."
        return _Excuse(what=KNOWN[doing.state], patience=AT_WORK if moving else MOTIONLESS, signs=(where, *signs))
    if doing.state == "input":
        return _slow_input(rank, signs)
    if doing.state in ("collective", "unknown") and alone and rank.step is None:
        # Without a stack too: a process that starts the other ranks itself (Lightning) sleeps until they are there.
        return _Excuse(what="waits for ranks that have not reported yet", patience=MOTIONLESS, signs=(FIRST,))
    if doing.state == "blocked":
        return _program(rank, doing)
    if doing.state == "device":
        return _Excuse(what="waits for its device", patience=BUSY, signs=(_on_device(doing),))
    if doing.state != "computing" or not moving:
        return None
    if rank.step is None:
        return _Excuse(what="prepares its first step", patience=AT_WORK, signs=(FIRST, *signs))
    return _Excuse(what="computes" if doing.busy else "reads or writes files", patience=BUSY, signs=signs)


def _program(rank: RankEvidence, doing: Doing) -> _Excuse | None:
    """A rank that waits for a child process is working while the child is."""
    busy = [worker for worker in rank.workers if worker.kind != "dataloader" and is_busy(worker)]
    if not busy or doing.words != FOR_PROCESS:
        return None
    sign = f"Process {busy[0].pid} ({one_line(busy[0].name, 60)}) uses {busy[0].cpu_share:.0%} of a core."
    return _Excuse(what=FOR_PROCESS, patience=AT_WORK if rank.step is None else BUSY, signs=(sign,))


def _child(rank: RankEvidence) -> _Excuse | None:
    """The rank waits for a child process according to the kernel, and no other rank waits for it."""
    living = [worker for worker in rank.workers if worker.process_state != "Z"]
    if not living or rank.wait_channel != CHILD_CHANNEL:
        return None
    # A plain fork looks like a DataLoader worker, whose rank does not wait in the kernel for it to end.
    living.sort(key=lambda worker: worker.kind == "dataloader")
    sign = f"Process {living[0].pid} ({one_line(living[0].name, 60)}) has not ended."
    return _Excuse(what=FOR_PROCESS, patience=CHILD, signs=(sign,))


def _slow_input(rank: RankEvidence, signs: tuple[str, ...]) -> _Excuse | None:
    """Busy workers, or a busy rank without workers, mean slow input; only idle ones mean a hang."""
    busy = [worker for worker in rank.workers if worker.kind == "dataloader" and is_busy(worker)]
    if not busy and not signs:
        # Opening a dataset may take long, and there is no known limit for the first batch.
        return _Excuse(what="waits for its first batch", patience=BUSY, signs=(FIRST,)) if rank.step is None else None
    patience = AT_WORK if rank.step is None else BUSY
    first = tuple(f"Its DataLoader worker {worker.pid} uses {worker.cpu_share:.0%} of a core." for worker in busy[:1])
    return _Excuse(what="waits for a batch that is still being prepared", patience=patience, signs=(*first, *signs))


def _signs(rank: RankEvidence, doing: Doing) -> tuple[str, ...]:
    """Signs of movement."""
    signs = []
    if doing.busy and rank.cpu_share is not None:
        signs.append(f"It uses {rank.cpu_share:.0%} of a core.")
    if moves_data(rank) and rank.io_bytes_s is not None:
        signs.append(f"It reads and writes {rank.io_bytes_s / 1e6:.1f} MB/s.")
    compilers = [worker for worker in rank.workers if worker.kind == "compiler" and is_busy(worker)]
    if compilers:
        signs.append(f"A compiler that it started is running: {one_line(compilers[0].name, 60)}.")
    if doing.moved and not (doing.state == "input" and not doing.busy):
        signs.append("Its stack changed between two checks.")
    return tuple(signs)


def _on_device(doing: Doing) -> str:
    if not doing.behind:
        return "Its device has not finished its work: a kernel may be slow."
    return (
        f"Its device has not started {collective_text(doing.waiting_in)}, which others have: it is still busy with "
        "earlier work, perhaps a slow kernel."
    )


def _source_of(rank: RankEvidence, doing: Doing) -> str:
    phases = {"checkpoint": "checkpoint", "evaluation": "eval"}
    if rank.phase == phases.get(doing.state):
        return f"it is in the phase {rank.phase}"
    frame = next((frame for thread in rank.threads if thread.main for frame in thread.frames), None)
    return f"its stack says so (in {frame.function})" if frame is not None else "a compiler that it started is running"
