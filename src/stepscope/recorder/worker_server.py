"""Torch's own worker server, started in jobs of several ranks, so that the agent can ask a rank from outside.

The server answers over a Unix socket beside the ring, from native threads and without the GIL: what the Flight Recorder
knows can be had even of a rank whose Python is stuck.  The agent asks a job that stands still, or in which a rank died;
on NCCL it also reads the Flight Recorder now and then while the job trains (``agent/flight_reader.py``), since nothing
else knows how long collectives take.  The server is the one thing of ours
that adds threads to a training process; they sleep until they are asked.  What has to be known about it:

- It has a pool of threads, as many as the machine has cores and eight at least.  Should one of them not come into
  being, torch ends the process: where a limit on threads or on address space could be near, there is no server.
- It says on the error output that it listens.  That line is held back by raising torch's log level for the call.
- It is never shut down.  Shutting down joins a thread, for ever if that one had not got to listening yet, or if this is
  a forked child, which has no such thread.  So it is made immortal (``recorder/guard.py``) and at the end only its
  door is closed: threads that sleep do not keep a process from ending.
- A forked child closes the socket it inherited; ``exec`` closes it by itself.
- Only the user may connect.  The folder of the ring may be open to others (it is in the run directory when somebody
  else has taken the session's name), and torch makes the socket with whatever mode the umask gives.  So it is made in a
  fresh folder that nobody else can enter, closed, and then moved beside the ring.  The umask itself is left alone: it
  belongs to the whole process, whose other threads may be making files at this moment.
- A worker server that the script itself set up is a sign that somebody else asks; then there is none of ours.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
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

__all__ = ["ServerOffer"]

MAX_PATH_BYTES = 100
"""A socket's path has room for 107; the folder in which it is made has a name about as long as its own."""
_OWN = 0o600
OWN_SERVER = "TORCH_WORKER_SERVER_SOCKET"
"""By this variable torch's ``worker_main`` is told where to listen."""
LOG_LEVEL = "FLAGS_caffe2_log_level"
LOG_ERRORS = 2
"""Of torch's log levels: errors and what is worse."""


class ServerOffer:
    """At most one server in the life of a process."""

    def __init__(self) -> None:
        self._started = False
        self._fd = -1
        self._path = Path()
        self._bound = Path()
        """Where the socket was made, which is what it goes on to call itself."""
        self._ring: RingWriter | None = None

    @failsafe
    def open(self, ring: RingWriter, *, ranks_here: int) -> None:
        """``ranks_here``: how many processes of this machine are likely to do the same at this moment."""
        _make_room_for_dumps()
        path = ring.path.with_suffix(SERVER_SUFFIX)
        if self._started or not _wanted() or len(os.fsencode(path)) >= MAX_PATH_BYTES:
            return
        torch: Any = sys.modules.get("torch")
        server = getattr(getattr(torch._C, "_distributed_c10d", None), "_WorkerServer", None)
        level = _log_level()
        if server is None or level is None or not _room_for(ranks_here * (server_threads() + 1)):
            return
        self._started = True
        closed = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))  # mode 0700
        try:
            self._bound = closed / "s"
            with _raised(level):
                immortal(server(str(self._bound)))
            self._bound.chmod(_OWN)
            self._bound.replace(path)  # also over one of a process that had our number before
        finally:
            self._bound.unlink(missing_ok=True)
            closed.rmdir()
        self._fd, self._path, self._ring = _listening(self._bound), path, ring
        ring.header[SERVER_WORD] = 1
        atexit.register(self.withdraw)

    @failsafe
    def withdraw(self) -> None:
        """From here on nobody asks; who does it nevertheless finds no door."""
        if self._ring is not None:
            self._ring.header[SERVER_WORD] = 0
            self._ring = None
            self._path.unlink(missing_ok=True)

    @failsafe
    def forget(self) -> None:
        """In a forked child, which has the socket and the object, but not the threads."""
        self._ring = None
        if self._fd >= 0 and _is_bound(self._fd, self._bound):
            os.close(self._fd)
        self._fd = -1
        self._started = False


@failsafe
def _make_room_for_dumps() -> None:
    """NCCL's watchdog writes its dumps into the run (the launcher told torch so) and makes no folder for them."""
    run_dir = os.environ.get(ENV_RUN_DIR)
    if run_dir and os.environ.get(ENV_TORCH_DUMPS[0]) == nccl_dumps(Path(run_dir)):
        (Path(run_dir) / FLIGHT).mkdir(mode=folder_mode(Path(run_dir)), exist_ok=True)


def _wanted() -> bool:
    if os.environ.get(ENV_SERVER) == "0" or os.environ.get(OWN_SERVER):
        return False
    return getattr(sys.modules.get("torch.distributed.debug"), "_WORKER_SERVER", None) is None


def _log_level() -> ctypes.c_int | None:
    """Torch's log level as it stands in memory; None in a build that has it elsewhere."""
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


def _room_for(threads: int) -> bool:
    """Whether so many more threads are far from any limit: twice as many would do."""
    import resource

    if sys.platform != "linux":
        return False  # nobody has looked at the limits elsewhere
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    in_all = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    limits = [_number(Path("/proc/sys/kernel") / name) for name in ("threads-max", "pid_max")]
    if os.geteuid():
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limits.append(None if soft == resource.RLIM_INFINITY else soft)
    rooms = [limit - in_all for limit in limits if limit is not None]
    return all(room >= 2 * threads for room in [*rooms, *_cgroup_rooms()])


def _cgroup_rooms(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """How many more tasks each control group that we are in may have; none where nobody limits it."""
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
    """A file that holds one; None for ``max`` and where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _listening(path: Path) -> int:
    """The descriptor of the socket that is bound to ``path``; -1 if it is not to be found."""
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
