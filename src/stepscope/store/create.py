"""Begin a run: its directory, its session in memory, its ``run.json``.  The launcher calls this; it must stay light."""

from __future__ import annotations

import os
import platform
import re
import secrets
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import RunUnwritable, UsageError
from stepscope.records.places import session_root
from stepscope.ring.writer import process_start_ticks
from stepscope.store.meta import SCHEMA, write_meta
from stepscope.store.paths import META

__all__ = ["RunPaths", "create_run", "create_run_at", "select_environment"]

FOLDERS = ("steps", "errors", "logs", "rings")

ENV_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "GLOO_", "SLURM_", "OMP_", "MKL_", "PYTORCH_", "HIP_")
ENV_NAMES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
ENV_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_NAME = 200


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Where a run lives."""

    name: str
    wanted: str
    """The name that was asked for; another than ``name`` when that was taken."""
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
) -> RunPaths:
    """Make ``root/NAME`` and a session for it; RunUnwritable when the directory cannot be made.

    ``sessions`` is the folder of this user's sessions, in memory if not given.
    """
    wanted = _checked(name) if name is not None else _default_name(command)
    notices: list[str] = []
    try:
        run_dir = _take_folder(root, wanted)
    except OSError as error:
        raise RunUnwritable(f"cannot create a run in {root}: {error.strerror}") from error
    if run_dir.name != wanted:
        notices.append(f"a run named {wanted} exists already; this one is {run_dir.name}")
    session, problem = _make_session(run_dir, session_root() if sessions is None else sessions)
    if problem:
        notices.append(f"{problem}; the rings are kept in {session}")
    launcher = {"pid": os.getpid(), "start_ticks": process_start_ticks(os.getpid())}
    _begin(run_dir, session, command, version, os.environ if environ is None else environ, launcher)
    return RunPaths(name=run_dir.name, wanted=wanted, run_dir=run_dir, session=session, notices=tuple(notices))


def create_run_at(run_dir: Path, session: Path, command: Sequence[str], *, version: str = "") -> RunPaths:
    """Make a run whose ranks already chose its places (``stepscope.init()``); nobody launched it."""
    if (run_dir / META).exists():
        raise RunUnwritable(f"{run_dir} is a run already")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunUnwritable(f"cannot create {run_dir}: {error.strerror}") from error
    _begin(run_dir, session, command, version, os.environ, None)
    return RunPaths(name=run_dir.name, wanted=run_dir.name, run_dir=run_dir, session=session)


def _begin(
    run_dir: Path,
    session: Path,
    command: Sequence[str],
    version: str,
    environ: Mapping[str, str],
    launcher: dict[str, int] | None,
) -> None:
    try:
        for folder in FOLDERS:
            (run_dir / folder).mkdir(exist_ok=True)
    except OSError as error:
        raise RunUnwritable(f"cannot create a folder in {run_dir}: {error.strerror}") from error
    meta = {
        "schema": SCHEMA,
        "name": run_dir.name,
        "command": list(command),
        "cwd": str(Path.cwd()),
        "created_wall_ns": time.time_ns(),
        "host": platform.node(),
        "user": environ.get("USER") or environ.get("LOGNAME") or str(os.getuid()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "stepscope": version,
        "environment": select_environment(environ),
        "session": str(session),
        "launcher": launcher,
        "sealed": False,
        "git": None,
        "end": None,
    }
    write_meta(run_dir, meta)


def select_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the environment explains a run; never what looks like a secret."""
    return {
        key: environ[key]
        for key in sorted(environ)
        if (key.startswith(ENV_PREFIXES) or key in ENV_NAMES) and not any(word in key.upper() for word in ENV_SECRET)
    }


def _checked(name: str) -> str:
    if not name or name.startswith(".") or len(name) > _MAX_NAME or any(c == "/" or not c.isprintable() for c in name):
        raise UsageError(f"{name!r} cannot name a run: it must be a plain folder name")
    return name


def _default_name(command: Sequence[str]) -> str:
    """The script's stem and the local time; enough to find last night's run."""
    script = next((Path(word).stem for word in command if word.endswith(".py")), "")
    if not script and "-m" in command[:-1]:
        script = command[list(command).index("-m") + 1].rpartition(".")[2]
    stem = _UNSAFE.sub("-", script or Path(command[0] if command else "run").stem).strip("-.") or "run"
    return f"{stem[:_MAX_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}"


def _take_folder(root: Path, wanted: str) -> Path:
    """Make the first of NAME, NAME-2, NAME-3 … that is free; two launchers at once get two folders."""
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        run_dir = root.resolve() / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run_dir


def _make_session(run_dir: Path, base: Path) -> tuple[Path, str]:
    """A folder in memory that only we can enter, or ``<run>/rings`` and the reason for it."""
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_MAY_WRITE:
            return run_dir / "rings", f"{base} is not a folder of ours alone"
        session = base / secrets.token_hex(8)
        session.mkdir(mode=0o700)
    except OSError as error:
        return run_dir / "rings", f"{base} cannot be used ({error.strerror})"
    return session, ""
