"""Whether a run is still active: its lease, its processes, its session, and whether anyone is watching it.

The lease is a file in the run directory that says which process records the run, and that it still does:

    runs/NAME/lease.json      written when the run begins, then every few seconds by the agent

Only a process in the same PID namespace on the same machine can look up the run's processes.  Everyone else (another
container, a login node on the same file system) sees only the lease.  While it is renewed, the run is active, and
remote readers write nothing.

The file is overwritten in place and closed each time.  Network file systems guarantee that a reader who opens a file
sees what was written before it was closed; they do not guarantee it for a file that was renamed into place.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RingError
from stepscope.records import run_clock
from stepscope.records.paths import BESIDE_RING, PRINTED_SUFFIX, RING_SUFFIX, SESSION_LOCK, SESSION_RUN
from stepscope.records.run_clock import boot_id, process_start_ticks
from stepscope.records.text import Progress, duration_text, no_progress
from stepscope.store import file_io
from stepscope.store.documents import NodeInfo, read_meta, read_nodes
from stepscope.store.file_io import read_jsonl
from stepscope.store.paths import EVENTS

__all__ = [
    "LEASE",
    "SILENT_S",
    "Lease",
    "LeaseKeeper",
    "Place",
    "agent_alive",
    "clock_ahead_s",
    "is_local",
    "is_watched",
    "launcher_alive",
    "mark_session",
    "mark_watched",
    "node_silent",
    "process_alive",
    "processes_alive",
    "read_lease",
    "remove_session",
    "ring_files",
    "sealing_barred",
    "session_of",
]


# -- lease ------------------------------------------------------------------------------------------------------------

LEASE = "lease.json"
RENEW_S = 5.0
SILENT_S = 60.0
"""A remote run whose lease is older than this is shown as no longer active …"""
ABANDONED_S = 600.0
"""… and one whose lease is older than this may be sealed from another machine …"""
WATCH_S = 4 * RENEW_S
"""… if the lease is not renewed while we watch it this long: the clocks of two machines may be far apart."""
APART_S = 60.0
"""A lease dated this far in the future has no known age: its clock is ahead of ours, or ours was set back."""
_BYTES = 1024
"""The file size never changes, so a reader never finds the tail of an older text."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where process ids mean the same: one boot of one machine, one PID namespace."""

    host: str
    boot: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Place:
        return cls(host=os.uname().nodename, boot=boot_id(), pid_namespace=_pid_namespace())

    @classmethod
    def of_run(cls, meta: Mapping[str, Any]) -> Place | None:
        """Read the place from ``run.json``; None if it is missing."""
        place = meta.get("place")
        if not isinstance(place, Mapping):
            return None
        return cls(**{name: str(place.get(name, "")) for name in ("host", "boot", "pid_namespace")})

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Lease:
    boot: str
    pid: int
    renewed: int
    """Number of renewals; any change means that the run is being recorded."""
    mono_ns: int
    wall_ns: int

    def age_s(self) -> float:
        """Return the age, by the shared monotonic clock if any; else a clock behind ours makes it look older."""
        if self.boot and self.boot == boot_id():
            return (time.monotonic_ns() - self.mono_ns) / 1e9
        return (time.time_ns() - self.wall_ns) / 1e9


class LeaseKeeper:
    """Renews the lease of a run when it is due; a failed write is retried the next time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEASE
        self._renewed = 0
        self._last_s = float("-inf")
        self._who = {"host": os.uname().nodename, "boot": boot_id(), "pid_namespace": _pid_namespace()}

    def renew(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < RENEW_S:
            return
        self._last_s = now_s
        self._renewed += 1
        pid = os.getpid()
        document = {
            **self._who,
            "pid": pid,
            "start_ticks": process_start_ticks(pid),
            "renewed": self._renewed,
            "mono_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
        }
        with suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, json.dumps(document).encode().ljust(_BYTES - 1) + b"\n", 0)
            finally:
                os.close(fd)


def read_lease(run_dir: Path) -> Lease | None:
    """Read the lease; None if it is missing or was being written at this moment."""
    try:
        fd = os.open(run_dir / LEASE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        document = json.loads(os.read(fd, _BYTES))
        numbers = {name: int(document[name]) for name in ("pid", "renewed", "mono_ns", "wall_ns")}
        return Lease(boot=str(document["boot"]), **numbers)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    finally:
        os.close(fd)


def is_local(meta: Mapping[str, Any]) -> bool:
    """Whether the run's processes can be looked up from here."""
    place = Place.of_run(meta)
    return place == Place.here() if place is not None else meta.get("host") == os.uname().nodename


