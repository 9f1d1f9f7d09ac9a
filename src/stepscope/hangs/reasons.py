"""Why a rank is to blame, in words: what it does, at which line, and of input which worker process it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.flight.stacks import user_frame
from stepscope.flight.wording import ranks_text
from stepscope.hangs import places
from stepscope.hangs.activity import Doing
from stepscope.hangs.evidence import RankEvidence, WorkerEvidence
from stepscope.hangs.situation import Situation
from stepscope.hangs.words import collective_text, more_than_text, place_text
from stepscope.records.hang import Culprit, Frame

__all__ = ["account", "alike", "blamed_worker", "culprits_of", "unanswered", "worker_words"]

WORKER_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "died",
    "X": "died",
    "D": "waits for a disk",
}
LONG = {
    "compile": "compiling",
    "checkpoint": "writing a checkpoint",
    "evaluation": "evaluating",
    "computing": "at work",
}
"""What nobody calls a hang until it lasts."""


def account(situation: Situation, rank: int) -> tuple[str, Frame | None]:
    """``sleeps at train.py:41 (time.sleep(999))`` and the line that matters most."""
    doing, evidence = situation.doings[rank], situation.ranks[rank]
    lines = situation.evidence.source_lines
    if doing.state == "gone":
        step = f" in step {evidence.step}" if evidence.step is not None else ""
        return f"{doing.words}{step}", doing.at
    words = doing.words
    if doing.state == "collective":
        words = f"waits in {collective_text(doing.waiting_in)}"
    elif doing.state in LONG:
        words = f"has been {LONG[doing.state]} for {more_than_text(evidence.silent_s)}"
    place = place_text(doing.at, lines) or _elsewhere(evidence)
    text = f"{words} at {place}" if place else words
    if doing.state != "input":
        return text, doing.at
    worker = blamed_worker(evidence)
    if worker is not None:
        frame = user_frame(worker.threads)
        at = place_text(frame, lines)
        return f"{text}; {worker_words(worker, lines)}{f' at {at}' if at else ''}", frame or doing.at
    if _waits_for_workers(evidence) and not any(one.kind == "dataloader" for one in evidence.workers):
        return f"{text}; its DataLoader workers are gone", doing.at
    return text, doing.at


def worker_words(worker: WorkerEvidence, lines: dict[tuple[str, int], str]) -> str:
    """``its DataLoader worker 4711 is stopped (SIGSTOP)``."""
    frame = user_frame(worker.threads)
    source = lines.get((frame.file, frame.line), "") if frame is not None else ""
    does = WORKER_STATES.get(worker.process_state) or places.waits_for(places.main_frames(worker.threads), source)
    return f"its DataLoader worker {worker.pid} {does}"


def blamed_worker(rank: RankEvidence) -> WorkerEvidence | None:
    """The worker that input waits for: one that cannot run, else one that stands in the user's own code."""
    workers = [worker for worker in rank.workers if worker.kind == "dataloader"]
    for states in (("T", "t"), ("Z", "X"), ("D",)):
        found = next((worker for worker in workers if worker.process_state in states), None)
        if found is not None:
            return found
    return next((worker for worker in workers if user_frame(worker.threads) is not None), None)


def culprits_of(situation: Situation, ranks: Sequence[int], *, before: str = "") -> tuple[Culprit, ...]:
    """``before``: what is said of each first (``has not called all_reduce; it``)."""
    found = []
    for rank in sorted(ranks):
        text, at = account(situation, rank)
        found.append(Culprit(rank=rank, reason=f"{before} {text}".strip(), at=at))
    return tuple(found)


def _waits_for_workers(rank: RankEvidence) -> bool:
    return any(frame.function in ("_try_get_data", "_get_data") for frame in places.main_frames(rank.threads))


def _elsewhere(rank: RankEvidence) -> str:
    """Where no line is the user's: the innermost there is."""
    frames = places.main_frames(rank.threads)
    return f"{place_text(frames[0], {})}, in {frames[0].function}" if frames and frames[0].line else ""


def alike(doings: Sequence[Doing]) -> bool:
    """Whether all of these do the same at the same line, so that one sentence speaks for all."""
    return len({(doing.state, doing.words, doing.at) for doing in doings}) == 1


def unanswered(situation: Situation) -> tuple[str, ...]:
    mute = [rank for rank, evidence in situation.ranks.items() if not evidence.threads and evidence.alive]
    return (f"No stack could be had of {ranks_text(mute)}.",) if mute else ()
