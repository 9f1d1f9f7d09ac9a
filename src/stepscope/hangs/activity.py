"""What each rank of a hung job is doing: of a live rank from process, device, GIL and stack, of files from its dump.

The sources about a live rank, in order of trust: the kernel's process state (gone, stopped); what its device has not
ended (NCCL); whether the GIL is free; the ring's word that a wait for a collective has begun; the stack; without a
stack, the phase.

A collective that does not end on a rank's device takes precedence over what the host does: the rank that it waits for
blocks the job, and a host that waits for its device spins as if it computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepscope.flight.stacks import is_user_file, site_frame, user_frame
from stepscope.hangs.evidence import EXITED_IN_ORDER, Evidence, RankEvidence, WorkerEvidence
from stepscope.hangs.recorded import Recorded
from stepscope.hangs.thresholds import BUSY_GPU_PERCENT, BUSY_SHARE, MOVING_BYTES_S, RUNNING_SHARE
from stepscope.hangs.wait_graph import is_p2p
from stepscope.records.hang import Frame, ThreadStack, WaitingIn
from stepscope.records.steps import COMPUTE_PHASES

__all__ = [
    "BLOCKED",
    "FOR_PROCESS",
    "FOR_USER",
    "WAITING",
    "WAITS",
    "Activity",
    "Doing",
    "doing_from_dump",
    "doing_of",
    "is_busy",
    "main_frames",
    "moves_data",
    "wait_words",
]


# -- stack ------------------------------------------------------------------------------------------------------------
# What the stack of a main thread says: in a collective, in the input, in a checkpoint, in a compiler …
#
# The files of the frames decide. The innermost frame that is not a mere wrapper shows where a thread *is*; outer frames
# only show on whose behalf.

OURS = ("stepscope/recorder/", "stepscope\\recorder\\")
WRAPPING = (
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/autograd/function.py",
    "/contextlib.py",
    "/functools.py",
)
"""Innermost frames that only pass a call on."""
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/", "torch/_C/_distributed")
NO_COLLECTIVES = ("torch/distributed/checkpoint/", "torch/distributed/elastic/", "torch/distributed/run.py")
SAVING = ("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/", "/tensorstore/")
COMPILING = (
    "torch/_dynamo/convert_frame",
    "torch/_dynamo/symbolic_convert",
    "torch/_inductor/compile_fx",
    "torch/_inductor/codegen",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile",
    "torch/_inductor/select_algorithm",
    "torch/_inductor/compile_worker",
    "torch/_inductor/autotune",
    "torch/utils/cpp_extension",
    "triton/compiler/",
    "triton/runtime/autotuner",
    "triton/runtime/build",
)
"""Not all of dynamo's files: some are in the stack of every call of code that was compiled long ago."""
INPUT = ("torch/utils/data/", "torchdata/", "/webdataset/", "/nvidia/dali/")
BACKWARD = ("torch/autograd/graph.py", "torch/autograd/__init__.py", "torch/_tensor.py")
SYNCHRONIZING = ("torch/cuda/__init__.py", "torch/cuda/streams.py", "torch/xpu/", "torch/mps/", "torch/accelerator/")
SYNCHRONIZING_CODE = re.compile(
    r"synchronize\(|\.item\(|\.cpu\(|\.tolist\(|\.numpy\(|\.to\(|\.cuda\(|\.nonzero\(|\bbool\(|\bfloat\(|\bint\(|print\("
)
SAVES = re.compile(r"checkpoint|ckpt|(^|_)(save|snapshot)", re.IGNORECASE)
EVALUATES = re.compile(r"(^|_)(eval|validat|valid(_|$)|test_(epoch|loop|step|model))", re.IGNORECASE)
WHOLE_TRAINING = re.compile(r"train|(^|_)(fit|main|run|worker|loop)(_|$)", re.IGNORECASE)
"""``train_and_evaluate`` does not mean that it is evaluating now."""
PROMPTS = ("/ipykernel/kernelapp.py", "/IPython/terminal/")
"""Loops of programs that wait for the next user input; code that the user entered runs further in …"""
CELLS = ("/IPython/core/interactiveshell.py",)
"""… below a frame of one of these."""
FOR_PROCESS = "waits for a process that it started"
BLOCKED = "is blocked"
FOR_USER = "waits for the user to run the next cell"
WAITS = (
    ("socket.py", "waits for a socket"),
    ("ssl.py", "waits for a socket"),
    ("http/client.py", "waits for a server"),
    ("selectors.py", "waits for a socket or pipe"),
    ("subprocess.py", FOR_PROCESS),
    ("multiprocessing/queues.py", "waits in a queue between processes"),
    ("multiprocessing/connection.py", "waits for another process"),
    ("multiprocessing/popen_fork.py", FOR_PROCESS),
    ("multiprocessing/synchronize.py", "waits for a lock between processes"),
    ("queue.py", "waits in a queue"),
    ("threading.py", "waits for a thread or a lock"),
    ("concurrent/futures/", "waits for one of its threads"),
    ("asyncio/", "waits in an event loop"),
    ("filelock/", "waits for a file lock"),
)
"""By the file of the innermost frame; sockets and similar come before the queues built on them."""


