"""Processes of this node: state, CPU time, I/O, wait channel and children, mostly from psutil.

Unavailable information (process gone, another user's, another system) is None or empty, never an error. psutil takes
1.1 to 1.4 times as long as reading the files ourselves, 0.1 ms for a process. That does not matter: processes are read
when a job is suspected to hang, and at most 40 times for a rank that waits for its DataLoader workers. Children are
listed without psutil (``descendants``), and files that it does not read are read here and in ``stacks.py``: wait
channel, signal masks, system calls.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepscope.records.redaction import redact_command

__all__ = [
    "PROC",
    "Reading",
    "child_kind",
    "descendants",
    "process_name",
    "read_process",
    "spent_between",
    "wait_channel",
]


# -- Processes --------------------------------------------------------------------------------------------------------

PROC = Path("/proc")
LONGEST_COMMAND = 4096
DEEPEST = 6
"""Generations of children: rank, compile pool, its worker, a compiler, its subprocesses."""
STATES = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
}
"""The kernel's letters, which documents and reports have."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A snapshot of a process."""

    pid: int
    at_s: float
    name: str
    """The kernel's name for it, which a process may change."""
    state: str
    """State of its main thread: R, S, D, T, t, Z."""
    parent: int
    cpu_s: float
    """CPU time of all its threads so far, without its children."""
    io_bytes: int | None
    """Bytes read and written so far, by system calls or on disk, whichever is more."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    cpu_share: float | None
    """Share of one core."""
    io_bytes_s: float | None


def read_process(pid: int) -> Reading | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            spent = process.cpu_times()
            return Reading(
                pid=pid,
                at_s=time.monotonic(),
                name=process.name(),
                state=STATES.get(process.status(), "?"),
                parent=process.ppid(),
                cpu_s=spent.user + spent.system,
                io_bytes=_io_bytes(process),
            )
    except (psutil.Error, OSError):
        return None


def _io_bytes(process: psutil.Process) -> int | None:
    try:
        counts = process.io_counters()
    except (psutil.Error, OSError, AttributeError):  # another user's, or a kernel that does not count
        return None
    return int(max(counts.read_chars + counts.write_chars, counts.read_bytes + counts.write_bytes))


def spent_between(earlier: Reading | None, later: Reading | None) -> Spent:
    if earlier is None or later is None or later.at_s <= earlier.at_s:
        return Spent(cpu_share=None, io_bytes_s=None)
    seconds = later.at_s - earlier.at_s
    moved = None
    if earlier.io_bytes is not None and later.io_bytes is not None:
        moved = round(max(0, later.io_bytes - earlier.io_bytes) / seconds, 1)
    return Spent(cpu_share=round(max(0.0, later.cpu_s - earlier.cpu_s) / seconds, 3), io_bytes_s=moved)


def wait_channel(pid: int) -> str:
    """Return the kernel function in which the main thread sleeps; empty if it does not sleep or that is unknown."""
    try:
        name = (PROC / str(pid) / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def command_line(pid: int) -> str:
    """Return the command line of a process without secrets; empty if it is not known."""
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, OSError):
        return ""
    return " ".join(redact_command(words))[:LONGEST_COMMAND].strip()


def descendants(pids: Collection[int]) -> dict[int, list[int]]:
    """Return the descendants of each process; one listing of ``/proc`` serves all.

    ``psutil.process_iter`` takes 1.5 times as long (11 ms for 216 processes, and 15 ms the first time), and leaves out
    a process whose number belonged to another one when it was called last.
    """
    found: dict[int, list[int]] = {pid: [] for pid in pids}
    parents = {pid: parent for pid in psutil.pids() if (parent := _parent(pid)) is not None}
    for pid in sorted(parents):
        ancestor = pid
        for _ in range(DEEPEST):
            ancestor = parents.get(ancestor, 0)
            if ancestor in found:
                found[ancestor].append(pid)
                break
    return found


def _parent(pid: int) -> int | None:
    try:
        stat = Path(psutil.PROCFS_PATH, str(pid), "stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])


# -- Child processes --------------------------------------------------------------------------------------------------
# What the children of a rank are: DataLoader workers, compilers, others.

WORKER_NAME = "pt_data_worker"
"""torch's name for the main thread of a DataLoader worker, since 2.5. The kernel keeps 15 characters."""
COMPILE_WORKER = "torch/_inductor/compile_worker"
COMPILERS = ("cc", "c++", "gcc", "g++", "cc1", "cc1plus", "as", "ld", "collect2", "clang", "clang++", "lld", "nvcc")
KERNEL_COMPILERS = ("cicc", "ptxas", "fatbinary", "cudafe++", "ninja", "triton")
LONGEST_NAME = 80


def child_kind(pid: int, parent: int) -> str:
    """Return ``dataloader``, ``compiler`` or ``other``; ``parent`` is the rank."""
    reading, command = read_process(pid), command_line(pid)
    if reading is None:
        return "other"
    if reading.name == WORKER_NAME:
        return "dataloader"
    program = command.partition(" ")[0].rpartition("/")[2]
    # The gcc of a distribution or of conda has a longer name: aarch64-linux-gnu-g++-13.
    bare = program.rstrip("0123456789.-").rpartition("-")[2]
    if COMPILE_WORKER in command or {program, bare, reading.name} & {*COMPILERS, *KERNEL_COMPILERS}:
        return "compiler"
    # A fork that still runs its parent's program: before torch 2.5 nothing else marks a DataLoader worker.
    forked = reading.parent == parent and bool(command) and command == command_line(parent)
    return "dataloader" if forked else "other"


def process_name(pid: int) -> str:
    """Return the beginning of its command line, or the kernel's name for it."""
    reading = read_process(pid)
    return command_line(pid)[:LONGEST_NAME] or (reading.name if reading else "")
