"""What a rank that is silent is doing: the one thing that its process, its words and its stack agree on.

In order of trust: what the kernel says of the process (gone, stopped), what its device has not ended (NCCL), whether
the GIL is free, the word that says a wait for a collective is under way, the stack, and where there is none the phase.

A collective that does not end on the device of a rank counts before what its host does: whoever it waits for holds the
job up, and a host that waits for its device spins as if it computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepscope.flight.stacks import is_users, user_frame
from stepscope.hangs import places
from stepscope.hangs.evidence import Evidence, RankEvidence, WorkerEvidence
from stepscope.hangs.recorders import Recorders
from stepscope.records.hang import Frame, WaitingIn
from stepscope.records.phases import COMPUTE_PHASES

__all__ = ["WAITING", "Activity", "Doing", "doing_of", "is_busy", "moves_data"]

Activity = Literal[
    "gone",
    "stopped",
    "gil",
    "disk",
    "collective",
    "device",
    "input",
    "compile",
    "checkpoint",
    "evaluation",
    "computing",
    "blocked",
    "unknown",
]

WAITING: tuple[Activity, ...] = ("collective", "device")
"""States in which a rank may be a victim."""
BUSY_SHARE = 0.1
"""Of a core: more than a process uses that only waits, less than one gets that shares a core with several others …"""
RUNNING_SHARE = 0.02
"""… and where the main thread wants a processor at this very moment, on a machine that has far too few."""
MOVING_BYTES_S = 100_000.0
BUSY_GPU_PERCENT = 90.0
BUILT_IN = frozenset({"input", "h2d", "comm", *COMPUTE_PHASES})
"""Phases in which the name of a function of the user's does not make an evaluation or a checkpoint of it."""
UNNAMED = ("wait", "wait_tensor", "wrapper", "forward", "backward", "")
"""Functions of torch.distributed that do not say what is waited for."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    rank: int
    state: Activity
    words: str
    """Of what it does there: ``sleeps``, ``waits for a lock``; after the rank and before the place."""
    at: Frame | None = None
    """The innermost line of the user's own code."""
    waiting_in: WaitingIn | None = None
    moved: bool = False
    """Whether its stack changed between two looks."""
    busy: bool = False
    """Whether it uses a processor."""
    behind: bool = False
    """Whether its device has not begun ``waiting_in``, and others' have."""


def doing_of(rank: RankEvidence, evidence: Evidence, recorders: Recorders, *, mind_gil: bool = True) -> Doing:
    pending = recorders.pending.get(rank.rank, ())
    """What its Flight Recorders have as begun and not ended, in order."""
    frames = places.main_frames(rank.threads)
    at = user_frame(rank.threads)
    source = evidence.source_lines.get((at.file, at.line), "") if at is not None else ""
    waiting_in = _collective(rank, evidence, frames, pending)
    state, words = _alone(rank, frames, source, pending=bool(pending))
    process = _of_process(rank)
    queue, behind = recorders.queues.get(rank.rank), False
    if process is not None:
        state, words = process
    elif queue is not None and queue.stuck:
        waiting_in = _oldest(waiting_in, queue.stuck[0], pending)
        behind = recorders.behind(rank.rank)
        state, words = ("device", "waits for its device") if behind else ("collective", "waits")
    elif mind_gil and _holds_gil(rank) and not _long_call(rank, state, waiting_in):
        state, words = "gil", "is in a C call that holds the GIL"
    elif waiting_in is not None:
        state, words = "collective", "waits"
    return Doing(
        rank=rank.rank,
        state=state,
        words=words,
        at=at,
        waiting_in=waiting_in or (pending[0] if pending and state == "device" else None),
        moved=places.moved(rank.threads, rank.threads_later),
        busy=is_busy(rank),
        behind=behind,
    )


def _oldest(told: WaitingIn | None, stuck: WaitingIn, pending: Sequence[WaitingIn]) -> WaitingIn:
    """What its device waits in, or its host in another backend's collective, whichever it called first."""
    order = list(pending)
    known = told is not None and told in order and stuck in order
    return told if told is not None and known and order.index(told) < order.index(stuck) else stuck


def is_busy(one: RankEvidence | WorkerEvidence) -> bool:
    least = RUNNING_SHARE if one.process_state == "R" else BUSY_SHARE
    return one.cpu_share is not None and one.cpu_share >= least


def moves_data(rank: RankEvidence) -> bool:
    return rank.io_bytes_s is not None and rank.io_bytes_s >= MOVING_BYTES_S


def _of_process(rank: RankEvidence) -> tuple[Activity, str] | None:
    # One that failed may still be there, held up by threads or by what it does at exit.
    if not rank.alive or rank.ended or rank.process_state in ("Z", "X"):
        return "gone", _ended_words(rank.ended)
    if rank.process_state in ("T", "t"):
        return "stopped", "is stopped (SIGSTOP)" if rank.process_state == "T" else "is stopped by a debugger"
    return None