def main_frames(threads: Sequence[ThreadStack]) -> tuple[Frame, ...]:
    """Frames of the main thread, innermost first, without ours; of the only thread if none is marked as main."""
    main = next((thread for thread in threads if thread.main), threads[0] if len(threads) == 1 else None)
    return tuple(frame for frame in main.frames if not _is_in(frame, OURS)) if main else ()


def has_moved(before: Sequence[ThreadStack], after: Sequence[ThreadStack]) -> bool:
    """Whether any thread was somewhere else at the second sample; False with fewer than two samples."""
    if not before or not after:
        return False
    return [thread.frames for thread in before] != [thread.frames for thread in after]


def collective_call(frames: Sequence[Frame]) -> str | None:
    """The function of torch.distributed that the thread is in (``all_reduce``); None: not in one."""
    inner = _inner(frames)
    if inner is None or not _is_in(inner, COLLECTIVES) or _is_in(inner, NO_COLLECTIVES):
        return None
    # Internal helpers begin with an underscore; the function that the script called is more useful.
    for frame in frames[frames.index(inner) :]:
        if not _is_in(frame, (*COLLECTIVES, *WRAPPING)):
            break
        if not frame.function.startswith(("_", "wrapper")) and _is_in(frame, COLLECTIVES):
            return frame.function
    return inner.function


def is_importing(frames: Sequence[Frame]) -> bool:
    """Whether the thread imports modules: it may then have frames of torch.distributed or dynamo without a call."""
    return any(frame.file.startswith("<frozen importlib") for frame in frames)


def at_prompt(frames: Sequence[Frame]) -> bool:
    """Whether it is a notebook, or IPython on a terminal, in which nothing runs."""
    return any(_is_in(frame, PROMPTS) for frame in frames) and not any(_is_in(frame, CELLS) for frame in frames)


def in_backward(frames: Sequence[Frame]) -> bool:
    inner = _inner(frames)
    return inner is not None and _is_in(inner, BACKWARD) and "backward" in inner.function


def is_loading_input(frames: Sequence[Frame]) -> bool:
    return any(_is_in(frame, INPUT) for frame in frames)


def is_compiling(frames: Sequence[Frame]) -> bool:
    return any(_is_in(frame, COMPILING) for frame in frames)


def is_saving(frames: Sequence[Frame], own: Sequence[Frame]) -> bool:
    """Whether the thread saves a checkpoint. ``own``: the user frames."""
    return any(_is_in(frame, SAVING) for frame in frames) or _named(own, SAVES)


def is_evaluating(own: Sequence[Frame]) -> bool:
    return _named(own, EVALUATES)


def _named(own: Sequence[Frame], like: re.Pattern[str]) -> bool:
    return any(like.search(frame.function) and not WHOLE_TRAINING.search(frame.function) for frame in own)


def is_synchronizing(frames: Sequence[Frame]) -> bool:
    """Whether the thread is in a call that waits for the device."""
    inner = _inner(frames)
    return inner is not None and _is_in(inner, SYNCHRONIZING)


def reads_device(source: str) -> bool:
    """The same from the text of the innermost user line: methods written in C leave no frame."""
    return bool(SYNCHRONIZING_CODE.search(source))


def wait_words(frames: Sequence[Frame], source: str) -> str:
    """What a thread that uses no CPU is doing, in words."""
    inner = _inner(frames)
    if "sleep(" in source:
        return "sleeps"
    for part, words in WAITS if inner is not None else ():
        if inner is not None and _is_in(inner, (f"/{part}",)):
            return words
    return BLOCKED


def _inner(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in frames if not _is_in(frame, WRAPPING)), frames[0] if frames else None)


def _is_in(frame: Frame, parts: Sequence[str]) -> bool:
    return any(part in frame.file for part in parts)


