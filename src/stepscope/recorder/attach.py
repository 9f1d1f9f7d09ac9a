"""``stepscope.init()`` without ``stepscope run``: the ranks of one launcher find each other and start one agent.

Nobody hands the ranks a run directory here.  All processes of one launcher share their parent, and a parent's pid and
start time name a session that no other job on the node has.  Whoever gets the lock in there chooses the run directory
and the run's clock, writes both into the lock file and starts ``stepscope attach``, which inherits the lock and becomes
the agent; the others read the file.  The lock goes with the agent, however that dies, so the next rank that comes
starts another.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from stepscope.errors import RingNoSpace, StepscopeError
from stepscope.recorder import bootstrap
from stepscope.recorder.guard import warn
from stepscope.recorder.identity import rank_from
from stepscope.records.naming import TIME_IN_NAME, checked_name, default_name
from stepscope.records.places import (
    ENV_CLOCK,
    ENV_RUN_DIR,
    ENV_SESSION,
    SESSION_LOCK,
    helper_command,
    helper_environment,
    session_root,
    timed_collectives,
)
from stepscope.records.run_clock import clock_now
from stepscope.ring.folders import make_session, take_folder
from stepscope.ring.writer import process_start_ticks

__all__ = ["attach"]

PATIENCE_S = 10.0
"""How long the rank with the lock may take to say where the run is; it needs a millisecond."""


def attach(name: str | None, runs: Path) -> None:
    """Record this process in the run of its launcher's ranks; it goes on unrecorded when that cannot be."""
    try:
        session, run_dir, clock = _meet(name, runs)
    except (StepscopeError, OSError) as error:
        reason = f"cannot create a run in {runs}: {error.strerror}" if isinstance(error, OSError) else error
        warn(f"this process is not recorded: {reason}")
        return
    os.environ[ENV_SESSION] = str(session)
    os.environ[ENV_RUN_DIR] = str(run_dir)
    os.environ[ENV_CLOCK] = clock
    os.environ.update(timed_collectives(os.environ))
    bootstrap.start_from_environment()


def _meet(name: str | None, runs: Path) -> tuple[Path, Path, str]:
    """The session, the run directory and the clock of this job."""
    deadline = time.monotonic() + PATIENCE_S
    owner = os.getpid() if rank_from(os.environ) is None else os.getppid()
    while time.monotonic() < deadline:
        session = _session(f"{owner}-{process_start_ticks(owner)}")
        path = session / SESSION_LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the agent of an earlier job removed the session under our eyes
        try:
            first = _locked(lock)
            if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
                continue
            said = _said(lock)
            if first:
                try:
                    said = _begin(lock, said, session, name, runs)
                except (StepscopeError, OSError):
                    path.unlink()
                    session.rmdir()
                    raise
            if said is not None:
                return session, *said
        finally:
            os.close(lock)
        time.sleep(0.01)
    raise RingNoSpace(f"the other ranks do not say where their run is ({path})")


def _session(name: str) -> Path:
    """In memory; on disk when that is not to be had."""
    try:
        return make_session(session_root(), name, exist_ok=True)
    except RingNoSpace:
        return make_session(Path(tempfile.gettempdir()) / session_root().name, name, exist_ok=True)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _said(lock: int) -> tuple[Path, str] | None:
    """The run directory, and its clock as ``ENV_CLOCK`` says it."""
    text = os.pread(lock, 1 << 16, 0)
    clock, _, run_dir = text[:-1].partition(b"\n")
    return (Path(os.fsdecode(run_dir)), os.fsdecode(clock)) if text.endswith(b"\n") else None


def _begin(
    lock: int, earlier: tuple[Path, str] | None, session: Path, name: str | None, runs: Path
) -> tuple[Path, str]:
    """Go on with the run of an agent that died, or begin one; and start an agent for it."""
    if earlier is None or _over(earlier[0]):
        wanted = default_name(sys.argv, time.strftime(TIME_IN_NAME)) if name is None else checked_name(name)
        run_dir = take_folder(runs, wanted)
        os.ftruncate(lock, 0)
        clock = clock_now()
        os.pwrite(lock, b"%s\n%s\n" % (os.fsencode(clock), os.fsencode(run_dir)), 0)
        if name is not None and run_dir.name != name:
            warn(f"a run named {name} exists already; this one is {run_dir.name}")
        warn(f"recording to {run_dir}")
    else:
        run_dir, clock = earlier
    _start_agent(lock, session, run_dir, clock)
    return run_dir, clock


def _over(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "run.json").read_bytes())["sealed"])
    except (OSError, ValueError, LookupError, TypeError):
        return True


def _start_agent(lock: int, session: Path, run_dir: Path, clock: str) -> None:
    # torchrun starts its ranks again when one fails: the agent stays as long as torchrun does.
    owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    words = ("--owner", str(owner), "--session", str(session), "--run-dir", str(run_dir), "--", *sys.orig_argv)
    agent = helper_command("stepscope", "attach", *words)
    # By way of a shell that ends at once: a script that waits for its children must not meet one that is not its own.
    # The agent's input is the lock: there is nothing to read in it, and it is held for as long as the agent lives.
    # Who reads our output through a pipe must not have to wait for the agent's end; a terminal does not wait.
    silent = "" if os.isatty(2) else "2>/dev/null"
    shell = ["/bin/sh", "-c", f'"$@" <&3 >/dev/null {silent} &', "stepscope", *agent]
    files = [(os.POSIX_SPAWN_DUP2, lock, 3)]
    # A session of its own: the terminal's Ctrl-C and the launcher's kill of its process group are not for the agent.
    environment = {**helper_environment(os.environ), ENV_CLOCK: clock}
    pid = os.posix_spawn(shell[0], shell, environment, file_actions=files, setsid=True)
    os.waitpid(pid, 0)