def _holds_gil(rank: RankEvidence) -> bool:
    """One whose stack moves only happened to hold it when it was asked."""
    return bool(rank.gil_held) and not places.moved(rank.threads, rank.threads_later)


def _long_call(rank: RankEvidence, alone: Activity, waiting_in: WaitingIn | None) -> bool:
    """Serialising a large object is one long C call, and so may be a pass of a compiler."""
    return waiting_in is None and (alone == "checkpoint" or (alone == "compile" and is_busy(rank)))


def _ended_words(ended: str) -> str:
    if not ended:
        return "is gone"
    return f"was {ended}" if ended.startswith("killed") else ended


def _collective(
    rank: RankEvidence, evidence: Evidence, frames: Sequence[Frame], pending: Sequence[WaitingIn]
) -> WaitingIn | None:
    """The collective it waits in; None when it waits in none, as far as can be told."""
    last = rank.collective
    if last is not None and last.waiting:
        name, description = (last.group.name, last.group.description) if last.group else ("", "")
        told = WaitingIn(group=name, description=description, op=last.op, peer=last.peer)
        return _with_numbers(told, pending)
    call = places.collective_call(frames) if not places.imports(frames) else None
    if call is not None:
        return _with_numbers(WaitingIn(group="", op="" if call in UNNAMED else call), pending)
    if evidence.world_size <= 1 or (frames and not places.in_backward(frames)):
        return None
    idle = not is_busy(rank)
    begun = bool(pending) and (idle or rank.process_state != "R")
    if begun or (idle and (frames or rank.phase == "comm")):
        return _with_numbers(WaitingIn(group=""), pending)
    return None


def _with_numbers(told: WaitingIn, pending: Sequence[WaitingIn]) -> WaitingIn:
    """The words know of sends and recvs, the Flight Recorder of sequence numbers, sizes and what DDP does by itself."""
    if told.peer is not None or told.op in ("send", "recv"):
        return told
    fitting = [one for one in pending if not told.group or one.group == told.group]
    exact = next((one for one in fitting if _same_op(told.op, one.op)), None)
    if exact is not None:
        return exact
    # gloo's recorder calls some operations by the name of what they are made of.
    return replace(fitting[-1], op=told.op) if fitting and told.group else told


def _same_op(one: str, other: str) -> bool:
    """``all_gather`` and ``all_gather_into_tensor`` are; what is not known could be anything."""
    plain, against = (text.strip("_").replace("_", "") for text in (one, other))
    return not plain or not against or plain.startswith(against) or against.startswith(plain)


def _alone(rank: RankEvidence, frames: Sequence[Frame], source: str, *, pending: bool) -> tuple[Activity, str]:
    """What a rank does that waits for no other."""
    own = [frame for frame in frames if is_users(frame.file)]
    free = rank.phase not in BUILT_IN
    if places.at_prompt(frames):
        return "blocked", places.FOR_USER
    if places.imports(frames):
        return "computing", "imports modules"
    if places.compiles(frames) or (not frames and _compilers(rank)):
        return "compile", "compiles"
    if rank.phase == "checkpoint" or (free and places.saves(frames, own)):
        return "checkpoint", "writes a checkpoint"
    if _on_device(rank, frames, source, pending=pending):
        return "device", "waits for its device"
    if places.loads_input(frames) or (not frames and rank.phase == "input"):
        return "input", "waits for its next batch"
    if rank.phase == "eval" or (free and places.evaluates(own)):
        return "evaluation", "evaluates"
    if is_busy(rank) and (rank.process_state in ("R", "") or places.moved(rank.threads, rank.threads_later)):
        return "computing", "computes"
    if moves_data(rank):
        return "computing", "reads or writes files"
    if rank.process_state == "D":
        return "disk", "waits for a disk"
    if not frames:
        return "unknown", "did not say where it is"
    return "blocked", places.waits_for(frames, source)


def _compilers(rank: RankEvidence) -> bool:
    return any(worker.kind == "compiler" and is_busy(worker) for worker in rank.workers)


def _on_device(rank: RankEvidence, frames: Sequence[Frame], source: str, *, pending: bool) -> bool:
    """CUDA's waits may spin or sleep; what tells them is the call, and a device that is at work or has work to do."""
    if rank.device.startswith("cpu") or not frames or places.moved(rank.threads, rank.threads_later):
        return False
    if places.synchronises(frames):
        return True
    at_work = pending or (rank.gpu_util_percent is not None and rank.gpu_util_percent >= BUSY_GPU_PERCENT)
    return at_work and (places.reads_device(source) or places.in_backward(frames))