# -- activity ---------------------------------------------------------------------------------------------------------

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
BUILT_IN = frozenset({"input", "h2d", "comm", *COMPUTE_PHASES})
"""Phases in which a user function's name does not make it an evaluation or a checkpoint."""
UNNAMED = ("wait", "wait_tensor", "wrapper", "forward", "backward", "")
"""Functions of torch.distributed that do not say what they wait for."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    rank: int
    state: Activity
    words: str
    """What it does: ``sleeps``, ``waits for a lock``; placed between the rank and the line."""
    at: Frame | None = None
    """The innermost line of user code."""
    waiting_in: WaitingIn | None = None
    moved: bool = False
    """Whether its stack changed between two samples."""
    busy: bool = False
    """Whether it uses a processor."""
    behind: bool = False
    """Whether its device has not started ``waiting_in``, while others have."""


def doing_of(rank: RankEvidence, evidence: Evidence, recorded: Recorded, *, mind_gil: bool = True) -> Doing:
    """What a live rank is doing."""
    pending = recorded.pending.get(rank.rank, ())
    frames = main_frames(rank.threads)
    at = user_frame(rank.threads)
    source = evidence.source_lines.get((at.file, at.line), "") if at is not None else ""
    waiting_in = _collective(rank, evidence, frames, pending)
    state, words = _alone(rank, frames, source, pending=bool(pending))
    process = _of_process(rank)
    queue, behind = recorded.queues.get(rank.rank), False
    if process is not None:
        state, words = process
    elif queue is not None and queue.stuck:
        waiting_in = _oldest(waiting_in, queue.stuck[0], pending)
        behind = recorded.behind(rank.rank)
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
        moved=has_moved(rank.threads, rank.threads_later),
        busy=is_busy(rank),
        behind=behind,
    )


def doing_from_dump(rank: RankEvidence, recorded: Recorded) -> Doing:
    """What a rank was doing whose dump and stack are in files.

    A rank with a pending call waits, whatever its stack shows: on NCCL the host is ahead of its device. The stack says
    where a rank is that others wait for. Of a rank that diverged it says nothing, because it came there by mistake.
    """
    number, frames = rank.rank, main_frames(rank.threads)
    at = user_frame(rank.threads) if frames else _last_site(number, recorded)
    pending = recorded.pending.get(number, ())
    call = collective_call(frames)
    by_stack = None if call is None else WaitingIn(group="", op=call)
    diverged = any(number in left.ranks for _, left in recorded.divergences)
    missed = number in recorded.graph.missing and not diverged
    if rank.ended:
        return Doing(rank=number, state="gone", words=_ended_words(rank.ended), at=at)
    if number in recorded.waiting or number in recorded.failures:
        oldest = pending[0] if pending else by_stack
        return Doing(rank=number, state="collective", words="waits", at=at, waiting_in=oldest)
    if by_stack is not None and (missed or is_p2p(by_stack)):
        return Doing(rank=number, state="collective", words="waits", at=at, waiting_in=by_stack)
    if not missed or (number not in recorded.dumps and not frames):
        return Doing(rank=number, state="unknown", words="did not report where it is", at=at)
    if not frames:
        return Doing(rank=number, state="blocked", words="made its last call" if at else "made no further call", at=at)
    state, words = _alone(rank, frames, "", pending=False)
    return Doing(rank=number, state=state, words="is" if words == BLOCKED else words, at=at)


def _last_site(rank: int, recorded: Recorded) -> Frame | None:
    """The line of the rank's last recorded call."""
    calls = [
        (progress.trace.created_ns[-1], progress.site(progress.trace.sequences[-1]))
        for group in recorded.groups
        if (progress := group.progress.get(rank)) is not None and progress.trace.sequences
    ]
    return site_frame(max(calls, key=lambda call: call[0])[1]) if calls else None


def _oldest(host: WaitingIn | None, stuck: WaitingIn, pending: Sequence[WaitingIn]) -> WaitingIn:
    """The call that its device waits in, or its host in another backend's collective, whichever was called first."""
    order = list(pending)
    known = host is not None and host in order and stuck in order
    return host if host is not None and known and order.index(host) < order.index(stuck) else stuck


def is_busy(process: RankEvidence | WorkerEvidence) -> bool:
    least = RUNNING_SHARE if process.process_state == "R" else BUSY_SHARE
    return process.cpu_share is not None and process.cpu_share >= least


def moves_data(rank: RankEvidence) -> bool:
    return rank.io_bytes_s is not None and rank.io_bytes_s >= MOVING_BYTES_S


def _of_process(rank: RankEvidence) -> tuple[Activity, str] | None:
    if rank.alive and rank.ended == EXITED_IN_ORDER and rank.process_state in ("T", "t"):
        return "stopped", f"{_stopped_words(rank)} while it exits"
    # A process that failed may still exist, kept alive by threads or by its exit handlers.
    if not rank.alive or rank.ended or rank.process_state in ("Z", "X"):
        return "gone", _ended_words(rank.ended)
    if rank.process_state in ("T", "t"):
        return "stopped", _stopped_words(rank)
    return None


