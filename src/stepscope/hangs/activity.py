"""What each rank of a silent job is doing, from process, device, GIL and stack, and which ranks wait for which.

The sources, in order of trust: the kernel's process state (gone, stopped); what its device has not ended (NCCL);
whether the GIL is free; the ring's word that a wait for a collective has begun; the stack; without a stack, the phase.

A collective that does not end on a rank's device takes precedence over what the host does: the rank that it waits for
blocks the job, and a host that waits for its device spins as if it computed.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from stepscope.flight.dump import OF_GLOO
from stepscope.flight.stacks import is_user_file, user_frame
from stepscope.flight.wording import collective_text, group_text, ranks_text
from stepscope.hangs.evidence import EXITED_IN_ORDER, Evidence, RankEvidence, Recorders, WorkerEvidence
from stepscope.records.hang import Culprit, Frame, HangKind, ThreadStack, WaitingIn
from stepscope.records.steps import COMPUTE_PHASES

__all__ = [
    "FOR_PROCESS",
    "FOR_USER",
    "Activity",
    "Doing",
    "Ruling",
    "Situation",
    "circles",
    "cycle_text",
    "is_busy",
    "is_p2p",
    "main_frames",
    "moves_data",
    "situation_of",
    "wait_words",
    "waits_of",
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
    return "is blocked"


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
BUSY_SHARE = 0.1
"""Share of a core: more than a process uses that only waits, less than one gets that shares a core with several …"""
RUNNING_SHARE = 0.02
"""… and the limit if the main thread is runnable right now, on a machine with far too few cores."""
MOVING_BYTES_S = 100_000.0
BUSY_GPU_PERCENT = 90.0
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


def doing_of(rank: RankEvidence, evidence: Evidence, recorders: Recorders, *, mind_gil: bool = True) -> Doing:
    pending = recorders.pending.get(rank.rank, ())
    """Calls that its Flight Recorders show as begun and not ended, in order."""
    frames = main_frames(rank.threads)
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
        moved=has_moved(rank.threads, rank.threads_later),
        busy=is_busy(rank),
        behind=behind,
    )


def _oldest(told: WaitingIn | None, stuck: WaitingIn, pending: Sequence[WaitingIn]) -> WaitingIn:
    """The call that its device waits in, or its host in another backend's collective, whichever was called first."""
    order = list(pending)
    known = told is not None and told in order and stuck in order
    return told if told is not None and known and order.index(told) < order.index(stuck) else stuck


def is_busy(one: RankEvidence | WorkerEvidence) -> bool:
    least = RUNNING_SHARE if one.process_state == "R" else BUSY_SHARE
    return one.cpu_share is not None and one.cpu_share >= least


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
        told = WaitingIn(group=name, description=description, op=last.op, peer=last.peer)
        return _with_numbers(told, pending)
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


def _with_numbers(told: WaitingIn, pending: Sequence[WaitingIn]) -> WaitingIn:
    """Merge both sources: the ring has sends and recvs; the recorder has numbers, sizes and the calls of DDP."""
    if told.peer is not None or told.op in ("send", "recv"):
        return told
    fitting = [one for one in pending if not told.group or one.group == told.group]
    exact = next((one for one in fitting if _same_op(told.op, one.op)), None)
    if exact is not None:
        return exact
    # gloo's recorder names some operations after the ones they are made of.
    return replace(fitting[-1], op=told.op) if fitting and told.group else told


def _same_op(one: str, other: str) -> bool:
    """``all_gather`` and ``all_gather_into_tensor`` are the same; an unknown op matches any."""
    plain, against = (text.strip("_").replace("_", "") for text in (one, other))
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


# -- situation --------------------------------------------------------------------------------------------------------
# The input of a ruling, and its result.


