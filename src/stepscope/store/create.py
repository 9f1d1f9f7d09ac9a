"""Create a run: its directory, its session in memory, its ``run.json``.  The launcher imports it: keep it light."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RingNoSpace, RunUnwritable
from stepscope.records import run_clock
from stepscope.records.files import PRIVATE, folder_mode, make_session, take_folder
from stepscope.records.paths import ENV_USER, session_root
from stepscope.records.redaction import kept_environment, redact_command
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.text import TIME_IN_NAME, checked_name, default_name
from stepscope.store.documents import RUN_SCHEMA, write_meta
from stepscope.store.liveness import LeaseKeeper, Place, mark_session
from stepscope.store.paths import META

__all__ = ["RunPaths", "create_run", "create_run_at", "discard_run"]

FOLDERS = ("steps", "errors", "logs", "rings")


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The paths of a run."""

    name: str
    wanted: str
    """The requested name; differs from ``name`` if it was taken."""
    run_dir: Path
    session: Path
    """Folder of the rings on this node."""
    notices: tuple[str, ...] = ()
    """Lines for the user: a name that was taken, a session that is not in memory."""


def create_run(
    root: Path,
    name: str | None,
    command: Sequence[str],
    *,
    version: str = "",
    environ: Mapping[str, str] | None = None,
    sessions: Path | None = None,
    mode: int = PRIVATE,
    more: Mapping[str, Any] | None = None,
) -> RunPaths:
    """Make ``root/NAME`` and a session for it; RunUnwritable if the directory cannot be made.

    ``sessions`` is the folder of this user's sessions, by default in memory; ``mode`` is the mode of the run directory
    and decides who may read it; ``more`` is added to ``run.json``.
    """
    when = time.strftime(TIME_IN_NAME)
    wanted = checked_name(name) if name is not None else default_name(command, when)
    notices: list[str] = []
    try:
        run_dir = take_folder(root, wanted, mode=mode)
    except OSError as error:
        raise RunUnwritable(f"cannot create a run in {root}: {error.strerror}") from error
    if run_dir.name != wanted:
        notices.append(f"a run named {wanted} already exists; this one is named {run_dir.name}")
    session, problem = _make_session(run_dir, session_root() if sessions is None else sessions)
    if problem:
        notices.append(f"{problem}; the rings are kept in {session}")
    launcher = {"pid": os.getpid(), "start_ticks": process_start_ticks(os.getpid())}
    paths = RunPaths(name=run_dir.name, wanted=wanted, run_dir=run_dir, session=session, notices=tuple(notices))
    try:
        _begin(run_dir, session, command, version, os.environ if environ is None else environ, launcher, more)
    except RunUnwritable:
        discard_run(paths)
        raise
    return paths


def create_run_at(
    run_dir: Path,
    session: Path,
    command: Sequence[str],
    *,
    version: str = "",
    more: Mapping[str, Any] | None = None,
) -> RunPaths:
    """Make a run without a launcher, at paths that are chosen: by its ranks (``stepscope.init()``), or by a hub that
    receives it.  ``more`` is added to ``run.json``.
    """
    if (run_dir / META).exists():
        raise RunUnwritable(f"{run_dir} is already a run")
    try:
        run_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise RunUnwritable(f"cannot create {run_dir}: {error.strerror}") from error
    _begin(run_dir, session, command, version, os.environ, None, more)
    return RunPaths(name=run_dir.name, wanted=run_dir.name, run_dir=run_dir, session=session)


def discard_run(paths: RunPaths) -> None:
    """Remove a run that never began: its files could not be written, or its job could not be started."""
    shutil.rmtree(paths.run_dir, ignore_errors=True)
    shutil.rmtree(paths.session, ignore_errors=True)


def _begin(
    run_dir: Path,
    session: Path,
    command: Sequence[str],
    version: str,
    environ: Mapping[str, str],
    launcher: dict[str, int] | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    try:
        for folder in FOLDERS:
            (run_dir / folder).mkdir(mode=folder_mode(run_dir), exist_ok=True)
    except OSError as error:
        raise RunUnwritable(f"cannot create a folder in {run_dir}: {error.strerror}") from error
    spool = os.urandom(16).hex()
    meta = {
        "schema": RUN_SCHEMA,
        "name": run_dir.name,
        "command": redact_command(command),
        "cwd": str(Path.cwd()),
        **run_clock.begun(),
        "host": os.uname().nodename,
        "place": Place.here().to_dict(),
        "user": environ.get(ENV_USER) or environ.get("USER") or environ.get("LOGNAME") or str(os.getuid()),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": _platform(),
        "driver": _gpu_driver(),
        "file_system": _file_system(Path.cwd()),
        "stepscope": version,
        "environment": kept_environment(environ),
        "session": str(session),
        "spool": spool,
        "launcher": launcher,
        "sealed": False,
        "git": None,
        "end": None,
        **(more or {}),
    }
    # First, so that a reader sees an active lease from the run's first moment.
    LeaseKeeper(run_dir).renew()
    if session != run_dir / "rings":
        try:
            mark_session(session, spool)
        except OSError as error:
            raise RunUnwritable(f"cannot write to {session}: {error.strerror}") from error
    write_meta(run_dir, meta)


GPU_DRIVER = Path("/proc/driver/nvidia/version")
MOUNTS = Path("/proc/self/mounts")
_MOST_MOUNTS_BYTES = 1 << 20


def _gpu_driver(path: Path = GPU_DRIVER) -> str | None:
    """The version of NVIDIA's kernel module; None without one."""
    try:
        with path.open("rb") as file:
            words = file.readline(1000).decode(errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _file_system(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system that the job starts on (``ext4``, ``nfs4``, ``lustre``); None if not known."""
    try:
        with mounts.open("rb") as file:
            lines = file.read(_MOST_MOUNTS_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    found, deepest = None, 0
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        place = fields[1].replace("\\040", " ")
        if (folder == Path(place) or Path(place) in folder.parents) and len(place) >= deepest:
            found, deepest = fields[2], len(place)
    return found


def _platform() -> str:
    """The same as ``platform.platform()``, which starts a process for it: ``uname -p``."""
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        library = ""
    if not library:  # not glibc
        import platform

        return platform.platform()
    about = os.uname()
    return f"{about.sysname}-{about.release}-{about.machine}-with-{library.replace(' ', '')}"


def _make_session(run_dir: Path, base: Path) -> tuple[Path, str]:
    """Make a folder in memory that only we can enter, or return ``<run>/rings`` and the reason for it."""
    try:
        return make_session(base, os.urandom(8).hex()), ""
    except RingNoSpace as error:
        return run_dir / "rings", str(error)
