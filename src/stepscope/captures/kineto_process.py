"""A process to be captured through Kineto's daemon protocol: who it is, and how its files and its socket are reached.

Everything comes from ``/proc``.  A process in a container has another root, so its files are opened by way of
``/proc/PID/root``, and its pid there is another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepscope.errors import CaptureError
from stepscope.recorder.identity import is_launcher, rank_from, world_size_from

__all__ = ["PROC", "TracedProcess", "find_processes"]

PROC = Path("/proc")
_DAEMON_VARIABLE = "KINETO_USE_DAEMON"
_FOLDER_VARIABLE = "KINETO_IPC_SOCKET_DIR"


@dataclass(frozen=True, kw_only=True)
class TracedProcess:
    pid: int
    user: int
    started_ticks: int
    """Since the machine's start; with the pid it names the process for good."""
    root: Path
    """Its root directory as we reach it."""
    socket_folder: str
    """Where it expects the daemon's socket, in its own files; empty: the abstract name."""
    rank: int | None
    """From its launcher's variables."""
    world_size: int | None

    @property
    def name(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"process {self.pid} (rank {self.rank})"

    @property
    def alive(self) -> bool:
        return _started_ticks(self.pid) == self.started_ticks

    def shares_files(self, folder: Path) -> bool:
        """Whether our folder is the same one for the process."""
        try:
            return folder.samefile(self.root / folder.relative_to("/"))
        except (OSError, ValueError):
            return False


def find_processes(pids: Iterable[int], *, proc: Path = PROC) -> tuple[TracedProcess, ...]:
    """The processes to capture; of a launcher such as torchrun its ranks.  CaptureError with what is wrong."""
    found: dict[int, TracedProcess] = {}
    for pid in pids:
        for rank_pid in _ranks_of_launcher(pid) or (pid,):
            found[rank_pid] = _find_process(rank_pid, proc)
    return tuple(found.values())


def _find_process(pid: int, proc: Path) -> TracedProcess:
    started = _started_ticks(pid, proc)
    if started is None:
        raise CaptureError(f"there is no process {pid} on this machine; `ps` lists the processes")
    folder = proc / str(pid)
    try:
        user = folder.stat().st_uid
        if user != os.geteuid():
            raise CaptureError(f"process {pid} belongs to user {user}; run this command as that user")
        environment = _environment(folder)
        namespaces_differ = not (folder / "ns/net").samefile(proc / "self/ns/net")
    except PermissionError:
        raise CaptureError(f"process {pid} cannot be examined: it has more privileges than this command") from None
    except OSError:
        raise CaptureError(f"process {pid} has ended") from None
    if not environment.get(_DAEMON_VARIABLE):
        raise CaptureError(
            f"process {pid} was started without {_DAEMON_VARIABLE}=1 in its environment, so it accepts no requests; "
            f"start it again with that variable, or record it with `stepscope run`"
        )
    socket_folder = environment.get(_FOLDER_VARIABLE, "")
    if not socket_folder and namespaces_differ:
        raise CaptureError(
            f"process {pid} is in another network namespace, such as a container's, and its socket cannot be reached "
            f"from here; run this command there: `nsenter --target {pid} --net stepscope capture --pid {pid}`"
        )
    if socket_folder and not socket_folder.startswith("/"):
        raise CaptureError(f"process {pid} has a relative path in {_FOLDER_VARIABLE}; start it with an absolute one")
    return TracedProcess(
        pid=pid,
        user=user,
        started_ticks=started,
        root=folder / "root",
        socket_folder=socket_folder,
        rank=rank_from(environment),
        world_size=world_size_from(environment),
    )


def _started_ticks(pid: int, proc: Path = PROC) -> int | None:
    """When a process started; None if it is gone, or only its exit code is left of it."""
    try:
        state, *fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return None if state in (b"Z", b"X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def _environment(folder: Path) -> dict[str, str]:
    """Variables with which a process was started."""
    pairs = (entry.partition(b"=") for entry in (folder / "environ").read_bytes().split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}


def _ranks_of_launcher(pid: int) -> list[int]:
    try:
        launcher = psutil.Process(pid)
        if not is_launcher(launcher.cmdline()):
            return []
        return [child.pid for child in launcher.children() if _has_rank(child.pid)]
    except psutil.Error:
        return []


def _has_rank(pid: int) -> bool:
    try:
        return rank_from(_environment(PROC / str(pid))) is not None
    except OSError:
        return False