@dataclass(frozen=True, kw_only=True)
class Ruling:
    kind: HangKind
    title: str
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    collective: WaitingIn | None = None
    cycle: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Situation:
    evidence: Evidence
    ranks: Mapping[int, RankEvidence]
    """By rank, in order."""
    doings: Mapping[int, Doing]
    recorders: Recorders

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that wait for others, in a collective or on a device that waits."""
        return tuple(rank for rank, doing in self.doings.items() if doing.state in WAITING)

    @property
    def single(self) -> bool:
        return self.evidence.world_size <= 1 and len(self.ranks) <= 1

    @cached_property
    def members(self) -> dict[str, frozenset[int]]:
        """The ranks of each group by name, as far as any rank reports them; a single rank is not a group."""
        found: dict[str, set[int]] = {name: set(ranks) for name, ranks in self.recorders.members.items()}
        for rank in self.ranks.values():
            last = (rank.collective.group,) if rank.collective is not None and rank.collective.group else ()
            for group in (*rank.groups, *last):
                # A group too large to list its ranks: use the ranks that report to be in it.
                everybody = group.size and group.size == self.evidence.world_size
                told = group.ranks or (range(group.size) if everybody else (rank.rank,))
                found.setdefault(group.name, set()).update(told)
        return {name: frozenset(ranks) for name, ranks in found.items() if len(ranks) > 1}

    def members_of(self, waiting: WaitingIn) -> frozenset[int]:
        """The members of the group, or all ranks if it is unknown."""
        return self.members.get(waiting.group) or frozenset(range(max(self.evidence.world_size, 0)))

    def who(self, ranks: Iterable[int]) -> str:
        """The subject of a sentence."""
        ranks = sorted(ranks)
        if self.single:
            return "The process"
        if len(ranks) > 2 and len(ranks) == len(self.ranks) == self.evidence.world_size:
            return f"All {len(ranks):,} ranks"
        return f"{ranks_text(ranks, start=True)}{self.on_host(ranks)}"

    def on_host(self, ranks: Iterable[int]) -> str:
        """`` on node7``, if several hosts are known and these ranks are on one of them."""
        known = self.evidence.hosts
        own = {known.get(rank, "") for rank in ranks}
        return f" on {own.pop()}" if len(set(known.values())) > 1 and len(own) == 1 and "" not in own else ""

    def shared(self, ranks: Iterable[int]) -> WaitingIn | None:
        """The collective that most of these wait in; in a tie, that of the lowest rank."""
        waits = [(rank, self.doings[rank].waiting_in) for rank in ranks if rank in self.doings]
        known = [wait for _, wait in sorted(waits) if wait is not None]
        named = [wait for wait in known if wait.op or wait.group] or known
        return Counter(named).most_common(1)[0][0] if named else None

    def wait_for(self, culprits: Iterable[int], *, named: bool = True) -> str:
        """``; ranks 0, 2, 3 wait for it in all_reduce number 7 of default_pg``; empty if no rank waits."""
        guilty = set(culprits)
        victims = [rank for rank in self.waiting if rank not in guilty]
        if not victims:
            return ""
        shared = self.shared(victims)
        where = f" in {collective_text(shared)}" if named and shared is not None and (shared.op or shared.group) else ""
        verb = "waits" if len(victims) == 1 else "wait"
        return f"; {ranks_text(victims)} {verb} for {'it' if len(guilty) == 1 else 'them'}{where}"


def situation_of(evidence: Evidence, recorders: Recorders) -> Situation:
    # If two processes claim a rank, the live one counts.
    ranks = {rank.rank: rank for rank in sorted(evidence.ranks, key=lambda one: (one.rank, one.alive))}
    doings = {number: doing_of(rank, evidence, recorders) for number, rank in ranks.items()}
    alive = [doing for doing in doings.values() if doing.state != "gone"]
    if len(alive) > 1 and all(doing.state == "gil" for doing in alive):
        # A call that holds the GIL while it waits: if all ranks are in it, it identifies no culprit.
        doings |= {
            number: doing_of(rank, evidence, recorders, mind_gil=False)
            for number, rank in ranks.items()
            if doings[number].state == "gil" and doings[number].waiting_in is not None
        }
    return Situation(evidence, ranks, doings, recorders)


# -- wait graph -------------------------------------------------------------------------------------------------------
# Which ranks wait for which: a graph of ranks and of the calls that they wait in, and its circles.
#
# A rank waits in a call, and a call waits for the members of its group that are not in it; a send or recv waits for its
# peer. With calls as separate nodes, a thousand ranks that wait for one need a thousand edges instead of a million.

Node = tuple[str, int]
"""``("", rank)``, or the name of a group and 0."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    edges: Mapping[Node, tuple[Node, ...]]
    elsewhere: frozenset[int]
    """Ranks on other hosts that others wait for, or may wait for."""


def is_p2p(waiting: WaitingIn | None) -> bool:
    return waiting is not None and (waiting.peer is not None or waiting.op in ("send", "recv", "isend", "irecv"))


