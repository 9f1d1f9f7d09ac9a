"""Evidence about ranks that make no progress: stacks (by signal or py-spy), Flight Recorders, kernel state.

All ranks are queried at once, each with a deadline, so that sixty-four ranks need no more time than one: two or three
seconds. Most of that is the time between the first sample and the second, which shows which ranks are working. This
code runs in a separate thread, which the watchdog starts, and touches nothing of the agent's: it knows a rank only as a
``Subject``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from stepscope.agent.flight_reader import NEEDS_GIL, Questions, ask_active, ask_flights, ask_servers
from stepscope.agent.procfs import (
    Reading,
    child_kind,
    descendants,
    process_name,
    read_process,
    spent_between,
    wait_channel,
)
from stepscope.agent.stacks import STOPPED, StackOffers, StacksQuestion, ask_stacks
from stepscope.flight.stacks import parse_threads
from stepscope.hangs.evidence import RankEvidence, WorkerEvidence
from stepscope.hangs.thresholds import GatherLimits
from stepscope.records.hang import Frame, ThreadStack

__all__ = ["Gathered", "Subject", "gather", "parse_pyspy", "read_lines"]


# -- py-spy -----------------------------------------------------------------------------------------------------------
# Gets stacks from processes that do not answer their signal, if py-spy is installed. It reads another process's memory,
# which many systems forbid, so there is usually no answer.

PYSPY_AT_ONCE = 4
PYSPY_POLL_S = 0.02
PYSPY_BYTES = 1 << 20
MAX_THREADS = 200
MAX_FRAMES = 200


def spy(pids: Collection[int], *, patience_s: float) -> dict[int, tuple[ThreadStack, ...]]:
    """Return the stacks by pid, for the first few processes that answer in time."""
    program = shutil.which("py-spy")
    if program is None:
        return {}
    found: dict[int, tuple[ThreadStack, ...]] = {}
    deadline = time.monotonic() + patience_s
    with ExitStack() as stack:
        running = {pid: _start_pyspy(program, pid, stack) for pid in list(pids)[:PYSPY_AT_ONCE]}
        while running and time.monotonic() < deadline:
            time.sleep(PYSPY_POLL_S)
            for pid, (process, output) in list(running.items()):
                if process.poll() is not None:
                    del running[pid]
                    output.seek(0)
                    if threads := parse_pyspy(output.read(PYSPY_BYTES)):
                        found[pid] = threads
        for process, _ in running.values():
            process.kill()
            process.wait()
    return found


def parse_pyspy(text: bytes) -> tuple[ThreadStack, ...]:
    """Parse the output of ``py-spy dump --json``; return nothing if it is anything else."""
    try:
        threads = json.loads(text)
        return tuple(_pyspy_thread(thread) for thread in threads[:MAX_THREADS])
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return ()


def _start_pyspy(program: str, pid: int, stack: ExitStack) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the stack closes it
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=output, stderr=quiet), output


def _pyspy_thread(thread: dict[str, Any]) -> ThreadStack:
    name = str(thread.get("thread_name") or "")
    frames = tuple(
        Frame(file=str(frame["filename"]), line=max(0, int(frame["line"])), function=str(frame["name"]))
        for frame in thread["frames"][:MAX_FRAMES]
    )
    return ThreadStack(main=name == "MainThread", name=name, frames=frames)


# -- Source lines -----------------------------------------------------------------------------------------------------
# Reads the source lines for a report, within limits. The file system with the source may be the very thing that hangs,
# so a thread reads it and is abandoned if it does not return.

MAX_FILES = 64
MAX_FILE_BYTES = 4 << 20
MAX_LINES = 512
LONGEST_LINE = 200

SourceLine = tuple[str, int]


def read_lines(places: Iterable[SourceLine], *, patience_s: float) -> dict[SourceLine, str]:
    """Return the stripped lines, by file and line, that could be read in time."""
    wanted: dict[str, set[int]] = {}
    for file, line in list(dict.fromkeys(places))[:MAX_LINES]:
        if line > 0 and file.startswith("/") and (file in wanted or len(wanted) < MAX_FILES):
            wanted.setdefault(file, set()).add(line)
    found: dict[SourceLine, str] = {}
    reader = threading.Thread(target=_read_source, args=(wanted, found), name="source lines", daemon=True)
    reader.start()
    reader.join(patience_s)
    return found.copy()  # the thread may still be adding to it


def _read_source(wanted: dict[str, set[int]], found: dict[SourceLine, str]) -> None:
    for file, lines in wanted.items():
        try:
            with Path(file).open("rb") as source:
                text = source.read(MAX_FILE_BYTES).decode(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line <= len(text):
                found[file, line] = text[line - 1].strip()[:LONGEST_LINE]


# -- Gathering --------------------------------------------------------------------------------------------------------

DEFAULT_LIMITS = GatherLimits()
WORKER_LOOP = "torch/utils/data/_utils/worker.py"
MAX_WORKERS = 32
"""How many children of a rank are examined."""
WORKERS_WITH_STACKS = 8
"""How many of them to ask for stacks, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A rank to examine, as its ring shows it."""

    evidence: RankEvidence
    """Filled in from the ring."""
    pidfd: int | None = None
    """Owned, and closed, by the code that gathers."""
    offers: StackOffers | None = None
    server: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Gathered:
    ranks: tuple[RankEvidence, ...]
    source_lines: dict[tuple[str, int], str] = field(default_factory=dict)
    stack_texts: dict[int, str] = field(default_factory=dict)
    """The raw stacks by rank."""


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """The answers by pid."""

    family: dict[int, list[int]]
    first: dict[int, Reading | None]
    second: dict[int, Reading | None]
    flights: dict[int, bytes]
    flights_later: dict[int, bytes]
    gil_held: dict[int, bool]
    texts: dict[int, str]
    texts_later: dict[int, str]
    worker_texts: dict[int, str]
    spied: dict[int, tuple[ThreadStack, ...]]


def gather(
    subjects: Iterable[Subject],
    *,
    earlier: Mapping[int, RankEvidence] | None = None,
    limits: GatherLimits = DEFAULT_LIMITS,
) -> Gathered:
    """Gather everything about the ranks. ``earlier`` is the evidence from the same stop so far, by pid.

    A server may have stopped answering since; its earlier answers still hold.
    """
    subjects = list(subjects)
    alive = [subject for subject in subjects if subject.evidence.alive]
    with ExitStack() as closing:
        for subject in alive:
            if subject.pidfd is not None:
                closing.callback(os.close, subject.pidfd)
        held = {pid for pid, rank in (earlier or {}).items() if rank.gil_held}
        answers = _sample_twice(alive, held, limits)
    ranks = tuple(
        _evidence(subject, answers, (earlier or {}).get(subject.evidence.pid))
        if subject.evidence.alive
        else subject.evidence
        for subject in subjects
    )
    numbers = {subject.evidence.pid: subject.evidence.rank for subject in subjects}
    return Gathered(
        ranks=ranks,
        source_lines=read_lines(_places(ranks), patience_s=limits.source_s),
        stack_texts={numbers[pid]: text for pid, text in answers.texts.items()},
    )


def _sample_twice(alive: list[Subject], known_held: set[int], limits: GatherLimits) -> _Answers:
    began_s = time.monotonic()
    family = descendants([subject.evidence.pid for subject in alive])
    processes = [pid for children in family.values() for pid in children[:MAX_WORKERS]] + list(family)
    first = {pid: read_process(pid) for pid in processes}
    servers = _servers(alive, first)
    flights = ask_flights(servers, patience_s=limits.server_s)
    # Skip those whose GIL is known to be held: each such question blocks a thread of the server.
    queried = {pid: servers[pid] for pid in flights if pid not in known_held}
    with Questions(queried, NEEDS_GIL) as gil:
        gil.wait(limits.gil_s)
        gil_held = {pid: pid not in gil.answers for pid in queried}
        texts = _ask_ranks(alive, gil, limits)
        in_c = {pid: servers[pid] for pid in gil.answers if pid not in texts}
        texts |= {pid: _traceback_text(gil.answers[pid]) for pid in in_c}
        worker_texts = _ask_workers(alive, family, limits)
        spied = spy(
            [subject.evidence.pid for subject in alive if subject.evidence.pid not in texts], patience_s=limits.spy_s
        )
        time.sleep(max(0.0, began_s + limits.window_s - time.monotonic()))
        texts_later = _ask_ranks(alive, gil, limits)
        again = ask_servers(in_c, NEEDS_GIL, patience_s=limits.gil_s)
        texts_later |= {pid: _traceback_text(answer) for pid, answer in again.items()}
        flights_later = ask_active({pid: servers[pid] for pid in flights}, patience_s=limits.server_s)
    return _Answers(
        family=family,
        first=first,
        texts=texts,
        flights=flights,
        flights_later=flights_later,
        gil_held=gil_held,
        worker_texts=worker_texts,
        spied=spied,
        texts_later=texts_later,
        second={pid: read_process(pid) for pid in processes},
    )


def _evidence(subject: Subject, answers: _Answers, before: RankEvidence | None) -> RankEvidence:
    known, pid = subject.evidence, subject.evidence.pid
    trains = subject.offers.trains if subject.offers is not None else 0
    now = answers.second.get(pid)
    spent = spent_between(answers.first.get(pid), now)
    texts, later = answers.texts, answers.texts_later
    # A running process whose GIL may still be held gives no new stacks; it has not moved since.
    known_threads = before.threads if before is not None and before.gil_held else ()
    return replace(
        known,
        process_state=now.state if now else "",
        wait_channel=wait_channel(pid),
        cpu_share=spent.cpu_share,
        io_bytes_s=spent.io_bytes_s,
        gil_held=answers.gil_held.get(pid, before.gil_held if before else None),
        threads=parse_threads(texts[pid], trains=trains) if pid in texts else answers.spied.get(pid, known_threads),
        threads_later=parse_threads(later[pid], trains=trains) if pid in later else (),
        workers=_workers(pid, answers),
        flight=answers.flights.get(pid, before.flight if before else b""),
        flight_later=answers.flights_later.get(pid, b""),
    )


def _servers(subjects: Iterable[Subject], readings: Mapping[int, Reading | None]) -> dict[int, Path]:
    """Return the servers of processes that can answer."""
    servers = {}
    for subject in subjects:
        reading = readings.get(subject.evidence.pid)
        if subject.server is not None and reading is not None and reading.state not in STOPPED:
            servers[subject.evidence.pid] = subject.server
    return servers


def _ask_ranks(subjects: Iterable[Subject], gil: Questions[int], limits: GatherLimits) -> dict[int, str]:
    questions = {}
    for subject in subjects:
        pid = subject.evidence.pid
        if subject.pidfd is not None and subject.offers is not None:
            held = partial(gil.unanswered, pid)
            questions[pid] = StacksQuestion(pid=pid, pidfd=subject.pidfd, offers=subject.offers, gil_held=held)
    return ask_stacks(questions, patience_s=limits.stacks_s)


def _traceback_text(traceback: bytes) -> str:
    """Return the stacks from torch's worker server, for a process whose main thread runs C code and answers no signal.

    A rank waits for NCCL like this: it spins in ``cudaStreamSynchronize`` without the GIL.
    """
    return traceback.decode(errors="replace")


def _ask_workers(subjects: Iterable[Subject], family: Mapping[int, list[int]], limits: GatherLimits) -> dict[int, str]:
    """Ask workers that share a rank's file one after the other, and those of different ranks at the same time."""
    queues = []
    for subject in subjects:
        rank = subject.evidence.pid
        workers = [pid for pid in family.get(rank, []) if child_kind(pid, rank) == "dataloader"]
        if workers and subject.offers is not None:
            # A forked child keeps only this one of the inherited signals.
            queues.append((replace(subject.offers, stacks=None, running=None), workers[:WORKERS_WITH_STACKS]))
    found: dict[int, str] = {}
    deadline = time.monotonic() + limits.workers_s
    for turn in range(WORKERS_WITH_STACKS):
        left_s = deadline - time.monotonic()
        with ExitStack() as closing:
            questions = {}
            for offers, workers in queues:
                if turn < len(workers) and (pidfd := _pidfd(workers[turn])) is not None:
                    closing.callback(os.close, pidfd)
                    questions[workers[turn]] = StacksQuestion(pid=workers[turn], pidfd=pidfd, offers=offers)
            if not questions or left_s <= 0:
                break
            found |= ask_stacks(questions, patience_s=min(left_s, limits.stacks_s))
    return found


