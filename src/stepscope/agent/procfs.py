"""Reads /proc: a process's state, CPU time, I/O, wait channel and children.

All reads are small. Unavailable information (process gone, another user's, another system) is None or empty, never an
error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

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
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LONGEST_COMMAND = 4096
DEEPEST = 6
"""Generations of children: rank, compile pool, its worker, a compiler, its subprocesses."""


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


def read_process(pid: int, proc: Path = PROC) -> Reading | None:
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    before, _, rest = stat.rpartition(b")")
    fields = rest.split()
    if len(fields) < 13:
        return None
    return Reading(
        pid=pid,
        at_s=time.monotonic(),
        name=before.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode(errors="replace"),
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        io_bytes=_io_bytes(pid, proc),
    )


def spent_between(earlier: Reading | None, later: Reading | None) -> Spent:
    if earlier is None or later is None or later.at_s <= earlier.at_s:
        return Spent(cpu_share=None, io_bytes_s=None)
    seconds = later.at_s - earlier.at_s
    moved = None
    if earlier.io_bytes is not None and later.io_bytes is not None:
        moved = round(max(0, later.io_bytes - earlier.io_bytes) / seconds, 1)
    return Spent(cpu_share=round(max(0.0, later.cpu_s - earlier.cpu_s) / seconds, 3), io_bytes_s=moved)


def wait_channel(pid: int, proc: Path = PROC) -> str:
    """Return the kernel function in which the main thread sleeps; empty if it does not sleep or that is unknown."""
    try:
        name = (proc / str(pid) / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def command_line(pid: int, proc: Path = PROC) -> str:
    """Return the command line of a process without secrets; empty if it is not known."""
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            words = file.read(LONGEST_COMMAND)
    except OSError:
        return ""
    return " ".join(redact_command(words.decode(errors="replace").rstrip("\0").split("\0"))).strip()


def descendants(pids: Collection[int], proc: Path = PROC) -> dict[int, list[int]]:
    """Return the descendants of each process; one listing of ``/proc`` serves all."""
    found: dict[int, list[int]] = {pid: [] for pid in pids}
    try:
        present = [int(name) for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208 - names, quickly
    except OSError:
        return found
    parents = {pid: parent for pid in present if (parent := _parent(pid, proc)) is not None}
    for pid in sorted(parents):
        ancestor = pid
        for _ in range(DEEPEST):
            ancestor = parents.get(ancestor, 0)
            if ancestor in found:
                found[ancestor].append(pid)
                break
    return found


def _parent(pid: int, proc: Path) -> int | None:
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 else None


def _io_bytes(pid: int, proc: Path) -> int | None:
    try:
        text = (proc / str(pid) / "io").read_text()
    except OSError:
        return None
    counts = dict(line.partition(": ")[::2] for line in text.splitlines())
    try:
        called = int(counts["rchar"]) + int(counts["wchar"])
        return max(called, int(counts["read_bytes"]) + int(counts["write_bytes"]))
    except (KeyError, ValueError):
        return None


# -- Child processes --------------------------------------------------------------------------------------------------
# What the children of a rank are: DataLoader workers, compilers, others.

WORKER_NAME = "pt_data_worker"
"""torch's name for the main thread of a DataLoader worker, since 2.5. The kernel keeps 15 characters."""
COMPILE_WORKER = "torch/_inductor/compile_worker"
COMPILERS = ("cc", "c++", "gcc", "g++", "cc1", "cc1plus", "as", "ld", "collect2", "clang", "clang++", "lld", "nvcc")
KERNEL_COMPILERS = ("cicc", "ptxas", "fatbinary", "cudafe++", "ninja", "triton")
LONGEST_NAME = 80


def child_kind(pid: int, parent: int, proc: Path = PROC) -> str:
    """Return ``dataloader``, ``compiler`` or ``other``; ``parent`` is the rank."""
    reading, command = read_process(pid, proc), command_line(pid, proc)
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
    forked = reading.parent == parent and bool(command) and command == command_line(parent, proc)
    return "dataloader" if forked else "other"


def process_name(pid: int, proc: Path = PROC) -> str:
    """Return the beginning of its command line, or the kernel's name for it."""
    reading = read_process(pid, proc)
    return command_line(pid, proc)[:LONGEST_NAME] or (reading.name if reading else "")