def sealing_barred(
    run_dir: Path,
    meta: Mapping[str, Any],
    *,
    progress: Progress = no_progress,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Return why a run recorded elsewhere must not be changed; None if it is local or long abandoned.

    A lease that looks old is watched for WATCH_S.  A lease dated in the future is watched for ABANDONED_S: that is the
    only way to determine its age, and an active recorder renews it long before that.
    """
    if meta.get("sealed") is True or is_local(meta):
        return None
    place = Place.of_run(meta)
    host = place.host if place is not None else str(meta.get("host"))
    where = "in another container" if place is not None and place.boot == boot_id() else f"on {host}"
    first = read_lease(run_dir)
    if first is None and meta.get("end") is not None and not _may_exist(run_dir / LEASE):
        return None
    age_s = _age_s(run_dir, first)
    if -APART_S < age_s < ABANDONED_S:
        return f"it is being recorded {where}; last write {duration_text(age_s, whole=True)} ago"
    watch_s = int(WATCH_S if age_s >= 0 else ABANDONED_S)
    changed_ns = _changed_ns(run_dir)
    for second in range(watch_s):
        progress(second, watch_s)
        sleep(1.0)
        if read_lease(run_dir) != first or (first is None and _changed_ns(run_dir) != changed_ns):
            ahead = f"; {_ahead(-age_s)}" if age_s < 0 else ""
            return f"it is still being recorded {where}{ahead}"
    return None


def clock_ahead_s(run_dir: Path, meta: Mapping[str, Any]) -> float:
    """Return how far in the future, by our clock, a remote run was last written to; 0 if it was not.

    Only watching such a run shows whether it is still active (``sealing_barred``).
    """
    if meta.get("sealed") is True or is_local(meta):
        return 0.0
    age_s = _age_s(run_dir, read_lease(run_dir))
    return -age_s if age_s <= -APART_S else 0.0


def _age_s(run_dir: Path, lease: Lease | None) -> float:
    """Return how long ago a run was written to; without a lease, according to the file system."""
    if lease is not None:
        return lease.age_s()
    changed_ns = _changed_ns(run_dir)
    return 0.0 if changed_ns is None else (time.time_ns() - changed_ns) / 1e9


def _may_exist(path: Path) -> bool:
    """Whether the file exists or may exist: a file server error (EIO, ESTALE) proves nothing."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _changed_ns(run_dir: Path) -> int | None:
    try:
        return max(path.stat().st_mtime_ns for path in (run_dir, *run_dir.iterdir()))
    except OSError:
        return None


def _ahead(seconds: float) -> str:
    return f"its clock is {duration_text(seconds)} ahead of this one; check the time on both machines"


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


# -- session ----------------------------------------------------------------------------------------------------------
# The folder in memory that holds a run's rings on this node.  ``run.json`` names it, and may come from an untrusted
# source.  Each session therefore contains a file that names its run; a folder without that file is neither read nor
# cleaned up.


def mark_session(session: Path, spool: str) -> None:
    """Record which run the session belongs to: ``spool`` is the run's random id."""
    file_io.write_bytes(session / SESSION_RUN, spool.encode())


def session_of(run_dir: Path, meta: Mapping[str, Any]) -> Path | None:
    """Return the run's session; None if it is gone, as after a reboot, or belongs to another run."""
    path, spool = meta.get("session"), meta.get("spool")
    if not isinstance(path, str) or not path or not isinstance(spool, str) or not spool:
        return None
    session = Path(path)
    if session == run_dir / "rings":
        return session
    try:
        folder = os.open(session, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        mark = os.open(SESSION_RUN, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            about = os.fstat(mark)
            ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.fstat(folder).st_uid == os.geteuid()
            return session if ours and os.read(mark, 256) == spool.encode() else None
        finally:
            os.close(mark)
    except OSError:
        return None
    finally:
        os.close(folder)


def remove_session(session: Path) -> None:
    """Remove a session's folder if no ring is left in it."""
    with suppress(OSError, ValueError):
        if not any(path.suffix == RING_SUFFIX for path in session.iterdir()):
            for left in [path for path in session.iterdir() if path.suffix in (*BESIDE_RING, PRINTED_SUFFIX)]:
                left.unlink(missing_ok=True)
            (session / SESSION_LOCK).unlink(missing_ok=True)
            (session / SESSION_RUN).unlink(missing_ok=True)
            session.rmdir()


def ring_files(run_dir: Path, meta: Mapping[str, Any]) -> list[Path]:
    """Return all ring files of the run on this machine, in memory or on disk."""
    session = session_of(run_dir, meta)
    folders = {run_dir / "rings", *(() if session is None else (session,))}
    found: list[Path] = []
    for folder in sorted(folders):
        with suppress(OSError):
            found += sorted(path for path in folder.iterdir() if path.suffix == RING_SUFFIX)
    return found


# -- processes --------------------------------------------------------------------------------------------------------
# A process is identified by its pid and its start time, since pids are reused.  For processes on other machines and in
# other containers we only know when they were last heard from.

REMOTE_SILENCE_S = SILENT_S
"""A process on another machine that was silent for this long counts as gone."""


def process_alive(pid: int, start_ticks: int) -> bool:
    """Whether exactly that process still runs; a zombie does not.  ``start_ticks`` 0 means unknown."""
    if pid <= 0:
        return False
    proc = Path("/proc/self/stat")
    if not proc.exists():
        return _signal_reaches(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    if stat.rpartition(b")")[2].split()[0] in (b"Z", b"X"):
        return False
    return not start_ticks or process_start_ticks(pid) == start_ticks


def processes_alive(run_dir: Path) -> bool:
    """Whether a rank, the agent, or a launcher that has not reported its end still runs.

    The calling process does not count.
    """
    from stepscope.ring import RingReader  # the launcher loads this module, and asks only when the job is over
    from stepscope.store.live.ring_files import read_sidecars

    meta = read_meta(run_dir)
    if not is_local(meta):
        lease = read_lease(run_dir)
        return lease is not None and lease.age_s() < REMOTE_SILENCE_S and meta.get("sealed") is not True
    here, now_ns = os.uname().nodename, run_clock.now_of(meta)
    if meta.get("end") is None and _launcher_pid(meta) != os.getpid() and launcher_alive(meta):
        return True
    for sidecar in read_sidecars(run_dir)[0].values():
        if sidecar.ended_wall_ns is not None:
            continue
        if sidecar.identity.host == here:
            if _other_alive(sidecar.pid, sidecar.start_ticks):
                return True
        elif meta.get("end") is None and now_ns - sidecar.heard_wall_ns < REMOTE_SILENCE_S * 1e9:
            return True
    others = [node for node in read_nodes(run_dir) if node.spool != meta.get("spool")]
    if meta.get("end") is None and not all(node.bye is not None or node_silent(node, now_ns) for node in others):
        return True
    for path in ring_files(run_dir, meta):
        try:
            reader = RingReader(path)
        except (RingError, OSError):
            continue
        header = reader.header()
        reader.close()
        if _other_alive(header.pid, header.start_ticks):
            return True
    try:
        return agent_alive(read_jsonl(run_dir / EVENTS)[0]) is True
    except OSError:
        return False  # not one of our files; loading the run reports it


def node_silent(node: NodeInfo, now_ns: int) -> bool:
    """Whether another node has been silent long enough, by the run's clock, to count as gone."""
    return now_ns - node.heard_wall_ns >= REMOTE_SILENCE_S * 1e9


def agent_alive(events: list[dict[str, Any]]) -> bool | None:
    """State of the last started agent: True it runs, False it died, None it ended normally or never started."""
    last = next((e for e in reversed(events) if e.get("event") in ("agent_start", "agent_end")), None)
    if last is None or last["event"] == "agent_end":
        return None
    if last.get("host") != os.uname().nodename:
        return False
    return _other_alive(_integer(last.get("pid")), _integer(last.get("start_ticks")))


def launcher_alive(meta: dict[str, Any]) -> bool:
    launcher = meta.get("launcher")
    if not isinstance(launcher, dict) or not is_local(meta):
        return False
    return process_alive(_launcher_pid(meta), _integer(launcher.get("start_ticks")))


def _launcher_pid(meta: dict[str, Any]) -> int:
    launcher = meta.get("launcher")
    return _integer(launcher.get("pid")) if isinstance(launcher, dict) else 0


def _other_alive(pid: int, start_ticks: int) -> bool:
    return pid != os.getpid() and process_alive(pid, start_ticks)


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _signal_reaches(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# -- watched runs -----------------------------------------------------------------------------------------------------
# While someone watches a run on this machine, its agent writes records immediately.  A hub that gets a request for a
# run touches the folder of its rings, and the agent reads that time.  No file is created that would need cleanup.  A
# new ring touches the folder too, so a job's first steps appear quickly.  Standard library only.

WATCHED_S = 10.0
"""How long a run counts as watched after the last request; followers ask at least every five seconds."""


def mark_watched(session: Path) -> None:
    """Touch the session; a missing one is ignored."""
    with suppress(OSError, ValueError):
        os.utime(session)


def is_watched(session: Path) -> bool:
    try:
        touched_s = session.stat().st_mtime
    except OSError:
        return False
    return abs(time.time() - touched_s) < WATCHED_S