def _pidfd(pid: int) -> int | None:
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def _workers(rank: int, answers: _Answers) -> tuple[WorkerEvidence, ...]:
    found = []
    for pid in answers.family.get(rank, [])[:MAX_WORKERS]:
        now = answers.second.get(pid)
        if now is None:
            continue  # it ended in between
        worker = WorkerEvidence(
            pid=pid,
            kind=child_kind(pid, rank),
            name=process_name(pid),
            process_state=now.state,
            cpu_share=spent_between(answers.first.get(pid), now).cpu_share,
            threads=_own_frames(parse_threads(answers.worker_texts.get(pid, ""))),
        )
        found.append(worker)
    return tuple(found)


def _own_frames(threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """Remove the frames that a forked DataLoader worker inherited from its parent."""
    found = []
    for thread in threads:
        loop = next((at for at, frame in enumerate(thread.frames) if frame.file.endswith(WORKER_LOOP)), None)
        found.append(thread if loop is None else replace(thread, frames=thread.frames[: loop + 1]))
    return tuple(found)


def _places(ranks: Iterable[RankEvidence]) -> list[tuple[str, int]]:
    """Return the lines of the main threads, innermost lines of all ranks first, because space is limited."""
    stacks: list[ThreadStack] = []
    for rank in ranks:
        stacks += [thread for thread in rank.threads if thread.main]
        stacks += [thread for worker in rank.workers for thread in worker.threads if thread.main]
    deepest = max((len(stack.frames) for stack in stacks), default=0)
    frames = [stack.frames[depth] for depth in range(deepest) for stack in stacks if depth < len(stack.frames)]
    return [(frame.file, frame.line) for frame in frames]