def _stopped_words(rank: RankEvidence) -> str:
    return "is stopped (SIGSTOP)" if rank.process_state == "T" else "is stopped by a debugger"


def _holds_gil(rank: RankEvidence) -> bool:
    """Whether it holds the GIL; a stack that moves means that it only happened to hold it when sampled."""
    return bool(rank.gil_held) and not has_moved(rank.threads, rank.threads_later)


def _long_call(rank: RankEvidence, alone: Activity, waiting_in: WaitingIn | None) -> bool:
    """Serializing a large object is one long C call, and so may be a pass of a compiler."""
    return waiting_in is None and (alone == "checkpoint" or (alone == "compile" and is_busy(rank)))


def _ended_words(ended: str) -> str:
    if not ended:
        return "is gone"
    return f"was {ended}" if ended.startswith("killed") else ended


def _collective(
    rank: RankEvidence, evidence: Evidence, frames: Sequence[Frame], pending: Sequence[WaitingIn]
) -> WaitingIn | None:
    """The collective that it waits in; None if it does not seem to wait in one."""
    last = rank.collective
    if last is not None and last.waiting:
        name, description = (last.group.name, last.group.description) if last.group else ("", "")
        return _with_numbers(WaitingIn(group=name, description=description, op=last.op, peer=last.peer), pending)
    call = collective_call(frames) if not is_importing(frames) else None
    if call is not None:
        return _with_numbers(WaitingIn(group="", op="" if call in UNNAMED else call), pending)
    if evidence.world_size <= 1 or (frames and not in_backward(frames)):
        return None
    idle = not is_busy(rank)
    begun = bool(pending) and (idle or rank.process_state != "R")
    if begun or (idle and (frames or rank.phase == "comm")):
        return _with_numbers(WaitingIn(group=""), pending)
    return None


def _with_numbers(host: WaitingIn, pending: Sequence[WaitingIn]) -> WaitingIn:
    """Merge both sources: the ring has sends and recvs; the recorder has numbers, sizes and the calls of DDP."""
    if host.peer is not None or host.op in ("send", "recv"):
        return host
    fitting = [call for call in pending if not host.group or call.group == host.group]
    exact = next((call for call in fitting if _same_op(host.op, call.op)), None)
    if exact is not None:
        return exact
    # gloo's recorder names some operations after the ones they are made of.
    return replace(fitting[-1], op=host.op) if fitting and host.group else host


def _same_op(first: str, second: str) -> bool:
    """``all_gather`` and ``all_gather_into_tensor`` are the same; an unknown op matches any."""
    plain, against = (text.strip("_").replace("_", "") for text in (first, second))
    return not plain or not against or plain.startswith(against) or against.startswith(plain)


def _alone(rank: RankEvidence, frames: Sequence[Frame], source: str, *, pending: bool) -> tuple[Activity, str]:
    """What a rank does that does not wait for another."""
    own = [frame for frame in frames if is_user_file(frame.file)]
    free = rank.phase not in BUILT_IN
    if at_prompt(frames):
        return "blocked", FOR_USER
    if is_importing(frames):
        return "computing", "imports modules"
    if is_compiling(frames) or (not frames and _compilers(rank)):
        return "compile", "compiles"
    if rank.phase == "checkpoint" or (free and is_saving(frames, own)):
        return "checkpoint", "writes a checkpoint"
    if _on_device(rank, frames, source, pending=pending):
        return "device", "waits for its device"
    if is_loading_input(frames) or (not frames and rank.phase == "input"):
        return "input", "waits for its next batch"
    if rank.phase == "eval" or (free and is_evaluating(own)):
        return "evaluation", "evaluates"
    if is_busy(rank) and (rank.process_state in ("R", "") or has_moved(rank.threads, rank.threads_later)):
        return "computing", "computes"
    if moves_data(rank):
        return "computing", "reads or writes files"
    if rank.process_state == "D":
        return "disk", "waits for a disk"
    if not frames:
        return "unknown", "did not report where it is"
    return "blocked", wait_words(frames, source)


def _compilers(rank: RankEvidence) -> bool:
    return any(worker.kind == "compiler" and is_busy(worker) for worker in rank.workers)


def _on_device(rank: RankEvidence, frames: Sequence[Frame], source: str, *, pending: bool) -> bool:
    """CUDA's waits may spin or sleep; the call identifies them, with a device that works or has pending work."""
    if rank.device.startswith("cpu") or not frames or has_moved(rank.threads, rank.threads_later):
        return False
    if is_synchronizing(frames):
        return True
    at_work = pending or (rank.gpu_util_percent is not None and rank.gpu_util_percent >= BUSY_GPU_PERCENT)
    return at_work and (reads_device(source) or in_backward(frames))