def waits_of(situation: Situation) -> Waits:
    edges: dict[Node, tuple[Node, ...]] = {}
    elsewhere: set[int] = set()
    here = situation.ranks
    for rank in situation.waiting:
        waiting = situation.doings[rank].waiting_in
        if waiting is None:
            continue
        if is_p2p(waiting):
            missing = set() if waiting.peer is None or _answers(situation, rank, waiting) else {waiting.peer}
            edges["", rank] = tuple(("", peer) for peer in missing if peer in here)
        else:
            call = (f"in {_queue_of(waiting)}", 0)
            edges["", rank] = (call,)
            if call in edges:
                continue
            missing = {other for other in situation.members_of(waiting) if not _joined(situation, other, waiting)}
            edges[call] = tuple(("", other) for other in sorted(missing) if other in here)
        elsewhere |= {other for other in missing if other not in here}
    return Waits(edges=edges, elsewhere=frozenset(elsewhere))


def _joined(situation: Situation, rank: int, waiting: WaitingIn) -> bool:
    """Whether this rank waits in the same group, or may: the group is not always known."""
    doing = situation.doings.get(rank)
    own = doing.waiting_in if doing is not None and rank in situation.waiting else None
    return (
        own is not None
        and not is_p2p(own)
        and (_queue_of(own) == _queue_of(waiting) or not (own.group and waiting.group))
    )


def _queue_of(waiting: WaitingIn) -> str:
    """Its group, or gloo's half of a group that also has NCCL: calls in one half do not match calls in the other."""
    return f"{waiting.group}{OF_GLOO}" if waiting.description.endswith(OF_GLOO) else waiting.group


def _answers(situation: Situation, rank: int, waiting: WaitingIn) -> bool:
    """Whether the peer of a send or recv is in the matching call."""
    doing = situation.doings.get(waiting.peer) if waiting.peer is not None else None
    other = doing.waiting_in if doing is not None and doing.rank in situation.waiting else None
    if other is None or not is_p2p(other) or other.peer not in (rank, None):
        return False
    return ("send" in other.op) != ("send" in waiting.op)


def circles(edges: Mapping[Node, tuple[Node, ...]]) -> list[tuple[int, ...]]:
    """Ranks that wait for themselves through others: strongly connected components, each in order (Tarjan)."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    found: list[tuple[int, ...]] = []
    for start in sorted(edges):
        if start in index:
            continue
        work: list[tuple[Node, int]] = [(start, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            nexts = edges.get(node, ())
            if at > 0:
                low[node] = min(low[node], low[nexts[at - 1]])
            while at < len(nexts) and nexts[at] in index:
                if nexts[at] in on_stack:
                    low[node] = min(low[node], index[nexts[at]])
                at += 1
            if at < len(nexts):
                work += [(node, at + 1), (nexts[at], 0)]
            elif low[node] == index[node]:
                found += _component(node, stack, on_stack)
    return sorted(found)


def _component(node: Node, stack: list[Node], on_stack: set[Node]) -> list[tuple[int, ...]]:
    """Pop the component that ``node`` closes from the stack; return its ranks if it is a circle."""
    members = []
    while True:
        member = stack.pop()
        on_stack.discard(member)
        members.append(member)
        if member == node:
            break
    ranks = sorted(number for name, number in members if not name)
    return [tuple(ranks)] if len(members) > 1 and ranks else []


def cycle_text(situation: Situation, waits: Waits, ranks: Sequence[int]) -> tuple[str, ...]:
    """The shortest path from the first of these back to itself, one sentence per rank."""
    way = _way_round(waits.edges, ("", ranks[0]))
    stops = [number for name, number in way if not name]
    return tuple(
        _wait_text(one, other, situation.doings[one].waiting_in)
        for one, other in zip(stops, [*stops[1:], stops[0]], strict=True)
    )


def _wait_text(one: int, other: int, waiting: WaitingIn | None) -> str:
    said = f"rank {one} waits for rank {other}"
    if waiting is None:
        return said
    if is_p2p(waiting):
        return f"{said} ({waiting.op})"
    number = f" {waiting.sequence}" if waiting.sequence is not None else ""
    call = f"{waiting.op}{number}".strip()
    return f"{said} in {group_text(waiting) or 'a group'}" + (f" ({call})" if call else "")


def _way_round(edges: Mapping[Node, tuple[Node, ...]], start: Node) -> list[Node]:
    came: dict[Node, Node] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for after in edges.get(node, ()):
            if after == start:
                way = [node]
                while way[-1] != start:
                    way.append(came[way[-1]])
                return way[::-1]
            if after not in came:
                came[after] = node
                queue.append(after)
    return [start]
