"""The child processes of a rank, and what they are: DataLoader workers, compilers, others."""

from __future__ import annotations

from pathlib import Path

from stepscope.agent.procfs import PROC, command_line, read_process

__all__ = ["kind_of", "name_of"]

WORKER_NAME = "pt_data_worker"
"""What torch calls the main thread of a DataLoader worker, since 2.5; the kernel keeps 15 letters."""
COMPILE_WORKER = "torch/_inductor/compile_worker"
COMPILERS = ("cc", "c++", "gcc", "g++", "cc1", "cc1plus", "as", "ld", "collect2", "clang", "clang++", "lld", "nvcc")
COMPILERS_OF_KERNELS = ("cicc", "ptxas", "fatbinary", "cudafe++", "ninja", "triton")
LONGEST_NAME = 80


def kind_of(pid: int, parent: int, proc: Path = PROC) -> str:
    """``dataloader``, ``compiler`` or ``other``; ``parent`` is the rank."""
    reading, command = read_process(pid, proc), command_line(pid, proc)
    if reading is None:
        return "other"
    if reading.name == WORKER_NAME:
        return "dataloader"
    program = command.partition(" ")[0].rpartition("/")[2]
    # gcc of a distribution or of conda: aarch64-linux-gnu-g++-13.
    bare = program.rstrip("0123456789.-").rpartition("-")[2]
    if COMPILE_WORKER in command or {program, bare, reading.name} & {*COMPILERS, *COMPILERS_OF_KERNELS}:
        return "compiler"
    # A fork that goes on as its parent's program: in torch before 2.5 a DataLoader worker is no more than that.
    forked = reading.parent == parent and bool(command) and command == command_line(parent, proc)
    return "dataloader" if forked else "other"


def name_of(pid: int, proc: Path = PROC) -> str:
    """The beginning of its command line, or the name the kernel has for it."""
    reading = read_process(pid, proc)
    return command_line(pid, proc)[:LONGEST_NAME] or (reading.name if reading else "")
