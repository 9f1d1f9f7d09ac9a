"""Torch's own worker server, started in jobs with several ranks, so that the agent can query a rank from outside.

The server answers over a Unix socket next to the ring, from native threads and without the GIL: the Flight Recorder can
be read even if a rank's Python is stuck.  The agent queries a job that makes no progress, or in which a rank died; on
NCCL it also reads the Flight Recorder now and then while the job trains (``agent/flight_reader.py``), since nothing
else knows how long collectives take.  The server is the only part of Stepscope that adds threads to a training process;
they sleep until a query arrives.  Constraints:

- It has a pool of threads, as many as the machine has cores and eight at least.  If one of them cannot be created,
  torch ends the process: where a limit on threads or on address space could be near, there is no server.
- It prints to standard error that it listens.  Raising torch's log level for the call suppresses that line.
- It is never shut down.  Shutting down joins a thread, forever if that one was not listening yet, or in a forked child,
  which has no such thread.  So it is made immortal (``recorder/guard.py``) and at the end only its socket file is
  removed: sleeping threads do not keep a process from ending.
- A forked child closes the socket it inherited; ``exec`` closes it automatically.
- Only the user may connect.  The folder of the ring may be open to others (it is in the run directory when another user
  has taken the session's name), and torch creates the socket with whatever mode the umask gives.  So it is created in a
  new folder that others cannot enter, restricted to its owner, and then moved next to the ring.  The umask itself is
  left alone: it belongs to the whole process, whose other threads may be creating files at this moment.
- If the script itself set up a worker server, another client uses it, and Stepscope starts none.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.recorder.guard import failsafe, immortal
from stepscope.records.files import folder_mode
from stepscope.records.paths import (
    ENV_RUN_DIR,
    ENV_SERVER,
    ENV_TORCH_DUMPS,
    FLIGHT,
    SERVER_SUFFIX,
    nccl_dumps,
    server_threads,
)
from stepscope.ring import RingWriter
from stepscope.ring.layout import SERVER_WORD

__all__ = ["ServerOffer", "cgroup_rooms", "has_room_for"]

MAX_PATH_BYTES = 100
"""A socket's path is limited to 107; the folder in which it is created has a name of similar length."""
_OWN = 0o600
OWN_SERVER = "TORCH_WORKER_SERVER_SOCKET"
"""This variable tells torch's ``worker_main`` where to listen."""
LOG_LEVEL = "FLAGS_caffe2_log_level"
LOG_ERRORS = 2
"""Torch's log level for errors and worse."""


class ServerOffer:
    """Starts at most one server per process."""

    def __init__(self, *, has_room: Callable[[int], bool] | None = None) -> None:
        self._has_room = has_room or has_room_for
        self._started = False
        self._fd = -1
        self._path = Path()
        self._bound = Path()
        """Where the socket was created, which it keeps as its name."""
        self._ring: RingWriter | None = None

    @failsafe
    def open(self, ring: RingWriter, *, ranks_here: int) -> None:
        """Start the server; ``ranks_here``: processes of this machine that are likely to do the same right now."""
        _make_room_for_dumps()
        path = ring.path.with_suffix(SERVER_SUFFIX)
        if self._started or not _wanted() or len(os.fsencode(path)) >= MAX_PATH_BYTES:
            return
        torch: Any = sys.modules.get("torch")
        server = getattr(getattr(torch._C, "_distributed_c10d", None), "_WorkerServer", None)
        level = _log_level()
        if server is None or level is None or not self._has_room(ranks_here * (server_threads() + 1)):
            return
        self._started = True
        closed = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))  # mode 0700
        try:
            self._bound = closed / "s"
            with _raised(level):
                immortal(server(str(self._bound)))
            self._bound.chmod(_OWN)
            self._bound.replace(path)  # also replaces one of a process that had our pid before
        finally:
            self._bound.unlink(missing_ok=True)
            closed.rmdir()
        self._fd, self._path, self._ring = _listening(self._bound), path, ring
        ring.header[SERVER_WORD] = 1
        atexit.register(self.withdraw)

    @failsafe
    def withdraw(self) -> None:
        """Stop queries from the agent, and remove the socket file."""
        if self._ring is not None:
            self._ring.header[SERVER_WORD] = 0
            self._ring = None
            self._path.unlink(missing_ok=True)

    @failsafe
    def forget(self) -> None:
        """Close the socket, in a forked child, which has the socket and the object, but not the threads."""
        self._ring = None
        if self._fd >= 0 and _is_bound(self._fd, self._bound):
            os.close(self._fd)
        self._fd = -1
        self._started = False


@failsafe
def _make_room_for_dumps() -> None:
    """Create the folder for the dumps that NCCL's watchdog writes into the run (the launcher set torch's variable)."""
    run_dir = os.environ.get(ENV_RUN_DIR)
    if run_dir and os.environ.get(ENV_TORCH_DUMPS[0]) == nccl_dumps(Path(run_dir)):
        (Path(run_dir) / FLIGHT).mkdir(mode=folder_mode(Path(run_dir)), exist_ok=True)


def _wanted() -> bool:
    if os.environ.get(ENV_SERVER) == "0" or os.environ.get(OWN_SERVER):
        return False
    return getattr(sys.modules.get("torch.distributed.debug"), "_WORKER_SERVER", None) is None


def _log_level() -> ctypes.c_int | None:
    """Torch's log level in memory; None in a build that has it elsewhere."""
    try:
        library = ctypes.CDLL("libc10.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.c_int.in_dll(library, LOG_LEVEL)
    except (OSError, ValueError, AttributeError):
        return None


@contextmanager
def _raised(level: ctypes.c_int) -> Iterator[None]:
    before = level.value
    level.value = max(before, LOG_ERRORS)
    try:
        yield
    finally:
        level.value = before


def has_room_for(threads: int, cgroups: Sequence[int] | None = None) -> bool:
    """Whether this many more threads stay far from any limit: there must be room for twice as many.

    ``cgroups``: how many more tasks each control group may have; by default those of this process.
    """
    import resource

    if sys.platform != "linux":
        return False  # the limits elsewhere are unknown
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    in_all = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    limits = [_number(Path("/proc/sys/kernel") / name) for name in ("threads-max", "pid_max")]
    if os.geteuid():
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limits.append(None if soft == resource.RLIM_INFINITY else soft)
    rooms = [limit - in_all for limit in limits if limit is not None]
    return all(room >= 2 * threads for room in (*rooms, *(cgroup_rooms() if cgroups is None else cgroups)))


def cgroup_rooms(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """How many more tasks each of our control groups may have; groups without a limit are left out."""
    rooms = []
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        base = mounted / "pids" if controllers else mounted
        folder = base / inside.lstrip("/")
        for group in (folder, *folder.parents):
            most, now = _number(group / "pids.max"), _number(group / "pids.current")
            if most is not None and now is not None:
                rooms.append(most - now)
            if group == base:
                break
    return rooms


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max`` and if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _listening(path: Path) -> int:
    """The descriptor of the socket that is bound to ``path``; -1 if it is not found."""
    numbers = (int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
    return next((number for number in numbers if _is_bound(number, path)), -1)


def _is_bound(number: int, path: Path) -> bool:
    try:
        found = socket.socket(fileno=number)
    except OSError:
        return False
    try:
        return found.family == socket.AF_UNIX and found.getsockname() == str(path)
    except OSError:
        return False
    finally:
        found.detach()
