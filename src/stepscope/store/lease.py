"""The lease: a file in the run directory that says who records the run and that he is still at it.

    runs/NAME/lease.json      written when the run begins, then every few seconds by the agent

A process can be looked up only by its own machine and PID namespace.  Everybody else (another container, a login node
that sees the same file system) knows the run by its lease alone: as long as that is renewed, the run goes on, and
whoever reads it from there writes nothing.

The file is overwritten in place and closed each time.  Network file systems promise that a reader who opens a file
sees what was written before it was closed; they do not promise it for a file that was renamed into its place.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.records.progress import Progress, unheard
from stepscope.records.run_clock import boot_id
from stepscope.records.units import duration_text
from stepscope.ring.writer import process_start_ticks

__all__ = [
    "LEASE",
    "SILENT_S",
    "Lease",
    "LeaseKeeper",
    "Place",
    "clock_ahead_s",
    "is_local",
    "read_lease",
    "sealing_barred",
]

LEASE = "lease.json"
RENEW_S = 5.0
SILENT_S = 60.0
"""A run elsewhere whose lease is older is shown as one that does not go on …"""
ABANDONED_S = 600.0
"""… and one whose lease is as old as this may be sealed from elsewhere …"""
WATCH_S = 4 * RENEW_S
"""… if nobody renews it while we watch for so long: the clocks of two machines may be far apart."""
APART_S = 60.0
"""A lease dated this far in the future says nothing of its age: its clock is ahead of ours, or ours was set back."""
_BYTES = 1024
"""The file never changes its size, so that a reader never finds the end of an older text."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where process numbers mean the same: one boot of one machine, one PID namespace of it."""

    host: str
    boot: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Place:
        return cls(host=platform.node(), boot=boot_id(), pid_namespace=_pid_namespace())

    @classmethod
    def of_run(cls, meta: Mapping[str, Any]) -> Place | None:
        """None: ``run.json`` does not say."""
        said = meta.get("place")
        if not isinstance(said, Mapping):
            return None
        return cls(**{name: str(said.get(name, "")) for name in ("host", "boot", "pid_namespace")})

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Lease:
    boot: str
    pid: int
    renewed: int
    """How often; any change says that somebody is there."""
    mono_ns: int
    wall_ns: int

    def age_s(self) -> float:
        """By the clock that both share, if they do; a clock that is behind ours makes it look older."""
        if self.boot and self.boot == boot_id():
            return (time.monotonic_ns() - self.mono_ns) / 1e9
        return (time.time_ns() - self.wall_ns) / 1e9


class LeaseKeeper:
    """Renews the lease of a run when it is time; what the disk refuses is tried again the next time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LEASE
        self._renewed = 0
        self._last_s = float("-inf")
        self._who = {"host": platform.node(), "boot": boot_id(), "pid_namespace": _pid_namespace()}

    def renew(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < RENEW_S:
            return
        self._last_s = now_s
        self._renewed += 1
        pid = os.getpid()
        said = {
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
                os.pwrite(fd, json.dumps(said).encode().ljust(_BYTES - 1) + b"\n", 0)
            finally:
                os.close(fd)


def read_lease(run_dir: Path) -> Lease | None:
    """None where there is none, or one that was being written in this very moment."""
    try:
        fd = os.open(run_dir / LEASE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        said = json.loads(os.read(fd, _BYTES))
        numbers = {name: int(said[name]) for name in ("pid", "renewed", "mono_ns", "wall_ns")}
        return Lease(boot=str(said["boot"]), **numbers)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    finally:
        os.close(fd)


def is_local(meta: Mapping[str, Any]) -> bool:
    """Whether the processes of a run can be looked up from here."""
    place = Place.of_run(meta)
    return place == Place.here() if place is not None else meta.get("host") == platform.node()


def sealing_barred(
    run_dir: Path,
    meta: Mapping[str, Any],
    *,
    progress: Progress = unheard,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Why a run that is not recorded from here must be left as it is; None: it is from here, or long abandoned.

    A lease that looks old is watched for WATCH_S; one that is dated in the future, for as long as it would have to be
    old: that is the one way to know its age, and whoever records the run renews it long before.
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
        return f"it is recorded {where}, and was written to {max(0.0, age_s):.0f} s ago"
    watch_s = int(WATCH_S if age_s >= 0 else ABANDONED_S)
    changed_ns = _changed_ns(run_dir)
    for second in range(watch_s):
        progress(second, watch_s)
        sleep(1.0)
        if read_lease(run_dir) != first or (first is None and _changed_ns(run_dir) != changed_ns):
            ahead = f"; {_ahead(-age_s)}" if age_s < 0 else ""
            return f"it is recorded {where}, and still being written to{ahead}"
    return None


def clock_ahead_s(run_dir: Path, meta: Mapping[str, Any]) -> float:
    """How far in the future a run elsewhere was last written to, by our clock; 0: it was not.

    Whether such a run goes on can be told only by watching it (``sealing_barred``).
    """
    if meta.get("sealed") is True or is_local(meta):
        return 0.0
    age_s = _age_s(run_dir, read_lease(run_dir))
    return -age_s if age_s <= -APART_S else 0.0


def _age_s(run_dir: Path, lease: Lease | None) -> float:
    """How long ago a run was written to; one without a lease, by the file system's account."""
    if lease is not None:
        return lease.age_s()
    changed_ns = _changed_ns(run_dir)
    return 0.0 if changed_ns is None else (time.time_ns() - changed_ns) / 1e9


def _may_exist(path: Path) -> bool:
    """A file server that does not answer (EIO, ESTALE) says nothing."""
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
    return f"its clock is {duration_text(seconds)} ahead of this one: check the time of day of both machines"


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
